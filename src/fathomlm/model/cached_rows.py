"""One more token a row through `CpuLayers`, over the buffers of a cache; the twin is the walk over the modules.

Shapes: B rows, G key-value heads, S slots of a buffer, D head width, M hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fathomlm.cache import Cache, NoCache
from fathomlm.cache.dense import Buffer
from fathomlm.depth import Architecture, DepthPlan, Step
from fathomlm.kernels.cpu_layers import CpuLayers, StepEntries, describe
from fathomlm.model.attention_mask import AttentionMasks

AXES = (0, 2, 1)
"""Buffers are (B, G, S, D): a row is a page."""


def run_cached_rows(
    layers: CpuLayers,
    norm: nn.Module,
    a: Architecture,
    plan: DepthPlan,
    x_B1M: Tensor,
    steps: Sequence[Step],
    masks: AttentionMasks,
    kv: Cache | NoCache,
) -> Tensor | None:
    """The stream after some steps, with the final norm where it stands between them, or None where they do not all see
    everything that one buffer a step holds."""
    if isinstance(kv, NoCache):
        return None
    B, used = x_B1M.shape[0], kv.length
    like_BG1D = x_B1M.new_empty(1).expand(B, a.kv_heads, 1, a.head_dim)
    buffers: list[Buffer] = []
    described: list[StepEntries] = []
    starts: list[int] = []
    for number, step in enumerate(steps):
        reads = plan.reads_kv(step)
        found = None if step.part == "exit" else kv.at(plan.steps[plan.kv_sources[step.index]] if reads else step)
        window = a.window(step.origin)
        if not isinstance(found, Buffer) or masks[window].mask is not None or found.used not in (used, used + reads):
            return None
        if plan.norms_before(step):
            starts.append(number)
        if not reads:
            buffers.append(found)
        k_BGSD, v_BGSD = found.room(like_BG1D)
        described.append(StepEntries.over(step.layer, k_BGSD, v_BGSD, AXES, window, reads, a.rotates(step.origin)))
    if len({id(buffer) for buffer in buffers}) < len(buffers):  # loops that store over each other
        return None
    if not described or len({entries.page_size for entries in described}) > 1:
        return None
    angles = masks[a.window(steps[0].origin)]
    cos_BD, sin_BD = (angle.expand(B, 1, 1, -1)[:, 0, 0].contiguous() for angle in (angles.cos, angles.sin))
    pages_B = torch.arange(B)
    slots_B = pages_B * described[0].page_size + used
    table_B1, lengths_B = pages_B[:, None].int(), torch.full((B,), used + 1, dtype=torch.int32)
    table = describe(described)
    x_BM = x_B1M[:, 0].clone()
    for begin, end in zip((0, *starts), (*starts, len(steps)), strict=True):
        x_BM = norm(x_BM) if begin in starts else x_BM
        x_BM = layers.run(x_BM.contiguous(), table[begin:end], cos_BD, sin_BD, slots_B, table_B1, lengths_B)
    for buffer in buffers:
        buffer.note(1)
    return x_BM[:, None]
