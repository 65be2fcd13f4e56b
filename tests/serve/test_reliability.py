"""What happens when clients leave, when there is too much to do, and when something breaks."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

from engine.holding import held
from fathomlm.decode.full import generate
from fathomlm.engine.options import RestartPolicy
from fathomlm.serve.options import ServeOptions
from serve.serving import NAME, Running, events, running, until

pytestmark = pytest.mark.usefixtures("one_thread")

LONG: dict[str, Any] = {"prompt": "the deep water", "temperature": 0, "max_tokens": 80, "ignore_eos": True}
WORDS = ("the fox", "a fathom is", "lazy dog", "depth of the water", "six feet;", "quick")


@contextmanager
def begun(found: Running, **body: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream of which the first has come; leaving hangs up."""
    with httpx.stream("POST", f"{found.url}/v1/completions", json=LONG | {"stream": True} | body, timeout=600) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


def test_a_client_that_hangs_up_frees_its_pages(server: Running) -> None:
    made = server.engine.totals.tokens
    with held(server.engine):
        with begun(server, n=3):
            until(lambda: not server.free())  # what the front tells is a moment old
        until(lambda: not server.server.server_state.tasks)
    until(server.free)
    assert server.engine.totals.tokens - made < 3 * LONG["max_tokens"]


def test_a_client_that_hangs_up_before_a_whole_answer_frees_its_pages(tiny_model: Any) -> None:
    """The engine stands still from the third step until the server has noticed."""
    with running(tiny_model) as found:
        step, noticed, steps = found.engine.step, threading.Event(), iter(range(10**6))

        def waiting() -> None:
            assert next(steps) < 3 or noticed.wait(600)
            step()

        found.engine.step = waiting  # type: ignore[method-assign]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{found.url}/v1/completions", json=LONG | {"n": 4}, timeout=httpx.Timeout(600, read=0.15))
        until(lambda: not found.server.server_state.tasks)
        noticed.set()
        until(found.free)
        assert found.engine.totals.tokens < 4 * LONG["max_tokens"]


def test_a_full_queue_is_429_and_says_when_to_come_again(tiny_model: Any) -> None:
    with running(tiny_model, batch_size=1, max_queue=1) as busy:
        second = threading.Thread(target=busy.post, args=("completions",), kwargs=LONG | {"max_tokens": 2})
        with held(busy.engine), begun(busy):
            second.start()
            until(lambda: busy.engine.counters().queued == 1)
            for stream in (False, True):
                refused = busy.post("completions", **LONG, stream=stream)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            with pytest.raises(openai.RateLimitError) as raised:
                busy.client().completions.create(model=NAME, prompt="x")
        assert (raised.value.code, raised.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        second.join()
        assert busy.post("completions", **LONG | {"max_tokens": 2}).status_code == 200


def test_choices_that_do_not_all_fit_leave_none_behind(tiny_model: Any) -> None:
    with running(tiny_model, batch_size=1, max_queue=2) as busy:
        with held(busy.engine):
            assert busy.post("completions", **LONG, n=8).status_code == 429
        assert busy.post("completions", **LONG | {"max_tokens": 2}).status_code == 200  # it comes last, in one row
        assert busy.engine.totals.tokens < LONG["max_tokens"]
        until(busy.free)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_not_take_for_ever(tiny_model: Any, stream: bool) -> None:
    with running(tiny_model, ServeOptions(timeout=0.1)) as hasty:
        with held(hasty.engine):
            response = hasty.post("completions", **LONG, n=4, stream=stream)
        if stream and response.status_code == 200:  # it began in time
            *_, error, done = events(response)
            assert (error["error"]["code"], done) == ("timeout", "[DONE]")
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        until(hasty.free)
        assert hasty.engine.totals.tokens < 4 * LONG["max_tokens"]


def broken() -> None:
    raise RuntimeError("the device is gone: secret detail")


def test_a_broken_engine_fails_its_requests_and_turns_ready_red(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where it may not be built again."""
    with (
        running(tiny_model, restarts=RestartPolicy(max_restarts=0)) as fragile,
        held(fragile.engine),
        begun(fragile, n=2) as lines,
    ):
        fragile.engine.step = broken  # type: ignore[method-assign]
        told = list(lines)
        assert '"code":"engine_error"' in told[-2]
        assert "secret" not in "".join(told)
        ready = fragile.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        assert fragile.http.get("/health").status_code == 200
        later = fragile.post("completions", **LONG)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "failed")
        assert "secret detail" in fragile.http.get("/v1/fathom/status").json()["failure"]
    (told_once,) = [record for record in caplog.records if record.getMessage() == "engine failed"]
    assert told_once.exc_info is not None
    assert "secret detail" in str(told_once.exc_info[1])


def test_a_broken_engine_is_a_500_to_a_whole_answer(tiny_model: Any) -> None:
    with running(tiny_model) as fragile:
        fragile.engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError) as raised:
            fragile.client().completions.create(model=NAME, prompt="x")
        assert (raised.value.status_code, raised.value.type) == (500, "server_error")


def read_to_the_end(stream: Iterator[Any]) -> None:
    """Where there must be none; says what came if there is."""
    told = list(stream)
    pytest.fail(f"the stream ended without an error, after {told}")


def test_the_client_library_raises_what_breaks_a_stream(tiny_model: Any) -> None:
    with running(tiny_model) as fragile, held(fragile.engine):
        stream = iter(fragile.client().completions.create(model=NAME, stream=True, **_openai(LONG)))
        next(stream)
        fragile.engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(openai.APIError):
            read_to_the_end(stream)


def _openai(body: dict[str, Any]) -> dict[str, Any]:
    """The client library does not know `ignore_eos`. Without it a text may end before what a test waits for."""
    known = {name: value for name, value in body.items() if name != "ignore_eos"}
    return known | {"extra_body": {"ignore_eos": body["ignore_eos"]}}


def test_draining_finishes_what_runs_and_refuses_what_comes(tiny_model: Any) -> None:
    right = generate(tiny_model, [LONG["prompt"]], max_new_tokens=80, ignore_eos=True)[0].text
    with running(tiny_model) as ending:
        with held(ending.engine) as goes_on, begun(ending) as lines:
            _call(ending, ending.server.end)
            until(lambda: ending.service.phase == "draining")
            assert ending.http.get("/ready").status_code == 503
            assert ending.post("completions", **LONG).status_code == 503
            goes_on.set()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        told = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in rest[:-1])
        assert len(told) > len(right) / 2
        assert right.endswith(told)
        until(lambda: ending.server.should_exit)


def test_draining_has_an_end(tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(drain_timeout=0.05)) as ending:
        with held(ending.engine), begun(ending, n=4) as lines:
            _call(ending, ending.server.end)
            rest = list(lines)
        assert '"code":"draining"' in rest[-2]
        until(lambda: ending.server.should_exit)


def test_a_second_signal_does_not_wait(tiny_model: Any) -> None:
    with running(tiny_model) as ending:
        with held(ending.engine), begun(ending):
            for _ in range(2):
                assert ending.thread.is_alive()
                _call(ending, ending.server.end)
                until(lambda: ending.service.phase == "draining")
            ending.thread.join(600)  # the text would never end
            assert not ending.thread.is_alive()
            assert ending.server.force_exit
        asyncio.run(ending.service.close())  # what the end of the process would do


def _call(found: Running, work: Any) -> None:
    """In the server's event loop."""
    found.server.servers[0].get_loop().call_soon_threadsafe(work)


def ask_and_leave(url: str, number: int, rights: dict[str, str], goes_on: Callable[[int], bool]) -> list[bool]:
    """One client that asks again and again, and hangs up now and then. Says which texts it heard to the end."""
    random = Random(number)
    ended: list[bool] = []
    with httpx.Client(base_url=url, timeout=600) as http:
        while goes_on(len(ended)):
            word, patience = random.choice(WORDS), random.choice((1, 3, 5, 10**9, 10**9))
            body = {"prompt": word, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "n": random.choice((1, 1, 2))}
            ended.append(_listen(http, body, rights[word], patience))
    return ended


def references(model: Any) -> dict[str, str]:
    return {word: generate(model, [word], max_new_tokens=12, ignore_eos=True)[0].text for word in WORDS}


def test_many_clients_that_come_and_go_get_their_own_texts(tiny_model: Any) -> None:
    """Small pools, so that texts are put aside and read again meanwhile."""
    rights = references(tiny_model)
    with running(tiny_model, batch_size=8, memory=60_000) as crowd:
        with ThreadPoolExecutor(24) as pool:
            told = pool.map(lambda number: ask_and_leave(crowd.url, number, rights, lambda done: done < 3), range(24))
            ended = [one for each in told for one in each]
        until(crowd.free)
        status = crowd.http.get("/v1/fathom/status").json()
    assert (status["in_flight"], status["queued"]) == (0, 0)
    assert 0 < sum(ended) < len(ended)  # some stayed to the end, some did not


@pytest.mark.slow
def test_two_hundred_clients_for_a_minute_leave_memory_flat(tiny_model: Any) -> None:
    rights = references(tiny_model)
    ends = time.monotonic() + 60
    sizes = []
    with running(tiny_model, batch_size=16, memory=200_000, max_queue=1000) as crowd:
        with ThreadPoolExecutor(200) as pool:
            told = [
                pool.submit(ask_and_leave, crowd.url, number, rights, lambda _: time.monotonic() < ends)
                for number in range(200)
            ]
            while time.monotonic() < ends:
                time.sleep(1)
                sizes.append(resident_bytes())
            assert sum(len(one.result()) for one in told) > 200
        until(crowd.free)
    assert max(sizes[-10:]) - max(sizes[20:30]) < 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _listen(http: httpx.Client, body: dict[str, Any], right: str, patience: int) -> bool:
    """Read so many chunks; whatever came is the beginning of the right text, and all of it where the end was seen."""
    texts = [""] * body["n"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                assert texts == [right] * body["n"]
                return True
            if line:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["text"]
                assert right.startswith(texts[choice["index"]])
                patience -= 1
                if patience == 0:
                    return False
    raise AssertionError("the stream broke off")
