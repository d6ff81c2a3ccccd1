"""What ``vopt bench`` says: the whole document, and the same as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vopt.objectives.goals import DEFAULT_MIN_SUCCESS
from vopt.objectives.metrics import METRICS
from vopt.objectives.records import LoadStatus
from vopt.optimizer.bench import BenchLabels, BenchResult, MeasuredLoad, bench_document, repeat_summary
from vopt.optimizer.compile_watch import COMPILED, REMEASURED
from vopt.optimizer.evaluate import UNEXPECTED_HIT_RATE
from vopt.optimizer.load.shares import CLIENT_PROCESSES
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.measurement import CLIENT_LIMITED, FRONT_END_LIMITED, SCALE_OUT, front_end_limited
from vopt.optimizer.report.blocks import Block, Column, Facts, Line, Table, TableMaker, plain_text
from vopt.optimizer.report.wording import NONE, command_text, metric_label, metric_text, metric_unit, one_line, plural

UNEXPECTED_HITS = "unexpected_prefix_hits"
SHOWN = (
    *("tokens_per_s", "output_tokens_per_s", "requests_per_s", "goodput_per_s", "success_rate"),
    *(f"{part}_{name}_s" for name in ("ttft", "tpot", "e2e") for part in ("mean", "p50", "p95", "p99")),
    *("kv_peak", "preemptions", "prefix_hit_rate", "acceptance_length"),
)
_WHOLE_RUN = {
    name: (info.bench_serve, 1e-3 if info.bench_serve.endswith("_ms") else 1.0)
    for name, info in METRICS.items()
    if info.bench_serve is not None
}
"""Our metrics as the whole-run figures of ``vllm bench serve``, and the factor to our unit."""


def full_document(
    result: BenchResult, labels: BenchLabels, source: RequestSource, load_words: str, simulated: bool
) -> dict[str, Any]:
    """The document of the first load, with what repeats and checks add under ``vopt``."""
    first = result.first
    document = bench_document(first.load, first.metrics, labels, started=result.started[0])
    ours = document["vopt"]
    loads = [load for start in result.starts for load in start]
    flags, notes = list(ours["flags"]), list(ours["notes"])
    for flag, words in checks(loads, source):
        if flag and flag not in flags:  # the load may have said so itself
            flags.append(flag)
        notes.append(words)
    ours |= {"flags": flags, "notes": notes, "load": load_words, "simulated": simulated}
    if len(loads) > 1:
        ours["repeat"] = repeat_summary(result)
        ours["loads"] = [
            {
                "start": start + 1,
                "status": load.load.status.value,
                "succeeded": load.metrics.succeeded,
                "failed": load.metrics.failed,
                "metrics": dict(load.metrics.values),
            }
            for start, of_start in enumerate(result.starts)
            for load in of_start
        ]
    return document


def checks(loads: Sequence[MeasuredLoad], source: RequestSource) -> list[tuple[str, str]]:
    """(flag, words) of what keeps these figures from being taken at face value."""
    found: list[tuple[str, str]] = []
    limited = sum(measured.load.client.limited for measured in loads)
    if limited:
        found.append(
            (
                CLIENT_LIMITED,
                f"the load client, not the engine, was the limit in {plural(limited, 'load')}: these figures are no claim "
                "about the engine; use a machine with more free cores, or more --client-processes with a server",
            )
        )
    outside = [measured.metrics["front_end_share"] for measured in loads if front_end_limited(measured.metrics.values)]
    if outside:
        found.append(
            (
                FRONT_END_LIMITED,
                f"up to {max(outside):.0%} of the requests in flight were outside the engine, in the front end: no engine "
                f"argument makes that faster. {SCALE_OUT}",
            )
        )
    processes = dict.fromkeys(flag for measured in loads for flag in measured.load.flags if flag.startswith(CLIENT_PROCESSES))
    if processes:
        shared = " and ".join(flag.removeprefix(CLIENT_PROCESSES) for flag in processes)
        found.append(("", f"{shared} client processes shared the load; compare with figures by as many (--client-processes)"))
    again = sum(REMEASURED in measured.load.flags for measured in loads)
    if again:
        found.append(("", f"{plural(again, 'load')} measured again, because kernels were compiled in the window"))
    compiled = sum(COMPILED in measured.load.flags for measured in loads)
    if compiled:
        found.append((COMPILED, f"{plural(compiled, 'load')} had kernels compiled in the window, which the figures hold too"))
    hits = max((measured.metrics.get("prefix_hit_rate") or 0.0 for measured in loads), default=0.0)
    if not source.reuses and hits >= UNEXPECTED_HIT_RATE:
        found.append((UNEXPECTED_HITS, f"{hits:.1%} of the prompt tokens came from the prefix cache, though no prompt repeats"))
    least = min((measured.metrics.get("success_rate") for measured in loads), key=lambda share: 1.0 if share is None else share)
    if least is not None and least < DEFAULT_MIN_SUCCESS:
        found.append(
            ("", f"only {least:.1%} of the requests succeeded: latencies are over those alone, which may be the easy ones")
        )
    for measured in loads:
        if measured.load.status is not LoadStatus.COMPLETE:
            found.append(("", f"a load ended as {measured.load.status.value}: {measured.load.detail or 'no further words'}"))
        if measured.load.window is None:
            found.append(("", "no window opened: the load ended within its warm-up, so only whole-run figures exist"))
    return list(dict.fromkeys(found))


def bench_text(document: Mapping[str, Any], result: BenchResult, width: int | None = None) -> str:
    """A readable page: what was measured, figures with intervals, failures by kind, repeats, notes. ``width``: a terminal's."""
    ours = document["vopt"]
    blocks: list[Block] = []
    if ours["simulated"]:
        blocks.append(Line("SIMULATED: no engine ran."))
    blocks += [Facts(tuple(_facts(document, ours))), _figures(document, ours)]
    if ours["failures"]:
        blocks.append(_failures(ours["failures"]))
    if "repeat" in ours:
        blocks.append(_repeats(ours["repeat"]))
    if ours["notes"]:
        blocks.append(Line(""))
        blocks += [Line(f"Note: {one_line(note)}") for note in ours["notes"]]
    return plain_text(blocks, width).rstrip("\n")


def _facts(document: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, str]]:
    engine = ours["engine"] or {}
    environment = ours["environment"]
    place = environment.get("url") or ", ".join(environment.get("gpus", ()))
    counts, window = ours["requests"], ours["window"]
    rows = [
        ("Model", f"{document['model_id']} on {place}"),
        ("vLLM", str(engine.get("vllm_version", NONE))),
    ]
    if ours.get("command"):
        rows.append(("Command", command_text(ours["command"])))
    rows += [
        ("Workload", f"{ours['workload']['name']} ({ours['workload']['sha256']}), {document['endpoint_type']} endpoint"),
        ("Load", ours["load"]),
        ("Window", NONE if window is None else f"{window['closed_s'] - window['opened_s']:.1f} s ({ours['status']})"),
        (
            "Requests",
            f"{counts['succeeded']:,} succeeded, {counts['failed']:,} failed in the window; "
            f"{document['completed']:,} and {document['failed']:,} in the whole run"
            + (f"; {counts['censored']:,} still running at the end" if counts["censored"] else "")
            + (f"; {counts['not_sent']:,} not sent" if counts["not_sent"] else ""),
        ),
    ]
    return rows


def _figures(document: Mapping[str, Any], ours: Mapping[str, Any]) -> Table:
    columns = (
        *(Column("Metric"), Column("window", right=True), Column("95 % interval", right=True)),
        Column("whole run", right=True),
    )
    table = TableMaker(
        "Figures", columns, note="Intervals describe this run; engine starts differ by more (--repeat N measures by how much)."
    )
    for name in SHOWN:
        value, interval = ours["metrics"].get(name), ours["intervals_95"].get(name)
        field, factor = _WHOLE_RUN.get(name, ("", 1.0))
        whole = document.get(field)
        if value is None and whole is None:
            continue
        between = NONE
        if interval is not None:
            between = f"{metric_text(name, interval[0], unit=False)} to {metric_text(name, interval[1], unit=False)}"
        table.add(
            metric_label(name), metric_text(name, value), between, metric_text(name, None if whole is None else whole * factor)
        )
    return table.done()


def _failures(kinds: Mapping[str, Any]) -> Table:
    table = TableMaker("Failed requests", (Column("Kind"), Column("n", right=True), Column("First message", wide=True)))
    for kind, count in kinds.items():
        table.add(kind, f"{count['n']:,}", one_line(count["first_message"]))
    return table.done()


def _repeats(repeat: Mapping[str, Any]) -> Table:
    note = (
        "Only the spread from start to start supports comparisons between configurations."
        if repeat["supports_comparison"]
        else "All loads ran on one engine: they say nothing about the next start, so they support no comparison."
    )
    columns = (
        Column("Metric"),
        *(Column(name, right=True) for name in ("within an engine", "added by starts", "of starts")),
        Column("loads of each start", wide=True),
    )
    table = TableMaker(f"{plural(repeat['loads'], 'load')} on {plural(repeat['starts'], 'engine start')}", columns, note=note)
    for name, spread in repeat["metrics"].items():
        starts = " | ".join(
            " ".join(metric_text(name, value, unit=False) for value in start) if start else NONE for start in spread["starts"]
        )
        table.add(
            f"{metric_label(name)}, {metric_unit(name)}",
            *(_percent(spread[key]) for key in ("within_engine", "between_starts", "of_starts")),
            starts,
        )
    return table.done()


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.2f} %"
