"""The kernels for decoding rows, run by Triton's interpreter, mean what their plain twins mean.

Runs where Triton is installed and interprets (`TRITON_INTERPRET=1`). In float32, which the interpreter computes as it is.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from fathomlm.kernels import (
    attention_blocks,
    grouped_lora,
    norm,
    paged_attention,
    paged_write,
    prefill_attention,
    row_attention,
    row_linear,
    row_qkv,
    wide_rows,
)
from fathomlm.kernels.gates import GATES
from fathomlm.kernels.quantized import GPU_KINDS, Kind, QuantizedWeight
from fathomlm.kernels.row_blocks import Blocks, share_of
from fathomlm.kernels.triton_here import triton
from kernels.row_cases import Pages, angles, randoms, some_slots

pytestmark = pytest.mark.skipif(
    triton is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton with TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def numbers_from_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter takes loop bounds from arrays of one entry, which numpy 2.4 no longer turns into numbers."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


NEAR = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("scale", [True, False])
def test_norm_linear(rows: int, scale: bool) -> None:
    random = randoms()
    x, weight = random(rows, 72), random(37, 72, std=0.2)
    for blocks in (None, Blocks(16, 64), Blocks(16, 128)):
        fast = row_linear._triton_norm_linear(x, weight, 1e-2, scale, torch.float64, blocks=blocks)
        assert fast.dtype == torch.float64
        torch.testing.assert_close(fast.float(), row_linear.plain_norm_linear(x, weight, 1e-2, scale), **NEAR)


def test_rows_may_be_views_of_wider_ones() -> None:
    random = randoms()
    wide, weight, out = random(5, 100), random(20, 64), torch.full((5, 33), 7.0)
    row_linear._triton_norm_linear(wide[:, 16:80], weight, 1e-5, out=out[:, :20])
    torch.testing.assert_close(out[:, :20], row_linear.plain_norm_linear(wide[:, 16:80], weight, 1e-5), **NEAR)
    assert (out[:, 20:] == 7.0).all()


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_norm_gated(rows: int) -> None:
    random = randoms()
    x, both = random(rows, 72), random(2 * 21, 72, std=0.2)
    for blocks in (None, Blocks(8, 64), Blocks(32, 32)):
        fast = row_linear._triton_norm_gated(x, both, 1e-5, blocks=blocks)
        torch.testing.assert_close(fast, row_linear.plain_norm_gated(x, both, 1e-5), **NEAR)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("rows", [1, 5])
def test_other_gates(activation: str, rows: int) -> None:
    random = randoms()
    x, both = random(rows, 72), random(2 * 21, 72, std=0.4)
    wanted = row_linear.plain_norm_gated(x, both, 1e-5, activation=activation)
    torch.testing.assert_close(row_linear._triton_norm_gated(x, both, 1e-5, activation=activation), wanted, **NEAR)
    fast = wide_rows.wide_norm_gated(x, both, 1e-5, None, activation=activation)
    torch.testing.assert_close(fast, wanted, **NEAR)


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_add_linear(rows: int, split: int) -> None:
    random = randoms()
    stream, x, weight = random(rows, 37), random(rows, 200), random(37, 200, std=0.1)
    wanted = row_linear.plain_add_linear(stream, x, weight)
    space = row_linear.SplitSpace.build(rows, 37, "cpu")
    for given in (space, space, None):  # the second call finds the scratch as the first left it
        fast = row_linear._triton_add_linear(stream, x, weight, None, given, Blocks(16, 32, split=split))
        torch.testing.assert_close(fast, wanted, **NEAR)
    assert not space.arrived.any()
    alone = row_linear._triton_add_linear(None, x, weight, None, space, Blocks(16, 32, split=split))
    torch.testing.assert_close(alone, row_linear.plain_add_linear(None, x, weight), **NEAR)
    assert share_of(200, split) * split >= 200
    row_linear._triton_add_linear(stream, x, weight, stream, space, Blocks(16, 32, split=split))
    torch.testing.assert_close(stream, wanted, **NEAR)


def test_add_norm() -> None:
    random = randoms()
    stream, branch, weight = random(5, 100), random(5, 72), random(72)
    wanted = norm.plain_add_norm(stream[:, 16:88].clone(), branch, weight, 1e-2)
    norm._triton_add_norm(stream[:, 16:88], branch, weight, 1e-2)
    torch.testing.assert_close(stream[:, 16:88], wanted, **NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_weights_of_one_byte(kind: Kind, rows: int, dtype: torch.dtype) -> None:
    """One row in 16 bits is summed directly; all others go through tiles, some of which the weight does not fill. The twins
    are given the same numbers in float32; what is left is one rounding to the dtype of the rows."""
    random = randoms()
    x, stream, heads, groups, head_dim = random(rows, 72).to(dtype), random(rows, 37).to(dtype), 2, 1, 16
    near = NEAR if dtype == torch.float32 else {"rtol": 2**-10, "atol": 2e-3}
    whole = QuantizedWeight(random(80, 72, std=0.2), kind, None)
    for scale in (True, False):
        fast = row_linear._triton_norm_linear(x, whole[:37], 1e-2, scale)
        torch.testing.assert_close(fast.float(), row_linear.plain_norm_linear(x.float(), whole[:37], 1e-2, scale), **near)
    fast = row_linear._triton_norm_gated(x, whole[:74], 1e-5)
    torch.testing.assert_close(fast.float(), row_linear.plain_norm_gated(x.float(), whole[:74], 1e-5), **near)
    for split in (1, 2):
        blocks = None if rows == 1 and split == 1 else Blocks(16, 32, split=split)
        space = row_linear.SplitSpace.build(rows, 37, "cpu")
        fast = row_linear._triton_add_linear(stream, x, whole[:37], None, space, blocks)
        torch.testing.assert_close(fast.float(), row_linear.plain_add_linear(stream.float(), x.float(), whole[:37]), **near)
    qkv, (cos, sin), slots = whole[: (heads + 2 * groups) * head_dim], angles(random, rows, head_dim), some_slots(rows, 60)
    ours, theirs = ([torch.zeros(16, 4, groups, head_dim) for _ in range(2)] for _ in range(2))
    fast = row_qkv._triton_norm_qkv_rope_write(x, qkv, 1e-5, heads, groups, cos, sin, *ours, slots)
    slow = row_qkv.plain_norm_qkv_rope_write(x.float(), qkv, 1e-5, heads, groups, cos, sin, *theirs, slots)
    torch.testing.assert_close(fast.float(), slow, **near)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:15], other[:15], **near)
        assert one.any()


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(3, 1, 16), (2, 2, 24), (4, 2, 64), (3, 0, 16), (0, 2, 16)])
@pytest.mark.parametrize("rows", [1, 19])
def test_norm_qkv_rope_write(rows: int, heads: int, groups: int, head_dim: int) -> None:
    random = randoms()
    x, qkv = random(rows, 72), random((heads + 2 * groups) * head_dim, 72, std=0.2)
    cos, sin = angles(random, rows, head_dim)
    slots = some_slots(rows, 28)
    ours, theirs = ([torch.zeros(8, 4, groups, head_dim) for _ in range(2)] for _ in range(2))
    fast = row_qkv._triton_norm_qkv_rope_write(x, qkv, 1e-5, heads, groups, cos, sin, *ours, slots)
    slow = row_qkv.plain_norm_qkv_rope_write(x, qkv, 1e-5, heads, groups, cos, sin, *theirs, slots)
    torch.testing.assert_close(fast, slow, **NEAR)
    for one, other in zip(ours, theirs, strict=True):
        assert not one[7].any()
        torch.testing.assert_close(one[:7], other[:7], **NEAR)


def test_entries_in_float8() -> None:
    """Numbers that float8 can hold, since the interpreter does not round to it as a GPU does."""
    random, slots = randoms(), some_slots(6, 12)
    k, v = (random(6, 2, 20).to(paged_write.FLOAT8).float() * scale for scale in (0.5, 2.0))
    k[0, 0, :2] = torch.tensor([1e4, -1e4])
    ours, theirs = ([torch.zeros(4, 4, 2, 20).to(paged_write.FLOAT8) for _ in range(2)] for _ in range(2))
    paged_write._triton_write_entries(k, v, *ours, slots, 0.5, 2.0)
    paged_write.plain_write_entries(k, v, *theirs, slots, 0.5, 2.0)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[:3].float(), other[:3].float())
        assert one.float().any()


@pytest.mark.parametrize("width", [20, 400])
def test_write_entries(width: int) -> None:
    random, slots = randoms(), some_slots(6, 12)
    k, v = random(6, 3 * width).view(6, 3, width), random(6, 3, width)
    ours, theirs = ([torch.zeros(4, 4, 3, width) for _ in range(2)] for _ in range(2))
    paged_write._triton_write_entries(k, v, *ours, slots)
    paged_write.plain_write_entries(k, v, *theirs, slots)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[:3], other[:3])
        assert not one[3].any()


@pytest.mark.parametrize("width", [20, 400])
def test_copy_entries(width: int) -> None:
    random, slots = randoms(), some_slots(6, 12)
    planes, recursion = torch.tensor([[4, 0], [1, 6], [5, 2]]), torch.tensor([0, 1, 2, 0, 1, 1])
    ours = [random(7 * 4, 4 * 3 * width).view(7, 4, 4, 3, width) for _ in range(2)]
    theirs = [pages.clone() for pages in ours]
    paged_write._triton_copy_entries(*ours, planes, slots, recursion)
    paged_write.plain_copy_entries(*theirs, planes, slots, recursion)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[:, :3], other[:, :3])


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 16), (3, 3, 20), (20, 1, 16)])
@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (1, 5), (3, 20)])
def test_paged_attention(heads: int, groups: int, head_dim: int, splits: int, window: int | None) -> None:
    random = randoms()
    lengths = [0, 1, 8, 9, 70, 33]
    q, pages = random(len(lengths), heads, head_dim), Pages.build(random, lengths, groups, head_dim, page=8)
    wanted = paged_attention.plain_paged_attention(q, *pages, 0.3, window)
    workspace = torch.full((attention_blocks.workspace_size(6, heads, head_dim, splits),), torch.nan)
    for entries, ahead in ((16, False), (16, True), (32, True)):
        blocks = attention_blocks.AttentionBlocks(entries, ahead=ahead, beside=ahead)
        fast = row_attention.attend_rows(q, *pages, 0.3, window, splits, workspace, blocks=blocks)
        torch.testing.assert_close(fast, wanted, **NEAR)
    assert not fast[0].any()


@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_from_a_start_of_its_own(splits: int) -> None:
    """Each row sees from an entry of its own on, all of them or its last one alone."""
    random = randoms()
    lengths, starts = [0, 1, 9, 40, 70, 70, 130], torch.tensor([0, 0, 8, 0, 17, 64, 31], dtype=torch.int32)
    q, pages = random(7, 6, 16), Pages.build(random, lengths, 2, 16, page=8)
    wanted = paged_attention.plain_paged_attention(q, *pages, 0.3, starts_N=starts)
    for entries in (16, 32):
        blocks = attention_blocks.AttentionBlocks(entries)
        fast = row_attention.attend_rows(q, *pages, 0.3, splits=splits, blocks=blocks, starts_N=starts)
        torch.testing.assert_close(fast, wanted, **NEAR)


def test_programs_that_share_a_row_have_whole_tiles() -> None:
    """What is handed over between programs belongs to rows of several tiles alone, and nobody is waited for afterwards."""
    random = randoms()
    lengths, heads, splits = [0, 1, 32, 33, 64, 65, 300], 6, 4
    q, pages = random(len(lengths), heads, 16), Pages.build(random, lengths, 2, 16, page=8)
    workspace = torch.full((attention_blocks.workspace_size(len(lengths), heads, 16, splits),), torch.nan)
    arrived = torch.zeros(len(lengths) * 2, dtype=torch.int32)
    blocks = attention_blocks.AttentionBlocks(16)
    fast = row_attention.attend_rows(q, *pages, 0.3, None, splits, workspace, arrived=arrived, blocks=blocks)
    torch.testing.assert_close(fast, paged_attention.plain_paged_attention(q, *pages, 0.3), **NEAR)
    found = workspace[: len(lengths) * heads * splits * 16].view(len(lengths), heads, splits, 16)
    used = ~found.isnan().all(-1).all(1)
    assert used.sum(1).tolist() == [0, 0, 2, 3, 4, 3, 4]
    assert not arrived.any()


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_with_relative_positions(heads: int, groups: int, splits: int) -> None:
    """By how many entries back; those farther than the table reaches gain what its last row says, a prefix nothing."""
    random, lengths = randoms(), [0, 9, 10, 16, 70, 33]
    q, pages, bias = random(6, heads, 16), Pages.build(random, lengths, groups, 16, page=8), random(20, heads)
    for way in ({}, {"window": 5}, {"prefix": attention_blocks.PrefixSpan(2, 8)}):
        wanted = paged_attention.plain_paged_attention(q, *pages, 1.0, bias_DH=bias, **way)  # type: ignore[arg-type]
        for entries, ahead in ((16, False), (32, True)):
            blocks = attention_blocks.AttentionBlocks(entries, ahead=ahead)
            fast = row_attention.attend_rows(q, *pages, 1.0, splits=splits, blocks=blocks, bias_DH=bias, **way)  # type: ignore[arg-type]
            torch.testing.assert_close(fast, wanted, **NEAR)


PREFIXES = [(0, 8), (5, 8), (3, 40), (30, 32)]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_behind_a_prefix(prefix: tuple[int, int], splits: int) -> None:
    """Tiles between the prefix and the window are not looked at: their pages need not be there."""
    random, front = randoms(), attention_blocks.PrefixSpan(*prefix)
    lengths = [0, *(front.end + more for more in (1, 2, 17, 64, 100, 131))]
    q, pages = random(len(lengths), 6, 16), Pages.build(random, lengths, 2, 16, page=8)
    starts = torch.tensor([0, *(front.end + start for start in (0, 1, 8, 0, 71, 130))], dtype=torch.int32)
    bits = torch.tensor([0, *[-1 << 3 | 0b101] * 6])
    ways: Any = (
        {}, {"window": 1}, {"window": 20}, {"window": 70}, {"starts_N": starts}, {"bits_N": bits, "starts_N": starts},
    )  # fmt: skip
    for way, entries in itertools.product(ways, (16, 32)):
        wanted = paged_attention.plain_paged_attention(q, *pages, 0.3, **way, prefix=front)
        blocks = attention_blocks.AttentionBlocks(entries, ahead=True)
        fast = row_attention.attend_rows(q, *pages, 0.3, splits=splits, blocks=blocks, **way, prefix=front)
        torch.testing.assert_close(fast, wanted, **NEAR)
    between = (front.end + 31) // 32 * 4
    pages.table[-1, between : (lengths[-1] - 20) // 32 * 4] = len(pages.k)
    fast = row_attention.attend_rows(q, *pages, 0.3, 20, splits, blocks=blocks, prefix=front)
    torch.testing.assert_close(
        fast[:-1],
        paged_attention.plain_paged_attention(
            q[:-1], pages.k, pages.v, pages.table[:-1], pages.lengths[:-1], 0.3, 20, prefix=front
        ),
        **NEAR,
    )
    assert not fast.isnan().any()


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_prefill_attention_behind_a_prefix(prefix: tuple[int, int], window: int | None) -> None:
    """Rows of several sequences, some with entries before their first row, one that sees nothing."""
    random, front = randoms(), attention_blocks.PrefixSpan(*prefix)
    spans = [(0, 5), (9, 12), (0, 1), (90, 101), (0, 43)]
    rows = [(number, front.end + upto) for number, (a, b) in enumerate(spans) for upto in range(a + 1, b + 1)]
    pages = Pages.build(random, [front.end + end for _, end in spans], 2, 16, page=8)
    sequence = torch.tensor([number for number, _ in rows])
    lengths = torch.tensor([0 if number == 2 else upto for number, upto in rows], dtype=torch.int32)
    seen, q = (pages.k, pages.v, pages.table[sequence].contiguous(), lengths), random(len(rows), 6, 16)
    share = torch.rand(len(rows), generator=torch.Generator().manual_seed(7))
    starts = (front.end + (lengths - front.end).clamp_min(0) * share).int()
    for own in (None, starts) if window is None else (None,):
        wanted = paged_attention.plain_paged_attention(q, *seen, 0.3, window, starts_N=own, prefix=front)
        for entries, queries in ((16, 32), (32, 64)):
            blocks = attention_blocks.AttentionBlocks(entries, queries=queries, ahead=True)
            fast = prefill_attention.prefill_attention(
                q, *seen, sequence, 0.3, window, blocks=blocks, starts_N=own, prefix=front
            )
            torch.testing.assert_close(fast, wanted, **NEAR)
    assert not fast[lengths == 0].any()


@pytest.mark.parametrize("splits", [1, 3])
def test_paged_attention_over_a_tree(splits: int) -> None:
    """Whole tiles may be unseen, those that a program begins with too."""
    random = randoms()
    lengths = [0, 1, 40, 64, 65, 130]
    q, pages = random(6, 6, 16), Pages.build(random, lengths, 2, 16, page=8)
    bits = torch.tensor([0, 1, 1 | 1 << 39, -(2**63) | 1, 1 | -1 << 33, 0b1001])
    wanted = paged_attention.plain_paged_attention(q, *pages, 0.3, bits_N=bits)
    for entries, ahead in ((16, False), (16, True), (32, True)):
        blocks = attention_blocks.AttentionBlocks(entries, ahead=ahead, beside=ahead)
        fast = row_attention.attend_rows(q, *pages, 0.3, splits=splits, blocks=blocks, bits_N=bits)
        torch.testing.assert_close(fast, wanted, **NEAR)
    starts = torch.tensor([0, 0, 1, 20, 63, 100], dtype=torch.int32)
    wanted = paged_attention.plain_paged_attention(q, *pages, 0.3, bits_N=bits, starts_N=starts)
    fast = row_attention.attend_rows(q, *pages, 0.3, splits=splits, bits_N=bits, starts_N=starts)
    torch.testing.assert_close(fast, wanted, **NEAR)


def test_paged_attention_over_float8() -> None:
    random = randoms()
    q, pages = random(2, 4, 16), Pages.build(random, [9, 30], 2, 16, page=8)
    narrow = [t.nan_to_num().to(paged_write.FLOAT8) for t in pages[:2]]
    for splits in (1, 2):
        fast = row_attention.attend_rows(
            q, *narrow, *pages[2:], 0.3, splits=splits, k_scale=0.25, v_scale=3.0
        )  # fmt: skip
        wanted = paged_attention.plain_paged_attention(q, *narrow, *pages[2:], 0.3, k_scale=0.25, v_scale=3.0)
        torch.testing.assert_close(fast, wanted, **NEAR)


def test_nothing_outside_the_pages_is_written() -> None:
    """Pages lie in the middle of a larger tensor, whose other numbers are watched."""
    random, slots = randoms(), torch.tensor([3, 32, 40, 10**6, -1, -7, 31])
    x, qkv, (cos, sin) = random(7, 72), random(4 * 16, 72, std=0.2), angles(random, 7, 16)
    k, v = random(7, 1, 16), random(7, 1, 16)
    for write in (
        lambda pages: paged_write._triton_write_entries(k, v, *pages, slots),
        lambda pages: row_qkv._triton_norm_qkv_rope_write(x, qkv, 1e-5, 2, 1, cos, sin, *pages, slots),
    ):
        pools = [torch.zeros(24, 4, 1, 16) for _ in range(2)]
        write([pool[8:16] for pool in pools])
        for pool in pools:
            written = pool.flatten(0, 1).any(-1).any(-1).nonzero()[:, 0]
            assert written.tolist() == [8 * 4 + 3, 8 * 4 + 31]


@pytest.mark.parametrize("splits", [1, 2])
def test_a_page_that_is_not_there_gives_no_numbers(splits: int) -> None:
    random = randoms()
    lengths = [30, 30, 30, 30, 30]
    q, pages = random(5, 4, 16), Pages.build(random, lengths, 2, 16, page=8)
    pages.table[0, 1], pages.table[2, 0], pages.table[3, 3] = len(pages.k), -1, 10**9
    wrong = pages._replace(lengths=torch.tensor([30, 30, 30, 30, 8 * pages.table.shape[1] + 1], dtype=torch.int32))
    out = row_attention.attend_rows(q, *wrong, 0.3, splits=splits)
    assert out.isnan().all(-1).all(-1).tolist() == [True, False, True, True, True]
    assert not out[1].isnan().any()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("rank", [1, 20, 40])
def test_add_grouped_lora(rank: int, own: bool) -> None:
    random = randoms()
    x, out, depth = random(7, 300), random(7, 70), torch.tensor([2, 0, -1, 1, 2, 0, -1])
    a, b = random(3, rank, 300, std=0.1), random(3, 70, rank, std=0.1)
    vectors = (random(3, 70), random(3, 70)) if own else (None, None)
    wanted = grouped_lora.plain_add_grouped_lora(out.clone(), x, a, b, depth, 0.5, None, *vectors)
    found = grouped_lora._triton_add_grouped_lora(out, x, a, b, depth, 0.5, None, *vectors)
    assert found is out
    torch.testing.assert_close(out, wanted, **NEAR)


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(6, 2, 16), (3, 3, 20), (20, 1, 16)])
@pytest.mark.parametrize("window", [None, 5, 20])
def test_prefill_attention(heads: int, groups: int, head_dim: int, window: int | None) -> None:
    """Rows of several sequences, some with entries before their first row, one of a single row, one that sees nothing."""
    random = randoms()
    spans = [(0, 5), (9, 12), (0, 0), (30, 41), (3, 4), (0, 23)]
    rows = [
        (number, upto) for number, (first, end) in enumerate(spans) for upto in range(first + 1, max(end, first + 1) + 1)
    ]
    pages = Pages.build(random, [max(end, 1) for _, end in spans], groups, head_dim, page=8)
    sequence = torch.tensor([number for number, _ in rows])
    lengths = torch.tensor([0 if number == 2 else upto for number, upto in rows], dtype=torch.int32)
    seen = (pages.k, pages.v, pages.table[sequence].contiguous(), lengths)
    q = random(len(rows), heads, head_dim)
    wanted = paged_attention.plain_paged_attention(q, *seen, 0.3, window)
    for entries, queries, ahead in ((16, 32, False), (16, 32, True), (32, 64, True)):
        blocks = attention_blocks.AttentionBlocks(entries, queries=queries, ahead=ahead)
        fast = prefill_attention.prefill_attention(q, *seen, sequence, 0.3, window, blocks=blocks)
        torch.testing.assert_close(fast, wanted, **NEAR)
    assert not fast[lengths == 0].any()
    starts = (lengths * torch.rand(len(rows), generator=torch.Generator().manual_seed(7))).int()  # below the length
    wanted = paged_attention.plain_paged_attention(q, *seen, 0.3, starts_N=starts)
    fast = prefill_attention.prefill_attention(q, *seen, sequence, 0.3, blocks=blocks, starts_N=starts)
    torch.testing.assert_close(fast, wanted, **NEAR)
    seen[2][3, 0] = len(pages.k)  # the first sequence's fourth row: rows are looked at through the first of theirs
    seen[2][0, 0] = len(pages.k)
    fast = prefill_attention.prefill_attention(q, *seen, sequence, 0.3, None, blocks=blocks)
    assert fast[:5].isnan().all()
    assert not fast[5:].isnan().any()


@pytest.mark.parametrize("ahead", [False, True])
def test_prefill_attention_takes_nothing_from_in_front_of_a_window(ahead: bool) -> None:
    """A window may begin inside a tile. What is in front of it there has a weight of 0, which does not hide another
    sequence's NaN."""
    random, (first, end) = randoms(), (29, 41)
    owned = Pages.build(random, [end], 2, 16, page=8)
    k, v = (torch.cat((torch.full_like(pages[:1], torch.nan), pages)) for pages in (owned.k, owned.v))
    table = (owned.table + 1).expand(end - first, -1).contiguous()
    lengths = torch.arange(first + 1, end + 1, dtype=torch.int32)
    q, sequence = random(end - first, 6, 16), torch.zeros(end - first, dtype=torch.int64)
    blocks = attention_blocks.AttentionBlocks(16, queries=32, ahead=ahead)
    for window, starts in ((5, None), (20, None), (None, lengths // 3)):
        wanted = paged_attention.plain_paged_attention(q, k, v, table, lengths, 0.3, window, starts_N=starts)
        fast = prefill_attention.prefill_attention(
            q, k, v, table, lengths, sequence, 0.3, window, blocks=blocks, starts_N=starts
        )  # fmt: skip
        torch.testing.assert_close(fast, wanted, **NEAR)


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(3, 1, 16), (2, 2, 24), (40, 4, 16), (3, 0, 16), (0, 2, 16)])
def test_many_rows(heads: int, groups: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's product with a pass of its own behind it."""
    random = randoms()
    x, both = random(19, 72), random(2 * 40, 72, std=0.2)
    for block in (16, 1024):
        monkeypatch.setattr(wide_rows, "BLOCK", block)
        torch.testing.assert_close(
            wide_rows.wide_norm_gated(x, both, 1e-2, None), row_linear.plain_norm_gated(x, both, 1e-2), **NEAR
        )
    qkv, (cos, sin) = random((heads + 2 * groups) * head_dim, 72, std=0.2), angles(random, 19, head_dim)
    slots = some_slots(19, 28)
    ours, theirs = ([torch.zeros(8, 4, groups, head_dim) for _ in range(2)] for _ in range(2))
    fast = wide_rows.wide_norm_qkv_rope_write(x, qkv, 1e-2, heads, groups, cos, sin, *ours, slots, 1.0, 1.0, None)
    slow = row_qkv.plain_norm_qkv_rope_write(x, qkv, 1e-2, heads, groups, cos, sin, *theirs, slots)
    torch.testing.assert_close(fast, slow, **NEAR)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:7], other[:7], **NEAR)
        assert not one[7].any()
    stream, y, weight = random(19, 37), random(19, 200), random(37, 200, std=0.1)
    wanted = row_linear.plain_add_linear(stream, y, weight)
    torch.testing.assert_close(wide_rows.wide_add_linear(stream, y, weight, None), wanted, **NEAR)
    torch.testing.assert_close(wide_rows.wide_add_linear(stream, y, weight, stream), wanted, **NEAR)
