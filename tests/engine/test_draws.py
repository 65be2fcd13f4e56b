"""The rows' filters against the reference's, randomness that is a function, and draws that cannot go wrong."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fathomlm.decode.logits import sampling_probabilities
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.draws import BITS, Settings, draw, likeliest_tokens, row_chances, uniform

VOCAB = 131
MASK = 2**64 - 1


def settings_of(samplings: list[Sampling], vocab: int = VOCAB) -> Settings:
    """Written out by hand, so that a mistake in how slots keep them does not hide here."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    off, zero = [1.0 for _ in samplings], [0.0 for _ in samplings]
    return Settings(
        temperature_N1=column([s.temperature for s in samplings]),
        tail_N1=column([1 - s.top_p if s.top_p < 1 else -1.0 for s in samplings]),
        min_p_N1=column([s.min_p for s in samplings]),
        repetition_N1=column(off),
        presence_N1=column(zero),
        frequency_N1=column(zero),
        top_k_N1=column([min(s.top_k or vocab, vocab) for s in samplings], torch.int64),
        seed_N1=column(zero, torch.int64),
    )


def level(logits_NV: Tensor) -> Tensor:
    return logits_NV - logits_NV.amax(-1, keepdim=True)


def scores(rows: int, kind: str) -> Tensor:
    logits_NV = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5))
    if kind == "tied":  # a head in bfloat16 gives many equal scores, also across the k-th place and top_p's edge
        return (2 * logits_NV).round() / 4
    if kind == "masked":
        return logits_NV.masked_fill(torch.arange(VOCAB) % 3 == 0, -math.inf)
    return logits_NV


GRID = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        [1e-6, 0.4, 1.0, 1.9, 1e30], [0, 1, 9, VOCAB, 10 * VOCAB], [1.0, 0.999, 0.8, 0.2, 1e-9], [0.0, 0.05, 1.0]
    )
]


@pytest.mark.parametrize("kind", ["spread", "masked"])
def test_every_combination_of_filters_is_the_references(kind: str) -> None:
    """All in one batch, each row with its own: the same tokens kept, and the same probabilities to the last bit."""
    logits_NV = scores(len(GRID), kind)
    got_NV = row_chances(level(logits_NV), settings_of(GRID), filtered=True)
    sizes = set()
    for sampling, logits_V, got_V in zip(GRID, logits_NV, got_NV, strict=True):
        assert torch.equal(got_V, sampling_probabilities(logits_V[None], sampling)[0]), sampling
        sizes.add(int((got_V > 0).sum()))
    assert len(sizes) > 20, "the filters must leave much and little"


def test_of_equal_scores_the_lowest_ids_stay() -> None:
    """The reference keeps as many of them, but which ones is left to its sort."""
    logits_NV = scores(len(GRID), "tied")
    got_NV = row_chances(level(logits_NV), settings_of(GRID), filtered=True)
    cut = 0
    for sampling, logits_V, got_V in zip(GRID, logits_NV, got_NV, strict=True):
        expected_V = sampling_probabilities(logits_V[None], sampling)[0]
        if sampling.top_p == 1:
            assert torch.equal(got_V, expected_V), sampling
        assert torch.allclose(got_V.sort().values, expected_V.sort().values, rtol=1e-6, atol=0), sampling
        for score in logits_V[got_V > 0].unique():
            kept = (got_V > 0)[logits_V == score].int()
            assert torch.equal(kept, kept.sort(descending=True).values), sampling
            cut += int(kept.sum()) < len(kept)
    assert cut > 50, "top_p's edge must fall among equal scores"


def test_the_least_top_p_is_the_greedy_choice() -> None:
    logits_NV = scores(40, "tied")
    got_NV = row_chances(level(logits_NV), settings_of([Sampling(temperature=1, top_p=1e-9)] * 40), filtered=True)
    assert torch.equal(got_NV.argmax(-1), logits_NV.argmax(-1))
    assert torch.equal(got_NV.amax(-1), torch.ones(40))


@pytest.mark.parametrize("kind", ["spread", "tied", "masked"])
def test_the_whole_sort_changes_nothing_for_rows_that_do_not_need_it(kind: str) -> None:
    plain = [sampling for sampling in GRID if not sampling.top_k and sampling.top_p == 1]
    level_NV = level(scores(len(plain), kind))
    with_sort, without = (row_chances(level_NV, settings_of(plain), filtered=filtered) for filtered in (True, False))
    assert torch.equal(with_sort, without)


def test_top_p_adds_up_exactly_over_a_large_vocabulary() -> None:
    """Equal sampling_probabilities, so the edge is known; adding them up one by one in float32 misses it."""
    vocab = 300_000
    kept = row_chances(torch.zeros(1, vocab), settings_of([Sampling(temperature=1, top_p=0.75)], vocab), filtered=True)
    assert abs(int((kept > 0).sum()) - vocab * 3 // 4) <= 1
    naive = np.cumsum(np.full(vocab, 1 / vocab, np.float32), dtype=np.float32)
    assert abs(int((naive > 0.25).sum()) - vocab * 3 // 4) > 10


# Randomness.


def splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform_by_hand(seed: int, step: int) -> float:
    start = splitmix((seed + 0x9E3779B97F4A7C15) & MASK)
    return (splitmix((start + (step + 1) * 0x9E3779B97F4A7C15) & MASK) >> (64 - BITS)) / 2**BITS


def test_the_mix_by_hand_is_splitmix64() -> None:
    """The first numbers that splitmix64 is published to give for the seed 1234567."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) & MASK for i in (1, 2, 3)]
    assert [splitmix(state) for state in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_tensor_form_is_the_mix_by_hand() -> None:
    seeds = [0, 1, 2, 41, 2**31, 2**32 - 1, 2**62 + 12345, 2**63 - 1]
    steps = [0, 1, 2, 1000, 2**31 - 1]
    got = uniform(torch.tensor(seeds)[:, None], torch.tensor(steps)[None])
    assert got.tolist() == [[uniform_by_hand(seed, step) for step in steps] for seed in seeds]
    narrow = uniform(torch.tensor(seeds)[:, None], torch.tensor(steps, dtype=torch.int32)[None])
    assert torch.equal(got, narrow)


DRAWS = 100_000
SEQUENCES = {
    "steps": uniform(torch.tensor([7]), torch.arange(DRAWS)),
    "seeds": uniform(torch.arange(DRAWS), torch.tensor([0])),
    "seeds, later": uniform(torch.arange(DRAWS), torch.tensor([1000])),
    "seed and step together": uniform(torch.arange(DRAWS), torch.arange(DRAWS)),
    "seed up, step down": uniform(torch.arange(DRAWS), torch.arange(DRAWS).flip(0)),
}


def assert_uniform(cells: Tensor, bins: int) -> None:
    """Chi-square within five standard deviations of its mean."""
    expected = len(cells) / bins
    chi_square = float(((torch.bincount(cells, minlength=bins) - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("name", SEQUENCES)
def test_numbers_are_uniform(name: str) -> None:
    u = SEQUENCES[name]
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert_uniform((u * 256).long(), 256)
    assert_uniform((u * 2**20).long() % 256, 256)


@pytest.mark.parametrize("apart", [1, 2, 7])
@pytest.mark.parametrize("name", SEQUENCES)
def test_neighbouring_numbers_are_independent(name: str, apart: int) -> None:
    u = SEQUENCES[name]
    first, second = (u[:-apart] * 16).long(), (u[apart:] * 16).long()
    assert_uniform(first * 16 + second, 256)


def test_neighbouring_seeds_share_no_numbers() -> None:
    numbers = uniform(torch.arange(64)[:, None], torch.arange(1000)[None])
    assert len(numbers.unique()) == numbers.numel()


# Draws.

LAST = 1 - 2.0**-BITS
"""The highest uniform number."""


def drawn(chances_V: Tensor, numbers: list[float]) -> list[int]:
    rows_NV = chances_V.expand(len(numbers), -1)
    tokens: list[int] = draw(rows_NV, torch.tensor(numbers, dtype=torch.float64)[:, None])[:, 0].tolist()
    return tokens


def test_draws_are_the_inverse_of_the_running_sum() -> None:
    chances_V = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert drawn(chances_V, [0.0, 0.2499, 0.25, 0.7499, 0.75, LAST]) == [1, 1, 3, 3, 4, 4]


def test_a_fine_grid_of_numbers_gives_each_token_its_share() -> None:
    chances_V = (2 * torch.randn(50, generator=torch.Generator().manual_seed(3))).softmax(-1)
    tokens = drawn(chances_V, [i / 2**16 for i in range(2**16)])
    shares_V = torch.bincount(torch.tensor(tokens), minlength=50) / 2**16
    assert torch.allclose(shares_V, chances_V, rtol=0, atol=1.01 / 2**16)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("vocab", [1, 2, 1000, 50_000])
def test_no_number_reaches_a_token_of_probability_zero_or_the_end(vocab: int, seed: int) -> None:
    """Softmax sums to a little more or less than one, so the sum is no power of two and the product rounds."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = 4 * torch.randn(vocab, generator=generator)
    dropped_V = torch.rand(vocab, generator=generator) < 0.5
    dropped_V[0] = dropped_V[-1] = vocab > 2
    dropped_V[vocab // 2] = False
    chances_V = logits_V.masked_fill(dropped_V, -math.inf).softmax(-1)
    kept = (chances_V >= 2.0**-BITS).nonzero()[:, 0].tolist()
    first, *middle, last = drawn(chances_V, [0.0, 0.1, 0.5, 0.9, 1 - 2.0**-30, LAST])
    assert (first, last) == (kept[0], kept[-1])
    assert set(middle) <= set(kept)


def test_very_small_chances_are_drawn() -> None:
    """2^-40 at the front of the vocabulary: float32 sums behind it would hide it."""
    chances_V = torch.tensor([2.0**-40, 1.0])
    assert drawn(chances_V, [0.0, 2.0**-41, 2.0**-40, 2.0**-39]) == [0, 0, 1, 1]


# Alternatives.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_come_by_score_then_by_id(dtype: torch.dtype) -> None:
    logits_NV = scores(6, "tied").to(dtype)
    logits_NV[0, :5] = torch.tensor([0.0, -0.0, 0.0, -math.inf, 100.0])
    logits_NV[0, 5:] = -1.0
    got = likeliest_tokens(logits_NV, 20).tolist()
    expected = [sorted(range(VOCAB), key=lambda token, row=row: (-row[token], token))[:20] for row in logits_NV.tolist()]
    assert got == expected
    assert got[0][:5] == [4, 0, 1, 2, 5]
    assert likeliest_tokens(logits_NV, 0).shape == (6, 0)
