"""Relaxations: what a step adds to the weights it shares (thesis 3.3.3). `depth.relaxation` names the kinds."""

from fathomlm.model.relax.lora import LoraDelta
from fathomlm.model.relax.step import StepDelta, build_deltas, build_encodings

__all__ = ["LoraDelta", "StepDelta", "build_deltas", "build_encodings"]
