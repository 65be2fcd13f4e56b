"""The entrance of attention for decoding rows, against a loop over rows and heads in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fathomlm.depth import Rope
from fathomlm.kernels.paged_write import FLOAT8
from fathomlm.kernels.rope import rope_table
from fathomlm.kernels.row_qkv import norm_qkv_rope_write
from kernels.row_cases import angles, randoms, some_slots

EPS, M = 0.2, 12


def turned(head_D: Tensor, angle: Tensor) -> Tensor:
    """Entry i and entry i + D/2 are a point in the plane, turned by the i-th angle."""
    low, high = head_D.chunk(2)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()))


@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("rows", [1, 17])
def test_each_head_of_each_row(rows: int, heads: int, groups: int) -> None:
    D, page = 6, 4
    random = randoms(dtype=torch.float64)
    x, qkv, angle = random(rows, M), random((heads + 2 * groups) * D, M), random(rows, D // 2)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    slots = some_slots(rows, 6 * page)
    k_pages, v_pages = (torch.full((7, page, groups, D), torch.nan, dtype=torch.float64) for _ in range(2))
    q = norm_qkv_rope_write(x, qkv, EPS, heads, groups, cos, sin, k_pages, v_pages, slots)
    written = torch.zeros(7, page, dtype=torch.bool)
    for n, slot in enumerate(slots.tolist()):
        normed = x[n] / (x[n].square().mean() + EPS).sqrt()
        parts = [qkv[head * D : (head + 1) * D] @ normed for head in range(heads + 2 * groups)]
        for head in range(heads):
            torch.testing.assert_close(q[n, head], turned(parts[head], angle[n]))
        if slot >= 0:
            at = divmod(slot, page)
            written[at] = True
            for group in range(groups):
                torch.testing.assert_close(k_pages[at][group], turned(parts[heads + group], angle[n]))
                torch.testing.assert_close(v_pages[at][group], parts[heads + groups + group])
    for pages in (k_pages, v_pages):
        assert pages[:6][~written[:6]].isnan().all()
        assert not pages[written].isnan().any()


def test_tables_are_those_of_the_model() -> None:
    """Two positions apart turn by what the checkpoint's frequencies say: dot products depend on the distance alone."""
    random = randoms(dtype=torch.float64)
    x, qkv = random(1, M).expand(4, M), random(2 * 8, M)
    cos, sin = rope_table(Rope(), 8, torch.tensor([[3, 8, 100, 105]]), torch.float64)
    pages = torch.zeros(2, 4, 0, 8, dtype=torch.float64)
    q = norm_qkv_rope_write(x, qkv, EPS, 2, 0, cos[0, 0], sin[0, 0], pages, pages, torch.arange(4))
    near, far = (q[0, 0] * q[1, 1]).sum(), (q[2, 0] * q[3, 1]).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    assert (q[0, 0] * q[3, 1]).sum().sub(near).abs() > 1e-2


def test_queries_alone() -> None:
    random = randoms()
    x, qkv, (cos, sin) = random(5, M), random((3 + 2) * 8, M), angles(random, 5, 8)
    pages = torch.zeros(3, 4, 1, 8)
    q = norm_qkv_rope_write(x, qkv, EPS, 3, 1, cos, sin, pages, pages.clone(), torch.arange(5))
    before, out = pages.clone(), torch.empty(5, 3, 8)
    assert norm_qkv_rope_write(x, qkv[: 3 * 8], EPS, 3, 0, cos, sin, pages, pages, torch.arange(5), out=out) is out
    torch.testing.assert_close(out, q)
    assert torch.equal(pages, before)


def test_pages_in_float8() -> None:
    random = randoms()
    x, qkv, (cos, sin) = random(5, M), random((3 + 4) * 8, M), angles(random, 5, 8)
    narrow, wide = ([torch.zeros(3, 4, 2, 8, dtype=dtype) for _ in range(2)] for dtype in (FLOAT8, torch.float32))
    for pages in (narrow, wide):
        norm_qkv_rope_write(x, qkv, EPS, 3, 2, cos, sin, *pages, torch.arange(5), 0.25, 4.0)
    for one, other, scale in zip(narrow, wide, (0.25, 4.0), strict=True):
        torch.testing.assert_close(one.float() * scale, other, rtol=2**-4, atol=scale * 2**-10)
