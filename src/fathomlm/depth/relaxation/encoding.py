"""Encoding: a vector that multiplies the output of each recursion (thesis appendix: position encoding by recursion)."""

from __future__ import annotations

from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation.kind import RelaxationKind, RelaxationSettings
from fathomlm.depth.steps import Step
from fathomlm.errors import OptionError


class Encoding(RelaxationKind):
    per_recursion = True

    def check_plan(self, relaxation: RelaxationSettings, plan: DepthPlan) -> None:
        if not plan.whole_passes:
            raise OptionError(
                "encoding multiplies the output of each recursion, so it requires a core that loops as a whole "
                f"(cycle, middle-cycle or cycle-rev), not {plan.sharing}"
            )

    def sits_on(self, relaxation: RelaxationSettings, plan: DepthPlan, step: Step) -> bool:
        """It belongs to a recursion, not to a step."""
        return False
