"""Which parameters moved the goal's metric, estimated from the few starts of a search. Pure.

A search of a dozen starts that follows its own good luck cannot be ranked by who was in the better half: what the sampler kept
switched on is in good and bad starts alike. So the effects themselves are estimated. The logarithm of the metric is taken as a
sum of one effect for each parameter, counted from the baseline's value, plus noise; every set of up to ``MOST_TOGETHER``
parameters is one explanation, weighed by how probable it makes the figures (Bayesian model averaging over subsets, Hoeting,
Madigan, Raftery, Volinsky, Statistical Science 14, 1999). An explanation pays for each parameter that it uses, so one that does
nothing earns next to no credit, and a start that differs from the baseline in one parameter alone counts as what it is: a
direct comparison. A parameter's share is what the variance of its effects over the starts is of the sum of these variances.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vopt.optimizer.history import Stage, StudyRecord, TrialRecord
from vopt.optimizer.recommend import Importance
from vopt.optimizer.report import wording
from vopt.optimizer.report.view import StudyView
from vopt.optimizer.report.wording import TOGETHER

Floats = NDArray[np.float64]

FEWEST_STARTS = 6
"""Below this many feasible starts a share would be noise with a percent sign."""
MOST_TOGETHER = 4
"""Parameters of one explanation: a dozen starts cannot carry more."""
MOST_WEIGHED = 9
"""Parameters whose sets are weighed; of more, those that do best alone and in pairs."""
SIZES = (4.0**2, 30.0**2)
"""Variance of an effect over that of the noise: with starts 1 % apart, effects of about 4 % and of about 30 %."""
NOISE, NOISE_WEIGHT = 0.015, 3.0
"""What the logarithms of like starts are apart before the study shows it, and how many starts that belief is worth."""
ALIKE = 0.8
"""Correlation of the effects of two values of one parameter that are both not the baseline's."""
NOTHING_MOVED = 0.5
"""When it is as probable that no parameter moved the metric, nothing is shown."""
LEAST_SHARE = 0.01
LEVEL = 1e4  # the overall level is not known: its variance over that of the noise
DEFAULT = "default"


def importance(record: StudyRecord, metric: str | None = None) -> Importance:
    """Of ``metric`` (the goal's), from the feasible starts that were loaded as the search's were: search, screening, and what
    ``--explain`` left out (a confirmation over HTTP compares with none of them; a start that was ended early has no figure)."""
    view = StudyView(record)
    metric = metric or view.metric
    known = {trial.label: trial.metrics.get(metric) for trial in _comparable(view) if trial.metrics and view.feasible(trial)}
    rows = [trial for trial in _comparable(view) if (known.get(trial.label) or 0.0) > 0]
    if len(rows) < FEWEST_STARTS:
        return Importance(why=f"{wording.plural(len(rows), 'feasible start')} cannot tell (it takes {FEWEST_STARTS})")
    columns = _told_apart(_columns(rows, view.searched[0]))
    if not columns:
        return Importance(why="no parameter differed between the feasible starts")
    kernels = {name: _kernel(values, base) for name, (values, base) in columns.items()}
    effects, nothing = _averaged(list(kernels.values()), np.log([known[trial.label] or 1.0 for trial in rows]))
    spreads = [float(np.var(effect)) for effect in effects]
    if nothing >= NOTHING_MOVED or not sum(spreads) > 0:
        word = wording.metric_word(metric)
        return Importance(why=f"no parameter moved {word} by clearly more than starts of one configuration differ")
    kept = {name: spread for name, spread in zip(kernels, spreads, strict=True) if spread >= LEAST_SHARE * sum(spreads)}
    total = sum(kept.values())
    return Importance({name: spread / total for name, spread in sorted(kept.items(), key=lambda row: -row[1])})


def _comparable(view: StudyView) -> Iterator[TrialRecord]:
    first = view.searched[0].served if view.searched else False
    for trial in view.trials:
        if trial.stage is not Stage.SOAK and trial.served == first:
            yield trial


Column = tuple[list[Any], Any]
"""A parameter's value in every start, and the baseline's."""


def _columns(rows: Sequence[TrialRecord], baseline: TrialRecord) -> dict[str, Column]:
    """The parameters that differed. One that a start left alone has the baseline's value: what the engine makes of it on its
    own is the effect of those that were set."""
    columns = {}
    for name in sorted({name for trial in rows for name in trial.config}):
        base = baseline.config[name] if name in baseline.config else baseline.resolved.get(name)
        base = DEFAULT if base is None else base
        values = [trial.config.get(name, base) for trial in rows]
        if len(set(map(_said, values))) > 1:
            columns[name] = (values, base)
    return columns


def _said(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _told_apart(columns: Mapping[str, Column]) -> dict[str, Column]:
    """One column for all that left the baseline's value in the same starts: which of them it was, no analysis can tell."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, (values, base) in columns.items():
        said = [_said(value) for value in values]
        moved = [value != _said(base) for value in said]
        # Where no start had the baseline's value, those that changed in the same places.
        key = tuple(one != moved[0] for one in moved) if len(set(moved)) > 1 else tuple(map(said.index, said))
        groups.setdefault(key, []).append(name)
    return {TOGETHER.join(names): _joined([columns[name] for name in names]) for names in groups.values()}


def _joined(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    return [list(row) for row in zip(*(values for values, _ in columns), strict=True)], [base for _, base in columns]


def _kernel(values: Sequence[Any], base: Any) -> Floats:
    """Covariance of one parameter's effect between all starts, 1 for an effect of full size; 0 at the baseline's value.

    Numbers on both sides of the baseline's say nothing of each other; on one side they are alike, and nearer ones are smaller.
    Values without an order (a method, a number where the default is none) are about as alike as any two changes of one thing.
    """
    numbers = [_number(value) for value in (*values, base)]
    if all(number is not None and number > 0 for number in numbers):
        doubled: Floats = np.log2(np.array([number or 1.0 for number in numbers]))
        steps: Floats = doubled[:-1] - doubled[-1]
        reach: Floats = 1 - np.exp(-np.abs(steps) * 2)
        same_side: Floats = (steps[:, None] * steps > 0).astype(np.float64)
        one_side: Floats = same_side * np.minimum(reach[:, None], reach)
        return one_side
    said = [_said(value) for value in values]
    away = _said(base)
    return np.array([[_likeness(one, other) if away not in (one, other) else 0.0 for other in said] for one in said])


def _likeness(one: str, other: str) -> float:
    return 1.0 if one == other else ALIKE


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _averaged(kernels: Sequence[Floats], figures: Floats) -> tuple[list[Floats], float]:
    """Each parameter's expected effect in every start, and the probability that none has any."""
    tried = list(range(len(kernels)))
    if len(kernels) > MOST_WEIGHED:
        chances = np.zeros(len(kernels))
        for chosen, weight in _weighed(_explanations(tried, 2), kernels, figures):
            chances[[place for place, _ in chosen]] += weight
        tried = sorted(np.argsort(-chances)[:MOST_WEIGHED].tolist())
    effects, nothing = [np.zeros(len(figures)) for _ in kernels], 0.0
    for chosen, weight in _weighed(_explanations(tried, MOST_TOGETHER), kernels, figures):
        if not chosen:
            nothing = weight
        if weight > 1e-6:
            pull = np.linalg.solve(_covariance(chosen, kernels), figures - figures.mean())
            for place, size in chosen:
                effects[place] += weight * size * kernels[place] @ pull
    return effects, nothing


Explanation = tuple[tuple[int, float], ...]
"""Parameters that have an effect, by place, each with the size of it."""


def _explanations(places: Sequence[int], most: int) -> list[list[Explanation]]:
    """All explanations by how many parameters they use: as many as use none are as probable before as those that use three."""
    return [
        [
            tuple(zip(chosen, sizes, strict=True))
            for chosen in itertools.combinations(places, count)
            for sizes in itertools.product(SIZES, repeat=count)
        ]
        for count in range(min(most, len(places)) + 1)
    ]


def _covariance(chosen: Explanation, kernels: Sequence[Floats]) -> Floats:
    """Of the starts, in units of the noise's variance."""
    total = np.eye(len(kernels[0])) + LEVEL
    for place, size in chosen:
        total = total + size * kernels[place]
    return np.asarray(total)


def _weighed(
    explanations: Sequence[Sequence[Explanation]], kernels: Sequence[Floats], figures: Floats
) -> Iterator[tuple[Explanation, float]]:
    """Explanations with their probability. The noise's variance is not known (inverse gamma) and is integrated out."""
    centred = figures - figures.mean()
    flat = [(one, -math.log(len(group))) for group in explanations for one in group]
    evidence = np.empty(len(flat))
    for start in range(0, len(flat), 256):
        some = flat[start : start + 256]
        stack = np.stack([_covariance(one, kernels) for one, _ in some])
        lower = np.linalg.cholesky(stack)
        white = np.linalg.solve(lower, np.broadcast_to(centred[:, None], (len(some), len(centred), 1)))[..., 0]
        spread = NOISE_WEIGHT * NOISE**2 + np.sum(white**2, axis=1)
        logs = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        prior = np.array([chance for _, chance in some])
        evidence[start : start + len(some)] = prior - logs - (NOISE_WEIGHT + len(centred)) / 2 * np.log(spread)
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    yield from ((one, float(weight)) for (one, _), weight in zip(flat, weights, strict=True))
