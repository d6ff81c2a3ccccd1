"""``vopt space --check``: a launch command taken apart flag by flag, as data, and the command that this vLLM accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vopt.optimizer.check_flags import (
    FlagFinding,
    FlagStatus,
    finding,
    instead_of,
    is_last,
    meant,
    merged,
    retired_value,
    unknown,
    variables,
)
from vopt.optimizer.command import Flag, LaunchCommand, argument_words, shell_line, to_argv
from vopt.optimizer.command_reader import parse_command
from vopt.optimizer.engine.arguments import VllmProbe
from vopt.optimizer.not_simulated import left_out
from vopt.optimizer.trial import EngineConfig
from vopt.search_spaces.arguments import Arguments
from vopt.search_spaces.circumstances import Circumstances
from vopt.search_spaces.memory import Possible, Verdict, can_start
from vopt.search_spaces.parameter import Violation
from vopt.search_spaces.parse import base_declarations, canonical
from vopt.search_spaces.relief import SHARE, TENSOR, more_gpus, more_memory
from vopt.search_spaces.retired import flags_of_several, retired, valueless_flags
from vopt.search_spaces.rules import rule_violations
from vopt.search_spaces.subject import Subject

FINE, WARNINGS, CANNOT_START = 0, 1, 6
MOST_REPAIRS = 8


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The whole answer. ``accepted`` is a command that this vLLM accepts, ``None`` when the model is missing or no repair is
    known; ``changes`` say how it differs beyond the flags. ``exit_code``: 0 fine, 1 warnings, 6 cannot start."""

    version: str
    model: str | None
    findings: tuple[FlagFinding, ...]
    violations: tuple[Violation, ...]
    memory: str
    memory_possible: Possible
    accepted: tuple[str, ...] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    engine_says: str = ""
    memory_close: bool = False
    not_simulated: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        refused = any(one.status.fatal for one in self.findings) or bool(self.violations) or bool(self.engine_says)
        if refused or self.memory_possible is Possible.CANNOT:
            return CANNOT_START
        warned = any(one.status is not FlagStatus.GOOD for one in self.findings) or self.memory_close
        return WARNINGS if warned or self.model is None else FINE

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": 1,
            "version": self.version,
            "model": self.model,
            "exit_code": self.exit_code,
            "flags": [{**asdict(one), "status": one.status.value} for one in self.findings],
            "violations": [{"rule": v.rule, "detail": v.detail} for v in self.violations],
            "memory": {"possible": self.memory_possible.value, "reason": self.memory},
            "engine": self.engine_says,
            "changes": list(self.changes),
            "command": list(self.accepted) if self.accepted is not None else None,
            "environment": dict(self.environment),
            "not_simulated": list(self.not_simulated),
        }


AskEngine = Callable[[str, Mapping[str, Any]], str]
"""(model, engine config) -> what the installed vLLM objects to, empty when it accepts."""


def check_command(
    command: str | Sequence[str],
    subject: Subject,
    *,
    more: Mapping[str, Any] | None = None,
    model: str | None = None,
    ask: AskEngine | None = None,
    simulated: bool = False,
) -> CheckReport:
    """Takes a command apart. ``more`` and ``model`` are what its ``--config`` file says (read by the caller; the command's own
    words win over them).

    ``subject.shape`` ``None``: rules and memory arithmetic that need the model are left out, and the answer says so.
    ``simulated``: the machine is, so the estimate of its memory is what its engines have, and arguments that a simulation does
    not see are named.
    """
    schema = subject.arguments
    parsed = parse_command(command, schema, strict=False, valueless=valueless_flags(), several=flags_of_several())
    parsed = replace(parsed, model=parsed.model or model)
    given = {**(more or {}), **parsed.config}
    of = Circumstances(subject)
    findings = [
        finding(flag, given, schema, of.resolved, last=is_last(flag, parsed.flags[i + 1 :], schema))
        for i, flag in enumerate(parsed.flags)
    ]
    findings += variables(parsed.environment, schema)
    facts = of.facts()
    violations = tuple(rule_violations(_with_environment(given, parsed), facts))
    memory = _memory(subject, given, simulated)
    proposal, changes = _corrected(parsed, given, schema, of.resolved)
    proposal, repairs = _repaired(proposal, parsed, subject, facts, simulated)
    objection = ask(parsed.model, given) if ask is not None and parsed.model and not violations and not parsed.problems else ""
    accepted = None
    if parsed.model is not None and repairs is not None:
        accepted = to_argv(parsed.model, EngineConfig(proposal), parsed.front_end, schema)
    dead = {one.written.partition("=")[0] for one in findings if one.status is FlagStatus.UNREAD}
    return CheckReport(
        schema.version,
        parsed.model,
        tuple(findings),
        violations,
        memory.reason,
        memory.possible,
        accepted,
        {name: value for name, value in parsed.environment.items() if name not in dead},
        (*changes, *(repairs or ())),
        objection,
        subject.shape is not None and memory.possible is Possible.UNKNOWN,
        left_out(given, parsed.front_end, parsed.environment, subject.shape, schema.version) if simulated else (),
    )


def render_check(report: CheckReport) -> str:
    """For a terminal, without colours."""
    lines = [f"vLLM {report.version}: {report.model or 'no model is named'}", ""]
    width = max((len(one.written) for one in report.findings), default=0)
    for found in report.findings:
        lines.append(f"  {found.written:<{min(width, 44)}}  {found.status.value:<9}  {found.message}")
        if found.instead:
            lines.append(f"  {'':<{min(width, 44)}}  {'':<9}  write {shell_line(found.instead)}")
    lines += [f"  refused: {violation.detail} [{violation.rule}]" for violation in report.violations]
    if report.engine_says:
        lines.append(f"  refused by vLLM itself: {report.engine_says}")
    lines += ["", f"Memory: {report.memory}", *(f"Note: {note}" for note in report.not_simulated)]
    warned = "It may not start." if report.memory_close else "It starts, with warnings."
    verdicts = {FINE: "This command is fine.", WARNINGS: warned, CANNOT_START: "It cannot start."}
    lines.append(verdicts[report.exit_code])
    lines += [f"  changed: {change}" for change in report.changes]
    if report.accepted is not None and report.exit_code != FINE:
        lines += ["", "A command that this vLLM accepts:", f"  {shell_line(report.accepted, report.environment)}"]
    return "\n".join(lines) + "\n"


def _with_environment(given: Mapping[str, Any], parsed: LaunchCommand) -> dict[str, Any]:
    return {**given, **{f"env:{name}": value for name, value in parsed.environment.items()}}


def _memory(subject: Subject, config: Mapping[str, Any], exact: bool) -> Verdict:
    if subject.shape is None:
        return Verdict(Possible.UNKNOWN, "the model's shape is not known: no arithmetic")
    try:
        return can_start(subject.shape, subject.gpu, config, subject.arguments.version, exact=exact)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        return Verdict(Possible.UNKNOWN, f"the arithmetic does not cover this configuration: {error}")


def _corrected(
    parsed: LaunchCommand, given: Mapping[str, Any], schema: Arguments, resolved: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The engine config with retired flags replaced, and what was dropped."""
    config: dict[str, Any] = dict(given)
    notes = []
    for flag in parsed.flags:
        if flag.name is not None and not flag.problem:
            if retired_value(flag, schema) is not None and config.get(flag.name) == flag.value:
                del config[flag.name]
                notes.append(f"{' '.join((flag.written, *flag.words))} is dropped")
            continue
        if (switch := meant(flag, schema)) is not None and flag.name is not None:
            config[flag.name] = switch
            continue
        old = retired().get(canonical(flag.written)) if flag.name is None else None
        if old is not None and old.merge:
            if not isinstance(config.get(old.merge) or {}, Mapping):
                notes.append(
                    f"{' '.join(argument_words(old.merge, config[old.merge], schema))} is dropped: it is no JSON object"
                )
            config = merged(config, old, flag)
            continue
        words = instead_of(old, flag, schema) if old is not None else ()
        if words:
            read = parse_command(["--model", "x", *words], schema, strict=False)
            config |= {n: v for n, v in read.config.items() if resolved.get(n) != v}
        if not words or old is None:
            notes.append(f"{' '.join((flag.written, *flag.words))} is dropped")
    spec = config.get("speculative_config")
    if isinstance(spec, dict) and not spec.get("method") and not spec.get("model"):
        # Tokens without a method or a model were never enough.
        del config["speculative_config"]
        notes.append("speculation is dropped: neither a method nor a draft model was named")
    return config, tuple(notes)


def _repaired(
    config: dict[str, Any], parsed: LaunchCommand, subject: Subject, facts: Mapping[str, Any], exact: bool
) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """The config after the smallest repairs that rules and memory name; notes ``None`` when something stays broken."""
    notes: list[str] = []
    for _ in range(MOST_REPAIRS):
        broken = list(rule_violations(_with_environment(config, parsed), facts))
        memory = _memory(subject, config, exact)
        if memory.possible is Possible.CANNOT:
            broken.append(Violation("memory", memory.reason, _room(config, subject, facts, exact) or memory.repair))
        if not broken:
            return config, tuple(notes)
        repair = broken[0].repair
        if not repair or all(config.get(name) == value for name, value in repair.items()):
            return config, None
        for name, value in repair.items():
            notes.append(f"{name}: {config.get(name)!r} -> {value!r} ({broken[0].detail})")
            if value is None:
                config.pop(name, None)
            else:
                config = {**config, name: value}
    return config, None


def _room(config: Mapping[str, Any], subject: Subject, facts: Mapping[str, Any], exact: bool) -> dict[str, Any] | None:
    """What a search would repair the same command by: the GPUs that are there, then more of their memory."""
    domains = {declaration.name: declaration.values for declaration in base_declarations()}

    def fit(other: Mapping[str, Any]) -> Possible:
        return Possible.CANNOT if rule_violations(other, facts) else _memory(subject, other, exact).possible

    sizes = [size for size in domains[TENSOR] if not rule_violations({**config, TENSOR: size}, facts)]
    wider = more_gpus(config, subject.gpus, sizes, fit)
    return wider or more_memory(config, float(facts["resolved"][SHARE]), domains[SHARE], fit)


def modernised(config: Mapping[str, Any], schema: Arguments) -> tuple[EngineConfig, tuple[FlagFinding, ...]]:
    """An engine config of another vLLM as this one takes it, and what was said about each argument that it lacks.

    Findings that are ``UNKNOWN`` have no modern form: their arguments are left out.
    """
    known = {name: value for name, value in config.items() if name in schema.engine_names or name.startswith("env:")}
    lost = [
        Flag(f"--{name.replace('_', '-')}", None, (_word(value),), value, problem=f"not an argument of vLLM {schema.version}")
        for name, value in config.items()
        if name not in known
    ]
    corrected, _ = _corrected(LaunchCommand(None, EngineConfig(known), flags=tuple(lost)), known, schema, {})
    findings = tuple(unknown(flag, " ".join((flag.written, *flag.words)), schema) for flag in lost)
    return EngineConfig(corrected), findings


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list, bool)) or value is None else str(value)


def objection_of(probe: VllmProbe) -> AskEngine:
    """An ``AskEngine`` over a ``VllmProbe``."""

    def ask(model: str, config: Mapping[str, Any]) -> str:
        verdict = probe.ask(model, config)
        return "" if verdict.accepted else f"{verdict.kind}: {verdict.reason}"

    return ask


__all__ = ["CheckReport", "FlagFinding", "FlagStatus", "check_command", "modernised", "objection_of", "render_check"]
