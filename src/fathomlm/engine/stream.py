"""What an event loop waits for of an engine in another thread: one answer, or the events of a request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from fathomlm.engine.request import Event, Finished, Request, Result


class Promise:
    """What somebody in the running event loop waits for, and the worker answers."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, found: Any = None, error: Exception | None = None) -> None:
        """In its own loop; whoever asked may have been cancelled meanwhile."""
        if not self.done.done():
            self.done.set_result(found) if error is None else self.done.set_exception(error)


class Burst(NamedTuple):
    """Events that came together, and when."""

    events: list[Event]
    at: float


class Stream(Promise):
    """A `TokenEvent` for each token, and last `Finished`. For one consumer, in the event loop that submitted the request.

    Events wait here without a limit of their own. A request has at most `max_new_tokens` + 1 of them, each a few hundred
    bytes; a shorter queue would have to stall the engine, and everybody with it, or lose tokens.

    Whoever stops listening, because its task is cancelled or its loop over the events is left, cancels the request.
    """

    def __init__(self, request: Request, cancel: Callable[[int], None], news: asyncio.Event | None = None) -> None:
        """`cancel` is given the request's id. `news` is set when events come; streams that share it can be waited for
        together."""
        super().__init__()
        self.request = request
        self.result: Result | None = None
        """All of it, from the end on."""
        self._news = asyncio.Event() if news is None else news
        self._bursts: deque[Burst] = deque()
        self._events: deque[Event] = deque()
        self._cancel = cancel
        self._over = False

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        try:
            while not self._over:
                if not self._events:
                    self._events.extend(await self.next_events())
                event = self._events.popleft()
                self._over = isinstance(event, Finished)
                yield event
        finally:
            self.cancel()

    async def wait(self) -> Result:
        """The end, without looking at what comes before it."""
        try:
            while not self._over:
                events = list(self._events) or await self.next_events()
                self._events.clear()
                self._over = isinstance(events[-1], Finished)
        finally:
            self.cancel()
        assert self.result is not None
        return self.result

    async def next_events(self) -> list[Event]:
        """All that has come and was not taken yet, as soon as there is any."""
        while not self._bursts:
            await self._news.wait()
            self._news.clear()
        return [event for burst in self.take() for event in burst.events]

    def take(self) -> list[Burst]:
        """What has come and was not taken yet, perhaps nothing."""
        bursts = list(self._bursts)
        self._bursts.clear()
        return bursts

    def cancel(self) -> None:
        """Stop the request, from any thread. It ends as "cancelled", or as it has ended already."""
        if self.result is None:
            self._cancel(self.request.id)

    # The engine's end.

    async def accepted(self) -> None:
        """Returns when the engine has taken the request, or raises what it refused it with."""
        try:
            await self.done
        except asyncio.CancelledError:
            self.cancel()
            raise

    def receive(self, events: list[Event]) -> None:
        """In the stream's own loop."""
        self._bursts.append(Burst(events, time.perf_counter()))
        self._news.set()
