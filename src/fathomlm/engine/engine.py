"""The engine: requests in, tokens out, many at a time (continuous depth-wise batching, thesis 3.3.5 and 4.4.3).

    engine = Engine(model)
    results = engine.generate(["The sea is", "A whale"], max_new_tokens=64)

One `step` collects what an earlier decode step chose, tells the device what is new, and starts the next decode steps.
Nothing here waits for the one it has just started; on a GPU the host runs some of them behind.
"""

from __future__ import annotations

import time
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from fathomlm.checkpoints.resolve import decoder_only
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import Prompt, encode_prompts, end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.text import TextStream
from fathomlm.depth import DepthPlan
from fathomlm.engine.drafting import DraftControl
from fathomlm.engine.layout import Layout
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import AGREED, BAD, DRAFTED, ENDED, JUDGED, VALID, StepOutput
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.request import Event, Finished, Matcher, Request, Result, TokenEvent, TokenLogprobs
from fathomlm.engine.runner import Runner
from fathomlm.engine.schedule import PrefillChunk
from fathomlm.engine.scheduler import Counters, Scheduler
from fathomlm.engine.sequence import Sequence
from fathomlm.errors import FathomError, OptionError
from fathomlm.model.hub import FathomForCausalLM


@dataclass(slots=True)
class Totals:
    """What an engine has done so far."""

    decode_steps: int = 0
    tokens: int = 0
    depths: int = 0
    """The sum of the tokens' depths."""
    exited: int = 0
    """Tokens that exited early."""
    drafted: int = 0
    """Drafts that were verified."""
    accepted: int = 0
    finished: int = 0
    prefill_tokens: int = 0


class Engine:
    def __init__(
        self,
        model: FathomForCausalLM,
        options: EngineOptions | None = None,
        *,
        exiting: Exiting | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are those of `EngineOptions`, for convenience. `exiting` lets tokens exit early."""
        decoder_only(model, "the engine")
        self.model = model
        self.options = replace(options or EngineOptions(), **fields)
        self.runner = Runner(model.decoder, self.options, sorted(end_tokens(model)), exiting)
        sizes = self.runner.sizes
        self.scheduler = Scheduler(
            tables=sizes.tables, pool_pages=sizes.pool_pages, page_size=self.options.page_size,
            max_sequences=sizes.max_sequences, max_queue=self.options.max_queue, prefill_chunk=self.options.prefill_chunk,
            lookahead=sizes.lookahead, max_length=sizes.max_length,
            prefix_caching=self.options.prefix_caching,
        )  # fmt: skip
        self._ends = end_tokens(model)
        self._drafting: DraftControl | None = None
        if isinstance(self.runner.program, DraftProgram) and not self.options.always_draft:
            self._drafting = DraftControl(skip=sizes.lag)
        self._last_burst = (0, 0.0)
        self._kind = self.runner.layout.kind
        self._estimator = None if exiting is None else exiting.estimator
        self._copies = exiting is not None and exiting.mode == "state-copy"
        self._plan = plan = model.plan  # the model reads it from its configuration each time
        depths = range(plan.recursions + 1) if self._kind == "routed" else ()
        self._new_entries = [_new_entries(plan, self.runner.layout, depth) for depth in depths]
        self._sequences: dict[int, Sequence] = {}
        self._in_slot: list[Sequence | None] = [None] * (sizes.max_sequences + 1)  # the last is for rows of no sequence
        self._in_flight: deque[int] = deque()
        self._held: list[tuple[Sequence, int]] = []
        """Sequences that wait to be told what may come next, and their epochs."""
        self._next_id = 0
        self.totals = Totals()

    # Requests.

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def submit(self, request: Request, on_event: Callable[[Event], None] | None = None) -> Sequence:
        """Queue a request, or refuse it with a `FathomError`. `on_event` gets each token, and the end."""
        recursions, kind, tokenizer = self._plan.recursions, self._kind, self.model.tokenizer
        if request.max_depth is not None:
            if self._plan.routing is None:
                raise OptionError("max_depth requires a model with a router")
            if request.max_depth > recursions:
                raise OptionError(
                    f"max_depth must be from 1 to the model's {recursions} recursions, got {request.max_depth}"
                )
        if request.exit_threshold is not None and kind != "exits":
            raise OptionError("exit_threshold requires an engine with an exit")
        if request.sampling.stop and tokenizer is None:
            raise OptionError("stop strings require a tokenizer, and this model has none")
        self.runner.sampler.check(request)
        sequence = Sequence(
            request,
            on_event=on_event,
            logprobs=None if request.logprobs is None else [],
            depths=None if kind == "whole" else [],
            confidences=[] if kind == "exits" else None,
            exact=0 if kind == "exits" else None,
        )
        if request.constraint is not None:
            sequence.matcher = request.constraint.begin()
            sequence.allowed = sequence.matcher.allowed()
        if tokenizer is not None:
            sequence.stream = TextStream(tokenizer, stop=request.sampling.stop, context=request.prompt)
        self.scheduler.submit(sequence)
        self._sequences[request.id] = sequence
        return sequence

    def cancel(self, id: int) -> bool:
        """Stop a request; returns whether it had not ended yet."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._finish(sequence, Finished(reason="cancelled"))
        return True

    def generate(
        self,
        prompts: str | abc.Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        logprobs: int | None = None,
        **options: Any,
    ) -> list[Result]:
        """Continue each prompt; results in the order of the prompts. `options` are fields of `Sampling`."""
        sampling = (sampling or Sampling()).with_options(**options)
        return self.run(
            [
                Request(id=self.new_id(), prompt=tuple(tokens), sampling=sampling, logprobs=logprobs)
                for tokens in encode_prompts(self.model, prompts)
            ]
        )

    def run(self, requests: abc.Sequence[Request]) -> list[Result]:
        """All of these to their end. More than the queue holds are handed in as it empties."""
        sequences: list[Sequence] = []
        waiting = deque(requests)
        try:
            while waiting or any(sequence.result is None for sequence in sequences):
                while waiting and len(self.scheduler.waiting) < self.options.max_queue:
                    sequences.append(self.submit(waiting.popleft()))
                self.step()
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence.id)
            raise
        return [sequence.result for sequence in sequences if sequence.result is not None]

    @property
    def busy(self) -> bool:
        return bool(self._sequences) or self.scheduler.busy or bool(self._in_flight)

    def counters(self) -> Counters:
        return self.scheduler.counters()

    # The loop.

    def step(self) -> None:
        """Collect, schedule, prefill, start decode steps. A constrained sequence has one token for each time that the host
        looks: where there are no others, that is after every step."""
        placed = self.scheduler.placed
        alone = bool(placed) and all(sequence.matcher is not None for sequence in placed)
        burst = 1 if alone else self.runner.sizes.burst
        behind = 0 if alone else self.runner.sizes.lag * burst
        while len(self._in_flight) > behind or (self._in_flight and not self._sequences):
            self._collect(self._in_flight.popleft())
        scheduled = self.scheduler.schedule()
        self.runner.apply(scheduled)
        for slot in scheduled.stops:
            self._in_slot[slot] = None
        for placement in scheduled.placements:
            self._in_slot[placement.slot] = placement.sequence
        if self._held:
            self.runner.go_on([sequence for sequence, epoch in self._held if sequence.epoch == epoch])
            self._held.clear()
        if scheduled.chunks:
            self._prefill(scheduled.chunks)
        running = sum(sequence.state == "running" for sequence in self.scheduler.placed)
        if running:
            drafts = self._drafting is None or self._decide(self._drafting, running, bool(scheduled.chunks))
            for _ in range(burst):
                self._in_flight.append(self.runner.launch(drafts))
                self.totals.decode_steps += 1
        elif self._in_flight:
            self._collect(self._in_flight.popleft())

    def _decide(self, drafting: DraftControl, running: int, prefilled: bool) -> bool:
        """Whether this burst drafts. What came since the one before tells how fast that way is."""
        tokens, now = self.totals.tokens, time.perf_counter()
        before, then = self._last_burst
        if not prefilled and then:
            drafting.note(tokens - before, now - then)
        self._last_burst = (tokens, now)
        return drafting.choose(running)

    def _prefill(self, chunks: abc.Sequence[PrefillChunk]) -> None:
        sequences = {sequence.slot: sequence for sequence in self.scheduler.placed}
        tokens = [sequences[chunk.slot].known[chunk.first : chunk.first + chunk.count] for chunk in chunks]
        for chunk, entries in zip(chunks, self.runner.prefill(chunks, tokens), strict=True):
            self.totals.prefill_tokens += chunk.count
            self.scheduler.confirm_prefill(sequences[chunk.slot].id, chunk.epoch, chunk.first + chunk.count, entries)

    def _collect(self, number: int) -> None:
        ints, floats, output = self.runner.collect(number)
        now = time.perf_counter()
        for row, (slot, epoch, token, depth, flags, index) in enumerate(ints):
            if not flags:
                continue
            sequence = self._in_slot[slot]
            if sequence is None or sequence.epoch != epoch:
                continue  # it was stopped, or preempted, after this decode step was started
            if flags & JUDGED and self._estimator is not None:
                sequence.judged.append((floats[row][1], bool(flags & AGREED)))
            if flags & VALID:
                self._take(sequence, token, depth, flags, index, floats[row], output, row, now)

    def _take(
        self, sequence: Sequence, token: int, depth: int, flags: int, index: int, floats: list[float], output: StepOutput,
        row: int, now: float,
    ) -> None:  # fmt: skip
        request = sequence.request
        assert index == len(sequence.tokens), f"request {sequence.id}: token {index}, {len(sequence.tokens)} are known"
        if flags & BAD:
            self._finish(sequence, Finished(reason="error", error="the model's logits are not finite"))
            return
        self.scheduler.advance(sequence, token, self._entries(sequence, depth))
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        sequence.last_token_time = now
        totals, stream, logprob, confidence = self.totals, sequence.stream, None, None
        totals.tokens += 1
        totals.depths += depth
        met = token in self._ends and not request.sampling.ignore_eos
        piece = "" if met or stream is None else stream.push(token)
        if flags & ENDED and stream is not None:
            piece += stream.finish()
        if piece:
            sequence.pieces.append(piece)
        top: tuple[tuple[int, float], ...] = ()
        if sequence.logprobs is not None:
            logprob = floats[0]
            if request.logprobs:
                likeliest = output.top_tokens_NK[row, : request.logprobs].tolist()
                top = tuple(zip(likeliest, output.top_logprobs_NK[row, : request.logprobs].tolist(), strict=True))
            sequence.logprobs.append(TokenLogprobs(logprob=logprob, top=top))
        if sequence.depths is not None:
            sequence.depths.append(depth)
        if sequence.confidences is not None:
            confidence = floats[1]
            sequence.confidences.append(confidence)
            exited = depth < self._plan.unrolled_layers
            totals.exited += exited
            if (not exited or flags & DRAFTED) and not self._copies:
                sequence.exact = sequence.length - 1
            if flags & DRAFTED:
                totals.drafted += 1
                totals.accepted += exited
                sequence.drafted += 1
        if sequence.on_event is not None:
            sequence.on_event(
                TokenEvent(
                    token=token, text=piece, index=index, logprob=logprob, top=top,
                    depth=None if sequence.depths is None else depth, confidence=confidence,
                )
            )  # fmt: skip
        if stream is not None and stream.stopped:
            self._finish(sequence, Finished(reason="stop"))
        elif flags & ENDED:
            self._finish(sequence, Finished(reason="eos" if met else "length"))
        elif sequence.matcher is not None:
            self._hold(sequence, sequence.matcher, token)

    def _hold(self, sequence: Sequence, matcher: Matcher, token: int) -> None:
        try:
            matcher.advance(token)
            sequence.allowed = matcher.allowed()
        except FathomError as error:
            self._finish(sequence, Finished(reason="error", error=str(error)))
        else:
            self._held.append((sequence, sequence.epoch))

    def _entries(self, sequence: Sequence, depth: int) -> list[int]:
        """By table, with the token that has just run."""
        if self._kind != "routed" or self._plan.kv != "cache":
            return [sequence.length]  # the new token is known and not run
        return list(map(add, sequence.entries, self._new_entries[depth]))

    def _finish(self, sequence: Sequence, why: Finished) -> None:
        if why.reason in ("cancelled", "error") and sequence.stream is not None:
            sequence.pieces.append(sequence.stream.finish())
        if why.reason == "error":
            self.scheduler.fail(sequence.id)
        else:
            self.scheduler.finish(sequence.id)
        sequence.result = result_of(sequence, why)
        del self._sequences[sequence.id]
        self.totals.finished += 1
        if self._estimator is not None and why.reason != "cancelled":
            # At the end, and all at once: a text is the estimator's unit, and those of other requests ran beside it.
            self._estimator.observe([sure for sure, _ in sequence.judged], [agreed for _, agreed in sequence.judged])
            self._estimator.end_sequence()
        if sequence.on_event is not None:
            sequence.on_event(why)


def result_of(sequence: Sequence, finish: Finished) -> Result:
    """What a sequence has so far; it is called at its end, or when its engine broke."""
    depths, confidences, logprobs = sequence.depths, sequence.confidences, sequence.logprobs
    return Result(
        id=sequence.id, prompt_tokens=sequence.prompt, tokens=tuple(sequence.tokens), text="".join(sequence.pieces),
        finish=finish, arrival=sequence.request.arrival, first_token_time=sequence.first_token_time,
        last_token_time=sequence.last_token_time, preemptions=sequence.preemptions, drafted=sequence.drafted,
        logprobs=None if logprobs is None else tuple(logprobs),
        depths=None if depths is None else tuple(depths),
        confidences=None if confidences is None else tuple(confidences),
    )  # fmt: skip


def _new_entries(plan: DepthPlan, layout: Layout, depth: int) -> list[int]:
    """By table: the entries that a token of this depth adds, where recursions have tables of their own."""
    new = [0] * len(layout.tables)
    if len(layout.tables) > plan.recursions:
        new[0] = 1
    for table in layout.recursion_tables[:depth]:
        new[table] = 1
    return new
