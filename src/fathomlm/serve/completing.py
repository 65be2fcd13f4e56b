"""Answering a completion, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fathomlm.engine.request import Finished, Result
from fathomlm.errors import FathomError
from fathomlm.serve.answers import Answer
from fathomlm.serve.choices import Choices, ClientGone, unless_gone
from fathomlm.serve.connections import HALF_CLOSED
from fathomlm.serve.errors import INTERNAL, ApiError, as_api_error, json_response, to_json
from fathomlm.serve.logs import Entry
from fathomlm.serve.metrics import Metrics
from fathomlm.serve.options import ServeOptions

LAST_WORDS = 5.0
"""Seconds in which a client has to take the message that its request took too long."""
KNOCK = 0.2
"""Seconds between two comments to a client that has closed its side of a stream."""
GONE = Response(status_code=499)
"""For nobody: the client has hung up."""


class Completing:
    """One HTTP request's texts, from the queue to the last byte."""

    def __init__(self, answer: Answer, options: ServeOptions, metrics: Metrics, entry: Entry) -> None:
        self.answer, self.options, self.metrics, self.entry = answer, options, metrics, entry
        self._before: dict[int, float] = {}
        self._taken: Choices | None = None
        order = answer.order
        entry.stream, entry.choices, entry.prompt_tokens = order.stream, len(order.requests), order.prompt_tokens
        if options.log_prompts:
            entry.prompts = order.prompts

    async def respond(self, receive: Receive, deadline: float) -> Response:
        """The whole answer, or a stream that has begun: what the engine refuses is an HTTP status in either case."""
        try:
            async with asyncio.timeout_at(deadline):
                if not self.answer.order.stream:
                    return json_response(await unless_gone(receive, self._whole()))
                return EventStream(self, await unless_gone(receive, self._submit()), deadline)
        except BaseException as error:
            if self._taken is not None:  # in the same moment
                await self._taken.close()
            if isinstance(error, ClientGone):
                return GONE
            raise late(self.options) if isinstance(error, TimeoutError) else error from None

    async def _submit(self) -> Choices:
        order = self.answer.order
        try:
            choices = await Choices.submit(self.answer.offer.front, order.requests)
        except FathomError as error:
            raise as_api_error(error) from error
        self._taken = choices
        self.metrics.took(order.prompt_tokens)
        return choices

    async def _whole(self) -> dict[str, Any]:
        choices = await self._submit()
        try:
            async for _ in self._watched(choices):
                pass
            return self.answer.whole(self._results(choices))
        finally:
            await choices.close()

    async def chunks(self, choices: Choices) -> AsyncGenerator[dict[str, Any], None]:
        answer = self.answer
        try:
            for index in range(len(answer.order.requests)):
                for chunk in answer.opening(index):
                    yield chunk
            async with aclosing(self._watched(choices)) as events:
                async for index, event in events:
                    ended = isinstance(event, Finished)
                    for chunk in answer.closing(index, choices.result(index)) if ended else answer.token(index, event):
                        yield chunk
            for chunk in answer.counts(self._results(choices)):
                yield chunk
        finally:
            await choices.close()

    async def _watched(self, choices: Choices) -> AsyncGenerator[Any, None]:
        """Events with their choice, each counted on its way."""
        async with aclosing(choices.events()) as events:
            async for said in events:
                index, event = said.index, said.event
                if isinstance(event, Finished):
                    self._ended(choices.result(index), said.at)
                else:
                    self.metrics.observe(self.answer.order.requests[index], event, said.at, self._before.get(index))
                    self._before[index] = said.at
                yield index, event

    def _ended(self, result: Result, at: float) -> None:
        self.metrics.ended(result, at)
        entry = self.entry
        entry.completion_tokens = (entry.completion_tokens or 0) + len(result.tokens)
        entry.finish = [*(entry.finish or ()), result.finish.reason]
        if result.finish.error is not None:
            entry.problem = result.finish.error
        if self.options.log_prompts:
            entry.texts = [*(entry.texts or ()), result.text]

    def _results(self, choices: Choices) -> list[Result]:
        return [choices.result(index) for index in range(len(self.answer.order.requests))]


def late(options: ServeOptions) -> ApiError:
    return ApiError(504, f"the request took longer than this server's {options.timeout:g} seconds", code="timeout")


class EventStream(Response):
    """Chunks as server-sent events. The texts end with the client: one that hangs up frees their pages."""

    def __init__(self, work: Completing, choices: Choices, deadline: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work, self._choices, self._deadline = work, choices, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send, scope.get(HALF_CLOSED)))
        except ClientGone:
            self._work.entry.problem = "the client hung up"
        except TimeoutError:  # not even the last words could be sent; the connection is cut
            self._work.entry.problem = "the client does not read"
        finally:
            await self._choices.close()

    async def _send_all(self, send: Send, half_closed: asyncio.Event | None) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with _knocking(send, half_closed), aclosing(self._work.chunks(self._choices)) as chunks:
                    async for chunk in chunks:
                        await _send_event(send, to_json(chunk))
        except TimeoutError:
            await self._send_error(send, late(self._work.options))
        except ApiError as error:
            await self._send_error(send, error)
        except Exception:
            await self._send_error(send, ApiError(500, INTERNAL, code="internal_error"))
            raise
        async with asyncio.timeout(LAST_WORDS):
            await _send_event(send, b"[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """The status went out long ago, so the error is an event; OpenAI's client raises it all the same."""
        self._work.entry.problem = self._work.entry.problem or error.message
        async with asyncio.timeout(LAST_WORDS):
            await _send_event(send, to_json(error.record()))


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


@asynccontextmanager
async def _knocking(send: Send, half_closed: asyncio.Event | None) -> AsyncGenerator[None, None]:
    """Comments, which clients skip, to one that has closed its side: if it has gone altogether, a write fails, and its
    texts need not wait for their first token to find out."""

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
