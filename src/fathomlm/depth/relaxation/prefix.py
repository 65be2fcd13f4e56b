"""Prefix: trainable vectors from which a step makes extra keys and values (thesis appendix on alternative relaxations).

It adds something new anywhere, so every step has one, shared or not. That is what the thesis' tables count.
"""

from __future__ import annotations

from collections.abc import Iterator

from fathomlm.depth.architecture import Architecture
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation.kind import RelaxationKind, RelaxationSettings
from fathomlm.depth.steps import Step
from fathomlm.errors import OptionError


class Prefix(RelaxationKind):
    module = "fathomlm.model.relax.prefix:PrefixStep"
    options = ("prefix_length",)
    makes_kv = True

    def check(self, relaxation: RelaxationSettings) -> None:
        if relaxation.prefix_length < 1:
            raise OptionError(f"prefix requires prefix_length >= 1, got {relaxation.prefix_length}")

    def sits_on(self, relaxation: RelaxationSettings, plan: DepthPlan, step: Step) -> bool:
        return True

    def shapes(self, relaxation: RelaxationSettings, architecture: Architecture) -> Iterator[tuple[int, ...]]:
        yield (relaxation.prefix_length, architecture.hidden)

    def extra_keys(self, relaxation: RelaxationSettings) -> int:
        return relaxation.prefix_length

    def describe(self, relaxation: RelaxationSettings) -> str:
        return f"prefix of {relaxation.prefix_length}"
