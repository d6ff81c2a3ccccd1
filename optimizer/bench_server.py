"""The running server of ``vopt bench --url``: what it is, and requests that it takes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vopt.optimizer.errors import EnvironmentLacks, UsageError
from vopt.optimizer.load.client import HttpEngine, TlsProblem
from vopt.optimizer.load.materialise import Materialised, materialise
from vopt.optimizer.load.plan import Arrivals
from vopt.optimizer.load.target import Dialect, Endpoint, Target, parse_target, read_api_key
from vopt.optimizer.load.text import TextTokenizer, load_tokenizer, serving_sampling
from vopt.optimizer.load.workload import Workload
from vopt.optimizer.measurement import Asked
from vopt.optimizer.options import BenchOptions
from vopt.optimizer.prepare import find_workload

ASSUMED_VOCAB = 32_000
OWN_DIRECTORY = "--tokenizer DIR   # the model's own directory, with its tokenizer.json"
"""Where neither tokenizer nor configuration is known: the smallest vocabulary of published models since Llama. Ids below
1,000 are left out of random prompts, since Mistral's tokenizers keep them for control tokens."""
UNBOUNDED = 2**31


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server says of itself; ``root`` is the model's path or hub id as vLLM tells it."""

    target: Target
    max_model_len: int | None = None
    root: str | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The server with its requests. ``own_ends``: outputs end where the model ends them."""

    server: RunningServer
    workload: Workload
    requests: Materialised
    tokenizer: str | None
    own_ends: bool


def typed_target(options: BenchOptions) -> Target:
    """The target as it was typed, the model's name perhaps still empty. Raises ``UsageError``."""
    url = options.url or options.engine
    try:
        endpoint = Endpoint(options.endpoint)
    except ValueError:
        raise UsageError(f"--endpoint {options.endpoint}: there are {', '.join(Endpoint)}", hint="--endpoint chat") from None
    key = read_api_key(options.api_key_file, os.environ)
    return parse_target(url, options.model or "", endpoint=endpoint, api_key=key)


def find_server(target: Target, say: Callable[[str], None]) -> RunningServer:
    """Ask the server what it serves and which dialect it speaks.

    Raises:
        EnvironmentLacks: it does not answer.
        UsageError: it does not serve the model, or serves several and none was named.
    """
    models, version = asyncio.run(_ask(target))
    names = [str(entry["id"]) for entry in models]
    listed = ", ".join(names) or "nothing"
    if not target.model:
        if len(names) != 1:
            raise UsageError(f"{target.base_url} serves {listed}: which one?", hint="--model NAME, as the server lists it")
        say(f"model: {names[0]}, the one that {target.base_url} serves")
        target = replace(target, model=names[0])
    card = next((entry for entry in models if entry["id"] == target.model), None)
    if card is None:
        raise UsageError(f"{target.base_url} serves {listed}, not {target.model}", hint="--model is the served name")
    if version is None and card.get("owned_by") != "vllm":
        say("the server is no vLLM: requests carry OpenAI's fields only, and outputs end where the model ends them")
        target = replace(target, dialect=Dialect.OPENAI)
    length, root = card.get("max_model_len"), card.get("root")
    return RunningServer(
        target, length if isinstance(length, int) and length > 0 else None, root if isinstance(root, str) else None
    )


async def _ask(target: Target) -> tuple[list[Mapping[str, Any]], Any]:
    """(cards of ``/v1/models``, ``/version``)."""
    async with HttpEngine(target) as engine:
        try:
            await engine.models()
        except (OSError, TimeoutError, ValueError) as error:
            hint = "is the server up, and is the URL its base?"
            if isinstance(error, TlsProblem):
                hint = error.hint
            elif "HTTP 401" in str(error) or "HTTP 403" in str(error):
                hint = "set VLLM_API_KEY or --api-key-file"
            elif target.scheme == "http":
                hint += " A server with a certificate wants https://."
            raise EnvironmentLacks(f"{target.base_url}/v1/models: {str(error) or 'no answer in time'}", hint=hint) from None
        document = await engine.get_json("/v1/models")
        version = await engine.get_json("/version")
    cards = document.get("data", ()) if isinstance(document, Mapping) else ()
    known = [card for card in cards if isinstance(card, Mapping) and "id" in card]
    return known, version.get("version") if isinstance(version, Mapping) else None


def server_load(options: BenchOptions, asked: Asked, say: Callable[[str], None]) -> ServerLoad:
    """Everything about a running server, before the first request. Raises ``UsageError`` or ``EnvironmentLacks``."""
    typed = typed_target(options)
    find_workload(options.workload, None, lambda text: None)  # a malformed file is told before anybody is asked anything
    if options.tokenizer is not None and not (options.tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer {options.tokenizer}: it holds no tokenizer.json", hint="name the model's directory")
    server = find_server(typed, say)
    directory = options.tokenizer or _local_root(server, say)
    tokenizer, vocab = _tokenizer(directory, say)
    workload = find_workload(options.workload, tokenizer, say)
    chat = server.target.endpoint is Endpoint.CHAT
    if chat and tokenizer is None and not (workload.recorded and all(entry.text for entry in workload.recorded)):
        raise UsageError(
            "a chat endpoint takes text, and without the model's tokenizer there is none of a known length",
            hint="--tokenizer DIR (with tokenizer.json), --endpoint completions, or a workload file with prompts",
        )
    sampling = serving_sampling(directory) if directory is not None else {}
    openai = server.target.dialect is Dialect.OPENAI
    own_ends = openai or (tokenizer is not None and workload.natural_text)
    requests = materialise(
        workload.with_sampling(sampling),
        tokenizer,
        seed=options.seed,
        vocab=vocab,
        max_model_len=server.max_model_len or UNBOUNDED,
        sampling=sampling,
        natural_ends=own_ends,
        chat=chat,
        replay=asked.arrivals is Arrivals.REPLAY,
    )
    for note in requests.notes:
        say(note)
    return ServerLoad(server, workload.with_sampling(sampling), requests, str(directory) if tokenizer else None, own_ends)


def _local_root(server: RunningServer, say: Callable[[str], None]) -> Path | None:
    """The model's directory where the server says it is, if that is on this machine too."""
    directory = Path(server.root) if server.root else None
    if directory is None or not directory.is_absolute() or not (directory / "tokenizer.json").is_file():
        return None
    say(f"tokenizer: {directory}, where the server has its model (--tokenizer names another)")
    return directory


def _tokenizer(directory: Path | None, say: Callable[[str], None]) -> tuple[TextTokenizer | None, int]:
    """(tokenizer, vocabulary size)."""
    if directory is None:
        say(
            f"the server's vocabulary is not known here: random prompts use ids that every model with {ASSUMED_VOCAB:,} or "
            "more has; --tokenizer DIR gives text"
        )
        return None, ASSUMED_VOCAB
    vocab = vocabulary(directory)
    tokenizer, note = load_tokenizer(directory, vocab=vocab)
    if note:
        say(note)
    return tokenizer, vocab


def vocabulary(directory: Path) -> int:
    """Ids that the model has: ``vocab_size`` of ``config.json``, else what ``tokenizer.json`` lists. Raises ``UsageError``."""
    config = _object(directory / "config.json") if (directory / "config.json").is_file() else {}
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, Mapping) else None
        if isinstance(size, int) and size > 0:
            return size
    document = _object(directory / "tokenizer.json")
    model = document.get("model")
    words = model.get("vocab") if isinstance(model, Mapping) else None
    added = document.get("added_tokens") or ()
    ids = list(words.values()) if isinstance(words, Mapping) else list(range(len(words or ())))
    ids += [token["id"] for token in added if isinstance(token, Mapping) and "id" in token]
    numbers = [number for number in ids if isinstance(number, int)]
    if not numbers:
        raise UsageError(f"{directory / 'tokenizer.json'} lists no vocabulary", hint=OWN_DIRECTORY)
    return max(numbers) + 1


def _object(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint=OWN_DIRECTORY) from None
    if not isinstance(document, Mapping):
        raise UsageError(f"{path} holds {type(document).__name__} instead of an object", hint=OWN_DIRECTORY)
    return document
