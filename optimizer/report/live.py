"""Progress of a search: what was heard so far, and how it reads as lines. Pure: the caller owns clock and terminal."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vopt.optimizer.events import Event, LoadTicked, Note, PhaseBegan, StageBegan, TrialBegan, TrialEnded
from vopt.optimizer.history import Stage, TrialRecord
from vopt.optimizer.judge import SOAK_ENDINGS
from vopt.optimizer.load.plan import Tick
from vopt.optimizer.report import wording
from vopt.optimizer.report.blocks import Column, Table, TableMaker, Tone
from vopt.optimizer.report.redaction import clean_text
from vopt.optimizer.trial import Phase

GIB = 2**30
LAST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the GPUs of the search, all together, in bytes."""

    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """One finished start, as the table at the end shows it."""

    record: TrialRecord
    value: float | None
    reason: str
    against: float | None


@dataclass(slots=True)
class Progress:
    """What a listener knows. ``hear`` every event with the seconds since the search began; then ask for lines.

    ``metric`` is the goal's, ``objectives`` those that it weighs where there are several; ``secrets`` are values that must
    not be shown.
    """

    metric: str = "tokens_per_s"
    maximize: bool = True
    simulated: bool = False
    secrets: Sequence[str] = ()
    objectives: Sequence[str] = ()
    stage: StageBegan | None = None
    stage_began_s: float = 0.0
    ended_in_stage: int = 0
    trial: TrialBegan | None = None
    trial_began_s: float = 0.0
    phase: PhaseBegan | None = None
    phase_began_s: float = 0.0
    tick: Tick | None = None
    best: float | None = None
    best_label: str = ""
    baseline: float | None = None
    failures: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=LAST_FAILURES))
    ended: list[Ended] = field(default_factory=list)

    def hear(self, event: Event, at_s: float) -> None:
        match event:
            case Note():
                pass
            case StageBegan():
                self.stage, self.stage_began_s, self.ended_in_stage = event, at_s, 0
            case TrialBegan():
                self.trial, self.trial_began_s, self.phase, self.tick = event, at_s, None, None
            case PhaseBegan():
                if event.expected_s is None:
                    event = replace(event, expected_s=self._usual_s(event.phase))
                self.phase, self.phase_began_s, self.tick = event, at_s, None
            case LoadTicked():
                self.tick = event.tick
            case TrialEnded():
                self._end(event)

    def _end(self, event: TrialEnded) -> None:
        self.ended_in_stage += 1
        self.trial = self.phase = self.tick = None
        if event.best is not None and event.best != self.best:
            # After a resume the best may be a start that this listener never heard of.
            self.best, self.best_label = event.best, event.record.label if event.value == event.best else ""
        if event.baseline is not None:
            self.baseline = event.baseline
        if event.reason:
            self.failures.append((event.record.label, self._safe(failure_text(event.record, event.reason))))
        self.ended.append(Ended(event.record, event.value, self._safe(event.reason), event.against))

    def _usual_s(self, phase: Phase) -> float | None:
        """What this phase took in the starts before, those of the running stage first; a soak is like no other load, and a
        simulated second is none."""
        stage = self.trial.request.stage if self.trial else None
        if self.simulated or (stage is Stage.SOAK and phase is Phase.LOAD):
            return None
        ended = [row.record for row in self.ended if row.record.failure is None and row.record.stage is not Stage.SOAK]
        like = [record for record in ended if record.stage is stage] or ended
        seen = [seconds for record in like if (seconds := record.phase_s.get(phase))]
        return statistics.median(seen) if seen else None

    def _safe(self, text: str) -> str:
        return wording.one_line(clean_text(text, self.secrets))

    def left_s(self, at_s: float) -> float | None:
        """Seconds that the stage still takes: by its own pace once a start ended, else as planned."""
        stage = self.stage
        if stage is None:
            return None
        elapsed = at_s - self.stage_began_s
        planned = stage.expected_s / stage.trials if stage.expected_s is not None and stage.trials else None
        if self.simulated:
            planned = None  # in seconds of the simulation, not of this clock
        if self.ended_in_stage:
            began = self.trial_began_s if self.trial else at_s
            paced = (began - self.stage_began_s) / self.ended_in_stage
            # The first starts are not typical: the plan counts as much as one start.
            each = paced if planned is None else (paced * self.ended_in_stage + planned) / (self.ended_in_stage + 1)
            return max(0.0, each * (stage.trials - self.ended_in_stage) - (at_s - began))
        return None if planned is None else max(0.0, planned * stage.trials - elapsed)

    def headline(self, at_s: float) -> str:
        """``search 5 of 16 · 12:40 · about 31 min left``."""
        parts = ["SIMULATED"] if self.simulated else []
        if self.stage:
            running = min(self.ended_in_stage + (self.trial is not None), self.stage.trials)
            parts.append(f"{self.stage.stage} {running} of {self.stage.trials}" if self.stage.trials else self.stage.stage)
        parts.append(wording.clock(at_s))
        if (left := self.left_s(at_s)) is not None:
            parts.append(f"about {wording.about(left)} left in this stage")
        return " · ".join(parts)

    def trial_line(self) -> str:
        if self.trial is None:
            return "between two trials" if self.stage else "preparing"
        config = self._safe(wording.config_text(self.trial.request.config))
        return f"trial {self.trial.request.label}: {config} ({self._safe(self.trial.reason)})"

    def phase_line(self, at_s: float) -> str:
        """``load 0:40 of about 1:21 · 512 in flight, window 60 s``."""
        if self.phase is None:
            return ""
        spent = wording.clock(at_s - self.phase_began_s)
        expected = f" of about {wording.clock(self.phase.expected_s)}" if self.phase.expected_s is not None else ""
        detail = f" · {self._safe(self.phase.detail)}" if self.phase.detail else ""
        return f"{self.phase.phase} {spent}{expected}{detail}"

    def phase_share(self, at_s: float) -> float | None:
        """How far the phase is, 0-1; a phase that outlasts its expectation stays below 1."""
        if self.phase is None or not self.phase.expected_s:
            return None
        return min(0.99, max(0.0, at_s - self.phase_began_s) / self.phase.expected_s)

    def load_line(self) -> str:
        """``1,790 done, 8 failed (99.6 %) · 512 running · 21,579 tokens/s · KV cache 66 %``."""
        tick = self.tick
        if tick is None:
            return ""
        counted = tick.succeeded + tick.failed
        parts = [f"{tick.succeeded:,} done, {tick.failed:,} failed"]
        if counted:
            parts[0] += f" ({wording.metric_text('success_rate', tick.succeeded / counted)})"
        parts.append(f"{tick.running:,} running")
        if tick.window_open_s is None:
            parts.append("warming up")
        elif tick.window_s > 0:
            parts.append(wording.metric_text("tokens_per_s", tick.window_tokens / tick.window_s))
        if tick.kv_usage is not None:
            parts.append(f"KV cache {wording.metric_text('kv_peak', tick.kv_usage)}")
        return " · ".join(parts)

    def best_line(self) -> str:
        if self.best is None:
            baseline = f" (baseline {self._value(self.baseline)})" if self.baseline is not None else ""
            return f"none yet{baseline}"
        text = self._value(self.best) + (f" (trial {self.best_label})" if self.best_label else "")
        if self.baseline:
            against = wording.metric_text(self.metric, self.baseline)
            text += f", {wording.change_text(self.best / self.baseline)} against the baseline's {against}"
        return text

    def facts(self, at_s: float, memory: MemoryUse | None = None) -> list[tuple[str, str]]:
        """The live display as (name, text) rows, the headline excluded."""
        rows = [("Trial", self.trial_line()), ("Phase", self.phase_line(at_s)), ("Load", self.load_line())]
        if memory is not None:
            rows.append(("GPU memory", memory_text(memory)))
        rows.append(("Best so far", self.best_line()))
        rows += [
            ("Last failures" if place == 0 else "", f"{label}: {text}") for place, (label, text) in enumerate(self.failures)
        ]
        return [(name, text) for name, text in rows if text]

    def plain_line(self, event: Event, at_s: float) -> str | None:
        """One line for a log file, after ``hear``; ``None`` for what only a live display shows."""
        text = self._plain(event)
        return None if text is None else f"[{wording.clock(at_s)}] {text}"

    def _plain(self, event: Event) -> str | None:
        match event:
            case Note(text):
                return self._safe(text)
            case StageBegan(stage, trials, expected_s):
                kind = " of simulated time" if self.simulated else ""
                about = f", about {wording.about(expected_s)}{kind}" if expected_s is not None else ""
                return f"{stage}: {wording.plural(trials, 'engine start')}{about}"
            case TrialBegan():
                return self.trial_line()
            case PhaseBegan(label, phase, detail, expected_s):
                if self.phase is not None and expected_s is None:
                    expected_s = self.phase.expected_s
                about = f" (about {wording.about(expected_s)})" if expected_s is not None else ""
                return f"trial {label}: {phase}{about}" + (f": {self._safe(detail)}" if detail else "")
            case LoadTicked():
                return None
            case TrialEnded():
                return self.ended_line(event)

    def ended_line(self, event: TrialEnded) -> str:
        """``trial 1: 22,610 tokens/s, +5.8 %, the best so far``; a soak has no figure that compares with the others."""
        if event.record.stage is Stage.SOAK:
            return self._safe(soak_text(event.record, event.reason))
        said = [f"trial {event.record.label}: {self._value(event.value)}{self._each(event.record)}"]
        if event.value is not None and event.against and event.record.label != "0":
            said.append(wording.change_text(event.value / event.against))
        if event.reason:
            said.append(f"cannot win: {self._safe(failure_text(event.record, event.reason))}")
        elif event.value is not None and event.value == event.best:
            said.append("the best so far")
        return ", ".join(said)

    def _value(self, value: float | None) -> str:
        """The figure; that of several goals has no unit, so its name."""
        text = wording.metric_text(self.metric, value)
        return text if wording.metric_unit(self.metric) else f"{wording.metric_word(self.metric)} {text}"

    def _each(self, record: TrialRecord) -> str:
        """`` (24,120 tokens/s, mean E2E 4,111 ms)``: what the metric of several goals is made of."""
        if record.metrics is None or not self.objectives:
            return ""
        values = [(name, record.metrics.get(name)) for name in self.objectives]
        said = (
            (f"{wording.metric_word(name)} " if wording.is_time(name) else "") + wording.metric_text(name, value)
            for name, value in values
        )
        return f" ({', '.join(said)})"

    def table(self) -> Table:
        """Every finished start: the table at the end."""
        columns = (
            Column("Trial"),
            Column(wording.metric_label(self.metric), right=True),
            Column("vs baseline", right=True),
            Column("Success", right=True),
            Column("Result"),
            Column("Configuration", wide=True),
        )
        table = TableMaker("Engine starts" + (" (simulated)" if self.simulated else ""), columns)
        for row in self.ended:
            soak = row.record.stage is Stage.SOAK
            value = None if soak else row.value
            ratio = value / row.against if value is not None and row.against else None
            success = row.record.metrics.get("success_rate") if row.record.metrics else None
            best = row.record.label == self.best_label
            table.add(
                row.record.label,
                wording.metric_text(self.metric, value),
                wording.change_text(ratio) if ratio is not None else wording.NONE,
                wording.metric_text("success_rate", success),
                "best" if best else "no crash" if soak and not row.reason else result_text(row.record, row.reason),
                self._safe(wording.config_text(row.record.config)),
                tone=Tone.BAD if row.reason else Tone.GOOD if best else Tone.PLAIN,
            )
        return table.done()


def result_text(record: TrialRecord, reason: str) -> str:
    """In two or three words what came of a start."""
    if record.failure:
        return wording.kind_text(record.failure.kind)
    if not reason:
        return "ok"
    return "over a limit" if record.status is None or record.status == "complete" else wording.kind_text(record.status)


def soak_text(record: TrialRecord, reason: str) -> str:
    """``soak: no crash in 10:00, 1,204 requests, 0 failed``; without a crash but with a reason, that too."""
    if record.failure is not None:
        return f"{record.label}: cannot win: {failure_text(record, reason)}"
    died = record.status in SOAK_ENDINGS
    load_s = record.phase_s.get(Phase.LOAD)
    said = [f"{record.label}: no crash" + (f" in {wording.clock(load_s)}" if load_s else "")] if not died else [record.label]
    if record.metrics is not None:
        ended = record.metrics.succeeded + record.metrics.failed
        said += [wording.plural(ended, "request"), f"{record.metrics.failed:,} failed"]
    return ", ".join([*said, *([f"cannot win: {reason}"] if reason else [])])


def failure_text(record: TrialRecord, reason: str) -> str:
    """``Out of memory at start: No available memory …``; the reason alone when the start itself did not fail."""
    return f"{wording.kind_text(record.failure.kind)}: {reason}" if record.failure else reason


def memory_text(memory: MemoryUse) -> str:
    """``131.2 of 139.8 GiB``."""
    return f"{memory.used_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB"
