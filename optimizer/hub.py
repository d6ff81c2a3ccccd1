"""The Hugging Face hub: a model's ``config.json``, what is missing of its files, and fetching them."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from vopt.optimizer.errors import EnvironmentLacks, UsageError

SKIPPED = ("*.pth", "original/*", "*.gguf")
"""Files of a model repository that vLLM does not load by default."""


def config_file(name: str, revision: str | None) -> Path:
    """Where the ``config.json`` of a hub id lies on this machine, fetched if need be.

    Raises:
        UsageError: no such hub id, or it has no ``config.json``.
        EnvironmentLacks: the hub cannot be reached and nothing is cached.
    """
    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except RepositoryNotFoundError:
        raise UsageError(
            f"model {name!r} does not exist on the hub, or your token may not see it", hint="hf auth login"
        ) from None
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        # What is only not cached here is, for the hub's client, an entry that was not found as well.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise UsageError(
                f"model {name!r} has no config.json, so its architecture is unknown",
                hint="name the repository that the weights were made from",
            ) from None
        raise EnvironmentLacks(
            f"model {name!r} is not cached here and the hub cannot be reached ({type(error).__name__})",
            hint=f"hf download {name}   # where there is a network; or give a local directory",
        ) from None


def cache_directory() -> Path:
    """Where the hub's files are kept on this host."""
    return Path(constants.HF_HUB_CACHE)


def missing_bytes(name: str, revision: str | None, directory: Path) -> int:
    """What ``directory`` lacks of a hub model; 0 where the hub cannot be asked (then the fetch itself tells)."""
    try:
        sizes = _sizes(name, revision)
    except (HfHubHTTPError, OSError, ValueError):
        return 0
    wanted = {file: size for file, size in sizes.items() if not any(fnmatch(file, pattern) for pattern in SKIPPED)}
    return sum(size for file, size in wanted.items() if not (directory / file).exists())


def fetch(name: str, revision: str | None, say: Callable[[str], None]) -> None:
    """Bring a hub model's files to this machine.

    Raises:
        EnvironmentLacks: the download fails.
    """
    try:
        say(f"fetching {name} ({sum(_sizes(name, revision).values()) / 1e9:.1f} GB) unless cached")
        snapshot_download(name, revision=revision, ignore_patterns=list(SKIPPED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentLacks(
            f"the weights of {name} could not be fetched ({type(error).__name__}: {error})", hint=f"hf download {name}"
        ) from None


def _sizes(name: str, revision: str | None) -> dict[str, int]:
    """Bytes of each file of a hub model."""
    files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or ()
    return {file.rfilename: file.size or 0 for file in files}
