"""The likeliest token of each row, and its log probability, or by how much it is likelier than the next.

In plain torch that is a maximum, a softmax over the vocabulary and a look-up, each a pass over all scores by one program a
row. Here programs share a row and go over it once.

Shapes: N rows, V vocabulary, C chunks of a row, K likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.kernels.triton_here import early_launch, tl, triton

CHUNK = 2048
"""Scores that one program takes."""


class Best(NamedTuple):
    tokens_N: Tensor
    logprobs_N: Tensor
    bad_N: Tensor
    """A score is NaN or +inf, or none is finite: there is no choice. Token and log probability are 0."""


def best_token(scores_NV: Tensor) -> Best:
    """The first of the highest scores, (N) each."""
    if triton is not None and scores_NV.is_cuda:
        return _triton_best_token(scores_NV)
    return plain_best_token(scores_NV)


def plain_best_token(scores_NV: Tensor) -> Best:
    """The meaning, to the bit as other ways of choosing compute it; the kernel's log probabilities differ in the last
    digits. torch promises the first of equal maxima, and takes NaN for the highest."""
    best_N, tokens_N = scores_NV.float().max(-1)
    bad_N = ~best_N.isfinite()
    tokens_N = tokens_N.masked_fill(bad_N, 0)
    logprobs_N = scores_NV.log_softmax(-1, dtype=torch.float32).gather(-1, tokens_N[:, None])[:, 0]
    return Best(tokens_N, logprobs_N.masked_fill(bad_N, 0.0), bad_N)


def best_and_gap(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest scores, and how much more probable it is than the next likeliest token, (N) each; where a
    score is not finite, neither means anything, but the token is one."""
    if triton is not None and scores_NV.is_cuda:
        return _triton_best_and_gap(scores_NV)
    return plain_best_and_gap(scores_NV)


def plain_best_and_gap(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The meaning. Without a sort, which even a compiler leaves as it is."""
    chances_NV = scores_NV.float().softmax(-1)
    tokens_N = scores_NV.argmax(-1)
    others_NV = chances_NV.scatter(-1, tokens_N[:, None], 0.0)
    return tokens_N, chances_NV.amax(-1) - others_NV.amax(-1)


def best_few(scores_NV: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The `many` highest scores of each row, (N, K), the first of equal ones first; and by how much the best is more
    probable than the next likeliest token, as `best_and_gap`. Where a score is not finite neither means anything, but
    tokens are tokens."""
    assert 0 < many <= scores_NV.shape[1]
    if triton is not None and scores_NV.is_cuda:
        return _triton_best_few(scores_NV, many)
    return plain_best_few(scores_NV, many)


def plain_best_few(scores_NV: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The meaning. By as many looks for the best, which torch promises to be the first, and which take less than a sort."""
    tokens_N, gaps_N = plain_best_and_gap(scores_NV)
    found, left_NV = [tokens_N], scores_NV
    while len(found) < many:
        left_NV = left_NV.scatter(-1, found[-1][:, None], -torch.inf)
        found.append(left_NV.argmax(-1))
    return torch.stack(found, 1), gaps_N


if triton is not None:
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _chunk_kernel(  # type: ignore[no-untyped-def]
        scores_ptr, scores_stride, most_ptr, sum_ptr, at_ptr, next_ptr, vocab,
        CHUNKS: tl.constexpr, CHUNK: tl.constexpr, NEXT: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """The highest score of a chunk, where it is, and the sum of exponentials below it; with NEXT also the next highest.
        NaN stays NaN."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(scores_ptr + row * scores_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        most = tl.max(x, 0)
        first = tl.min(tl.where(x == most, column, vocab), 0)
        wrong = tl.max((x != x).to(tl.int32), 0)
        below = tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0.0, most)), 0)
        at = row * CHUNKS + chunk
        tl.store(most_ptr + at, tl.where(wrong > 0, float("nan"), most))
        tl.store(sum_ptr + at, below)
        tl.store(at_ptr + at, first)
        if NEXT:
            tl.store(next_ptr + at, tl.max(tl.where(column == first, float("-inf"), x), 0))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def best_of_chunks(  # type: ignore[no-untyped-def]
        most_ptr, sum_ptr, at_ptr, row, vocab, CHUNKS: tl.constexpr, WIDE: tl.constexpr
    ):  # fmt: skip
        """A row's likeliest token, its log probability, and whether there is no choice; both are 0 then."""
        chunk = tl.arange(0, WIDE)
        at, there = row * CHUNKS + chunk, chunk < CHUNKS
        most = tl.load(most_ptr + at, mask=there, other=float("-inf"))
        best = tl.max(most, 0)
        wrong = tl.max((most != most).to(tl.int32), 0)
        bad = (wrong > 0) | (best == float("inf")) | (best == float("-inf"))
        level = tl.where(bad, 0.0, best)
        total = tl.sum(tl.load(sum_ptr + at, mask=there, other=0.0) * tl.exp(most - level), 0)
        first = tl.min(tl.where(most == best, tl.load(at_ptr + at, mask=there, other=0), vocab), 0)
        return tl.where(bad, 0, first).to(tl.int64), tl.where(bad, 0.0, -tl.log(total)), bad

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _row_kernel(  # type: ignore[no-untyped-def]
        most_ptr, sum_ptr, at_ptr, tokens_ptr, logprobs_ptr, bad_ptr, vocab, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        token, logprob, bad = best_of_chunks(most_ptr, sum_ptr, at_ptr, row, vocab, CHUNKS, WIDE)
        tl.store(tokens_ptr + row, token)
        tl.store(logprobs_ptr + row, logprob)
        tl.store(bad_ptr + row, bad)

    def _triton_best_token(scores_NV: Tensor) -> Best:
        (N, V), device = scores_NV.shape, scores_NV.device
        found = Best(
            torch.empty(N, dtype=torch.int64, device=device),
            torch.empty(N, device=device),
            torch.empty(N, dtype=torch.bool, device=device),
        )
        most_NC, _, sum_NC, at_NC = look_through(scores_NV, beside=False)
        chunks = most_NC.shape[1]
        wide = triton.next_power_of_2(chunks)
        _row_kernel[(N,)](most_NC, sum_NC, at_NC, *found, V, CHUNKS=chunks, WIDE=wide, num_warps=1, **early_launch(N))
        return found

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _row_gap_kernel(  # type: ignore[no-untyped-def]
        most_ptr, next_ptr, sum_ptr, at_ptr, tokens_ptr, gaps_ptr, vocab, CHUNKS: tl.constexpr, WIDE: tl.constexpr,
        CHUNK: tl.constexpr,
    ):  # fmt: skip
        row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
        at, there = row * CHUNKS + chunk, chunk < CHUNKS
        most = tl.load(most_ptr + at, mask=there, other=float("-inf"))
        best = tl.max(most, 0)
        place = tl.load(at_ptr + at, mask=there, other=0)
        first = tl.minimum(
            tl.min(tl.where((most == best) & there, place, vocab), 0), vocab - 1
        )  # a token also where all is NaN
        total = tl.sum(tl.load(sum_ptr + at, mask=there, other=0.0) * tl.exp(most - best), 0)
        here = first // CHUNK == chunk  # the chunk that the best is in offers its second
        second = tl.max(tl.where(here, tl.load(next_ptr + at, mask=there, other=float("-inf")), most), 0)
        tl.store(tokens_ptr + row, first.to(tl.int64))
        tl.store(gaps_ptr + row, (1.0 - tl.exp(second - best)) / total)

    def look_through(scores_NV: Tensor, *, beside: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each chunk of a row, (N, C) each: the highest score, the next highest, the sum of exponentials below the
        highest, and where that is. Without `beside` the next highest are not looked for."""
        (N, V), device = scores_NV.shape, scores_NV.device
        assert scores_NV.stride(1) == 1
        chunks = triton.cdiv(V, CHUNK)
        most_NC, sum_NC = (torch.empty(N, chunks, device=device) for _ in range(2))
        next_NC = torch.empty(N, chunks, device=device) if beside else most_NC
        at_NC = torch.empty(N, chunks, dtype=torch.int32, device=device)
        _chunk_kernel[(N, chunks)](
            scores_NV, scores_NV.stride(0), most_NC, sum_NC, at_NC, next_NC, V,
            CHUNKS=chunks, CHUNK=CHUNK, NEXT=beside, num_warps=4, **early_launch(N),
        )  # fmt: skip
        return most_NC, next_NC, sum_NC, at_NC

    def _triton_best_and_gap(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
        (N, V), device = scores_NV.shape, scores_NV.device
        chunks_NC = look_through(scores_NV)
        chunks = chunks_NC[0].shape[1]
        out = torch.empty(N, dtype=torch.int64, device=device), torch.empty(N, device=device)
        wide = triton.next_power_of_2(chunks)
        _row_gap_kernel[(N,)](*chunks_NC, *out, V, CHUNKS=chunks, WIDE=wide, CHUNK=CHUNK, num_warps=1)
        return out

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _few_chunk_kernel(  # type: ignore[no-untyped-def]
        scores_ptr, scores_stride, few_ptr, at_ptr, sum_ptr, vocab,
        CHUNKS: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """The FEW highest scores of a chunk and where they are, the vocabulary's size behind its end; and the sum of
        exponentials below the highest."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        left = column < vocab
        x = tl.load(scores_ptr + row * scores_stride + column, mask=left, other=float("-inf")).to(tl.float32)
        at = row * CHUNKS + chunk
        for number in tl.static_range(FEW):
            most = tl.max(tl.where(left, x, float("-inf")), 0)
            first = tl.min(tl.where(left & (x == most), column, vocab), 0)
            left = left & (column != first)
            tl.store(few_ptr + at * FEW + number, most)
            tl.store(at_ptr + at * FEW + number, first)
            if number == 0:
                tl.store(sum_ptr + at, tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0.0, most)), 0))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def load_few(  # type: ignore[no-untyped-def]
        few_ptr, at_ptr, sum_ptr, row, vocab, CHUNKS: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr,
        PARTS: tl.constexpr,
    ):  # fmt: skip
        """What the chunks of a row offer: scores, their places, whether they are there, and by how much the best one is more
        probable than the next."""
        one, chunk = tl.arange(0, WIDE), tl.arange(0, PARTS)
        at = row * CHUNKS * FEW + one
        x = tl.load(few_ptr + at, mask=one < CHUNKS * FEW, other=float("-inf"))
        place = tl.load(at_ptr + at, mask=one < CHUNKS * FEW, other=vocab)
        left = place < vocab
        best, first = next_best(x, place, left, vocab)
        second = tl.max(tl.where(left & (place != first), x, float("-inf")), 0)
        here = chunk < CHUNKS
        most = tl.load(few_ptr + (row * CHUNKS + chunk) * FEW, mask=here, other=float("-inf"))
        total = tl.sum(tl.load(sum_ptr + row * CHUNKS + chunk, mask=here, other=0.0) * tl.exp(most - best), 0)
        return x, place, left, (1.0 - tl.exp(second - best)) / total

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def next_best(x, place, left, vocab):  # type: ignore[no-untyped-def]
        """The highest score of those left, and the first place that has it; where all is NaN, any."""
        most = tl.max(tl.where(left, x, float("-inf")), 0)
        return most, tl.minimum(tl.min(tl.where(left & (x == most), place, vocab), 0), vocab - 1)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _few_row_kernel(  # type: ignore[no-untyped-def]
        few_ptr, at_ptr, sum_ptr, tokens_ptr, gaps_ptr, vocab, MANY: tl.constexpr,
        CHUNKS: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        x, place, left, gap = load_few(few_ptr, at_ptr, sum_ptr, row, vocab, CHUNKS, FEW, WIDE, PARTS)
        tl.store(gaps_ptr + row, gap)
        for number in tl.static_range(MANY):
            _, first = next_best(x, place, left, vocab)
            left = left & (place != first)
            tl.store(tokens_ptr + row * MANY + number, first.to(tl.int64))

    def look_for_few(scores_NV: Tensor, many: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
        """Of each chunk of a row: its highest scores, `many` or two at least, and where they are, (N, C, K) each, and the
        sum of exponentials below the highest, (N, C). With the sizes that `load_few` takes."""
        (N, V), device = scores_NV.shape, scores_NV.device
        assert scores_NV.stride(1) == 1
        chunks, few = triton.cdiv(V, CHUNK), max(2, many)
        few_NCK, sum_NC = torch.empty(N, chunks, few, device=device), torch.empty(N, chunks, device=device)
        at_NCK = torch.empty(N, chunks, few, dtype=torch.int32, device=device)
        _few_chunk_kernel[(N, chunks)](
            scores_NV, scores_NV.stride(0), few_NCK, at_NCK, sum_NC, V, CHUNKS=chunks, CHUNK=CHUNK, FEW=few, num_warps=4,
            **early_launch(N),
        )  # fmt: skip
        wide, parts = triton.next_power_of_2(chunks * few), triton.next_power_of_2(chunks)
        return (few_NCK, at_NCK, sum_NC), {"CHUNKS": chunks, "FEW": few, "WIDE": wide, "PARTS": parts}

    def _triton_best_few(scores_NV: Tensor, many: int) -> tuple[Tensor, Tensor]:
        (N, V), device = scores_NV.shape, scores_NV.device
        found, sizes = look_for_few(scores_NV, many)
        tokens_NK, gaps_N = torch.empty(N, many, dtype=torch.int64, device=device), torch.empty(N, device=device)
        _few_row_kernel[(N,)](*found, tokens_NK, gaps_N, V, MANY=many, num_warps=1, **sizes)
        return tokens_NK, gaps_N
