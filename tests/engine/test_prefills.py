"""A pass over prompts is confirmed behind the start of the next one, where there is one and pages are plenty."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest

from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.engine.engine import Engine
from fathomlm.engine.prefills import Prefills
from fathomlm.engine.request import Request, Result
from fathomlm.engine.runner import PrefilledEntries
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import LLAMA, model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 5
MEMORY = 1 << 21
"""Pages for every sequence, and more."""
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 13, "max_length": 48, "memory": MEMORY}
BURSTS: list[dict[str, Any]] = [{"burst": 1, "lag": 0}, {"burst": 3, "lag": 0}, {"burst": 2, "lag": 1}]


@cache
def model() -> FathomForCausalLM:
    return model_of(routed("expert", "cache", "middle"), None, LLAMA)


def requests(many: int = 14) -> list[Request]:
    random = Random(0)
    lengths = [random.choice((1, random.randrange(2, 40), random.randrange(2, 40))) for _ in range(many)]
    prompts = [tuple(random.randrange(1, LLAMA.vocab) for _ in range(length)) for length in lengths]
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    return [Request(id=number, prompt=prompt, sampling=sampling) for number, prompt in enumerate(prompts, 1)]


def expected(one: Request) -> tuple[int, ...]:
    (result,) = generate(model(), [one.prompt], Sampling(max_new_tokens=NEW, ignore_eos=True))
    return tuple(result.tokens)


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who has ended, each with an entry of the first table for every token but the last, which was never run."""
    ended, finish = [], engine.scheduler.finish

    def checked(id: int) -> None:
        sequence = engine._sequences[id]
        if sequence.state == "running" and len(sequence.tokens) == NEW:
            assert sequence.entries[0] == sequence.length - 1
            ended.append(id)
        finish(id)

    monkeypatch.setattr(engine.scheduler, "finish", checked)
    return ended


def run(engine: Engine, asked: list[Request]) -> tuple[list[Result], int]:
    """What they gave, and how many passes were begun while the one before was unconfirmed."""
    sequences, unconfirmed, prefill = [engine.submit(one) for one in asked], 0, engine.runner.prefill

    def begun(*given: Any) -> PrefilledEntries:
        nonlocal unconfirmed
        unconfirmed += engine._prefills._unconfirmed is not None
        return prefill(*given)

    engine.runner.prefill = begun  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    results = [sequence.result for sequence in sequences]
    assert all(result is not None for result in results)
    return [result for result in results if result is not None], unconfirmed


@pytest.mark.quick
@pytest.mark.parametrize("burst", BURSTS, ids=str)
def test_a_pass_waits_for_the_next_one(burst: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model(), **SMALL, **burst)
    ended = counted(engine, monkeypatch)
    results, unconfirmed = run(engine, requests())
    assert unconfirmed >= 5 if burst["lag"] else unconfirmed == 0  # without lag what runs is collected before the next pass
    assert [result.tokens for result in results] == [expected(one) for one in requests()]
    assert sorted(ended) == [one.id for one in requests()]
    assert engine.totals.prefill_tokens == sum(len(one.prompt) - 1 for one in requests())
    engine.scheduler.page_manager.prefixes.clear()
    assert all(pool.used == 0 for pool in engine.scheduler.page_manager.pools)


def test_none_waits_where_pages_are_scarce() -> None:
    """Unconfirmed tokens count in every table: where a page is missing for that, another sequence would have to go."""
    scarce = Engine(model(), **SMALL | {"memory": None})  # a quarter of what they may need, see conftest
    results, unconfirmed = run(scarce, requests())
    assert unconfirmed == 0
    assert [result.tokens for result in results] == [expected(one) for one in requests()]


def test_none_waits_where_the_next_prompt_begins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds in the prefix cache what the pass before it left, as where every pass is confirmed at once."""
    prompts = [tuple(range(first, first + 13)) for first in (40, 1, 1, 1, 20, 45, 30, 20)]
    sampling = Sampling(max_new_tokens=9, ignore_eos=True)
    found = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(Prefills, "_may_wait", lambda prefills, done: False)
        engine = Engine(model(), **SMALL | {"prefill_chunk": 12, "lag": 1})  # a chunk is a prompt
        asked = [Request(id=number, prompt=prompt, sampling=sampling) for number, prompt in enumerate(prompts, 1)]
        results, unconfirmed = run(engine, asked)
        found.append((engine.counters().prefix_hits, engine.totals.prefill_tokens, [result.tokens for result in results]))
        assert bool(unconfirmed) == waits
    assert found[0] == found[1]
    assert found[0][0] == 3 * 12


def test_a_prompt_that_arrives_finds_what_an_unconfirmed_pass_leaves() -> None:
    """Where it may be placed with the next pass, although it was not there when that one was started."""
    engine = Engine(model(), **SMALL | {"prefill_chunk": 24, "max_sequences": 8, "lag": 1})

    def ask(id: int, prompt: range, new: int = 2) -> None:
        engine.submit(Request(id=id, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=new, ignore_eos=True)))

    ask(1, range(30, 43), 20)
    engine.step()
    engine.step()
    ask(2, range(1, 26))
    ask(3, range(45, 50))
    engine.step()
    ask(4, range(1, 26))
    while engine.busy:
        engine.step()
    assert engine.counters().prefix_hits == 24


def test_passes_wait_where_all_prompts_begin_with_what_is_cached() -> None:
    """Such as a system prompt: nobody waits for the rest."""
    engine, random = Engine(model(), **SMALL | {"prefill_chunk": 24, "max_sequences": 8, "lag": 1}), Random(1)
    prompts = [(7, 8, 9, 10, 11, 12, 13, 14, *(random.randrange(60) for _ in range(11))) for _ in range(40)]
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    _, unconfirmed = run(
        engine, [Request(id=number, prompt=prompt, sampling=sampling) for number, prompt in enumerate(prompts)]
    )
    assert unconfirmed >= 10
    assert engine.counters().prefix_hits >= 38 * 8


def test_decoding_begins_before_the_next_prompt_where_nobody_runs() -> None:
    """Else the first token would wait for a prompt of somebody else."""
    sampling = Sampling(max_new_tokens=3, ignore_eos=True)
    engine = Engine(model(), **SMALL)
    one, other = (
        engine.submit(Request(id=number, prompt=prompt, sampling=sampling))
        for number, prompt in ((1, tuple(range(1, 10))), (2, tuple(range(20, 59))))
    )
    engine.step()
    assert (one.state, other.state, engine.totals.decode_steps) == ("running", "prefilling", 1)


def test_a_plain_model_has_nothing_to_wait_for() -> None:
    plain = model_of(DepthPlan.vanilla(2), None, LLAMA)
    _, unconfirmed = run(Engine(plain, **SMALL), requests())
    assert unconfirmed == 0


@pytest.mark.parametrize("burst", BURSTS, ids=str)
def test_who_leaves_before_the_pass_is_confirmed_leaves_nothing(
    burst: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot may have another sequence by then, here one that has nothing to prefill."""
    engine = Engine(model(), **SMALL, **burst)
    asked = sorted(requests(20), key=lambda one: len(one.prompt), reverse=True)
    ended = counted(engine, monkeypatch)
    sequences = [engine.submit(one) for one in asked]
    cancelled = set()
    while engine.busy:
        engine.step()
        done, waiting = engine._prefills._unconfirmed, engine.scheduler.waiting
        if done is not None and waiting and (len(cancelled) < 2 or len(waiting[0].prompt) == 1):
            cancelled.add(done.sequences[-1].id)
            engine.cancel(done.sequences[-1].id)
    assert len(cancelled) >= 3
    assert sorted(ended) == sorted(one.id for one in asked if one.id not in cancelled)
    for sequence, one in zip(sequences, asked, strict=True):
        assert sequence.result is not None
        if one.id in cancelled:
            assert sequence.result.finish.reason == "cancelled"
        else:
            assert sequence.result.tokens == expected(one)
    engine.scheduler.page_manager.prefixes.clear()
    assert all(pool.used == 0 for pool in engine.scheduler.page_manager.pools)
