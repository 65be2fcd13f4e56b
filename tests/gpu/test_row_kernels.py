"""The kernels for decoding rows on a GPU: what their plain twins compute in float32, the same bits every time, and recorded
in a graph.

The twins are given the very same numbers in float32. A kernel then differs by the order of its float32 sums (far below
1e-4 for the terms here, which are of order one) and by rounding once to its own dtype, which is off by up to 2^-8 of the
result in bfloat16 and 2^-11 in float16. Attention also rounds its weights before it multiplies with them: each value's part
may be off by that much, and parts of either sign add up to less than they are large, hence an absolute bound of a few times
that for values of order one. Most of the time goes into compiling: `-n 8` where there are cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.kernels import attention_blocks, grouped_lora, paged_attention, paged_write, row_linear, row_qkv
from fathomlm.kernels.gates import GATES
from fathomlm.kernels.row_blocks import Blocks
from kernels.row_cases import NEAR, Pages, angles, near, near_many, some_slots

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA, EPS, PAGE = "cuda", 1e-5, 16
SHAPES = {"23M": (512, 1408, 8, 2, 64), "360M": (960, 2560, 15, 5, 64), "1.7B": (2048, 8192, 32, 32, 64)}
ROWS = [1, 3, 32, 51, 64, 128, 200]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [(torch.bfloat16, rows) for rows in ROWS] + [(dtype, rows) for dtype in DTYPES[1:] for rows in (3, 51)]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """TensorFloat-32 would round every product of the twins to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape: int, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, device=CUDA)).to(dtype)


def weight(width: int, depth: int, dtype: torch.dtype) -> Tensor:
    return random(width, depth, dtype=dtype, std=depth**-0.5)


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "rows"), CASES)
def test_products_of_a_layer(dtype: torch.dtype, rows: int, shape: str) -> None:
    M, inner, H, G, D = SHAPES[shape]
    x, gated = 3 * random(rows, M, dtype=dtype), random(rows, inner, dtype=dtype)
    qkv, both, down = weight((H + 2 * G) * D, M, dtype), weight(2 * inner, M, dtype), weight(M, inner, dtype)
    for scale in (True, False):
        out = unwritten(rows, (H + 2 * G) * D, dtype=dtype)
        assert row_linear.norm_linear(x, qkv, EPS, scale, out=out) is out
        near_many(out, row_linear.plain_norm_linear(x.float(), qkv.float(), EPS, scale), dtype, rows)
    out = unwritten(rows, inner, dtype=dtype)
    row_linear.norm_gated(x, both, EPS, out=out)
    wanted = row_linear.plain_norm_gated(x.float(), both.float(), EPS)
    near_many(out, wanted, dtype, rows)
    for activation in GATES:
        wanted = row_linear.plain_norm_gated(x.float(), both.float(), EPS, activation=activation)
        near_many(row_linear.norm_gated(x, both, EPS, activation=activation), wanted, dtype, rows)
    space = row_linear.SplitSpace.build(rows, M, CUDA)
    for given, wide in ((gated, down), (x[:, : H * D], weight(M, H * D, dtype))):
        wanted = row_linear.plain_add_linear(x.float(), given.float(), wide.float())
        near_many(row_linear.add_linear(x, given, wide, space=space), wanted, dtype, rows, atol=1e-3)
        stream = x.clone()
        row_linear.add_linear(stream, given, wide, out=stream)
        near_many(stream, wanted, dtype, rows, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 51, 200])
def test_logits_come_out_in_float32(rows: int, shape: str) -> None:
    x, head = random(rows, SHAPES[shape][0], dtype=torch.bfloat16), weight(49152, SHAPES[shape][0], torch.bfloat16)
    logits = row_linear.norm_linear(x, head, EPS, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    near(logits, row_linear.plain_norm_linear(x.float(), head.float(), EPS), torch.float32)


@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 37, 72), (17, 100, 1000), (65, 130, 264), (5, 16, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_widths(dtype: torch.dtype, rows: int, width: int, depth: int) -> None:
    x, stream, w = random(rows, depth, dtype=dtype), random(rows, width, dtype=dtype), weight(2 * width, depth, dtype)
    near(row_linear.norm_linear(x, w, EPS), row_linear.plain_norm_linear(x.float(), w.float(), EPS), dtype)
    near_many(row_linear.norm_gated(x, w, EPS), row_linear.plain_norm_gated(x.float(), w.float(), EPS), dtype, rows)
    wanted = row_linear.plain_add_linear(stream.float(), x.float(), w[:width].float())
    near_many(row_linear.add_linear(stream, x, w[:width]), wanted, dtype, rows, atol=1e-3)


@pytest.mark.parametrize("split", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 51, 200])
def test_shared_sums_have_the_same_bits_every_time(rows: int, split: int) -> None:
    stream, x, w = (random(*s, dtype=torch.bfloat16) for s in ((rows, 960), (rows, 2560), (960, 2560)))
    space = row_linear.SplitSpace.build(rows, 960, CUDA)
    first = row_linear._triton_add_linear(stream, x, w, None, space, Blocks(16, 128, split=split))
    near(first, row_linear.plain_add_linear(stream.float(), x.float(), w.float()), torch.bfloat16, atol=2e-2)
    for _ in range(200):
        again = row_linear._triton_add_linear(stream, x, w, None, space, Blocks(16, 128, split=split))
        assert torch.equal(again, first)
    assert not space.arrived.any()


@pytest.mark.parametrize("shape", [*SHAPES.values(), (96, 0, 4, 1, 80), (96, 0, 2, 2, 128), (96, 0, 4, 0, 64)])
@pytest.mark.parametrize(("dtype", "rows"), CASES)
def test_entrance_of_attention(dtype: torch.dtype, rows: int, shape: tuple[int, int, int, int, int]) -> None:
    M, _, H, G, D = shape
    x, qkv, slots = 2 * random(rows, M, dtype=dtype), weight((H + 2 * G) * D, M, dtype), some_slots(rows, 20 * PAGE).to(CUDA)
    cos, sin = angles(random, rows, D)
    ours = [torch.zeros(21, PAGE, G, D, dtype=dtype, device=CUDA) for _ in range(2)]
    theirs = [torch.zeros(21, PAGE, G, D, device=CUDA) for _ in range(2)]
    q = row_qkv.norm_qkv_rope_write(x, qkv, EPS, H, G, cos, sin, *ours, slots, out=unwritten(rows, H, D, dtype=dtype))
    wanted = row_qkv.plain_norm_qkv_rope_write(x.float(), qkv.float(), EPS, H, G, cos, sin, *theirs, slots)
    near_many(q, wanted, dtype, rows)
    for one, other in zip(ours, theirs, strict=True):
        near_many(one[:20], other[:20], dtype, rows)
        assert not one[20].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_in_float8(dtype: torch.dtype) -> None:
    """Next to a tie the two may round to neighbours, which lie 2^-3 apart relatively, or 2^-9 near zero."""
    rows, M, _, H, G, D = 51, *SHAPES["360M"]
    x, qkv, slots = random(rows, M, dtype=dtype), weight((H + 2 * G) * D, M, dtype), some_slots(rows, 20 * PAGE).to(CUDA)
    x[0] = 0
    qkv[H * D :] *= 40
    cos, sin = angles(random, rows, D)
    ours, theirs = ([torch.zeros(21, PAGE, G, D, device=CUDA).to(paged_write.FLOAT8) for _ in range(2)] for _ in range(2))
    scales = (0.1, 7.0)
    row_qkv.norm_qkv_rope_write(x, qkv, EPS, H, G, cos, sin, *ours, slots, *scales)
    row_qkv.plain_norm_qkv_rope_write(x.float(), qkv.float(), EPS, H, G, cos, sin, *theirs, slots, *scales)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:20].float(), other[:20].float(), rtol=2**-3, atol=2**-9)
        same = (one[:20].float() == other[:20].float()).float().mean()
        assert same > 0.99
    assert ours[0].float().abs().max() == paged_write.LARGEST_FLOAT8
    k, v = random(rows, G, D, dtype=dtype, std=30.0), random(rows, G, D, dtype=dtype, std=30.0)
    paged_write.write_entries(k, v, *ours, slots, *scales)
    paged_write.plain_write_entries(k.float(), v.float(), *theirs, slots, *scales)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:20].float(), other[:20].float(), rtol=2**-3, atol=2**-9)


def test_what_is_no_number_is_none_in_float8() -> None:
    k = torch.tensor([[[1.0, float("nan"), float("inf"), -float("inf")]]], device=CUDA)
    pages = [torch.zeros(2, 1, 1, 4, device=CUDA).to(paged_write.FLOAT8) for _ in range(2)]
    paged_write.write_entries(k, k, *pages, torch.tensor([0], device=CUDA))
    one, nothing, high, low = pages[0].float()[0].flatten().tolist()
    assert (one, high, low) == (1.0, paged_write.LARGEST_FLOAT8, -paged_write.LARGEST_FLOAT8)
    assert nothing != nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "head_dim"), [(5, 64), (3, 20), (32, 128)])
def test_writing_entries(dtype: torch.dtype, groups: int, head_dim: int) -> None:
    k, v, slots = random(51, groups, head_dim), random(51, groups, head_dim), some_slots(51, 80).to(CUDA)
    ours, theirs = ([torch.zeros(6, PAGE, groups, head_dim, dtype=dtype, device=CUDA) for _ in range(2)] for _ in range(2))
    paged_write.write_entries(k, v, *ours, slots)
    paged_write.plain_write_entries(k, v, *theirs, slots)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[:5], other[:5])
        assert not one[5].any()


def some_lengths(rows: int) -> list[int]:
    generator = torch.Generator().manual_seed(rows)
    awkward = [0, 1, PAGE, PAGE + 1, 4 * PAGE, 1000]
    return awkward[-rows:] + torch.randint(0, 700, (max(0, rows - 6),), generator=generator).tolist()


HEADS = [(15, 5, 64), (8, 2, 80), (32, 32, 64), (6, 2, 96), (16, 1, 128), (4, 4, 256), (40, 1, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4, 13])
def test_attention_over_a_tree(dtype: torch.dtype, splits: int) -> None:
    """Rows see some of their last entries; whole tiles may be unseen."""
    (H, G, D), rows = HEADS[0], 51
    pages = Pages.build(lambda *s: random(*s, dtype=dtype), some_lengths(rows), G, D, PAGE, spare=40)
    q = random(rows, H, D, dtype=dtype, std=2.0)
    bits = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(1)) | 1
    bits[::3] = 1 | -1 << 40
    bits = bits.cuda()
    fast = paged_attention.paged_attention(q, *pages, D**-0.5, splits=splits, bits_N=bits)
    wide = (pages.k.float(), pages.v.float(), pages.table, pages.lengths)
    wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, bits_N=bits)
    near(fast, wanted, dtype, atol=max(2e-4, 4 * NEAR[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_with_relative_positions(dtype: torch.dtype, splits: int) -> None:
    H, G, D = HEADS[2]
    bias = random(40, H, dtype=torch.float32).to(dtype)
    for rows in (1, 3, 51):
        pages = Pages.build(lambda *s: random(*s, dtype=dtype), some_lengths(rows), G, D, PAGE, spare=40)
        q = random(rows, H, D, dtype=dtype)
        fast = paged_attention.paged_attention(q, *pages, D**-0.5, splits=splits, bias_DH=bias)
        wide = (pages.k.float(), pages.v.float(), pages.table, pages.lengths)
        wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, bias_DH=bias.float())
        near(fast, wanted, dtype, atol=max(2e-4, 4 * NEAR[dtype]))


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.bfloat16, h) for h in HEADS] + [(dtype, h) for dtype in DTYPES[1:] for h in HEADS[:2]]
)
@pytest.mark.parametrize(("splits", "window"), [(1, None), (4, None), (13, None), (1, 100), (4, 33)])
def test_attention(dtype: torch.dtype, heads: tuple[int, int, int], splits: int, window: int | None) -> None:
    H, G, D = heads
    for rows in (1, 3, 51):
        pages = Pages.build(lambda *s: random(*s, dtype=dtype), some_lengths(rows), G, D, PAGE, spare=40)
        q, out = random(rows, H, D, dtype=dtype, std=2.0), unwritten(rows, H, D, dtype=dtype)
        workspace = unwritten(attention_blocks.workspace_size(rows, H, D, splits), dtype=torch.float32)
        paged_attention.paged_attention(q, *pages, D**-0.5, window, splits, workspace, out=out)
        wide = (pages.k.float(), pages.v.float(), pages.table, pages.lengths)
        wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, window)
        near(out, wanted, dtype, atol=max(2e-4, 4 * NEAR[dtype]))
        assert not out[pages.lengths == 0].any()
        if window is not None:  # the same as starts, and others
            starts = (pages.lengths - window).clamp_min(0)
            for first in (starts, starts // 2):
                again = paged_attention.paged_attention(
                    q, *pages, D**-0.5, splits=splits, workspace=workspace, starts_N=first
                )  # fmt: skip
                wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, starts_N=first)
                near(again, wanted, dtype, atol=max(2e-4, 4 * NEAR[dtype]))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 33])
def test_attention_of_prompts(dtype: torch.dtype, heads: tuple[int, int, int], window: int | None) -> None:
    """Chunks of several sequences, with and without entries before them; one table is wrong in a page that it needs."""
    H, G, D = heads
    spans = [(0, 70), (5, 6), (300, 420), (0, 1), (1, 3), (0, 200), (16, 40)]
    pages = Pages.build(lambda *s: random(*s, dtype=dtype), [end for _, end in spans], G, D, PAGE, spare=4)
    sequence = torch.tensor([n for n, (first, end) in enumerate(spans) for _ in range(first, end)], device=CUDA)
    lengths = torch.tensor([i + 1 for first, end in spans for i in range(first, end)], dtype=torch.int32, device=CUDA)
    q, out = random(len(sequence), H, D, dtype=dtype, std=2.0), unwritten(len(sequence), H, D, dtype=dtype)
    table = pages.table[sequence].contiguous()
    paged_attention.paged_attention(
        q, pages.k, pages.v, table, lengths, D**-0.5, window, out=out, sequence_N=sequence
    )  # fmt: skip
    wide = (pages.k.float(), pages.v.float(), table, lengths)
    near(out, paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, window), dtype, atol=4 * NEAR[dtype])
    if window is not None:
        starts = ((lengths - window) // 3).clamp_min(0)
        again = paged_attention.paged_attention(
            q, pages.k, pages.v, table, lengths, D**-0.5, sequence_N=sequence, starts_N=starts
        )  # fmt: skip
        wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, starts_N=starts)
        near(again, wanted, dtype, atol=4 * NEAR[dtype])
    table[sequence == 6, 1] = len(pages.k)
    paged_attention.paged_attention(q, pages.k, pages.v, table, lengths, D**-0.5, window, out=out, sequence_N=sequence)
    assert out[sequence == 6].isnan().all()
    assert not out[sequence != 6].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("prefix", [(0, 256), (5, 16), (28, 32)])
@pytest.mark.parametrize("window", [None, 33, 200])
def test_attention_behind_a_prefix(dtype: torch.dtype, prefix: tuple[int, int], window: int | None) -> None:
    """Rows of sequences of their own, and chunks of prompts: all of the prefix, and what the window shows."""
    (H, G, D), front = HEADS[0], attention_blocks.PrefixSpan(*prefix)
    spans = [(0, 70), (5, 6), (300, 420), (0, 1), (600, 603), (0, 200)]
    ends = [front.end + end for _, end in spans]
    pages = Pages.build(lambda *s: random(*s, dtype=dtype), ends, G, D, PAGE, spare=4)
    sequence = torch.tensor([n for n, (first, end) in enumerate(spans) for _ in range(first, end)], device=CUDA)
    places = [front.end + i + 1 for first, end in spans for i in range(first, end)]
    lengths = torch.tensor(places, dtype=torch.int32, device=CUDA)
    prompts, apart = (pages.table[sequence].contiguous(), lengths), (pages.table, pages.lengths)
    for (table, counts), together in ((prompts, sequence), (apart, None)):
        q, wide = random(len(counts), H, D, dtype=dtype, std=2.0), (pages.k.float(), pages.v.float(), table, counts)
        starts = front.end + (counts - front.end) // 2
        for shown, own in ((window, None), (None, starts)):
            for splits in (1,) if together is not None else (1, 4):
                found = paged_attention.paged_attention(
                    q, pages.k, pages.v, table, counts, D**-0.5, shown, splits, sequence_N=together, starts_N=own,
                    prefix=front,
                )  # fmt: skip
                wanted = paged_attention.plain_paged_attention(q.float(), *wide, D**-0.5, shown, starts_N=own, prefix=front)
                near(found, wanted, dtype, atol=4 * NEAR[dtype])


@pytest.mark.parametrize("splits", [1, 4])
def test_a_page_that_is_not_there_gives_no_numbers(splits: int) -> None:
    pages = Pages.build(lambda *s: random(*s, dtype=torch.bfloat16), [200] * 5, 5, 64, PAGE)
    pages.table[0, 1], pages.table[2, 0], pages.table[3, 3] = len(pages.k), -1, 10**9
    pages.lengths[4] = PAGE * pages.table.shape[1] + 1
    out = paged_attention.paged_attention(random(5, 15, 64, dtype=torch.bfloat16), *pages, 0.1, splits=splits)
    assert out.isnan().all(-1).all(-1).tolist() == [True, False, True, True, True]
    assert not out[1].isnan().any()


def test_nothing_outside_the_pages_is_written() -> None:
    """Pages lie in the middle of a larger tensor, whose other numbers are watched."""
    slots = torch.tensor([3, 8 * PAGE, 9 * PAGE, 10**9, -1, -7, 8 * PAGE - 1], device=CUDA)
    x, qkv, (cos, sin) = random(7, 256), random(4 * 64, 256, std=0.2), angles(random, 7, 64)
    k, v = random(7, 1, 64), random(7, 1, 64)
    for write in (
        lambda pages: paged_write.write_entries(k, v, *pages, slots),
        lambda pages: row_qkv.norm_qkv_rope_write(x, qkv, EPS, 2, 1, cos, sin, *pages, slots),
    ):
        pools = [torch.zeros(24, PAGE, 1, 64, device=CUDA) for _ in range(2)]
        write([pool[8:16] for pool in pools])
        for pool in pools:
            written = pool.flatten(0, 1).any(-1).any(-1).nonzero()[:, 0]
            assert written.tolist() == [8 * PAGE + 3, 16 * PAGE - 1]


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_over_float8(splits: int) -> None:
    H, G, D = 15, 5, 64
    pages = Pages.build(lambda *s: random(*s), some_lengths(51), G, D, PAGE)
    k, v = (t.nan_to_num().to(paged_write.FLOAT8) for t in (pages.k, pages.v))
    q = random(51, H, D, dtype=torch.bfloat16)
    rest: dict[str, Any] = {"scale": D**-0.5, "k_scale": 1.5, "v_scale": 0.3}
    fast = paged_attention.paged_attention(q, k, v, pages.table, pages.lengths, splits=splits, **rest)
    slow = paged_attention.plain_paged_attention(q.float(), k, v, pages.table, pages.lengths, **rest)
    near(fast, slow, torch.bfloat16, atol=4 * NEAR[torch.bfloat16])


@pytest.mark.parametrize(
    ("dtype", "rows", "rank"), [(*case, 8) for case in CASES] + [(DTYPES[0], 51, n) for n in (1, 64, 512)]
)
def test_what_depths_add(dtype: torch.dtype, rows: int, rank: int) -> None:
    """What lies between the two products is rounded too, here as in the model's own LoRA."""
    x, out = random(rows, 960, dtype=dtype), random(rows, 1600, dtype=dtype)
    a, b = (random(*s, dtype=dtype, std=s[2] ** -0.5) for s in ((3, rank, 960), (3, 1600, rank)))
    depth = torch.randint(-1, 3, (rows,), device=CUDA)
    gain, shift = random(3, 1600, dtype=dtype), random(3, 1600, dtype=dtype)
    for own in ((None, None), (gain, shift)):
        wide = (None if each is None else each.float() for each in own)
        wanted = grouped_lora.plain_add_grouped_lora(out.float(), x.float(), a.float(), b.float(), depth, 0.5, None, *wide)
        before = out.clone()
        grouped_lora.add_grouped_lora(out, x, a, b, depth, 0.5, None, *own)
        near(out, wanted, dtype, atol=max(2e-4, 5 * NEAR[dtype]) * (1 if own[0] is None else 4), roundings=2)
        assert torch.equal(out[depth < 0], before[depth < 0])


def recorded_calls() -> dict[str, Callable[[], tuple[list[Tensor], list[Tensor], Callable[[], Any]]]]:
    """For each kernel: inputs that may change between replays, what it writes, and the call."""
    rows, M, inner, H, G, D, dtype = 51, *SHAPES["360M"], torch.bfloat16

    def products() -> tuple[list[Tensor], list[Tensor], Callable[[], Any]]:
        x, both, down = random(rows, M, dtype=dtype), weight(2 * inner, M, dtype), weight(M, inner, dtype)
        gated, out = (torch.empty(rows, n, dtype=dtype, device=CUDA) for n in (inner, M))
        space = row_linear.SplitSpace.build(rows, M, CUDA)

        def call() -> None:
            row_linear.norm_gated(x, both, EPS, out=gated)
            row_linear.add_linear(x, gated, down, out=out, space=space)
            out.add_(row_linear.norm_linear(out, weight_MM, EPS))

        weight_MM = weight(M, M, dtype)
        return [x], [gated, out], call

    def entrance() -> tuple[list[Tensor], list[Tensor], Callable[[], Any]]:
        x, qkv, slots = random(rows, M, dtype=dtype), weight((H + 2 * G) * D, M, dtype), some_slots(rows, 80).to(CUDA)
        cos, sin = angles(random, rows, D)
        pages = [torch.zeros(6, PAGE, G, D, dtype=dtype, device=CUDA) for _ in range(4)]
        q = torch.empty(rows, H, D, dtype=dtype, device=CUDA)

        def call() -> None:
            row_qkv.norm_qkv_rope_write(x, qkv, EPS, H, G, cos, sin, *pages[:2], slots, out=q)
            paged_write.write_entries(q[:, :G], q[:, :G], *pages[2:], slots)

        return [x, slots], [q, *pages], call

    def look() -> tuple[list[Tensor], list[Tensor], Callable[[], Any]]:
        q, pages = random(rows, H, D, dtype=dtype), Pages.build(lambda *s: random(*s, dtype=dtype), [300] * rows, G, D)
        outs = [torch.empty_like(q) for _ in range(2)]

        def call() -> None:
            for out, splits in zip(outs, (1, 4), strict=True):
                paged_attention.paged_attention(q, *pages, 0.1, splits=splits, out=out)

        return [q, pages.lengths], outs, call

    def depths() -> tuple[list[Tensor], list[Tensor], Callable[[], Any]]:
        x, out, depth = (
            random(rows, M, dtype=dtype),
            random(rows, M, dtype=dtype),
            torch.randint(-1, 3, (rows,), device=CUDA),
        )
        a, b = random(3, 16, M, dtype=dtype), random(3, M, 16, dtype=dtype)

        def call() -> None:
            out.zero_()
            grouped_lora.add_grouped_lora(out, x, a, b, depth)

        return [x, depth], [out], call

    return {"products": products, "entrance": entrance, "attention": look, "depths": depths}


@pytest.mark.parametrize("name", ["products", "entrance", "attention", "depths"])
def test_recorded_calls_follow_their_inputs(name: str) -> None:
    inputs, outputs, call = recorded_calls()[name]()
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    for seed in range(3):
        order = torch.randperm(51, generator=torch.Generator().manual_seed(seed)).to(CUDA)
        for given in inputs:
            given.copy_(given[order] // 2 if name == "attention" and not given.is_floating_point() else given[order])
        found = []
        for again in (graph.replay, call):
            for out in outputs:
                out.zero_()
            again()
            found.append([out.clone() for out in outputs])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        assert all(out.any() for out in found[0])
