"""The texts of one HTTP request on their way: all of them are taken or none is, and all end when nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fathomlm.engine.async_engine import AsyncEngine, Stream
from fathomlm.engine.request import Finished, Request, Result, TokenEvent
from fathomlm.serve.errors import INTERNAL, ApiError

T = TypeVar("T")
Receive = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Said:
    """An event of one choice, and when it came."""

    index: int
    event: TokenEvent | Finished
    at: float


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Choices:
    """Streams of the engine, merged. Leave it by `close`, which cancels what has not ended."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._said: asyncio.Queue[Said] = asyncio.Queue()
        self._feeders = [asyncio.create_task(self._feed(index, stream)) for index, stream in enumerate(streams)]

    @classmethod
    async def submit(cls, front: AsyncEngine, requests: Sequence[Request]) -> Choices:
        taken: dict[int, Stream] = {}

        async def one(index: int, request: Request) -> None:
            taken[index] = await front.submit(request)

        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in taken.values():
                stream.cancel()
            raise
        return cls([taken[index] for index in range(len(requests))])

    async def _feed(self, index: int, stream: Stream) -> None:
        """Events are taken as they come, however slow the client is: their times are the engine's."""
        async for event in stream:
            self._said.put_nowait(Said(index, event, time.perf_counter()))

    async def events(self) -> AsyncGenerator[Said, None]:
        """Every event of every choice, in the order in which they came."""
        left = len(self._streams)
        while left:
            said = await self._said.get()
            left -= isinstance(said.event, Finished)
            yield said

    def result(self, index: int) -> Result:
        """Of a choice that has ended."""
        found = self._streams[index].result
        assert found is not None, f"choice {index} has not ended"
        return found

    async def close(self) -> None:
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        for stream in self._streams:
            stream.cancel()


def finish_reason(finished: Finished) -> str:
    """OpenAI's word for it, or the error that it was."""
    if finished.reason == "error":
        raise ApiError(500, INTERNAL, code="engine_error")
    if finished.reason == "cancelled":
        raise ApiError(503, "the server was stopped before the text had ended", code="draining")
    return "length" if finished.reason == "length" else "stop"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client, and stop doing it when the client hangs up."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message.get("type") == "http.disconnect":
            return
