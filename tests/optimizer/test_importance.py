from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import sample_study

from vopt.optimizer.history import Stage, StudyRecord
from vopt.optimizer.importance import MOST_WEIGHED, importance
from vopt.optimizer.trial import EngineConfig

Figures = list[tuple[dict[str, Any], float]]

DRAFTS = [{"method": "mtp", "num_speculative_tokens": count} for count in (1, 2, 3)]
DOMAINS: dict[str, list[Any]] = {
    "speculative_config": DRAFTS,
    "max_num_batched_tokens": [4096, 16384, 32768],
    "attention_backend": ["FLASHINFER", "FLASH_ATTN"],
    "long_prefill_token_threshold": [512, 1024, 2048],
    "async_scheduling": [False],
    "max_num_seqs": [128, 512],
}
INERT = ("long_prefill_token_threshold", "async_scheduling", "max_num_seqs")


def searched(figures: Figures, *, resolved: Mapping[str, Any] | None = None) -> StudyRecord:
    made = sample_study.study()
    pattern = made.trials[0]
    rows = [
        replace(
            pattern,
            label=str(place),
            config=EngineConfig(config),
            metrics=sample_study.metrics_of(value),
            resolved={"a": 5} if resolved is None else resolved,
        )
        for place, (config, value) in enumerate(figures)
    ]
    return replace(made, trials=tuple(rows), recommendation=None)


def truth(config: Mapping[str, Any]) -> float:
    """Log units: speculation by 0.35 to 0.41, by its nested count; the token budget and the backend by little."""
    drafts = config.get("speculative_config")
    value = 0.35 + 0.03 * (drafts["num_speculative_tokens"] - 1) if drafts else 0.0
    value += {None: 0.0, 4096: -0.05, 16384: 0.05, 32768: 0.06}[config.get("max_num_batched_tokens")]
    return value + (0.03 if config.get("attention_backend") == "FLASHINFER" else 0.0)


def a_search(seed: int, *, noise: float = 0.015, starts: int = 12, active: bool = True) -> Figures:
    """Starts as a search makes them: the defaults, three at random, then mostly what the best so far had."""
    draw = random.Random(seed)
    rows: Figures = [({}, 10_000 * math.exp(draw.gauss(0, noise)))]
    while len(rows) < starts:
        best = max(rows, key=lambda row: row[1])[0] if len(rows) > 3 else None
        config = {}
        for name, values in DOMAINS.items():
            kept = best is not None and draw.random() < 0.7
            value = best.get(name) if best is not None and kept else draw.choice([None, *values])
            if value is not None:
                config[name] = value
        if config not in [known for known, _ in rows]:
            rows.append((config, 10_000 * math.exp(truth(config) * active + draw.gauss(0, noise))))
    return rows


@pytest.mark.parametrize("noise", [0.005, 0.015, 0.03])
def test_of_twelve_starts_the_largest_true_effect_comes_first_and_what_does_nothing_has_no_credit(noise: float) -> None:
    first, credited = 0, 0
    for seed in range(20):
        shares = importance(searched(a_search(seed, noise=noise), resolved={})).shares
        first += "speculative_config" in next(iter(shares), "")
        credited += max((shares.get(name, 0.0) for name in INERT), default=0.0) > 0.15
    assert first >= 19
    assert credited <= 1


def test_where_no_parameter_does_anything_nothing_is_shown_and_it_says_why() -> None:
    found = [importance(searched(a_search(seed, active=False), resolved={})) for seed in range(20)]
    assert sum(not one.shares for one in found) >= 18
    assert "no parameter moved throughput" in next(one.why for one in found if not one.shares)


def test_what_was_in_every_good_start_and_in_no_bad_one_is_not_nothing() -> None:
    """A latency study of Qwen3.5-9B as it was simulated: drafts bring -38 to -54 %, a prefill threshold next to nothing; an
    analysis by better half and worse half gave the threshold 75 % and speculation 0 %."""
    mtp = dict(zip((1, 2, 3), DRAFTS, strict=True))
    seconds: Figures = [
        ({}, 4.972),
        ({"performance_mode": "interactivity"}, 4.970),
        ({"speculative_config": mtp[2]}, 2.691),
        ({"speculative_config": mtp[1]}, 3.077),
        ({"max_num_batched_tokens": 4096}, 5.840),
        ({"speculative_config": mtp[3]}, 2.551),
        ({"enable_prefix_caching": False, "speculative_config": mtp[3]}, 2.596),
        ({"max_num_batched_tokens": 16384, "speculative_config": mtp[3]}, 2.329),
        (
            {"max_num_batched_tokens": 16384, "speculative_config": mtp[3], "long_prefill_token_threshold": 1024},
            2.425,
        ),
        ({"max_num_batched_tokens": 16384, "speculative_config": mtp[3], "long_prefill_token_threshold": 2048}, 2.340),
    ]
    shares = importance(searched([(config, 10_000 / value) for config, value in seconds], resolved={})).shares
    assert shares["speculative_config"] > 0.75
    assert shares.get("long_prefill_token_threshold", 0.0) < 0.05


def test_a_start_that_differs_from_the_baseline_in_one_thing_decides_between_two_that_went_together() -> None:
    together: Figures = [({"a": place, "b": "x"}, 15_000 + 10 * place) for place in range(6, 12)]
    alone = searched([({}, 10_000), *together])
    assert list(importance(alone).shares) == ["a + b"]
    decided = importance(searched([({}, 10_000), *together, ({"b": "x"}, 15_010)])).shares
    assert next(iter(decided)) == "b"
    assert decided["b"] > 0.8


def test_the_starts_that_explain_left_a_flag_out_of_count() -> None:
    together: Figures = [({"a": place, "b": "x"}, 15_000 + 10 * place) for place in range(6, 12)]
    found = searched([({}, 10_000), *together, ({"a": 6}, 10_020), ({"a": 6}, 10_010)])
    trials = [*found.trials[:-2], *(replace(trial, stage=Stage.EXPLAIN) for trial in found.trials[-2:])]
    assert next(iter(importance(replace(found, trials=tuple(trials))).shares)) == "b"


def test_the_parameter_that_moves_the_figure_matters_most() -> None:
    figures = [({"a": a, "b": b}, 1000.0 * a + b) for a in range(1, 7) for b in range(1, 5)]
    shares = importance(searched(figures)).shares
    assert shares["a"] > 0.8
    assert sum(shares.values()) == pytest.approx(1.0)


def test_infeasible_starts_teach_nothing() -> None:
    shares = importance(sample_study.study()).shares
    assert "speculative_config" not in shares, "it never ran feasibly"
    assert "gpu_memory_utilization" not in shares


def test_a_parameter_left_alone_has_its_resolved_value() -> None:
    figures: Figures = [({}, 5000.0), *(({"a": a}, 1000.0 * a) for a in range(1, 8))]
    assert importance(searched(figures)).shares == {"a": 1.0}


def test_parameters_that_changed_together_share_one_row() -> None:
    """Else whichever the analysis meets first takes the credit, even one that does nothing."""
    figures: Figures = [({"a": a}, 100.0 + a) for a in range(5)]
    figures += [({"a": a, "idle": 0.9, "speed": {"k": a % 2}}, 200.0 + a) for a in range(5)]
    shares = importance(searched(figures)).shares
    assert shares["idle + speed"] > 0.8


def test_more_parameters_than_can_be_weighed_together_are_sifted_first() -> None:
    draw = random.Random(3)
    names = [f"p{number}" for number in range(MOST_WEIGHED + 4)]
    figures: Figures = [({}, 1000.0)]
    for _ in range(30):
        config: dict[str, Any] = {name: draw.choice((1, 2, 3)) for name in names if draw.random() < 0.5}
        figures.append((config, 1000.0 * math.exp(0.2 * (names[-1] in config) + draw.gauss(0, 0.01))))
    shares = importance(searched(figures, resolved={})).shares
    assert shares[names[-1]] > 0.9


def test_too_little_to_tell_is_nothing() -> None:
    assert not importance(sample_study.running()).shares
    assert importance(searched([({"a": 1}, 1.0)] * 9)).why == "no parameter differed between the feasible starts"
    assert "cannot tell" in importance(searched([({"a": 1}, 1.0)])).why
