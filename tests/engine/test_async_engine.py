"""The asyncio front: what comes out of it is what the engine says, and nobody has to wait for anybody else."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

import fathomlm
from decode.exit_models import PROMPTS, build, exiting, mixing_threshold
from engine.holding import held
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Event, Finished, Result, TokenEvent
from fathomlm.errors import EngineStopped, OptionError, QueueFull, RequestTooLarge
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 8
LONG = 120
"""More tokens than an engine makes until it hears that nobody wants them."""
MANY = [*PROMPTS, [8, 1, 1, 70], [44, 12], [91]]
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}
T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    """What a test does in an event loop; it fails when something waits for ever."""

    async def limited() -> T:
        return await asyncio.wait_for(work, 600)

    return asyncio.run(limited())


def small(**options: Any) -> Engine:
    return Engine(build("vanilla"), **(SMALL | options))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


async def nobody_left(front: AsyncEngine) -> None:
    await until(lambda: front.status().in_flight == 0)


def nothing_is_left(engine: Engine) -> None:
    """Of an engine whose front is closed."""
    assert not engine.busy
    counters = engine.counters()
    assert (counters.queued, counters.prefilling, counters.running) == (0, 0, 0)
    assert counters.pages_used == counters.pages_cached


def told(result: Result) -> tuple[Any, ...]:
    """What does not depend on when others came: rounding does, in the last digits, so no log probabilities."""
    return result.prompt_tokens, result.tokens, result.text, result.finish, result.depths


def paired(kind: str) -> tuple[FathomForCausalLM, Exiting | None]:
    if kind == "routed":
        return model_of(routed()), None
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla")) if kind == "exits" else None
    return build("vanilla"), setting


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_streams_say_what_the_engine_says(kind: str) -> None:
    model, setting = paired(kind)
    prompts = [[token % model.architecture.vocab for token in prompt] for prompt in MANY]
    wanted = Engine(model, exiting=setting, **SMALL).generate(prompts, max_new_tokens=NEW, logprobs=2)
    engine = Engine(model, exiting=setting, **SMALL)

    async def one(front: AsyncEngine, prompt: list[int]) -> tuple[list[Event], Result | None]:
        stream = await front.submit(front.request(prompt, max_new_tokens=NEW, logprobs=2))
        return [event async for event in stream], stream.result

    async def main() -> list[tuple[list[Event], Result | None]]:
        async with AsyncEngine(engine) as front:
            return await asyncio.gather(*(one(front, prompt) for prompt in prompts))

    for (events, result), right in zip(run(main()), wanted, strict=True):
        assert result is not None
        assert told(result) == told(right)
        alone = [p.logprob for p in right.logprobs or ()]
        assert [p.logprob for p in result.logprobs or ()] == pytest.approx(alone, abs=1e-5)
        *said, last = events
        assert last == result.finish
        assert all(isinstance(event, TokenEvent) for event in said)
        assert [event.index for event in said] == list(range(len(said)))
        assert tuple(event.token for event in said) == result.tokens
        assert [(event.logprob, event.top) for event in said] == [(p.logprob, p.top) for p in result.logprobs or ()]
        assert tuple(event.depth for event in said) == (result.depths or (None,) * len(said))
        assert tuple(event.confidence for event in said) == (result.confidences or (None,) * len(said))
    nothing_is_left(engine)


def test_the_pieces_are_the_text(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stop string seemed to begin at the very end, so that text was held back, and where a text ends with an
    end token that has a text of its own."""
    free = generate(tiny_model, ["the fox"], max_new_tokens=30)[0]
    cases: list[dict[str, Any]] = [{"stop": ()}, {"stop": free.text[8:11]}, {"stop": free.text[-1] + "never"}]
    monkeypatch.setattr(tiny_model.config, "eos_token_id", free.tokens[12])
    cases += [one | {"ignore_eos": True} for one in cases]

    async def main() -> list[tuple[str, Result | None]]:
        async with AsyncEngine(Engine(tiny_model, batch_size=2, page_size=4)) as front:
            found = []
            for case in cases:
                stream = await front.submit(front.request("the fox", max_new_tokens=30, **case))
                text = "".join([event.text async for event in stream if isinstance(event, TokenEvent)])
                found.append((text, stream.result))
            return found

    for (text, result), case in zip(run(main()), cases, strict=True):
        assert result is not None
        right = generate(tiny_model, ["the fox"], max_new_tokens=30, **case)[0]
        assert (text, result.finish.reason) == (right.text, right.finish)
        assert text == result.text


@pytest.mark.parametrize("how", ["task", "loop", "generator", "stream", "id"])
def test_who_stops_listening_gives_its_pages_back(how: str) -> None:
    engine = small(max_length=128)
    wanted = small().generate(MANY, max_new_tokens=NEW)

    async def leave(front: AsyncEngine) -> None:
        request = front.request([3, 1, 4], max_new_tokens=LONG)
        if how == "task":
            begun = asyncio.Event()

            async def listen() -> None:
                async for _ in front.stream(request):
                    begun.set()

            task = asyncio.create_task(listen())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "loop":
            async for event in front.stream(request):
                if isinstance(event, TokenEvent) and event.index == 2:
                    break
        elif how == "generator":
            async with aclosing(front.stream(request)) as events:
                await anext(events)
        else:
            stream = await front.submit(request)
            events = [event async for event in _cut(stream, front, how)]
            assert events[-1] == Finished(reason="cancelled")
            assert stream.result is not None
            assert stream.result.finish.reason == "cancelled"
            assert stream.result.tokens == tuple(event.token for event in events[:-1])

    async def main() -> list[Result]:
        async with AsyncEngine(engine) as front:
            others = [asyncio.create_task(front.generate(prompt, max_new_tokens=NEW)) for prompt in MANY]
            with held(engine, after=LONG - 40):
                await leave(front)
                await until(lambda: all(one.max_new_tokens < LONG for one in list(engine._sequences.values())))
            results = await asyncio.gather(*others)
            await nobody_left(front)
            assert front.status().totals.tokens < sum(len(result.tokens) for result in wanted) + LONG
            return results

    assert [told(result) for result in run(main())] == [told(result) for result in wanted]
    nothing_is_left(engine)


async def _cut(stream: Any, front: AsyncEngine, how: str) -> Any:
    async for event in stream:
        if isinstance(event, TokenEvent) and event.index == 2:
            if how == "id":
                front.cancel(stream.request.id)
            else:
                stream.cancel()
        yield event


def test_who_is_cancelled_before_the_engine_has_answered_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    gate, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: (gate.wait(), step()))

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            first = asyncio.create_task(front.generate([5], max_new_tokens=2))
            await until(lambda: front.status().in_flight == 1)
            second = asyncio.create_task(front.generate([6], max_new_tokens=40))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            gate.set()
            await first
            await nobody_left(front)
            assert front.status().totals.tokens == 2

    run(main())
    nothing_is_left(engine)


def test_two_hundred_streams_at_once_some_of_which_are_left() -> None:
    engine = small(batch_size=16, max_length=32)
    random = Random(3)
    asked = [([random.randrange(96) for _ in range(random.randint(1, 4))], random.randint(1, 5)) for _ in range(40)]
    alone = {i: generate(build("vanilla"), [prompt], max_new_tokens=new)[0].tokens for i, (prompt, new) in enumerate(asked)}

    async def one(front: AsyncEngine, number: int) -> None:
        prompt, new = asked[number % 40]
        tokens = []
        leaves = number % 7 == 0
        async with aclosing(front.stream(front.request(prompt, max_new_tokens=new))) as events:
            async for event in events:
                if isinstance(event, Finished):
                    assert event.reason == "length"
                    assert tuple(tokens) == alone[number % 40]
                    return
                tokens.append(event.token)
                if leaves:
                    break
        assert leaves
        assert tuple(tokens) == alone[number % 40][:1]

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            await asyncio.gather(*(one(front, number) for number in range(200)))
            await nobody_left(front)
            assert front.status().totals.finished == 200

    run(main())
    nothing_is_left(engine)


def test_several_threads_each_with_a_loop_of_its_own() -> None:
    engine = small()
    wanted = [told(result) for result in small().generate(MANY, max_new_tokens=NEW)]
    front = AsyncEngine(engine)
    found: dict[int, list[Any]] = {}

    async def many() -> list[Result]:
        return await asyncio.gather(*(front.generate(prompt, max_new_tokens=NEW) for prompt in MANY))

    def work(number: int) -> None:
        found[number] = [told(result) for result in asyncio.run(many())]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert found == dict.fromkeys(range(4), wanted)
    run(front.close())
    nothing_is_left(engine)


def test_a_loop_that_was_closed_is_not_waited_for() -> None:
    engine = small(max_length=128)

    async def main() -> None:
        front = AsyncEngine(engine)

        def abandon() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(front.submit(front.request([1, 2], max_new_tokens=LONG)))
            loop.close()

        with held(engine):
            await asyncio.to_thread(abandon)
        await nobody_left(front)
        result = await front.generate([3], max_new_tokens=NEW)
        assert len(result.tokens) == NEW
        await front.close()

    run(main())
    assert engine.totals.tokens < LONG + NEW
    nothing_is_left(engine)


def test_a_slow_consumer_loses_nothing_and_holds_nobody_up() -> None:
    engine = small()

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            slow = await front.submit(front.request(MANY[0], max_new_tokens=NEW))
            await front.generate(MANY[1], max_new_tokens=NEW)
            await until(lambda: slow.result is not None)  # nobody has read a single event of it
            events = [event async for event in slow]
            assert tuple(event.token for event in events[:-1]) == slow.result.tokens
            assert [event async for event in slow] == []
            assert await slow.wait() is slow.result

    run(main())


def test_what_a_burst_brings_to_a_loop_is_one_message_with_one_time() -> None:
    async def work() -> None:
        loop, sent = asyncio.get_running_loop(), [0]
        call_soon_threadsafe = loop.call_soon_threadsafe

        def send(*given: Any) -> Any:
            sent[0] += 1
            return call_soon_threadsafe(*given)

        loop.call_soon_threadsafe = send  # type: ignore[method-assign]
        async with AsyncEngine(small()) as front:
            requests = [front.request([5, 7, id], max_new_tokens=12, ignore_eos=True) for id in range(4)]
            streams = await asyncio.gather(*map(front.submit, requests))
            await until(lambda: all(stream.result is not None for stream in streams))
            await asyncio.sleep(0.01)
            bursts = [stream.take() for stream in streams]
            steps = front.status().totals.decode_steps
        assert all(sum(map(len, [events for events, _ in one])) == 13 for one in bursts)
        times = {at for one in bursts for _, at in one}
        assert len(times) <= sent[0] <= steps + 8
        assert all([at for _, at in one] == sorted(at for _, at in one) for one in bursts)

    run(work())


def test_refusals_come_to_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small(batch_size=1, max_queue=2)
    gate, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: (gate.wait(), step()))

    async def main() -> list[Any]:
        async with AsyncEngine(engine) as front:
            first = asyncio.create_task(front.generate([7], max_new_tokens=NEW))
            await until(lambda: front.status().in_flight == 1)
            large = asyncio.create_task(front.generate([7], max_new_tokens=100))
            logs = asyncio.create_task(front.generate([7], max_new_tokens=2, logprobs=20))
            again = asyncio.create_task(front.submit(replace(front.request([7]), id=1)))
            rest = [asyncio.create_task(front.generate([7], max_new_tokens=NEW)) for _ in range(4)]
            await asyncio.sleep(0)
            gate.set()
            found = await asyncio.gather(first, large, logs, again, *rest, return_exceptions=True)
            with pytest.raises(OptionError, match="vocabulary"):
                await front.generate([96])
            with pytest.raises(OptionError, match="vocabulary"):
                await front.submit(replace(front.request([5]), prompt=(96,)))
            with pytest.raises(OptionError, match="temperature"):
                await front.generate([5], temprature=1.0)
            assert front.healthy
            return found

    first, large, logs, again, *rest = run(main())
    assert first.tokens == small().generate([[7]], max_new_tokens=NEW)[0].tokens
    assert isinstance(large, RequestTooLarge)
    assert isinstance(logs, OptionError)
    assert isinstance(again, AssertionError)  # an id that is in use is a bug of the caller's, and hurts nobody else
    assert [type(one) for one in rest] == [Result, Result, QueueFull, QueueFull]
    nothing_is_left(engine)


def test_draining_finishes_what_was_taken_and_takes_no_more() -> None:
    engine = small()

    async def main() -> list[Result]:
        front = AsyncEngine(engine)
        tasks = [asyncio.create_task(front.generate(prompt, max_new_tokens=NEW)) for prompt in MANY]
        await asyncio.sleep(0)  # each has put its request in, none has been answered
        await asyncio.gather(front.drain(), front.drain())
        assert front.status().in_flight == 0
        assert not front.accepting
        assert front.healthy
        with pytest.raises(EngineStopped, match="last requests"):
            await front.generate([1])
        results = await asyncio.gather(*tasks)
        await front.drain()
        await front.close()
        await front.drain()
        return results

    wanted = small().generate(MANY, max_new_tokens=NEW)
    assert [told(result) for result in run(main())] == [told(result) for result in wanted]
    nothing_is_left(engine)


def test_closing_cancels_what_runs_and_what_waits() -> None:
    engine = small(batch_size=2)

    async def main() -> None:
        front = AsyncEngine(engine)
        streams = [await front.submit(front.request([n], max_new_tokens=46)) for n in range(5)]
        await anext(aiter(streams[0]))
        draining = asyncio.create_task(front.drain())
        await asyncio.gather(front.close(), front.close())
        await draining
        for stream in streams[1:]:
            assert (await stream.wait()).finish == Finished(reason="cancelled")
        assert not front.healthy
        assert front.failure is None
        with pytest.raises(EngineStopped, match="closed"):
            await front.submit(front.request([1]))
        streams[1].cancel()
        front.cancel(77)
        assert front.status().in_flight == 0

    run(main())
    nothing_is_left(engine)


def test_a_step_that_fails_ends_every_request_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    wanted = small().generate(MANY, max_new_tokens=NEW)
    step = engine.step
    steps = iter(range(100))

    def failing() -> None:
        if next(steps) == 12:
            raise RuntimeError("the device is on fire")
        step()

    monkeypatch.setattr(engine, "step", failing)

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            with held(engine, after=0):
                submitted = (front.submit(front.request(p, max_new_tokens=NEW, logprobs=0)) for p in MANY)
                streams = await asyncio.gather(*submitted)
            results = await asyncio.gather(*(stream.wait() for stream in streams))
            broken = [result for result in results if result.finish.reason == "error"]
            assert 0 < len(broken) < len(results)
            assert any(result.tokens for result in broken)
            for result, right in zip(results, wanted, strict=True):
                assert result.tokens == right.tokens[: len(result.tokens)]
                assert len(result.logprobs or ()) == len(result.tokens)
            assert {result.finish.error for result in broken} == {"RuntimeError: the device is on fire"}
            assert not front.healthy
            assert not front.accepting
            assert isinstance(front.failure, RuntimeError)
            status = front.status()
            assert (status.healthy, status.failure, status.in_flight) == (False, "RuntimeError: the device is on fire", 0)
            with pytest.raises(EngineStopped, match="on fire"):
                await front.generate([1])
            await front.drain()

    run(main())


def test_requests_that_the_engine_has_not_looked_at_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    gate = threading.Event()

    def failing() -> None:
        gate.wait()
        raise RuntimeError("gone")

    monkeypatch.setattr(engine, "step", failing)

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            stream = await front.submit(front.request([1], max_new_tokens=NEW))
            late = asyncio.create_task(front.generate([2], max_new_tokens=NEW))
            await asyncio.sleep(0)
            stream.cancel()  # a broken engine is not asked to cancel anything
            gate.set()
            assert (await stream.wait()).finish == Finished(reason="error", error="RuntimeError: gone")
            with pytest.raises(EngineStopped, match="gone"):
                await late

    run(main())


def test_an_idle_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small()
    step, steps = engine.step, []
    monkeypatch.setattr(engine, "step", lambda: (steps.append(1), step()))

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            await front.generate([1, 2], max_new_tokens=2)
            await until(lambda: front.status().counters.running == 0)
            await until(lambda: bool(front._changed._waiters))  # its thread sleeps until somebody wakes it
            before = len(steps)
            await asyncio.sleep(0)
            assert len(steps) == before
            assert front._changed._waiters
            await front.generate([1, 2], max_new_tokens=2)

    run(main())


def test_status_counts() -> None:
    engine = small()

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            fresh = front.status()
            assert (fresh.accepting, fresh.healthy, fresh.failure, fresh.totals.tokens) == (True, True, None, 0)
            await asyncio.gather(*(front.generate(prompt, max_new_tokens=NEW) for prompt in MANY))
            await until(lambda: front.status().counters.running == 0)
            status = front.status()
            made = len(MANY) * NEW
            assert (status.totals.tokens, status.totals.finished, status.in_flight) == (made, len(MANY), 0)
            assert status.uptime > 0
            assert 0 < status.tokens_per_second <= 1.01 * made / min(10, status.uptime)
            assert status.counters.queued == 0

    run(main())


def test_the_examples_of_the_docs_run(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    monkeypatch.setattr(fathomlm, "load", lambda _: tiny_model, raising=False)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/engine.md", "exec"), names)
    assert len(re.findall(r"\[(?:length|eos)\]", capsys.readouterr().out)) == 2  # both streams of the last one
