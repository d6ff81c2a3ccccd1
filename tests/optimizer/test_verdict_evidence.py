"""What a verdict needs as evidence: against a baseline that breaks its limits, for a finalist, for lite. Whole studies through
the real steps, with what each start shows made up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from calibration import FINALIST, Change, normal, study
from hypothesis import given, settings
from hypothesis import strategies as st

from vopt.objectives.goals import Goal, Limit, built_in_goal
from vopt.objectives.metrics import Metrics
from vopt.objectives.records import LoadStatus
from vopt.optimizer.history import Arm, FailureSummary, Stage, TrialRecord
from vopt.optimizer.recommend import Recommendation, Verdict
from vopt.optimizer.trial import FailureKind, Phase

PLAIN = built_in_goal("throughput", guard=False)
LIMITED = built_in_goal("throughput", limits=[Limit("p95_ttft_s", "<=", 0.5)], guard=False)


def shows(record: TrialRecord, values: Mapping[str, float], failed: int = 0, n: int = 500) -> TrialRecord:
    assert record.metrics is not None
    figures = {**record.metrics.values, "success_rate": 1 - failed / n, **values}
    return replace(record, metrics=Metrics(figures, succeeded=n - failed, failed=failed))


def failing(share: float, n: int) -> Change:
    """Every start fails this share of its ``n`` requests, by chance."""
    return lambda record, rng: shows(record, {}, int(rng.binomial(n, share)), n)


def at_a_limit(level: float, noise: float = 0.03) -> Change:
    """Every start has this p95 TTFT, within its noise."""
    return lambda record, rng: shows(record, {"p95_ttft_s": level * math.exp(rng.normal(0, noise))})


def answers(studies: int, gain: float, change: Change, goal: Goal = PLAIN, soak_s: float = 0.0) -> list[Recommendation]:
    rngs = (np.random.default_rng([seed, 41]) for seed in range(studies))
    return [study(normal(0.01), gain, rng, [3], goal=goal, change=change, soak_s=soak_s)[0] for rng in rngs]


def counted(found: list[Recommendation]) -> Counter[Verdict]:
    return Counter(answer.verdict for answer in found)


def most(studies: int, share: float = 0.05) -> float:
    return studies * share + 2 * math.sqrt(studies * share * (1 - share))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("n", "share"),
    [
        (150, 0.0007),
        pytest.param(60, 0.001, marks=SLOW),
        pytest.param(100, 0.001, marks=SLOW),
        pytest.param(300, 0.001, marks=SLOW),
        pytest.param(500, 0.01, marks=SLOW),
        pytest.param(60, 0.01, marks=SLOW),
    ],
)
def test_requests_that_fail_by_chance_make_nothing_slower_better(n: int, share: float) -> None:
    studies = 100
    assert counted(answers(studies, 0.0, failing(share, n)))[Verdict.BETTER] <= most(studies)
    lost = counted(answers(studies, -0.02, failing(share, n)))
    assert lost[Verdict.BETTER] <= (most(studies, 0.025) if share >= 0.01 else 0)
    if share < 0.01:
        assert lost[Verdict.NO_GAIN] == studies, "what runs today is feasible"


@pytest.mark.parametrize("level", [0.5, pytest.param(0.49, marks=SLOW), pytest.param(0.51, marks=SLOW)])
def test_a_limit_that_all_are_at_makes_nothing_slower_better(level: float) -> None:
    studies = 100
    assert counted(answers(studies, 0.0, at_a_limit(level), LIMITED))[Verdict.BETTER] <= most(studies)
    assert counted(answers(studies, -0.02, at_a_limit(level), LIMITED))[Verdict.BETTER] <= most(studies, 0.03)


def test_a_true_gain_is_found_beside_failures_and_limits() -> None:
    assert counted(answers(40, 0.05, failing(0.0007, 150), soak_s=60.0))[Verdict.BETTER] >= 36
    assert counted(answers(40, 0.05, at_a_limit(0.46), LIMITED))[Verdict.BETTER] >= 36


def test_a_soak_settles_what_few_requests_leave_open() -> None:
    """One failure in 450 requests leaves the limit open; the soak's requests close it, whichever way."""

    def one_failed(soaked: int) -> Change:
        def change(record: TrialRecord, _: np.random.Generator) -> TrialRecord:
            if record.stage is Stage.SOAK:
                return shows(record, {}, soaked, 3000)
            return shows(record, {}, int(record.arm is Arm.FINALIST and "-1-" in record.label), 150)

        return change

    assert answers(1, 0.1, one_failed(0), soak_s=60.0)[0].verdict is Verdict.BETTER
    assert answers(1, 0.1, one_failed(60), soak_s=60.0)[0].verdict is Verdict.NO_GAIN
    [unsoaked] = answers(1, 0.1, lambda record, rng: shows(one_failed(0)(record, rng), {}, 1, 150))
    assert unsoaked.verdict is Verdict.NO_GAIN
    assert "requests failed in confirmation and soak" in unsoaked.reason


def by_arm(baseline: float, others: float) -> Change:
    """p95 TTFT of the baseline and of all else, with little noise."""
    return lambda record, rng: shows(
        record, {"p95_ttft_s": (baseline if record.arm is Arm.BASELINE else others) * math.exp(rng.normal(0, 0.01))}
    )


@pytest.mark.parametrize(
    ("gain", "words"),
    [(-0.06, "has its price: tokens_per_s -"), (0.06, "its gain is real"), (0.0, "not beyond the noise")],
)
def test_a_baseline_that_breaks_a_limit_gives_way_and_the_answer_says_at_what_price(gain: float, words: str) -> None:
    [answer] = answers(1, gain, by_arm(0.9, 0.4), LIMITED)
    assert answer.verdict is Verdict.BETTER
    assert "is above the limit 500 ms" in answer.baseline_breaks
    assert answer.baseline_breaks in answer.reason
    assert words in answer.reason
    assert answer.gain is not None
    assert answer.gain.ratio == pytest.approx(1 + gain, abs=0.02)


def test_where_baseline_and_finalist_break_the_limit_nothing_is_feasible() -> None:
    [answer] = answers(1, 0.05, by_arm(0.9, 0.6), LIMITED)
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert "the baseline breaks its limits" in answer.reason
    assert "cannot take its place: p95_ttft_s 597 ms is above the limit 500 ms" in answer.reason


def test_requests_that_surely_fail_refuse_a_baseline_by_the_confidence_that_accepts_a_finalist() -> None:
    def loses(failed: int, n: int) -> Change:
        return lambda record, _: shows(record, {}, failed if record.arm is Arm.BASELINE else 0, n)

    assert [a.verdict for a in answers(1, -0.03, loses(4, 150))] == [Verdict.BETTER]
    doubted = answers(1, -0.03, loses(2, 150))[0]
    assert doubted.verdict is Verdict.NO_GAIN
    assert any("the baseline itself may break its limits" in note and "98.7 %" in note for note in doubted.notes)


def ends(arm: Arm, rounds: str, status: LoadStatus | None) -> Change:
    """Starts of an arm, of some rounds, that are overloaded, or dead where ``status`` is ``None``."""
    died = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "illegal memory access")

    def change(record: TrialRecord, _: np.random.Generator) -> TrialRecord:
        if record.arm is not arm or record.label.split("-")[1] not in rounds:
            return shows(record, {})
        return replace(record, status=status) if status else replace(record, metrics=None, status=None, failure=died)

    return change


@pytest.mark.parametrize("status", [LoadStatus.OVERLOADED, None])
@pytest.mark.parametrize("gain", [-0.04, 0.06])
def test_a_baseline_whose_served_starts_fail_hides_no_finalist(status: LoadStatus | None, gain: float) -> None:
    [answer] = answers(1, gain, ends(Arm.BASELINE, "123", status))
    assert answer.verdict is Verdict.BETTER
    assert answer.gain is None
    assert "of its" in answer.baseline_breaks
    assert "no start of the baseline has a figure" in answer.reason
    relative = replace(PLAIN, limits=(*PLAIN.limits, Limit("tokens_per_s", ">=", 0.98, relative_to_baseline=True)))
    [unjudged] = answers(1, gain, ends(Arm.BASELINE, "123", status), relative)
    assert unjudged.verdict is Verdict.BETTER
    assert any("tokens_per_s>=0.98*baseline: not judged" in note for note in unjudged.notes)


@pytest.mark.parametrize("status", [LoadStatus.OVERLOADED, None])
@pytest.mark.parametrize("round_", "123")
def test_a_single_failed_start_of_the_baseline_decides_nothing(status: LoadStatus | None, round_: str) -> None:
    [slower] = answers(1, -0.05, ends(Arm.BASELINE, round_, status))
    assert slower.verdict is Verdict.NO_GAIN
    assert "worse" in slower.reason
    assert any("1 of its 3 starts failed" in note for note in slower.notes)
    [faster] = answers(1, 0.08, ends(Arm.BASELINE, round_, status))
    assert faster.verdict is Verdict.BETTER
    assert not faster.baseline_breaks


@pytest.mark.parametrize("round_", "123")
def test_a_finalist_that_died_in_its_confirmation_is_no_answer(round_: str) -> None:
    for soak_s in (0.0, 60.0):
        [answer] = answers(1, 0.1, ends(Arm.FINALIST, round_, None), soak_s=soak_s)
        assert answer.verdict is Verdict.NO_GAIN
        assert answer.winner_config is None
        assert answer.argv == answer.baseline_argv
        assert f"no finalist came through its confirmation (confirm-{round_}-finalist: engine_died" in answer.reason
        assert any(row.config == FINALIST and row.kind == "engine_died" for row in answer.rejected)


def test_where_baseline_and_finalist_died_nothing_is_feasible() -> None:
    dead = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "illegal memory access")
    [answer] = answers(1, 0.1, lambda record, _: replace(record, metrics=None, status=None, failure=dead))
    assert answer.verdict is Verdict.NOTHING_FEASIBLE
    assert answer.reason.count("engine_died") == 2


def lite_earns(share: float) -> Change:
    """The lite arm (the finalist without its second override) has this share of the finalist's gain of 1.2 %."""

    def change(record: TrialRecord, _: np.random.Generator) -> TrialRecord:
        assert record.metrics is not None
        own = {Arm.FINALIST: 1.0, Arm.LITE: share}.get(record.arm, 0.0) if record.arm else 1.0
        return shows(record, {"tokens_per_s": record.metrics["tokens_per_s"] * math.exp(0.012 * own)})

    return change


def test_lite_is_recommended_for_a_gain_of_its_own_only() -> None:
    held = []
    for share in (0.25, 0.8):
        rngs = (np.random.default_rng([seed, 43]) for seed in range(60))
        found = [study(normal(0.003), 0.0, rng, [3], change=lite_earns(share))[0] for rng in rngs]
        better = [answer for answer in found if answer.verdict is Verdict.BETTER]
        assert len(better) > 30
        assert all(answer.gain is not None and (answer.gain.low or 0) > 1 for answer in better)
        held += [row.reason for answer in better for row in answer.overrides if "without it no gain" in row.reason]
        lites = [answer for answer in better if answer.winner_config != FINALIST]
        assert all("without what earns less than the noise" in answer.reason for answer in lites)
    assert len(lites) > 20
    assert held, "a finalist whose lite keeps up but shows no gain of its own says so"


STARTS = st.fixed_dictionaries(
    {
        "level": st.floats(-0.08, 0.08),
        "ttft": st.floats(0.3, 0.8),
        "failed": st.sampled_from([0, 0, 0, 1, 3, 20]),
        "end": st.sampled_from(["complete"] * 8 + ["overloaded", "died"]),
    }
)


@settings(max_examples=150, deadline=None)
@given(shown=st.lists(STARTS, min_size=9, max_size=9), soak_s=st.sampled_from([0.0, 60.0]))
def test_whatever_starts_show_the_answer_and_its_figures_agree(shown: list[dict[str, object]], soak_s: float) -> None:
    """Better is a gain beyond the noise, or a baseline that breaks its limits; only then may nothing be feasible."""
    died = FailureSummary(Phase.LOAD, FailureKind.ENGINE_DIED, "gone")
    rows = iter(shown)

    def change(record: TrialRecord, _: np.random.Generator) -> TrialRecord:
        if record.stage is Stage.SOAK:
            return shows(record, {}, 0, 3000)
        row = next(rows)
        if row["end"] == "died":
            return replace(record, metrics=None, status=None, failure=died)
        value = 10_000 * math.exp(float(str(row["level"])))
        made = shows(record, {"tokens_per_s": value, "p95_ttft_s": float(str(row["ttft"]))}, int(str(row["failed"])), 150)
        return replace(made, status=LoadStatus(str(row["end"])))

    [answer] = answers(1, 0.0, change, LIMITED, soak_s)
    match answer.verdict:
        case Verdict.BETTER:
            gained = answer.gain is not None and answer.gain.low is not None and answer.gain.low > 1
            assert gained or answer.baseline_breaks or "only for the machine's drift" in answer.reason
            assert ("breaks its limits" in answer.reason) is bool(answer.baseline_breaks)
            assert answer.winner_metrics["p95_ttft_s"] <= 0.5
            assert answer.winner_metrics["success_rate"] >= 0.99
        case Verdict.NO_GAIN:
            assert answer.argv == answer.baseline_argv
        case Verdict.NOTHING_FEASIBLE:
            assert "the baseline breaks its limits" in answer.reason
        case Verdict.UNCONFIRMED:
            raise AssertionError("there were rounds")
