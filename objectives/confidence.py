"""Spread, intervals and "is the gain real?". The unit of replication is the engine start.

The model (Student's two-sample comparison with a pooled variance, e.g. Snedecor & Cochran, *Statistical Methods*): the log
of an arm's throughput or latency is its mean plus a start's noise with one standard deviation for all arms,

    s^2 = sum over arms of sum (y - arm mean)^2 / df,   df = sum over arms of (starts - 1),   s >= 0.5 %
    gain = mean log(finalist) - mean log(baseline)                (the negative where less is better)
    standard error = s sqrt(1 / n_finalist + 1 / n_baseline),   bounds = gain -+ t(df) x standard error

Logs make a gain a ratio and equal relative noise equal. The floor keeps three starts that happen to agree from claiming a
precision that no engine has (and makes zero variance harmless).

Looks: the bound is examined after rounds 3 and 5 only, at 0.03 one-sided each. Two looks at a shared 0.05 need
about 0.03 apiece (Pocock, *Biometrika* 64, 1977: 0.029 for equal steps). Share of studies of three equal arms in which either
look says "better", 400,000 simulated studies each: normal noise 4.8 %, Student's t with 3 degrees of freedom 4.2 %, 15 % of
starts 6 % slow 4.1 % (3.1 % with little other noise), exponential 3.8 %, noise well under the floor below 0.1 %. Heavy tails
cost power instead: with 1 % noise a true 5 % gain is found in 99.9 % of studies after three rounds, with 15 % slow starts on
top in 60 % (86 % after five), which is what ``smallest_visible_gain`` then says. A test repeats a small version. A study that
is given more rounds than it was planned with looks further times, at smaller levels: ``levels``.

What the one standard deviation cannot know: where one of the compared arms alone is noisier than both others, its noise is
averaged away. Twice as noisy makes 6.5 % of false "better", five times 12 %; a finalist and a lite that share their noise
stay at 4 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from scipy import optimize, special

from vopt.objectives.intervals import failure_share_lower as failure_share_lower  # part of this module's interface
from vopt.objectives.intervals import failure_share_upper as failure_share_upper
from vopt.objectives.metrics import Direction

SD_FLOOR = 0.005
ALPHA_PER_LOOK = 0.03
ALPHA_FURTHER = 0.01
LOOKS = (3, 5)
LITE_CONFIDENCE = 0.90
LITE_LEAST_LOSS = 0.01
LITE_GAIN_SHARE = 0.25
LIKE_KV_CACHE = 0.01


@dataclass(frozen=True, slots=True)
class PooledSpread:
    """Standard deviation of log values from start to start, pooled over arms. ``measured`` is before the floor, ``sd`` after;
    ``freedom`` 0 means that no arm has two starts and nothing can be said."""

    sd: float
    measured: float
    freedom: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against another as ratios (above 1 is better in the goal's direction, whatever that is).

    ``low``/``high``: two-sided interval for printing. ``bound``: the one-sided lower bound that decides; ``low`` is the same
    unless another level was asked for. All ``None`` when no arm was started twice. ``better`` says only that ``bound``
    exceeds 1; whether this was a permitted look is the caller's to check with ``looks``.
    """

    ratio: float
    low: float | None
    high: float | None
    bound: float | None
    spread: PooledSpread
    starts: tuple[int, int]

    @property
    def better(self) -> bool:
        return self.bound is not None and self.bound > 1.0


@dataclass(frozen=True, slots=True)
class StartSpread:
    """Relative spread of repeated measurements (standard deviations of logs).

    ``within``: between loads on one engine (``None``: no engine was loaded twice). ``between``: what fresh starts add to
    it. ``of_starts``: of the starts' means; the only one that supports comparisons. ``None``: fewer than two starts.
    """

    within: float | None
    between: float | None
    of_starts: float | None
    starts: int
    loads: int


def log_values(values: Sequence[float]) -> list[float]:
    """Natural logs; raises ``ValueError`` for a value that is no positive finite number."""
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a throughput or latency must be a positive number, not {value!r}")
    return [math.log(value) for value in values]


def pooled_spread(arms: Sequence[Sequence[float]]) -> PooledSpread:
    """Standard deviation of log values over all ``arms`` (each a sequence of values, one for each start)."""
    squares, freedom = 0.0, 0
    for arm in arms:
        logs = log_values(arm)
        if len(logs) > 1:
            mean = sum(logs) / len(logs)
            squares += sum((value - mean) ** 2 for value in logs)
            freedom += len(logs) - 1
    measured = math.sqrt(squares / freedom) if freedom else 0.0
    return PooledSpread(max(measured, SD_FLOOR), measured, freedom)


def compare(
    arm: Sequence[float],
    baseline: Sequence[float],
    all_arms: Sequence[Sequence[float]],
    direction: Direction,
    *,
    alpha: float = ALPHA_PER_LOOK,
    confidence: float | None = None,
) -> Comparison:
    """``arm`` against ``baseline``, with the spread pooled over ``all_arms`` (which include both).

    ``alpha`` is the one-sided level of ``bound``; ``confidence`` the two-sided level of ``low``/``high``, by default the one
    at which ``low`` is ``bound``, so that a printed interval and its verdict agree. Raises ``ValueError`` when either has no
    start.
    """
    if not arm or not baseline:
        raise ValueError("both arms need at least one start")
    gain = _mean_log(arm) - _mean_log(baseline)
    if direction is Direction.MINIMIZE:
        gain = -gain
    spread = pooled_spread(all_arms)
    starts = (len(arm), len(baseline))
    if spread.freedom == 0:
        return Comparison(math.exp(gain), None, None, None, spread, starts)
    error = _standard_error(spread.sd, *starts)
    wide = _t(1 - alpha if confidence is None else 0.5 + confidence / 2, spread.freedom) * error
    return Comparison(
        ratio=math.exp(gain),
        low=math.exp(gain - wide),
        high=math.exp(gain + wide),
        bound=math.exp(gain - _t(1 - alpha, spread.freedom) * error),
        spread=spread,
        starts=starts,
    )


def surely_beyond(
    values: Sequence[float], bound: float, all_arms: Sequence[Sequence[float]], *, above: bool, alpha: float = ALPHA_PER_LOOK
) -> bool:
    """Whether starts with ``values`` lie above (else below) ``bound`` beyond what chance does: the bound of their mean's
    one-sided interval at ``alpha`` does.

    On logs, with the spread pooled over ``all_arms`` (which include ``values``) or that of ``values`` if larger, since an
    arm at its limit is often the noisiest. Figures that may be 0 have no logarithm: there on the values alone, two or more.
    """
    if bound > 0 and all(value > 0 for arm in all_arms for value in arm):
        spread = pooled_spread(all_arms)
        if not values or not spread.freedom:
            return False
        sd = max(spread.sd, pooled_spread([values]).measured)
        distance, freedom = _mean_log(values) - math.log(bound), spread.freedom
    else:
        if len(values) < 2:
            return False
        mean, freedom = sum(values) / len(values), len(values) - 1
        sd = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom)
        distance = mean - bound
    return (distance if above else -distance) > _t(1 - alpha, freedom) * sd / math.sqrt(len(values))


def looks(rounds: int) -> tuple[int, ...]:
    """The rounds after which a study that is planned with ``rounds`` rounds looks: 3 of 3, 3 and 5 of 5; any other number only
    at its end.

    More looks, or looks farther apart (less correlated), would push the total above 5 % at 0.03 each.
    """
    if rounds <= 0:
        return ()
    return tuple(look for look in LOOKS if look <= rounds) if rounds in LOOKS else (rounds,)


def levels(earlier: Sequence[tuple[int, int]], rounds: int) -> dict[int, float]:
    """The rounds after which a confirmation of ``rounds`` rounds looks, each with the one-sided level of its bound; looks that
    were made under an earlier plan among them, since they are spent.

    ``earlier`` are the plans that it had before, one after the other: (rounds planned, rounds measured when it was given the
    next one). The first plan's looks, and 5 after 3, have 0.03; a look that nobody planned has 0.01.
    Levels at several looks at growing data add up to less than their sum, and looks at unplanned times may be paid for out of
    one total (Lan & DeMets, *Biometrika* 70, 1983). Equal arms called better in 400,000 simulated studies each with 1 % noise:
    looks after 3, 4, 5 at 0.03, 0.01, 0.03: 4.8 %; after 2, 3, 4, 5 at 0.03, 0.01, 0.01, 0.01: 3.3 % (all four at 0.03: 6.4 %).
    One round has no spread, so nothing is ever said after it and nothing is spent.
    """
    found: dict[int, float] = {}
    for plan, measured in (*earlier, (rounds, rounds)):
        for look in looks(plan):
            spent = [made for made in found if made > 1]
            if max(found, default=0) < look <= measured:
                planned = not spent or (look == LOOKS[-1] and spent[0] == LOOKS[0])
                found[look] = ALPHA_PER_LOOK if planned else ALPHA_FURTHER
    return found


def smallest_visible_gain(
    sd: float, rounds: int, *, power: float = 0.8, arms: int = 3, alpha: float = ALPHA_PER_LOOK
) -> float | None:
    """The smallest true ratio that ``rounds`` rounds find with probability ``power``; ``None`` below two rounds.

    Solves P(T > t(1 - alpha, df)) = power for T noncentral t with df = arms (rounds - 1) and noncentrality
    log(ratio) / (sd sqrt(2 / rounds)) (e.g. Cohen, *Statistical Power Analysis*, section 2). ``sd`` is of logs, and floored
    as in a comparison. The earlier look is left out: it adds a little power, so the printed gain is on the safe side.
    """
    if rounds < 2:
        return None
    shift = _visible_shift(arms * (rounds - 1), power, alpha)
    return math.exp(shift * _standard_error(max(sd, SD_FLOOR), rounds, rounds))


@lru_cache(maxsize=256)
def _visible_shift(freedom: int, power: float, alpha: float) -> float:
    """Noncentrality at which t exceeds its one-sided critical value with probability ``power``."""
    critical = _t(1 - alpha, freedom)

    def missing_power(noncentrality: float) -> float:
        return 1 - float(special.nctdtr(freedom, noncentrality, critical)) - power

    return float(optimize.brentq(missing_power, 0.0, critical + 40.0))


def loss_upper_bound(
    lite: Sequence[float], finalist: Sequence[float], all_arms: Sequence[Sequence[float]], direction: Direction
) -> float | None:
    """Upper one-sided 90 % bound of what ``lite`` loses against ``finalist``, as a share (0.01: one percent)."""
    bound = compare(lite, finalist, all_arms, direction, alpha=1 - LITE_CONFIDENCE).bound
    return None if bound is None else 1 - bound


def lite_suffices(
    lite: Sequence[float],
    finalist: Sequence[float],
    all_arms: Sequence[Sequence[float]],
    direction: Direction,
    *,
    gain_ratio: float,
) -> bool:
    """Whether lite is to be recommended: its loss is surely below max(1 %, a quarter of the finalist's gain)."""
    loss = loss_upper_bound(lite, finalist, all_arms, direction)
    return loss is not None and loss < max(LITE_LEAST_LOSS, LITE_GAIN_SHARE * (gain_ratio - 1))


def requests_needed(min_success: float, failed: int = 0, confidence: float = 0.95) -> int | None:
    """The fewest requests with ``failed`` failures whose upper bound is within ``1 - min_success``; ``None``: no number is."""
    allowed = 1 - min_success
    if allowed <= 0:
        return None
    low, high = failed, failed + 1
    while failure_share_upper(failed, high, confidence) > allowed:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if failure_share_upper(failed, middle, confidence) <= allowed else (middle, high)
    return high


def like_starts(kv_cache_tokens: Sequence[int | None]) -> bool:
    """Whether starts of one configuration may be pooled: their KV cache sizes differ by at most 1 % (unknown ones aside)."""
    known = [tokens for tokens in kv_cache_tokens if tokens is not None]
    return not known or max(known) - min(known) <= LIKE_KV_CACHE * max(known)


def start_spread(starts: Sequence[Sequence[float]]) -> StartSpread:
    """Spread within and between engine starts; ``starts[i]`` are the values of the loads on start *i*.

    One-way random effects (Searle, Casella & McCulloch, *Variance Components*, section 3.6): between^2 = (MSB - MSW) / n0, at
    least 0, n0 = (N - sum n_i^2 / N) / (k - 1).
    """
    groups = [log_values(start) for start in starts if start]
    sizes = [len(group) for group in groups]
    means = [sum(group) / len(group) for group in groups]
    loads, count = sum(sizes), len(groups)
    within_squares = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    within = math.sqrt(within_squares / (loads - count)) if loads > count else None
    if count < 2:
        return StartSpread(within, None, None, count, loads)
    of_starts = math.sqrt(sum((mean - sum(means) / count) ** 2 for mean in means) / (count - 1))
    if within is None:
        return StartSpread(None, None, of_starts, count, loads)
    grand = sum(sum(group) for group in groups) / loads
    between_mean_square = sum(size * (mean - grand) ** 2 for size, mean in zip(sizes, means, strict=True)) / (count - 1)
    balance = (loads - sum(size**2 for size in sizes) / loads) / (count - 1)
    between = math.sqrt(max(0.0, (between_mean_square - within**2) / balance))
    return StartSpread(within, between, of_starts, count, loads)


def _mean_log(values: Sequence[float]) -> float:
    return sum(log_values(values)) / len(values)


def _standard_error(sd: float, n: int, m: int) -> float:
    return sd * math.sqrt(1 / n + 1 / m)


@lru_cache(maxsize=1024)
def _t(quantile: float, freedom: int) -> float:
    return float(special.stdtrit(freedom, quantile))
