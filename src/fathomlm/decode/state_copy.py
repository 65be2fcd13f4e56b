"""State copying (CALM, Schuster et al. 2022; thesis 2.3): a token leaves at the first exit that is sure enough.

Tokens to come look at its keys and values in the deeper layers too. They are made of the state that left, by each deeper
layer's own norm and projections, as if no layer in between had changed it. That is an approximation, and it adds up over
a text (thesis 2.4.1).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fathomlm.decode.judge import Judge, Looked
from fathomlm.decode.lines import Line
from fathomlm.decode.passes import Passes
from fathomlm.decode.rows import Leave


class StateCopy:
    def __init__(self, passes: Passes, judge: Judge) -> None:
        self._passes, self._judge = passes, judge
        self.prompt_steps = judge.steps

    def step(self, lines: Sequence[Line]) -> None:
        """One more token in each row."""
        passes, judge = self._passes, self._judge
        x_R1M = passes.enter([line.text[-1:] for line in lines])
        first = 0
        passed: list[tuple[int, float]] = []
        for exit in judge.exits:
            place = passes.at([line.span for line in lines])
            looked = judge.look(passes, x_R1M, judge.steps[first : exit + 1], place)
            assert looked.confidences is not None
            goes = [judge.lets_go(confidence) for confidence in looked.confidences]
            stay = [r for r, go in enumerate(goes) if not go]
            self._leave(lines, looked, [r for r, go in enumerate(goes) if go], exit)
            if not stay:
                return
            passed = [(lines[r].likeliest(looked.logits_RV[r], lines[r].slot), looked.confidences[r]) for r in stay]
            lines = [lines[r] for r in stay]
            x_R1M = looked.state_RM[stay][:, None]
            first = exit + 1
        place = passes.at([line.span for line in lines])
        x_R1M = passes.run(x_R1M, judge.steps[first:], place)
        self._finish(lines, passes.logits(x_R1M, judge.last)[:, -1], passed)

    def _leave(self, lines: Sequence[Line], looked: Looked, going: list[int], exit: int) -> None:
        """These rows' tokens are chosen here, and their state stands in for what deeper layers would have seen."""
        if not going:
            return
        assert looked.confidences is not None
        place = self._passes.at([lines[r].span for r in going])
        own = self._judge.plan.exit_steps(index for index in self._judge.exits if index > exit)
        self._passes.copy(looked.state_RM[going][:, None], (*self._judge.steps[exit + 1 :], *own), place)
        for r in going:
            line, leave = lines[r], Leave(exit + 1, looked.confidences[r])
            line.take(line.pick(looked.logits_RV[r], line.slot), leave)

    def _finish(self, lines: Sequence[Line], logits_RV: Tensor, passed: Sequence[tuple[int, float]]) -> None:
        """The others are chosen at the end. What the last exit would have chosen is known, so agreement is too."""
        for line, logits_V, (likeliest, confidence) in zip(lines, logits_RV, passed, strict=True):
            agreed = likeliest == line.likeliest(logits_V, line.slot)
            line.take(line.pick(logits_V, line.slot), Leave(self._judge.last + 1, confidence, agreed))
