"""Decode steps on their way: how many the device is given at once, and which are taken in next.

The host starts a burst of decode steps while an earlier one runs, and takes in what is older. How many steps a burst has
follows from how many tokens a step adds to a sequence (drafts), from how many tokens the sequences still need, and from
whether the device waits for the host or requests wait for a place.
"""

from __future__ import annotations

import math
import time
from collections import abc, deque

from fathomlm.engine.burst_length import BurstLength
from fathomlm.engine.chosen_passes import ChosenPasses
from fathomlm.engine.drafting import DraftControl, TimedBurst
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.runner import Runner
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sizing import STAYS_FULL
from fathomlm.engine.slot_records import SlotRecords, Totals

PACE_WEIGHT = 0.5
"""Of the last burst in what is known of how many tokens a decode step adds."""


class Launches:
    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        records: SlotRecords,
        options: EngineOptions,
        collect: abc.Callable[[abc.Sequence[int]], None],
        totals: abc.Callable[[], Totals],
    ) -> None:
        """`collect` takes in what decode steps of these numbers chose; `totals` are the engine's."""
        self._runner, self._scheduler, self._records = runner, scheduler, records
        self._collect, self._totals = collect, totals
        sizes, program, self._kind = runner.sizes, runner.program, runner.layout.kind
        self._batch_size = options.batch_size
        self._rows = options.batch_size if self._kind == "whole" else sizes.max_sequences
        drafts = isinstance(program, DraftProgram | DraftLayerProgram)
        self.pace = 1.0 if drafts or self._kind == "whole" else None
        """Tokens that a decode step adds to a sequence; None where a token may take several."""
        self._routed = program if isinstance(program, RoutedProgram) else None
        self.drafting: DraftControl | None = None
        if drafts and not options.always_draft:
            self.drafting = DraftControl()
        self.chosen: ChosenPasses | None = None
        if isinstance(program, ExitProgram) and program.chooses and sizes.max_sequences == 1:
            self.chosen = ChosenPasses(sizes, program)
        self.length = BurstLength(sizes.burst, sizes.longest_burst)
        self._overbooked = sizes.max_sequences >= STAYS_FULL * options.batch_size
        self._crowded = False
        """Whether requests wait for a place while others take the rows of sequences that end."""
        self.in_flight: deque[int] = deque()
        self.bursts: deque[int] = deque(maxlen=sizes.lag)
        """Decode steps of the last bursts: those that the device may be ahead."""

    @property
    def busy(self) -> bool:
        ahead = self.chosen is not None and bool(self.chosen.under_way)
        return bool(self.in_flight) or ahead

    def collect_due(self, alone: bool) -> None:
        """What the device is not to be ahead with. `alone`: there are only sequences that wait for the host."""
        behind = 0 if alone else sum(self.bursts)
        self._collect_first(len(self.in_flight) - behind)

    def collect_all(self) -> None:
        self._collect_chosen()
        self._collect_first(len(self.in_flight))

    def next_burst(self, constrained: bool) -> int:
        """How many decode steps come next, where the sequences need as many. Pages for them are scheduled behind this.
        `constrained`: somebody has one token for each burst, so bursts stay short."""
        length, scheduler = self.length, self._scheduler
        watched = self.in_flight and scheduler.running and length.most > length.least
        if watched and length.observe(self._crowded or self._runner.idle, scheduler.roomy and not constrained):
            self._look_ahead(length.steps)
        return length.steps

    def fix_length(self) -> None:
        """Bursts keep the length that they have at first."""
        self.length.fix()
        self._look_ahead(self.length.steps)

    def _look_ahead(self, steps: int) -> None:
        before, lookahead = self._scheduler.lookahead, self._runner.sizes.lookahead_for(steps)
        if lookahead != before:
            self._records.look_further(lookahead - before)
            self._scheduler.lookahead = lookahead

    def start(self, burst: int, alone: bool, prefilled: bool) -> None:
        """Up to so many decode steps for the sequences that run. `prefilled`: the device has prompts to read first."""
        self._crowded = self._overbooked and self._scheduler.queued > 0
        if not self._scheduler.running:
            self._collect_chosen()
            self._collect_first(1)
            return
        if not self._steps_needed():
            self.bursts.append(0)
            return
        drafts = self.drafting is None or self.drafting.choose(self._scheduler.running)
        if self.chosen is not None and drafts and not alone:
            self._collect_first(len(self.in_flight))
            self._run_passes(self.chosen, prefilled)
            return
        self._collect_chosen()
        if drafts and self.pace is not None:  # about as many tokens: where a sequence ends the rest is for nothing
            burst = math.ceil(burst / self.pace)
        burst = min(burst, self._steps_needed())
        self.bursts.append(burst)
        self.launch(burst, drafts)

    def _steps_needed(self) -> int:
        """How many decode steps the sequences will need beyond those in flight: each has a token of as many as there are
        rows, or with drafts about as many as of late. 0 where it is better to wait for what those in flight bring."""
        if self.pace is not None:
            left = self._records.most_left(self._rows) - self.pace * len(self.in_flight)
            needed = math.ceil(left / self.pace)
        elif self._routed is not None:
            needed = self._routed_steps(self._routed, self._records.most_left(self._rows)) - len(self.in_flight)
        else:
            return self.length.steps
        return max(0 if self.in_flight else 1, needed)

    def _routed_steps(self, program: RoutedProgram, tokens: int) -> int:
        """The most decode steps that so many tokens of a mixture of recursions take: in one turn a sequence enters, and each
        token runs all recursions and, with more sequences than rows, waits for the others. What a burst has beyond it is for
        nothing where completions are short, and prompts of others wait for it."""
        runner, turns = self._runner, len(program.cores)
        passes = sum(program.cores) if runner.core_passes is None else math.floor(runner.core_passes.wanted)
        occupied = self._scheduler.occupied
        waiting = math.ceil(occupied / (runner.rows_for(occupied) or self._batch_size))
        return math.ceil(waiting * (1 + tokens * math.ceil(program.recursions / max(1, passes // turns))) / turns)

    def launch(self, burst: int, drafts: bool) -> None:
        """Some decode steps, timed where it is asked whether drafts pay."""
        runner, drafting, running = self._runner, self.drafting, self._scheduler.running
        timed = drafting is not None and running > 0 and burst > 0
        start, captures = runner.moment() if timed else None, runner.captures
        numbers = runner.launch_burst(burst, drafts, self._scheduler.occupied)
        self.in_flight += numbers
        self._totals().decode_steps += burst
        if drafting is not None and start is not None and captures == runner.captures:
            end = runner.moment()
            drafting.begin(TimedBurst(numbers[0], numbers[-1], drafts, drafting.changed, running, start, end))

    def _run_passes(self, chosen: ChosenPasses, prefilled: bool) -> None:
        """Some passes of the one sequence that runs. The host waits for each, so that they take as long as it waits, unless
        they waited for a prompt."""
        runner = self._runner
        begun, tokens, captures = time.perf_counter(), self._totals().tokens, runner.captures
        running = [sequence for sequence in self._scheduler.placed if sequence.state == "running"]
        if chosen.under_way and (not running or running[0].epoch != chosen.epoch):
            self._collect(chosen.give_up())
        if running:
            numbers = chosen.run(runner, running[0].epoch, self._records.most_left())
            self._totals().decode_steps += len(numbers)
            self._collect(numbers)
            drafting, waited = self.drafting, prefilled or captures != runner.captures
            if drafting is not None and not waited:
                seconds = time.perf_counter() - begun
                drafting.note(True, 1, self._totals().tokens - tokens, seconds, changed=drafting.changed)

    def _collect_chosen(self) -> None:
        """Passes that were started ahead, where something else comes next."""
        if self.chosen is not None and self.chosen.under_way:
            self._collect(self.chosen.give_up())

    def _collect_first(self, many: int) -> None:
        """The earliest of the decode steps in flight."""
        if not self.in_flight or many <= 0:
            return
        running, tokens = self._scheduler.running, self._totals().tokens
        numbers = [self.in_flight.popleft() for _ in range(many)]
        self._collect(numbers)
        added = self._totals().tokens - tokens
        if self.drafting is not None:
            self.drafting.end(numbers[0], numbers[-1], added)
        if self.pace is not None and self._kind != "whole" and running:
            self.pace += PACE_WEIGHT * (max(1.0, added / (many * running)) - self.pace)
