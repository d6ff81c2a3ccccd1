"""A confirmation that is interrupted and resumed with other rounds forgets no look that was made: each costs of one total."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from landscapes import MemoryStudy, small_landscape
from reopened import FINALIST, first_setup, more, ran, scaled

from vopt.objectives.confidence import levels
from vopt.optimizer import propose
from vopt.optimizer.arms import MOST_ROUNDS, Arms, round_of
from vopt.optimizer.history import Arm, Stage, TrialRecord, TrialRequest
from vopt.optimizer.progress import Progress
from vopt.optimizer.trial import EngineConfig

LOSES = small_landscape({"max_num_seqs=512": 0.04}, noise=0.002)


def even(request: TrialRequest) -> float:
    """All arms alike in the confirmation, whatever the search saw: no look settles anything."""
    return 1 / 1.04 if request.stage is Stage.CONFIRMATION and request.config.get("max_num_seqs") == 512 else 1.0


TRIPLES = [
    (planned, made, resumed)
    for planned, made, resumed in itertools.product(range(1, 6), range(6), range(1, 6))
    if made <= planned and resumed >= made
]


@pytest.mark.parametrize("planned", range(1, MOST_ROUNDS + 1))
def test_every_look_that_was_made_is_counted_with_the_level_that_it_was_made_at(
    planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned, stopped after so many rounds (or in the next one), resumed with more or fewer."""
    looked: dict[int, float] = {}
    settled = propose.settled

    def watched(progress: Progress, round_: int) -> bool:
        assert progress.arms is not None
        level = progress.levels_of(progress.arms)[round_]
        assert looked.setdefault(round_, level) == level, "a look is repeated at the level that it had"
        return settled(progress, round_)

    monkeypatch.setattr(propose, "settled", watched)
    for _, made, resumed in (triple for triple in TRIPLES if triple[0] == planned):
        for begun in {made, min(made + 1, planned, resumed)}:
            looked.clear()
            study, setup = MemoryStudy(), first_setup(LOSES, rounds=planned)

            def stops(request: TrialRequest, made: int = made, begun: int = begun) -> TrialRecord:
                number = round_of(request.label)
                if number > begun or (number > made and request.arm is Arm.FINALIST):
                    raise KeyboardInterrupt
                return scaled(LOSES, even)(request)

            if made == planned:
                ran(setup, study, stops)
            else:
                with pytest.raises(KeyboardInterrupt):
                    ran(setup, study, stops)
            before = dict(looked)
            ran(more(setup, study, rounds=resumed), study, scaled(LOSES, even))
            expected = levels([(planned, made)], resumed)
            assert before.items() <= looked.items()
            assert looked.items() <= expected.items(), (planned, made, resumed)
            assert {look for look in expected if look <= max(made, resumed)} == looked.keys(), (planned, made, resumed)


def test_the_study_of_five_rounds_that_was_stopped_in_its_fourth_and_resumed_with_four() -> None:
    arms = Arms(FINALIST, EngineConfig({"max_num_seqs": 384}), 1)
    three = {label for n in (1, 2, 3) for label in arms.labels(n)}
    assert arms.measured(three, set()) == 3
    assert arms.measured({*three, arms.label(4, Arm.LITE)}, set()) == 3
    assert arms.measured(three - {arms.label(3, Arm.LITE)}, set()) == 2
    assert arms.measured(three - {arms.label(3, Arm.LITE)}, {arms.label(2, Arm.LITE)}) == 3, "the lite was lost before"
    assert replace(arms, lite=None).measured({label for label in three if "lite" not in label}, set()) == 3
    assert replace(arms, series=2).measured(three, set()) == 0
    assert levels([(5, 3)], 4) == {3: 0.03, 4: 0.01}
