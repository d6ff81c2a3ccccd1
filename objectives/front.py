"""Several objectives at once: which points no other one beats, and where the knee of that front is. Pure.

Points are rows of log values turned so that larger is better, shape (n, objectives): a step up by 0.1 is a gain of 10 %.
"""

from __future__ import annotations

from collections.abc import Sequence

Point = Sequence[float]


def front(points: Sequence[Point], *, noise: float = 0.0) -> list[int]:
    """Positions of the points that no other one beats, in order: one that is better by more than ``noise`` in something and
    worse by no more than it in anything. (Each such step raises the sum, so there is always a member.)"""
    return [i for i, one in enumerate(points) if not any(_beats(other, one, noise) for other in points)]


def _beats(one: Point, other: Point, noise: float) -> bool:
    steps = [a - b for a, b in zip(one, other, strict=True)]
    return all(step >= -noise for step in steps) and any(step > noise for step in steps)


def knee_order(points: Sequence[Point]) -> list[int]:
    """Positions of all ``points``, the knee of their front first, then by how near they come to it.

    The front is normalised to the unit square. Its two ends then lie on the line x + y = 1, and the distance of a point to
    that chord grows with x + y: the knee is the point of the front that is farthest above it. Sources: Das, On
    characterizing the "knee" of the Pareto curve, Structural Optimization 18 (1999); Branke, Deb, Dierolf and Osswald, Finding
    knees in multi-objective optimization, PPSN (2004). A front without extent in an objective (one point, or equal ones)
    leaves that objective's values as they are. Where several are equally far, as the ends of a front of two are, the sum of
    the logarithms decides: the larger product of gains.
    """
    if not points:
        return []
    best = set(front(points))
    members = [points[i] for i in sorted(best)]
    lows = [min(values) for values in zip(*members, strict=True)]
    spans = [max(values) - low or 1.0 for low, values in zip(lows, zip(*members, strict=True), strict=True)]

    def height(point: Point) -> float:
        return round(float(sum((value - low) / span for value, low, span in zip(point, lows, spans, strict=True))), 9)

    return sorted(range(len(points)), key=lambda i: (i not in best, -height(points[i]), -sum(points[i])))
