"""Products of many decoding rows with weights: a library's product, and one pass over memory for what stands around it.

The kernels of `row_linear` and `row_qkv` read a weight once for up to 64 rows; more rows are further tiles, which read it
again. From some number of rows on (`LIBRARY_FROM`) a product is bound by arithmetic, at which a library is better, and its
neighbours no longer hide behind it. The meaning is that of the functions there, which send their rows here; nothing here
waits for the device. Launching what stands behind a product before it ends (as `early_launch` does) takes 4 % off a layer of
256 rows alone, and makes whole decode steps slower (an H200, one run: 126,952 tokens/s for 140,121).

Shapes: N rows, M hidden width, W output width, I inner width, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import Tensor

from fathomlm.kernels.gates import GATES
from fathomlm.kernels.paged_write import LARGEST_FLOAT8, slot_count
from fathomlm.kernels.quantized import QuantizedWeight
from fathomlm.kernels.triton_here import tl, triton

Product = Literal["qkv", "gated", "added", "scores"]
"""By what stands around it: norm and rotation, norm and gate, the stream that it is added to, nothing."""
MANY_ROWS = 65
"""Rows from which the library's product and a pass of its own are quicker than one kernel, where weights are large."""
LIBRARY_FROM: dict[Product, tuple[tuple[int, int], ...]] = {
    "qkv": ((1_000_000, 257),),
    "gated": ((1_500_000, 193), (2_000_000, 129)),
    "added": ((400_000, 193),),
    "scores": (),
}
"""The same for small weights: up to so many entries, from so many rows. Measured at the widths of models of 23M to 7B
weights on an H200 (`benchmarks/row_kernels.py --library`, benchmarks/results/row_products_h200.json). At 1.7B the
library is quicker for fewer rows, too, by up to 14 %; up to 64 rows a row's result does not depend on how many there are,
which is worth more."""
MOST_KERNEL_ROWS = max(rows for table in LIBRARY_FROM.values() for _, rows in table) - 1
"""The most rows that a kernel takes."""
BLOCK, HEADS = 1024, 32
"""Columns that a program of the gate takes at a time, and heads that one of queries, keys and values takes."""
FILLED = 512
"""Rows that fill the device with a program each."""

if triton is not None:
    from fathomlm.kernels.gates import activated
    from fathomlm.kernels.paged_write import narrow_entry
    from fathomlm.kernels.row_attention import row_inverse_rms


def library_from(product: Product, entries: int) -> int:
    """Rows from which a library multiplies with a weight of so many entries."""
    return next((rows for most, rows in LIBRARY_FROM[product] if entries <= most), MANY_ROWS)


def many_rows(x_NM: Tensor, weight: Tensor | QuantizedWeight, product: Product) -> bool:
    """Whether rows are so many that a library multiplies them: 16 bits on a GPU. Weights of one byte are multiplied out for
    it, whatever their size."""
    if triton is None or not x_NM.is_cuda or x_NM.element_size() != 2:
        return False
    entries = weight.numel() if isinstance(weight, Tensor) else sys.maxsize
    return x_NM.shape[0] >= library_from(product, entries)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _gate_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, product_ptr, out_ptr, out_stride, width, eps,
        DEPTH: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, GATE: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        scale = row_inverse_rms(x_ptr, row * x_stride, eps, DEPTH, WIDE)
        for first in range(tl.program_id(1) * COLUMNS, width, tl.num_programs(1) * COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            here = column < width
            at = product_ptr + row * 2 * width + column
            gate = tl.load(at, mask=here, other=0.0).to(tl.float32) * scale
            up = tl.load(at + width, mask=here, other=0.0).to(tl.float32) * scale
            inner = activated(gate, GATE) * up
            tl.store(out_ptr + row * out_stride + column, inner.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _turn_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr, x_stride, product_ptr, cos_ptr, cos_stride, sin_ptr, sin_stride, q_ptr, k_ptr, v_ptr, slots_ptr,
        slots, eps, k_scale, v_scale, H, G,
        DEPTH: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
        LARGEST: tl.constexpr,
    ):  # fmt: skip
        """HEADS heads of one row: scaled, turned unless they are values, and put where they belong."""
        row = tl.program_id(0).to(tl.int64)
        scale = row_inverse_rms(x_ptr, row * x_stride, eps, DEPTH, WIDE)
        head, pair = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, PAIRS)[None, :]
        there = pair < HALF
        cos_at, sin_at = cos_ptr + row * cos_stride + pair, sin_ptr + row * sin_stride + pair
        cos_low = tl.load(cos_at, mask=there, other=0.0).to(tl.float32)
        sin_low = tl.load(sin_at, mask=there, other=0.0).to(tl.float32)
        cos_high = tl.load(cos_at + HALF, mask=there, other=0.0).to(tl.float32)
        sin_high = tl.load(sin_at + HALF, mask=there, other=0.0).to(tl.float32)
        here = there & (head < H + 2 * G)
        at = product_ptr + (row * (H + 2 * G) + head) * 2 * HALF + pair
        low = tl.load(at, mask=here, other=0.0).to(tl.float32) * scale
        high = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32) * scale
        turns = head < H + G
        turned = tl.where(turns, low * cos_low + high * sin_low, low)
        high = tl.where(turns, high * cos_high + low * sin_high, high)
        q_at, asks = q_ptr + (row * H + head) * 2 * HALF + pair, there & (head < H)
        tl.store(q_at, turned.to(q_ptr.dtype.element_ty), mask=asks)
        tl.store(q_at + HALF, high.to(q_ptr.dtype.element_ty), mask=asks)
        if G > 0:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            kind: tl.constexpr = k_ptr.dtype.element_ty
            kept = there & (slot >= 0) & (slot < slots)
            k_at, is_k = k_ptr + (slot * G + head - H) * 2 * HALF + pair, kept & (head >= H) & turns
            tl.store(k_at, narrow_entry(turned, k_scale, kind, LARGEST), mask=is_k)
            tl.store(k_at + HALF, narrow_entry(high, k_scale, kind, LARGEST), mask=is_k)
            v_at, is_v = v_ptr + (slot * G + head - H - G) * 2 * HALF + pair, kept & (head >= H + G) & (head < H + 2 * G)
            tl.store(v_at, narrow_entry(turned, v_scale, kind, LARGEST), mask=is_v)
            tl.store(v_at + HALF, narrow_entry(high, v_scale, kind, LARGEST), mask=is_v)

    def wide_linear(x_NM: Tensor, weight_WM: Tensor, out_dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
        """x @ weight^T. In float32 it is summed and kept, not rounded and widened again."""
        if out_dtype in (None, x_NM.dtype):
            product_NW = torch.mm(x_NM, weight_WM.T) if out is None else torch.mm(x_NM, weight_WM.T, out=out)
        else:
            product_NW = torch.mm(x_NM, weight_WM.T, out_dtype=out_dtype)
        return product_NW if out is None or out is product_NW else out.copy_(product_NW)

    def wide_norm_gated(x_NM: Tensor, both_2IM: Tensor, eps: float, out: Tensor | None, activation: str = "silu") -> Tensor:
        return gate_rows(torch.mm(x_NM, both_2IM.T), x_NM, eps, out, activation=activation)

    def gate_rows(
        product_N2I: Tensor, x_NM: Tensor, eps: float, out: Tensor | None, block: int = BLOCK, warps: int = 4,
        activation: str = "silu",
    ) -> Tensor:  # fmt: skip
        """What gate and up make of each other, from what the product has left."""
        (N, M), width = x_NM.shape, product_N2I.shape[1] // 2
        out = x_NM.new_empty(N, width) if out is None else out
        _gate_rows_kernel[N, triton.cdiv(width, block) if N < FILLED else 1](
            x_NM, x_NM.stride(0), product_N2I, out, out.stride(0), width, eps, DEPTH=M, WIDE=triton.next_power_of_2(M),
            COLUMNS=block, GATE=GATES[activation], num_warps=warps,
        )  # fmt: skip
        return out

    def wide_add_linear(stream_NM: Tensor | None, x_NK: Tensor, weight_MK: Tensor, out: Tensor | None) -> Tensor:
        """The product is added where the stream lies, or beside it; the library adds in float32."""
        if stream_NM is None:
            return wide_linear(x_NK, weight_MK, None, out)
        if out is stream_NM:
            return stream_NM.addmm_(x_NK, weight_MK.T)
        return (
            torch.addmm(stream_NM, x_NK, weight_MK.T) if out is None else torch.addmm(stream_NM, x_NK, weight_MK.T, out=out)
        )

    def wide_norm_qkv_rope_write(
        x_NM: Tensor, qkv_WM: Tensor, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
        k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float, v_scale: float, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        product_NWD = torch.mm(x_NM, qkv_WM.T).view(len(x_NM), heads + 2 * groups, cos_ND.shape[1])
        return turn_rows(
            product_NWD, x_NM, eps, heads, groups, cos_ND, sin_ND, k_pages, v_pages, slots_N, k_scale, v_scale, out
        )

    def turn_rows(
        product_NWD: Tensor, x_NM: Tensor, eps: float, heads: int, groups: int, cos_ND: Tensor, sin_ND: Tensor,
        k_pages: Tensor, v_pages: Tensor, slots_N: Tensor, k_scale: float, v_scale: float, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Queries, and entries where they belong, from what the product has left."""
        (N, M), D = x_NM.shape, cos_ND.shape[-1]
        out = x_NM.new_empty(N, heads, D) if out is None else out
        assert all(t.is_contiguous() for t in (out, k_pages, v_pages, slots_N))
        together = min(HEADS, triton.next_power_of_2(heads + 2 * groups))
        _turn_rows_kernel[N, triton.cdiv(heads + 2 * groups, together)](
            x_NM, x_NM.stride(0), product_NWD, cos_ND, cos_ND.stride(0), sin_ND, sin_ND.stride(0), out, k_pages, v_pages,
            slots_N, slot_count(k_pages), eps, k_scale, v_scale, heads, groups, DEPTH=M, WIDE=triton.next_power_of_2(M),
            HALF=D // 2, PAIRS=triton.next_power_of_2(D // 2), HEADS=together, LARGEST=LARGEST_FLOAT8, num_warps=4,
        )  # fmt: skip
        return out
