"""A threshold that a model has learnt for one of its exits, kept beside its weights (thesis 2.5.3).

Calibration generates sequences by parallel decoding, whose deep passes show at every token whether the exit would
have agreed, while the estimator's own threshold is in force. What it has seen belongs to the exit and to the confidence that
it was measured at; with another of either the threshold would mean nothing, so both are kept and checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.generation import Generation
from fathomlm.decode.prompts import Prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions, write_record
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.jsonfile import read_object
from fathomlm.model.seq2seq import FathomModel
from fathomlm.options import check, option

FILE = "threshold.json"
"""Beside a model's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was learnt, and at which exit and by which confidence."""

    exit_layer: int = option(ge=1)
    """From 1, in unrolled depth."""
    confidence: str
    estimator: ThresholdEstimator

    def __post_init__(self) -> None:
        check(self, inside=False)

    def check(self, exits: Sequence[int], confidence: str | None, where: str) -> None:
        """Refuse another exit (`exits` are step indices) or confidence than it was learnt for."""
        if tuple(exits) != (self.exit_layer - 1,):
            requested = ", ".join(str(index + 1) for index in exits)
            raise OptionError(f"{where} was calibrated for an exit after layer {self.exit_layer}, not {requested}")
        if confidence != self.confidence:
            raise OptionError(f"{where} was calibrated for the confidence '{self.confidence}', not '{confidence}'")

    def save(self, path: Path) -> None:
        write_record(path, dataclasses.asdict(self) | {"estimator": self.estimator.to_dict()})

    @classmethod
    def load(cls, path: Path) -> Calibration:
        fields = read_object(path, error=CheckpointError)
        estimator = ThresholdEstimator.from_dict(fields.raw("estimator"), f"{path}, estimator")
        return fields.replaced({"estimator": estimator}).build(cls, whole=True)


def calibrate(
    model: FathomModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    exit_layer: int | None = None,
    confidence: str | None = None,
    options: ThresholdOptions | None = None,
    on_text: Callable[[Generation, ThresholdEstimator], None] | None = None,
) -> Calibration:
    """Complete each prompt, one after the other, and learn from every one. `exit_layer` is by default the model's own
    exit. `on_text` is called with each result."""
    if not prompts:
        raise OptionError("there is no prompt to calibrate with")
    estimator = ThresholdEstimator(options or ThresholdOptions(calibrating_sequences=len(prompts)))
    layers = None if exit_layer is None else (exit_layer,)
    exiting = Exiting(mode="parallel", exit_layers=layers, confidence=confidence, threshold=estimator)
    (index,) = exiting.exits(model.plan)
    assert exiting.confidence is not None
    for prompt in prompts:
        (text,) = generate(model, [prompt], sampling, exiting=exiting)
        if on_text is not None:
            on_text(text, estimator)
    return Calibration(exit_layer=index + 1, confidence=exiting.confidence, estimator=estimator)
