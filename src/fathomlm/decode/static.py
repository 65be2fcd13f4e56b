"""Every token leaves at the same layer: a shallow model whose deeper layers never run. Without an exit, the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.decode.judge import Judge
from fathomlm.decode.lines import Line
from fathomlm.decode.passes import Passes
from fathomlm.decode.rows import Leave


class Static:
    def __init__(self, passes: Passes, judge: Judge) -> None:
        self._passes, self._judge = passes, judge
        (exit,) = judge.exits or (judge.last,)
        self.prompt_steps = judge.steps[: exit + 1]

    def step(self, lines: Sequence[Line]) -> None:
        """One more token in each row."""
        passes = self._passes
        x_R1M = passes.enter([line.text[-1:] for line in lines])
        looked = self._judge.look(passes, x_R1M, self.prompt_steps, passes.at([line.span for line in lines]))
        for line, logits_V in zip(lines, looked.logits_RV, strict=True):
            line.take(line.pick(logits_V, line.slot), Leave(len(self.prompt_steps)))
