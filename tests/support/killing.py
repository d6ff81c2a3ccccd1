"""SIGKILL at random moments of a search that runs as a process of its own, and what the resumed study must look like."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from support.sessions import eventually

from vopt.optimizer.engine.kin import alive, descendants
from vopt.optimizer.history import SAMPLED_STAGES, Stage, StudyRecord
from vopt.optimizer.setup import Budget
from vopt.optimizer.study import read_study


def begin(folder: Path, words: Sequence[str], environment: dict[str, str], **options: object) -> subprocess.Popen[str]:
    """``vopt WORDS`` in ``folder``; what it says is appended to ``said.txt``."""
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "vopt.optimizer", words[0], "--quiet", *words[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environment},
            stdout=said,
            stderr=said,
            text=True,
            **options,  # type: ignore[call-overload]  # keywords of Popen as they are
        )


def results(folder: Path) -> int:
    """Engine starts whose result reached the disk."""
    return len(list(folder.glob("studies/*/*/result.json")))


def shortest_s(folder: Path, trial_s: float) -> float:
    """The shortest time between two results yet, and no more than ``trial_s``: between the first two a search may have been
    killed and begun again, which takes longer than trials that are then missed."""
    times = sorted(path.stat().st_mtime for path in folder.glob("studies/*/*/result.json"))
    return min([trial_s, *(after - before for before, after in pairwise(times))])


def _await(folder: Path, running: subprocess.Popen[str], before: int) -> None:
    """Until one more result is on disk, or the search ended. Looks often: a simulated trial takes a fraction of a second,
    and a study of twelve has three results to spare for ten kills."""
    until = time.monotonic() + 240.0
    while results(folder) <= before and running.poll() is None:
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def kill_at_random(
    folder: Path, words: Sequence[str], environment: dict[str, str], *, kills: int, seed: int, trial_s: float
) -> StudyRecord:
    """Begin, kill ``kills`` times, each time going on with ``vopt resume``, then let it come to its end.

    The first kill falls into the first start, each later one between one further result and about the next: the same
    configuration is never killed twice, which rightly would mark it. Asserts that no process outlives its search.
    """
    draw = random.Random(seed)
    finished = 0
    running = begin(folder, words, environment)
    try:
        for number in range(kills):
            if number == 0:
                eventually(lambda: list(folder.glob("studies/*/0")), 120.0)
                time.sleep(draw.uniform(0.0, 0.7 * trial_s))
            else:
                _await(folder, running, finished)
                time.sleep(draw.uniform(0.0, 0.7 * shortest_s(folder, trial_s)))
            assert running.poll() is None, f"ended before kill {number + 1}: {(folder / 'said.txt').read_text()[-3000:]}"
            everyone = [entry.identity for entry in descendants(running.pid)]
            running.send_signal(signal.SIGKILL)
            running.wait()
            eventually(lambda who=everyone: not any(alive(one) for one in who), 30.0)
            finished = results(folder)
            running = begin(folder, ["resume"], environment)
        assert running.wait(900) == 0, (folder / "said.txt").read_text()[-3000:]
    finally:
        running.kill()
        running.wait()
    return read_study(f"sqlite:///{folder / 'studies.db'}")


def check_study(study: StudyRecord, trials: int) -> None:
    """Exactly the starts of search and screening that ``--trials`` asks for, each of them finished, measured and there once: as
    many different configurations as the plan has, a second start of some of them in the screening, and nothing else, no label
    twice (a start that was killed leaves none); and an answer."""
    sampled = [record for record in study.trials if record.stage in SAMPLED_STAGES]
    told = [(record.label, str(record.stage), str(record.failure)) for record in study.trials]
    assert len(sampled) == trials, told
    assert all(record.metrics is not None and record.failure is None for record in sampled), told
    assert max(Counter(record.label for record in study.trials).values()) == 1, told
    budget = Budget(trials=trials)
    for stage, starts in ((Stage.SEARCH, budget.searched), (Stage.SCREENING, budget.screening)):
        configs = [record.config for record in sampled if record.stage is stage]
        assert len(configs) == len(set(configs)) == starts, told
    assert {r.config for r in sampled if r.stage is Stage.SCREENING} < {r.config for r in sampled if r.stage is Stage.SEARCH}
    assert study.recommendation is not None
