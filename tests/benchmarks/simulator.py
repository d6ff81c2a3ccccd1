"""The simulator against reality: what it says of configurations that were measured on real GPUs.

    python tests/benchmarks/simulator.py [TABLE.jsonl ...] [--json]

Four kinds of records: tables of engine starts (`tests/gpu/record_table.py`; by default those of `tests/assets/h200`), bursts
(`bursts.json` there), restarts (`restarts.json` there: vopt's side, start times alone) and the published trials of other
people's GPUs (`published_trials.json`, vLLM 0.17.1). Printed: for each record measured and simulated figures with the error,
then for each kind and figure the median and worst error and Spearman's rank correlation over configurations (those that
differ by less than 2 % are taken as tied).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "optimizer" / "engine"))

from recorded import ASSETS, Start, read_table
from simulation import chat_lengths

from vopt.objectives.metrics import compute_metrics
from vopt.objectives.records import LoadResult
from vopt.optimizer.engine.hardware import Hardware, hardware
from vopt.optimizer.engine.simulated import Noise, SimulatedCaches, SimulatedSession
from vopt.optimizer.load.materialise import materialise
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.load.workload import CHAT, Workload
from vopt.optimizer.trial import Deadlines, EngineConfig, EngineFailure, StartClass, Started, TrialSpec
from vopt.search_spaces.model import known_model
from vopt.search_spaces.shape import ModelShape

PUBLISHED = ASSETS.parent / "published_trials.json"
RESTARTED_VERSION = "0.22.1"
NOISE = 0.02
"""Configurations whose measured figures differ by less are tied in a rank correlation."""
FIGURES = ("tokens_per_s", "mean_ttft_s", "mean_tpot_s", "mean_e2e_s", "engine_start_s", "kv_cache_tokens")


@dataclass(frozen=True, slots=True)
class Compared:
    """One record: measured and simulated figures by name; ``failed`` says for each side whether it failed."""

    group: str
    config: Mapping[str, Any]
    measured: Mapping[str, float] = field(default_factory=dict)
    simulated: Mapping[str, float] = field(default_factory=dict)
    failed: tuple[bool, bool] = (False, False)

    def errors(self) -> dict[str, float]:
        """Relative errors of the simulation."""
        both = [name for name in FIGURES if self.measured.get(name) and self.simulated.get(name)]
        return {name: self.simulated[name] / self.measured[name] - 1 for name in both}


def device_of(gpus: Sequence[str]) -> Hardware:
    """The simulated device of a record's GPUs."""
    words = gpus[0].split()
    return hardware(next(word for word in reversed(words) if any(letter.isdigit() for letter in word)).lower())


def session(
    model: str, arguments: Mapping[str, Any], device: Hardware, version: str, caches: SimulatedCaches, unaided: bool = True
) -> SimulatedSession:
    """A simulated start without noise, as vLLM does it by itself unless it is said. ``ValueError``: the model is not known."""
    shape = known_model(model) or known_model(f"Qwen/{model}")
    if shape is None:
        raise ValueError(f"{model}: no such model in search_spaces/models.toml")
    spec = TrialSpec("compared", model, EngineConfig(arguments), Path("unused"), "python", deadlines=Deadlines(start_s=3600.0))
    return SimulatedSession(spec, shape, device, version=version, noise=Noise(0.0, 0.0), caches=caches, unaided=unaided)


def engine_start_s(parts: Mapping[str, float]) -> float:
    """Seconds from the order to start until the engine takes requests, the import of vLLM left out."""
    return parts["engine"] if "engine" in parts else sum(s for name, s in parts.items() if not name.startswith("import"))


def started_figures(started: Started) -> dict[str, float]:
    return {"engine_start_s": engine_start_s(started.start_parts_s), "kv_cache_tokens": float(started.kv_cache_tokens or 0)}


def source_of(workload: Workload, max_model_len: int, seed: int) -> RequestSource:
    """A workload's requests as a simulation gets them: lengths alone."""
    made = materialise(
        workload,
        None,
        seed=seed,
        vocab=32_000,
        max_model_len=max_model_len,
        sampling={},
        natural_ends=False,
        prompts=False,
        replay=False,
    )
    return made.source


@dataclass
class RecordedCaches(SimulatedCaches):
    """Caches in the state that a recorded start found them in: what ran on that host before the record began is not in it."""

    found: StartClass | None = None

    def start_class(self, shape: ModelShape, key: str) -> StartClass:
        return super().start_class(shape, key) if self.found is None else self.found


def of_table(path: Path) -> Iterator[Compared]:
    """Every start of a table, at each of its load levels. Where the record lacks a start's class, the caches of the simulation
    say it, which grow in the recorded order."""
    table = read_table(path)
    header, caches = table.header, RecordedCaches()
    device, version = device_of(header["gpus"]), header["vllm_version"]
    fixed = header["fixed"]
    source = source_of(Workload.from_json(header["workload"]), fixed.get("max_model_len", 32768), header["seed"])
    model = {name.lower(): f"Qwen/{name}" for name in MODELS}.get(header["model"].lower(), header["model"])
    for start in table.starts:
        recorded = start.started.get("start_class")
        caches.found = StartClass(recorded) if recorded else None
        yield from of_start(
            path.stem, start, session(model, fixed | dict(start.config), device, version, caches), source, header
        )


MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3.5-9B", "Qwen3.5-35B-A3B-FP8", "Qwen3.5-35B-A3B")


def of_start(
    group: str, start: Start, one: SimulatedSession, source: RequestSource, header: Mapping[str, Any]
) -> Iterator[Compared]:
    """One start of a table and its loads."""
    measured: dict[str, float] = {}
    if start.started.get("kv_cache_tokens"):
        measured["kv_cache_tokens"] = start.started["kv_cache_tokens"]
    if start.started.get("start_class") and "engine" in start.started["start_parts_s"]:
        measured["engine_start_s"] = start.started["start_parts_s"]["engine"]
    try:
        simulated = started_figures(one.start(lambda phase, words: None))
    except EngineFailure:
        yield Compared(group, start.config, failed=(start.failure is not None, True))
        return
    yield Compared(group, start.config, measured, simulated, (start.failure is not None and not start.started, False))
    for level in header["levels"]:
        real = start.levels.get(level)
        try:
            load = one.load(source, closed(level, header["window_s"], header["seed"]), lambda tick: True)
        except EngineFailure:
            yield Compared(f"{group} at {level}", start.config, failed=(real is None, True))
            return
        if real is not None:
            values = compute_metrics(load, resamples=2).values
            yield Compared(f"{group} at {level}", start.config, real, values)


def closed(level: int, window_s: float, seed: int) -> LoadPlan:
    return LoadPlan(Arrivals.CLOSED, window_s, concurrency=level, max_doublings=0, min_requests=0, seed=seed)


def of_bursts(path: Path) -> Iterator[Compared]:
    """Loads of 400 requests at once, whose lengths are drawn to the measured totals."""
    data = json.loads(path.read_text(encoding="utf-8"))
    load = data["load"]
    prompt, output = load["prompt_tokens"] / load["requests"], load["output_tokens"] / load["requests"]
    source = RequestSource(lengths=chat_lengths(load["requests"], prompt=prompt, output=output))
    plan = LoadPlan(Arrivals.CLOSED, 600.0, concurrency=load["requests"], max_requests=load["requests"])
    caches = SimulatedCaches()
    for row in data["rows"]:
        text_only = {"language_model_only": True} if "3.5" in row["model"] else {}
        arguments = {**data["fixed"], **text_only, **row["config"]}
        one = session(row["model"], arguments, device_of(data["gpus"]), data["vllm_version"], caches)
        figures = started_figures(one.start(lambda phase, words: None))
        figures |= burst_figures(one.load(source, plan, lambda tick: True))
        yield Compared(
            f"burst {Path(row['model']).name}", row["config"], row | {"tokens_per_s": row["total_tokens_per_s"]}, figures
        )


def burst_figures(load: LoadResult) -> dict[str, float]:
    """Whole-run figures of a burst."""
    done = [record for record in load.records if record.succeeded]
    duration_s = max(record.ended_s for record in done)
    return {
        "tokens_per_s": sum(record.prompt_tokens + record.output_tokens for record in done) / duration_s,
        "mean_ttft_s": fmean(record.ttft_s or 0.0 for record in done),
        "mean_tpot_s": fmean(record.tpot_s for record in done if record.tpot_s is not None),
        "mean_e2e_s": fmean(record.e2e_s for record in done),
    }


PAGES = {
    "9b-throughput": ("Qwen/Qwen3.5-9B", "h100", 512),
    "35b-throughput": ("Qwen/Qwen3.5-35B-A3B-FP8", "h200", 512),
}
"""Published pages in a closed loop: model, device, requests in flight. Those at a rate show no throughput."""


AIDED, HALF_AIDED = "-forked", "-tuned"
"""Names of runs with forked cores and kernels compiled side by side, and with the latter alone, which is nobody's state."""


def of_restarts(path: Path) -> Iterator[Compared]:
    """vopt's side of the restart benchmark: a compile key each, caches empty before the first."""
    for name, restarts in json.loads(path.read_text()).items():
        caches = SimulatedCaches()
        for restart in restarts if isinstance(restarts, list) and not name.endswith(HALF_AIDED) else ():
            if restart["side"] != "vopt":
                continue
            model = next(known for known in MODELS if name.startswith(known.lower()))
            one = session(
                f"Qwen/{model}", restart["config"], hardware("h200"), RESTARTED_VERSION, caches, not name.endswith(AIDED)
            )
            simulated = started_figures(one.start(lambda phase, words: None))
            config = {"max_num_batched_tokens": restart["config"]["max_num_batched_tokens"]}
            yield Compared(f"restarts of {name}", config, {"engine_start_s": restart["parts_s"]["engine"]}, simulated)


def of_published(path: Path) -> Iterator[Compared]:
    """1,000 requests in a closed loop. What the rows wrote as ``speculation`` becomes vLLM's own argument."""
    source = source_of(CHAT, 32768, 0)
    for row in json.loads(path.read_text(encoding="utf-8")):
        page = PAGES.get(row["landscape"])
        if page is None:
            continue
        model, device, level = page
        arguments = arguments_of(row["config"])
        real = {"tokens_per_s": row["tokens"] / row["duration_s"], "mean_e2e_s": row.get("mean_e2e_s") or 0.0}
        broken = row["succeeded"] < 0.99 * row["requests"]
        plan = LoadPlan(Arrivals.CLOSED, 600.0, concurrency=level, max_requests=row["requests"])
        one = session(model, arguments, hardware(device), "0.20.0", SimulatedCaches())
        try:
            one.start(lambda phase, words: None)
            figures = burst_figures(one.load(source, plan, lambda tick: True))
        except EngineFailure:
            yield Compared(row["landscape"], row["config"], failed=(broken, True))
            continue
        yield Compared(row["landscape"], row["config"], {} if broken else real, figures, (broken, False))


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in config.items() if name != "speculation" and value != 0}
    method, _, tokens = str(config.get("speculation", "off")).partition(":")
    if tokens:
        arguments["speculative_config"] = {"method": method, "num_speculative_tokens": int(tokens)}
    return arguments


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure of one group over its records. ``spearman`` is ``None`` below three configurations that differ."""

    group: str
    figure: str
    records: int
    median_error: float
    worst_error: float
    spearman: float | None


def summaries(records: Sequence[Compared]) -> list[Summary]:
    found = []
    for group in dict.fromkeys(record.group for record in records):
        mine = [record for record in records if record.group == group]
        for figure in FIGURES:
            errors = [error for record in mine if (error := record.errors().get(figure)) is not None]
            if errors:
                worst = max(errors, key=abs)
                found.append(Summary(group, figure, len(errors), median(errors), worst, spearman(mine, figure)))
    return found


def spearman(records: Sequence[Compared], figure: str) -> float | None:
    """Over configurations (means of their starts). Measured figures within the noise of each other share a rank."""
    by_config: dict[EngineConfig, list[tuple[float, float]]] = {}
    for record in records:
        if figure in record.errors():
            pair = (record.measured[figure], record.simulated[figure])
            by_config.setdefault(EngineConfig(record.config), []).append(pair)
    means = [(fmean(m for m, _ in pairs), fmean(s for _, s in pairs)) for pairs in by_config.values()]
    measured, simulated = tied([m for m, _ in means]), tied([s for _, s in means])
    if len(set(measured)) < 3:
        return None
    return 0.0 if len(set(simulated)) == 1 else float(stats.spearmanr(measured, simulated).statistic)


def tied(values: Sequence[float]) -> list[float]:
    """The values, each taken for the smallest one within the noise below it."""
    levels: dict[int, float] = {}
    base = 0.0
    for place in sorted(range(len(values)), key=lambda place: values[place]):
        if values[place] > base * (1 + NOISE):
            base = values[place]
        levels[place] = base
    return [levels[place] for place in range(len(values))]


def compare(tables: Iterable[Path]) -> list[Compared]:
    records = [record for path in tables for record in of_table(path)]
    restarts = of_restarts(ASSETS / "restarts.json")
    return [*records, *of_bursts(ASSETS / "bursts.json"), *restarts, *of_published(PUBLISHED)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, default=sorted(ASSETS.glob("*.jsonl")))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    records = compare(options.tables)
    if options.json:
        found = [asdict(summary) for summary in summaries(records)]
        print(json.dumps({"format_version": 1, "summaries": found}))
        return 0
    for record in records:
        words = " ".join(f"{name}={value}" for name, value in record.config.items()) or "defaults"
        figures = "  ".join(f"{name} {record.simulated[name]:.4g} ({error:+.1%})" for name, error in record.errors().items())
        ends = f"  failed: measured {record.failed[0]}, simulated {record.failed[1]}" if any(record.failed) else ""
        print(f"{record.group:<24} {words[:60]:<60} {figures}{ends}")
    print(f"\n{'records':<32}{'figure':<18}{'n':>4}{'median':>9}{'worst':>9}{'Spearman':>10}")
    for summary in summaries(records):
        rank = "-" if summary.spearman is None else f"{summary.spearman:.2f}"
        print(
            f"{summary.group:<32}{summary.figure:<18}{summary.records:>4}{summary.median_error:>+9.1%}"
            f"{summary.worst_error:>+9.1%}{rank:>10}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
