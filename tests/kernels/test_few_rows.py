"""The kernels for rows that verify drafts mean what the plain twins mean: by Triton's interpreter in float32, which it
computes as it is, and on a GPU in 16 bits, held against the twins in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.decode.draft_tree import TreeShape
from fathomlm.engine.programs.draft_tree import seen_bits
from fathomlm.kernels import few_attention, few_rows, paged_attention, row_linear, row_qkv
from fathomlm.kernels.few_rows import FewBlocks
from kernels.row_cases import NEAR, angles, randoms, some_slots
from with_triton import GPU, WITH_TRITON

pytestmark = WITH_TRITON
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
EPS, PAGE = 1e-5, 4
BLOCKS = [None, FewBlocks(8, 2, True), FewBlocks(16, 4, False)]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorFloat-32 would round the twins' products. And Triton 3.6's interpreter takes loop bounds from arrays of one
    entry, which numpy 2.4 no longer turns into numbers."""
    if not GPU:
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def near(found: Tensor, wanted: Tensor, atol: float = 2e-4) -> None:
    assert found.isfinite().all()
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1.01 * NEAR[DTYPE], atol=atol if GPU else 1e-5)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("depth", [64, 192, 208, 576])
@pytest.mark.parametrize("rows", [2, 9, 16])
def test_products(rows: int, depth: int, blocks: FewBlocks | None) -> None:
    random = randoms(dtype=DTYPE, device=DEVICE)
    x, std = random(rows, depth + 8)[:, :depth], depth**-0.5
    weight, both = random(37, depth, std=std), random(2 * 21, depth, std=std)
    for scale in (True, False):
        found = few_rows.few_linear(x, weight, EPS, scale, out_dtype=torch.float32, blocks=blocks)
        near(found, row_linear.plain_norm_linear(x.float(), weight.float(), EPS, scale))
    for activation in ("silu", "gelu_tanh"):
        found = few_rows.few_gated(x, both, EPS, blocks=blocks, activation=activation)
        near(found, row_linear.plain_norm_gated(x.float(), both.float(), EPS, activation=activation))
    stream = random(rows, 37)
    wanted = row_linear.plain_add_linear(stream.float(), x.float(), weight.float())
    assert few_rows.few_linear(x, weight, 0.0, False, stream, out=stream, blocks=blocks) is stream
    near(stream, wanted)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("rows", "heads", "groups", "head_dim"), [(2, 3, 1, 64), (13, 4, 2, 24), (5, 2, 0, 16)])
def test_queries_keys_and_values(rows: int, heads: int, groups: int, head_dim: int, blocks: FewBlocks | None) -> None:
    random = randoms(dtype=DTYPE, device=DEVICE)
    x, qkv = random(rows, 72), random((heads + 2 * groups) * head_dim, 72, std=0.2)
    cos, sin = angles(random, rows, head_dim)
    pages = [torch.zeros(9, PAGE, max(groups, 1), head_dim, dtype=DTYPE, device=DEVICE) for _ in range(4)]
    slots = some_slots(rows, 8 * PAGE).to(DEVICE)
    found = few_rows.few_qkv_rope_write(x, qkv, EPS, heads, groups, cos, sin, *pages[:2], slots, blocks=blocks)
    wide = [each.float() for each in (x, qkv)], [each.float() for each in (cos, sin)]
    slow = [each.float() for each in pages[2:]]
    near(found, row_qkv.plain_norm_qkv_rope_write(*wide[0], EPS, heads, groups, *wide[1], *slow, slots), 2e-3)
    for fast, twin in zip(pages[:2], slow, strict=True):
        near(fast[:8], twin[:8], 2e-3)  # the twin may write to the last page


@pytest.mark.parametrize(("parts", "tile"), [(1, 16), (1, 32), (3, 16)])
@pytest.mark.parametrize("widths", [(2, 2, 1), (3, 1), None])
@pytest.mark.parametrize("heads", [(3, 1, 64), (4, 4, 24)])
def test_attention_of_rows_that_stand_together(
    heads: tuple[int, int, int], widths: tuple[int, ...] | None, parts: int, tile: int
) -> None:
    """Sequences of all lengths: none, shorter than what is new, of several tiles; some nodes are not there."""
    random, (H, G, D) = randoms(dtype=DTYPE, device=DEVICE), heads
    tree = TreeShape(widths or (1, 1, 1, 1))
    R, positions = tree.nodes, [0, 5, 40, 131, 17]
    N, P = R * len(positions), -(-(max(positions) + R) // PAGE)
    total = P * len(positions)
    k, v = random(total, PAGE, G, D), random(total, PAGE, G, D)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).view(-1, P).to(DEVICE, torch.int32)
    lengths = torch.tensor([[p + node + 1 for node in range(R)] for p in positions], dtype=torch.int32, device=DEVICE)
    lengths[3, 1] = lengths[1, R - 1] = 0
    lengths[4] = 0
    bits = None if widths is None else torch.tensor(seen_bits(tree), device=DEVICE).repeat(len(positions))
    q, table = random(N, H, D), order.repeat_interleave(R, 0)
    seen = (table, lengths.flatten(), D**-0.5)
    found = few_attention.attend_few(q, k, v, *seen, R, R, parts, bits_N=bits, tile=tile)
    wanted = paged_attention.plain_paged_attention(q.float(), k.float(), v.float(), *seen, bits_N=bits)
    near(found, wanted, 2e-2)
    assert not found.view(len(positions), R, H, D)[4].any()
    space = [torch.full((n,), 7.0, device=DEVICE) for n in few_attention.few_space(N, H, D, parts)]
    counts = torch.zeros_like(space[1], dtype=torch.int32)
    for _ in range(2):  # programs leave their counts as they were
        again = few_attention.attend_few(q, k, v, *seen, R, R, parts, space[0], counts, bits, tile=tile)
        assert torch.equal(again, found)
        assert not counts.any()


def test_a_page_that_is_not_there_gives_nan() -> None:
    random = randoms(dtype=DTYPE, device=DEVICE)
    q, k, v = random(4, 2, 16), random(6, PAGE, 1, 16), random(6, PAGE, 1, 16)
    table = torch.arange(6, dtype=torch.int32, device=DEVICE).repeat(4, 1)
    table[2:, 1] = 99
    lengths = torch.tensor([20, 21, 20, 21], dtype=torch.int32, device=DEVICE)
    found = few_attention.attend_few(q, k, v, table, lengths, 0.25, 2, 2)
    assert found[:2].isfinite().all()
    assert found[2:].isnan().all()
