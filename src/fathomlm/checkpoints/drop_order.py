"""A greedy search for layers to leave out.

One after another goes the layer without which the loss over some text is lowest; the others are then measured again. A
layer's influence, measured once on the whole model, does not see that two layers may be dispensable one by one but not
both. What is in front of a candidate does not depend on it, so a round walks the stream through the layers once, and runs
for each candidate only those behind it: half of what whole forward passes would take.

Shapes: N rows, T tokens of a row, M hidden width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.cache import NoCache
from fathomlm.checkpoints.assemble import OnProgress
from fathomlm.depth import Step
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.decoder import Decoder


@torch.no_grad()
def drop_order(
    decoder: Decoder, batches: Sequence[Tensor], count: int, on_candidate: OnProgress | None = None
) -> list[tuple[int, float]]:
    """The first `count` layers to leave out of a plain decoder, in order, each with the loss over all rows without it and
    those before it. `batches` are rows of tokens (N, T). Of two alike the later one goes, as by influence."""
    order: list[tuple[int, float]] = []
    kept, done, total = list(decoder.plan.steps), 0, candidates(len(decoder.plan.steps), count)
    rows = sum(len(rows_NT) for rows_NT in batches)
    while len(order) < count:
        losses = [0.0] * len(kept)
        for batch, rows_NT in enumerate(batches):
            for i, loss in enumerate(_losses_without(decoder, rows_NT, kept)):
                losses[i] += loss / rows
                if on_candidate is not None:
                    on_candidate(done + (batch * len(kept) + i + 1) // len(batches), total)
        done += len(kept)
        worst = min(range(len(kept)), key=lambda i: (math.isnan(losses[i]), losses[i], -i))
        order.append((kept.pop(worst).layer, losses[worst]))
    return order


def candidates(layers: int, count: int) -> int:
    """How many models are measured to leave out so many of them."""
    return sum(layers - gone for gone in range(count))


def row_loss(logits_TV: Tensor, row_T: Tensor) -> float:
    """Of the next token, in nats."""
    return F.cross_entropy(logits_TV[:-1].float(), row_T[1:]).item()


def shifted(on_progress: OnProgress | None, before: int, total: int) -> OnProgress | None:
    """Progress of a stage as that of a whole with `total` items, `before` of them in earlier stages."""
    return None if on_progress is None else lambda done, _: on_progress(before + done, total)


@torch.no_grad()
def ends_without(decoder: Decoder, rows_NT: Tensor, steps: Sequence[Step]) -> Iterator[Tensor]:
    """What the head would read (N, T, M) without each step in turn, and at last with all of them."""
    x_NTM = decoder.enter(rows_NT)
    masks = full_masks(decoder.architecture, decoder.plan, TokenBatch.of(x_NTM, None, None, past=0), x_NTM.dtype)
    nothing = NoCache(decoder.plan)
    for i, step in enumerate(steps):
        yield decoder.norm(decoder.run_steps(x_NTM, tuple(steps[i + 1 :]), masks, nothing))
        x_NTM = decoder.run_steps(x_NTM, (step,), masks, nothing)
    yield decoder.norm(x_NTM)


def _losses_without(decoder: Decoder, rows_NT: Tensor, steps: Sequence[Step]) -> Iterator[float]:
    """The sum of the rows' losses without each step in turn."""
    for end_NTM in itertools.islice(ends_without(decoder, rows_NT, steps), len(steps)):
        yield sum(row_loss(decoder.logits(x_TM), row_T) for x_TM, row_T in zip(end_NTM, rows_NT, strict=True))
