"""A chunk that is but text is written from a frame that is made once; it is the chunk that is built anew."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fathomlm.engine.request import TokenEvent
from fathomlm.serve.bodies import ChatBody, CompletionBody
from fathomlm.serve.completions import _chunk_event
from fathomlm.serve.errors import to_json
from fathomlm.serve.metrics import BETWEEN, _TimeTally
from fathomlm.serve.responses import MARK, ChatFormat, CompletionFormat, ResponseFormat

TEXTS = ["", "a", ' "quoted" \\ back', "\n\t\x00\x7f", "é 你好 🙂", "\ud83d", MARK, f'"{MARK}"', "\u2028", "</script>"]


def made(kind: str, **more: Any) -> ResponseFormat:
    """Of two choices, by a model whose name is no easy one."""
    served: Any = SimpleNamespace(name=f'm "{MARK}" é', ends=frozenset({0}))
    requests: Any = [SimpleNamespace(prompt=(1,), sampling=SimpleNamespace(ignore_eos=False)) for _ in range(2)]
    if kind == "chat":
        body = ChatBody.model_validate(
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2, **more}
        )
        return ChatFormat(served, body, requests)
    body_ = CompletionBody.model_validate({"model": "m", "prompt": "x", "stream": True, "n": 2, **more})
    return CompletionFormat(served, body_, requests)


def event(text: str, number: int = 0, token: int = 5) -> TokenEvent:
    return TokenEvent(token, text, number, None, (), None, None)


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("usage", [False, True])
def test_a_frame_with_a_text_is_the_chunk(kind: str, usage: bool) -> None:
    quick = made(kind, **({"stream_options": {"include_usage": True}} if usage else {}))
    for number, text in enumerate(TEXTS):
        for index in (1, 0):
            found = quick.token(index, event(text, number))
            wanted = [to_json(quick._chunk(index, quick._piece(text), None, {}))] if text else []
            assert list(found) == wanted
            assert [_chunk_event(chunk) for chunk in found] == [b"data: " + chunk + b"\n\n" for chunk in wanted]
    assert quick._sent == [sum(map(len, TEXTS))] * 2


@given(st.text())
def test_any_text_is_read_back(text: str) -> None:
    (chunk,) = made("chat").token(0, event(text)) or (to_json({"choices": [{"delta": {"content": text}}]}),)
    assert isinstance(chunk, bytes)
    assert json.loads(chunk)["choices"][0]["delta"]["content"] == text


def test_more_than_text_is_built_for_each_token() -> None:
    (chunk,) = made("text", fathom={"depths": True}).token(0, TokenEvent(5, "a", 0, None, (), 2, None))
    assert isinstance(chunk, dict)
    assert chunk["choices"][0]["fathom"]["depths"] == [2]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    (chunk,) = made("chat", tools=tools).token(0, event("a"))
    assert isinstance(chunk, dict)


@given(st.lists(st.tuples(st.sampled_from([*BETWEEN, 0.0, 0.0011, 3.0]) | st.floats(0, 5), st.integers(1, 4)), max_size=30))
def test_times_are_counted_as_by_the_client_library(times: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = _TimeTally("gap_seconds", "Gaps", BETWEEN)
    ours.register(tally)
    histogram = Histogram("gap_seconds", "Gaps", buckets=BETWEEN, registry=theirs)
    for seconds, many in times:
        tally.add(seconds, many)
        for _ in range(many):
            histogram.observe(seconds)
    lines, wanted = (
        [line.rsplit(" ", 1) for line in generate_latest(each).decode().splitlines() if "_created" not in line]
        for each in (ours, theirs)
    )
    assert [line[0] for line in lines] == [line[0] for line in wanted]
    for (name, value), (_, expected) in zip(lines, wanted, strict=True):
        assert name.startswith("# ") or float(value) == pytest.approx(float(expected))
