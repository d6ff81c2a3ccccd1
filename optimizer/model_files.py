"""What is in a local model directory: a resume notices when it is no longer the same model. The hub's have revisions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS = (".json", ".jinja", ".model", ".py", ".txt")
SAMPLED_BYTES = 1 << 16
"""Of a large file its size, its beginning (which tells names and shapes of tensors) and its end are looked at: hundreds of
gigabytes would take minutes, and weights that were trained further differ everywhere."""


def contents(directory: Path) -> dict[str, str]:
    """A digest for each file that says how the model is run, and one for all of its weights. No times: a copy is the same."""
    found: dict[str, str] = {}
    weights = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        if path.suffix in WEIGHTS:
            weights.update(f"{path.name} {_digest(path)}\n".encode())
            found["weights"] = weights.hexdigest()[:12]
        elif path.suffix in SETTINGS:
            found[path.name] = _digest(path)
    return found


def changed(stored: Mapping[str, str] | None, directory: Path) -> list[str]:
    """The files (or ``weights``) of a model that are no longer what ``contents`` once found; none where it found nothing."""
    if stored is None or not directory.is_dir():
        return []
    found = contents(directory)
    return sorted(name for name in stored.keys() | found.keys() if stored.get(name) != found.get(name))


def _digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLED_BYTES))
        if size > SAMPLED_BYTES:
            file.seek(-SAMPLED_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:12]
