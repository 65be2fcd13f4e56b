"""The filters against transformers' logits processors of the same names, and the checks on what users ask for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fathomlm.decode import logits as ours
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError

ROWS, VOCAB = 5, 101
TOKENS_BS = torch.randint(0, VOCAB, (ROWS, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


def seen() -> torch.Tensor:
    return torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter(1, TOKENS_BS, True)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_transformers(logits: torch.Tensor, penalty: float) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(TOKENS_BS, logits.clone())
    assert not torch.equal(expected, logits)
    assert torch.equal(ours.penalise_repetition(logits, seen(), penalty), expected)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature_is_transformers(logits: torch.Tensor, temperature: float) -> None:
    expected = TemperatureLogitsWarper(temperature)(TOKENS_BS, logits)
    assert torch.equal(ours.apply_temperature(logits, temperature), expected)


@pytest.mark.parametrize("k", [1, 7, VOCAB, 10 * VOCAB])
def test_top_k_is_transformers(logits: torch.Tensor, k: int) -> None:
    logits[0, :4] = logits[0].max() + 1  # a tie across the k-th place
    assert torch.equal(ours.keep_top_k(logits, k), TopKLogitsWarper(k)(TOKENS_BS, logits))


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_is_transformers(logits: torch.Tensor, p: float) -> None:
    assert torch.equal(ours.keep_top_p(logits, p), TopPLogitsWarper(p)(TOKENS_BS, logits))


@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
def test_min_p_is_transformers(logits: torch.Tensor, p: float) -> None:
    assert torch.equal(ours.keep_min_p(logits, p), MinPLogitsWarper(p)(TOKENS_BS, logits))


FILTERS = {
    "temperature": lambda x: ours.apply_temperature(x, 0.7),
    "top_k": lambda x: ours.keep_top_k(x, 9),
    "top_p": lambda x: ours.keep_top_p(x, 0.8),
    "min_p": lambda x: ours.keep_min_p(x, 0.1),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_row_alone_is_a_row_of_a_batch(logits: torch.Tensor, name: str) -> None:
    before = logits.clone()
    together = FILTERS[name](logits)
    for row, expected in zip(logits, together, strict=True):
        assert torch.equal(FILTERS[name](row), expected)
    assert torch.equal(logits, before), "a filter returns a new tensor"


def test_order_is_transformers(logits: torch.Tensor) -> None:
    """Each filter sees what the one before has left, so another order keeps other tokens."""
    chain = [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.2)]
    expected = LogitsProcessorList(chain)(TOKENS_BS, logits).softmax(-1)
    got = ours.filter_logits(logits, Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.2)).softmax(-1)
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(got > 0, expected > 0)


def test_greedy_heeds_the_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    said = torch.tensor([[True, False, False]])
    assert ours.pick(logits, Sampling()).tolist() == [0]
    assert ours.pick(logits, Sampling(repetition_penalty=1.5), seen_BV=said).tolist() == [1]


def test_a_row_does_not_depend_on_its_neighbours(logits: torch.Tensor) -> None:
    settings = Sampling(temperature=1.0, seed=3)
    device = torch.device("cpu")

    def draw(rows: torch.Tensor) -> list[list[int]]:
        generators = ours.row_generators(settings, len(rows), device)
        return [ours.pick(rows, settings, generators).tolist() for _ in range(6)]

    together = draw(logits)
    for i in range(ROWS):
        assert [drawn[i] for drawn in together] == [drawn[0] for drawn in draw(logits[i : i + 1])]
    assert len({tuple(drawn) for drawn in together}) > 1, "draws must differ from step to step"


def test_without_a_seed_rows_differ() -> None:
    settings = Sampling(temperature=1.0)
    flat = torch.zeros(2, 10_000)
    generators = ours.row_generators(settings, 2, torch.device("cpu"))
    drawn = torch.stack([ours.pick(flat, settings, generators) for _ in range(4)])
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_frequencies_follow_the_probabilities() -> None:
    settings = Sampling(temperature=0.5, seed=0)
    generators = ours.row_generators(settings, 1, torch.device("cpu"))
    logits = torch.tensor([[0.0, 0.5, 1.0]])
    counts = torch.zeros(3)
    for _ in range(4000):
        counts[int(ours.pick(logits, settings, generators))] += 1
    assert torch.allclose(counts / 4000, (logits[0] / 0.5).softmax(-1), atol=0.03)


@pytest.mark.parametrize("temperature", [1e-6, 1e30])
def test_extreme_temperatures_still_give_tokens(temperature: float) -> None:
    settings = Sampling(temperature=temperature, seed=0, top_p=0.9, min_p=0.1)
    logits = 1e4 * torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    token = int(ours.pick(logits, settings, ours.row_generators(settings, 1, torch.device("cpu"))))
    assert 0 <= token < 50
    if temperature < 1:
        assert token == int(logits.argmax())


def test_prompt_tokens_are_seen_and_padding_is_not() -> None:
    said = ours.seen_tokens(Sampling(repetition_penalty=2.0), [[3, 4, 4], [1]], 6, torch.device("cpu"))
    assert said is not None
    assert said.int().tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert ours.seen_tokens(Sampling(), [[3]], 6, torch.device("cpu")) is None


BAD: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("temperature", -1.0),
    ("temperature", 1e-9),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop", 3),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x))
def test_a_bad_value_is_named_with_its_rule(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"^{name} must be .+, got ") as raised:
        Sampling(**{name: value})
    shown = (repr(value), repr((value,)), *map(repr, value if isinstance(value, tuple) else ()))
    assert any(each in str(raised.value) for each in shown)


def test_stop_may_be_one_string_or_a_list() -> None:
    assert Sampling(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_unknown_options_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"unknown sampling option 'top_q' \(did you mean 'top_p'\?\)"):
        Sampling().with_options(top_q=0.5)
    assert Sampling(top_k=3).with_options(top_p=0.5) == Sampling(top_k=3, top_p=0.5)
