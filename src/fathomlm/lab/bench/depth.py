"""How deep tokens go in a benchmark: as the model says, as an exit is sure, or by a draw, which is then called forced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fathomlm.decode.exiting import Exiting, Mode
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError
from fathomlm.lab.bench.options import EXIT_FLAGS, ForcedDepthOptions

DepthSource = Literal["full", "router", "confidence", "forced"]
"""What says how deep a token goes: nothing, they all run every layer; a router; how sure an exit is; a draw, for
measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """What was chosen for one model: what says how deep tokens go, that in words, and what the engine has to know."""

    source: DepthSource = "full"
    label: str = "every token runs every layer"
    exiting: Exiting | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Of `EngineOptions`."""

    def __post_init__(self) -> None:
        # A figure with depths that no model chose must say so wherever it goes.
        assert (self.source == "forced") == self.label.startswith("forced"), "forced depths are called that"


def resolve_depth(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    """What the options ask for, checked against a model."""
    source = options.source
    if source in (None, "router"):
        if plan.routing is None and source is not None:
            raise OptionError("--depth router requires a model with a router, or --router expert")
        routed = DepthChoice(source="router", label="each token as deep as its router says")
        return DepthChoice() if plan.routing is None else routed
    if source == "forced" and plan.routing is not None:
        return _forced_depths(options, plan)
    if options.depths is not None:
        raise OptionError("--depths requires a model with a router; --exit-rate forces exits without one")
    if source == "forced" and options.exit_rate is None:
        raise OptionError("--depth forced requires --exit-rate P without a router")
    return _exits(options, plan)


def _forced_depths(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    assert plan.routing is not None
    for name, flag in EXIT_FLAGS.items():
        if getattr(options, name) is not None:
            raise OptionError(f"{flag} requires a model without a router; --depths forces depths with one")
    if not plan.routing.method.picks_tokens:
        raise OptionError("forced depths require an expert-choice router; a token-choice router gives each token its depth")
    parts = plan.routing.capacity if options.depths is None else options.depths
    if len(parts) != plan.recursions:
        raise OptionError(f"--depths has {len(parts)} parts, but the model has {plan.recursions} recursions")
    shown = ", ".join(f"{part:.4g}" for part in parts)
    label = f"forced: parts {shown} of all tokens run recursions 1 to {plan.recursions}, drawn and not decided"
    return DepthChoice(source="forced", label=label, fields={"forced_depths": parts})


def _exits(options: ForcedDepthOptions, plan: DepthPlan) -> DepthChoice:
    mode: Mode = options.mode or "parallel"  # type: ignore[assignment]
    exits = Exiting(mode=mode, exit_layers=options.exit_layers).exits(plan)
    layers = tuple(index + 1 for index in exits)
    exiting = Exiting(mode=mode, exit_layers=layers, threshold=options.threshold, max_stack=options.max_stack)
    layer = ", ".join(map(str, layers))
    if options.exit_rate is None:
        label = f"tokens exit after layer {layer} where the confidence exceeds {exiting.threshold_now():g} ({mode})"
        return DepthChoice(source="confidence", label=label, exiting=exiting)
    label = f"forced: {options.exit_rate:.4g} of all tokens exit after layer {layer}, drawn and not decided ({mode})"
    return DepthChoice(source="forced", label=label, exiting=exiting, fields={"forced_exits": options.exit_rate})
