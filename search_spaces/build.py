"""Declarations -> the search space of one study: narrowed by vLLM version, mode, model, GPU, memory and evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vopt.search_spaces.bare_mode import limits_of, mode_changes
from vopt.search_spaces.choices import Choices, merge_declarations
from vopt.search_spaces.circumstances import Circumstances
from vopt.search_spaces.evidence import WorkloadFacts
from vopt.search_spaces.judge import Judge
from vopt.search_spaces.learned import Learned
from vopt.search_spaces.memory import Calibration
from vopt.search_spaces.parameter import Inactive, Parameter, Seed, same
from vopt.search_spaces.parse import PriorSeed, SpaceFile, mode_file, mode_for
from vopt.search_spaces.relief import gpus_of
from vopt.search_spaces.rules_engine import PARALLEL
from vopt.search_spaces.space import SearchSpace
from vopt.search_spaces.splits import splits
from vopt.search_spaces.subject import Subject, memory_check, model_facts

__all__ = ["Subject", "build_space", "memory_check", "model_facts"]


def build_space(
    subject: Subject,
    *,
    goal: str = "throughput",
    mode: str = "auto",
    workload: WorkloadFacts | None = None,
    choices: Choices | None = None,
    user: SpaceFile | None = None,
    baseline: Mapping[str, Any] | None = None,
    calibration: Calibration | None = None,
    learned: Learned | None = None,
    rank: Callable[[Mapping[str, Any]], float] | None = None,
) -> SearchSpace:
    """The space of one study.

    ``baseline`` is the user's own configuration: its values become members of the domains. ``rank`` orders the seeds
    (engine config -> higher is better). Every narrowing is a ``Bound`` with its source; every knob that is left out is in
    ``inactive`` with its reason. Raises ``SpaceFileError`` for choices that cannot be meant.
    """
    choices, workload = choices or Choices(), workload or WorkloadFacts()
    mode = mode_for(goal) if mode == "auto" else mode
    of = Circumstances(subject, goal, workload, choices, dict(baseline or {}), calibration)
    judge = Judge(of)
    active: list[Parameter] = []
    inactive: list[Inactive] = []
    dormant: list[Parameter] = []
    asked: list[PriorSeed] = []
    prior = mode_file(mode)
    narrowings = (*prior.keeps, *(user.keeps if user else ()))
    for declaration in merge_declarations(subject.arguments, choices, user):
        made, judged = judge.judge(declaration, narrowings)
        if judged is None and made is not None:
            active.append(made)
            if declaration.asked and not made.ordered:  # no neighbour says what an alternative is worth
                source = "--vary" if made.name in choices.vary else declaration.source
                asked += [PriorSeed({made.name: value}, "asked for by you", source) for value in made.values]
            continue
        assert judged is not None
        inactive.append(judged)
        if made is not None and judged.reopens_on:
            dormant.append(made)
    space = SearchSpace(
        parameters=tuple(active),
        inactive=tuple(inactive),
        mode=mode,
        facts=of.facts(user),
        dormant=tuple(dormant),
        checks=(memory_check(subject, calibration),) if subject.shape is not None else (),
    )
    carried = {name: value for name, value in of.baseline.items() if name not in space}
    given = {**choices.set, **carried}
    limits = limits_of((*active, *dormant), choices, user)
    modes = mode_changes(subject, given)
    space = replace(space, facts={**space.facts, "keep": sorted(choices.keep), "limits": limits, "modes": modes})
    ranks = {name: carried[name] for name in PARALLEL if name in carried}
    if ranks and gpus_of(given) <= subject.gpus:  # of a command beyond them, each point would break the rule
        space = replace(space, facts={**space.facts, "ranks": ranks})
    space = replace(space, seeds=_all_seeds(space, given, asked, user.seeds if user else (), prior.seeds, rank))
    return space.with_learned(learned) if learned is not None else space


Rank = Callable[[Mapping[str, Any]], float]


def _all_seeds(
    space: SearchSpace,
    given: Mapping[str, Any],
    asked: Sequence[PriorSeed],
    user: Sequence[PriorSeed],
    prior: Sequence[PriorSeed],
    rank: Rank | None,
) -> tuple[Seed, ...]:
    """What the user asked for, then the user's and the mode's priors. On several GPUs the widest split of the model comes
    before these and the others between them; everything else stands on the best of the splits, since on fewer GPUs than there
    are it would only show what idle GPUs cost."""
    open_ = [one for one in splits(space, given) if not space.violations({**space.default_point(), **one.values})]
    wide = _seeds(space, given, open_, None)
    if not wide:
        return _distinct(_seeds(space, given, asked, rank), _seeds(space, given, (*user, *prior), rank))
    best = _split_of(space, _ranked(space, wide, rank)[0])

    def on_best(priors: Sequence[PriorSeed]) -> tuple[Seed, ...]:
        return _seeds(space, given, [replace(one, values={**best, **one.values}) for one in priors], rank)

    return _distinct(on_best(asked), wide[:1], on_best(user), _ranked(space, wide[1:], rank), on_best(prior))


def _distinct(*groups: Sequence[Seed]) -> tuple[Seed, ...]:
    found: list[Seed] = []
    for group in groups:
        found += [seed for seed in group if all(seed.point != one.point for one in found)]
    return tuple(found)


def _split_of(space: SearchSpace, seed: Seed) -> dict[str, Any]:
    return {name: value for name, value in seed.point.items() if not same(value, space[name].default)}


def _ranked(space: SearchSpace, seeds: Sequence[Seed], rank: Rank | None) -> tuple[Seed, ...]:
    if rank is None:
        return tuple(seeds)
    return tuple(sorted(seeds, key=lambda seed: -rank({**space.facts["set"], **space.config(seed.point)})))


def _seeds(space: SearchSpace, given: Mapping[str, Any], priors: Sequence[PriorSeed], rank: Rank | None) -> tuple[Seed, ...]:
    """The priors that lie in the space, differ from the default and have a GPU for each rank, those of ``given`` included,
    repaired; best rank first where there is one."""
    gpus = int(space.facts.get("gpus") or 1)
    found: list[Seed] = []
    taken = [space.default_point()]
    for prior in priors:
        inside = {n: v for n, v in prior.values.items() if n in space and any(same(v, m) for m in space[n].values)}
        if not inside or len(inside) < len(prior.values):
            continue
        point, notes = space.repair({**space.default_point(), **inside})
        if any(point == other for other in taken) or space.violations(point):
            continue
        if gpus_of({**given, **space.config(point)}) > gpus:
            continue
        taken.append(point)
        found.append(Seed(point, f"{prior.why} ({prior.source})" + (f"; {'; '.join(notes)}" if notes else "")))
    return _ranked(space, found, rank)
