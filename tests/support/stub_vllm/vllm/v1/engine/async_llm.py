"""``STUB_FAULT`` words, comma separated:

hang_import, hang_start, hang_load (no token ever), stuck_load (the event loop itself stops), fail_start (with
``STUB_MESSAGE`` in the core's own log and vLLM's summary of it), exit_start, die_at:N (the core is killed when request N has
its first token), leader_exit0_at:N, leader_kill_at:N, flood, error_at:N (a finish reason "error"), short_at:N.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.v1.metrics import reader

FAULTS = dict(word.partition(":")[::2] for word in os.environ.get("STUB_FAULT", "").split(",") if word)
STEP_S = float(os.environ.get("STUB_STEP_S", "0.001"))
CORE = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'VLLM::EngineCor', 0, 0, 0); time.sleep(3600)"

if "hang_import" in FAULTS:
    time.sleep(3600)
if "fail_import" in FAULTS:
    raise ModuleNotFoundError("No module named 'tvm_ffi'")


class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class AsyncLLM:
    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any, stat_loggers: Any = None) -> AsyncLLM:
        config = engine_args.create_engine_config(usage_context)
        return cls(config, stat_loggers)

    def __init__(self, config: Any, stat_loggers: Any) -> None:
        self.vllm_config = config
        self.loggers = [logger(config) for logger in stat_loggers or ()]
        self.core = subprocess.Popen([sys.executable, "-S", "-c", CORE])
        self.running = 0
        if "hang_start" in FAULTS:
            print("INFO loading weights, shard 3 of 9", flush=True)
            time.sleep(3600)
        if "exit_start" in FAULTS:
            os._exit(0)
        if "fail_start" in FAULTS:
            print("(EngineCore pid=7) ERROR 11-30 02:50:15 [core.py:1510] EngineCore failed to start.", file=sys.stderr)
            message = os.environ["STUB_MESSAGE"]
            print(f"(EngineCore pid=7) ERROR 11-30 02:50:15 [core.py:1510] {message}", file=sys.stderr, flush=True)
            raise RuntimeError(
                "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
            )

    @property
    def errored(self) -> bool:
        return self.core.poll() is not None

    @property
    def dead_error(self) -> Exception:
        return EngineDeadError()

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
        number = int(request_id.rpartition("-")[2])
        length = len(prompt["prompt_token_ids"])
        limit = self.vllm_config.model_config.max_model_len
        if length + sampling_params.max_tokens > limit:
            raise ValueError(f"This model's maximum context length is {limit} tokens, your prompt has {length}.")
        reader.counts["vllm:num_requests_running"] += 1
        reader.counts["vllm:prompt_tokens"] += length
        try:
            async for output in self._tokens(number, length, sampling_params.max_tokens):
                yield output
        finally:
            reader.counts["vllm:num_requests_running"] -= 1

    async def _tokens(self, number: int, length: int, tokens: int) -> Any:
        if "hang_load" in FAULTS:
            await asyncio.sleep(3600)
        if "short_at" in FAULTS and number == int(FAULTS["short_at"]):
            tokens -= 1
        for position in range(tokens):
            await asyncio.sleep(STEP_S)
            if position == 0:
                self._misbehave(number)
            if self.errored:
                raise EngineDeadError
            last = position == tokens - 1
            finish = "length" if last else None
            if last and FAULTS.get("error_at") == str(number):
                finish = "error"
            reader.counts["vllm:generation_tokens"] += 1
            for logger in self.loggers:
                computed = length if position == 0 else 0
                logger.record(
                    None, SimpleNamespace(prompt_token_stats=SimpleNamespace(computed=computed), num_generation_tokens=1)
                )
            completion = SimpleNamespace(token_ids=[7], finish_reason=finish)
            yield SimpleNamespace(outputs=[completion], finished=last, num_cached_tokens=0)

    def _misbehave(self, number: int) -> None:
        at = {name: int(value) for name, value in FAULTS.items() if value.isdigit()}
        if at.get("die_at") == number:
            print(f"ERROR 11-30 02:50:15 [core.py:99] {os.environ.get('STUB_MESSAGE', '')}", file=sys.stderr, flush=True)
            self.core.kill()
        if at.get("leader_exit0_at") == number:
            os._exit(0)
        if at.get("leader_kill_at") == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if at.get("flood") == number:
            for _ in range(100):
                os.write(1, b"f" * 99 + b"\n" + (b"o" * 99 + b"\n") * 9999)
        if at.get("stuck_load") == number:
            time.sleep(3600)
