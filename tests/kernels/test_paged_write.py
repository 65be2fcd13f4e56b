"""Entries land in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from fathomlm.kernels.paged_write import FLOAT8, copy_entries, copy_page, write_entries
from kernels.row_cases import randoms, some_slots


@pytest.mark.parametrize("rows", [1, 11])
@pytest.mark.parametrize(("page", "groups", "head_dim"), [(4, 1, 3), (2, 5, 8)])
def test_entries_land_in_their_slots(rows: int, page: int, groups: int, head_dim: int) -> None:
    random = randoms()
    k, v = random(rows, groups, head_dim), random(rows, groups, head_dim)
    slots = some_slots(rows, 7 * page)
    k_pages, v_pages = (torch.zeros(8, page, groups, head_dim) for _ in range(2))
    write_entries(k, v, k_pages, v_pages, slots)
    for new, pages in ((k, k_pages), (v, v_pages)):
        wanted = torch.zeros_like(pages)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                wanted[slot // page, slot % page] = new[row]
        assert torch.equal(pages[:7], wanted[:7])  # the last page is for rows that keep nothing


def test_nothing_is_written_for_rows_that_keep_nothing() -> None:
    k_pages, v_pages = torch.zeros(3, 4, 1, 2), torch.zeros(3, 4, 1, 2)
    write_entries(torch.ones(5, 1, 2), torch.ones(5, 1, 2), k_pages, v_pages, torch.full((5,), -1))
    assert not k_pages[:2].any()
    assert not v_pages[:2].any()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
def test_entries_of_the_last_recursion_serve_later_ones(dtype: torch.dtype) -> None:
    """Three recursions of two layers, in planes in no order: row by row from where it left."""
    random, slots = randoms(), some_slots(5, 6)
    planes, recursion = torch.tensor([[4, 0], [1, 5], [3, 2]]), torch.tensor([1, 0, 0, 2, 0])
    pages = [random(6, 4 * 2 * 3 * 5).view(6, 4, 2, 3, 5).to(dtype) for _ in range(2)]
    wanted = [each.float() for each in pages]
    copy_entries(*pages, planes, slots, recursion)
    for row, slot in enumerate(slots.tolist()):
        for later in range(int(recursion[row]) + 1, 3):
            for layer in range(2):
                for each in wanted:
                    place = slot // 2, slot % 2
                    if slot >= 0:
                        each[planes[later, layer]][place] = each[planes[recursion[row], layer]][place]
    for found, right in zip(pages, wanted, strict=True):
        assert torch.equal(found.float()[:, :3], right[:, :3])


def test_float8_is_scaled_and_never_overflows() -> None:
    """e4m3 has no infinity: what is too large would otherwise become NaN."""
    k, v = torch.tensor([[[1.0, -3.0, 1e6, -1e6]]]), torch.tensor([[[0.5, 101.0, 448.0, 1e9]]])
    pages = [torch.zeros(2, 2, 1, 4).to(FLOAT8) for _ in range(2)]
    write_entries(k, v, *pages, torch.tensor([1]), k_scale=0.5, v_scale=2.0)
    assert pages[0].float()[0, 1, 0].tolist() == [2.0, -6.0, 448.0, -448.0]
    assert pages[1].float()[0, 1, 0].tolist() == [0.25, 52.0, 224.0, 448.0]  # 50.5 lies between 48 and 52
    assert not pages[0].float()[0, 0].any()


def test_what_is_no_number_is_none_in_float8() -> None:
    """Else a text whose entries broke would go on with numbers that mean nothing."""
    k = torch.tensor([[[1.0, float("nan"), float("inf"), -float("inf")]]])
    pages = [torch.zeros(2, 1, 1, 4).to(FLOAT8) for _ in range(2)]
    write_entries(k, k, *pages, torch.tensor([0]))
    one, nothing, high, low = pages[0].float()[0].flatten().tolist()
    assert (one, high, low) == (1.0, 448.0, -448.0)
    assert nothing != nothing


def test_half_precision_pages_round() -> None:
    k = torch.tensor([[[1.0 + 2**-10]]])
    pages = [torch.zeros(2, 1, 1, 1, dtype=torch.bfloat16) for _ in range(2)]
    write_entries(k, k, *pages, torch.tensor([0], dtype=torch.int32))
    assert float(pages[0][0]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
@pytest.mark.parametrize("layers", [(), (3,)])
def test_a_page_is_copied_in_every_layer(layers: tuple[int, ...], dtype: torch.dtype) -> None:
    narrow = randoms()(*layers, 5, 4, 2, 3).to(dtype)
    before = narrow.float()
    copy_page(narrow, 1, 3)
    pages = narrow.float()
    assert torch.equal(pages[..., 3, :, :, :], before[..., 1, :, :, :])
    for other in (0, 1, 2, 4):
        assert torch.equal(pages[..., other, :, :, :], before[..., other, :, :, :])
