"""An engine that breaks is built again, so often and no more."""

from __future__ import annotations

import asyncio
import threading
import traceback
import weakref
from typing import Any

import pytest

from engine.holding import held
from fathomlm.engine import restarts
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import RestartPolicy
from fathomlm.engine.restarts import Blueprint, RestartBudget
from fathomlm.errors import EngineStopped, OptionError
from serve.serving import NAME, Running, running, until
from serve.test_http import samples
from serve.test_reliability import LONG, begun, broken

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = LONG | {"max_tokens": 4}


def engine_threads() -> int:
    return sum(thread.name == "fathomlm-engine" for thread in threading.enumerate())


def fail(found: Running) -> None:
    """Break the engine that runs now, in the middle of a text."""
    engine = found.service.served.engine._engine  # type: ignore[union-attr]
    with held(engine), begun(found, n=2) as lines:
        engine.step = broken  # type: ignore[method-assign]
        told = list(lines)
    assert '"code":"engine_error"' in told[-2]


def test_after_a_failure_the_next_request_succeeds(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny_model) as fragile:
        right = fragile.post("completions", **SHORT).json()["choices"][0]["text"]
        threads = engine_threads()
        fail(fragile)
        until(lambda: fragile.http.get("/ready").status_code == 200)
        before = samples(fragile)
        assert before["fathomlm_engine_restarts_total", ()] == 1
        assert before["fathomlm_tokens_total", ()] >= 4  # goes on, and does not count the token that proved the new engine
        assert fragile.post("completions", **SHORT).json()["choices"][0]["text"] == right
        until(lambda: samples(fragile)["fathomlm_tokens_total", ()] == before["fathomlm_tokens_total", ()] + 4)
        until(fragile.free)
        assert engine_threads() == threads
        status = fragile.http.get("/v1/fathom/status").json()
        assert (status["status"], status["restarts"], status["failure"]) == ("ready", 1, None)
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == [
        "engine failed", "engine restarted"
    ]  # fmt: skip


def test_while_it_is_built_again_requests_are_sent_away(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, build = threading.Event(), Blueprint.build

    def slowly(self: Blueprint, totals: Any) -> Engine:
        assert wait.wait(600)
        return build(self, totals)

    monkeypatch.setattr(Blueprint, "build", slowly)
    with running(tiny_model) as fragile:
        fail(fragile)
        ready, refused = fragile.http.get("/ready"), fragile.post("completions", **SHORT)
        status = fragile.http.get("/v1/fathom/status").json()
        wait.set()
        assert (ready.status_code, ready.json()) == (503, {"status": "restarting"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
        assert refused.headers["retry-after"] == "1"
        assert (status["status"], status["running"], status["kv"][0]["used"]) == ("restarting", 0, 0)
        until(lambda: fragile.post("completions", **SHORT).status_code == 200)


def test_an_engine_that_breaks_again_and_again_stays_down(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny_model, restarts=RestartPolicy(max_restarts=2)) as fragile:
        for count in (1, 2):
            fail(fragile)
            until(lambda: fragile.http.get("/ready").status_code == 200)
            assert fragile.http.get("/v1/fathom/status").json()["restarts"] == count
        fail(fragile)
        ready = fragile.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        assert fragile.post("completions", **SHORT).json()["error"]["code"] == "failed"
        assert samples(fragile)["fathomlm_ready", ()] == 0
    failed = [record.fields for record in caplog.records if record.getMessage() == "engine failed"]  # type: ignore[attr-defined]
    assert [fields["restarting"] for fields in failed] == [True, True, False]


def test_an_engine_that_cannot_be_built_again_is_down_for_good(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def never(self: Engine, *_: object, **__: object) -> None:
        tries.append(1)
        raise RuntimeError("the device is gone")

    with running(tiny_model, restarts=RestartPolicy(max_restarts=3)) as fragile:
        monkeypatch.setattr(Engine, "generate", never)  # the token that a new engine has to make
        fail(fragile)
        until(lambda: fragile.service.phase == "failed")
        assert len(tries) == 3
        assert samples(fragile)["fathomlm_engine_restarts_total", ()] == 0


def test_a_broken_engine_leaves_nothing_behind(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool has to be gone before the next one is made, or a device would have to hold both. Whoever keeps the error, as
    logs may, does not keep the engine."""
    sizes: dict[str, Any] = {"batch_size": 2, "page_size": 4, "max_length": 96}
    alive: list[bool] = []
    errors: list[BaseException] = []

    async def main() -> None:
        engine = Engine(tiny_model, **sizes)
        pool, engine_of = weakref.ref(engine.runner.pages), weakref.ref(engine)

        def breaking() -> None:
            held = engine_of()  # what a frame of the traceback holds
            assert held is not None
            raise RuntimeError("gone")

        def build(*arguments: Any, **options: Any) -> Engine:
            alive.append(pool() is not None)
            return Engine(*arguments, **options)

        monkeypatch.setattr(restarts, "Engine", build)
        front = AsyncEngine(engine, RestartPolicy(), on_failure=lambda error, _: errors.append(error))
        engine.step = breaking  # type: ignore[method-assign]
        del engine
        result = await front.generate("the fox", max_new_tokens=4)
        assert (result.finish.reason, result.finish.error) == ("error", "RuntimeError: gone")
        while not front.accepting:
            await asyncio.sleep(0.002)
        assert alive == [False]
        assert "in breaking" in "".join(traceback.format_exception(errors[0]))
        good = await front.generate("the fox", max_new_tokens=4)
        assert (good.finish.reason, good.id) == ("length", result.id + 1)
        counters = front.status().counters
        assert counters.pages_used == counters.pages_cached
        await front.close()

    threads = engine_threads()
    asyncio.run(asyncio.wait_for(main(), 600))
    assert engine_threads() == threads


def test_an_engine_that_breaks_while_it_drains_is_not_built_again(tiny_model: Any) -> None:
    async def main() -> None:
        engine = Engine(tiny_model, batch_size=2, page_size=4, max_length=96)
        front = AsyncEngine(engine, RestartPolicy())
        with held(engine):
            stream = await front.submit(front.request("the fox", max_new_tokens=80, ignore_eos=True))
            draining = asyncio.create_task(front.drain())
            await asyncio.sleep(0)
            engine.step = broken  # type: ignore[method-assign]
            assert (await stream.wait()).finish.reason == "error"
        await draining
        assert (front.restarting, front.status().restarts, front.healthy) == (False, 0, False)
        with pytest.raises(EngineStopped):
            await front.submit(front.request("the fox"))
        await front.close()

    asyncio.run(asyncio.wait_for(main(), 600))


def test_old_restarts_are_forgotten() -> None:
    left = RestartBudget(RestartPolicy(max_restarts=2, restart_window=60))
    assert [left.take(now) for now in (0, 10, 20, 59, 61, 62, 71)] == [True, True, False, False, True, False, True]
    assert not RestartBudget(RestartPolicy(max_restarts=0)).take(0)


@pytest.mark.parametrize(
    "wrong", [{"max_restarts": -1}, {"max_restarts": True}, {"restart_window": 0}, {"restart_window": float("nan")}], ids=str
)
def test_limits_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        RestartPolicy(**wrong)


def test_clients_try_again_by_themselves(tiny_model: Any) -> None:
    """OpenAI's client comes back after a 500 and a 503, so that its user hears nothing of a failure."""
    with running(tiny_model) as fragile:
        fragile.engine.step = broken  # type: ignore[method-assign]
        reply = fragile.client(max_retries=4).completions.create(model=NAME, prompt="the fox", max_tokens=4, temperature=0)
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 4
