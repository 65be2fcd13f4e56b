"""What one request says, for whoever asked: the consumer's end of the asyncio front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from fathomlm.engine.engine import Event, Job
from fathomlm.engine.request import Finished, Request, Result, Times


class Stream:
    """A `TokenEvent` for each token, and last `Finished`. For one consumer, in the event loop that submitted the request.

    Events wait here without a limit of their own. A request has at most `max_new_tokens` + 1 of them, each a few hundred
    bytes; a shorter queue would have to stall the engine, and everybody with it, or lose tokens.

    Whoever stops listening, because its task is cancelled or its loop over the events is left, cancels the request.
    """

    def __init__(self, request: Request, cancel: Callable[[int], None]) -> None:
        """`cancel` is given the request's id."""
        self.request = request
        self.result: Result | None = None
        """All of it, from the end on."""
        self.loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancel = cancel
        self._over = False

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        try:
            while not self._over:
                event = await self._events.get()
                self._over = isinstance(event, Finished)
                yield event
        finally:
            self.cancel()

    async def wait(self) -> Result:
        """The end, without looking at what comes before it."""
        async for _ in self:
            pass
        assert self.result is not None
        return self.result

    def cancel(self) -> None:
        """Stop the request, from any thread. It ends as "cancelled", or as it has ended already."""
        if self.result is None:
            self._cancel(self.request.id)

    # The front's end.

    async def accepted(self) -> None:
        """Returns when the engine has taken the request, or raises what it refused it with."""
        try:
            await self._accepted
        except asyncio.CancelledError:
            self.cancel()
            raise

    def answer(self, refusal: Exception | None = None) -> None:
        """In the stream's own loop: the request is taken, or why not."""
        if self._accepted.done():
            return  # whoever asked was cancelled meanwhile
        if refusal is None:
            self._accepted.set_result(None)
        else:
            self._accepted.set_exception(refusal)

    def hear(self, event: Event) -> None:
        """In the stream's own loop."""
        self._events.put_nowait(event)


def so_far(job: Job, why: Finished) -> Result:
    """What a request has had when its engine broke; nothing is asked of the engine for it."""
    request = job.request
    return Result(
        id=request.id, prompt_tokens=request.prompt, tokens=tuple(job.text.tokens), text="".join(job.pieces), finish=why,
        times=Times(arrival=request.arrival, first=job.first, last=job.last), preemptions=job.text.preemptions,
        logprobs=None if request.logprobs is None else tuple(job.logprobs), depths=tuple(job.depths) or None,
        confidences=tuple(job.sures) or None,
    )  # fmt: skip
