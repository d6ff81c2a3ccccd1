from __future__ import annotations

from dataclasses import replace

import pytest
import sample_study

from vopt.optimizer.history import StudyRecord
from vopt.optimizer.importance import importance
from vopt.optimizer.trial import EngineConfig


def searched(figures: list[tuple[dict[str, object], float]], *, status: str = "complete") -> StudyRecord:
    made = sample_study.study()
    pattern = made.trials[0]
    rows = [
        replace(
            pattern, label=str(place), config=EngineConfig(config), metrics=sample_study.metrics_of(value), resolved={"a": 5}
        )
        for place, (config, value) in enumerate(figures)
    ]
    return replace(made, trials=tuple(rows), recommendation=None)


def test_the_parameter_that_moves_the_figure_matters_most() -> None:
    figures = [({"a": a, "b": b}, 1000.0 * a + b) for a in range(1, 7) for b in range(1, 5)]
    shares = importance(searched(figures))
    assert shares["a"] > 0.8
    assert sum(shares.values()) == pytest.approx(1.0)


def test_infeasible_starts_teach_nothing() -> None:
    shares = importance(sample_study.study())
    assert "speculative_config" not in shares, "it never ran feasibly"
    assert "gpu_memory_utilization" not in shares


def test_a_parameter_left_alone_has_its_resolved_value() -> None:
    figures: list[tuple[dict[str, object], float]] = [({}, 5000.0), *(({"a": a}, 1000.0 * a) for a in range(1, 8))]
    assert importance(searched(figures)) == {"a": 1.0}


def test_parameters_that_changed_together_share_one_row() -> None:
    """Else whichever the analysis meets first takes the credit, even one that does nothing."""
    figures: list[tuple[dict[str, object], float]] = [({"a": a}, 100.0 + a) for a in range(5)]
    figures += [({"a": a, "idle": 0.9, "speed": {"k": 1}}, 200.0 + a) for a in range(5)]
    shares = importance(searched(figures))
    assert set(shares) == {"a", "idle + speed"}
    assert shares["idle + speed"] > 0.8


def test_too_little_to_tell_is_nothing() -> None:
    assert importance(sample_study.running()) == {}
    assert importance(searched([({"a": 1}, 1.0)] * 9)) == {}
