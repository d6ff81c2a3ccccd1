"""The memory of a search's subject: what the pure packages need to know of it, and what its own starts teach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vopt.optimizer import cpu_memory
from vopt.optimizer.history import TrialRecord
from vopt.optimizer.lessons import calibrated
from vopt.optimizer.subject import Subject
from vopt.search_spaces.build import Subject as SpaceSubject
from vopt.search_spaces.build import memory_check
from vopt.search_spaces.defaults import Gpu
from vopt.search_spaces.memory import Calibration
from vopt.search_spaces.relief import Fit
from vopt.search_spaces.space import Check
from vopt.search_spaces.subject import memory_fit


def space_subject(subject: Subject) -> SpaceSubject:
    """What the pure packages need to know of it; the CPU build's memory is this host's."""
    gpu = subject.machine.gpu or host_as_gpu()
    return SpaceSubject(subject.schema, gpu, subject.shape, subject.machine.count, subject.resolved)


def host_as_gpu() -> Gpu:
    """This host as the device of vLLM's CPU build."""
    return Gpu("cpu", cpu_memory.memory_bytes())


def memory_checks(subject: Subject, before: Calibration) -> Callable[[Sequence[TrialRecord]], tuple[Check, ...]]:
    """The memory checks of a study from its starts so far; ``before`` is what earlier studies saw."""
    of = space_subject(subject)

    def checks(records: Sequence[TrialRecord]) -> tuple[Check, ...]:
        if of.shape is None:
            return ()
        return (memory_check(of, calibrated(before, of, records, subject.fixed)),)

    return checks


def memory_fits(subject: Subject, before: Calibration) -> Callable[[Sequence[TrialRecord]], Fit] | None:
    """Whether memory suffices, from the starts of a study so far; ``None`` without the model's shape."""
    of = space_subject(subject)
    if of.shape is None:
        return None

    def fits(records: Sequence[TrialRecord]) -> Fit:
        found = memory_fit(of, calibrated(before, of, records, subject.fixed))
        assert found is not None
        return found

    return fits
