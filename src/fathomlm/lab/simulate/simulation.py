"""The engine's loop with a simulated device: the real scheduler and page pools, and a clock in place of tensors.

One `step` is `Engine.step`: hear what an earlier tick chose, plan, read prompts, start the next ticks. Host and device have
a clock each. Where a device works by itself the host's goes on; it waits when it has to hear of a tick that is not over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fathomlm.decode.sampling import Sampling
from fathomlm.engine.options import PAGE
from fathomlm.engine.request import Request
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence
from fathomlm.lab.simulate.costs import Costs
from fathomlm.lab.simulate.devices import Device, Heard
from fathomlm.lab.simulate.outcome import Outcome
from fathomlm.lab.simulate.trajectories import Trajectories

Progress = Callable[[int, int], None]
TOLD_EVERY = 20_000
"""Tokens between two reports of progress."""
CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the engine is set up: `runner.Sizes`, and what the scheduler needs besides."""

    slots: int
    tables: tuple[int, ...] = (0,)
    pool_pages: tuple[int, ...] | None = None
    """None is as many as all slots may need."""
    page_size: int = PAGE
    chunk: int = CHUNK
    burst: int = 1
    lag: int = 0
    lookahead: int = 2
    """How many tokens a row may run before the host has heard of the first."""

    def pages(self, longest: int) -> tuple[int, ...]:
        if self.pool_pages is not None:
            return self.pool_pages
        each = self.slots * (-(-longest // self.page_size) + 1)
        return tuple(each * self.tables.count(pool) for pool in range(max(self.tables) + 1))


@dataclass(slots=True)
class _Clock:
    """Milliseconds of the host and of the device."""

    overlapped: bool
    host: float = 0.0
    device: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def think(self, ms: float) -> None:
        self.host += ms
        self._note("host", ms)

    def launch(self, parts: dict[str, float]) -> float:
        """Start some work; returns when it is over."""
        self.device = max(self.device, self.host) + sum(parts.values())
        for kind, ms in parts.items():
            self._note(kind, ms)
        if not self.overlapped:
            self.host = self.device
        return self.device

    def read(self, ms: float) -> None:
        self.device = self.host = max(self.device, self.host) + ms
        self._note("reading", ms)

    def wait(self, until: float) -> None:
        self.host = max(self.host, until)

    def _note(self, kind: str, ms: float) -> None:
        if ms:
            self.spent[kind] = self.spent.get(kind, 0.0) + ms


class Simulation:
    def __init__(self, device: Device, setting: Setting, costs: Costs, trajectories: Trajectories) -> None:
        self.device, self.setting, self.costs, self.trajectories = device, setting, costs, trajectories
        longest = trajectories.longest
        self.scheduler = Scheduler(
            tables=setting.tables, pool_pages=setting.pages(longest), page_size=setting.page_size,
            max_sequences=setting.slots, max_queue=len(trajectories.texts), prefill_chunk=setting.chunk,
            lookahead=setting.lookahead, max_length=longest, prefix_caching=False,
        )  # fmt: skip
        self._texts = dict(enumerate(trajectories.texts))
        self._under_way: dict[int, Sequence] = {}
        for id, text in self._texts.items():
            sampling = Sampling(max_new_tokens=len(text.depths))
            self._under_way[id] = Sequence(Request(id=id, prompt=(0,) * text.prompt, sampling=sampling))
            self.scheduler.submit(self._under_way[id])
        self._flying: deque[tuple[float, list[Heard]]] = deque()
        self.clock = _Clock(costs.overlapped)
        self.ticks = self.tokens = 0
        self.offered: dict[str, int] = {}
        self.filled: dict[str, int] = {}
        self._last = 0.0

    def run(self, on_progress: Progress | None = None) -> Outcome:
        total, told = self.trajectories.tokens, 0
        while self._under_way:
            self.step()
            if on_progress is not None and self.tokens - told >= TOLD_EVERY:
                told = self.tokens
                on_progress(self.tokens, total)
        return Outcome(
            tokens=self.tokens,
            ms=self._last,
            ticks=self.ticks,
            rows=self.device.rows,
            slots=self.setting.slots,
            offered=dict(self.offered),
            filled=dict(self.filled),
            spent=dict(self.clock.spent),
            preemptions=self.scheduler.counters().preemptions,
        )

    def step(self) -> None:
        """Hear, tell, start."""
        clock, costs, setting = self.clock, self.costs, self.setting
        clock.think(costs.host.step)
        behind = setting.lag * setting.burst
        while len(self._flying) > behind or (self._flying and not self._under_way):
            self._hear(*self._flying.popleft())
        plan = self.scheduler.schedule()
        self.device.apply(plan, self._texts)
        clock.think(costs.host.placement * len(plan.placements))
        by_slot = {p.slot: p.sequence for p in plan.placements} if plan.chunks else {}
        if plan.chunks:  # all of them are one pass
            clock.read(costs.of_chunk(sum(chunk.count for chunk in plan.chunks)))
        for chunk in plan.chunks:
            sequence = by_slot.get(chunk.slot) or self._in_slot(chunk.slot)
            entries = self.device.read(chunk)
            self.scheduler.confirm_prefill(sequence.id, chunk.epoch, chunk.first + chunk.count, entries)
        if any(text.state == "running" for text in self.scheduler.placed):
            for _ in range(setting.burst):
                self._launch()
        elif self._flying:
            self._hear(*self._flying.popleft())

    def _in_slot(self, slot: int) -> Sequence:
        return next(text for text in self.scheduler.placed if text.slot == slot)

    def _launch(self) -> None:
        tick = self.device.tick()
        rows = self.device.rows
        for kind, filled in tick.passes:
            self.offered[kind] = self.offered.get(kind, 0) + rows
            self.filled[kind] = self.filled.get(kind, 0) + filled
        done = self.clock.launch(self.costs.of_tick(tick.passes, rows))
        self._flying.append((done, tick.heard))
        self.ticks += 1

    def _hear(self, done: float, heard: list[Heard]) -> None:
        self.clock.wait(done)
        for one in heard:
            text = self._under_way.get(one.id)
            if text is None or text.epoch != one.epoch:
                continue  # it was put aside while this was on its way
            self.scheduler.note(one.id, one.epoch, (0,), self.device.entries(text.entries, text.length, one.depth))
            self.tokens += 1
            self.clock.think(self.costs.host.token)
            if one.ended:
                self.scheduler.finish(one.id)
                del self._under_way[one.id]
            self._last = self.clock.host
