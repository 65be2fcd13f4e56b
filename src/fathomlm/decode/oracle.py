"""The oracle: a token leaves at the earliest exit whose likeliest token is the last layer's too (thesis 2.4.1).

No real decoding knows the last layer's choice before it has run, and here it does run, for every token. So the tokens are
those of the whole model, and the exits say how early it could have been left at best.
"""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.decode.judge import Judge
from fathomlm.decode.lines import Line
from fathomlm.decode.passes import Passes
from fathomlm.decode.rows import Leave


class Oracle:
    def __init__(self, passes: Passes, judge: Judge) -> None:
        self._passes, self._judge = passes, judge
        self.prompt_steps = judge.steps

    def step(self, lines: Sequence[Line]) -> None:
        """One more token in each row."""
        passes, judge = self._passes, self._judge
        place = passes.at([line.span for line in lines])
        x_R1M = passes.enter([line.text[-1:] for line in lines])
        seen = []
        first = 0
        for exit in judge.exits:
            seen.append(judge.look(passes, x_R1M, judge.steps[first : exit + 1], place))
            x_R1M = seen[-1].state_RM[:, None]
            first = exit + 1
        last = judge.look(passes, x_R1M, judge.steps[first:], place)
        for r, (line, logits_V) in enumerate(zip(lines, last.logits_RV, strict=True)):
            best = line.likeliest(logits_V, line.slot)
            agreed = [line.likeliest(looked.logits_RV[r], line.slot) == best for looked in seen]
            sure = [looked.confidences[r] for looked in seen if looked.confidences is not None]
            line.samples += zip(sure, agreed, strict=True)
            if any(agreed):
                at = agreed.index(True)
                leave = Leave(judge.exits[at] + 1, sure[at], True)
            else:
                leave = Leave(judge.last + 1, sure[-1], False)
            line.take(line.pick(logits_V, line.slot), leave)
