"""The head's losses, a chunk of tokens at a time, so that full logits are never held.

For 2048 x 16 tokens over a vocabulary of 49,152, float32 logits and their gradient would take 13 GB; for Gemma's 256,000,
67. Here a chunk's logits are made, its losses and their gradient are taken while they are there, and both are dropped: the
gradient goes on at once to the hidden states and the head. Nothing is computed twice, unlike with activation
checkpointing of the head.

Shapes: N tokens, C tokens of a chunk, M hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fathomlm.kernels.cross_entropy import cross_entropy_
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.losses.divergence import DIVERGENCES

HELD_LOGITS = {"cpu": 2**26, "cuda": 3 * 2**26}
"""How many logits are held at once, at least. On a GPU, in bfloat16, they take 0.4 gigabytes, in which their gradient is
written: less than the backward pass of a layer needs at another time in a usual batch, so that smaller chunks would save
nothing."""
HELD_WIDTHS, HELD_PART = 7, 8
"""On a GPU, as many for each token of a micro-batch as this many hidden widths, if that is more, but never more than an
eighth of all: a little less than the gradients inside a gated feed-forward part take, three times 8/3 of a width. Products
over larger chunks are faster: over 131,072 tokens and a vocabulary of 49,152 those of the head take 55.1 ms in chunks of
16,384 and 57.9 in chunks of 4,096 (H200); the peak of such a pass, 113 GB, grows by half a gigabyte."""


LEAST_REST = 1e-6
"""Probability that all tokens but the likeliest ones have at least, where only those are known."""


@dataclass(frozen=True, slots=True)
class HeadTerms:
    """What is asked of one output: its weight, and its distance from a teacher."""

    weight: float = 1.0
    divergence: str | None = None
    divergence_weight: float = 0.0

    def scaled(self, factor: float) -> HeadTerms:
        return HeadTerms(self.weight * factor, self.divergence, self.divergence_weight * factor)


Shown = Callable[[slice, Tensor], Tensor]
"""A teacher's logits for a part of the tokens, given the student's for it."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """Where a teacher's logits come from: its hidden states after the final norm, and its head."""

    hidden_NM: Tensor
    weight_VM: Tensor

    def shown(self, dtype: torch.dtype, parts: HeadParts) -> Shown:
        """What gives a chunk's logits beside the student's."""
        weight = self.weight_VM.to(dtype)
        return lambda part, logits_CV: self.hidden_NM[part].to(dtype) @ weight.T


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """A teacher of which only its likeliest tokens are known, with the rest as one mass."""

    tokens_NK: Tensor
    logs_NK: Tensor
    """Their log-probabilities, in float16: what a file keeps."""

    def shown(self, dtype: torch.dtype, parts: HeadParts) -> Shown:
        return lambda part, logits_CV: parts.spread(logits_CV, self.tokens_NK[part].long(), self.logs_NK[part])


def spread(logits_CV: Tensor, tokens_CK: Tensor, logs_CK: Tensor) -> Tensor:
    """Log-probabilities over the vocabulary: the teacher's at the tokens that are known, and its remaining mass over all
    others in the student's own proportions. Every divergence from this is that of the K + 1 outcomes, and so is its
    gradient: where the proportions agree, the rest counts as one outcome.

    Rounded probabilities may sum to 1 or more; a millionth is always left for the rest.
    """
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    logits, logs = logits_CV.to(wide), logs_CK.to(wide)
    known_C1 = logs.logsumexp(-1, keepdim=True)
    logs = logs - (known_C1 + LEAST_REST).clamp_min(0)
    rest_C1 = torch.log(-torch.expm1(known_C1.clamp_max(-LEAST_REST)))
    others_CV = logits.scatter(1, tokens_CK, -math.inf)
    others_CV = others_CV - others_CV.logsumexp(-1, keepdim=True) + rest_C1
    return others_CV.scatter(1, tokens_CK, logs)


@torch.no_grad()
def likeliest_tokens(teacher: Teacher, k: int, dtype: torch.dtype, chunk: int | None = None) -> LikeliestTokens:
    """What is kept of a teacher, a chunk of logits at a time."""
    shown, many = teacher.shown(dtype, PLAIN_PARTS), teacher.hidden_NM.shape[0]
    chunk = chunk or default_chunk(teacher.hidden_NM.device.type, teacher.weight_VM.shape[0])
    k, tokens, logs = min(k, teacher.weight_VM.shape[0]), [], []
    for at in range(0, many, chunk):
        best = shown(slice(at, at + chunk), teacher.hidden_NM).float().log_softmax(-1).topk(k)
        tokens.append(best.indices.int())
        logs.append(best.values.half())
    return LikeliestTokens(torch.cat(tokens), torch.cat(logs))


AnyTeacher = Teacher | LikeliestTokens
TaughtLoss = Callable[[Tensor, Tensor, Tensor, HeadTerms], tuple[Tensor, Tensor, Tensor]]


def taught_loss(logits_CV: Tensor, targets_C: Tensor, teacher_CV: Tensor, terms: HeadTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of cross entropy and divergence over a chunk, and the gradient of their weighted sum for the logits."""
    assert terms.divergence is not None
    counted_C1 = (targets_C != IGNORE)[:, None]
    targets_C1 = targets_C.clamp_min(0)[:, None]
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    log_q, log_p = F.log_softmax(logits_CV.to(wide), dim=-1), F.log_softmax(teacher_CV.to(wide), dim=-1)
    ce = torch.where(counted_C1, -log_q.gather(1, targets_C1), 0.0).sum()
    tokens_1V = torch.arange(logits_CV.shape[1], device=logits_CV.device)[None]
    slope = terms.weight * (log_q.exp() - (tokens_1V == targets_C1).to(wide))
    value_C, d_slope = DIVERGENCES[terms.divergence](log_q, log_p)
    distance = torch.where(counted_C1[:, 0], value_C, 0.0).sum()
    slope = slope + terms.divergence_weight * d_slope
    return ce, distance, torch.where(counted_C1, slope, 0.0).to(logits_CV.dtype)


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def scaled_(gradient: Tensor, by: Tensor) -> Tensor:
    """The gradient times a number, in its own place: this is asked for when most is held. In the number's float32: rounded
    to bfloat16 it would scale all of an output's gradient by up to 0.4 % too much."""
    return torch.mul(gradient, by[None], out=gradient)


class HeadParts(NamedTuple):
    """What of a head's loss a compiler makes faster: many small operations, and eager ones that do not read memory as fast
    as a GPU could."""

    taught: TaughtLoss = taught_loss
    narrowed: Callable[[Tensor, torch.dtype], Tensor] = narrowed
    scaled_: Callable[[Tensor, Tensor], Tensor] = scaled_
    spread: Callable[[Tensor, Tensor, Tensor], Tensor] = spread

    @staticmethod
    def compiled(backend: str = "inductor") -> HeadParts:
        return HeadParts(
            torch.compile(taught_loss, backend=backend),
            torch.compile(narrowed, dynamic=False, backend=backend),
            torch.compile(scaled_, dynamic=False, backend=backend),
            torch.compile(spread, backend=backend),
        )


class _Weighing(NamedTuple):
    """What each token of a chunk counts, and where its loss goes."""

    weights_C: Tensor
    losses_C: Tensor


def _chunk_loss(
    logits_CV: Tensor,
    targets_C: Tensor,
    teacher_CV: Tensor | None,
    terms: HeadTerms,
    taught: TaughtLoss,
    weighing: _Weighing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if teacher_CV is not None and terms.divergence is not None:
        return taught(logits_CV, targets_C, teacher_CV, terms)
    losses_C = cross_entropy_(logits_CV, targets_C, terms.weight)
    if weighing is None:
        return losses_C.sum(), losses_C.new_zeros(()), logits_CV
    weighing.losses_C.copy_(losses_C)
    return losses_C.sum(), losses_C.new_zeros(()), logits_CV.mul_(weighing.weights_C[:, None])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        targets_N: Tensor,
        teacher: AnyTeacher | None,
        terms: HeadTerms,
        chunk: int,
        parts: HeadParts,
        dtype: torch.dtype,
        learning: bool,
        choices_N: Tensor | None,
        weights_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.scaled_ = parts.scaled_
        weight = parts.narrowed(weight_VM, dtype)
        show = None if teacher is None else teacher.shown(dtype, parts)
        wants_hidden, wants_weight = (learning and wanted for wanted in ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden_NM) if wants_hidden else None
        # In float32 also where the weight is bfloat16 (FSDP's copies): many chunks are added up.
        d_weight = torch.zeros_like(weight_VM, dtype=torch.promote_types(dtype, torch.float32)) if wants_weight else None
        ce_sum, distance_sum = (torch.zeros((), dtype=torch.float32, device=hidden_NM.device) for _ in range(2))
        losses_N = None if weights_N is None else torch.empty_like(weights_N)
        for start in range(0, hidden_NM.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden = hidden_NM[part].to(dtype)
            logits = hidden @ weight.T
            if choices_N is not None:
                torch.argmax(logits, dim=-1, out=choices_N[part])
            shown = None if show is None else show(part, logits)
            weighing = None
            if weights_N is not None and losses_N is not None:
                weighing = _Weighing(weights_N[part], losses_N[part])
            ce, distance, slope = _chunk_loss(logits, targets_N[part], shown, terms, parts.taught, weighing)
            ce_sum += ce
            distance_sum += distance
            if d_hidden is not None:
                d_hidden[part] = slope @ weight
            if d_weight is not None:
                _add_product(d_weight, slope.T, hidden)
            del logits, slope, shown  # or this chunk would be held beside the next
        d_weights = None if losses_N is None else terms.weight * losses_N
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight_VM.dtype), d_weights)
        ctx.mark_non_differentiable(ce_sum, distance_sum)
        if weights_N is not None and d_weights is not None:
            return (weights_N * d_weights).sum(), ce_sum, distance_sum
        return terms.weight * ce_sum + terms.divergence_weight * distance_sum, ce_sum, distance_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_weights = ctx.saved_tensors
        scaled = [None if d is None else ctx.scaled_(d, d_total) for d in (d_hidden, d_weight)]
        return (*scaled, None, None, None, None, None, None, None, None, None if d_weights is None else d_weights * d_total)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's float32 without a narrow product in between where the device can."""
    if total.is_cuda and a.dtype != total.dtype and _adds_wide(total.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@lru_cache(maxsize=8)
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a narrow dtype can be added to float32; older versions of torch refuse."""
    one = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


PLAIN_PARTS = HeadParts()


def head_loss(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    terms: HeadTerms,
    *,
    teacher: AnyTeacher | None = None,
    chunk: int | None = None,
    parts: HeadParts = PLAIN_PARTS,
    choices_N: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum over tokens, and its parts: summed cross entropy and summed divergence (neither carries a gradient).

    `parts` may be compiled. The product is taken in autocast's dtype where that is on. Into
    `choices_N`, where it is given, each token's likeliest token is written while the logits are there. `weights_N` is what
    each token counts, in float32 and without a teacher; it learns too, from the token's loss.
    """
    kind = hidden_NM.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NM.dtype
    chunk = chunk or default_chunk(kind, weight_VM.shape[0], None if teacher is not None else hidden_NM.shape)
    assert weights_N is None or teacher is None
    learning = torch.is_grad_enabled()  # inside a Function's forward it is always off
    with torch.autocast(kind, enabled=False):
        total, ce, distance = _HeadLoss.apply(
            hidden_NM, weight_VM, targets_N, teacher, terms, chunk, parts, dtype, learning, choices_N, weights_N
        )  # type: ignore[no-untyped-call]
    return total, ce, distance


def default_chunk(device_type: str, vocab: int, hidden: tuple[int, ...] | None = None) -> int:
    """Tokens in a chunk: a multiple of 1024, so that products keep good shapes. `hidden` is the shape (N, M) of what the
    head reads, where it may hold more of a larger pass: not beside a teacher, whose chunks take several times the memory."""
    held = HELD_LOGITS.get(device_type, HELD_LOGITS["cpu"])
    if hidden is None or device_type != "cuda":
        return max(1024, held // vocab // 1024 * 1024)
    tokens, width = hidden
    many = min(HELD_WIDTHS * tokens * width, tokens * vocab // HELD_PART)
    most = max(1024, max(held, many) // vocab // 1024 * 1024)
    chunks = math.ceil(tokens / most)
    return math.ceil(tokens / chunks / 1024) * 1024 if chunks else most


def plain_head_loss(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    terms: HeadTerms,
    teacher: Teacher | None = None,
    weights_N: Tensor | None = None,
) -> Tensor:
    """The slow twin: all logits at once, gradients left to autograd."""
    logits = F.linear(hidden_NM, weight_VM)
    losses_N = F.cross_entropy(logits, targets_N, ignore_index=IGNORE, reduction="none")
    total = terms.weight * (losses_N if weights_N is None else weights_N * losses_N).sum()
    if terms.divergence is not None and teacher is not None:
        log_q, log_p = logits.log_softmax(-1), F.linear(teacher.hidden_NM, teacher.weight_VM).log_softmax(-1)
        value_N, _ = DIVERGENCES[terms.divergence](log_q, log_p.detach())
        total = total + terms.divergence_weight * value_N[targets_N != IGNORE].sum()
    return total
