"""Synchronized parallel decoding (FREE, thesis 2.5.2): tokens that left early wait, and the deeper layers run for all of
them together with the first that does not leave.

So every token gets its exact keys and values at every layer, only later. The tokens themselves are not those of the whole
model: one that left early was chosen at the exit, and stays. With `verify` what was chosen at the exit is a draft. When
the deeper layers have run it is kept or replaced, and what follows a replaced one is discarded (refine.py,
speculative.py). Drafts are not shown and end no text before they are settled.

Shapes: R rows, N waiting tokens (padded to the longest row), M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fathomlm.cache import Span
from fathomlm.decode.judge import Judge
from fathomlm.decode.lines import Line, Waiting
from fathomlm.decode.passes import Passes
from fathomlm.decode.rows import Leave

Verify = Callable[[Line, Waiting, Tensor], int | None]
"""Given the whole model's scores at a draft: the token to put in its place, or None to keep it."""


class Parallel:
    def __init__(self, passes: Passes, judge: Judge, max_stack: int, verify: Verify | None = None) -> None:
        self._passes, self._judge, self._verify = passes, judge, verify
        self._max_stack = max_stack
        (self._exit,) = judge.exits
        self._shallow, self._deep = judge.steps[: self._exit + 1], judge.steps[self._exit + 1 :]
        self.prompt_steps = judge.steps

    def step(self, lines: Sequence[Line]) -> None:
        """The layers up to the exit for one more token of each row, and those behind it for the rows that need them."""
        passes, judge = self._passes, self._judge
        x_R1M = passes.enter([line.text[-1:] for line in lines])
        looked = judge.look(passes, x_R1M, self._shallow, passes.at([line.span for line in lines]))
        assert looked.confidences is not None
        due = []
        for r, line in enumerate(lines):
            logits_V, leave = looked.logits_RV[r], Leave(self._exit + 1, looked.confidences[r])
            likeliest = line.likeliest(logits_V, line.slot)
            waiting = Waiting(line.slot, looked.state_RM[r], logits_V, likeliest, leave)
            line.stack.append(waiting)
            if judge.lets_go(looked.confidences[r]):
                waiting.chosen = line.pick(logits_V, line.slot)
                self._advance(line, waiting.chosen, leave)
            if waiting.chosen is None or self._must_catch_up(line):
                due.append(line)
        if due:
            self._catch_up(due)

    def _advance(self, line: Line, token: int, leave: Leave) -> None:
        if self._verify is None:
            line.take(token, leave)
        else:
            line.text.append(token)

    def _must_catch_up(self, line: Line) -> bool:
        """Whether the row may not go on: too many wait, the text is over, or it is if its drafts are kept."""
        row = line.row
        if row.finish is not None or len(line.stack) == self._max_stack:
            return True
        return bool(line.unsettled) and (line.text[-1] in row.ends or len(row.tokens) + line.unsettled == row.most)

    def _catch_up(self, lines: Sequence[Line]) -> None:
        """Run the deeper layers over all that waits in these rows."""
        passes = self._passes
        place = passes.at([Span(line.index, line.stack[0].slot, len(line.stack)) for line in lines])
        states = [torch.stack([waiting.state_M for waiting in line.stack]) for line in lines]
        x_RNM = passes.run(pad_sequence(states, batch_first=True), self._deep, place)
        for line, logits_NV in zip(lines, passes.logits(x_RNM, self._judge.last), strict=True):
            line.deep_passes += 1
            if self._verify is None:
                self._complete(line, logits_NV)
            else:
                self._settle(line, logits_NV, self._verify)
            if line.row.finish is not None:
                passes.cache.truncate(len(line.row.prompt) + len(line.row.tokens) - 1, line.index)
                line.row.note_end()

    def _complete(self, line: Line, logits_NV: Tensor) -> None:
        """What was chosen at the exit stays; the last token is chosen here if it was not there."""
        stack, line.stack = line.stack, []
        for waiting, logits_V in zip(stack, logits_NV, strict=False):
            line.note_agreement(waiting.leave, waiting.likeliest == line.likeliest(logits_V, waiting.slot))
            if waiting.chosen is None:
                waiting.leave.layer = self._judge.last + 1
                line.take(line.pick(logits_V, waiting.slot), waiting.leave)

    def _settle(self, line: Line, logits_NV: Tensor, verify: Verify) -> None:
        """Keep drafts up to the first that is replaced. The cache lets go of the rest before the row takes any token, so
        that it is right whenever this is interrupted."""
        stack, line.stack = line.stack, []
        settled: list[tuple[int, Waiting, bool]] = []
        for waiting, logits_V in zip(stack, logits_NV, strict=False):
            agreed = waiting.likeliest == line.likeliest(logits_V, waiting.slot)
            token = self._deep_choice(line, waiting, logits_V, verify)
            if token is None:
                assert waiting.chosen is not None
                settled.append((waiting.chosen, waiting, agreed))
                continue
            waiting.leave.layer = self._judge.last + 1
            settled.append((token, waiting, agreed))
            self._passes.cache.truncate(waiting.slot + 1, line.index)
            line.text[waiting.slot + 1 :] = [token]
            break
        for token, waiting, agreed in settled:
            line.note_agreement(waiting.leave, agreed)
            if not line.row.take(token, leave=waiting.leave):
                break

    def _deep_choice(self, line: Line, waiting: Waiting, logits_V: Tensor, verify: Verify) -> int | None:
        """What the whole model puts here, or None where a draft is kept."""
        if waiting.chosen is None:
            return line.pick(logits_V, waiting.slot)
        instead = verify(line, waiting, logits_V)
        line.drafted += 1
        line.accepted += instead is None
        return instead
