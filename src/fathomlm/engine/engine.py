"""The engine: requests in, tokens out, many at a time (continuous depth-wise batching, thesis 3.3.5 and 4.4.3).

    engine = Engine(model)
    results = engine.generate(["The sea is", "A whale"], max_new_tokens=64)

One `step` hears what an earlier tick chose, tells the device what is new, and starts the next tick. Nothing here waits for
the tick it has just started; on a GPU the host runs some ticks behind.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

from fathomlm.checkpoints.resolve import decoder_only
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import Prompt, encode_prompts, end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.engine.detokenise import Detokeniser
from fathomlm.engine.layout import Layout
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.orders import Chunk
from fathomlm.engine.programs.base import AGREED, BAD, ENDED, JUDGED, VALID, Record
from fathomlm.engine.request import Finished, Logprobs, Request, Result, Times, TokenEvent
from fathomlm.engine.runner import Runner
from fathomlm.engine.scheduler import Counters, Scheduler
from fathomlm.engine.sequence import Sequence as Text
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM

Event = TokenEvent | Finished


@dataclass(slots=True)
class Job:
    """One request on its way."""

    request: Request
    text: Text
    detokeniser: Detokeniser
    tell: Callable[[Event], None] | None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    sures: list[float] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    result: Result | None = None
    epoch: int = 0
    """Of its last placement: the device's reports name it by that."""


@dataclass(slots=True)
class Totals:
    """What an engine has done so far."""

    ticks: int = 0
    tokens: int = 0
    depths: int = 0
    """The sum of the tokens' depths."""
    left: int = 0
    """Tokens that left early."""
    finished: int = 0
    read: int = 0
    """Prompt tokens that were read."""


class Engine:
    def __init__(
        self,
        model: FathomForCausalLM,
        options: EngineOptions | None = None,
        *,
        exiting: Exiting | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are those of `EngineOptions`, for convenience. `exiting` lets tokens leave early."""
        decoder_only(model, "the engine")
        self.model = model
        self.options = replace(options or EngineOptions(), **fields)
        self.runner = Runner(model.decoder, self.options, sorted(end_tokens(model)), exiting)
        sizes = self.runner.sizes
        self.scheduler = Scheduler(
            tables=sizes.tables, pool_pages=sizes.pool_pages, page_size=self.options.page_size, slots=sizes.slots,
            max_queue=self.options.max_queue, chunk=self.options.chunk, lookahead=sizes.lookahead,
            max_length=sizes.max_length,
            prefix_caching=self.options.prefix_caching and self.runner.layout.kind != "exits",
        )  # fmt: skip
        self._ends = end_tokens(model)
        self._kind = self.runner.layout.kind
        self._estimator = None if exiting is None else exiting.estimator
        self._plan = plan = model.plan  # the model reads it from its configuration each time
        depths = range(plan.recursions + 1) if self._kind == "routed" else ()
        self._made = [_made_entries(plan, self.runner.layout, depth) for depth in depths]
        self._jobs: dict[int, Job] = {}
        self._by_epoch: dict[int, Job] = {}
        self._flying: deque[int] = deque()
        self._next_id = 0
        self.totals = Totals()

    # Requests.

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def submit(self, request: Request, tell: Callable[[Event], None] | None = None) -> None:
        """Queue a request, or refuse it with a `FathomError`. `tell` hears of each token, and of the end."""
        depths = self.model.plan.recursions
        if request.max_depth is not None:
            if self.model.plan.routing is None:
                raise OptionError("max_depth is for models with a router; this engine runs every token to its own end")
            if request.max_depth > depths:
                raise OptionError(f"max_depth must be from 1 to the model's {depths} recursions, got {request.max_depth}")
        if request.exit_threshold is not None and self._kind != "exits":
            raise OptionError("exit_threshold is for an engine whose tokens may leave early; this one has no exit")
        self.runner.sampler.check(request)
        tokenizer = self.model.tokenizer
        detokeniser = Detokeniser(tokenizer, request.sampling.stop, request.prompt)
        text = Text(request.id, request.prompt, request.sampling.max_new_tokens, kind=request.max_depth or 0)
        self.scheduler.submit(text)
        self._jobs[request.id] = Job(request, text, detokeniser, tell)

    def cancel(self, id: int) -> bool:
        """Stop a request; returns whether it was still on its way."""
        job = self._jobs.get(id)
        if job is None:
            return False
        self.scheduler.cancel(id)
        self._finish(job, Finished(reason="cancelled"))
        return True

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        logprobs: int | None = None,
        **options: Any,
    ) -> list[Result]:
        """Continue each prompt; results in the order of the prompts. `options` are fields of `Sampling`."""
        chosen = (sampling or Sampling()).with_options(**options)
        encoded = encode_prompts(self.model, prompts)
        requests = [
            Request(id=self.new_id(), prompt=tuple(tokens), sampling=chosen, logprobs=logprobs) for tokens in encoded
        ]
        return self.run(requests)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """All of these to their end. More than the queue holds are handed in as it empties."""
        jobs: list[Job] = []
        waiting = deque(requests)
        try:
            while waiting or any(job.result is None for job in jobs):
                while waiting and len(self.scheduler.waiting) < self.options.max_queue:
                    request = waiting.popleft()
                    self.submit(request)
                    jobs.append(self._jobs[request.id])
                self.step()
        except BaseException:
            for job in jobs:
                if job.result is None:
                    self.cancel(job.request.id)
            raise
        return [job.result for job in jobs if job.result is not None]

    @property
    def busy(self) -> bool:
        return bool(self._jobs) or self.scheduler.busy or bool(self._flying)

    def counters(self) -> Counters:
        return self.scheduler.counters()

    # The loop.

    def step(self) -> None:
        """Hear, tell, start."""
        behind = self.runner.sizes.lag * self.runner.sizes.burst
        while len(self._flying) > behind or (self._flying and not self._jobs):
            self._hear(self._flying.popleft())
        plan = self.scheduler.plan()
        self.runner.apply(plan, {p.sequence.id: self._jobs[p.sequence.id].request for p in plan.placements})
        for placement in plan.placements:
            job = self._jobs[placement.sequence.id]
            self._by_epoch.pop(job.epoch, None)
            job.epoch = placement.epoch
            self._by_epoch[job.epoch] = job
        if plan.chunks:
            self._read(plan.chunks)
        if any(text.state == "running" for text in self.scheduler.placed):
            for _ in range(self.runner.sizes.burst):
                self._flying.append(self.runner.launch())
                self.totals.ticks += 1
        elif self._flying:
            self._hear(self._flying.popleft())

    def _read(self, chunks: Sequence[Chunk]) -> None:
        texts = [self._by_epoch[chunk.epoch].text for chunk in chunks]
        tokens = [text.known[c.first : c.first + c.count] for c, text in zip(chunks, texts, strict=True)]
        made = self.runner.read(chunks, tokens)
        for chunk, text, entries in zip(chunks, texts, made, strict=True):
            self.totals.read += chunk.count
            self.scheduler.read(text.id, chunk.epoch, chunk.first + chunk.count, entries)

    def _hear(self, tick: int) -> None:
        ints, floats, record = self.runner.collect(tick)
        now = time.perf_counter()
        for row, (_, epoch, token, depth, flags, index) in enumerate(ints):
            if not flags:
                continue
            job = self._by_epoch.get(epoch)
            if job is None or job.text.epoch != epoch:
                continue  # it was stopped, or put aside, while this was on its way
            if flags & JUDGED and self._estimator is not None:
                self._estimator.observe([floats[row][1]], [bool(flags & AGREED)])
            if not flags & VALID:
                continue
            self._take(job, token, depth, flags, index, floats[row], record, row, now)

    def _take(
        self, job: Job, token: int, depth: int, flags: int, index: int, floats: list[float], record: Record, row: int,
        now: float,
    ) -> None:  # fmt: skip
        text, request = job.text, job.request
        assert index == len(text.tokens), f"request {text.id}: token {index} came when {len(text.tokens)} were known"
        if flags & BAD:
            self.scheduler.fail(text.id)
            self._finish(job, Finished(reason="error", error="the model's scores are not numbers"))
            return
        self.scheduler.advance(text, token, self._entries(text, depth))
        if job.first is None:
            job.first = now
        job.last = now
        totals, kind, detokeniser = self.totals, self._kind, job.detokeniser
        totals.tokens += 1
        totals.depths += depth
        if kind == "exits" and depth < self._plan.unrolled_layers:
            totals.left += 1
        met = token in self._ends and not request.sampling.ignore_eos
        piece = "" if met else detokeniser.push((token,))
        if flags & ENDED:
            piece += detokeniser.finish()
        if piece:
            job.pieces.append(piece)
        top: tuple[tuple[int, float], ...] = ()
        if request.logprobs is not None:
            if request.logprobs:
                likeliest = record.top_tokens_NK[row, : request.logprobs].tolist()
                top = tuple(zip(likeliest, record.top_logprobs_NK[row, : request.logprobs].tolist(), strict=True))
            job.logprobs.append(Logprobs(logprob=floats[0], top=top))
        if kind != "whole":
            job.depths.append(depth)
        if kind == "exits":
            job.sures.append(floats[1])
        if job.tell is not None:
            job.tell(
                TokenEvent(
                    token=token, text=piece, index=index, logprob=None if request.logprobs is None else floats[0], top=top,
                    depth=None if kind == "whole" else depth, confidence=floats[1] if kind == "exits" else None,
                )
            )  # fmt: skip
        if detokeniser.stopped:
            self.scheduler.finish(text.id)
            self._finish(job, Finished(reason="stop"))
        elif flags & ENDED:
            self.scheduler.finish(text.id)
            self._finish(job, Finished(reason="eos" if met else "length"))

    def _entries(self, text: Text, depth: int) -> list[int]:
        """By table, with the token that has just run."""
        if self._kind != "routed" or self._plan.kv != "cache":
            return [text.length]  # the new token is known and not run
        return list(map(add, text.entries, self._made[depth]))

    def _finish(self, job: Job, why: Finished) -> None:
        if why.reason in ("cancelled", "error"):
            job.pieces.append(job.detokeniser.finish())
        request, text, kind = job.request, job.text, self._kind
        job.result = Result(
            id=request.id, prompt_tokens=request.prompt, tokens=tuple(text.tokens), text="".join(job.pieces), finish=why,
            times=Times(arrival=request.arrival, first=job.first, last=job.last),
            logprobs=None if request.logprobs is None else tuple(job.logprobs),
            depths=None if kind == "whole" else tuple(job.depths),
            confidences=tuple(job.sures) if kind == "exits" else None, preemptions=text.preemptions,
        )  # fmt: skip
        self._by_epoch.pop(job.epoch, None)
        del self._jobs[request.id]
        self.totals.finished += 1
        if self._estimator is not None and why.reason != "cancelled":
            self._estimator.end_sequence()
        if job.tell is not None:
            job.tell(why)


def _made_entries(plan: DepthPlan, layout: Layout, depth: int) -> list[int]:
    """By table: the entries that a token of this depth makes, where recursions have tables of their own."""
    made = [0] * len(layout.tables)
    if len(layout.tables) > plan.recursions:
        made[0] = 1
    for table in layout.recursion_tables[:depth]:
        made[table] = 1
    return made
