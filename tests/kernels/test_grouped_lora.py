"""What each depth adds to a shared linear, row by row in float64."""

from __future__ import annotations

import pytest
import torch

from fathomlm.kernels.grouped_lora import add_grouped_lora
from kernels.row_cases import randoms


@pytest.mark.parametrize("depths", [[0], [2, 0, -1, 1, 1, 2, -1, 0], [-1, -1]])
@pytest.mark.parametrize("rank", [1, 4])
def test_each_row_gets_what_its_depth_adds(depths: list[int], rank: int) -> None:
    random, N = randoms(dtype=torch.float64), len(depths)
    out, x, a, b = random(N, 5), random(N, 6), random(3, rank, 6), random(3, 5, rank)
    before = out.clone()
    assert add_grouped_lora(out, x, a, b, torch.tensor(depths, dtype=torch.int32), scaling=0.5) is out
    for n, depth in enumerate(depths):
        added = torch.zeros(5, dtype=torch.float64) if depth < 0 else 0.5 * (b[depth] @ (a[depth] @ x[n]))
        torch.testing.assert_close(out[n], before[n] + added)


@pytest.mark.parametrize(("gained", "shifted"), [(True, False), (False, True), (True, True)])
def test_row_lengths_and_biases_of_each_depth(gained: bool, shifted: bool) -> None:
    random, depths = randoms(dtype=torch.float64), [1, -1, 0, 1]
    out, x, a, b, gain, shift = random(4, 5), random(4, 6), random(2, 3, 6), random(2, 5, 3), random(2, 5), random(2, 5)
    before = out.clone()
    own = {"gain_DW": gain if gained else None, "shift_DW": shift if shifted else None}
    add_grouped_lora(out, x, a, b, torch.tensor(depths), **own)
    for n, depth in enumerate(depths):
        wanted = before[n] if depth < 0 else before[n] + b[depth] @ (a[depth] @ x[n])
        wanted = wanted * gain[depth] if gained and depth >= 0 else wanted
        torch.testing.assert_close(out[n], wanted + shift[depth] if shifted and depth >= 0 else wanted)


def test_factors_of_other_depths_are_not_looked_at() -> None:
    """A depth whose factors are not finite must not reach rows elsewhere: masking by zero would carry it along."""
    random = randoms()
    out, x, a, b = random(2, 5), random(2, 6), random(2, 3, 6), random(2, 5, 3)
    a[1] = torch.inf
    assert add_grouped_lora(out, x, a, b, torch.tensor([0, -1])).isfinite().all()
