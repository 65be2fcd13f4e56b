"""Several models at one address: what is listed, loaded on demand, shared, refused and unloaded."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from functools import partial
from typing import Any

import pytest

from fathomlm.engine.engine import Engine
from fathomlm.engine.heap import settle_heap
from fathomlm.errors import FathomError, ModelNotFound, OptionError
from fathomlm.serve.served_model import ServedModel, serve_model
from fathomlm.serve.service import Catalog, Offer
from serve.serving import NAME, SMALL, Running, events, running, until

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED: dict[str, Any] = {"prompt": "the fox", "max_tokens": 3, "temperature": 0}


class Loader:
    """Counts how often each model is loaded, and fails or waits where it is told to."""

    def __init__(self, model: Any) -> None:
        self.model, self.loads, self.failure = model, [], None  # type: ignore[var-annotated]
        self.go = threading.Event()
        self.go.set()

    def __call__(self, name: str) -> ServedModel:
        self.loads.append(name)
        assert self.go.wait(60)
        if self.failure is not None:
            raise self.failure
        return serve_model(Engine(self.model, **SMALL), name=name)

    def catalog(self, *names: str, most: int = 2) -> Catalog:
        return Catalog({name: Offer(load=partial(self, name), download=lambda: 93) for name in names}, most)


@pytest.fixture
def plain(tiny_model: Any) -> Any:
    """The tiny model without a chat template."""
    found = copy(tiny_model)
    found.tokenizer = deepcopy(tiny_model.tokenizer)
    found.tokenizer.chat_template = None
    return found


def records(server: Running) -> dict[str, Any]:
    return {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_when_a_request_names_it(tiny_model: Any, plain: Any) -> None:
    loader = Loader(plain)
    with running(tiny_model, catalog=loader.catalog("plain")) as server:
        before = records(server)
        assert (before[NAME]["loaded"], before[NAME]["endpoints"]) == (True, ["/v1/completions", "/v1/chat/completions"])
        unloaded = before["plain"]
        assert (unloaded["loaded"], unloaded["endpoints"], unloaded["download"]) == (False, None, 93)
        assert server.http.get("/v1/fathom/status", params={"model": "plain"}).json()["status"] == "not loaded"
        assert loader.loads == []
        own, other = (server.post("completions", **ASKED, model=name).json() for name in (NAME, "plain"))
        assert (own["model"], other["model"], loader.loads) == (NAME, "plain", ["plain"])
        assert own["choices"][0]["text"] == other["choices"][0]["text"]
        after = server.http.get("/v1/models/plain").json()
        assert (after["loaded"], after["endpoints"], after["download"]) == (True, ["/v1/completions"], None)
        assert server.http.get("/v1/fathom/status", params={"model": "plain"}).json()["totals"]["tokens"] == 3
        refused = server.post("chat/completions", messages=[{"role": "user", "content": "hi"}], model="plain")
        message = f"plain has no chat template; use /v1/completions, or another model: {NAME}"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)
        streamed = events(server.post("completions", **ASKED, model="plain", stream=True))
        assert {each["model"] for each in streamed[:-1]} == {"plain"}
        samples = server.http.get("/metrics").text
        assert 'fathomlm_tokens_total{model="plain"} 6.0' in samples
        assert f'fathomlm_tokens_total{{model="{NAME}"}} 3.0' in samples
        assert samples.count("# TYPE fathomlm_tokens_total ") == 1


def test_an_unknown_name_is_told_the_known_ones(tiny_model: Any) -> None:
    with running(tiny_model, catalog=Loader(tiny_model).catalog("other")) as server:
        for response in (
            server.post("completions", **ASKED, model="othr"), server.http.get("/v1/models/othr"),
            server.post("fathom/load", model="othr"), server.http.get("/v1/fathom/status", params={"model": "othr"}),
        ):  # fmt: skip
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
            assert "did you mean 'other'" in response.json()["error"]["message"]


def test_requests_wait_for_one_loading_and_others_do_not(tiny_model: Any) -> None:
    loader = Loader(tiny_model)
    loader.go.clear()
    with running(tiny_model, catalog=loader.catalog("slow")) as server, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(server.post, "completions", **ASKED, model="slow") for _ in range(3)]
        until(lambda: loader.loads == ["slow"])
        assert server.http.get("/v1/fathom/status", params={"model": "slow"}).json()["status"] == "loading"
        assert server.post("completions", **ASKED).status_code == 200
        loader.go.set()
        assert [each.result(60).status_code for each in waiting] == [200] * 3
        assert loader.loads == ["slow"]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ModelNotFound("the package index cannot be reached"), 404, "model_not_found"),
        (OptionError("not enough memory; lower --memory"), 503, "failed"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told_and_tried_again(
    tiny_model: Any, failure: Exception, status: int, code: str
) -> None:
    loader = Loader(tiny_model)
    loader.failure = failure
    with running(tiny_model, catalog=loader.catalog("far")) as server:
        response = server.post("fathom/load", model="far")
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert (str(failure) in response.text) == isinstance(failure, FathomError)
        loader.failure = None
        assert server.post("fathom/load", model="far").json()["loaded"] is True
        assert loader.loads == ["far", "far"]
        assert server.http.get("/ready").status_code == 200


def test_the_least_recently_used_makes_room_unless_it_is_busy(tiny_model: Any) -> None:
    loader = Loader(tiny_model)
    with running(tiny_model, catalog=loader.catalog("a", "b", "c", most=2)) as server:
        for name in ("a", "b", "a", "c"):
            assert server.post("completions", **ASKED, model=name).status_code == 200
        assert loader.loads == ["a", "b", "c"]
        assert [name for name, each in records(server).items() if each["loaded"]] == [NAME, "a", "c"]
        long = {"prompt": "the fox", "max_tokens": 90, "ignore_eos": True, "stream": True, "n": 4}
        with (
            server.http.stream("POST", "/v1/completions", json=long | {"model": "a"}),
            server.http.stream("POST", "/v1/completions", json=long | {"model": "c"}),
        ):
            refused = server.post("completions", **ASKED, model="b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert "a, c" in refused.text
        until(lambda: not any(each.engine.status().in_flight for each in server.service.catalog.loaded.values()))
        assert server.post("completions", **ASKED, model="b").status_code == 200


def test_the_server_ends_with_a_model_on_the_way_and_drains_all(tiny_model: Any) -> None:
    loader = Loader(tiny_model)
    with running(tiny_model, catalog=loader.catalog("there", "late")) as server, ThreadPoolExecutor() as pool:
        assert server.post("fathom/load", model="there").status_code == 200
        loader.go.clear()
        waiting = pool.submit(server.post, "fathom/load", model="late")
        until(lambda: loader.loads == ["there", "late"])
        other = server.service.catalog.loaded["there"]
        server.server.servers[0].get_loop().call_soon_threadsafe(server.server.end)
        assert waiting.result(60).json()["error"]["code"] == "draining"
        server.thread.join(60)
        assert not server.thread.is_alive()
        assert other.engine.status().accepting is False
        loader.go.set()


@pytest.mark.usefixtures("whole_collections")
def test_a_model_that_was_unloaded_is_free_before_the_next_is_loaded(tiny_model: Any, plain: Any) -> None:
    """`serve` leaves loaded models out of collections."""
    loader, engines, left = Loader(plain), list[weakref.ref[Engine]](), list[int]()

    def load(name: str) -> ServedModel:
        left.append(sum(engine() is not None for engine in engines))
        served = loader(name)
        engines.append(weakref.ref(served.engine._engine))
        settle_heap()
        return served

    catalog = Catalog({name: Offer(load=partial(load, name)) for name in ("first", "second")}, most=1)
    with running(tiny_model, catalog=catalog) as server:
        for name in ("first", "second", "first"):
            assert server.http.post("/v1/completions", json=ASKED | {"model": name}).status_code == 200
    assert left == [0, 0, 0]
