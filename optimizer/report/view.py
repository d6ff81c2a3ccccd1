"""One study as its renderers see it: cleaned of secrets, with everything derived once that several of them show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vopt.optimizer.arms import series_of
from vopt.optimizer.command import flags_text
from vopt.optimizer.history import Arm, Stage, StudyRecord, TrialRecord
from vopt.optimizer.judge import SOAK_ENDINGS
from vopt.optimizer.recommend import Gain, Recommendation, Rejected, Verdict
from vopt.optimizer.report import wording
from vopt.optimizer.report.comparison import METRIC_ORDER, Comparison, Spread, compare, few_for, in_order, names_of, spread_of
from vopt.optimizer.report.redaction import scrub
from vopt.optimizer.report.removed import removed_notes
from vopt.optimizer.stated_acceptance import condition, stated_length
from vopt.optimizer.trial import Phase

__all__ = ["COST_METRICS", "METRIC_ORDER", "Comparison", "Spread", "StudyView"]

DEFAULT_ROUNDS = 3
DEFAULT_SOAK_S = 600.0
DEFAULT_WINDOW_S = 60.0
COST_METRICS = ("tokens_per_s", "success_rate", "mean_e2e_s", "p95_ttft_s", "p95_tpot_s", "goodput_per_s")
"""Of several metrics of a kind that suffer alike, these are named as what the winner costs."""


@dataclass(frozen=True, slots=True)
class StudyView:
    """A scrubbed study and what follows from it. Make it with ``StudyView.of``."""

    record: StudyRecord
    removed: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: StudyRecord, secrets: Sequence[str] = ()) -> StudyView:
        """``secrets``: values that must appear nowhere (``redaction.known_secrets(os.environ)``)."""
        return cls(scrub(record, secrets), removed_notes(record, secrets))

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def setup(self) -> Mapping[str, Any]:
        return self.record.setup

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        return self.record.trials

    @property
    def answer(self) -> Recommendation | None:
        return self.record.recommendation

    @property
    def verdict(self) -> Verdict | None:
        return self.answer.verdict if self.answer else None

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the command in use as it was given no engine had."""
        return tuple(str(text) for text in self.setup.get("left_out") or ())

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known of the command: secrets that it needs again, what was left out of the one that was given, and
        the answer's own notes."""
        return (*self.removed, *self.left_out, *(self.answer.notes if self.answer else ()))

    @property
    def simulated(self) -> bool:
        return bool(self.setup.get("simulated"))

    @property
    def goal(self) -> Mapping[str, Any]:
        goal = self.setup.get("goal")
        return goal if isinstance(goal, Mapping) else {"name": str(goal)}

    @property
    def metric(self) -> str:
        """The goal's metric."""
        return str(self.goal.get("metric", "tokens_per_s"))

    @property
    def maximize(self) -> bool:
        return str(self.goal.get("direction", "maximize")).lower().startswith("max")

    @property
    def limits(self) -> tuple[str, ...]:
        """The limits in words, and the bounds on every request that goodput counts by."""
        bounds = [wording.limit_text({"metric": name, "value": value}) for name, value in (self.goal.get("slos") or {}).items()]
        counted = (f"counted: requests with {' and '.join(bounds)}",) if bounds else ()
        return (*map(wording.limit_text, self.goal.get("limits", ())), *counted)

    @property
    def model(self) -> str:
        return str(self.setup.get("model", ""))

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(wording.gpu_name(gpu) for gpu in self.setup.get("gpus") or ())

    @property
    def machine(self) -> str:
        """``1x NVIDIA H200, vLLM 0.32.0``."""
        counted = ", ".join(f"{n}x {gpu}" for gpu, n in Counter(self.gpus).items()) or "CPU"
        version = self.setup.get("vllm_version")
        return f"{counted}, vLLM {version}" if version else counted

    @property
    def workload(self) -> str:
        workload = self.setup.get("workload")
        name = str(workload.get("name", "")) if isinstance(workload, Mapping) else str(workload or "")
        loads = [wording.load_words(plan) for plan in (self.load_plan, self.second_load_plan)]
        return ", ".join([name, " and then ".join(filter(None, loads))]) if any(loads) else name

    @property
    def load_plan(self) -> Mapping[str, Any]:
        """How every start was loaded: frozen on the baseline's engine, stored with each start; empty before."""
        frozen = (trial.environment.get("load_plan") for trial in self.trials if trial.stage is not Stage.SOAK)
        return next((plan for plan in frozen if plan), None) or self.setup.get("load_plan") or {}

    @property
    def second_load_plan(self) -> Mapping[str, Any]:
        """The open loop that followed in every start, where two goals need either; empty without."""
        return next((plan for trial in self.trials if (plan := trial.environment.get("second_load_plan"))), {})

    @property
    def searched(self) -> tuple[TrialRecord, ...]:
        return tuple(trial for trial in self.trials if trial.stage is Stage.SEARCH)

    def trial(self, label: str) -> TrialRecord | None:
        return next((trial for trial in self.trials if trial.label == label), None)

    @property
    def winner(self) -> TrialRecord | None:
        """The engine start that the answer names."""
        return self.trial(self.answer.winner_label or "") if self.answer else None

    def value(self, trial: TrialRecord) -> float | None:
        return trial.metrics.get(self.metric) if trial.metrics else None

    def comparable(self, trial: TrialRecord) -> float | None:
        """The value, unless it was measured with other requests: a soak's, the longest of the workload."""
        return None if trial.stage is Stage.SOAK else self.value(trial)

    def why_not(self, trial: TrialRecord) -> tuple[str, str] | None:
        """(kind, reason) when this start's configuration cannot be the answer by what it showed; ``None`` when it may be."""
        if self.answer:
            for row in self.answer.rejected:
                if row.label == trial.label:
                    return row.kind, _one_start(trial, row.kind, row.reason)
        if trial.failure:
            return str(trial.failure.kind), trial.failure.detail
        if trial.stage is Stage.SOAK and trial.status not in SOAK_ENDINGS:
            return None
        if trial.status in wording.STATUS_REASONS:
            return str(trial.status), wording.STATUS_REASONS[trial.status]
        return None

    def feasible(self, trial: TrialRecord) -> bool:
        return self.value(trial) is not None and self.why_not(trial) is None

    def better(self, one: float, other: float) -> bool:
        return one > other if self.maximize else one < other

    @property
    def challenger(self) -> str:
        """What the baseline is compared with: ``winner``, or the finalist that was confirmed and is no better."""
        return "winner" if self.arm(winner=True) else "finalist" if self._finalist() else "winner"

    def challenger_starts(self) -> tuple[TrialRecord, ...]:
        return self.arm(winner=True) or self._finalist()

    def _finalist(self) -> tuple[TrialRecord, ...]:
        if self.answer is None or self.answer.winner_config is not None:
            return ()
        rows = [trial for trial in self.confirmed if trial.arm is Arm.FINALIST]
        known = self.answer.finalist_config
        return tuple(trial for trial in rows if trial.config == (rows[-1].config if known is None else known))

    @property
    def confirmed(self) -> tuple[TrialRecord, ...]:
        """The measured starts of the confirmation that the answer rests on: the winner's or the finalist's, else the last. A
        study that was given more trials after its confirmation may have had several, and these share no start."""
        starts = [t for t in self.trials if t.stage is Stage.CONFIRMATION and t.metrics and not t.failure]
        known = (self.answer.winner_config, self.answer.finalist_config) if self.answer else ()
        about = next((config for config in known if config is not None), None)
        mine = [t for t in starts if t.config == about and t.arm is not Arm.BASELINE] or starts
        return tuple(t for t in starts if series_of(t.label) == series_of(mine[-1].label))

    def arm(self, *, winner: bool) -> tuple[TrialRecord, ...]:
        """The starts that the figures of an arm rest on: its confirmation, else every start of that configuration."""
        config = self.answer.winner_config if winner and self.answer else None
        if winner and config is None:
            return ()
        if winner:
            same = [trial for trial in self.trials if trial.config == config and trial.metrics and not trial.failure]
            confirmed = [trial for trial in self.confirmed if trial.config == config and trial.arm is not Arm.BASELINE]
            decided = [trial for trial in same if trial.stage in (Stage.SEARCH, Stage.SCREENING)]
            return _one_arm(confirmed) or tuple(decided)
        confirmed = [trial for trial in self.confirmed if trial.arm is Arm.BASELINE]
        first = self.baseline_start
        return tuple(confirmed or ([first] if first is not None and first.metrics else []))

    @property
    def baseline_start(self) -> TrialRecord | None:
        """The baseline's first start: as given, else as repaired, since nothing else is started before it comes up."""
        if self.answer is not None and self.answer.repair is None:
            return next(iter(self.searched), None)
        return next((trial for trial in self.searched if trial.failure is None), None)

    def compared(self) -> tuple[Comparison, ...]:
        """Baseline against ``challenger`` on every metric that either has."""
        baseline, winner = self.arm(winner=False), self.challenger_starts()
        fixed_rate = bool(self.load_plan.get("rate"))
        stated = self.answer or Recommendation(Verdict.UNCONFIRMED, "", None, ())
        names = in_order({*names_of(baseline), *names_of(winner), *stated.baseline_metrics, *stated.winner_metrics})
        return tuple(
            compare(
                name,
                spread_of(name, baseline, stated.baseline_metrics),
                spread_of(name, winner, stated.winner_metrics),
                fixed_rate=fixed_rate,
                few=few_for(name, baseline, winner),
            )
            for name in names
        )

    def costs(self) -> tuple[Comparison, ...]:
        """What the winner is worse at, by more than 1 %: of each kind (time to first token, say) the metric that suffers most
        of those that the starts show to be worse, as the comparison marks them. Of several that suffer alike, the usual one."""
        if self.challenger != "winner":
            return ()
        rows = [row for row in self.compared() if row.better is False and row.change and abs(row.change - 1) > 0.01]
        shown = [row for row in rows if not row.overlaps]
        usual = sorted(shown, key=lambda row: row.metric not in COST_METRICS)
        worst: dict[str, Comparison] = {}
        for row in sorted(usual, key=lambda row: -round(abs(math.log(row.change or 1.0)), 3)):
            worst.setdefault(wording.metric_kind(row.metric), row)
        return tuple(worst.values())

    def rejected_by_kind(self) -> dict[str, list[Rejected]]:
        """What cannot win, grouped by kind: engine starts in order, then what was refused without one."""
        rows = [Rejected(trial.label, trial.config, *found) for trial in self.trials if (found := self.why_not(trial))]
        started = {row.label for row in rows}
        rows += [row for row in (self.answer.rejected if self.answer else ()) if row.label not in started]
        groups: dict[str, list[Rejected]] = {}
        for row in rows:
            groups.setdefault(row.kind, []).append(row)
        return groups

    def phase_totals(self) -> dict[Phase, float]:
        """Seconds of all starts by phase."""
        return _by_phase(self.trials)

    def stage_phases(self, stage: Stage) -> dict[Phase, float]:
        """The same for the starts of one stage."""
        return _by_phase([trial for trial in self.trials if trial.stage is stage])

    def stage_totals(self) -> dict[Stage, tuple[int, float]]:
        """(starts, seconds) by stage."""
        return {
            stage: (len(rows), sum(sum(trial.phase_s.values()) for trial in rows))
            for stage in Stage
            if (rows := [trial for trial in self.trials if trial.stage is stage])
        }

    def below_defaults(self) -> tuple[str, ...]:
        """What was measured with less than the defaults: shorter windows, fewer rounds, a shorter soak."""
        options = self.setup.get("options") or {}
        rows = []
        rounds = options.get("rounds")
        if isinstance(rounds, int) and rounds < DEFAULT_ROUNDS:
            rows.append(f"{wording.plural(rounds, 'confirmation round')} (default {DEFAULT_ROUNDS})")
        soak = options.get("soak")
        if isinstance(soak, int | float) and soak < DEFAULT_SOAK_S:
            rows.append(f"soak of {wording.duration(soak)} (default {wording.duration(DEFAULT_SOAK_S)})" if soak else "no soak")
        window = self.load_plan.get("window_s")
        if isinstance(window, int | float) and window < DEFAULT_WINDOW_S:
            rows.append(f"windows of {wording.duration(window)} (default {wording.duration(DEFAULT_WINDOW_S)} or more)")
        return tuple(rows)

    def verdict_line(self) -> str:
        """One sentence that can stand alone."""
        answer = self.answer
        if answer is None:
            return f"No answer yet: {wording.plural(len(self.trials), 'engine start')} so far"
        word, held = wording.metric_word(self.metric), condition(self.stated_length)
        change = f": {word} {self.gain_text(answer.gain)}{held}" if answer.gain else ""
        match answer.verdict:
            case Verdict.BETTER:
                breaks = f", which break{'s' if self.has_command else ''} the limits" if answer.baseline_breaks else ""
                text = f"Better than {self.baseline_name}{breaks}{change}"
            case Verdict.NO_GAIN:
                text = f"No measurable gain over {self.baseline_name}{change}"
            case Verdict.NOTHING_FEASIBLE:
                text = f"Nothing feasible: {answer.reason}"
            case Verdict.UNCONFIRMED:
                text = f"Unconfirmed, against {self.baseline_name}{change}"
        return f"SIMULATED. {text}" if self.simulated else text

    @property
    def stated_length(self) -> float | None:
        """Tokens a step that drafts were stated to bring in what is compared, or in the baseline; ``None`` in neither."""
        arms, fixed = (*self.challenger_starts()[:1], *self.arm(winner=False)[:1]), self.setup.get("fixed") or {}
        return next((length for one in arms if (length := stated_length({**fixed, **one.config})) is not None), None)

    def gain_text(self, gain: Gain | None) -> str:
        return wording.gain_text(gain, maximize=self.maximize)

    @property
    def has_command(self) -> bool:
        """Whether the baseline is a command that was given."""
        options = self.setup.get("options") or {}
        return bool(options.get("from_file") or options.get("command"))

    @property
    def baseline_name(self) -> str:
        if self.has_command:
            return self._repaired("the command in use", "it does")
        fixed = " with what --set fixes" if (self.setup.get("options") or {}).get("set") else ""
        return self._repaired(f"vLLM's defaults{fixed}", "they do")

    def _repaired(self, name: str, verb: str) -> str:
        """A baseline's name, with what had to be changed of it and that it does not start otherwise."""
        if self.answer is None or self.answer.repair is None:
            return name
        return f"{name}, repaired by {flags_text(self.answer.repair.changes)} (as given {verb} not start here)"


def _by_phase(trials: Sequence[TrialRecord]) -> dict[Phase, float]:
    return {phase: total for phase in Phase if (total := sum(trial.phase_s.get(phase, 0.0) for trial in trials))}


def _one_start(trial: TrialRecord, kind: str, reason: str) -> str:
    """In a confirmation a single start may break a limit by noise: whose start it was, and that its arm's mean decides."""
    if trial.stage is Stage.CONFIRMATION and trial.arm is not None and kind.startswith("limit:"):
        return f"{trial.arm} arm, one start; its mean decides: {reason}"
    return reason


def _one_arm(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Finalist and lite may be the same configuration: then the first of the two arms, since arms are not pooled."""
    return tuple(trial for trial in trials if trial.arm is trials[0].arm)
