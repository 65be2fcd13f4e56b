"""Server-sent events: what comes together is sent together, and an error is sent behind what came before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from fathomlm.engine.request import Finished, TokenEvent
from fathomlm.engine.stream import News
from fathomlm.serve.completions import Choices, CompletionHandler, EventStream
from fathomlm.serve.errors import ApiError


class Handler:
    """Chunks that are known beforehand."""

    def __init__(self, *made: list[dict[str, Any]], error: ApiError | None = None) -> None:
        self.made, self.error, self.entry = made, error, SimpleNamespace(problem=None)

    async def chunks(self, choices: Any) -> AsyncGenerator[list[dict[str, Any]], None]:
        for one in self.made:
            yield one
        if self.error is not None:
            raise self.error


async def sent_by(handler: Any) -> list[bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    deadline = asyncio.get_running_loop().time() + 600
    choices: Any = SimpleNamespace(close=lambda: None)
    await EventStream(handler, choices, deadline)({"type": "http"}, receive, send)
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def test_a_write_has_all_that_came_together() -> None:
    bodies = asyncio.run(sent_by(Handler([{"n": 1}, {"n": 2, "type": "delta"}], [], [{"n": 3}])))
    assert bodies == [
        b'data: {"n":1}\n\nevent: delta\ndata: {"n":2,"type":"delta"}\n\n', b'data: {"n":3}\n\n', b"data: [DONE]\n\n", b""
    ]  # fmt: skip


def test_an_error_is_sent_behind_what_came_before_it() -> None:
    bodies = asyncio.run(sent_by(Handler([{"n": 1}], error=ApiError(500, "broken", code="b"))))
    assert bodies[0] == b'data: {"n":1}\n\n'
    assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["message"] == "broken"
    assert bodies[2:] == [b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize("error", [ApiError(500, "broken", code="b"), ValueError("broken")])
def test_tokens_in_front_of_one_that_fails_are_chunks(error: Exception) -> None:
    events = [TokenEvent(number, "a", number, None, (), None, None) for number in range(3)]

    class Response:
        requests = (SimpleNamespace(),)

        def opening(self, index: int) -> list[Any]:
            return [{"opening": index}]

        def token(self, index: int, event: TokenEvent) -> list[Any]:
            if event.index == 2:
                raise error
            return [{"token": event.index}]

    async def following(choices: Any) -> Any:
        return [(0, [*events, Finished(reason="length")], 0.0)]

    handler: Any = SimpleNamespace(response=Response(), _next=following)
    made: list[Any] = []

    async def collect() -> None:
        chunks = CompletionHandler.chunks(handler, Choices([], News()))
        while True:
            made.append(await anext(chunks))

    with pytest.raises(type(error), match="broken"):
        asyncio.run(collect())
    assert made == [[{"opening": 0}], [{"token": 0}, {"token": 1}]]
