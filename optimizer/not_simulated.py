"""What a simulation leaves out of the arguments that were typed, and what it assumes: said wherever its figures are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vopt.optimizer.engine.roofline import ACCEPTANCE, acceptance_length
from vopt.optimizer.engine.simulated import MODELLED
from vopt.optimizer.subject import Subject
from vopt.search_spaces.defaults import LATEST_VERSION, read_speculation
from vopt.search_spaces.on_load import known_on_load
from vopt.search_spaces.shape import ModelShape

WITHOUT_COST = frozenset(
    {
        *(
            "model",
            "revision",
            "code_revision",
            "tokenizer",
            "tokenizer_revision",
            "hf_token",
            "hf_config_path",
            "config_format",
        ),
        *("trust_remote_code", "download_dir", "served_model_name", "seed", "load_format", "generation_config"),
        *(
            "allow_deprecated_quantization",
            "runner",
            "task",
            "disable_log_stats",
            "disable_log_requests",
            "enable_log_requests",
        ),
        *("host", "port", "uds", "api_key", "root_path", "allow_credentials", "allowed_origins", "allowed_methods"),
        *("allowed_headers", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "uvicorn_log_level"),
        *("chat_template", "chat_template_content_format", "response_role", "enable_auto_tool_choice", "tool_call_parser"),
        *("tool_parser_plugin", "reasoning_parser", "middleware", "headless", "disable_uvicorn_access_log"),
    }
)
"""Arguments that make no engine faster, slower or larger: which model, where from, who may ask, what answers look like."""

SPECULATION = frozenset({"spec_method", "spec_model", "spec_tokens"})
"""Short forms of entries of ``speculative_config``."""

PARTLY = {
    "compilation_config": "whether there are CUDA graphs",
    "cudagraph_capture_sizes": "the largest size",
    "optimization_level": "whether anything is compiled",
    "cpu_offload_gb": "the memory that it saves",
}
"""Arguments of which the simulation sees one side."""


def left_out(
    config: Mapping[str, Any],
    front_end: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    shape: ModelShape | None = None,
    version: str = LATEST_VERSION,
) -> tuple[str, ...]:
    """One sentence for the arguments and variables that change nothing in the simulation, one for each that is seen in part."""
    names, notes = [], []
    for name, value in config.items():
        own = name.partition(".")[0]
        if name.startswith("env:"):
            names.append(name.removeprefix("env:"))
        elif own in PARTLY:
            notes.append(f"of {_flag(own)} the simulation sees {PARTLY[own]} and no more")
        elif own not in MODELLED | SPECULATION | WITHOUT_COST and not _own_dtype(own, value, shape):
            names.append(_flag(own))
        elif own == "quantization" and not _quantization_seen(value, shape, version):
            names.append(f"{_flag(own)} {value}")
    words = (word.partition("=")[0] for word in front_end if word.startswith("--"))
    names += [word for word in words if word.removeprefix("--").removeprefix("no-").replace("-", "_") not in WITHOUT_COST]
    names += [
        name for name in environment or () if name.startswith(("VLLM_", "NCCL_", "CUDA_", "PYTORCH_", "TORCH", "TRITON_"))
    ]
    if names:
        listed = ", ".join(dict.fromkeys(names))
        notes.insert(0, f"not simulated: {listed}: changes nothing in these figures, and may change much on a GPU")
    return tuple(notes)


def assumptions(config: Mapping[str, Any], shape: ModelShape | None) -> tuple[str, ...]:
    """What the figures of a configuration rest on that nobody measured."""
    speculation = read_speculation(config, shape) if shape is not None else None
    if speculation is None or speculation.acceptance_length is not None:
        return ()
    chance = ACCEPTANCE.get(speculation.method, 0.6)
    length = acceptance_length(speculation.method, speculation.tokens)
    return (
        f"assumed, not measured: a token that {speculation.method} drafts is accepted with a chance of {chance:g} if those "
        f"before it were, {length:.2f} tokens a step in the mean; your text decides that, and with it what speculation gains",
    )


def say_left_out(subject: Subject, say: Callable[[str], None]) -> None:
    """Both of what was typed, where it is simulated."""
    for note in (*notes_of(subject), *assumed_by(subject)(subject.baseline)):
        say(note)


def assumed_by(subject: Subject) -> Callable[[Mapping[str, Any]], tuple[str, ...]]:
    """``assumptions`` for the configurations of one search; nothing for real engines."""
    if not subject.machine.simulated:
        return lambda config: ()
    return lambda config: assumptions(subject.fixed | config, subject.shape)


def notes_of(subject: Subject) -> tuple[str, ...]:
    """What a simulation leaves out of the arguments that were typed; nothing for real engines."""
    if not subject.machine.simulated:
        return ()
    config = subject.fixed | subject.baseline
    return left_out(config, subject.front_end, subject.environment, subject.shape, subject.schema.version)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _own_dtype(name: str, value: object, shape: ModelShape | None) -> bool:
    return name == "dtype" and (value == "auto" or (shape is not None and value == shape.dtype))


def _quantization_seen(value: object, shape: ModelShape | None, version: str) -> bool:
    stored = shape is not None and shape.quantization is not None  # the checkpoint's own, or the start fails
    return value in (None, "none") or stored or known_on_load(value, version)
