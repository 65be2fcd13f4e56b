"""The entrance of attention for decoding rows: norm, queries, keys and values in one product, rotated, and the keys and
values written where they will be looked for.

One kernel: a program computes pairs (i, i + D/2) of one head for its rows, so that it can turn them before anything leaves
it. Pages are those of `paged_attention`; where a row's entry goes is its slot.

Shapes: N rows, M hidden width, H query heads, G key-value heads, D head width, W = (H + 2 G) x D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.few_rows import takes_few
from fathomlm.kernels.half import inverse_rms
from fathomlm.kernels.paged_write import LARGEST_FLOAT8, plain_write_entries, slot_count
from fathomlm.kernels.quantized import whole_weight
from fathomlm.kernels.rope import apply_rope
from fathomlm.kernels.row_blocks import Blocks, product_blocks, row_block
from fathomlm.kernels.row_linear import RowWeight, plain_product
from fathomlm.kernels.triton_here import early_launch, tl, triton
from fathomlm.kernels.wide_rows import many_rows

if triton is not None:
    from fathomlm.kernels.few_rows import few_qkv_rope_write
    from fathomlm.kernels.paged_write import put_halves
    from fathomlm.kernels.row_linear import check_rows, row_product, row_scale
    from fathomlm.kernels.wide_rows import wide_norm_qkv_rope_write


def norm_qkv_rope_write(
    x_NM: Tensor, qkv_WM: RowWeight, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Queries (N, H, D) of s (x @ qkv^T), s = 1 / rms(x) for each row, rotated by each row's cosines and sines
    (`rope.rope_table`, over whole heads). Keys, rotated too, and values go to `slots_N` of pages
    (pages, page size, G, D): slot = page x page size + place in it; a row with a negative slot writes nothing, except that
    the plain twin may write to the last page (`paged_write`). Pages in float8 hold k / k_scale and v / v_scale.

    With no groups, queries alone are computed, for steps that look at another step's entries.
    """
    if many_rows(x_NM, qkv_WM, "qkv"):
        return wide_norm_qkv_rope_write(
            x_NM, whole_weight(qkv_WM, x_NM.dtype), eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N,
            k_scale, v_scale, out,
        )  # fmt: skip
    if isinstance(qkv_WM, Tensor) and takes_few(x_NM, qkv_WM):
        return few_qkv_rope_write(
            x_NM, qkv_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale, out
        )
    if triton is not None and x_NM.is_cuda:
        return _triton_norm_qkv_rope_write(
            x_NM, qkv_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale, out
        )
    return plain_norm_qkv_rope_write(
        x_NM, qkv_WM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale, out
    )


def plain_norm_qkv_rope_write(
    x_NM: Tensor, qkv_WM: RowWeight, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
    k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The meaning."""
    D = cos_ND.shape[-1]
    product_NHD = (plain_product(x_NM, qkv_WM) * inverse_rms(x_NM, eps)).view(x_NM.shape[0], -1, D)
    q, k, v = torch.split(product_NHD, [heads, groups, groups], dim=1)
    q, k = (apply_rope(part, cos_ND[:, None], sin_ND[:, None]) for part in (q, k))
    if groups > 0:
        plain_write_entries(k, v, k_pages, v_pages, slots_N, k_scale, v_scale)
    return q.to(x_NM.dtype) if out is None else out.copy_(q)


if triton is not None:

    @triton.jit(do_not_specialize=["rows", "slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _norm_qkv_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, weight_ptr, scales_ptr, cos_ptr, cos_stride, sin_ptr, sin_stride, q_ptr, k_ptr, v_ptr, slots_ptr,
        rows, slots, eps, k_scale, v_scale, H, G,
        DEPTH: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
        KEEP: tl.constexpr, LARGEST: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        parts: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
        head, first = tl.program_id(1) // parts, tl.program_id(1) % parts * PAIRS
        # The two of a pair are neighbours in the tile, so that both come out in one thread.
        tile = tl.arange(0, 2 * PAIRS)
        weight_row = head * 2 * HALF + tl.minimum(first + tile // 2, HALF - 1) + tile % 2 * HALF
        total, squares = row_product(
            x_ptr, x_stride, weight_ptr, scales_ptr, row, row < rows, weight_row, 0,
            DEPTH, DEPTH, BLOCK, True, KEEP, SCALED, EARLY,
        )  # fmt: skip
        total *= row_scale(squares, eps, DEPTH)
        low, high = tl.split(tl.reshape(total, (ROWS, PAIRS, 2)))
        pair = (first + tl.arange(0, PAIRS))[None, :]
        here = (row < rows)[:, None] & (pair < HALF)
        if head < H + G:
            cos_at = cos_ptr + row[:, None] * cos_stride + pair
            sin_at = sin_ptr + row[:, None] * sin_stride + pair
            cos_low = tl.load(cos_at, mask=here, other=0.0).to(tl.float32)
            sin_low = tl.load(sin_at, mask=here, other=0.0).to(tl.float32)
            cos_high = tl.load(cos_at + HALF, mask=here, other=0.0).to(tl.float32)
            sin_high = tl.load(sin_at + HALF, mask=here, other=0.0).to(tl.float32)
            turned = low * cos_low + high * sin_low
            high = high * cos_high + low * sin_high
            low = turned
        if head < H:
            put_halves(q_ptr, (row[:, None] * H + head) * 2 * HALF + pair, low, high, 1.0, here, HALF, LARGEST)
        else:
            slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)[:, None]
            here = here & (slot >= 0) & (slot < slots)
            if head < H + G:
                put_halves(k_ptr, (slot * G + head - H) * 2 * HALF + pair, low, high, k_scale, here, HALF, LARGEST)
            else:
                put_halves(v_ptr, (slot * G + head - H - G) * 2 * HALF + pair, low, high, v_scale, here, HALF, LARGEST)

    def _triton_norm_qkv_rope_write(
        x_NM: Tensor, qkv_WM: RowWeight, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
        k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
        out: Tensor | None = None, blocks: Blocks | None = None,
    ) -> Tensor:  # fmt: skip
        (N, M), D = x_NM.shape, cos_ND.shape[-1]
        out = x_NM.new_empty(N, heads, D) if out is None else out
        w = check_rows(qkv_WM, x_NM, cos_ND, sin_ND)
        assert all(t.is_contiguous() for t in (out, k_pages, v_pages, slots_N))
        assert qkv_WM.shape[0] == (heads + 2 * groups) * D
        b = blocks or product_blocks(N, qkv_WM.shape[0] // 2, M, w.size, weights=2)
        tall = row_block(N, x_NM.element_size(), narrow=w.narrow)
        pairs = min(b.columns, max(1 if tall == 1 else 8, triton.next_power_of_2(D // 2)))
        grid = (triton.cdiv(N, tall), (heads + 2 * groups) * triton.cdiv(D // 2, pairs))
        _norm_qkv_kernel[grid](
            x_NM, x_NM.stride(0), w.data, w.scales, cos_ND, cos_ND.stride(0), sin_ND, sin_ND.stride(0),
            out, k_pages, v_pages, slots_N, N, slot_count(k_pages), eps, k_scale, v_scale, heads, groups,
            DEPTH=M, HALF=D // 2, ROWS=tall, PAIRS=pairs,
            BLOCK=b.depth, KEEP=grid[0] > 1, LARGEST=LARGEST_FLOAT8, SCALED=w.narrow,
            num_warps=b.warps, num_stages=b.stages, **early_launch(N),
        )  # fmt: skip
        return out
