"""What runs in a trial process: one vLLM engine from start to stop, driven by JSON lines. Standard library and vLLM only.

    python -m vopt.optimizer.engine.trial_process IN_FD OUT_FD [server]

With ``server`` what vLLM spawns comes from a fork server that has imported it (``core_start``).
Commands: ``{"do": "ping"}``, ``{"do": "start", ...}``, ``{"do": "load", ...}``, ``{"do": "stop_load"}``, ``{"do": "stop"}``;
end of input is a stop. Events: ``ready`` (vLLM is imported), ``started``, ``tick``, ``loaded``, ``failed``.
The module body stays empty of work: vLLM's spawned children import it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from vopt.objectives.records import LoadResult
from vopt.optimizer.engine import core_start
from vopt.optimizer.engine.wire import Channel, ChannelClosed, Message, plan_from_json, tick_to_json
from vopt.optimizer.load.source import RequestSource

RECORDS_LEVEL = 1  # gzip: fast; the records of a long load are some 100 MB


class Commands:
    """Reads commands on a thread of its own, so that an order to stop a load is seen while the load runs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.Queue[Message | None] = queue.Queue()
        self.stop_load = threading.Event()
        threading.Thread(target=self._read, name="vopt-commands", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive(3600.0)
            except (ChannelClosed, OSError):
                self.stop_load.set()
                self._queue.put(None)
                return
            if message is None:
                continue
            if message["do"] in ("stop_load", "stop"):
                self.stop_load.set()
            if message["do"] != "stop_load":
                self._queue.put(message)

    def next(self) -> Message | None:
        """The next command but ``stop_load``; ``None`` when the search is gone."""
        return self._queue.get()


def failed(error: BaseException) -> Message:
    return {
        "event": "failed",
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "traceback": "".join(traceback.format_exception(error))[-8000:],
        "lost": core_start.lost(),
    }


def write_records(result: LoadResult, path: Path) -> None:
    """One JSON line a record; on disk, whole, before the search hears of it."""
    draft = path.with_suffix(".draft")
    with draft.open("wb") as raw:
        with gzip.open(raw, "wt", compresslevel=RECORDS_LEVEL, encoding="utf-8") as lines:
            for record in result.records:
                lines.write(json.dumps(record.to_json(), separators=(",", ":")) + "\n")
        raw.flush()
        os.fsync(raw.fileno())
    os.replace(draft, path)


def read_source(path: Path) -> RequestSource:
    return RequestSource.from_json(json.loads(path.read_text()))


async def load(engine: Any, order: Message, commands: Commands, channel: Channel) -> None:
    from vopt.optimizer.load.drive import drive

    commands.stop_load.clear()
    source = read_source(Path(order["source"]))

    def on_tick(tick: Any) -> bool:
        if channel.has_room():  # a search that is stopped reads nothing: waiting for it would stop the load too
            channel.send({"event": "tick", **tick_to_json(tick)})
        return not commands.stop_load.is_set()

    # As vllm serve does with its own heap: what vLLM imported is 670,000 objects, and a full collection of them stops all
    # streams for 0.3 to 0.7 s (0.39 s of lag were seen on an H200 host), which reads as a p95 of TTFT that no server has.
    gc.collect()
    gc.freeze()
    result = await drive(engine, source, plan_from_json(order["plan"]), on_tick)
    write_records(result, Path(order["records"]))
    channel.send({"event": "loaded", "result": result.to_json(), "dead": engine.dead, "lost": core_start.lost()})


async def serve(channel: Channel, import_s: float) -> NoReturn:
    from vopt.optimizer.engine.vllm import VllmEngine

    commands = Commands(channel)
    engine: Any = None
    while (order := await asyncio.to_thread(commands.next)) is not None and order["do"] != "stop":
        try:
            if order["do"] == "ping":
                channel.send({"event": "ready", "import_s": import_s})
            elif order["do"] == "start":
                began_s = time.monotonic()
                engine = VllmEngine.build(order["model"], order["arguments"], order.get("revision"))
                parts = {"import": import_s, "engine": time.monotonic() - began_s}
                started = engine.started(parts)
                core_start.end_server()
                channel.send(
                    {
                        "event": "started",
                        "vllm_version": started.vllm_version,
                        "resolved": dict(started.resolved),
                        "kv_cache_tokens": started.kv_cache_tokens,
                        "num_gpu_blocks": started.num_gpu_blocks,
                        "start_parts_s": dict(started.start_parts_s),
                        "served": core_start.served(),
                    }
                )
            elif order["do"] == "load":
                await load(engine, order, commands, channel)
        except ChannelClosed:
            break
        except Exception as error:  # noqa: BLE001 - told to the search, which decides what it was
            traceback.print_exc()
            channel.send(failed(error))
    leave()  # from here: ending the loop first would collect the engine, whose own shutdown would run


def main() -> None:
    channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
    os.set_inheritable(int(sys.argv[1]), False)  # the engine's children must not keep the pipes open
    os.set_inheritable(int(sys.argv[2]), False)
    began_s = time.monotonic()
    served = sys.argv[3:] == ["server"] and core_start.begin_server()
    try:
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # the slow half of a start; done before the engine's turn comes

        with contextlib.suppress(Exception):  # Inductor, 4 s of it, for cores that are forked from here; not for itself
            import vllm.compilation.backends  # noqa: F401 - only to be there; where it fails, the engine says why
    except BaseException as error:
        channel.send(failed(error) | {"during": "import"})
        raise
    ready = served and core_start.server_is_ready()
    if served and not ready:
        core_start.end_server()
    core_start.prepare(dict(os.environ) if ready else None)
    import_s = time.monotonic() - began_s
    with contextlib.suppress(ChannelClosed):
        channel.send({"event": "ready", "import_s": import_s})
        asyncio.run(serve(channel, import_s))
    leave()


def leave() -> NoReturn:
    """End now. Neither vLLM's shutdown nor the interpreter's runs: they take 1 to 5 s (the engine core is given 5 s to end by
    itself) and give nothing that the supervisor does not: it ends every process, which frees their memory, and unlinks
    their files."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
