"""What each override of a winner is worth: it, without one of them at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vopt.optimizer.arms import series_suffix
from vopt.optimizer.judge import Judged
from vopt.optimizer.progress import Progress
from vopt.optimizer.trial import EngineConfig
from vopt.optimizer.verdict import confirmation, provisional_winner

EXPLAIN_STARTS = 2  # of each flag left out


@dataclass(frozen=True, slots=True)
class Explained:
    """One start that is still to be made."""

    config: EngineConfig
    reason: str
    label: str


def explain_label(name: str, start: int, series: int) -> str:
    return f"explain-{name.replace(':', '-')}-{start}{series_suffix(series)}"


def explained(progress: Progress, winner: EngineConfig, name: str, series: int) -> list[Judged]:
    """The starts that say what one of a winner's overrides is worth; a label alone does not say whose override was left out."""
    config, _ = _turned(progress, winner, name)
    labels = {explain_label(name, start, series) for start in range(1, EXPLAIN_STARTS + 1)}
    return [judged for judged in progress.charged if judged.record.config == config and judged.record.label in labels]


def next_explained(progress: Progress) -> Explained | None:
    """The next start; ``None`` when each was made, or nothing won."""
    winner = provisional_winner(progress)
    if winner is None:
        return None
    series = seen.arms.series if (seen := confirmation(progress)) is not None else 1
    made = {(judged.record.label, judged.record.config) for judged in progress.history}
    for start in range(1, EXPLAIN_STARTS + 1):
        for name in dropped_one_by_one(progress, winner):
            label = explain_label(name, start, series)
            config, words = _turned(progress, winner, name)
            if (label, config) not in made:
                return Explained(config, f"explain: the winner {words} {name}", label)
    return None


def explain_starts(progress: Progress) -> int:
    """How many engine starts explaining the winner takes in all."""
    winner = provisional_winner(progress)
    return EXPLAIN_STARTS * len(dropped_one_by_one(progress, winner)) if winner is not None else 0


def dropped_one_by_one(progress: Progress, winner: EngineConfig) -> Sequence[str]:
    """Names of the winner's overrides that the baseline does not carry, and of the baseline's that the winner leaves out."""
    baseline = progress.baseline_config
    own = [name for name, value in winner.items() if baseline.get(name) != value]
    return [*own, *(name for name in baseline if name not in winner)]


def _turned(progress: Progress, winner: EngineConfig, name: str) -> tuple[EngineConfig, str]:
    """The winner without an override, or with one of the baseline's that it leaves out."""
    if name in winner:
        return winner.without(name), "without"
    return winner | {name: progress.baseline_config[name]}, "with the baseline's"
