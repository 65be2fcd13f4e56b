"""Options of commands that find a threshold: by which rule, and how careful it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fathomlm.decode.threshold import ThresholdOptions
from fathomlm.errors import OptionError
from fathomlm.options import like

OF_RULE = {"risk": ("risk", "level"), "thesis": ("condition", "priors"), "public": ("condition", "priors")}
"""What each rule goes by."""


def _default(name: str) -> Any:
    return like(ThresholdOptions, name, None, default_text=str(getattr(ThresholdOptions(), name)))


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """None is the default of `ThresholdOptions`; what the rule does not go by is refused rather than ignored."""

    rule: str = like(ThresholdOptions, "rule")
    risk: float | None = _default("risk")
    level: float | None = _default("level")
    condition: float | None = _default("condition")
    priors: str | None = _default("priors")

    def threshold_options(self, **more: Any) -> ThresholdOptions:
        names = ("risk", "level", "condition", "priors")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name in given:
            rules = [rule for rule, used in OF_RULE.items() if name in used]
            if self.rule not in rules:
                raise OptionError(f"--{name} requires --rule {' or '.join(rules)}, and the rule is {self.rule}")
        return ThresholdOptions(rule=self.rule, **given, **more)
