"""The first entry inside a window, against a loop over entries: on a CPU, on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from fathomlm.kernels import entry_positions
from fathomlm.kernels.triton_here import triton

GPU = torch.cuda.is_available()
PAGE = 4
LENGTHS = [0, 1, PAGE, PAGE + 1, 3 * PAGE, 13, 30, 30]
WINDOWS = (1, 6, entry_positions.NO_WINDOW)
DEVICES = [
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]),
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            triton is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton with TRITON_INTERPRET=1"
        ),
    ),
]


def rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[list[int]]]:
    """Pages in no order, with numbers around the entries that mean nothing; tables that say anything behind their end."""
    generator = torch.Generator().manual_seed(seed)
    entries = [torch.randperm(50, generator=generator)[:length].sort().values for length in LENGTHS]
    needed = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(needed) + 1, generator=generator).int().split([*needed, 1])
    pages = torch.randint(0, 50, (sum(needed) + 1, PAGE), generator=generator, dtype=torch.int32)
    table = torch.full((len(LENGTHS), 9), 10**6, dtype=torch.int32)
    for row, (positions, own) in enumerate(zip(entries, order[:-1], strict=True)):
        table[row, : len(own)] = own
        for entry, position in enumerate(positions):
            pages[own[entry // PAGE], entry % PAGE] = position
    positions = torch.tensor([int(one[-1]) if len(one) else 0 for one in entries])
    return pages, table, torch.tensor(LENGTHS, dtype=torch.int32), positions, [one.tolist() for one in entries]


def starts_are_right(find: object, device: str = "cpu") -> None:
    assert callable(find)
    windows = torch.tensor(WINDOWS, dtype=torch.int32)
    found = set()
    for seed in range(6):
        pages, table, lengths, positions, entries = rows(seed)
        recursion = torch.tensor([(seed + row) % len(WINDOWS) for row in range(len(LENGTHS))])
        given = (each.to(device) for each in (pages, table, lengths, positions, windows, recursion))
        starts = find(*given)
        wanted = [
            sum(position <= int(last) - WINDOWS[which] for position in one)
            for one, last, which in zip(entries, positions, recursion.tolist(), strict=True)
        ]
        assert starts.dtype == torch.int32
        assert starts.tolist() == wanted
        found |= set(wanted)
    assert len(found) > 6


def test_starts() -> None:
    starts_are_right(entry_positions.plain_window_starts)


@pytest.mark.parametrize("device", DEVICES)
def test_starts_by_bisection(device: str) -> None:
    starts_are_right(entry_positions._triton_window_starts, device)


def written(write: object, device: str = "cpu") -> Tensor:
    assert callable(write)
    pages, slots = torch.zeros(5, PAGE, dtype=torch.int32, device=device), torch.tensor([3, -1, 15, 0, -7, 8])
    write(pages, slots.to(device), torch.tensor([40, 41, 42, 43, 44, 45], device=device))
    return pages.cpu()


def test_positions_are_left_at_their_entries() -> None:
    pages = written(entry_positions.plain_write_positions)
    assert [int(pages.flatten()[slot]) for slot in (3, 15, 0, 8)] == [40, 42, 43, 45]
    assert int((pages[:4] != 0).sum()) == 4


@pytest.mark.parametrize("device", DEVICES)
def test_positions_are_left_by_a_kernel(device: str) -> None:
    fast = written(entry_positions._triton_write_positions, device)
    assert torch.equal(fast[:4], written(entry_positions.plain_write_positions)[:4])
    assert not fast[4].any()
