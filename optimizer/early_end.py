"""Whether a running trial may be ended early. Pure.

A trial is ended only for what is certain: requests failed beyond what the limit allows at the planned number, or the
upper 99 % bound of its rate over the incumbent's, over the same seconds of the same requests, is below 0.85.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

FIRST_SECOND = 20
RATIO = 0.85
CONFIDENCE = 0.99
_BLOCK_S = 2  # neighbouring seconds are alike (one prefill wave spans several), so seconds are compared in blocks


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Why a trial ends early; ``bound`` is the optimistic ratio to the incumbent (``None``: ended by failures)."""

    reason: str
    bound: float | None = None


def ratio_bound(curve: Sequence[float], incumbent: Sequence[float]) -> float | None:
    """Upper 99 % bound of the ratio of two cumulative token curves (one value per second) over their common seconds.

    The ratio of sums over blocks of two seconds, with the jackknife's standard error of its logarithm and Student's t
    (Efron, *The Jackknife, the Bootstrap and Other Resampling Plans*, 1982, chapter 3). ``None`` below five blocks or
    when the incumbent produced nothing.
    """
    seconds = min(len(curve), len(incumbent))
    blocks = seconds // _BLOCK_S
    if blocks < 5:
        return None
    ends = [(i + 1) * _BLOCK_S - 1 for i in range(blocks)]
    mine = _steps([curve[i] for i in ends])
    theirs = _steps([incumbent[i] for i in ends])
    if sum(theirs) <= 0 or any(sum(theirs) - one <= 0 for one in theirs):
        return None
    if sum(mine) <= 0:
        return 0.0
    ratio = sum(mine) / sum(theirs)
    left_out = [(sum(mine) - a) / (sum(theirs) - b) for a, b in zip(mine, theirs, strict=True)]
    if min(left_out) <= 0:
        return None
    logs = [math.log(value) for value in left_out]
    mean = sum(logs) / blocks
    error = math.sqrt((blocks - 1) / blocks * sum((value - mean) ** 2 for value in logs))
    return ratio * math.exp(float(special.stdtrit(blocks - 1, CONFIDENCE)) * error)


def early_end(
    curve: Sequence[float],
    incumbent: Sequence[float] | None,
    *,
    failed: int,
    planned: int | None,
    min_success: float,
) -> EarlyEnd | None:
    """Decide at one tick. ``curve`` is the cumulative window tokens by second; ``planned`` the requests the whole load is
    expected to count (``None``: not known, then failures end nothing). Engine death and hangs are the driver's to end."""
    if len(curve) < FIRST_SECOND:
        return None
    if planned is not None and failed > (1 - min_success) * planned:
        return EarlyEnd(f"{failed} requests failed, more than {1 - min_success:.2%} of the {planned} planned")
    if incumbent is None:
        return None
    bound = ratio_bound(curve, incumbent)
    if bound is not None and bound < RATIO:
        return EarlyEnd(f"at most {bound:.2f} of the best so far over the same seconds (99 % bound)", bound)
    return None


def _steps(cumulative: Sequence[float]) -> list[float]:
    return [now - before for before, now in zip([0.0, *cumulative[:-1]], cumulative, strict=True)]
