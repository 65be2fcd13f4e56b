"""Positions beside entries in pages, and the first entry of a row that is inside its window.

Where only some tokens leave an entry (recursion-wise tables), the last entries of a row are not its last positions. Each
entry's position is kept in an int32 beside its page, (pages, page size), so whoever shares, copies or keeps a page has
them. They rise along a table, so the first entry inside a window is found by bisection.

Shapes: N rows, P pages of a table, E entries, R recursions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.kernels.triton_here import tl, triton

BLOCK, WARPS = 128, 4
"""Rows of a program, and its warps."""
NO_WINDOW = 2**30
"""The window of rows that see everything."""


def write_positions(pages: Tensor, slots_N: Tensor, positions_N: Tensor) -> None:
    """Each row's position to the slot of its entry; rows with a negative slot leave none."""
    if triton is not None and pages.is_cuda:
        _triton_write_positions(pages, slots_N, positions_N)
    else:
        plain_write_positions(pages, slots_N, positions_N)


def plain_write_positions(pages: Tensor, slots_N: Tensor, positions_N: Tensor) -> None:
    """The meaning. Rows with a negative slot go to the last slot of the last page, which nobody reads."""
    at_N = torch.where(slots_N >= 0, slots_N, pages.numel() - 1).long()
    pages.view(-1).index_copy_(0, at_N, positions_N.to(pages.dtype))


def window_starts(
    pages: Tensor, table_NP: Tensor, lengths_N: Tensor, positions_N: Tensor, windows_R: Tensor, recursion_N: Tensor
) -> Tensor:
    """How many of each row's entries are outside its window, (N,) int32: those at its position less the window of its
    recursion, and before. A row's last entry is its own."""
    if triton is not None and pages.is_cuda:
        return _triton_window_starts(pages, table_NP, lengths_N, positions_N, windows_R, recursion_N)
    return plain_window_starts(pages, table_NP, lengths_N, positions_N, windows_R, recursion_N)


def plain_window_starts(
    pages: Tensor, table_NP: Tensor, lengths_N: Tensor, positions_N: Tensor, windows_R: Tensor, recursion_N: Tensor
) -> Tensor:
    """The meaning: all of them are looked at."""
    size = pages.shape[1]
    if not lengths_N.is_cuda:  # where asking costs nothing, pages that no row needs are left alone
        table_NP = table_NP[:, : -(-int(lengths_N.max()) // size)]
    first_P = torch.arange(table_NP.shape[1], device=table_NP.device) * size
    table_NP = torch.where(first_P < lengths_N[:, None], table_NP, 0)  # behind a row's last page it may say anything
    there_NE = torch.arange(table_NP.shape[1] * size, device=table_NP.device) < lengths_N[:, None]
    outside_N = positions_N - windows_R[recursion_N]
    return (there_NE & (pages[table_NP.long()].flatten(1) <= outside_N[:, None])).sum(1, dtype=torch.int32)


if triton is not None:

    @triton.jit(do_not_specialize=["slots", "rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _positions_kernel(pages_ptr, slots_ptr, positions_ptr, slots, rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + row, mask=row < rows, other=-1)
        position = tl.load(positions_ptr + row, mask=row < rows, other=0)
        tl.store(pages_ptr + slot, position.to(tl.int32), mask=(slot >= 0) & (slot < slots))

    def _triton_write_positions(pages: Tensor, slots_N: Tensor, positions_N: Tensor) -> None:
        assert all(t.is_contiguous() for t in (pages, slots_N, positions_N))
        N = len(slots_N)
        _positions_kernel[(triton.cdiv(N, BLOCK),)](
            pages, slots_N, positions_N, pages.numel(), N, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip

    @triton.jit(do_not_specialize=["pages", "rows"])  # type: ignore[untyped-decorator,unused-ignore]
    def _starts_kernel(  # type: ignore[no-untyped-def]
        pages_ptr, table_ptr, table_stride, lengths_ptr, positions_ptr, windows_ptr, recursion_ptr, starts_ptr, pages, rows,
        TURNS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = row < rows
        row = row.to(tl.int64)
        length = tl.load(lengths_ptr + row, mask=here, other=0).to(tl.int32)
        position = tl.load(positions_ptr + row, mask=here, other=0).to(tl.int32)
        recursion = tl.load(recursion_ptr + row, mask=here, other=0)
        window = tl.load(windows_ptr + recursion, mask=here, other=1).to(tl.int32)
        low = tl.maximum(length - window, 0)  # no more entries than positions are inside
        high = tl.maximum(length - 1, 0)  # its own is, and is never asked for
        last = (pages - 1).to(tl.uint32)
        for _ in range(TURNS):
            middle = (low + high) // 2
            asks = low < high
            page = tl.load(table_ptr + row * table_stride + middle // PAGE, mask=asks, other=0).to(tl.uint32, bitcast=True)
            page = tl.minimum(page, last).to(tl.int64)
            found = tl.load(pages_ptr + page * PAGE + middle % PAGE, mask=asks, other=0)
            outside = asks & (found <= position - window)
            low = tl.where(outside, middle + 1, low)
            high = tl.where(asks & (found > position - window), middle, high)
        tl.store(starts_ptr + row, low, mask=here)

    def _triton_window_starts(
        pages: Tensor, table_NP: Tensor, lengths_N: Tensor, positions_N: Tensor, windows_R: Tensor, recursion_N: Tensor
    ) -> Tensor:
        (N, P), size = table_NP.shape, pages.shape[1]
        assert all(t.is_contiguous() for t in (pages, lengths_N, positions_N, windows_R, recursion_N))
        assert table_NP.stride(1) == 1 or P == 1
        starts_N = torch.empty(N, dtype=torch.int32, device=table_NP.device)
        _starts_kernel[(triton.cdiv(N, BLOCK),)](
            pages, table_NP, table_NP.stride(0), lengths_N, positions_N, windows_R, recursion_N, starts_N, len(pages), N,
            TURNS=(P * size).bit_length(), PAGE=size, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return starts_N
