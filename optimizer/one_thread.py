"""Linear algebra on one thread, for the search itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = "OPENBLAS_NUM_THREADS"
"""Read by each copy of OpenBLAS, numpy's and scipy's, when it is loaded (its README, *Setting the number of threads*)."""


@contextmanager
def one_thread() -> Iterator[None]:
    """numpy and scipy imported inside compute on one thread; a user's own choice stays.

    A study has tens of trials: its matrices are too small to share, and threads that wait for each other take a tenth of a
    simulated search. The variable is gone afterwards, so that no engine inherits what the exported command lacks.
    """
    if THREADS in os.environ:
        yield
        return
    os.environ[THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[THREADS]
