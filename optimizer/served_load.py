"""How served starts are loaded in a study whose trials are not served: behind the API server everything takes longer. What has
stalled there, and whether the command sustains the rate, the served baseline says, which comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vopt.objectives.records import LoadResult, LoadStatus
from vopt.optimizer.first_load import LOWER, LOWER_GOODPUT, LOWERED, LoadOnce
from vopt.optimizer.history import Arm, TrialRecord
from vopt.optimizer.load.plan import LoadPlan
from vopt.optimizer.measurement import STALL_FACTOR, Asked
from vopt.optimizer.second_load import PLAN

FIRST = "load_plan"


@dataclass(slots=True)
class ServedLoad:
    """What the served starts so far have settled: ``stall_s`` after which a request in flight has stalled, and the ``rate``
    (requests per second) of all of them; ``None``: not yet, or no open loop. ``plan_name``: where a record's environment keeps
    the plan of this load, which may be one of two."""

    stall_s: float | None = None
    rate: float | None = None
    plan_name: str = FIRST

    @classmethod
    def of(cls, records: Iterable[TrialRecord], plan_name: str = FIRST) -> ServedLoad:
        """As the starts of a study that goes on have settled it."""
        found = cls(plan_name=plan_name)
        for record in records:
            found.learn(record)
            plan = record.environment.get(plan_name) or {}
            if record.served and record.arm is not None and record.failure is None and found.rate is None:
                found.rate = plan.get("rate")
        return found

    def learn(self, record: TrialRecord) -> None:
        """Of two loads the latencies of a start are the second's: at its rate, far below those of a closed loop, in which
        requests that only wait their turn would have stalled by them."""
        if (PLAN in record.environment) is not (self.plan_name == PLAN):
            return
        if record.served and record.arm is Arm.BASELINE and record.failure is None and record.metrics is not None:
            p99_s = record.metrics.get("p99_e2e_s")
            self.stall_s = None if p99_s is None else STALL_FACTOR * p99_s

    def plan(self, measured: LoadPlan) -> LoadPlan:
        """The plan of a served start, from the one that the engine alone was measured with."""
        return replace(self.at_its_rate(measured), stall_after_s=self.stall_s)

    def at_its_rate(self, measured: LoadPlan) -> LoadPlan:
        """The same load at the rate of served starts."""
        return measured if self.rate is None else replace(measured, rate=self.rate)

    def load(
        self, measured: LoadPlan, arm: Arm | None, asked: Asked, load_once: LoadOnce, say: Callable[[str], None]
    ) -> tuple[LoadResult, tuple[LoadResult, ...]]:
        """One served load, and those that were set aside for it.

        The first start settles the rate of all that follow. Where it is the baseline's and its queue grows at a rate that was
        found in-process, the rate is lowered as ``first_load`` does: a front end that is slower than the engine (Qwen3-8B on an
        H200: 19,000 of 23,000 tokens/s) must not overload every arm alike. A rate that was typed is the user's.
        """
        plan, aside = self.plan(measured), list[LoadResult]()
        load = load_once(plan)
        if plan.rate is None:
            return load, ()
        may_lower = self.rate is None and arm is Arm.BASELINE and asked.rate is None
        for _ in range(LOWERED if may_lower else 0):
            if load.status is not LoadStatus.OVERLOADED:
                break
            before, plan = plan.rate, replace(plan, rate=(LOWER_GOODPUT if asked.slos else LOWER) * plan.rate)
            say(f"rate: {plan.rate:.3g} requests/s for all served commands, for the baseline's queue grew at {before:.3g}")
            aside.append(load)
            load = load_once(plan)
        self.rate = plan.rate
        return load, tuple(aside)
