"""Devices that a simulation knows."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from vopt.optimizer.errors import UsageError
from vopt.search_spaces.memory import Gpu


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device: memory in bytes, bandwidths in bytes/s, dense peak rates in operations/s, and where the figures are from."""

    name: str
    driver_name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    link_bytes_per_s: float
    source: str

    @property
    def gpu(self) -> Gpu:
        """What memory arithmetic needs of it."""
        return Gpu(self.driver_name, self.memory_bytes)


@cache
def _table() -> dict[str, Hardware]:
    text = resources.files("vopt.optimizer.engine").joinpath("hardware.toml").read_text(encoding="utf-8")
    return {name: Hardware(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def hardware_names() -> tuple[str, ...]:
    """What ``--simulate`` accepts."""
    return tuple(_table())


def hardware(name: str) -> Hardware:
    """The device of that name (letter case ignored); ``UsageError`` names the nearest ones."""
    found = _table().get(name.strip().lower())
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower(), hardware_names(), n=1)
    names = ", ".join(hardware_names())
    raise UsageError(
        f"--simulate {name!r}: no such device; known are {names}", hint=f"--simulate {close[0] if close else 'h200'}"
    )
