"""What restarting an engine costs: the same configurations through vopt's trials and through plain ``vllm serve``.

    python tests/benchmarks/restart.py MODEL [--set NAME=JSON ...] [--tokens 2048,4096] [--side vopt] [--json FILE]

Each configuration has a token budget of its own, hence a compile key of its own. Both sides begin with empty caches (a
fresh folder each) and run the configurations in the same order. Plain means what a shell loop over ``vllm serve`` does: its
own default caches, a start, a wait for /health, SIGTERM, a wait for its end. Counted is the time outside the measured load:
from the spawn to readiness, and from the order to stop until everything is gone. Nothing is loaded on either side but one
request stream of a second on vopt's, whose time is left out. vopt's own share of that ("own") is what is neither vLLM's import
nor its engine's start nor requests under way: spawning, talking, reading logs, writing records, ending the processes.

``--side`` runs one of them alone, so that two GPUs of one host can run both at once; ``--json`` keeps each restart as it ends;
``--cache DIR`` (empty: ``$XDG_CACHE_HOME/vopt``) leaves vopt's caches there, for a search of the same model afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vopt.optimizer import gpus
from vopt.optimizer.engine.process import ProcessSession
from vopt.optimizer.engine.spare import Spares
from vopt.optimizer.engine.supervised import SupervisedProcess
from vopt.optimizer.load.plan import Arrivals, LoadPlan
from vopt.optimizer.load.source import RequestSource
from vopt.optimizer.locks import lock_gpus
from vopt.optimizer.trial import Deadlines, EngineConfig, TrialSpec

PATIENCE_S = 900.0


@dataclass(frozen=True)
class Restart:
    """Seconds of one configuration on one side."""

    side: str
    config: dict[str, Any]
    start_s: float
    stop_s: float
    parts_s: dict[str, float]
    own_s: float | None = None

    @property
    def outside_s(self) -> float:
        return self.start_s + self.stop_s


def through_vopt(model: str, configs: list[dict[str, Any]], python: str, where: Path, cache: Path) -> Iterator[Restart]:
    source = RequestSource(lengths=((64, 16),) * 64, bodies=(tuple(range(20, 700)),), digit_ids=tuple(range(8, 18)))
    plan = LoadPlan(arrivals=Arrivals.CLOSED, window_s=1.0, concurrency=4, min_requests=1, max_doublings=0)
    spares = Spares()
    for number, config in enumerate(configs):
        spec = TrialSpec(
            label=str(number),
            model=model,
            arguments=EngineConfig(config),
            directory=where / "trials" / str(number),
            python=python,
            gpus=tuple(gpu.uuid for gpu in gpus.visible(gpus.inventory())[:1]),
            deadlines=Deadlines(start_s=PATIENCE_S),
            cache_root=cache,
        )
        session = ProcessSession(spec, spares)
        began = time.monotonic()
        started = session.start(lambda phase, words: None)
        ready = time.monotonic()
        result = session.load(source, plan, lambda tick: True)
        loaded = time.monotonic()
        session.close()
        start_s, stop_s = ready - began, time.monotonic() - loaded
        parts = started.start_parts_s
        under_way_s = max(record.ended_s for record in result.records)
        own_s = start_s - parts.get("import", 0.0) - parts["engine"] + (loaded - ready - under_way_s) + stop_s
        yield Restart("vopt", config, start_s, stop_s, {name: round(s, 1) for name, s in parts.items()}, own_s)
    spares.close()


def through_plain_serve(model: str, configs: list[dict[str, Any]], python: str, where: Path) -> Iterator[Restart]:
    home = where / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "VLLM_NO_USAGE_STATS": "1"}
    for number, config in enumerate(configs):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        argv = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        for name, value in config.items():
            flag = name.replace("_", "-")
            match value:
                case True:
                    argv.append(f"--{flag}")
                case False:
                    argv.append(f"--no-{flag}")
                case _:
                    argv += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
        began = time.monotonic()
        process = SupervisedProcess(argv, environment=environment, log=where / f"serve-{number}.log")
        wait_healthy(process, port)
        ready = time.monotonic()
        process.stop(60.0)
        yield Restart("plain", config, ready - began, time.monotonic() - ready, {})


def wait_healthy(process: SupervisedProcess, port: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll(0.25) is not None:
            sys.exit("\n".join(process.log_lines(40)))
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            if answer.status == 200:
                return
    sys.exit(f"not ready in {PATIENCE_S:g} s")


def report(restart: Restart) -> None:
    own = "" if restart.own_s is None else f"  own {restart.own_s:4.1f} s  {restart.parts_s}"
    tokens = restart.config["max_num_batched_tokens"]
    print(f"{restart.side:<6} tokens {tokens:<6} start {restart.start_s:6.1f} s  stop {restart.stop_s:5.1f} s{own}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--tokens", default="2048,3072,4096,6144,8192,12288", help="token budgets, one configuration each")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--side", choices=("vopt", "plain"), help="only this one: two GPUs can run one side each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, help="an empty folder where vopt's caches stay")
    options = parser.parse_args()
    if options.cache and options.cache.exists() and any(options.cache.iterdir()):
        parser.error(f"--cache {options.cache} is not empty: both sides begin with empty caches")
    fixed = {}
    for text in options.set:
        name, _, value = text.partition("=")
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        fixed[name] = value
    configs = [{**fixed, "max_num_batched_tokens": int(tokens)} for tokens in options.tokens.split(",")]
    found: list[Restart] = []
    sides = (options.side,) if options.side else ("vopt", "plain")
    chosen = [gpu.uuid for gpu in gpus.visible(gpus.inventory())[:1]]  # the one that plain vllm serve takes as well
    with tempfile.TemporaryDirectory(prefix="vopt-restart-") as folder, contextlib.ExitStack() as held:
        for lock in lock_gpus(chosen, "the restart benchmark"):
            held.enter_context(lock)
        where = Path(folder)
        for side in sides:
            asked, cache = (options.model, configs, options.python, where), options.cache or where / "vopt-cache"
            for restart in through_vopt(*asked, cache) if side == "vopt" else through_plain_serve(*asked):
                found.append(restart)
                report(restart)
                if options.json:
                    options.json.write_text(json.dumps({"restarts": [asdict(one) for one in found]}))
    sums = {side: sum(one.outside_s for one in found if one.side == side) for side in sides}
    share = f", ratio {sums['vopt'] / sums['plain']:.2f}" if len(sides) == 2 else ""
    print("outside the load: " + ", ".join(f"{side} {total:.1f} s" for side, total in sums.items()) + share)


if __name__ == "__main__":
    main()
