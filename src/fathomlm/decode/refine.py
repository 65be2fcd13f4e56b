"""Refinement (thesis 2.6.3; BiLD, Kim et al. 2023): the text goes back to where the whole model is too surprised.

The surprise at a token that was chosen at the exit is -log p, with p its probability in the whole model's distribution: the
one that a token would be drawn from, or at temperature 0 the model's own (both with the repetition penalty). A token that is
the whole model's likeliest is never replaced. At a limit of 0 greedy decoding therefore gives the whole model's tokens. With
sampling this does not give its distribution; speculative decoding does.
"""

from __future__ import annotations

import math

from torch import Tensor

from fathomlm.decode.lines import Line, Waiting
from fathomlm.decode.parallel import Verify


def refine(limit: float) -> Verify:
    """Replace what surprises the whole model by more than `limit`."""

    def verify(line: Line, waiting: Waiting, logits_V: Tensor) -> int | None:
        chosen, slot = waiting.chosen, waiting.slot
        assert chosen is not None
        p = float(line.chances(logits_V, slot)[chosen])
        surprise = math.inf if p == 0 else -math.log(p)
        if surprise <= limit or chosen == line.likeliest(logits_V, slot):
            return None
        return line.pick(logits_V, slot)

    return verify
