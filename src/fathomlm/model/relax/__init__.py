"""Relaxations: what a step adds to the weights it shares (thesis 3.3.3). One kind a file, one dict of names."""

from fathomlm.model.relax.step import StepDelta, build_deltas, build_encodings

__all__ = ["StepDelta", "build_deltas", "build_encodings"]
