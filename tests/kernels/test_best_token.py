"""The likeliest token: plain torch's meaning, and the kernel's on a GPU or by Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from fathomlm.decode.confidence import AtExit, gap
from fathomlm.kernels import best_token as kernel
from fathomlm.kernels.triton_here import triton

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INF, NAN = float("inf"), float("nan")

on_each = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]),
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton with TRITON_INTERPRET=1")),
    ],
)


def awkward(vocab: int) -> Tensor:
    """Random rows, and one of each kind of trouble."""
    rows = 4 * torch.randn(12, vocab, generator=torch.Generator().manual_seed(0))
    rows[1, -1] = rows[1].max() + 1
    rows[2, [3, vocab - 2]] = rows[2].max() + 1  # equal
    rows[3] = -INF
    rows[4, 5] = INF
    rows[5, vocab // 2] = NAN
    rows[6, : vocab - 1] = -INF
    rows[7] = 0.0
    rows[8] += 1e4
    rows[9, 0], rows[9, -1] = NAN, INF
    rows[10, : vocab // 2] = -INF
    return rows


@pytest.mark.parametrize("vocab", [7, 5000])
def test_the_meaning(vocab: int) -> None:
    rows = awkward(vocab)
    best = kernel.plain_best_token(rows)
    assert best.bad_N.tolist() == [i in (3, 4, 5, 9) for i in range(12)]
    good = ~best.bad_N
    assert best.tokens_N[2] == 3
    assert best.tokens_N[7] == 0
    wanted = rows[good].double().log_softmax(-1).gather(1, best.tokens_N[good][:, None])[:, 0]
    torch.testing.assert_close(best.logprobs_N[good].double(), wanted, rtol=1e-5, atol=2e-3)
    assert (rows[good].max(-1).values == rows[good].gather(1, best.tokens_N[good][:, None])[:, 0]).all()
    assert not best.tokens_N[~good].any()
    assert not best.logprobs_N[~good].any()


@pytest.mark.parametrize("vocab", [7, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_each
def test_the_kernel(device: str, vocab: int, dtype: torch.dtype) -> None:
    assert triton is not None
    rows = awkward(vocab).to(device, dtype)
    fast, slow = kernel._triton_best_token(rows), kernel.plain_best_token(rows)
    assert torch.equal(fast.tokens_N, slow.tokens_N)
    assert torch.equal(fast.bad_N, slow.bad_N)
    torch.testing.assert_close(fast.logprobs_N, slow.logprobs_N, rtol=1e-4, atol=2e-3)
    wide = torch.zeros(12, vocab + 3, dtype=dtype, device=rows.device)
    wide[:, :vocab] = rows
    assert torch.equal(kernel._triton_best_token(wide[:, :vocab]).tokens_N, slow.tokens_N), "rows of a wider tensor"


def test_by_how_much_is_what_decoding_compares_to_the_last_bit() -> None:
    logits = 3 * torch.randn(50, 61, generator=torch.Generator().manual_seed(0))
    logits[7, 3] = logits[7].max()  # two likeliest
    state = torch.zeros(50, 1)
    choice, sure = kernel.best_and_gap(logits)
    assert torch.equal(sure, gap(AtExit(state, state, logits)))
    assert torch.equal(choice, logits.argmax(-1))


@pytest.mark.parametrize("vocab", [7, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_each
def test_the_kernel_that_also_says_by_how_much(device: str, vocab: int, dtype: torch.dtype) -> None:
    assert triton is not None
    rows = awkward(vocab)[[0, 1, 2, 6, 7, 8, 10, 11]].to(device, dtype)  # those with a choice
    rows[7, vocab - 1] = rows[7, 0] = rows[7].max() + 1  # equal, in different chunks
    fast, slow = kernel._triton_best_and_gap(rows), kernel.plain_best_and_gap(rows)
    assert torch.equal(fast[0], slow[0])
    torch.testing.assert_close(fast[1], slow[1], rtol=1e-4, atol=1e-6)
    assert fast[1][7] == 0
    broken = awkward(vocab)[[3, 4, 5, 9]].to(device, dtype)
    broken[3] = NAN
    tokens, _ = kernel._triton_best_and_gap(broken)
    assert ((tokens >= 0) & (tokens < vocab)).all(), "whoever looks it up must find something"


def likeliest(rows: Tensor, many: int) -> Tensor:
    """By a sort that leaves equal ones in order."""
    return rows.float().argsort(dim=-1, descending=True, stable=True)[:, :many]


@pytest.mark.parametrize("vocab", [7, 5000])
@pytest.mark.parametrize("many", [1, 2, 5])
def test_the_likeliest_few(vocab: int, many: int) -> None:
    rows = awkward(vocab)[[0, 1, 2, 7, 8, 11]]
    tokens, sure = kernel.plain_best_few(rows, many)
    assert torch.equal(tokens, likeliest(rows, many))
    assert torch.equal(sure, kernel.plain_best_and_gap(rows)[1])


@pytest.mark.parametrize("vocab", [7, 2048, 2050, 5000])
@pytest.mark.parametrize("many", [1, 2, 5])
@on_each
def test_the_kernel_of_the_likeliest_few(device: str, vocab: int, many: int) -> None:
    assert triton is not None
    rows = awkward(vocab)[[0, 1, 2, 7, 8, 11]].to(device)
    rows[5, vocab - 1] = rows[5, 0] = rows[5].max() + 1  # equal, in different chunks
    tokens, sure = kernel._triton_best_few(rows, many)
    assert torch.equal(tokens, likeliest(rows, many))
    torch.testing.assert_close(sure, kernel.plain_best_few(rows, many)[1], rtol=1e-4, atol=1e-6)
    few = awkward(vocab)[[6, 10]].to(device)  # hardly any is finite
    assert torch.equal(kernel._triton_best_few(few, many)[0], likeliest(few, many))
    broken = awkward(vocab)[[3, 4, 5, 9]].to(device)
    broken[3] = NAN
    tokens, _ = kernel._triton_best_few(broken, many)
    assert ((tokens >= 0) & (tokens < vocab)).all(), "whoever looks it up must find something"
