"""What may be asked of the engine, and what its answers say of themselves."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest

from fathomlm.decode.sampling import Sampling
from fathomlm.engine.request import Finished, Request, Result, TokenEvent, TokenLogprobs
from fathomlm.errors import OptionError


def test_defaults_are_the_reference_decoders() -> None:
    before = time.perf_counter()
    request = Request(id=4, prompt=(1, 2))
    assert before <= request.arrival <= time.perf_counter()
    assert request.sampling == Sampling()
    assert (request.logprobs, request.max_depth, request.penalised) == (None, None, False)


BAD: list[tuple[str, Any]] = [
    ("id", "seven"),
    ("id", True),
    ("prompt", ()),
    ("prompt", (1, -2)),
    ("prompt", (1, 2.0)),
    ("prompt", "text"),
    ("prompt", 3),
    ("sampling", None),
    ("sampling", {"top_k": 3}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", 1.0),
    ("logprobs", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "much"),
    ("max_depth", 0),
    ("max_depth", 1.0),
    ("arrival", math.nan),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: repr(x))
def test_a_bad_value_is_named_with_its_rule(name: str, value: object) -> None:
    given: dict[str, Any] = {"id": 0, "prompt": (1,), name: value}
    with pytest.raises(OptionError, match=rf"^{name} must be .+, got "):
        Request(**given)


@pytest.mark.parametrize("logprobs", [None, 0, 20])
@pytest.mark.parametrize("penalty", [-2, 0, 2.0])
def test_the_ends_of_the_ranges_are_fine(logprobs: int | None, penalty: float) -> None:
    request = Request(id=0, prompt=[5], logprobs=logprobs, presence_penalty=penalty, max_depth=1)  # type: ignore[arg-type]
    assert request.prompt == (5,)
    assert request.penalised == (penalty != 0)


def test_any_penalty_makes_a_request_penalised() -> None:
    assert Request(id=0, prompt=(1,), frequency_penalty=0.1).penalised
    assert Request(id=0, prompt=(1,), sampling=Sampling(repetition_penalty=0.9)).penalised


def test_biases_are_of_token_ids_and_bounded() -> None:
    assert Request(id=1, prompt=(1,), logit_bias={5: -100.0}).biased
    assert not Request(id=1, prompt=(1,)).biased
    for wrong in ({5: 101.0}, {-1: 1.0}, {"5": 1.0}, {5: True}, {5: float("nan")}, [5]):
        with pytest.raises(OptionError, match=r"^logit_bias must be token ids"):
            Request(id=1, prompt=(1,), logit_bias=wrong)  # type: ignore[arg-type]


def test_a_seed_is_kept_or_drawn_once() -> None:
    seeded = [Request(id=i, prompt=(1,), sampling=Sampling(seed=0), arrival=1.0) for i in (1, 1)]
    assert seeded[0].seed == seeded[1].seed == 0
    free = [Request(id=1, prompt=(1,), arrival=1.0) for _ in range(20)]
    assert len({request.seed for request in free}) == 20
    assert all(0 <= request.seed < 2**63 for request in free)
    assert free[0] == free[1], "two requests that ask the same are equal"
    with pytest.raises(dataclasses.FrozenInstanceError):
        free[0].seed = 1  # type: ignore[misc]


def test_an_error_has_a_message_and_nothing_else_has() -> None:
    assert Finished(reason="error", error="scores were not numbers").error
    assert Finished(reason="cancelled").error is None
    with pytest.raises(AssertionError):
        Finished(reason="error")
    with pytest.raises(AssertionError):
        Finished(reason="stop", error="why")


def result(tokens: int, *times: float) -> Result:
    return Result(
        id=1,
        prompt_tokens=(1, 2),
        tokens=tuple(range(tokens)),
        text="",
        finish=Finished(reason="length"),
        **dict(zip(("arrival", "first_token_time", "last_token_time"), times, strict=False)),
    )


def test_times_come_from_the_clock() -> None:
    whole = result(5, 10.0, 10.5, 12.5)
    assert whole.time_to_first_token == 0.5
    assert whole.mean_inter_token_time == 0.5
    one = result(1, 10.0, 11.0, 11.0)
    assert (one.time_to_first_token, one.mean_inter_token_time) == (1.0, None)
    none = result(0, 10.0)
    assert (none.time_to_first_token, none.mean_inter_token_time) == (None, None)


def test_events_and_log_probabilities_say_nothing_that_was_not_asked() -> None:
    event = TokenEvent(token=3, text="a", index=0)
    assert (event.logprob, event.top, event.depth, event.confidence) == (None, (), None, None)
    assert TokenLogprobs(logprob=-0.5).top == ()
