"""The first half of a layer up to its output product, for decoding rows of different sequences: norm, queries, keys and
values, and attention over what is in pages already and the row's own entry.

With few rows that is the entrance (`row_qkv`) and attention (`paged_attention`), each a kernel. From `MANY_ROWS` on a
library multiplies, and the kernel of attention takes what it has left; turning and storing in a kernel of their own takes
2.5 of the 47 us of a layer (256 rows of a 360M model, H200). What it saves is not measured yet, so `TAKES_PRODUCT` is off.

Shapes: N rows, M hidden width, H query heads, G key-value heads, D head width, W = (H + 2 G) x D, P pages of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import AttentionBlocks
from fathomlm.kernels.paged_attention import paged_attention, plain_paged_attention
from fathomlm.kernels.quantized import whole_weight
from fathomlm.kernels.row_attention import Ahead, Entrance
from fathomlm.kernels.row_linear import RowWeight
from fathomlm.kernels.row_qkv import norm_qkv_rope_write, plain_norm_qkv_rope_write
from fathomlm.kernels.triton_here import triton
from fathomlm.kernels.wide_rows import many_rows

if triton is not None:
    from fathomlm.kernels.row_attention import attend_rows


def norm_qkv_attend(
    x_NM: Tensor, qkv_WM: RowWeight, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, splits: int = 1, workspace: Tensor | None = None, arrived: Tensor | None = None,
    k_scale: float = 1.0, v_scale: float = 1.0, starts_N: Tensor | None = None, ahead: Ahead | None = None,
) -> Tensor:  # fmt: skip
    """`row_qkv.norm_qkv_rope_write`, then `paged_attention` of its queries, (N, H, D). No row sees what another stores: rows
    are of different sequences. A row's own entry is the last that it sees; a row that sees any has a slot. `ahead`: what
    the next layer will read, which many rows call for."""
    if many_rows(x_NM):
        weight_WM = whole_weight(qkv_WM, x_NM.dtype)
        return wide_norm_qkv_attend(
            x_NM, weight_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, table_NP, lengths_N, scale,
            window, splits, workspace, arrived, k_scale, v_scale, starts_N=starts_N, ahead=ahead,
        )  # fmt: skip
    q_NHD = norm_qkv_rope_write(
        x_NM, qkv_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale
    )
    return paged_attention(
        q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, splits, workspace, k_scale, v_scale, arrived=arrived,
        starts_N=starts_N,
    )  # fmt: skip


def plain_norm_qkv_attend(
    x_NM: Tensor, qkv_WM: RowWeight, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
    window: int | None = None, k_scale: float = 1.0, v_scale: float = 1.0, starts_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning."""
    q_NHD = plain_norm_qkv_rope_write(
        x_NM, qkv_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale
    )
    return plain_paged_attention(
        q_NHD, k_pages, v_pages, table_NP, lengths_N, scale, window, k_scale=k_scale, v_scale=v_scale, starts_N=starts_N
    )


if triton is not None:

    def wide_norm_qkv_attend(
        x_NM: Tensor, qkv_WM: Tensor, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
        k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, table_NP: Tensor, lengths_N: Tensor, scale: float,
        window: int | None = None, splits: int = 1, workspace: Tensor | None = None, arrived: Tensor | None = None,
        k_scale: float = 1.0, v_scale: float = 1.0, blocks: AttentionBlocks | None = None,
        early: bool = False, starts_N: Tensor | None = None, ahead: Ahead | None = None,
    ) -> Tensor:  # fmt: skip
        product_NWD = torch.mm(x_NM, qkv_WM.T).view(len(x_NM), heads + 2 * groups, cos_ND.shape[1])
        return attend_rows(
            product_NWD[:, :heads], k_pages, v_pages, table_NP, lengths_N, scale, window, splits, workspace, k_scale,
            v_scale, arrived=arrived, blocks=blocks, entrance=Entrance(x_NM, eps, cos_ND, sin_ND, slots_N),
            early=early, starts_N=starts_N, ahead=ahead,
        )  # fmt: skip
