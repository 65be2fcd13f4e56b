"""Rows: tokens of different sequences, and perhaps of different recursions, that run a pass together.

Shapes: N rows, P pages of a table, S slots (and one more, for rows that stand for nothing), T tables of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reach:
    """What rows look at, and where they leave their own entry."""

    slots_N: Tensor
    """Place of the entry in a plane's pages, page x page size + offset; -1 writes nothing."""
    table_NP: Tensor
    lengths_N: Tensor
    """How many entries a row sees, its own included; 0 for a row that stands for nothing."""
    angles: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """Cosines and sines of the rows' positions, (N, D) each, where they are known already."""
    planes: int = field(default=1, kw_only=True)
    """How many planes the page numbers lead through, from a step's own on: more than one where rows look at the entries of
    different recursions (`reach`'s `offset_N`)."""


def reach(
    tables_STP: Tensor,
    rows_N: Tensor,
    table_N: Tensor,
    ranks_N: Tensor,
    valid_N: Tensor,
    page_size: int,
    writes_N: Tensor | None = None,
    offset_N: Tensor | None = None,
) -> Reach:
    """For rows whose entry is number `ranks_N` of a table of theirs: they see that one and all before it.

    `writes_N` is False where another row or step makes the entry; `offset_N` is added to page numbers, for rows that look
    at other planes than the first row does.
    """
    table_NP = tables_STP[rows_N, table_N]
    if offset_N is not None:
        table_NP = table_NP + offset_N[:, None].to(table_NP.dtype)
    page_N = table_NP.gather(1, (ranks_N // page_size)[:, None].clamp_max(table_NP.shape[1] - 1))[:, 0].long()
    slots_N = page_N * page_size + ranks_N % page_size
    writes_N = valid_N if writes_N is None else valid_N & writes_N
    slots_N = torch.where(writes_N, slots_N, -1)
    return Reach(slots_N, table_NP, torch.where(valid_N, ranks_N + 1, 0).to(torch.int32))


def pick(waits_S: Tensor, since_S: Tensor, many: int) -> Tensor:
    """The `many` slots that have waited longest, in that order, (N); places that nobody fills hold the spare slot.

    The last slot is the spare one and never waits. Counting who came before, S x S comparisons, is one small kernel where
    sorting would be several.
    """
    S = waits_S.shape[0]
    numbers_S = torch.arange(S, device=waits_S.device)
    earlier_SS = (since_S[None, :] < since_S[:, None]) | (
        (since_S[None, :] == since_S[:, None]) & (numbers_S[None, :] < numbers_S[:, None])
    )
    ranks_S = (earlier_SS & waits_S[None, :]).sum(1)
    at_S = torch.where(waits_S & (ranks_S < many), ranks_S, many)
    return torch.full((many + 1,), S - 1, device=waits_S.device).scatter(0, at_S, numbers_S)[:many]


def pick_groups(waits_S: Tensor, since_S: Tensor, sizes_S: Tensor, many: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same for slots that bring `sizes_S` rows each, all or none: (slots, number within its slot, whether a row is
    taken), each (N). Whoever has waited longest comes first; behind a group that does not fit nobody is taken."""
    S = waits_S.shape[0]
    numbers_S = torch.arange(S, device=waits_S.device)
    upto_SS = (since_S[None, :] < since_S[:, None]) | (
        (since_S[None, :] == since_S[:, None]) & (numbers_S[None, :] <= numbers_S[:, None])
    )
    ends_S = ((upto_SS & waits_S[None, :]) * sizes_S[None, :]).sum(1)
    taken_S = waits_S & (ends_S <= many)
    starts_S = ends_S - sizes_S
    rows_N = torch.arange(many, device=waits_S.device)
    inside_NS = taken_S[None, :] & (starts_S[None, :] <= rows_N[:, None]) & (rows_N[:, None] < ends_S[None, :])
    valid_N = inside_NS.any(1)
    slots_N = torch.where(valid_N, (inside_NS * numbers_S[None, :]).sum(1), S - 1)
    return slots_N, torch.where(valid_N, rows_N - starts_S[slots_N], 0), valid_N
