"""The engine's loop with a simulated device: the real scheduler and page pools, and a clock in place of tensors.

One `step` is `Engine.step`: collect what an earlier decode step chose, schedule, prefill, start the next decode steps. Host
and device have a clock each. Where a device works by itself the host's goes on; it waits when it has to collect a decode
step that is not over.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count
from fathomlm.engine.layout import build_layout, pool_shares
from fathomlm.engine.options import PAGE
from fathomlm.engine.request import Request
from fathomlm.engine.scheduler import Scheduler
from fathomlm.engine.sequence import Sequence
from fathomlm.errors import OptionError
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.costs import Costs
from fathomlm.lab.simulate.devices import ChosenToken, Device, LoopDevice, PlainDevice
from fathomlm.lab.simulate.trajectories import Trajectories

REPORT_TOKENS = 20_000
"""Tokens between two reports of progress."""
CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """How the engine is set up: `runner.Sizes`, and what the scheduler needs besides."""

    max_sequences: int
    tables: tuple[int, ...] = (0,)
    pool_pages: tuple[int, ...] | None = None
    """None is as many as all sequences may need."""
    page_size: int = PAGE
    prefill_chunk: int = CHUNK
    burst: int = 1
    lag: int = 0
    lookahead: int = 2
    """How many tokens a row may run before the host has chosen of the first."""

    def pages(self, longest: int) -> tuple[int, ...]:
        if self.pool_pages is not None:
            return self.pool_pages
        each = self.max_sequences * (-(-longest // self.page_size) + 1)
        return tuple(each * self.tables.count(pool) for pool in range(max(self.tables) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One policy over all sequences."""

    tokens: int
    ms: float
    """Until the last token was collected."""
    decode_steps: int
    batch_size: int
    max_sequences: int
    batch_entries: dict[str, int]
    """By kind of pass: its rows, over all passes."""
    filled: dict[str, int]
    """Those that stood for a token."""
    spent: dict[str, float]
    """Milliseconds by stage: kinds of passes, reading, host."""
    preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms if self.ms else float("inf")

    @property
    def batch_filled(self) -> float:
        """Of all passes but a loop's turns, which have nothing to run where only blocks count."""
        kinds = [kind for kind in self.batch_entries if kind != "turn"]
        batch_entries = sum(self.batch_entries[kind] for kind in kinds)
        return sum(self.filled[kind] for kind in kinds) / batch_entries if batch_entries else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Parts of all that was spent. On a device that works beside its host that is more than the time it took."""
        total = sum(self.spent.values())
        return {kind: ms / total for kind, ms in sorted(self.spent.items())} if total else {}

    def record(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.ms / 1e3,
            "tokens_per_s": self.tokens_per_s,
            "decode_steps": self.decode_steps,
            "batch_size": self.batch_size,
            "max_sequences": self.max_sequences,
            "batch_filled": self.batch_filled,
            "batch_filled_by_pass": {k: self.filled[k] / self.batch_entries[k] for k in sorted(self.batch_entries)},
            "stages": self.shares,
            "preemptions": self.preemptions,
        }


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

    def prefill(self, ms: float) -> None:
        self.device = self.host = max(self.device, self.host) + ms
        self._note("prefill", ms)

    def wait(self, until: float) -> None:
        self.host = max(self.host, until)

    def _note(self, kind: str, ms: float) -> None:
        if ms:
            self.spent[kind] = self.spent.get(kind, 0.0) + ms


class Simulation:
    def __init__(self, device: Device, setting: EngineSetup, costs: Costs, trajectories: Trajectories) -> None:
        self.device, self.setting, self.costs, self.trajectories = device, setting, costs, trajectories
        longest = trajectories.longest
        self.scheduler = Scheduler(
            tables=setting.tables, pool_pages=setting.pages(longest), page_size=setting.page_size,
            max_sequences=setting.max_sequences, max_queue=len(trajectories.sequences), prefill_chunk=setting.prefill_chunk,
            lookahead=setting.lookahead, max_length=longest, prefix_caching=False,
        )  # fmt: skip
        self._trajectories = dict(enumerate(trajectories.sequences))
        self._under_way: dict[int, Sequence] = {}
        for id, sequence in self._trajectories.items():
            sampling = Sampling(max_new_tokens=len(sequence.depths))
            self._under_way[id] = Sequence(Request(id=id, prompt=(0,) * sequence.prompt, sampling=sampling))
            self.scheduler.submit(self._under_way[id])
        self._flying: deque[tuple[float, list[ChosenToken]]] = deque()
        self._bursts: deque[int] = deque(maxlen=setting.lag)
        """Decode steps of the last bursts: those that the device may be ahead."""
        self.clock = _Clock(costs.overlapped)
        self.decode_steps = self.tokens = 0
        self.batch_entries: dict[str, int] = {}
        self.filled: dict[str, int] = {}
        self._last = 0.0

    def run(self, on_progress: OnProgress = unwatched) -> SimulationResult:
        total, reported = self.trajectories.tokens, 0
        while self._under_way:
            self.step()
            if self.tokens - reported >= REPORT_TOKENS:
                reported = self.tokens
                on_progress(self.tokens, total)
        return SimulationResult(
            tokens=self.tokens,
            ms=self._last,
            decode_steps=self.decode_steps,
            batch_size=self.device.batch_size,
            max_sequences=self.setting.max_sequences,
            batch_entries=dict(self.batch_entries),
            filled=dict(self.filled),
            spent=dict(self.clock.spent),
            preemptions=self.scheduler.counters().preemptions,
        )

    def step(self) -> None:
        """Hear, tell, start."""
        clock, costs = self.clock, self.costs
        clock.think(costs.host.step)
        behind = sum(self._bursts)
        while len(self._flying) > behind or (self._flying and not self._under_way):
            self._collect(*self._flying.popleft())
        plan = self.scheduler.schedule()
        self.device.apply(plan, self._trajectories)
        clock.think(costs.host.placement * len(plan.placements))
        by_slot = {p.slot: p.sequence for p in plan.placements} if plan.chunks else {}
        if plan.chunks:  # all of them are one pass
            clock.prefill(costs.of_prefill(sum(chunk.count for chunk in plan.chunks)))
        for chunk in plan.chunks:
            sequence = by_slot.get(chunk.slot) or self._in_slot(chunk.slot)
            entries = self.device.prefill(chunk)
            self.scheduler.confirm_prefill(sequence.id, chunk.epoch, chunk.first + chunk.count, entries)
        if any(sequence.state == "running" for sequence in self.scheduler.placed):
            burst = self._burst()
            self._bursts.append(burst)
            for _ in range(burst):
                self._launch()
        elif self._flying:
            self._collect(*self._flying.popleft())

    def _burst(self) -> int:
        """Decode steps of the next burst: where each has a token of as many sequences as there are rows, no more than they
        lack tokens beyond those in flight; where tokens run a block several times, no more than they may need for that
        (`engine.launches`)."""
        left, rows = [one.max_new_tokens - len(one.tokens) for one in self.scheduler.placed], self.device.batch_size
        if isinstance(self.device, PlainDevice):
            lacks = max(*left, -(-sum(left) // rows) if len(left) > rows else 0)
        elif isinstance(self.device, LoopDevice):
            cores, waiting = self.device.cores, -(-len(left) // rows)
            per_token = math.ceil(self.device.recursions / max(1, sum(cores) // len(cores)))
            lacks = math.ceil(waiting * (1 + max(left) * per_token) / len(cores))
        else:
            return self.setting.burst
        return min(self.setting.burst, max(0 if self._flying else 1, lacks - len(self._flying)))

    def _in_slot(self, slot: int) -> Sequence:
        return next(sequence for sequence in self.scheduler.placed if sequence.slot == slot)

    def _launch(self) -> None:
        step = self.device.decode_step()
        batch_size = self.device.batch_size
        for kind, filled in step.passes:
            self.batch_entries[kind] = self.batch_entries.get(kind, 0) + batch_size
            self.filled[kind] = self.filled.get(kind, 0) + filled
        done = self.clock.launch(self.costs.of_decode_step(step.passes, batch_size))
        self._flying.append((done, step.chosen))
        self.decode_steps += 1

    def _collect(self, done: float, chosen: list[ChosenToken]) -> None:
        self.clock.wait(done)
        for one in chosen:
            sequence = self._under_way.get(one.id)
            if sequence is None or sequence.epoch != one.epoch:
                continue  # it was put aside while this was on its way
            self.scheduler.note(one.id, one.epoch, (0,), self.device.entries(sequence.entries, sequence.length, one.depth))
            self.tokens += 1
            self.clock.think(self.costs.host.token)
            if one.ended:
                self.scheduler.finish(one.id)
                del self._under_way[one.id]
            self._last = self.clock.host


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What fits a device's memory beside one model: how many sequences at once, and how many pages the scheduler has to give
    (thesis 3.5.5).

    Weights and the KV cache are counted as `fathomlm plan` counts them. Keys and values of every token at every depth have
    their memory, also where a token exited before it: so does the thesis. A routed model keeps what its capacities let
    through.
    """

    weights: int
    """Bytes."""
    kv: int
    """Bytes that are left for keys and values."""
    sequences: int
    """Sequences of the full length that fit at once."""
    tables: tuple[int, ...]
    pool_pages: tuple[int, ...]


def fit_memory(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    *,
    memory: int,
    length: int,
    element_bytes: int = 2,
    page_size: int = PAGE,
) -> MemoryFit:
    """What `memory` bytes hold beside the weights, for sequences of `length` tokens."""
    cost = count(architecture, plan, relaxation=relaxation, context=length, kv_element_bytes=element_bytes)
    weights = element_bytes * cost.parameters
    kv, per_sequence = memory - weights, cost.kv_bytes_per_token * length
    if kv < per_sequence:
        raise OptionError(
            f"--gpu-memory {memory / 1e9:.4g} GB holds no sequence of {length:,} tokens: weights take "
            f"{weights / 1e9:.4g} GB, its KV cache {per_sequence / 1e9:.4g} GB"
        )
    layout = build_layout(architecture, plan, relaxation)
    page = architecture.kv_bytes(element_bytes) * page_size
    shares = pool_shares(plan, layout)
    whole = sum(page * planes * share for planes, share in zip(layout.planes, shares, strict=True))
    pool_pages = tuple(max(1, int(kv * share / whole)) for share in shares)
    return MemoryFit(weights=weights, kv=kv, sequences=int(kv // per_sequence), tables=layout.tables, pool_pages=pool_pages)
