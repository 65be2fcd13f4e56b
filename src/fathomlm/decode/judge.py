"""What happens at an exit: its layers run, it says how sure it is, and a token leaves or goes on.

Shapes: R rows, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fathomlm.decode.confidence import AtExit, ExitClassifier, confidences, find_classifiers
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.passes import Passes, Place
from fathomlm.depth import Step
from fathomlm.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Looked:
    """One exit, seen by each row's one token."""

    state_RM: Tensor
    """The residual stream after the exit's layer, before the final norm: what goes on from here."""
    logits_RV: Tensor
    confidences: list[float] | None
    """None where the mode compares none."""


class Judge:
    """The exits of one model under one setting. The threshold is read once: no row depends on another's end."""

    def __init__(self, decoder: Decoder, exiting: Exiting) -> None:
        self.plan = decoder.plan
        self.steps = decoder.plan.steps
        self.exits = exiting.exits(decoder.plan)
        """The indices of the steps that exits follow."""
        self.threshold = exiting.threshold_now()
        self._measure = exiting.confidence
        self._classifiers: dict[int, ExitClassifier] = {}
        if exiting.confidence == "classifier":
            self._classifiers = find_classifiers(decoder, self.exits)

    @property
    def last(self) -> int:
        """The index of the last step."""
        return self.steps[-1].index

    def look(self, passes: Passes, x_R1M: Tensor, steps: Sequence[Step], place: Place) -> Looked:
        """Run the steps up to an exit, or to the end, and ask there."""
        before_R1M = passes.run(x_R1M, steps[:-1], place)
        after_R1M = passes.run(before_R1M, steps[-1:], place)
        index = steps[-1].index
        read_R1M = passes.leave(after_R1M, index, place)
        logits_RV = passes.logits(read_R1M, index)[:, -1]
        sure = None
        if self._measure is not None and index in self.exits:
            classifier = self._classifiers.get(index)
            at = AtExit(before_R1M[:, -1], after_R1M[:, -1], logits_RV, classifier, read_R1M[:, -1])
            sure = confidences(self._measure, at)
        return Looked(after_R1M[:, -1], logits_RV, sure)

    def lets_go(self, confidence: float) -> bool:
        """Whether a token leaves."""
        assert self.threshold is not None
        return leaves(confidence, self.threshold)


def leaves(confidence: float, threshold: float) -> bool:
    """A token leaves above the threshold, and at threshold 0 always, even where the confidence is 0 too."""
    return threshold == 0 or confidence > threshold
