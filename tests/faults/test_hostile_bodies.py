"""Bodies that are made to keep a server busy: each is refused, and others are answered meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fathomlm.serve import reading, served_model
from fathomlm.serve.bodies import MOST_INT, ChatBody, CompletionBody
from fathomlm.serve.errors import ApiError, validation_error
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.tokens import SHORT, WORKERS
from serve.serving import NAME, Running, running, until

pytestmark = pytest.mark.usefixtures("one_thread")

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tiny_model: Any, one_thread: None) -> Iterator[Running]:
    with running(tiny_model) as found:
        yield found


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert len(found["message"]) < 2000
    return found


MANY = {
    "messages": b'{"messages":[' + b"{}," * 340_000 + b"{}]}",
    "lists": b'{"prompt":[' + b"[]," * 340_000 + b"[]]}",
    "anywhere": b'{"prompt":"x","unknown":[' + b"{}," * 340_000 + b"{}]}",
    "unfinished": b'{"prompt":"' + b'\\"[' * 300_000,
}


@pytest.mark.parametrize("name", MANY)
def test_a_body_of_many_objects_is_refused_before_they_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "unfinished":  # all of its brackets are in one string
        monkeypatch.setattr(reading.json, "loads", lambda *_, **__: pytest.fail("they were built"))
    with pytest.raises(ApiError) as raised:
        reading.parse(MANY[name], ChatBody if name == "messages" else CompletionBody)
    assert raised.value.status == 400


def test_brackets_in_texts_are_no_objects() -> None:
    code = 'f(x[0], "{}")' * 40_000
    assert reading.parse(json.dumps({"prompt": code}).encode(), CompletionBody).prompt == code


MISTAKES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mixed prompts": (CompletionBody, {"prompt": ["a", 1] * 100_000}),
    "ids and a text": (CompletionBody, {"prompt": [1] * 200_000 + ["a"]}),
    "large ids": (CompletionBody, {"prompt": [2**40] * 100_000}),
    "too many prompts": (CompletionBody, {"prompt": ["a"] * 200_000}),
    "lists of texts": (CompletionBody, {"prompt": [["a", "b"]] * 5_000}),
    "stops": (CompletionBody, {"prompt": "x", "stop": [1] * 200_000}),
    "roles": (ChatBody, {"messages": [{"role": "x", "content": 1}] * 10_000}),
    "messages": (ChatBody, {"messages": [{}] * 10_000}),
    "parts": (ChatBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 10_000}]}),
    "modalities": (ChatBody, {"messages": [], "modalities": [1] * 200_000}),
    "unknown depths": (CompletionBody, {"prompt": "x", "fathom": {f"k{i}": 1 for i in range(1000)}}),
    "many keys": (CompletionBody, {"prompt": "x", "logit_bias": {f"k{i}": "x" for i in range(50_000)}}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_mistake_ends_the_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic describes every mistake unless it is told not to; a hundred thousand take seconds."""
    described = []

    def counted(errors: Any, body: object) -> ApiError:
        described.append(len(errors))
        return validation_error(errors, body)

    monkeypatch.setattr(reading, "validation_error", counted)
    model, body = MISTAKES[name]
    with pytest.raises(ApiError) as raised:
        reading.parse(json.dumps(body).encode(), model)
    assert raised.value.status == 400
    assert len(raised.value.message) < 2000
    assert sum(described) <= (1000 if name == "unknown depths" else 12)


@pytest.mark.parametrize(
    "body",
    [b"[" * 1000, b'{"prompt":' + b"[" * 15_000 + b"]" * 15_000 + b"}", b'{"a":' * 10_000, b'{"tools":' + b"[" * 9_000],
    ids=["lists", "closed lists", "objects", "tools"],
)
def test_deep_nesting_is_a_400(server: Running, body: bytes) -> None:
    for path in ("completions", "chat/completions"):
        assert refusal(server.http.post(f"/v1/{path}", content=body, headers=JSON))["code"] == "invalid_json"


def test_long_bodies_are_read_off_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being read, others are answered."""
    begun, go_on, threads = threading.Event(), threading.Event(), []
    plain = reading.parse

    def slow(body: bytes, model: type[Any]) -> Any:
        threads.append(threading.current_thread().name)
        begun.set()
        assert go_on.wait(60)
        return plain(body, model)

    monkeypatch.setattr(reading, "parse", slow)
    answers = []
    body = {"prompt": [1], "max_tokens": 1, "user": "x" * reading.OFF_LOOP}
    asking = threading.Thread(target=lambda: answers.append(server.post("completions", **body)))
    asking.start()
    try:
        assert begun.wait(60)
        assert server.http.get("/health").status_code == 200
    finally:
        go_on.set()
        asking.join()
    assert answers[0].status_code == 200
    assert threads[0] != server.thread.name


NUMBERS = ["n", "max_tokens", "seed", "top_k", "best_of", "logprobs", "temperature", "top_p", "min_p", "repetition_penalty"]


@pytest.mark.parametrize("digits", [30, 400, 4300, 5000])
@pytest.mark.parametrize("field", [*NUMBERS, "presence_penalty", "max_completion_tokens", "fathom", "prompt"])
def test_a_number_of_thousands_of_digits_is_a_400(server: Running, field: str, digits: int) -> None:
    number = "9" * digits
    value = {"fathom": f'{{"max_depth": {number}}}', "prompt": f"[1, {number}]"}.get(field, number)
    chat = field == "max_completion_tokens"
    asked = '"messages": [{"role": "user", "content": "x"}]' if chat else '"prompt": "x"'
    for sign in ("", "-") if value == number else ("",):
        content = f'{{{asked}, "{field}": {sign}{value}}}'
        response = server.http.post(f"/v1/{'chat/' * chat}completions", content=content, headers=JSON)
        assert refusal(response)["code"] in ("invalid_value", "invalid_json", "context_length_exceeded")


def test_the_largest_counts_are_told_in_words(server: Running) -> None:
    for field in ("n", "max_tokens"):
        assert refusal(server.post("completions", prompt="x", **{field: MOST_INT}))["param"] in (field, "prompt")


def test_a_name_of_any_length_is_not_said_again(server: Running) -> None:
    assert refusal(server.post("completions", prompt="x", model="m" * 100_000))["param"] == "model"


LONG = "the quick brown fox jumps over the lazy dog " * 20_000


def test_a_text_that_cannot_fit_is_refused_unread(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathomlm.decode.prompts._ids", lambda *_, **__: pytest.fail("it was tokenised"))
    chat = {"messages": [{"role": "user", "content": LONG}]}
    for path, body in (
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": ["x", LONG]}),
        ("completions", {"prompt": [1] * 100_000}),
        ("chat/completions", chat),
    ):
        found = refusal(server.post(path, **body))
        assert found["code"] == "context_length_exceeded"
        assert "at least" in found["message"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Long prompts, which are not read to the end until the event is set."""
    plain, go_on = served_model.encode_prompt, threading.Event()
    go_on.begun = 0  # type: ignore[attr-defined]

    def slow(model: Any, prompt: Any) -> Any:
        if len(prompt) > SHORT:
            go_on.begun += 1  # type: ignore[attr-defined]
            assert go_on.wait(60)
            return [1]
        return plain(model, prompt)

    monkeypatch.setattr(served_model, "encode_prompt", slow)
    yield go_on
    go_on.set()


def test_a_short_prompt_does_not_wait_behind_long_ones(tiny_model: Any, stuck: threading.Event) -> None:
    with running(tiny_model) as found:
        object.__setattr__(found.service.served, "least_tokens", lambda text: 0)
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: answers.append(found.post("completions", prompt=LONG[:50_000], max_tokens=1)))
            for _ in range(8)
        ]
        for one in asking:
            one.start()
        until(lambda: stuck.begun >= WORKERS)  # type: ignore[attr-defined]
        assert found.post("completions", prompt="the fox", max_tokens=1, model=NAME).status_code == 200
        assert not answers
        stuck.set()
        for one in asking:
            one.join()
        assert [response.status_code for response in answers] == [200] * 8


def test_reading_a_prompt_is_part_of_the_time_a_request_has(tiny_model: Any, stuck: threading.Event) -> None:
    with running(tiny_model, ServeOptions(timeout=0.2)) as hasty:
        object.__setattr__(hasty.service.served, "least_tokens", lambda text: 0)
        found = refusal(hasty.post("completions", prompt=LONG[:50_000], max_tokens=1), 504)
        assert found["code"] == "timeout"
        stuck.set()
