"""Inputs for the kernels of decoding rows: random weights, shuffled pages, tables and lengths of every awkward kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathomlm.kernels.wide_rows import MANY_ROWS

NEAR = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
"""By how much of a result rounding once to a dtype may be off."""


def near(fast: Tensor, slow: Tensor, dtype: torch.dtype, atol: float = 2e-4, roundings: int = 1) -> None:
    """`slow` is in float32."""
    assert fast.isfinite().all()
    torch.testing.assert_close(fast.float(), slow.float(), rtol=1.01 * roundings * NEAR[dtype], atol=atol)


def near_many(fast: Tensor, slow: Tensor, dtype: torch.dtype, rows: int, atol: float = 2e-4) -> None:
    """Of many rows, whose product a library rounds (shares of a sum and weights of one byte, too) before what follows: an
    error of a few roundings of what such numbers are, also where turning or adding leaves less than went in; and of less
    than one on average."""
    if rows < MANY_ROWS or dtype == torch.float32:
        near(fast, slow, dtype, atol)
    elif slow.numel():
        size = slow.std().item()
        torch.testing.assert_close(fast.float(), slow.float(), rtol=4 * NEAR[dtype], atol=8 * NEAR[dtype] * size)
        assert (fast.float() - slow.float()).abs().mean() < NEAR[dtype] * size


def randoms(seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A maker of random tensors, each different, the same in every run and on every device."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(device, dtype)

    return random


class Pages(NamedTuple):
    """Entries of some rows, scattered over pages that lie in no order; all that no row owns is NaN."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    @staticmethod
    def build(random: Any, lengths: list[int], groups: int, head_dim: int, page: int = 16, spare: int = 2) -> Pages:
        """Each row has `spare` columns of its table more than it needs, with pages that do not exist."""
        needs = [-(-length // page) for length in lengths]
        total = sum(needs) + 3
        free = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
        k, v = (random(total, page, groups, head_dim) for _ in range(2))
        table = torch.full((len(lengths), max(needs) + spare), 10**6, dtype=torch.int32, device=k.device)
        owned = torch.zeros(total, page, dtype=torch.bool, device=k.device)
        for row, (need, length) in enumerate(zip(needs, lengths, strict=True)):
            mine = torch.tensor([free.pop() for _ in range(need)], dtype=torch.int32, device=k.device)
            table[row, :need] = mine
            for index, number in enumerate(mine.tolist()):
                owned[number, : length - index * page] = True
        k[~owned] = v[~owned] = torch.nan
        return Pages(k, v, table, torch.tensor(lengths, dtype=torch.int32, device=k.device))


def angles(random: Any, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines as `rope_table` lays them out."""
    angle = random(rows, head_dim // 2, std=3.0)
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def some_slots(rows: int, entries: int, seed: int = 3) -> Tensor:
    """Different slots in no order, below `entries`; every third row has none."""
    slots = torch.randperm(entries, generator=torch.Generator().manual_seed(seed))[:rows]
    slots[1::3] = -1
    return slots
