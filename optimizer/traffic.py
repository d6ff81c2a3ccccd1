"""``vopt workload``: a workload file from what a running server counted."""

from __future__ import annotations

import json
import os

from vopt.optimizer.bench import watch_traffic
from vopt.optimizer.bench_load import checked_output
from vopt.optimizer.errors import UsageError
from vopt.optimizer.load.client import read_metrics
from vopt.optimizer.load.target import parse_target, read_api_key
from vopt.optimizer.options import WorkloadOptions


def workload_from_metrics(options: WorkloadOptions) -> str:
    """Watch a server and write the workload that it had; the path and what is in it, as text.

    Raises:
        UsageError: no URL, a time that is not above 0, or nothing finished meanwhile.
        EnvironmentLacks: the server gives no metrics.
    """
    if options.from_metrics is None:
        raise UsageError("no server is named", hint="vopt workload --from-metrics http://127.0.0.1:8000 --for 10m")
    if not 0 < options.for_s < float("inf"):
        raise UsageError(f"--for {options.for_s:g}: a time above 0 seconds", hint="--for 10m")
    checked_output("--output", options.output)
    target = parse_target(options.from_metrics.removesuffix("/metrics"), "", api_key=read_api_key(None, os.environ))
    name = options.output.name.partition(".")[0]
    traffic = watch_traffic(lambda: read_metrics(target), options.for_s, name=name)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lined = options.output.suffix == ".jsonl"  # a name that promises one JSON value a line
    text = json.dumps(traffic.workload.to_json(), indent=None if lined else 1) + "\n"
    with open(os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    prompt, output = traffic.workload.lengths.mean
    lines = [
        str(options.output),
        f"  {traffic.requests:,} requests in {traffic.seconds:.0f} s: {traffic.requests_per_s:.3g} per second",
        f"  {prompt:,.0f} prompt and {output:,.0f} output tokens on average",
    ]
    if traffic.running is not None and traffic.waiting is not None:
        lines.append(f"  {traffic.running:.0f} running and {traffic.waiting:.0f} waiting, mean of the two looks")
    lines += [f"  {note}" for note in traffic.notes]
    rate = f"--rate {traffic.requests_per_s:.3g}"
    return "\n".join([*lines, f"  vopt bench --workload {options.output} {rate} …"])
