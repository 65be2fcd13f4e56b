"""The settings of a sweep: how deep tokens go, from the least to all of the model (thesis 2.6 and 4.6.3, its trade-offs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fathomlm.decode.exiting import Exiting
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices
from fathomlm.lab.evaluate.outputs import FULL, Output, depth_outputs, exit_outputs
from fathomlm.model.route import DepthControl

SWEEPS = ("threshold", "depth", "exit-layer")
THRESHOLDS = tuple(step / 10 for step in range(11))
"""As in the thesis: from 0, every token leaves, to 1, none does."""
MODES = ("parallel", "state-copy", "speculative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point to be measured."""

    name: str
    kind: str
    """full, sweep or adaptive."""
    value: float | None = None
    """The threshold, the recursions or the layer; None at full depth."""
    exiting: Exiting | None = None
    control: DepthControl | None = None
    output: Output = FULL
    """Where predictions are read, in sweeps without a threshold."""


FULL_DEPTH = Setting(name="full", kind="full")


def sweep_settings(plan: DepthPlan, sweep: str, layers: str | None) -> tuple[Setting, ...]:
    """Depths or layers, and the whole model at the end. `layers` says which: recursion, layer, all or 4,8."""
    if sweep == "depth":
        if layers is not None:
            raise OptionError("--exit-layer goes with --sweep exit-layer or threshold")
        chosen = depth_outputs(plan, "all")[:-1]  # all recursions are the whole model
        found = [
            Setting(name=each.name, kind="sweep", value=each.max_depth, control=each.control, output=each) for each in chosen
        ]
    elif sweep == "exit-layer":
        found = [
            Setting(name=each.name, kind="sweep", value=each.layer, exiting=each.exiting, output=each)
            for each in exit_outputs(plan, layers or ("recursion" if plan.recursions > 1 and plan.whole_passes else "layer"))
            if each.layer is not None
        ]
    else:
        raise OptionError(choices("sweep", sweep, SWEEPS))
    return (*found, FULL_DEPTH)


def threshold_settings(
    plan: DepthPlan,
    thresholds: Sequence[float],
    *,
    mode: str = "parallel",
    exit_layer: int | None = None,
    confidence: str | None = None,
) -> tuple[Setting, ...]:
    """A setting for each threshold, and the whole model at the end."""
    if mode not in MODES:
        raise OptionError(choices("decoding mode", mode, MODES))
    found = [at_threshold(value, mode, exit_layer, confidence) for value in sorted(set(thresholds))]
    for setting in found:
        assert setting.exiting is not None
        setting.exiting.exits(plan)  # refuses what the model does not have
    return (*found, FULL_DEPTH)


def at_threshold(value: float, mode: str, exit_layer: int | None, confidence: str | None, kind: str = "sweep") -> Setting:
    layers = None if exit_layer is None else (exit_layer,)
    exiting = Exiting(mode=mode, exit_layers=layers, confidence=confidence, threshold=value)  # type: ignore[arg-type]
    name = f"{'adaptive' if kind == 'adaptive' else 'threshold'} {value:g}"
    return Setting(name=name, kind=kind, value=value, exiting=exiting)


def read_thresholds(text: str | None) -> tuple[float, ...]:
    """Numbers from 0 to 1, such as 0.2,0.5,0.9."""
    if text is None:
        return THRESHOLDS
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1 for value in values):
        raise OptionError(f"--thresholds takes numbers from 0 to 1 such as 0.2,0.5,0.9; got '{text}'")
    return values
