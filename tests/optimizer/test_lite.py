"""The finalist with fewer overrides: which ones go, and that one always stays to be challenged."""

from __future__ import annotations

from landscapes import Landscape, Truth, parameter, space

from vopt.optimizer.history import Stage, TrialRequest
from vopt.optimizer.judge import Judged, judge
from vopt.optimizer.lite import lite_config
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.parameter import Point

SEQS, LONG = "max_num_seqs", "long_prefill_token_threshold"
TRIED: tuple[dict[str, int], ...] = ({}, {SEQS: 512}, {SEQS: 256}, {LONG: 512}, {LONG: 512, SEQS: 512}, {LONG: 1024})


def landscape(worth: float) -> Landscape:
    """More sequences than are in flight do nothing; the other knob is worth ``worth``."""
    made = space(parameter(SEQS, (256, 512, 1024), 1024), parameter(LONG, (0, 512, 1024), 0))

    def truth(point: Point) -> Truth:
        return Truth(10_000 * (1 + worth * (point[LONG] == 512)))

    return Landscape("idle", made, truth, noise=0.0)


def lite(worth: float, finalist: dict[str, int]) -> EngineConfig | None:
    made = landscape(worth)
    setup, evaluate = made.setup(12, 0), made.evaluator(0)
    judged: list[Judged] = []
    for label, config in enumerate(TRIED):
        record = evaluate(TrialRequest(str(label), EngineConfig(config), Stage.SEARCH))
        judged.append(judge(record, made.goal, judged[0].record.metrics if judged else None))
    return lite_config(setup, EngineConfig(finalist), EngineConfig(), judged)


def test_what_does_nothing_goes_and_what_earns_stays() -> None:
    assert lite(0.05, {LONG: 512, SEQS: 512}) == EngineConfig({LONG: 512})


def test_where_all_together_earns_little_one_still_challenges_the_finalist() -> None:
    """The lite arm used to be left out altogether then, and an idle flag was recommended."""
    assert lite(0.006, {LONG: 512, SEQS: 512}) == EngineConfig({LONG: 512})


def test_a_single_override_has_nothing_lighter() -> None:
    assert lite(0.006, {LONG: 512}) is None
