"""Writing keys and values into pages.

Pages are (pages, page size, G, D), one tensor for keys and one for values. An entry's place is its slot,
page x page size + place in it; rows with a negative slot have nothing to keep. Nothing is ever written outside the pages: a
slot that is not there is a bug, which raises on a CPU and is left out on a GPU.

The plain twin cannot leave rows out without knowing how many there are, which on a GPU means to wait. It sends them to the
very last slot instead: a pool has one page more than it hands out, the last one, and nobody reads it.

Shapes: N rows, G key-value heads, D head width, R recursions, L layers of a loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.errors import OptionError
from fathomlm.kernels.triton_here import tl, triton

BLOCK, WARPS = 512, 4
"""Entries that a program copies at once, and its warps."""
FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
FLOAT8_SINCE = (8, 9)
"""The compute capability of the first GPUs that know float8."""


def check_float8(device: torch.device, what: str) -> None:
    """Refuse a GPU that does not know float8, before a kernel does."""
    found = torch.cuda.get_device_capability(device)
    if found < FLOAT8_SINCE:
        needed, name = ".".join(map(str, FLOAT8_SINCE)), torch.cuda.get_device_name(device)
        raise OptionError(f"{what} requires a GPU of compute capability {needed} or later; {name} has {found[0]}.{found[1]}")


def write_entries(
    k_NGD: Tensor, v_NGD: Tensor, k_pages: Tensor, v_pages: Tensor, slots_N: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """Each row's keys and values to its slot. Pages in float8 hold k / k_scale and v / v_scale, as near as they can."""
    if triton is not None and k_NGD.is_cuda:
        _triton_write_entries(k_NGD, v_NGD, k_pages, v_pages, slots_N, k_scale, v_scale)
    else:
        plain_write_entries(k_NGD, v_NGD, k_pages, v_pages, slots_N, k_scale, v_scale)


def plain_write_entries(
    k_NGD: Tensor, v_NGD: Tensor, k_pages: Tensor, v_pages: Tensor, slots_N: Tensor,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> None:  # fmt: skip
    """The meaning. Rows with a negative slot go to the last slot of the last page."""
    slots = slot_count(k_pages)
    at_N = torch.where(slots_N >= 0, slots_N, slots - 1).long()
    for new_NGD, pages, scale in ((k_NGD, k_pages, k_scale), (v_NGD, v_pages, v_scale)):
        new_NGD = _narrowed(new_NGD, pages.dtype, scale)
        if pages.dtype == FLOAT8:  # torch does not index these; their bytes it does
            new_NGD, pages = new_NGD.view(torch.uint8), pages.view(torch.uint8)
        pages.view(slots, *pages.shape[2:]).index_copy_(0, at_N, new_NGD)


def slot_count(pages: Tensor) -> int:
    """Entries that pages hold."""
    return pages.shape[0] * pages.shape[1]


def _narrowed(new: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype != FLOAT8:
        return new.to(dtype)
    wide = new.to(torch.promote_types(new.dtype, torch.float32))
    return (wide / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(dtype)


def copy_page(pages: Tensor, source: int, target: int) -> None:
    """One page's entries into another, in every layer of (..., pages, page size, G, D)."""
    pages.select(-4, target).copy_(pages.select(-4, source))


def copy_entries(k_pages: Tensor, v_pages: Tensor, planes_RL: Tensor, slots_N: Tensor, recursion_N: Tensor) -> None:
    """Each row's entries, which its last recursion made, also for every later one. Pages are those of a whole pool, (planes,
    pages, page size, G, D); `planes_RL` says which planes L layers have in each of R recursions."""
    if k_pages.dtype == FLOAT8:
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if triton is not None and k_pages.is_cuda:
        _triton_copy_entries(k_pages, v_pages, planes_RL, slots_N, recursion_N)
    else:
        plain_copy_entries(k_pages, v_pages, planes_RL, slots_N, recursion_N)


def plain_copy_entries(k_pages: Tensor, v_pages: Tensor, planes_RL: Tensor, slots_N: Tensor, recursion_N: Tensor) -> None:
    """The meaning. Rows with a negative slot, and recursions that are not later, go to the last slot of their planes."""
    slots = slot_count(k_pages[0])
    from_NL = planes_RL[recursion_N] * slots + slots_N.clamp_min(0)[:, None]
    for later, planes_L in enumerate(planes_RL):
        to_N = torch.where((slots_N >= 0) & (recursion_N < later), slots_N, slots - 1)
        to_NL = planes_L * slots + to_N[:, None]
        for pages in (k_pages, v_pages):
            flat = pages.view(-1, *pages.shape[3:])
            flat.index_copy_(0, to_NL.flatten(), flat[from_NL.flatten()])


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def narrow_entry(new, scale, kind: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
        """Float32 numbers as pages hold them."""
        if kind == tl.float8e4nv:
            new = new / scale
            # What is no number stays none, as in the plain twin: the minimum of NaN and a number is the number.
            new = tl.where(new == new, tl.minimum(tl.maximum(new, -LARGEST), LARGEST), new)
        return new.to(kind)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def put_halves(  # type: ignore[no-untyped-def]
        out_ptr, at, low, high, scale, here, HALF: tl.constexpr, LARGEST: tl.constexpr
    ):  # fmt: skip
        """Both halves of a head, the second HALF entries behind the first."""
        kind: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out_ptr + at, narrow_entry(low, scale, kind, LARGEST), mask=here)
        tl.store(out_ptr + at + HALF, narrow_entry(high, scale, kind, LARGEST), mask=here)

    @triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _write_kernel(  # type: ignore[no-untyped-def]
        k_ptr, k_stride, v_ptr, v_stride, k_pages_ptr, v_pages_ptr, slots_ptr, slots, k_scale, v_scale,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here = (at < WIDTH) & (slot >= 0) & (slot < slots)
        k = tl.load(k_ptr + row * k_stride + at, mask=here, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_stride + at, mask=here, other=0.0).to(tl.float32)
        kind: tl.constexpr = k_pages_ptr.dtype.element_ty
        tl.store(k_pages_ptr + slot * WIDTH + at, narrow_entry(k, k_scale, kind, LARGEST), mask=here)
        tl.store(v_pages_ptr + slot * WIDTH + at, narrow_entry(v, v_scale, kind, LARGEST), mask=here)

    def _triton_write_entries(
        k_NGD: Tensor, v_NGD: Tensor, k_pages: Tensor, v_pages: Tensor, slots_N: Tensor,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        N, G, D = k_NGD.shape
        k_NW, v_NW = k_NGD.reshape(N, G * D), v_NGD.reshape(N, G * D)
        assert all(t.is_contiguous() for t in (k_pages, v_pages, slots_N))
        assert k_NW.stride(1) == v_NW.stride(1) == 1
        _write_kernel[(N, triton.cdiv(G * D, BLOCK))](
            k_NW, k_NW.stride(0), v_NW, v_NW.stride(0), k_pages, v_pages, slots_N, slot_count(k_pages), k_scale, v_scale,
            WIDTH=G * D, BLOCK=BLOCK, LARGEST=LARGEST_FLOAT8, num_warps=WARPS,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator,unused-ignore]
    def _copy_kernel(  # type: ignore[no-untyped-def]
        k_ptr, v_ptr, planes_ptr, slots_ptr, recursion_ptr, slots, L,
        RECURSIONS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row, layer = tl.program_id(0), tl.program_id(1)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        recursion = tl.load(recursion_ptr + row)
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        here = (at < WIDTH) & (slot >= 0) & (slot < slots)
        source = (tl.load(planes_ptr + recursion * L + layer).to(tl.int64) * slots + slot) * WIDTH + at
        k, v = tl.load(k_ptr + source, mask=here), tl.load(v_ptr + source, mask=here)
        for later in tl.static_range(1, RECURSIONS):
            target = (tl.load(planes_ptr + later * L + layer).to(tl.int64) * slots + slot) * WIDTH + at
            tl.store(k_ptr + target, k, mask=here & (recursion < later))
            tl.store(v_ptr + target, v, mask=here & (recursion < later))

    def _triton_copy_entries(
        k_pages: Tensor, v_pages: Tensor, planes_RL: Tensor, slots_N: Tensor, recursion_N: Tensor
    ) -> None:
        (R, L), width = planes_RL.shape, k_pages.shape[3] * k_pages.shape[4]
        assert all(t.is_contiguous() for t in (k_pages, v_pages, planes_RL, slots_N, recursion_N))
        _copy_kernel[(len(slots_N), L, triton.cdiv(width, BLOCK))](
            k_pages, v_pages, planes_RL, slots_N, recursion_N, slot_count(k_pages[0]), L,
            RECURSIONS=R, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
