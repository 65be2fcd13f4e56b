"""Who runs, who waits, and who gets which page. No tensors: the device is told in `SchedulerOutput`s and answers in reports.

The device runs ahead of the host. Pages are therefore handed out before they are needed, and a row without any waits on
the device until more are granted. Reports come late; the epoch in them tells which placement they speak of.

Two rules keep it fair. Sequences are placed strictly in the order in which they came, and when a pool runs dry, the most
recently placed one goes back to the front of the queue. So the oldest always goes on, if need be with all the pages, and
everybody becomes the oldest in time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, abc
from dataclasses import dataclass
from itertools import islice

from fathomlm.engine.page_manager import PageManager
from fathomlm.engine.schedule import Placement, PrefillChunk, SchedulerOutput
from fathomlm.engine.sequence import Sequence
from fathomlm.errors import QueueFull, RequestTooLarge


@dataclass(frozen=True, slots=True)
class Counters:
    """Where the scheduler stands, for metrics. The last three only grow."""

    queued: int
    prefilling: int
    running: int
    pages_used: tuple[int, ...]
    """By pool, those that only the prefix cache holds among them."""
    pages_cached: tuple[int, ...]
    """By pool: held by the prefix cache alone, to be had at once."""
    preemptions: int
    prefix_hits: int
    """Tokens that were not prefilled, because the prefix cache had them."""
    evictions: int


class Scheduler:
    """Sequences in, `SchedulerOutput`s out."""

    def __init__(
        self,
        *,
        tables: abc.Sequence[int],
        pool_pages: abc.Sequence[int],
        page_size: int,
        max_sequences: int,
        max_queue: int,
        prefill_chunk: int,
        lookahead: int,
        max_length: int,
        max_source: int = 0,
        prefix_caching: bool = True,
        catch_up: abc.Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        """`tables[t]` is the pool of table t, `pool_pages` the size of each pool. At most `prefill_chunk` tokens are
        prefilled at a time, over all sequences. `lookahead` is how many tokens a sequence may run before the host knows the
        first. `max_source` is the most tokens that an encoder reads. `catch_up` is called with a sequence that is about to
        be preempted: it may have tokens that were not noted."""
        assert min(max_sequences, max_queue, prefill_chunk, lookahead, max_length) >= 1, "every size is at least 1"
        self.page_manager = PageManager(
            tables=tables, pool_pages=pool_pages, page_size=page_size, prefix_caching=prefix_caching
        )
        self.max_queue = max_queue
        self.prefill_chunk = prefill_chunk
        self._lookahead = lookahead
        self.max_sequences = max_sequences
        self.max_length, self.max_source = max_length, max_source
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._placed: dict[int, Sequence] = {}  # in the order of their placement
        self._wanting: dict[int, Sequence] = {}  # of those placed: who is prefilled, or has pages for too few tokens
        self._running = 0  # of those placed: how many are prefilled
        self._catch_up = catch_up
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._stops: list[int] = []
        self._epoch = 0
        self._head_may_fit = True  # false from a placement that failed for want of pages until something changes for it
        self._budget = 0  # tokens that may still be prefilled before the next decode step
        self._preemptions = 0
        self._prefix_hits = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """The queue, the next to be placed first."""
        return tuple(self._queue.values())

    @property
    def roomy(self) -> bool:
        """Whether each sequence might have two pages of every table more without taking them from another."""
        return self.page_manager.available(2 * self.max_sequences)

    @property
    def roomy_to_prefill(self) -> bool:
        """The same, and beyond that pages of every table for all tokens of a pass over prompts."""
        return self.page_manager.available(2 * self.max_sequences + -(-self.prefill_chunk // self.page_manager.page_size))

    @property
    def more_to_prefill(self) -> bool:
        """Whether somebody waits, or has tokens to prefill that were not issued."""
        return bool(self._queue) or any(sequence.unissued for sequence in self._wanting.values())

    def repeats(self, sequences: abc.Sequence[Sequence], chunks: abc.Sequence[PrefillChunk]) -> bool:
        """Whether one of those that may be placed now shares the first page of one of these chunks, and so might find in the
        cache what the chunk leaves there."""
        if not self.page_manager.prefix_caching:
            return False
        size = self.page_manager.page_size
        firsts = [chunk.first - chunk.first % size for chunk in chunks]
        pages = {sequence.page(first, size) for sequence, first in zip(sequences, firsts, strict=True)}
        next_ones, distinct = islice(self._queue.values(), len(self._free_slots)), set(firsts)
        return any(waiting.page(first, size) in pages for waiting in next_ones for first in distinct)

    @property
    def lookahead(self) -> int:
        return self._lookahead

    @lookahead.setter
    def lookahead(self, tokens: int) -> None:
        """From the next `schedule` on, for those that run already too."""
        self._lookahead = tokens
        for sequence in self._placed.values():
            self._catch_up(sequence)
        self._wanting.update(self._placed)

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many sequences on the device are prefilled."""
        return self._running

    @property
    def occupied(self) -> int:
        """How many sequences are on the device."""
        return len(self._placed)

    @property
    def placed(self) -> abc.ValuesView[Sequence]:
        """Sequences on the device, in the order of their placement."""
        return self._placed.values()

    @property
    def busy(self) -> bool:
        """Whether anybody waits or runs, or the device has yet to be told that a sequence stopped."""
        return bool(self._queue or self._placed or self._stops)

    def counters(self) -> Counters:
        return Counters(
            queued=len(self._queue),
            prefilling=len(self._placed) - self._running,
            running=self._running,
            pages_used=tuple(pool.used for pool in self.page_manager.pools),
            pages_cached=tuple(pool.spare for pool in self.page_manager.pools),
            preemptions=self._preemptions,
            prefix_hits=self._prefix_hits,
            evictions=self.page_manager.prefixes.evictions,
        )

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence, or refuse it. One that is queued fits, however deep its tokens go."""
        assert sequence.prompt, f"sequence {sequence.id} has an empty prompt"
        assert sequence.max_new_tokens >= 1, f"sequence {sequence.id} is to have no new token"
        assert sequence.state == "waiting", f"sequence {sequence.id} was here before"
        assert self._find(sequence.id) is None, f"id {sequence.id} is in use"
        self._refuse_too_large(sequence)
        if len(self._queue) >= self.max_queue:
            raise QueueFull(f"{len(self._queue)} requests are waiting and the queue holds {self.max_queue}; try again later")
        self._queue[sequence.id] = sequence

    def cancel(self, id: int) -> bool:
        """Take a sequence out, wherever it is. Returns whether it was there: it may have ended just before."""
        sequence = self._find(id)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def finish(self, id: int) -> None:
        """A sequence has all that it is to have. Call this before the next `schedule`, or it would run on."""
        self._end(self._must_find(id))

    def fail(self, id: int) -> None:
        """Something is wrong with a sequence. What it may have added to the prefix cache goes: nobody shall inherit it."""
        sequence = self._must_find(id)
        self.page_manager.prefixes.forget(sequence.keys, beyond=sequence.reused)
        self._end(sequence, remember=False)

    def note(self, id: int, epoch: int, tokens: abc.Iterable[int], entries: abc.Sequence[int]) -> bool:
        """New tokens of a running sequence, and its entries by table. Returns whether it counted: not if it is stale."""
        sequence = self._current(id, epoch)
        if sequence is None:
            return False
        self.advance(sequence, tokens, entries)
        return True

    def advance(self, sequence: Sequence, tokens: abc.Iterable[int], entries: abc.Sequence[int]) -> None:
        """`note` for a sequence that is known to be the current one. It may wait while the pages last: when there is no room
        for `lookahead` tokens more, it has to be called before the next `schedule`."""
        assert sequence.state == "running", f"sequence {sequence.id} is {sequence.state}, but has run"
        known = sequence.tokens
        known.extend(tokens)
        assert len(known) <= sequence.max_new_tokens, f"sequence {sequence.id} has {len(known)} tokens, too many"
        self._confirm(sequence, entries)
        if len(known) == sequence.max_new_tokens or self.page_manager.short(sequence, self.lookahead):
            self._wanting[sequence.id] = sequence  # those that have all their tokens too, lest nobody finishes them

    def confirm_prefill(self, id: int, epoch: int, upto: int, entries: abc.Sequence[int]) -> bool:
        """The first `upto` tokens are prefilled, and these are the entries of just them. Returns whether it counted."""
        sequence = self._current(id, epoch)
        if sequence is None:
            return False
        assert sequence.confirmed < upto <= sequence.prefilled, f"sequence {id}: {upto} of {sequence.prefilled} tokens"
        assert entries[0] == upto, f"sequence {id} has {entries[0]} entries of {upto} tokens"
        self._confirm(sequence, entries)
        sequence.confirmed = upto
        if upto == sequence.goal:
            sequence.state = "running"
            self._running += 1
        self.page_manager.remember_chunk(sequence)
        self._head_may_fit = True
        return True

    def schedule(self) -> SchedulerOutput:
        """What changes before the next decode step. Its cost grows with what there is to hand out; sequences that go on as
        they are cost nothing."""
        out, self._budget = SchedulerOutput(stops=self._stops), self.prefill_chunk
        preemptions = self._preemptions
        wanting = sorted(self._wanting.values(), key=lambda sequence: sequence.epoch)  # the oldest placement first
        self._go_on(wanting, out)
        for sequence in wanting:
            self._look_ahead(sequence, out)
        if self._preemptions == preemptions:  # else the victim would come straight back
            while self._place_next(out):
                pass
        self._stops = []
        return out

    def _go_on(self, wanting: list[Sequence], out: SchedulerOutput) -> None:
        """Room for one more token for everybody, the oldest first, and a chunk for those that are being prefilled."""
        for sequence in wanting:
            if sequence.id not in self._placed:
                return  # preempted for an older one, like all behind it
            assert len(sequence.tokens) < sequence.max_new_tokens, f"sequence {sequence.id} has all its tokens: finish it"
            unissued = sequence.unissued
            if unissued and not self._budget:
                continue
            if not unissued and not self.page_manager.short(sequence, 1):
                continue  # it has looked ahead, and wants to again
            if not self._make_room(sequence):
                return
            if unissued:
                self._prefill_on(sequence, out)
            else:
                self.page_manager.grow(sequence, 1, out)

    def _make_room(self, sequence: Sequence) -> bool:
        """See to it that a token more fits: cached prefixes go first, then whoever came last, perhaps this one itself."""
        if not self.page_manager.fits(sequence, 1):
            self.page_manager.let_go(sequence)
            self._head_may_fit = True
        while not self.page_manager.fits(sequence, 1):
            self._preempt(next(reversed(self._placed.values())))
            if sequence.id not in self._placed:
                return False
        return True

    def _prefill_on(self, sequence: Sequence, out: SchedulerOutput) -> None:
        """The next chunk of a sequence that has room for a token of it: as much as the budget and free pages allow."""
        most = min(self._budget, sequence.unissued)
        if not most:
            return
        assert sequence.slot is not None
        first, fits = sequence.prefilled, self.page_manager.fits
        if not fits(sequence, most):
            most = bisect_left(range(1, most), True, key=lambda count: not fits(sequence, count))
        count = self._cut(first, most)
        self.page_manager.grow(sequence, count, out)
        sequence.prefilled += count
        self._budget -= count
        out.chunks.append(PrefillChunk(sequence.slot, sequence.epoch, first, count, last=not sequence.unissued))

    def _cut(self, first: int, count: int) -> int:
        """Several tables can be cached only where a chunk ends: it ends on a multiple of the page size, if it meets one."""
        size = self.page_manager.page_size
        met = (first + count) // size * size - first
        return met if met > 0 and self.page_manager.prefix_caching and len(self.page_manager.tables) > 1 else count

    def _look_ahead(self, sequence: Sequence, out: SchedulerOutput) -> None:
        """Room for the tokens that run before the host hears of them, but only from pages that no sequence holds. Where they
        are plenty it gets some more, so that it need not come again with every page."""
        if sequence.id not in self._placed:
            return
        room = False
        if not sequence.unissued:
            more = self.page_manager.ahead(self.max_sequences) * self.page_manager.page_size
            enough = self.page_manager.grow(sequence, self.lookahead + more, out)
            room = enough or not self.page_manager.short(sequence, self.lookahead)
        if room:
            self._wanting.pop(sequence.id, None)
        else:
            self._wanting[sequence.id] = sequence

    def _place_next(self, out: SchedulerOutput) -> bool:
        """Place the first of the queue, if there are a slot and pages for its first chunk and one token more.

        If others are placed already, a page a pool must stay free: the next token of theirs should not preempt it.
        """
        if not (self._queue and self._free_slots and self._head_may_fit):
            return False
        sequence = next(iter(self._queue.values()))
        if (sequence.length > 1 or sequence.source) and not self._budget:
            return False
        prefix = self.page_manager.find(sequence)
        if not self.page_manager.adopt(sequence, prefix, self.prefill_chunk, headroom=1 if self._placed else 0):
            if self._placed:
                self._head_may_fit = False
                return False
            # It is alone, and the pages that it would copy are in the way. Without them every page is to be had.
            prefix = self.page_manager.prefixes.nothing()
            fits = self.page_manager.adopt(sequence, prefix, self.prefill_chunk, headroom=0)
            assert fits, f"sequence {sequence.id} does not fit into empty pools"
        self._place(sequence, out)
        self.page_manager.settle(sequence, prefix, out)
        self._budget = max(0, self._budget - len(sequence.source))
        self._prefill_on(sequence, out)
        self._look_ahead(sequence, out)
        return True

    def _place(self, sequence: Sequence, out: SchedulerOutput) -> None:
        del self._queue[sequence.id]
        self._placed[sequence.id] = sequence
        found = sequence.prefilled
        self._prefix_hits += found
        sequence.reused = min(sequence.reused, found) if sequence.epoch else found
        self._new_epoch(sequence)
        sequence.slot = self._free_slots.pop()
        ready = not sequence.unissued
        sequence.state = "running" if ready else "prefilling"
        self._running += ready
        out.placements.append(Placement(sequence.slot, sequence.epoch, sequence, tuple(sequence.entries), ready))

    def _preempt(self, victim: Sequence) -> None:
        assert len(self._placed) > 1, f"sequence {victim.id} is alone and does not fit"
        self._catch_up(victim)
        self._release(victim)
        victim.state = "waiting"
        victim.preemptions += 1
        self._preemptions += 1
        self._queue[victim.id] = victim
        self._queue.move_to_end(victim.id, last=False)

    def _end(self, sequence: Sequence, remember: bool = True) -> None:
        if sequence.slot is not None:
            self._release(sequence, remember)
        else:
            del self._queue[sequence.id]
            self._head_may_fit = True
        sequence.state = "done"

    def _release(self, sequence: Sequence, remember: bool = True) -> None:
        """Give back slot and pages. The device is told with the next output, before another sequence uses them."""
        assert sequence.slot is not None
        self._running -= sequence.state == "running"
        if remember:
            self.page_manager.remember_run(sequence)
        self.page_manager.give_back(sequence)
        self._free_slots.append(sequence.slot)
        self._stops.append(sequence.slot)
        sequence.slot = None
        self._new_epoch(sequence)
        del self._placed[sequence.id]
        self._wanting.pop(sequence.id, None)
        self._head_may_fit = True

    def _new_epoch(self, sequence: Sequence) -> None:
        self._epoch += 1
        sequence.epoch = self._epoch

    def _confirm(self, sequence: Sequence, entries: abc.Sequence[int]) -> None:
        size = self.page_manager.page_size
        for before, now, pages in zip(sequence.entries, entries, sequence.pages, strict=True):
            room = len(pages) * size
            assert before <= now <= room, f"sequence {sequence.id}: {before}, then {now} of {room} entries of a table"
        sequence.entries = list(entries)

    def _current(self, id: int, epoch: int) -> Sequence | None:
        sequence = self._placed.get(id)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def _find(self, id: int) -> Sequence | None:
        return self._placed.get(id) or self._queue.get(id)

    def _must_find(self, id: int) -> Sequence:
        sequence = self._find(id)
        assert sequence is not None, f"no sequence {id}: it has ended, or never came"
        return sequence

    def _refuse_too_large(self, sequence: Sequence) -> None:
        prompt, new, source = len(sequence.prompt), sequence.max_new_tokens, len(sequence.source)
        request = f"a prompt of {prompt} tokens and up to {new} new ones"
        if source > self.max_source:
            raise RequestTooLarge(f"a source of {source} tokens is too long; it may have {self.max_source} here")
        if source:
            request = f"a start token and up to {new} new ones for a source of {source}"
        if prompt + new > self.max_length:
            raise RequestTooLarge(f"{request} are {prompt + new} positions; a sequence has at most {self.max_length} here")
        needs = self.page_manager.worst_case(sequence)
        for index, (need, pool) in enumerate(zip(needs, self.page_manager.pools, strict=True)):
            if need > pool.total:
                pages = f"{need} pages of {self.page_manager.page_size} entries in pool {index}"
                raise RequestTooLarge(f"{request} may require {pages}, which has {pool.total}; request fewer tokens")
