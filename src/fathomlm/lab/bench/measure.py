"""What a run of the engine over a workload amounts to, as a typed record. Everything is counted: from the first submission
to the last token, with queueing, prompts, scheduling, sampling and the host's work.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fathomlm.lab.bench.floor import size_of, tick_bytes
from fathomlm.lab.bench.play import Played, Progress, Sleep, play
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload

DepthSource = Literal["full", "router", "confidence", "forced"]
"""What says how deep a token goes: nothing, they all run every layer; a router; how sure an exit is; a draw, for
measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A set of times in milliseconds."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None where there are none."""
        if not seconds:
            return None
        mean = math.fsum(seconds) / len(seconds)
        return cls(p50=1e3 * percentile(seconds, 0.5), p99=1e3 * percentile(seconds, 0.99), mean=1e3 * mean)


def percentile(values: Sequence[float], part: float) -> float:
    """The value that this part of all values is below, on the straight line between the two nearest."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """How deep tokens went."""

    source: DepthSource
    label: str
    """The same in words, for tables."""
    unit: Literal["layers", "recursions"]
    full: int
    mean: float | None
    """None where there was no token."""
    ran: dict[int, float]
    """By depth, the part of all tokens that went so deep or deeper."""
    exit_rate: float | None
    """The part of all tokens that stopped before full depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When tokens came; what a peer is measured by too."""

    requests: int
    """That were handed in."""
    finished: int
    failed: int
    error: str | None
    """What the first that failed said."""
    prompt_tokens: int
    tokens: int
    seconds: float
    """From the first submission to the last token."""
    tokens_per_s: float | None
    time_to_first_token_ms: Spread | None
    """From a request's arrival, its wait in the queue included."""
    inter_token_ms: Spread | None
    interrupted: bool

    @classmethod
    def of(cls, played: Played) -> Timing:
        heard = played.heard
        seconds = played.last - played.begun
        gaps = [after - before for one in heard for before, after in zip(one.times, one.times[1:], strict=False)]
        return cls(
            requests=len(heard),
            finished=sum(one.reason in ("length", "eos", "stop") for one in heard),
            failed=sum(one.reason == "error" for one in heard),
            error=next((one.error for one in heard if one.error is not None), None),
            prompt_tokens=sum(one.prompt_tokens for one in heard),
            tokens=played.tokens,
            seconds=seconds,
            tokens_per_s=played.tokens / seconds if seconds > 0 else None,
            time_to_first_token_ms=Spread.of([one.times[0] - one.arrival for one in heard if one.times]),
            inter_token_ms=Spread.of(gaps),
            interrupted=played.interrupted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the engine did for it."""

    rows: int
    slots: int
    ticks: int
    passes_in_a_tick: dict[str, int]
    ms_per_tick: float | None
    """Time with requests in the engine over ticks, prompts and the host's work included."""
    rows_filled: float
    """The part of the rows of all passes that stood for a token."""
    rows_filled_by_pass: dict[str, float]
    stages: dict[str, float]
    """By stage of the host's work, its part of all the time; `idle` is without requests, `other` is what is left."""
    preemptions: int
    prefix_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """In bytes."""

    weights: int
    kv: int
    """Held for keys and values."""
    kv_most: int
    """What sequences had of it at most."""
    kv_dtype: str
    """What each number of a key or value is held in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """How far from the time that reading the weights takes."""

    bytes_per_tick: int
    reading_bytes_per_s: float
    """This device's own reading speed, measured in the same run."""
    ms_per_tick: float
    share: float | None
    """The floor's part of a tick: 1 would be no time but reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One engine, one workload."""

    depth: Depths
    timing: Timing
    work: Work
    memory: Memory
    floor: Floor

    def record(self) -> dict[str, Any]:
        """Plain JSON values. Depths become text, as JSON's names are."""
        found = asdict(self)
        found["depth"]["ran"] = {str(depth): part for depth, part in self.depth.ran.items()}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """What was asked for: what says how deep tokens go, and that in words."""

    source: DepthSource = "full"
    label: str = "every token runs every layer"

    def __post_init__(self) -> None:
        # A figure with depths that no model chose must say so wherever it goes.
        assert (self.source == "forced") == self.label.startswith("forced"), "forced depths are called that"


def measure(
    engine: TimedEngine,
    workload: Workload,
    *,
    speed: float,
    depth: DepthChoice | None = None,
    sleep: Sleep = time.sleep,
    on_progress: Progress | None = None,
) -> Measurement:
    """Play a workload and say what came out. `speed` is the device's reading speed in bytes a second."""
    engine.forget()
    before = engine.counters()
    played = play(engine, workload, sleep=sleep, on_progress=on_progress)
    after = engine.counters()
    ticks = engine.totals.decode_steps
    busy = played.ended - played.begun - played.idle
    ms = 1e3 * busy / ticks if ticks else None
    work = Work(
        rows=engine.options.batch_size,
        slots=engine.runner.sizes.max_sequences,
        ticks=ticks,
        passes_in_a_tick=dict(engine.passes.in_a_tick),
        ms_per_tick=ms,
        rows_filled=engine.passes.share(),
        rows_filled_by_pass=engine.passes.shares(),
        stages=stage_shares(played, dict(engine.stages.seconds)),
        preemptions=after.preemptions - before.preemptions,
        prefix_hits=after.prefix_hits - before.prefix_hits,
    )
    return Measurement(
        depth=_depths(engine, played, depth or DepthChoice()),
        timing=Timing.of(played),
        work=work,
        memory=_memory(engine),
        floor=floor_of(tick_bytes(engine.runner), speed, ms),
    )


def _memory(engine: TimedEngine) -> Memory:
    pages = engine.runner.pages
    return Memory(
        weights=size_of(engine.runner.decoder),
        kv=pages.bytes,
        kv_most=engine.most_kv_bytes,
        kv_dtype=str(pages.dtype).removeprefix("torch."),
    )


def stage_shares(played: Played, seconds: dict[Any, float]) -> dict[str, float]:
    """Parts of all the time that was played; together 1."""
    total = played.ended - played.begun
    if total <= 0:
        return {}
    named = {**seconds, "idle": played.idle}
    shares = {str(stage): took / total for stage, took in named.items()}
    return shares | {"other": 1 - math.fsum(shares.values())}


def floor_of(bytes_per_tick: int, speed: float, ms_per_tick: float | None) -> Floor:
    floor = 1e3 * bytes_per_tick / speed
    share = None if not ms_per_tick else floor / ms_per_tick
    return Floor(bytes_per_tick=bytes_per_tick, reading_bytes_per_s=speed, ms_per_tick=floor, share=share)


def _depths(engine: TimedEngine, played: Played, choice: DepthChoice) -> Depths:
    plan, kind = engine.model.plan, engine.runner.layout.kind
    routed = kind == "routed"
    full = plan.recursions if routed else plan.unrolled_layers
    found = sum((one.depths for one in played.heard), Counter[int]())
    if kind == "whole" and played.tokens:
        found = Counter({full: played.tokens})
    total = found.total()
    possible = range(1, full + 1) if routed else sorted({*found, full})
    ran = {depth: sum(n for at, n in found.items() if at >= depth) / total for depth in possible} if total else {}
    return Depths(
        source=choice.source,
        label=choice.label,
        unit="recursions" if routed else "layers",
        full=full,
        mean=sum(depth * n for depth, n in found.items()) / total if total else None,
        ran=ran,
        exit_rate=1 - found[full] / total if total else None,
    )
