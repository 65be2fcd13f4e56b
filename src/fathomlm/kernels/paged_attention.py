"""Attention of decoding rows over entries in pages.

Each row brings its own table of pages and its own number of entries. Nothing else tells rows apart: rows of different
sequences, of different recursions (their tables differ), or of one sequence while its prompt is read (the same table, one
entry more for each) share a call. Entry e of row n is in page table[n, e // page size], at e % page size.

On a GPU a program takes one row and one key-value head with all query heads that share it, and goes through its entries
once. Where rows are too few to fill the device, `splits` programs share the entries of each and the last to end combines
what they found. How many entries a row has is read on the device; programs beyond them end at once, so a recorded graph
over a wide table costs what its rows need.

Where a prompt is read, many rows look at the same entries: a program then takes a tile of rows that stand together
(`prefill_attention`).

Shapes: N rows, H query heads, G key-value heads, D head width, P pages of a table, E entries, S splits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import NO_PREFIX, PrefixSpan
from fathomlm.kernels.row_attention import BITS
from fathomlm.kernels.triton_here import triton

if triton is not None:
    from fathomlm.kernels.prefill_attention import prefill_attention
    from fathomlm.kernels.row_attention import attend_rows

TOGETHER = 128
"""Rows from which those of one sequence share a program."""


def paged_attention(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, sequence_N: Tensor | None = None,
    arrived: Tensor | None = None, bias_DH: Tensor | None = None, bits_N: Tensor | None = None,
    starts_N: Tensor | None = None, prefix: PrefixSpan = NO_PREFIX, back_NE: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v over each row's first `lengths_N` entries (N, H, D); zeros where it has none.

    `window` counts entries, so it is for models whose every token leaves an entry: a row sees the last `window` of its own.
    In its place `starts_N` (int32) says which entry is the first that each row sees, where entries are not positions.
    `workspace` is float32 of `workspace_size`, needed with `splits`, and so is `arrived`, an int32 for each row and group,
    all zero between calls (both are made on each call where they are not given). Pages in float8 hold keys / k_scale and
    values / v_scale. `sequence_N` says which rows have the same table, where those of a sequence stand together: then many
    rows are looked at together. `bits_N` (int64) says which of its last 64 entries a row sees, its own in the lowest bit:
    branches of a tree, one behind the other. `prefix` entries in front are seen wherever a window begins, and a bias adds
    nothing to them. A bias is by distance: `back_NE`, where that is not how many entries back. Nothing outside `k_pages` and
    `v_pages` is read: a row whose table names a page that is not there is a bug, which raises on a CPU and gives NaN on a
    GPU.
    """
    if window is None and starts_N is None and bias_DH is None and not prefix.first:
        prefix = NO_PREFIX  # entries like any other
    by_entries = bias_DH is None or (back_NE is None and bits_N is None)
    if triton is not None and q_NHD.is_cuda and by_entries:
        if (
            bias_DH is None
            and sequence_N is not None
            and q_NHD.element_size() == 2
            and len(q_NHD) >= TOGETHER
            and bits_N is None
        ):
            return prefill_attention(
                q_NHD, k_pages, v_pages, table_NP, lengths_N, sequence_N, scale, window, k_scale, v_scale, out,
                starts_N=starts_N, prefix=prefix,
            )  # fmt: skip
        return attend_rows(
            q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, splits, workspace, k_scale, v_scale, out, arrived,
            bits_N=bits_N, starts_N=starts_N, prefix=prefix, bias_DH=bias_DH,
        )  # fmt: skip
    return plain_paged_attention(
        q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, k_scale=k_scale, v_scale=v_scale, out=out,
        bias_DH=bias_DH, bits_N=bits_N, starts_N=starts_N, prefix=prefix, back_NE=back_NE,
    )  # fmt: skip


def plain_paged_attention(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, splits: int = 1, workspace: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0, out: Tensor | None = None, bias_DH: Tensor | None = None,
    bits_N: Tensor | None = None, starts_N: Tensor | None = None, prefix: PrefixSpan = NO_PREFIX,
    back_NE: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning. `splits` and `workspace` change nothing here."""
    (N, H, D), (size, G) = q_NHD.shape, k_pages.shape[1:3]
    if not lengths_N.is_cuda:  # where asking costs nothing, pages that no row needs are left alone
        table_NP = table_NP[:, : -(-int(lengths_N.max()) // size)]
    entry_E = torch.arange(table_NP.shape[1] * size, device=q_NHD.device)
    seen_NE = (entry_E < lengths_N[:, None]) & (entry_E >= prefix.first)
    if starts_N is not None:
        seen_NE = seen_NE & ((entry_E >= starts_N[:, None]) | (entry_E < prefix.end))
    elif window is not None:
        seen_NE = seen_NE & ((entry_E >= lengths_N[:, None] - window) | (entry_E < prefix.end))
    if bits_N is not None:
        back_NE = (lengths_N[:, None] - 1 - entry_E).clamp_min(0)
        seen_NE = seen_NE & ((back_NE >= BITS) | (bits_N[:, None] >> back_NE.clamp_max(BITS - 1) & 1 != 0))
    table_NP = torch.where(seen_NE.view(*table_NP.shape, size).any(-1), table_NP, 0)  # what is unseen may be anything
    if not table_NP.is_cuda and table_NP.numel():  # torch would take a negative number for one from the end
        assert int(table_NP.min()) >= 0, f"a row looks at page {int(table_NP.min())}"
        assert int(lengths_N.max()) <= entry_E.numel(), "a row has more entries than its table has room for"
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    k, v = (
        torch.where(seen_NE[..., None, None], pages[table_NP.long()].flatten(1, 2).to(wide) * by, 0.0)
        for pages, by in ((k_pages, k_scale), (v_pages, v_scale))
    )
    scores = torch.einsum("ngrd,negd->ngre", q_NHD.view(N, G, H // G, D).to(wide), k) * scale
    if bias_DH is not None:
        far_NE = lengths_N[:, None] - 1 - entry_E if back_NE is None else back_NE[:, : len(entry_E)]
        bias_NEH = (
            bias_DH[far_NE.clamp(0, len(bias_DH) - 1)].to(q_NHD.dtype).masked_fill((entry_E < prefix.end)[:, None], 0.0)
        )
        scores = scores + bias_NEH.transpose(1, 2).reshape(N, G, H // G, -1)
    weights = scores.masked_fill(~seen_NE[:, None, None], -math.inf).softmax(-1).nan_to_num(0.0)
    mixed = torch.einsum("ngre,negd->ngrd", weights, v).reshape(N, H, D).to(q_NHD.dtype)
    return mixed if out is None else out.copy_(mixed)
