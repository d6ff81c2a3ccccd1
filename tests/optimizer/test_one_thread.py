"""A search computes on one thread, and what it starts does not inherit that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
import os
from vopt.optimizer.one_thread import one_thread
with one_thread():
    import vopt.optimizer.launch
import numpy, scipy.linalg
square = numpy.eye(600)
scipy.linalg.cho_factor(square @ square)
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize(("users", "kept"), [(None, "None"), ("1", "1")])
def test_numpy_and_scipy_start_no_thread_and_the_variable_is_as_the_user_left_it(users: str | None, kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if users is not None:
        environment["OPENBLAS_NUM_THREADS"] = users
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", kept]
