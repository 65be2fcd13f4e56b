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

import numpy as np

from fathomlm.lab.bench.depth import DepthChoice, DepthSource
from fathomlm.lab.bench.floor import decode_step_bytes, size_of
from fathomlm.lab.bench.play import Sleep, WorkloadRun, play
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload
from fathomlm.lab.common import OnProgress, unwatched


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """A set of times in milliseconds."""

    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary | None:
        """None where there are none."""
        if not seconds:
            return None
        p50, p99 = (1e3 * float(value) for value in np.percentile(seconds, (50, 99)))
        return cls(p50=p50, p99=p99, mean=1e3 * math.fsum(seconds) / len(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthUse:
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
    """The first failure's message."""
    prompt_tokens: int
    tokens: int
    seconds: float
    """From the first submission to the last token."""
    tokens_per_s: float | None
    time_to_first_token_ms: LatencySummary | None
    """From a request's arrival, its wait in the queue included."""
    inter_token_ms: LatencySummary | None
    interrupted: bool

    @classmethod
    def of(cls, played: WorkloadRun) -> Timing:
        requests = played.requests
        seconds = played.last - played.begun
        gaps = [after - before for one in requests for before, after in zip(one.times, one.times[1:], strict=False)]
        return cls(
            requests=len(requests),
            finished=sum(one.reason in ("length", "eos", "stop") for one in requests),
            failed=sum(one.reason == "error" for one in requests),
            error=next((one.error for one in requests if one.error is not None), None),
            prompt_tokens=sum(one.prompt_tokens for one in requests),
            tokens=played.tokens,
            seconds=seconds,
            tokens_per_s=played.tokens / seconds if seconds > 0 else None,
            time_to_first_token_ms=LatencySummary.of([one.times[0] - one.arrival for one in requests if one.times]),
            inter_token_ms=LatencySummary.of(gaps),
            interrupted=played.interrupted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWork:
    """What the engine did for it."""

    batch_size: int
    max_sequences: int
    decode_steps: int
    passes_per_decode_step: dict[str, float]
    ms_per_decode_step: float | None
    """Time with requests in the engine over decode steps, prompts and the host's work included."""
    batch_filled: float
    """The part of the rows of all passes that stood for a token."""
    batch_filled_by_pass: dict[str, float]
    stages: dict[str, float]
    """By stage of the host's work, its part of all the time; `idle` is without requests, `other` is what is left."""
    preemptions: int
    prefix_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """In bytes."""

    weights: int
    kv: int
    """Held for keys and values."""
    kv_most: int
    """What sequences had of it at most."""
    kv_dtype: str
    """What each number of a key or value is held in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFloor:
    """How far from the time that reading the weights takes."""

    bytes_per_decode_step: int
    reading_bytes_per_s: float
    """This device's own reading speed, measured in the same run."""
    ms_per_decode_step: float
    share: float | None
    """The floor's part of a decode step: 1 would be no time but reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One engine, one workload."""

    depth: DepthUse
    timing: Timing
    work: EngineWork
    memory: EngineMemory
    floor: ReadFloor

    def record(self) -> dict[str, Any]:
        """Plain JSON values. Depths become strings, as JSON's names are."""
        found = asdict(self)
        found["depth"]["ran"] = {str(depth): part for depth, part in self.depth.ran.items()}
        return found


def measure(
    engine: TimedEngine,
    workload: Workload,
    *,
    speed: float,
    depth: DepthChoice | None = None,
    sleep: Sleep = time.sleep,
    on_progress: OnProgress = unwatched,
) -> Measurement:
    """Play a workload and say what came out. `speed` is the device's reading speed in bytes a second."""
    engine.forget()
    before = engine.counters()
    played = play(engine, workload, sleep=sleep, on_progress=on_progress)
    after = engine.counters()
    decode_steps = engine.totals.decode_steps
    busy = played.ended - played.begun - played.idle
    ms = 1e3 * busy / decode_steps if decode_steps else None
    work = EngineWork(
        batch_size=engine.options.batch_size,
        max_sequences=engine.runner.sizes.max_sequences,
        decode_steps=decode_steps,
        passes_per_decode_step=engine.passes.per_decode_step,
        ms_per_decode_step=ms,
        batch_filled=engine.passes.share(),
        batch_filled_by_pass=engine.passes.shares(),
        stages=stage_shares(played, dict(engine.stages.seconds)),
        preemptions=after.preemptions - before.preemptions,
        prefix_hits=after.prefix_hits - before.prefix_hits,
    )
    return Measurement(
        depth=_depths(engine, played, depth or DepthChoice()),
        timing=Timing.of(played),
        work=work,
        memory=_memory(engine),
        floor=floor_of(decode_step_bytes(engine.runner), speed, ms),
    )


def _memory(engine: TimedEngine) -> EngineMemory:
    pages = engine.runner.pages
    return EngineMemory(
        weights=size_of(engine.runner.decoder),
        kv=pages.bytes,
        kv_most=engine.most_kv_bytes,
        kv_dtype=str(pages.dtype).removeprefix("torch."),
    )


def stage_shares(played: WorkloadRun, seconds: dict[Any, float]) -> dict[str, float]:
    """Parts of all the time that was played; together 1."""
    total = played.ended - played.begun
    if total <= 0:
        return {}
    named = {**seconds, "idle": played.idle}
    shares = {str(stage): took / total for stage, took in named.items()}
    return shares | {"other": 1 - math.fsum(shares.values())}


def floor_of(bytes_per_decode_step: int, speed: float, ms_per_decode_step: float | None) -> ReadFloor:
    floor = 1e3 * bytes_per_decode_step / speed
    share = None if not ms_per_decode_step else floor / ms_per_decode_step
    return ReadFloor(
        bytes_per_decode_step=bytes_per_decode_step, reading_bytes_per_s=speed, ms_per_decode_step=floor, share=share
    )


def _depths(engine: TimedEngine, played: WorkloadRun, choice: DepthChoice) -> DepthUse:
    plan, kind = engine.model.plan, engine.runner.layout.kind
    routed = kind == "routed"
    full = plan.recursions if routed else plan.unrolled_layers
    found = sum((one.depths for one in played.requests), Counter[int]())
    if kind == "whole" and played.tokens:
        found = Counter({full: played.tokens})
    total = found.total()
    possible = range(1, full + 1) if routed else sorted({*found, full})
    ran = {depth: sum(n for at, n in found.items() if at >= depth) / total for depth in possible} if total else {}
    return DepthUse(
        source=choice.source,
        label=choice.label,
        unit="recursions" if routed else "layers",
        full=full,
        mean=sum(depth * n for depth, n in found.items()) / total if total else None,
        ran=ran,
        exit_rate=1 - found[full] / total if total else None,
    )
