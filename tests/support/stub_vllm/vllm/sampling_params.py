from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


NAMES = {"temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "output_kind"}


class SamplingParams:
    def __init__(self, **values: Any) -> None:
        if unknown := set(values) - NAMES:
            raise TypeError(f"Unexpected keyword argument {sorted(unknown)[0]!r}")
        self.__dict__.update(values)
