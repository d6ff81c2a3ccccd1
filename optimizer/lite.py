"""The finalist with fewer overrides: without what resolves to the default or is expected to earn less than the noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vopt.optimizer.judge import Judged
from vopt.optimizer.moves import Model, Observation, point_at, positions
from vopt.optimizer.setup import SearchSetup
from vopt.optimizer.trial import EngineConfig

NOISE = 0.01
"""What all dropped overrides together may be expected to cost, log units: the noise of an engine start. Lite may be
recommended at a larger loss, but is not built to lose more."""


def lite_config(
    setup: SearchSetup, finalist: EngineConfig, baseline: EngineConfig, searched: Sequence[Judged]
) -> EngineConfig | None:
    """The lite arm; ``None`` when nothing can be dropped or nothing would be left of the finalist.

    First go overrides whose resolved value equals the baseline's. Then, one at a time, the override whose loss the model
    expects to be least, while the losses together stay within the noise. The last one stays whatever it is expected to earn:
    nothing but the baseline would be left, which is measured anyway, and the finalist would go unchallenged.
    """
    lite = _without_resolved_defaults(finalist, baseline, searched)
    lite = _without_noise(setup, lite, baseline, searched)
    return None if lite in (finalist, baseline) else lite


def _without_resolved_defaults(finalist: EngineConfig, baseline: EngineConfig, searched: Sequence[Judged]) -> EngineConfig:
    mine = next((judged.record.resolved for judged in searched if judged.record.config == finalist), {})
    theirs = next((judged.record.resolved for judged in searched if judged.record.config == baseline), {})
    same = [
        name
        for name in finalist
        if name not in baseline
        and name in mine
        and name in theirs
        and mine[name] == theirs[name]
        and theirs[name] == finalist[name]
    ]
    return finalist.without(*same)


def _without_noise(
    setup: SearchSetup, finalist: EngineConfig, baseline: EngineConfig, searched: Sequence[Judged]
) -> EngineConfig:
    here, home = setup.point(finalist), setup.point(baseline)
    seen = [(setup.point(judged.record.config), judged) for judged in searched if judged.feasible]
    measured = [Observation(point, judged.merit, 1.0) for point, judged in seen if point is not None]
    if here is None or home is None or len(measured) < 3:
        return finalist
    model = Model(setup.space, measured)
    if model.value is None:
        return finalist
    top, bottom = positions(setup.space, here), positions(setup.space, home)
    current = top.copy()
    while True:
        options = []
        for j in range(len(current)):
            if current[j] != bottom[j]:
                row = current.copy()
                row[j] = bottom[j]
                if (row == bottom).all():
                    continue
                loss, _ = model.difference(top, row)
                options.append((loss, j, row))
        options = [
            option for option in options if option[0] <= NOISE and not setup.space.violations(point_at(setup.space, option[2]))
        ]
        if not options:
            return setup.config(point_at(setup.space, current))
        current = min(options, key=lambda option: option[:2])[2]
