"""The engine behind asyncio: many consumers in any number of event loops, and one thread that steps.

    async with AsyncEngine(Engine(model)) as engine:
        result = await engine.generate("The sea is", max_new_tokens=64)
        async for event in engine.stream(engine.request("A whale", temperature=0.8)):
            print(event)

Only the worker thread touches the engine. What others want of it waits in an inbox that the worker empties between two
steps; what the engine says goes back to each event loop once a step, all of it together, and to each stream in one message.
A consumer can therefore be as slow as it likes: its events wait with its `Stream`, and nobody else notices.

An engine that breaks fails the requests that it has. Where `restarts` allows it, the worker builds it again and goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from fathomlm.decode.exiting import Threshold
from fathomlm.decode.prompts import Prompt, encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import RestartPolicy
from fathomlm.engine.request import Constraint, Event, Finished, Request, Result
from fathomlm.engine.restarts import Blueprint, RestartBudget, let_go
from fathomlm.engine.sequence import Sequence, result_of
from fathomlm.engine.status import EngineStatus, Rate, remaining, summed, zero
from fathomlm.engine.stream import News, Promise, Stream
from fathomlm.errors import EngineStopped

SAMPLE = 0.1
"""Seconds between two looks at the engine for `status`, while it is busy."""
DRAINING = "the engine is finishing its last requests and takes no new ones"
CLOSED = "the engine is closed"
RESTARTING = "the engine has failed and is being built again; come back in a moment"

Call = Callable[[], object]
T = TypeVar("T")


class WorkItem(Promise):
    """Something to do between two steps."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work


@dataclass(slots=True)
class Delivery:
    """What an event loop is told at once."""

    calls: list[Call] = field(default_factory=list)
    """Answers, in front of events: a request is accepted before it has any."""
    events: list[tuple[Stream, list[Event]]] = field(default_factory=list)

    def make(self) -> None:
        """In that loop."""
        for call in self.calls:
            call()
        at = time.perf_counter()
        for stream, events in self.events:
            stream.receive(events, at)


class AsyncEngine:
    """Owns an engine from here on: nobody else may step it or submit to it."""

    def __init__(
        self,
        engine: Engine,
        restarts: RestartPolicy | None = None,
        *,
        on_failure: Callable[[BaseException, bool], object] = lambda error, again: None,
        on_restart: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """`on_failure` hears in the worker thread what broke the engine and whether it is built again, `on_restart` how
        many seconds that took."""
        self._built: Engine | None = engine
        self._model, self._totals = engine.model, engine.totals
        self._ids = itertools.count(1)
        self.failure: BaseException | None = None
        """What came out of the engine when it broke for good. The front is of no use from then on; make a new one."""
        self.restarting = False
        """Whether a broken engine is being built again."""
        self._on_failure, self._on_restart = on_failure, on_restart
        self._changed = threading.Condition()
        # Under its lock:
        self._inbox: list[Stream | WorkItem | int] = []  # requests to take, work to do, and ids to cancel
        self._refusal: str | None = None
        self._closing = False
        self._ended = False
        self._drained: list[Promise] = []
        self._closers: list[Promise] = []
        self._begun = time.perf_counter()
        self._rate = Rate(self._begun)
        self._seen = (engine.counters(), replace(engine.totals))
        # The worker's own:
        self._restarts_left = RestartBudget(restarts or RestartPolicy(max_restarts=0))
        self._blueprint = Blueprint.of(engine)
        self._restarts = 0
        self._before = zero(self._seen[0])  # of the engines that broke
        self._streams: dict[int, Stream] = {}
        self._sequences: dict[int, Sequence] = {}
        self._outbox = defaultdict[asyncio.AbstractEventLoop, Delivery](Delivery)
        self._looked = self._begun
        self._thread = threading.Thread(target=self._work, name="fathomlm-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Requests.

    def new_id(self) -> int:
        return next(self._ids)

    def request(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        logprobs: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        constraint: Constraint | None = None,
        max_depth: int | None = None,
        exit_threshold: Threshold | None = None,
        **options: Any,
    ) -> Request:
        """A request of a text or of token ids, with an id of its own. `options` are fields of `Sampling`."""
        tokens = encode_prompt(self._model, prompt)
        return Request(
            id=self.new_id(),
            prompt=tuple(tokens),
            sampling=(sampling or Sampling()).with_options(**options),
            logprobs=logprobs,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            constraint=constraint,
            max_depth=max_depth,
            exit_threshold=exit_threshold,
        )

    async def submit(self, request: Request, news: News | None = None) -> Stream:
        """Hand in a request; returns when the engine has taken it. What it cannot take, it refuses with an error:
        `RequestTooLarge`, `QueueFull`, `OptionError` or `EngineStopped`. `news` is as in `Stream`."""
        stream = Stream(request, self.cancel, news)
        self._hand_in(stream)
        await stream.accepted()
        return stream

    async def call(self, work: Callable[[], T]) -> T:
        """Have the worker do something between two steps, which wait for it: whatever else uses the model's device."""
        job = WorkItem(work)
        self._hand_in(job)
        found: T = await job.done
        return found

    def _hand_in(self, order: Stream | WorkItem) -> None:
        with self._changed:
            if not self.accepting:
                raise EngineStopped(self._refusal or RESTARTING)
            self._inbox.append(order)
            self._changed.notify()

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Submit and listen. Leaving the loop, or cancelling the task that runs it, cancels the request."""
        stream = await self.submit(request)
        over = False
        try:
            while not over:
                events = await stream.next_events()
                over = isinstance(events[-1], Finished)
                for event in events:
                    yield event
        finally:
            stream.cancel()

    async def generate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> Result:
        """Continue one prompt to its end. `options` are those of `request`."""
        return await (await self.submit(self.request(prompt, sampling, **options))).wait()

    def cancel(self, id: int) -> None:
        """Stop a request by its id, from any thread. One that has ended, or never came, is left alone."""
        with self._changed:
            if not self._ended:
                self._inbox.append(id)
                self._changed.notify()

    # The front itself.

    @property
    def healthy(self) -> bool:
        """Whether the engine works. One that only takes no new requests is healthy until it is closed."""
        return self.failure is None and not self.restarting and self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        return self._refusal is None and not self.restarting

    def status(self) -> EngineStatus:
        """From any thread, at any time. What it says of the engine is a tenth of a second old at most, or one step."""
        with self._changed:
            now = time.perf_counter()
            counters, totals = self._seen
            rate = self._rate.at(now)
        return EngineStatus(
            accepting=self.accepting,
            healthy=self.healthy,
            failure=None if self.failure is None else _message(self.failure),
            restarting=self.restarting,
            restarts=self._restarts,
            in_flight=len(self._streams),
            uptime=now - self._begun,
            tokens_per_second=rate,
            counters=counters,
            totals=replace(totals),
        )

    async def drain(self) -> None:
        """Take nothing new, and wait until all that was taken has ended. There is no way back."""
        drained = Promise()
        with self._changed:
            self._refusal = self._refusal or DRAINING
            if self._ended:
                return
            self._drained.append(drained)
            self._changed.notify()
        await drained.done

    async def close(self) -> None:
        """Cancel what runs and what waits, and end the worker. Closing twice is fine. Whoever gives up waiting leaves
        nothing behind that waits for a worker in the middle of a step."""
        ended = Promise()
        with self._changed:
            self._refusal = CLOSED if self.failure is None else self._refusal
            self._closing = True
            if not self._ended:
                self._closers.append(ended)
                self._changed.notify()
        if not self._ended:
            await ended.done
        self._thread.join()  # it has done its last work

    # The worker.

    @property
    def _engine(self) -> Engine:
        assert self._built is not None, "nobody asks for the engine while it is being built again"
        return self._built

    def _work(self) -> None:
        again = True
        while again:
            try:
                if self.restarting:
                    self._rebuild()
                self._run()
                again = False
            except BaseException as error:  # nobody may be left waiting for a worker that is gone
                again = self._break(error)
        with self._changed:
            self._ended = True
            self._drained += self._closers
            self._settle()
        self._send()

    def _run(self) -> None:
        device = self._engine.runner.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first one
        while self._obey():
            if self._engine.busy:
                self._engine.step()
            self._look()
            self._send()

    def _rebuild(self) -> None:
        begun = time.perf_counter()
        self._built = self._blueprint.build(self._totals)
        with self._changed:
            self._restarts += 1
            self.restarting = False
        self._on_restart(time.perf_counter() - begun)

    def _obey(self) -> bool:
        """Carry out what was asked for meanwhile; sleep while there is nothing to do. Says whether to go on."""
        with self._changed:
            while not (self._inbox or self._closing or self._drained or self._engine.busy):
                self._changed.wait()
            orders, self._inbox = self._inbox, []
            closing = self._closing
        for order in orders:
            if isinstance(order, Stream):
                self._take(order)
            elif isinstance(order, WorkItem):
                self._do(order)
            else:
                self._engine.cancel(order)
        for id in list(self._streams) if closing else ():
            self._engine.cancel(id)
        with self._changed:
            if not (self._inbox or self._engine.busy):
                self._settle()
        self._send()
        return self._engine.busy or not closing

    def _take(self, stream: Stream) -> None:
        request = stream.request
        try:
            sequence = self._engine.submit(request, partial(self._receive, stream))
        except Exception as error:  # it concerns whoever asked, and nobody else
            self._post(stream.loop, partial(stream.settle, error=error))
            return
        self._streams[request.id] = stream
        self._sequences[request.id] = sequence
        self._post(stream.loop, stream.settle)

    def _do(self, job: WorkItem) -> None:
        if job.done.cancelled():
            return
        try:
            settle = partial(job.settle, job.work())
        except Exception as error:  # it concerns whoever asked, and nobody else
            settle = partial(job.settle, error=error)
        self._post(job.loop, settle)

    def _receive(self, stream: Stream, events: list[Event]) -> None:
        if isinstance(events[-1], Finished):
            del self._streams[stream.request.id]
            stream.result = self._sequences.pop(stream.request.id).result
        self._outbox[stream.loop].events.append((stream, events))

    def _break(self, error: BaseException) -> bool:
        """The engine is broken: nothing more is asked of it, and everybody hears why. Says whether to build another, which
        nobody needs who is about to close."""
        message = _message(error)
        with self._changed:
            wanted = self._refusal is None and isinstance(error, Exception)
            again = self.restarting = wanted and self._restarts_left.take(time.perf_counter())
            if not again:
                self.failure = error
                self._refusal = f"the engine has failed and takes no more requests: {message}"
            refusal = self._refusal or RESTARTING
            orders, self._inbox = self._inbox, []
            self._before = remaining(self._seen[0])
            self._seen = (self._before, replace(self._totals))
        why = Finished(reason="error", error=message)
        for id, stream in self._streams.items():
            stream.result = result_of(self._sequences[id], why)
            self._outbox[stream.loop].events.append((stream, [why]))
        self._streams, self._sequences = {}, {}
        for order in orders:
            if isinstance(order, Promise):
                self._post(order.loop, partial(order.settle, error=EngineStopped(refusal)))
        self._send()
        self._on_failure(error, again)
        if again:
            self._built = None
            let_go(error)
        return again

    def _look(self) -> None:
        """What `status` tells: now and then while there is work, and when there is none left."""
        now = time.perf_counter()
        if now - self._looked >= SAMPLE or not self._engine.busy:
            self._looked = now
            with self._changed:
                self._seen = (summed(self._before, self._engine.counters()), replace(self._totals))
                self._rate.note(now, self._totals.tokens)

    def _settle(self) -> None:
        """Whoever waits for the last request to end has waited long enough."""
        for waiting in self._drained:
            self._post(waiting.loop, waiting.settle)
        self._drained.clear()

    def _post(self, loop: asyncio.AbstractEventLoop, call: Call) -> None:
        self._outbox[loop].calls.append(call)

    def _send(self) -> None:
        deliveries = list(self._outbox.items())
        self._outbox.clear()
        for loop, delivery in deliveries:
            try:
                loop.call_soon_threadsafe(delivery.make)
            except RuntimeError:  # the loop is closed, and its consumers are gone
                for id in [id for id, stream in self._streams.items() if stream.loop is loop]:
                    self._engine.cancel(id)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
