"""The engine: requests in, tokens out, many at a time (continuous depth-wise batching, thesis 3.3.5 and 4.4.3).

    engine = Engine(model)
    results = engine.generate(["The sea is", "A whale"], max_new_tokens=64)

One `step` collects what an earlier decode step chose, tells the device what is new, and starts the next decode steps.
Nothing here waits for the one it has just started; on a GPU the host runs some of them behind.
"""

from __future__ import annotations

import time
from collections import abc, deque
from dataclasses import replace
from typing import Any

import numpy as np

from fathomlm.decode.byte_text import ByteTextStream, TokenTable
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import Prompt, encode_prompts, end_tokens, start_token
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.text import TextStream
from fathomlm.engine.launches import Launches
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.prefills import Prefills
from fathomlm.engine.programs.base import (
    AGREED,
    BAD,
    CONFIDENCE,
    ENDED,
    FLAGS,
    JUDGED,
    LOGPROB,
    NEXT,
    SLOT,
    VALID,
    StepOutput,
)
from fathomlm.engine.request import Finished, Matcher, Request, Result, TokenLogprobs
from fathomlm.engine.runner import Runner
from fathomlm.engine.schedule import SchedulerOutput
from fathomlm.engine.scheduler import Counters, Scheduler
from fathomlm.engine.sequence import OnEvents, Sequence, events_of, result_of
from fathomlm.engine.slot_records import NEVER, Floats, Ints, SlotRecords, Totals
from fathomlm.errors import FathomError, OptionError
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel


class Engine:
    def __init__(
        self,
        model: FathomModel,
        options: EngineOptions | None = None,
        *,
        exiting: Exiting | None = None,
        **fields: Any,
    ) -> None:
        """`fields` are those of `EngineOptions`, for convenience. `exiting` lets tokens exit early."""
        self.model = model
        self.options = replace(options or EngineOptions(), **fields)
        encodes = model if isinstance(model, FathomForSeq2SeqLM) else None
        self._start = None if encodes is None else start_token(encodes)
        self.runner = Runner(model.decoder, self.options, sorted(end_tokens(model)), exiting, encodes)
        sizes = self.runner.sizes
        self.scheduler = Scheduler(
            tables=sizes.tables, pool_pages=sizes.pool_pages, page_size=self.options.page_size,
            max_sequences=sizes.max_sequences, max_queue=self.options.max_queue, prefill_chunk=sizes.prefill_chunk,
            lookahead=sizes.lookahead, max_length=sizes.max_length, max_source=sizes.max_source,
            prefix_caching=self.options.prefix_caching and encodes is None, catch_up=self._catch_up,
        )  # fmt: skip
        self._ends = end_tokens(model)
        self._kind = self.runner.layout.kind
        self._estimator = None if exiting is None else exiting.estimator
        self._copies = exiting is not None and exiting.mode in ("state-copy", "entry-copy")
        self._plan = plan = model.plan  # the model reads it from its configuration each time
        self._table = TokenTable.of(model.tokenizer)
        self._sequences: dict[int, Sequence] = {}
        self._constrained = 0
        """How many of them have a constraint."""
        self._in_slot: list[Sequence | None] = [None] * (sizes.max_sequences + 1)  # the last is for rows of no sequence
        full = plan.unrolled_layers if self._kind == "exits" or self.runner.exits else 0
        self._records = SlotRecords(
            self.runner.layout, sizes.max_sequences, sizes.max_length, plan.recursions, full, model.architecture.vocab
        )  # fmt: skip
        self._held: list[tuple[Sequence, int]] = []
        """Sequences that wait to be told what may come next, and their epochs."""
        self._next_id = 0
        self.totals = Totals()
        self._prefills = Prefills(
            self.runner, self.scheduler, self._records, lambda: self.totals, plan.unrolled_layers if self._copies else None
        )
        self._launches = Launches(  # looked up when called: clocks are put around the one, restarts replace the other
            self.runner, self.scheduler, self._records, self.options,
            collect=lambda numbers: self._collect(numbers), totals=lambda: self.totals,
        )  # fmt: skip

    # Requests.

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def submit(self, request: Request, on_events: OnEvents | None = None) -> Sequence:
        """Queue a request, or refuse it with a `FathomError`. `on_events` gets the tokens of each burst, and the end."""
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
        given, exits = request.exit_threshold, len(self.runner.exits) or 1
        if isinstance(given, tuple) and len(given) != exits:
            raise OptionError(f"exit_threshold must be one number, or one for each of {exits} exit(s), got {len(given)}")
        if request.sampling.stop and tokenizer is None:
            raise OptionError("stop strings require a tokenizer, and this model has none")
        self.runner.sampler.check(request)
        sequence = Sequence(
            request,
            self._start,
            on_events=on_events,
            logprobs=None if request.logprobs is None else [],
            depths=None if kind == "whole" and not self.runner.exits else [],
            confidences=[] if kind == "exits" else None,
            spare=self.runner.sizes.spare,
            replays=self._copies,
            exact=0 if kind == "exits" else None,
        )
        if request.constraint is not None:
            sequence.matcher = request.constraint.begin()
            sequence.allowed = sequence.matcher.allowed()
        context = () if sequence.source else request.prompt
        if self._table is not None:
            sequence.stream = ByteTextStream(self._table, stop=request.sampling.stop, context=context)
        elif tokenizer is not None:
            sequence.stream = TextStream(tokenizer, stop=request.sampling.stop, context=context)
        self.scheduler.submit(sequence)
        self._sequences[request.id] = sequence
        self._constrained += sequence.matcher is not None
        return sequence

    def cancel(self, id: int) -> bool:
        """Stop a request; returns whether it had not ended yet."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        flags = 0
        if sequence.slot is not None:  # it may be called by a listener, before the tokens of the burst have come to this one
            self._records.hand_over([sequence])
            flags = int(self._records.flags_S[sequence.slot])
        self._visit(sequence, flags)
        if sequence.result is None:
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
            while waiting or any(sequence.result is None for sequence in reversed(sequences)):
                while waiting and self.scheduler.queued < self.options.max_queue:
                    sequences.append(self.submit(waiting.popleft()))
                self.step()
        except BaseException:
            for sequence in sequences:
                self.cancel(sequence.id)
            raise
        return [sequence.result for sequence in sequences if sequence.result is not None]

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    @property
    def busy(self) -> bool:
        return bool(self._sequences) or self.scheduler.busy or self._launches.busy

    def counters(self) -> Counters:
        return self.scheduler.counters()

    @property
    def burst(self) -> int:
        """Decode steps of a burst, as long as bursts are now."""
        return self._launches.length.steps

    def fix_bursts(self) -> None:
        """Bursts of decode steps keep the length that they have at first, for measurements that count on it."""
        self._launches.fix_length()

    # The loop.

    def step(self) -> None:
        """Collect, schedule, prefill, start decode steps. A constrained sequence has one token for each time that the host
        looks: where there are no others, that is after every step."""
        placed, launches = self.scheduler.placed, self._launches
        alone = bool(placed) and all(sequence.matcher is not None for sequence in placed)
        launches.collect_due(alone)
        if not self._sequences:
            launches.collect_all()
        burst = 1 if alone else launches.next_burst(constrained=self._constrained > 0)
        self._prefills.look()
        scheduled = self.scheduler.schedule()
        self.runner.apply(scheduled)
        self._note(scheduled)
        if self._held:
            self.runner.go_on([sequence for sequence, epoch in self._held if sequence.epoch == epoch])
            self._held.clear()
        chunks = scheduled.chunks
        self._prefills.begin(chunks, [self._at(chunk.slot) for chunk in chunks])
        launches.start(burst, alone, prefilled=bool(chunks))

    def _note(self, scheduled: SchedulerOutput) -> None:
        """Who is in which slot now, and how far their pages reach."""
        records, in_slot = self._records, self._in_slot
        for slot in scheduled.stops:
            in_slot[slot] = None
            records.clear(slot)
        for placement in scheduled.placements:
            slot, sequence = placement.slot, placement.sequence
            in_slot[slot] = sequence
            if self._launches.chosen is not None:
                self._launches.chosen.begin()
            due = sequence.due(self.options.stream_interval) if sequence.watched else NEVER
            records.place(
                slot, placement.epoch, len(sequence.tokens), placement.entries, due, sequence.max_new_tokens
            )  # fmt: skip
        if scheduled.capacity:
            most = (self._at(slot).most_entries for slot, _ in scheduled.capacity)
            records.grant(scheduled.capacity, most, self.scheduler.lookahead)

    def _at(self, slot: int) -> Sequence:
        sequence = self._in_slot[slot]
        assert sequence is not None, f"nobody is in slot {slot}"
        return sequence

    def _collect(self, numbers: abc.Sequence[int]) -> None:
        """Take in what some decode steps chose, then visit the sequences to which something happened."""
        self._prefills.confirm(numbers[-1])
        outputs = self.runner.collect(numbers)
        ints_RC = np.concatenate([output.ints_NC.numpy().T for output in outputs], 1).T  # a column is looked at as a whole
        ints_RC[:, FLAGS] &= (1 << NEXT) - 1
        floats_RC = np.concatenate([output.floats_NC.numpy() for output in outputs])
        if self._estimator is not None:
            self._observe(ints_RC, floats_RC)
        if self.runner.sampler.scored:
            self._take_logprobs(ints_RC, floats_RC, outputs)
        taken = self._records.take(ints_RC, floats_RC, time.perf_counter())
        self.totals.add(taken)
        if self.runner.core_passes is not None:
            self.runner.core_passes.learn(taken.tokens, taken.depths)
        visited = [self._at(slot) for slot in taken.visits]
        self._records.hand_over(visited)
        for sequence, slot, flags, short in zip(visited, taken.visits, taken.flags, taken.short, strict=True):
            if sequence.slot == slot:  # else a listener has cancelled it meanwhile
                self._visit(sequence, flags, short)

    def _observe(self, ints_RC: Ints, floats_RC: Floats) -> None:
        """What the whole model has shown of exits, in the order in which it did."""
        for row in np.flatnonzero((ints_RC[:, FLAGS] & JUDGED != 0) & self._records.current(ints_RC)).tolist():
            sequence = self._at(int(ints_RC[row, SLOT]))
            sequence.judged.append((float(floats_RC[row, CONFIDENCE]), bool(ints_RC[row, FLAGS] & AGREED)))

    def _take_logprobs(self, ints_RC: Ints, floats_RC: Floats, outputs: abc.Sequence[StepOutput]) -> None:
        """Where a request wants log probabilities, token by token."""
        chosen_R = (ints_RC[:, FLAGS] & (VALID | BAD) == VALID) & self._records.current(ints_RC)
        ends_B = np.cumsum([len(output.ints_NC) for output in outputs])
        for row in np.flatnonzero(chosen_R).tolist():
            sequence = self._at(int(ints_RC[row, SLOT]))
            if sequence.logprobs is None:
                continue
            number = int(np.searchsorted(ends_B, row, side="right"))
            most, output = sequence.request.logprobs, outputs[number]
            at = row - int(ends_B[number]) + len(output.ints_NC)
            tokens, logprobs = output.top_tokens_NK[at, :most].tolist(), output.top_logprobs_NK[at, :most].tolist()
            top = tuple(zip(tokens, logprobs, strict=True))
            sequence.logprobs.append(TokenLogprobs(logprob=float(floats_RC[row, LOGPROB]), top=top))

    def _catch_up(self, sequence: Sequence) -> None:
        """Bring a sequence up to what has arrived of it, and tell the scheduler how far its pages are filled."""
        self._records.hand_over([sequence])
        self._advance(sequence)

    def _advance(self, sequence: Sequence) -> None:
        if sequence.state == "running":
            self.scheduler.advance(sequence, (), self._records.entries_TS[:, sequence.slot].tolist())

    def _visit(self, sequence: Sequence, flags: int, short: bool = False) -> None:
        """Something happened: its tokens, which it has got, their text and their events, its end, or it is `short` of
        pages."""
        if short and not flags:
            self._advance(sequence)
        why = _ending(sequence, flags, self._ends) if flags else None
        told, known, interval = sequence.told, len(sequence.tokens), self.options.stream_interval
        fresh = known > told
        if short and why is None and sequence.watched and known < sequence.due(interval):
            return  # it came for pages alone
        if sequence.watched and fresh:
            pieces = self._read(sequence, why)
            if sequence.stream is not None and sequence.stream.stopped:
                why = Finished(reason="stop")
            if sequence.slot is not None:
                self._records.due_S[sequence.slot] = sequence.due(interval)
            if sequence.on_events is not None:
                sequence.on_events(events_of(sequence, told, pieces))
        if sequence.result is not None:
            return  # a listener has cancelled it
        if why is not None:
            self._finish(sequence, why)
        elif sequence.matcher is not None and fresh:
            self._hold(sequence, sequence.matcher, sequence.tokens[-1])

    def _hold(self, sequence: Sequence, matcher: Matcher, token: int) -> None:
        """A constrained sequence waits to be told what may come next."""
        try:
            matcher.advance(token)
            sequence.allowed = matcher.allowed()
        except FathomError as error:
            self._finish(sequence, Finished(reason="error", error=str(error)))
        else:
            self._held.append((sequence, sequence.epoch))

    def _read(self, sequence: Sequence, why: Finished | None) -> list[str]:
        """The text of the new tokens of a sequence, a piece each. What lies behind a stop string is dropped."""
        stream, told = sequence.stream, sequence.told
        if stream is None:
            sequence.told = len(sequence.tokens)
            return [""] * (sequence.told - told)
        ends = why is not None and why.reason == "eos"
        new = sequence.tokens[told:-1] if ends else sequence.tokens[told:]
        pieces = stream.push_each(new)
        if stream.stopped:
            self.totals.add(self._records.drop(sequence, told + len(pieces)), -1)
        elif why is not None and why.reason != "error":
            pieces += [""] * ends
            pieces[-1] += stream.finish()
        sequence.told = len(sequence.tokens)
        sequence.pieces += pieces
        return pieces

    def _read_end(self, sequence: Sequence, why: Finished) -> None:
        """The text of a sequence that nobody has asked for until now; of others what was held back, unless it was read."""
        stream = sequence.stream
        if stream is not None and not sequence.watched:
            tokens = self._records.completion(sequence)
            shown = tokens[:-1] if why.reason == "eos" else tokens
            sequence.pieces = [stream.push_all(shown), stream.finish()]
        elif stream is not None and why.reason in ("cancelled", "error"):
            sequence.pieces.append(stream.finish())

    def _finish(self, sequence: Sequence, why: Finished) -> None:
        if sequence.slot is not None:
            self._advance(sequence)
            self._records.clear(sequence.slot)
        self._read_end(sequence, why)
        if why.reason == "error":
            self.scheduler.fail(sequence.id)
        else:
            self.scheduler.finish(sequence.id)
        sequence.result = result_of(sequence, why)
        del self._sequences[sequence.id]
        self._constrained -= sequence.matcher is not None
        self.totals.finished += 1
        if self._estimator is not None and why.reason != "cancelled":
            # At the end, and all at once: a sequence is the estimator's unit, and those of other requests ran beside it.
            self._estimator.observe([sure for sure, _ in sequence.judged], [agreed for _, agreed in sequence.judged])
            self._estimator.end_sequence()
        if sequence.on_events is not None:
            sequence.on_events([why])


def _ending(sequence: Sequence, flags: int, ends: frozenset[int]) -> Finished | None:
    """Why a sequence is over; None while it goes on."""
    if flags & BAD:
        return Finished(reason="error", error="the model's logits are not finite")
    if not flags & ENDED:
        return None
    met = sequence.tokens[-1] in ends and not sequence.request.sampling.ignore_eos
    return Finished(reason="eos" if met else "length")
