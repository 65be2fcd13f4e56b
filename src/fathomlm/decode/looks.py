"""What recorded steps look at (decode/recorded.py): earlier tokens, and an encoder's output in a room of fixed size.

Shapes: B rows, S tokens of a source, N queries, K keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.cache.static import StaticCache
from fathomlm.depth import Architecture, Step
from fathomlm.model.attention_mask import AttentionMask, AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


def added_masks(
    architecture: Architecture,
    steps: Sequence[Step],
    rows: TokenBatch,
    dtype: torch.dtype,
    queries_BN: Tensor,
    keys_BK: Tensor,
) -> AttentionMasks:
    """`gathered_masks`, masks as what is added to scores, which attention would otherwise make of them at every layer."""
    masks = gathered_masks(architecture, steps, rows, dtype, queries_BN, keys_BK=keys_BK)
    return {
        window: AttentionMask(
            attention.cos, attention.sin, _added(attention.mask, dtype), attention.causal, attention.memory
        )
        for window, attention in masks.items()
    }


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def room_for(source: int, decoder: Decoder) -> EncoderMemory:
    """Room for an encoder's output of at most `source` tokens, of one row."""
    weight = decoder.embed.weight
    shape = (1, source, decoder.architecture.memory_width)
    states_1SM = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
    return EncoderMemory(states_1SM, torch.ones(1, source, dtype=torch.bool, device=weight.device), look=False)


def refill(room: EncoderMemory, memory: EncoderMemory, decoder: Decoder, rows: TokenBatch, cache: StaticCache) -> None:
    """Put an encoder's output into its room, with the keys and values that each step makes of it."""
    assert room.keep_BS is not None
    S = memory.states_BSM.shape[1]
    room.keep_BS.fill_(False)
    room.keep_BS[:, :S] = True if memory.keep_BS is None else memory.keep_BS
    room.states_BSM.zero_()
    room.states_BSM[:, :S] = memory.states_BSM
    fresh = EncoderMemory(room.states_BSM, room.keep_BS, look=False)
    rows = dataclasses.replace(rows, memory=fresh)
    weight, steps = decoder.embed.weight, decoder.plan.steps
    slots_1 = torch.full((1,), cache.scratch, device=weight.device)
    cache.focus(slots_1)
    masks = gathered_masks(decoder.architecture, steps, rows, weight.dtype, slots_1[None], keys_BK=rows.positions_BT)
    # What comes out does not matter: each step makes what it keeps of the source.
    decoder.run_steps(decoder.enter(torch.zeros_like(slots_1)[None]), steps, masks, cache)
    for step in steps:
        held, new = room.at(step, keeps=True), fresh.at(step, keeps=True)
        assert new.k is not None
        assert new.v is not None
        if held.k is None or held.v is None:
            held.k, held.v = new.k.clone(), new.v.clone()
        else:
            held.k.copy_(new.k)
            held.v.copy_(new.v)
