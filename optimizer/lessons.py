"""What engine starts taught, kept for later studies of the same model, GPU and vLLM: limits, dead values, memory overheads.

One small JSON file for each of these under the cache root. Limits are kept apart by what was in every trial (``--set``, the
command in use), because they hold for that alone; memory overheads are of the complete arguments and are shared. Only starts
teach here: what a load broke says something about that load. Simulations keep nothing, so that they repeat.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vopt.optimizer.caches import cache_root
from vopt.optimizer.history import SAMPLED_STAGES, TrialRecord
from vopt.optimizer.subject import Subject
from vopt.optimizer.trial import Blame, EngineConfig, Phase, StartClass
from vopt.search_spaces.build import Subject as SpaceSubject
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.memory import Calibration, Observation
from vopt.search_spaces.space import SearchSpace

FORMAT_VERSION = 2
"""Since 2 a memory observation is of what CUDA shows and of what profiling takes; those of before would mislead."""
MOST_LESSONS = 400
MOST_OBSERVATIONS = 60


@dataclass(frozen=True, slots=True)
class Lessons:
    """What is known before a study begins."""

    learned: Learned = field(default_factory=Learned)
    calibration: Calibration = field(default_factory=Calibration)


def lessons_file(subject: Subject) -> Path | None:
    """Where the lessons about this model, GPU and vLLM lie; ``None`` for a simulation."""
    if subject.machine.simulated:
        return None
    key = [subject.model.name, subject.model.revision, *subject.machine.names, subject.schema.version]
    stem = re.sub(r"[^a-z0-9.]+", "-", subject.model.name.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
    return cache_root() / "learned" / f"{stem}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json"


def section_of(subject: Subject) -> str:
    """Which limits of a file hold: those of trials that all carried the same arguments."""
    return (subject.fixed | subject.baseline).digest


def read_lessons(path: Path | None, section: str) -> Lessons:
    """What is kept there; nothing when there is no file, or a damaged one."""
    if path is None:
        return Lessons()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        learned = Learned.from_json(document["learned"].get(section, {}))
        rows = document["calibration"] if document["format_version"] == FORMAT_VERSION else ()
        return Lessons(learned, Calibration(tuple(Observation(**row) for row in rows)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Lessons()


def write_lessons(path: Path, section: str, lessons: Lessons) -> None:
    """Keep these under ``section``; other sections stay. The file is whole at any time."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        sections = dict(document["learned"])
    except (OSError, ValueError, KeyError, TypeError):
        sections = {}
    learned = replace(lessons.learned, lessons=lessons.learned.lessons[-MOST_LESSONS:])
    document = {
        "format_version": FORMAT_VERSION,
        "learned": {**sections, section: learned.to_json()},
        "calibration": [asdict(row) for row in lessons.calibration.observations[-MOST_OBSERVATIONS:]],
    }
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(document, file)
    Path(file.name).replace(path)


class LessonBook:
    """Adds what each start of one study teaches. Two searches may write at once: each reads again under a lock."""

    def __init__(self, subject: Subject, space_subject: SpaceSubject, space: SearchSpace, outside: EngineConfig) -> None:
        self._path, self._section = lessons_file(subject), section_of(subject)
        self._subject, self._memory_of, self._space, self._outside = subject, space_subject, space.whole, outside

    def add(self, record: TrialRecord) -> None:
        """Learn from one start; infrastructure failures and loads teach nothing. Never fails for what a disk does."""
        failure = record.failure
        starting = failure is not None and failure.phase in (Phase.PREFLIGHT, Phase.START)
        wanted = failure is None or (starting and failure.kind.blame is Blame.CONFIGURATION)
        if self._path is None or not wanted or record.stage not in SAMPLED_STAGES:
            return
        try:
            with _locked(self._path):
                before = read_lessons(self._path, self._section)
                after = Lessons(
                    self._learned(before.learned, record),
                    calibrated(before.calibration, self._memory_of, [record], self._subject.fixed),
                )
                if after != before:
                    write_lessons(self._path, self._section, after)
        except OSError:
            return

    def _learned(self, learned: Learned, record: TrialRecord) -> Learned:
        inside = {name: value for name, value in record.config.items() if self._outside.get(name) != value}
        try:
            point = self._space.point_of(inside)
        except (KeyError, ValueError):
            return learned
        default, failure = self._space.default_point(), record.failure
        if failure is None:
            return learned.succeeded(point, default)
        if any(lesson.covers(point) for lesson in learned.lessons):
            return learned
        return learned.failed(point, default, kind=str(failure.kind), detail=failure.detail, hint=failure.hint)


def calibrated(
    calibration: Calibration, subject: SpaceSubject, records: Sequence[TrialRecord], fixed: Mapping[str, Any]
) -> Calibration:
    """``calibration`` and what the successful starts among ``records`` said of their KV cache."""
    if subject.shape is None:
        return calibration
    for record in records:
        if record.kv_cache_bytes and record.kv_cache_bytes > 0 and _came_up(record):
            arguments = {**fixed, **record.config}
            calibration = calibration.learn(
                subject.shape,
                subject.gpu,
                arguments,
                record.kv_cache_bytes,
                subject.arguments.version,
                compiled=record.start_class is StartClass.KNOWN_KEY,
            )
    return calibration


def _came_up(record: TrialRecord) -> bool:
    return record.failure is None or record.failure.phase in (Phase.LOAD, Phase.STOP)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
