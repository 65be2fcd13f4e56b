"""What queries of a forward pass attend to: positions, masks and an encoder's output, made once for all steps that see
alike.

Shapes: B batch, T new tokens, S all slots so far, N queries, K keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Architecture, Step
from fathomlm.kernels.attention import attention_mask
from fathomlm.kernels.rope import rope_table
from fathomlm.model.encoder_memory import EncoderMemory


@lru_cache(maxsize=64)
def buckets_of(buckets: int, farthest: int, device: torch.device) -> Tensor:
    """The bucket of each distance. Half of the buckets hold one distance each, the rest ranges that grow as its logarithm.

    A pure function of its arguments, hence cached; in float32 on the CPU, so that every device agrees at the borders.
    """
    exact = buckets // 2
    with torch.inference_mode(False):  # or a table first made by a decoder could not serve training
        distance = torch.arange(farthest + 1, device="cpu")
        grown = torch.log(distance.clamp_min(1).float() / exact) / math.log(farthest / exact) * (buckets - exact)
        far = (exact + grown.long()).clamp_max(buckets - 1)
        return torch.where(distance < exact, distance, far).to(device)


class RelativeBias(nn.Module):
    """T5's position bias: a learned number for each head and distance, added to the scores of self-attention.

    A decoder has one table, (buckets, heads), for all of its steps (Hugging Face keeps it in the first layer). Only
    distances count, so a token may be gathered, continue a cache or stand behind padding: true positions matter.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.relative_buckets, architecture.heads))
        self.farthest = architecture.relative_distance

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, queries_BT: Tensor, keys_BS: Tensor) -> Tensor:
        """What the score of each query and key gains, (B, H, T, S), from their positions. Keys ahead of a query count as
        its own place; a mask hides them."""
        distance_BTS = (queries_BT[:, :, None] - keys_BS[:, None, :]).clamp(0, self.farthest)
        return F.embedding(distance_BTS, self.by_distance()).permute(0, 3, 1, 2).contiguous()

    def by_distance(self) -> Tensor:
        """(D, H): what the score of a key so far back gains; those farther back gain what the last does."""
        return self.weight[buckets_of(self.weight.shape[0], self.farthest, self.weight.device)]


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Rotary tables and mask of one kind of attention (whole context, or a window)."""

    cos: Tensor
    """Empty where nothing is rotated."""
    sin: Tensor
    mask: Tensor | None
    """True where a query may look; with relative positions, what its score gains there, and -inf elsewhere."""
    causal: bool
    memory: EncoderMemory | None = None
    """The encoder's output, in a model that has one."""


AttentionMasks = dict[int | None, AttentionMask]
"""By the window of the layer whose place a step takes; None sees the whole context."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of one pass: where they are, and who may see whom."""

    positions_BT: Tensor
    """True positions, padding not counted."""
    keep_BS: Tensor | None
    """False at padding, over all slots so far; None where there is none."""
    documents_BT: Tensor | None
    past: int
    """Slots that a cache holds before these."""
    relative: RelativeBias | None = None
    """The position bias of a model that has one; `Decoder.equipped` sets it, and the memory."""
    memory: EncoderMemory | None = None
    alike: bool = False
    """Whether all rows are known to stand at the same positions."""
    tokens_BT: Tensor | None = None
    """Token ids, which random routing draws by; None where a pass was given embeddings."""

    @classmethod
    def of(
        cls,
        x_BTM: Tensor,
        positions_BT: Tensor | None,
        keep_BS: Tensor | None,
        past: int,
        documents_BT: Tensor | None = None,
        tokens_BT: Tensor | None = None,
    ) -> TokenBatch:
        B, T, _ = x_BTM.shape
        if keep_BS is not None and bool(keep_BS.all()):
            keep_BS = None
        alike = positions_BT is None and keep_BS is None
        if positions_BT is None:
            positions_BT = count_positions(B, T, past, keep_BS, x_BTM.device)
        keep_BS = None if keep_BS is None else keep_BS.bool()
        return cls(positions_BT, keep_BS, documents_BT, past, alike=alike, tokens_BT=tokens_BT)

    @property
    def keep(self) -> Tensor | None:
        """(B, T): False at padding among the tokens of this pass."""
        return None if self.keep_BS is None else self.keep_BS[:, self.past :]

    @property
    def slots(self) -> Tensor:
        """(B, T): the tokens' places in their rows."""
        B, T = self.positions_BT.shape
        return torch.arange(self.past, self.past + T, device=self.positions_BT.device).expand(B, T)

    @property
    def all_positions(self) -> Tensor:
        """(B, S): the true positions of all slots so far."""
        if not self.past:
            return self.positions_BT
        B, _ = self.positions_BT.shape
        keep_BS = None if self.keep_BS is None else self.keep_BS[:, : self.past]
        before = count_positions(B, self.past, 0, keep_BS, self.positions_BT.device)
        return torch.cat((before, self.positions_BT), dim=1)


def full_masks(architecture: Architecture, steps: Iterable[Step], rows: TokenBatch, dtype: torch.dtype) -> AttentionMasks:
    """For all tokens of a forward pass, over all slots so far."""
    T = rows.positions_BT.shape[1]
    bias = None
    if rows.relative is not None:
        told_apart = slice(0, 1 if rows.alike else None)
        bias = rows.relative(rows.positions_BT[told_apart], rows.all_positions[told_apart])
    masks: AttentionMasks = {}
    for window in {architecture.window(step.origin) for step in steps}:
        mask = attention_mask(
            T,
            rows.past + T,
            window=window,
            keep_BS=rows.keep_BS,
            documents_BT=rows.documents_BT,
            device=rows.positions_BT.device,
        )
        masks[window] = _attention_mask(architecture, window, rows, rows.positions_BT, dtype, mask, bias)
    return masks


def gathered_masks(
    architecture: Architecture,
    steps: Iterable[Step],
    rows: TokenBatch,
    dtype: torch.dtype,
    queries_BN: Tensor,
    keys_BK: Tensor | None = None,
    shown_BK: Tensor | None = None,
) -> AttentionMasks:
    """For some tokens of a forward pass, given by their slots in ascending order, at their true positions.

    `keys_BK` are the slots of what they attend to, themselves by default; `shown_BK` is False where nobody may. A
    query sees keys up to its own slot, and always itself.
    """
    here_BN = queries_BN - rows.past
    positions_BN = rows.positions_BT.gather(1, here_BN)
    bias = None
    if rows.relative is not None:
        positions_BS = rows.all_positions
        there_BK = queries_BN if keys_BK is None else keys_BK.clamp_max(positions_BS.shape[1] - 1)
        bias = rows.relative(positions_BN, positions_BS.gather(1, there_BK))
    alike = keys_BK is None and shown_BK is None and rows.documents_BT is None
    masks: AttentionMasks = {}
    for window in {architecture.window(step.origin) for step in steps}:
        reach = rows.past + rows.positions_BT.shape[1]
        if alike and (window is None or window >= reach):
            mask = None
        else:
            mask = _mask(queries_BN, queries_BN if keys_BK is None else keys_BK, shown_BK, window, rows.documents_BT)
        masks[window] = _attention_mask(architecture, window, rows, positions_BN, dtype, mask, bias)
    return masks


def rolled_mask(before: AttentionMask, tokens: int, begins_BT: Tensor | None) -> AttentionMask:
    """The mask of a layer that runs over the same tokens once more over its own output, given the one of the time before.
    Keys are those of all times, one after the other: a token sees now what the token before it saw then, unless it begins a
    document, and itself."""
    seen = before.mask
    if seen is None:
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=before.cos.device).tril()[None, None]
    shifted = F.pad(seen[..., :-1, :], (0, 0, 1, 0))
    if begins_BT is not None:
        shifted = shifted & ~begins_BT[:, None, :, None]
    own = torch.eye(tokens, dtype=torch.bool, device=seen.device).expand(*shifted.shape[:-1], tokens)
    return dataclasses.replace(before, mask=torch.cat((shifted, own), dim=-1), causal=False)


def _attention_mask(
    architecture: Architecture,
    window: int | None,
    rows: TokenBatch,
    positions_BN: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None,
    bias: Tensor | None,
) -> AttentionMask:
    """A mask of None with several queries means that each sees the keys up to itself."""
    causal = mask is None and positions_BN.shape[1] > 1
    if bias is None:
        assert architecture.positions == "rotary", "relative positions need their bias: take rows from Decoder.equipped"
        return AttentionMask(*_tables(architecture, window, positions_BN, dtype), mask, causal, rows.memory)
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    scores = bias.to(dtype) if mask is None else bias.to(dtype).masked_fill(~mask, -torch.inf)
    none = positions_BN.new_empty(0, dtype=dtype)
    return AttentionMask(none, none, scores, causal=False, memory=rows.memory)


def _mask(
    queries_BN: Tensor, keys_BK: Tensor, shown_BK: Tensor | None, window: int | None, documents_BT: Tensor | None
) -> Tensor:
    query, key = queries_BN[:, :, None], keys_BK[:, None, :]
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if documents_BT is not None:
        seen = seen & (documents_BT.gather(1, queries_BN)[:, :, None] == documents_BT.gather(1, keys_BK)[:, None, :])
    if shown_BK is not None:
        seen = seen & shown_BK[:, None, :]
    return (seen | (key == query))[:, None]


def _tables(
    architecture: Architecture, window: int | None, positions_BN: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rope = architecture.rope if window is None or architecture.local_rope is None else architecture.local_rope
    return rope_table(rope, architecture.rotary_dim, positions_BN, dtype)


def count_positions(B: int, T: int, past: int, keep_BS: Tensor | None, device: torch.device) -> Tensor:
    if keep_BS is None:
        return torch.arange(past, past + T, device=device)[None].expand(B, T)
    return (keep_BS.long().cumsum(-1) - 1).clamp_min(0)[:, -T:]
