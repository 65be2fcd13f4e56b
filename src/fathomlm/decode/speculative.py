"""Speculative decoding within one model: the layers up to the exit draft, the whole model accepts or replaces (thesis 2.2.2;
Leviathan et al. 2023, section 2.3).

A drafted token x stays with probability min(1, p(x) / q(x)), where q is the distribution it was drawn from and p the whole
model's, both as filtered by the sampling. A replaced one is drawn from what p has more than q. So tokens come out
distributed as if the whole model had drawn each; at temperature 0 they are the same tokens. Whether a token is drafted at
all depends on the text before it, never on the token.
"""

from __future__ import annotations

from torch import Tensor

from fathomlm.decode.lines import Line, Waiting


def accept(line: Line, waiting: Waiting, logits_V: Tensor) -> int | None:
    """None to keep a draft, or the token in its place."""
    chosen, slot = waiting.chosen, waiting.slot
    assert chosen is not None
    if line.sampling.greedy:
        best = line.likeliest(logits_V, slot)
        return None if best == chosen else best
    p_V, q_V = line.chances(logits_V, slot), line.chances(waiting.logits_V, slot)
    if line.uniform() * float(q_V[chosen]) < float(p_V[chosen]):
        return None
    return line.draw(left_over(p_V, q_V))


def left_over(p_V: Tensor, q_V: Tensor) -> Tensor:
    """What p has more than q; p itself where rounding leaves nothing."""
    more_V = (p_V - q_V).clamp_min(0)
    return more_V if bool(more_V.any()) else p_V
