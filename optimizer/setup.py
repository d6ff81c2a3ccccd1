"""What one search is given: goal, space, budget, baseline, and what engine starts are expected to cost. Values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.objectives.goals import Goal
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.relief import Fit
from vopt.search_spaces.space import Check, Point, SearchSpace

_NO_OVERRIDES = EngineConfig()
REPAIRS = 3  # tries to bring a baseline up that fails for its own fault
SHORT_SEARCH, LONG_SEARCH = 6, 20
"""Configurations below which a search is over before a machine drifts, and from which on it is looked for midway as well."""


@dataclass(frozen=True, slots=True)
class Budget:
    """``trials`` are the engine starts of search and screening, baseline included; confirmation, soak, repairs and retries
    come on top. ``time_s`` bounds the whole search (``None``: no bound); ``soak_s`` 0 means none; ``patience`` is the number
    of trials without a gain above the noise after which the search ends (``None``: three fifths of the searched trials, at
    least eight)."""

    trials: int = 16
    rounds: int = 3
    time_s: float | None = 7200.0
    soak_s: float = 600.0
    patience: int | None = None

    @property
    def screening(self) -> int:
        """Engine starts of the trial budget that are kept for second measurements."""
        return min(3, self.trials // 4)

    @property
    def searched(self) -> int:
        """Engine starts for different configurations, baseline included."""
        return self.trials - self.screening

    @property
    def patient_for(self) -> int:
        return self.patience if self.patience is not None else max(8, 3 * self.searched // 5)


@dataclass(frozen=True, slots=True)
class EarlierBudget:
    """What a study was given before a larger budget. ``starts``: the labels of all that was measured under it. ``reopened``:
    the larger one lets the search itself go on, whatever came after it."""

    trials: int
    rounds: int
    starts: frozenset[str]
    reopened: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """What an engine start and a load are expected to take, seconds, by start class; replaced by what the study sees."""

    first_start_s: float = 240.0
    new_key_start_s: float = 120.0
    known_key_start_s: float = 60.0
    load_s: float = 150.0
    stop_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Pinned:
    """A configuration that is measured whatever the model says: the bare mode, the bare defaults, an earlier study's best."""

    config: EngineConfig
    reason: str


def _no_command(config: EngineConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class SearchSetup:
    """Everything that fixes a search.

    ``fixed`` are the overrides of every searched configuration (``--set`` values belong to ``evaluate``, not here; this
    is what the user's own command carries outside the space). ``baseline`` is trial 0. ``pinned`` come next, in order,
    then the seeds of ``space``, then proposals. ``command`` renders a configuration as the argv that launches it.
    ``early_end`` allows trials to be ended early (closed-loop throughput loads only). ``artefact_acceptance`` in a
    record's flags bars it from winning. ``restart_noise`` is the assumed spread of the log metric from start to start until
    the study has seen repeats; ``drift_check`` adds a last start of the baseline for searches whose confirmation is served
    while its trials were not. ``no_serve``: the user asked for a confirmation without the API server; the answer says so.
    ``notes`` go into the answer as they are. ``checks`` makes the memory checks of the space anew from the starts so far,
    which calibrate them; ``fits`` makes likewise of them whether memory surely suffices. ``relief`` is what a repair of the
    baseline changed outside the space: a configuration carries it unless ``starts`` says that it comes up without.
    ``auto_load``: how many requests are in flight is found on the baseline. ``assumed`` says what the figures of a
    configuration rest on that nobody measured (a stated acceptance of drafts, what a simulation takes for granted). ``rate``:
    the requests per second that were typed; ``request_tokens``: prompt and output of a request, on average (0: not known).
    ``earlier`` are the budgets that a resumed study had before, in order.
    """

    goal: Goal
    space: SearchSpace
    budget: Budget = Budget()
    baseline: EngineConfig = _NO_OVERRIDES
    fixed: EngineConfig = _NO_OVERRIDES
    pinned: tuple[Pinned, ...] = ()
    sampler: str = "auto"
    seed: int = 0
    timing: Timing = Timing()
    command: Callable[[EngineConfig], tuple[str, ...]] = _no_command
    early_end: bool = True
    explain: bool = False
    deadline_s: float = 1800.0
    restart_noise: float = 0.01
    drift_check: bool = False
    no_serve: bool = False
    notes: tuple[str, ...] = ()
    rate: float | None = None
    request_tokens: float = 0.0
    checks: Callable[[Sequence[TrialRecord]], tuple[Check, ...]] | None = None
    fits: Callable[[Sequence[TrialRecord]], Fit] | None = None
    auto_load: bool = False
    relief: EngineConfig = _NO_OVERRIDES
    starts: Callable[[EngineConfig], bool] | None = None
    assumed: Callable[[EngineConfig], tuple[str, ...]] = _no_command
    earlier: tuple[EarlierBudget, ...] = ()

    @property
    def drift_starts(self) -> int:
        """Further starts of the baseline that look for a drift: at the end; in a long search midway too."""
        if not self.drift_check or self.budget.searched < SHORT_SEARCH:
            return 0
        return 2 if self.budget.searched >= LONG_SEARCH else 1

    def config(self, point: Point) -> EngineConfig:
        """The engine configuration of one point of the space."""
        return self.relieved(EngineConfig({**self.fixed, **self.space.full_config(point)}))

    def relieved(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what the repair of the baseline changed, where it does not start without."""
        if not self.relief or (self.starts is not None and self.starts(config)):
            return config
        return config | self.relief

    def point(self, config: EngineConfig) -> dict[str, Any] | None:
        """The point of a configuration; ``None`` when it lies off the grid (a user's odd value, a fixed override changed)."""
        inside = {
            name: value
            for name, value in config.items()
            if self.fixed.get(name) != value and not (name in self.relief and self.relief[name] == value)
        }
        try:
            point = self.space.point_of(inside)
        except (KeyError, ValueError):
            return None
        plain = EngineConfig({**self.fixed, **self.space.full_config(point)})
        # A start that lacked the relief, and needed it, says nothing of the point.
        return point if config in (self.config(point), plain | self.relief) else None
