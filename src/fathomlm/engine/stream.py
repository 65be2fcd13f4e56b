"""What an event loop waits for of an engine in another thread: one answer, or the events of a request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

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


class News:
    """That something has come, for one task to wait for: half of what an `asyncio.Event`, which any number may wait for,
    costs each time. Whoever waits has looked in the same turn of the loop that nothing is there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        self._waiting = self._loop.create_future()
        return self._waiting

    def tell(self) -> None:
        """In the loop of whoever waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


Burst = tuple[list[Event], float]
"""Events that came together, and when."""


class Stream(Promise):
    """A `TokenEvent` for each token, and last `Finished`. For one consumer, in the event loop that submitted the request.

    Events wait here without a limit of their own. A request has at most `max_new_tokens` + 1 of them, each a few hundred
    bytes; a shorter queue would have to stall the engine, and everybody with it, or lose tokens.

    Whoever stops listening, because its task is cancelled or its loop over the events is left, cancels the request.
    """

    def __init__(self, request: Request, cancel: Callable[[int], None], news: News | None = None) -> None:
        """`cancel` is given the request's id. `news` is told when events come; streams that share it can be waited for
        together."""
        super().__init__()
        self.request = request
        self.result: Result | None = None
        """All of it, from the end on."""
        self._news = News() if news is None else news
        self._bursts: list[Burst] = []
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
        if len(self._bursts) == 1:
            return self._bursts.pop()[0]
        return [event for events, _ in self.take() for event in events]

    def take(self) -> list[Burst]:
        """What has come and was not taken yet, perhaps nothing."""
        bursts, self._bursts = self._bursts, []
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

    def receive(self, events: list[Event], at: float) -> None:
        """In the stream's own loop."""
        self._bursts.append((events, at))
        self._news.tell()
