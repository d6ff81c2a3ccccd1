"""What vLLM refuses when it builds its configuration, as named rules with the smallest repair: no engine, no vLLM.

Sources: the checks in ``vllm/config/*.py`` and ``vllm/engine/arg_utils.py`` of 0.20 to 0.33, many of them also run on
0.32.0. Where a vLLM is installed its own ``create_engine_config`` has the last word; these rules save asking it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vopt.search_spaces import rules_engine, rules_models, rules_speculation
from vopt.search_spaces.parameter import Point, Violation, same
from vopt.search_spaces.settings import Settings

RULES = (*rules_engine.RULES, *rules_models.RULES, *rules_speculation.RULES)


def rule_violations(config: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Violation]:
    """Every rule that a complete engine config breaks."""
    settings = Settings(config, facts)
    if (below := rules_engine.size_below_one(settings)) is not None:
        return [below]  # the other rules compute with sizes
    return [violation for check in RULES if (violation := check(settings)) is not None]


def forbidden_violations(point: Point, forbidden: Iterable[Mapping[str, Any]]) -> list[Violation]:
    """The user's own rules: ``{"conditions": {name: value | {at_least, at_most}}, "why": text}``."""
    found = []
    for entry in forbidden:
        if all(name in point and _meets(point[name], wanted) for name, wanted in entry["conditions"].items()):
            what = ", ".join(f"{name} = {point[name]!r}" for name in entry["conditions"])
            found.append(Violation("forbidden", f"{what}: {entry['why']}"))
    return found


def _meets(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping) and wanted.keys() & {"at_least", "at_most"}:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return bool(wanted.get("at_least", value) <= value <= wanted.get("at_most", value))
    return same(value, wanted)
