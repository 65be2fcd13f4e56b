"""Cross entropy over a chunk of logits together with its gradient, which takes the logits' own place.

Shapes: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton

BLOCK, WARPS = 16384, 32
"""How many logits a program takes at once, and on how many warps; `benchmarks/training_kernels.py` compares."""
WIDE = 8
"""Neighbouring logits that a thread takes at once: 16 bytes of bfloat16, the most it can load, and one correction of its sum
for all of them, where taking an exponential is as scarce as memory."""


def cross_entropy_(logits_CV: Tensor, targets_C: Tensor, weight: float) -> Tensor:
    """Each token's loss (C) in float32, 0 where its target is negative. `logits_CV` becomes the gradient of weight x loss.

    On a GPU one kernel reads a row twice, the second time from the cache, where a compiler's version reads it three times.
    """
    if triton is not None and logits_CV.is_cuda:
        return _triton_cross_entropy_(logits_CV, targets_C, weight)
    return plain_cross_entropy_(logits_CV, targets_C, weight)


def plain_cross_entropy_(logits_CV: Tensor, targets_C: Tensor, weight: float) -> Tensor:
    """The meaning."""
    counted_C, wanted_C1 = targets_C >= 0, targets_C.clamp_min(0)[:, None]
    log_q = F.log_softmax(logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)), dim=-1)
    losses_C = torch.where(counted_C, -log_q.gather(1, wanted_C1)[:, 0], 0.0)
    slope = log_q.exp().scatter_add_(1, wanted_C1, torch.full_like(wanted_C1, -1, dtype=log_q.dtype))
    logits_CV.copy_(torch.where(counted_C[:, None], weight * slope, 0.0))
    return losses_C


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
        logits_ptr, targets_ptr, losses_ptr, weight, vocab: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * vocab
        target = tl.load(targets_ptr + row)
        columns = tl.arange(0, BLOCK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        most = tl.full((BLOCK // WIDE,), -1e30, tl.float32)
        total = tl.zeros((BLOCK // WIDE,), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + columns
            x = tl.load(logits_ptr + at, mask=at < vocab, other=-1e30).to(tl.float32)
            higher = tl.maximum(most, tl.max(x, 1))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
            most = higher
        highest = tl.max(most, 0)
        # A thread that only ever saw the filling has most = -1e30 and adds exp(-1e30 - highest) = 0.
        log_sum = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
        counted = target >= 0
        wanted = tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32)
        tl.store(losses_ptr + row, tl.where(counted, log_sum - wanted, 0.0))
        tl.debug_barrier()
        last = (vocab - 1) // BLOCK * BLOCK
        for start in range(0, vocab, BLOCK):  # backwards: what was read last is still in the cache
            at = last - start + columns
            x = tl.load(logits_ptr + at, mask=at < vocab, other=-1e30).to(tl.float32)
            slope = weight * (tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0))
            tl.store(logits_ptr + at, tl.where(counted, slope, 0.0).to(logits_ptr.dtype.element_ty), mask=at < vocab)

    def _triton_cross_entropy_(logits_CV: Tensor, targets_C: Tensor, weight: float) -> Tensor:
        assert logits_CV.is_contiguous()
        rows, vocab = logits_CV.shape
        losses_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
        targets_C = targets_C.contiguous()
        _cross_entropy_kernel[(rows,)](
            logits_CV, targets_C, losses_C, weight, vocab=vocab, BLOCK=BLOCK, WIDE=WIDE, num_warps=WARPS
        )
        return losses_C
