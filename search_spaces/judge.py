"""Judges one declaration after the other against vLLM version, model, GPUs, memory, workload and the user's choices."""

from __future__ import annotations

from vopt.search_spaces.arguments import release_of
from vopt.search_spaces.circumstances import Circumstances
from vopt.search_spaces.declaration import Declaration, Narrowing, SpaceFileError
from vopt.search_spaces.domain import Domains, argument_of
from vopt.search_spaces.evidence import Evidence, Surroundings, evidence_for
from vopt.search_spaces.parameter import Inactive, Parameter

NOT_ITS_MODEL = {
    "dense": "this model is a mixture of experts",
    "moe": "this model is no mixture of experts",
    "hybrid": "this model is no hybrid of attention and state layers",
    "not_hybrid": "this model is a hybrid of attention and state layers",
    "mla": "this model has no latent attention (MLA)",
    "not_mla": "this model has latent attention (MLA)",
    "multimodal": "this model takes text only",
    "mtp": "this model has no layers that predict several tokens (MTP)",
    "unquantized": "this model's weights are quantized",
}
"""Why a declaration is left out, by the kind of model that it applies to."""


class Judge:
    """Says of each declaration whether it is searched, and if not, why."""

    def __init__(self, of: Circumstances) -> None:
        self.of, self._domains = of, Domains(of)

    def judge(self, d: Declaration, narrowings: tuple[Narrowing, ...]) -> tuple[Parameter | None, Inactive | None]:
        """(parameter, ``None``) to search it; (``None``, why not); (parameter, why not yet) when evidence may reopen it."""
        if reason := self._left_out(d):
            return None, Inactive(d.name, reason)
        made = self._domains.parameter(d, narrowings)
        if len(made.values) < 2:
            reason = "; ".join(bound.text for bound in made.bounds) or "one value alone is possible here"
            return None, Inactive(d.name, reason)
        evidence = Evidence(True) if d.asked else evidence_for(d.needs, self._around())
        if evidence.active:
            return made, None
        return made, Inactive(d.name, evidence.reason, evidence.reopens_on)

    def _around(self) -> Surroundings:
        hybrid = bool(self.of.model.get("hybrid"))
        return Surroundings(self.of.workload, self.of.resolved, hybrid, self.of.block, self.of.resident)

    def _left_out(self, d: Declaration) -> str | None:
        checks = (self._by_user, self._by_version, self._by_model, self._by_contract, self._by_goal)
        return next((reason for check in checks if (reason := check(d))), None)

    def _by_user(self, d: Declaration) -> str | None:
        own = argument_of(d.name)
        if d.name in self.of.choices.set or own in self.of.choices.set:
            return f"set by you to {self.of.choices.set.get(d.name, self.of.choices.set.get(own))!r}"
        if d.name in self.of.choices.keep | self.of.choices.unmodelled:
            return "kept at vLLM's default by you"
        return d.never if d.never and not d.asked else None

    def _by_version(self, d: Declaration) -> str | None:
        if d.name.startswith("env:"):
            return None
        release, version = self.of.arguments.release, self.of.arguments.version
        if d.since and release < release_of(d.since):
            return f"vLLM {version} has it not yet (since {d.since})"
        if d.until and release >= release_of(d.until):
            return f"vLLM {version} has it no longer (until {d.until})"
        if argument_of(d.name) not in self.of.arguments.engine_names:
            return f"vLLM {version} has no such argument"
        return None

    def _by_model(self, d: Declaration) -> str | None:
        for word in d.applies:
            if word == "gpus":
                if self.of.subject.gpus < 2:
                    return "one GPU is given"
            elif self.of.subject.shape is None:
                return "the model's shape is not known" if not d.asked else None
            elif not self._is(word):
                return NOT_ITS_MODEL[word]
        return None

    def _is(self, word: str) -> bool:
        model = self.of.model
        answers = {
            "dense": not model["moe"],
            "moe": model["moe"],
            "hybrid": model["hybrid"],
            "not_hybrid": not model["hybrid"],
            "mla": model["mla"],
            "not_mla": not model["mla"],
            "multimodal": model["multimodal"],
            "mtp": model["mtp_layers"] > 0,
            "unquantized": model["quantization"] is None,
        }
        return bool(answers[word])

    def _by_contract(self, d: Declaration) -> str | None:
        for changes, allowed, option, what in (
            (d.changes_outputs, self.of.choices.allow_lossy, "--allow-lossy", "it changes outputs"),
            (d.changes_contract, self.of.choices.allow_contract, "--allow-contract", "it changes what clients may send or see"),
        ):
            if changes and d.name not in allowed:
                if d.asked:
                    raise SpaceFileError("--vary", d.name, list(d.values), f"{what}: add {option} {d.name}")
                return f"{what}: {option} {d.name}"
        return None

    def _by_goal(self, d: Declaration) -> str | None:
        wanted = d.asked or d.name in self.of.choices.allow_lossy or d.name in self.of.choices.allow_contract
        searched = any(goal in d.searched for goal in self.of.goal.split("-"))
        return None if wanted or searched else f"only on request (--vary {d.name})"
