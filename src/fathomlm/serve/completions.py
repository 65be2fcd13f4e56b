"""The completions of one HTTP request, from the queue to the last byte, as one response or as server-sent events.

All of its choices are accepted by the engine or none is, and all end when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from operator import itemgetter
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.request import Event, Finished, Request, Result
from fathomlm.engine.stream import News, Stream
from fathomlm.errors import FathomError
from fathomlm.serve.connections import HALF_CLOSED
from fathomlm.serve.errors import INTERNAL, ApiError, as_api_error, json_response, to_json
from fathomlm.serve.logs import LogEntry
from fathomlm.serve.metrics import Metrics
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.responses import Chunk, ResponseFormat

FINAL_SEND_SECONDS = 5.0
"""Seconds in which a client has to take the message that its request took too long."""
KNOCK = 0.2
"""Seconds between two comments to a client that has closed its side of a stream."""
GONE = Response(status_code=499)
"""Not sent: the client has disconnected."""

T = TypeVar("T")
ChoiceBurst = tuple[int, list[Event], float]
"""A choice, events of it that came together, and when; the end is the last one."""


class ClientGone(Exception):
    """The client has disconnected."""


class Choices:
    """Streams of the engine, merged. End it with `close`, which cancels what has not finished."""

    def __init__(self, streams: Sequence[Stream], news: News) -> None:
        """`news` is told when events of any of the streams have come."""
        self._streams, self._news, self._left = streams, news, len(streams)

    @classmethod
    async def submit(cls, engine: AsyncEngine, requests: Sequence[Request]) -> Choices:
        news = News()
        tasks: list[asyncio.Task[Stream]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(engine.submit(request, news)) for request in requests]
        except BaseException as error:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    task.result().cancel()
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error from None
        return cls([task.result() for task in tasks], news)

    async def next_bursts(self) -> list[ChoiceBurst]:
        """What has come of every choice since, in the order in which it came, as soon as there is any; nothing once all have
        ended. A time is that of the engine's message, however slow the client is."""
        while self._left:
            came = [(index, events, at) for index, stream in enumerate(self._streams) for events, at in stream.take()]
            if came:
                self._left -= sum(isinstance(events[-1], Finished) for _, events, _ in came)
                return sorted(came, key=itemgetter(2))
            await self._news.wait()
        return []

    def result(self, index: int) -> Result:
        """Of a choice that has ended."""
        found = self._streams[index].result
        assert found is not None, f"choice {index} has not ended"
        return found

    def results(self) -> list[Result]:
        return [self.result(index) for index in range(len(self._streams))]

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do something for a client, and stop doing it when the client disconnects."""
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


class CompletionHandler:
    """Runs the requests of a response."""

    def __init__(self, response: ResponseFormat, options: ServeOptions, metrics: Metrics, entry: LogEntry) -> None:
        self.response, self.options, self.metrics, self.entry = response, options, metrics, entry
        self._before: dict[int, float] = {}
        self._accepted: Choices | None = None
        entry.stream, entry.choices, entry.prompt_tokens = response.stream, len(response.requests), response.prompt_tokens

    async def respond(self, receive: Receive, deadline: float) -> Response:
        """The complete response, or a stream that has begun: a rejection by the engine is an HTTP status in either case."""
        try:
            async with asyncio.timeout_at(deadline):
                if not self.response.stream:
                    return json_response(await unless_gone(receive, self._whole()))
                return EventStream(self, await unless_gone(receive, self._submit()), deadline)
        except BaseException as error:
            if self._accepted is not None:  # in the same moment
                self._accepted.close()
            if isinstance(error, ClientGone):
                return GONE
            raise late(self.options) if isinstance(error, TimeoutError) else error from None

    async def _submit(self) -> Choices:
        response = self.response
        try:
            choices = await Choices.submit(response.served.engine, response.requests)
        except FathomError as error:
            raise as_api_error(error) from error
        self._accepted = choices
        self.metrics.accepted(response.prompt_tokens)
        return choices

    async def _whole(self) -> dict[str, Any]:
        choices = await self._submit()
        try:
            while await self._next(choices):
                pass
            return self.response.whole(choices.results())
        finally:
            choices.close()

    async def chunks(self, choices: Choices) -> AsyncGenerator[Sequence[Chunk], None]:
        """What is sent, together what can be sent at once: a write for each token would cost as much as the token."""
        response = self.response
        try:
            yield [chunk for index in range(len(response.requests)) for chunk in response.opening(index)]
            while came := await self._next(choices):
                made: list[Chunk] = []
                try:
                    for index, events, _ in came:
                        for event in events:
                            if isinstance(event, Finished):
                                made += response.closing(index, choices.result(index))
                            else:
                                made += response.token(index, event)
                except Exception:
                    yield made  # what came before it is sent
                    raise
                yield made
            yield [*response.counts(choices.results())]
        finally:
            choices.close()

    async def _next(self, choices: Choices) -> list[ChoiceBurst]:
        """What comes next of the choices, counted on its way."""
        came = await choices.next_bursts()
        for index, events, at in came:
            tokens = [event for event in events if not isinstance(event, Finished)]
            if tokens:
                self.metrics.observe(
                    self.response.served.name, self.response.requests[index], tokens, at, self._before.get(index)
                )
                self._before[index] = at
            if len(tokens) < len(events):
                self._ended(choices.result(index), at)
        return came

    def _ended(self, result: Result, at: float) -> None:
        self.metrics.ended(result, at)
        entry = self.entry
        entry.completion_tokens = (entry.completion_tokens or 0) + len(result.tokens)
        entry.finish = [*(entry.finish or ()), result.finish.reason]
        if result.finish.error is not None:
            entry.problem = result.finish.error
        if self.options.log_prompts:
            entry.completions = [*(entry.completions or ()), result.text]


async def in_time(receive: Receive, work: Awaitable[T], options: ServeOptions, deadline: float) -> T:
    """A model may take a while to load, and a prompt to tokenize; not longer than the client waits."""
    try:
        async with asyncio.timeout_at(deadline):
            return await unless_gone(receive, work)
    except TimeoutError:
        raise late(options) from None


def late(options: ServeOptions) -> ApiError:
    return ApiError(504, f"the request took longer than this server's {options.timeout:g} seconds", code="timeout")


class EventStream(Response):
    """Chunks as server-sent events. The sequences end with the client: one that disconnects frees their pages."""

    def __init__(self, handler: CompletionHandler, choices: Choices, deadline: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._handler, self._choices, self._deadline = handler, choices, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send, scope.get(HALF_CLOSED)))
        except ClientGone:
            self._handler.entry.problem = "the client disconnected"
        except TimeoutError:  # not even the last words could be sent; the connection is cut
            self._handler.entry.problem = "the client does not read"
        finally:
            self._choices.close()

    async def _send_all(self, send: Send, half_closed: asyncio.Event | None) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with _knocking(send, half_closed), aclosing(self._handler.chunks(self._choices)) as chunks:
                    async for made in chunks:
                        if made:
                            await _send(send, b"".join(map(_chunk_event, made)))
        except TimeoutError:
            await self._send_error(send, late(self._handler.options))
        except ApiError as error:
            await self._send_error(send, error)
        except Exception:
            await self._send_error(send, ApiError(500, INTERNAL, code="internal_error"))
            raise
        async with asyncio.timeout(FINAL_SEND_SECONDS):
            await _send(send, _event(b"[DONE]"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """The status went out long ago, so the error is an event; OpenAI's client raises it all the same."""
        self._handler.entry.problem = self._handler.entry.problem or error.message
        async with asyncio.timeout(FINAL_SEND_SECONDS):
            await _send(send, _event(to_json(error.record())))


def _chunk_event(chunk: Chunk) -> bytes:
    return _event(chunk) if isinstance(chunk, bytes) else _event(to_json(chunk), chunk.get("type"))


def _event(data: bytes, kind: str | None = None) -> bytes:
    return b"data: %b\n\n" % data if kind is None else b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


async def _send(send: Send, events: bytes) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": True})


@asynccontextmanager
async def _knocking(send: Send, half_closed: asyncio.Event | None) -> AsyncGenerator[None, None]:
    """Comments, which clients skip, to one that has closed its side: if it has gone altogether, a write fails, and its
    sequences need not wait for their first token to find out."""

    async def knock(closed: asyncio.Event) -> None:
        await closed.wait()
        while True:
            await asyncio.sleep(KNOCK)
            await send({"type": "http.response.body", "body": b":\n\n", "more_body": True})

    task = None if half_closed is None else asyncio.create_task(knock(half_closed))
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
