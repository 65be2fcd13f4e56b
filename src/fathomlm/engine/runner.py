"""The device's side of the engine: it carries out schedules, starts decode steps, and hands back what they chose, later.

On a GPU a decode step is captured once for each sampling variant and replayed from then on; results come back through pinned
memory while the next ones run. On a CPU the same work runs at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathomlm.decode.exiting import Exiting
from fathomlm.engine.captured_passes import capturing
from fathomlm.engine.captured_prefill import CapturedPrefill, sizes_for
from fathomlm.engine.device_state import EngineState
from fathomlm.engine.kv_pages import KVPages, entry_dtype
from fathomlm.engine.layers import PagedLayers
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import FLAGS, SLOT, ProgramContext, SamplingVariant, StepOutput
from fathomlm.engine.programs.choice import build_program
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.sampler import SamplerState
from fathomlm.engine.schedule import PrefillChunk, SchedulerOutput
from fathomlm.engine.sequence import Sequence as HeldSequence
from fathomlm.engine.sizing import (
    STAYS_FULL,
    check_entries,
    check_forced,
    exits_of,
    followed_passes,
    layout_for,
    prefix_entries,
    row_counts,
    settled_exiting,
    sizes_of,
)
from fathomlm.engine.sources import SourceReader
from fathomlm.model.decoder import Decoder
from fathomlm.model.seq2seq import FathomForSeq2SeqLM

WARM_UPS = 2
UNTOLD = -(1 << 62)
"""Stands where a pass that runs will tell something else."""
LOOKS = 1024
"""How often the host looks for what a pass tells before it asks whether the device is still well."""
_let_others_run = partial(select.select, (), (), (), 0) if os.name == "posix" else partial(time.sleep, 0)
"""Other threads may have the interpreter. On Linux `time.sleep(0)` sleeps for 50 us, and this comes back at once."""


class _Work(NamedTuple):
    """What a launch starts."""

    start: Callable[[], object]
    rows: int
    alternatives: bool


class DeviceMoment:
    """A point in the device's work, which may lie ahead; on a CPU now."""

    def __init__(self, gpu: bool) -> None:
        self._at = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if gpu else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def until(self, later: DeviceMoment) -> float:
        """Seconds; waits for the later one."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000


class PrefilledEntries:
    """How many entries the tables of some slots have behind a prefill pass, and before the decode steps that follow. What
    routed tokens have left the device tells, when it gets there."""

    def __init__(self, entries_KT: Tensor | Sequence[tuple[int, ...]]) -> None:
        self.later = isinstance(entries_KT, Tensor)
        """Whether asking waits for the device."""
        self._event = None
        if isinstance(entries_KT, Tensor) and entries_KT.is_cuda:
            entries_KT = entries_KT.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._entries_KT = entries_KT

    def get(self) -> list[tuple[int, ...]]:
        if self._event is not None:
            self._event.synchronize()
        found = self._entries_KT
        return [tuple(entries) for entries in (found.tolist() if isinstance(found, Tensor) else found)]


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        options: EngineOptions,
        ends: Sequence[int] = (),
        exiting: Exiting | None = None,
        encodes: FathomForSeq2SeqLM | None = None,
    ) -> None:
        """`encodes` is the model of the decoder, where it has an encoder."""
        self.decoder, self.options = decoder, options
        exiting = None if exiting is None else settled_exiting(exiting, decoder, options.batch_size)
        weight = decoder.embed.weight
        self.device = weight.device
        gpu = self.device.type == "cuda"
        self.exiting, self.exits = exiting, exits_of(decoder.plan, exiting)
        own = () if exiting is None else exiting.own_steps(decoder.plan)
        self.layout = layout_for(decoder, exiting)
        drafts = exiting is not None and exiting.mode == "speculative"
        check_forced(decoder.plan, self.layout, options, len(self.exits), drafts)
        check_entries(options, self.device)
        self.sizes = sizes_of(decoder, self.layout, options, gpu, exiting if self.exits or own else None)
        self._captures = gpu if options.capture is None else options.capture
        self.pages = KVPages(
            decoder.architecture, self.layout, self.sizes.pool_pages, options.page_size, self.device,
            entry_dtype(options.kv_dtype, weight.dtype), prefix_entries(decoder),
        )  # fmt: skip
        pages = -(-(self.sizes.max_length + self.sizes.spare) // options.page_size)
        self.state = EngineState(
            self.layout, self.sizes.max_sequences, pages, decoder.architecture.hidden, decoder.plan.recursions, self.device,
            weight.dtype, -(-self.sizes.max_source // options.page_size),
        )  # fmt: skip
        self._reader: SourceReader | None = None
        if self.state.sources is not None:
            assert encodes is not None, "a decoder that looks at sources comes with its encoder"
            self._reader = SourceReader(
                encodes, self.pages, self.state.sources, self.sizes.prefill_chunk, self.state.upload, captures=self._captures
            )
        self.sampler = SamplerState(
            self.sizes.max_sequences, decoder.architecture.vocab, self.device, options.max_logprobs,
            penalties=options.penalties,
        )  # fmt: skip
        compiled = gpu if options.compile is None else options.compile
        self.layers = PagedLayers(
            decoder, self.layout, self.pages, self.sizes.max_length, own=own, sources=self.state.sources,
            fuse=options.fuse, compiled=compiled, alone=options.batch_size == 1,
            merge=options.merge,
        )  # fmt: skip
        ends_E = torch.tensor(sorted(ends), dtype=torch.int64, device=self.device)
        parts = ProgramContext(
            decoder.plan, self.layout, self.layers, self.state, self.sampler, ends_E, options.batch_size, options.page_size,
            compiled, skips=self.device.type == "cpu",
        )  # fmt: skip
        self.program = build_program(parts, decoder, options, self.exits, exiting)
        # Attention of relative positions is plain outside fused layers, and dear for rows of nothing.
        relative = decoder.architecture.positions == "relative" and not self.layers.fused
        pads = self._captures and not relative
        self.short_prefill = CapturedPrefill(
            lambda batch: self.program.prefill(batch), sizes_for(decoder) if pads else (), captures=self._captures
        )
        self._graphs: dict[SamplingVariant, torch.cuda.CUDAGraph] = {}
        self.captures = 0
        """How many decode steps were captured, which takes seconds."""
        self._pool: Any = None
        rows, burst = self.program.output.ints_NC.shape[0], self.sizes.burst
        places, alternatives = (self.sizes.lag + 2) * self.sizes.longest_burst, self.sampler.max_logprobs
        self._ring = StepOutput.empty(places * rows, alternatives, self.device, pinned=gpu)
        self._outputs = [self._ring.part(place, rows) for place in range(places)]
        together = burst > 1 and self.layout.kind in ("whole", "routed") and (not gpu or options.batch_size == 1)
        self._at_once = (1, burst) if together else (1,)
        """Decode steps that may be started as one piece of work. On a GPU that gains where a step is short: 2 % of a 360M
        model's for one sequence on an H200, nothing for 256."""
        self._burst_output = StepOutput.empty(burst * rows if together else 0, alternatives, self.device)
        self._events = [torch.cuda.Event() if gpu else None for _ in self._outputs]  # type: ignore[no-untyped-call]
        self._ends = list(self._events)
        """Of each output the event behind it, which may be that of the last one of its burst."""
        self._words = [output.ints_NC[0].numpy().data for output in self._outputs]
        """Of each output the first row, to be looked at without asking the device."""
        self._pairs: dict[tuple[int, int], tuple[StepOutput, StepOutput]] = {}
        self._told = [rows] * len(self._outputs)
        self._passes: dict[tuple[str, int], _Work] = {}
        """Passes that the host chooses, as the requests on the device need them."""
        self.row_counts = row_counts(self.layout.kind, options.batch_size) if gpu else ()
        """Rows of a forward pass of decode steps for few sequences, rising. On a CPU rows that nobody needs cost nothing."""
        self.core_passes = followed_passes(decoder.plan, options) if gpu and self.layout.kind == "routed" else None
        """routed: how many passes of the block decode steps have, where that is not fixed. On a CPU rows of nobody cost
        nothing, and a pass more does no harm."""
        self._launched = 0
        self._unsettled = False
        """Whether the last step left drafts to verify."""

    @torch.no_grad()
    def apply(self, scheduled: SchedulerOutput) -> None:
        """Everything that was scheduled but the chunks."""
        sizes, (_, _, pages) = self.sizes, self.state.tables_STP.shape
        scheduled.check(
            tables=sizes.tables, pool_pages=sizes.pool_pages, max_sequences=sizes.max_sequences, pages=pages,
            size=self.options.page_size,
        )  # fmt: skip
        if scheduled.stops or scheduled.placements:
            self._passes.clear()
        taken = {placement.slot for placement in scheduled.placements}
        free = [slot for slot in scheduled.stops if slot not in taken]  # what is placed overwrites what was there
        self.sampler.clear(free)
        if placed := [(one.slot, one.sequence) for one in scheduled.placements]:
            self.sampler.place_all([(slot, one.request, one.prompt, one.tokens, one.allowed) for slot, one in placed])
        self.state.stop(free)
        for copy in scheduled.copies:
            self.pages.copy(copy)
        self.state.apply(scheduled)
        if scheduled.placements:
            if self._reader is not None:
                self._reader.read(scheduled.placements)
            threshold = None if self.exiting is None else self.exiting.threshold_now()
            self.program.place(scheduled.placements, 1.0 if threshold is None else threshold)

    @torch.no_grad()
    def go_on(self, held: Sequence[HeldSequence]) -> None:
        """Sequences that wait to be told what may come next."""
        for sequence in held:
            assert sequence.slot is not None
            self.sampler.set_bias(sequence.slot, sequence.request, sequence.allowed)
        self.state.start([sequence.slot for sequence in held if sequence.slot is not None])

    @torch.no_grad()
    def prefill(
        self, chunks: Sequence[PrefillChunk], tokens: Sequence[Sequence[int]], depths: Sequence[Sequence[int]] | None = None
    ) -> PrefilledEntries:
        """Add the entries of the chunks' tokens, which left after `depths` layers where that is given; returns how many each
        chunk's slot has then.

        All chunks are one pass: one that is not captured costs a GPU's host as much for ten tokens as for a thousand.
        """
        size = self.short_prefill.size(sum(map(len, tokens))) if depths is None else None
        self.short_prefill(self.state.prefill_columns(chunks, tokens, depths, size), size)
        self.state.start([chunk.slot for chunk in chunks if chunk.last])
        if self.layout.kind != "routed":
            return PrefilledEntries([(chunk.first + chunk.count,) for chunk in chunks])
        slots_K = self.state.upload([chunk.slot for chunk in chunks])
        return PrefilledEntries(self.state.entries_ST.index_select(0, slots_K))

    def launch(self, drafts: bool = True, sequences: int | None = None, only: tuple[str, int] | None = None) -> int:
        """Start a decode step, with drafts where the program has any; returns its number, for `collect`. Where no more than
        `sequences` are on the device, rows for those are enough (`rows_for`). `only`: one pass of it, and with so many
        rows, whose `outcome` may be asked for. Until the device has its work nothing is done that could be done before or
        later."""
        number = self._launched
        at = number % len(self._outputs)
        work = None if only is None else self._passes.get(only)
        if work is None:
            work = self._work(drafts, sequences, only)
        self._unsettled = drafts or only is not None
        if only is not None:
            self._words[at][SLOT] = self._words[at][FLAGS] = UNTOLD
        work.start()
        self._launched += 1
        self._told[at] = work.rows
        here, there = self._pair(at, work.rows)
        here.copy_(there, alternatives=work.alternatives)
        self._ends[at] = event = self._events[at]
        if event is not None:
            event.record()
        return number

    def launch_burst(self, steps: int, drafts: bool = True, sequences: int | None = None) -> list[int]:
        """`launch` for up to as many decode steps as the longest burst has. One of `sizes.burst` may be one piece of work,
        with one copy of all that it leaves: between two pieces a GPU waits for some 20 us. For that every burst begins where
        a block of outputs does."""
        burst, rows = self.sizes.burst, len(self.program.output.ints_NC)
        assert steps <= self.sizes.longest_burst, f"{steps} decode steps are more than {self.sizes.longest_burst}"
        self._launched = first = -(-self._launched // burst) * burst
        if steps not in self._at_once[1:]:
            return [self.launch(drafts, sequences) for _ in range(steps)]
        work = self._work(drafts, sequences, None, steps)
        work.start()
        self._launched += steps
        at = first % len(self._outputs)
        self._ring.part(at // burst, burst * rows).copy_(self._burst_output, alternatives=work.alternatives)
        if (event := self._events[at + steps - 1]) is not None:
            event.record()
        for place in range(at, at + steps):
            self._told[place], self._ends[place] = work.rows, event
        return list(range(first, first + steps))

    @property
    def launched(self) -> int:
        """How many decode steps were started; the next one has at least this number."""
        return self._launched

    @property
    def idle(self) -> bool:
        """Whether a GPU has done all decode steps that were started, and so waits for the host."""
        event = self._ends[(self._launched - 1) % len(self._ends)] if self._launched else None
        return event is not None and bool(event.query())  # type: ignore[no-untyped-call]

    def moment(self) -> DeviceMoment:
        """Behind all that was started so far."""
        return DeviceMoment(self.device.type == "cuda")

    def _work(self, drafts: bool, sequences: int | None, only: tuple[str, int] | None, steps: int = 1) -> _Work:
        sampler = self.sampler
        rows = None if sequences is None else self.rows_for(sequences)
        name, rows = (None, rows) if only is None else only
        may = isinstance(self.program, DraftProgram | DraftLayerProgram) and self.program.settles
        settled = may and not (drafts or self._unsettled or only)
        rows = self.state.slots if settled else rows
        kind = sampler.mode, sampler.penalised, sampler.biased, sampler.alternatives
        passes = None if self.core_passes is None else self.core_passes.next(steps)
        variant = SamplingVariant(*kind, drafts, rows, name, settled, steps, passes)
        start: Callable[[], object] = partial(self._decode_step, variant)
        if self._captures:
            if variant not in self._graphs and (name is not None or settled):
                self._capture(variant)
            elif variant not in self._graphs:  # with every number of rows and of passes: none should be waited for later
                reachable = (None,) if self.core_passes is None else self.core_passes.reachable
                for many, at_once, each in itertools.product((None, *self.row_counts), self._at_once, reachable):
                    self._capture(dataclasses.replace(variant, rows=many, steps=at_once, passes=each))
            start = self._graphs[variant].replay
        output = len(self.program.output.ints_NC)
        turns = output // self.options.batch_size if self.layout.kind == "routed" else 1
        work = _Work(start, output if rows is None else rows * turns, variant.alternatives)
        if only is not None:
            self._passes[only] = work
        return work

    def rows_for(self, sequences: int) -> int | None:
        """The fewest rows that are enough for so many sequences. Those of a routed model wait for different passes, so that
        some more keep them full; with many more a larger pass would do more in less time."""
        rows = sequences / STAYS_FULL if self.layout.kind == "routed" else sequences
        return next((many for many in self.row_counts if many >= rows), None)

    @torch.no_grad()
    def _decode_step(self, variant: SamplingVariant) -> None:
        """One decode step, or those of a burst, each with an output of its own."""
        program = self.program
        if variant.steps == 1:
            program.decode_step(variant)
            return
        own = program.output
        try:
            for number in range(variant.steps):
                program.output = self._burst_output.part(number, len(own.ints_NC))
                program.decode_step(variant)
        finally:
            program.output = own

    def _pair(self, at: int, rows: int) -> tuple[StepOutput, StepOutput]:
        """Where the host finds what was chosen, and where the device leaves it."""
        if (found := self._pairs.get((at, rows))) is None:
            found = self._pairs[at, rows] = self._outputs[at].part(0, rows), self.program.output.part(0, rows)
        return found

    def outcome(self, number: int) -> int | None:
        """The flags of the first row of one pass, which say what comes next; None where nobody ran it. It is looked for in
        memory: an event would tell later, and only behind all that the pass leaves. Other threads may run meanwhile. Where
        the device has failed the event says so, by raising."""
        at = number % len(self._outputs)
        words, event, looks = self._words[at], self._events[at], 0
        while words[FLAGS] == UNTOLD or words[SLOT] == UNTOLD:
            looks += 1
            if looks % LOOKS == 0 and event is not None and event.query():  # type: ignore[no-untyped-call]
                break
            _let_others_run()
        return None if words[SLOT] == self.state.spare else int(words[FLAGS])

    def collect(self, numbers: Sequence[int]) -> list[StepOutput]:
        """What some decode steps chose, the earliest first; waits for the last of them. The tensors are on the host, and
        hold until another burst has begun."""
        if (event := self._ends[numbers[-1] % len(self._outputs)]) is not None:
            event.synchronize()
        places = [number % len(self._outputs) for number in numbers]
        return [self._pair(at, self._told[at])[0] for at in places]

    @torch.no_grad()
    def _capture(self, variant: SamplingVariant) -> None:
        """Capture a decode step. It is run a few times first, so that kernels are compiled; what it changes is put back."""
        before = self._changed()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            kept = [tensor.clone() for tensor in before]
            self.state.stage_S.fill_(-1)  # nobody runs: no page is written
            for _ in range(WARM_UPS if variant.steps == 1 else 1):  # a burst comes behind its step
                self._decode_step(variant)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            self._decode_step(variant)
        self._pool = self._pool or graph.pool()
        self._graphs[variant] = graph
        self.captures += 1
        for tensor, old in zip(before, kept, strict=True):
            tensor.copy_(old)

    def _changed(self) -> list[Tensor]:
        held = [self.state, self.program]
        return [value for one in held for value in vars(one).values() if isinstance(value, Tensor)]
