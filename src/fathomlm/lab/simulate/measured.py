"""Times of the engine's own passes, prompts and host, measured on this device.

Two ways. `replay` runs a full engine's decode steps back to back with the host out of the way: the only way on a GPU, where
a decode step is one recorded graph. `calibrate` plays a few requests and looks at what everything took: passes where they
can be seen (not in a graph), each prefill chunk, and what is left of each step for the host, which depends on how many
tokens it collected and how many sequences it placed.

`measure_plain` and `measure_loop` do so at several batch sizes: the costs of a simulation. Models with random weights stand
in for the real ones, because time does not depend on weights where depths are forced. On a GPU the shared block and the turn
are told apart by two decode steps that have a different number of passes of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.request import Request
from fathomlm.engine.schedule import SchedulerOutput
from fathomlm.engine.sizing import ample_memory
from fathomlm.errors import OptionError
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.bench.models import random_model, with_context
from fathomlm.lab.bench.play import play, warm_up
from fathomlm.lab.bench.timed import Stage, TimedEngine, wrap
from fathomlm.lab.bench.workload import Workload, WorkloadRequest
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.costs import Costs, HostTimes, TimeCurve
from fathomlm.model.hub import FathomForCausalLM

DECODE_STEPS = 24
"""Of a replay that are timed."""
TRIES = 3
SETTLING = 4
"""Steps before a replay for which sequences have room."""
SPARE = 4 * DECODE_STEPS
"""Tokens of a sequence beyond its context, for decode steps that are replayed."""


class _Watch:
    """Sees an engine at work, in seconds. `seen`: passes are run one by one, and each is timed."""

    def __init__(self, engine: TimedEngine, seen: bool) -> None:
        self.engine, self.clock, self.seen = engine, engine.clock, seen
        self.passes: dict[str, list[float]] = {}
        self.chunks: list[tuple[int, float]] = []
        """Tokens, and how long they took."""
        self.steps: list[tuple[float, int, int]] = []
        """The host's part, tokens collected, sequences placed."""
        self.submits: list[float] = []
        self.inside, self.placed = 0.0, 0
        """Of the step under way, what is not the host's, and the sequences that it placed."""
        self.runs = 0
        """Of layers."""
        # The device's part of a step: what the host waits for, or on a CPU what it does itself when it starts a decode step.
        self.part: Stage = "waiting" if engine.runner.device.type == "cuda" else "launching"

    def methods(self) -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
        """What is put around which methods."""
        runner = self.engine.runner
        found: list[tuple[Any, dict[str, Callable[..., Any]]]] = [
            (self.engine, {"step": self.step, "submit": self.submit}),
            (runner, {"prefill": self.prefill, "apply": self.apply}),
        ]
        if not self.seen:
            return found
        names = {"core": "core", "turn_over": "turn"} if isinstance(runner.program, RoutedProgram) else {}
        names = {"_pass": ""} if isinstance(runner.program, ExitProgram) else names or {"decode_step": "step"}
        passes: dict[str, Callable[..., Any]] = {name: partial(self.one_pass, kind) for name, kind in names.items()}
        return [*found, (runner.layers, {"run": self.run}), (runner.program, passes)]

    def step(self, inner: Callable[[], None]) -> None:
        engine, seconds = self.engine, self.engine.stages.seconds
        self.inside, self.placed = 0.0, 0
        tokens, before, begun = engine.totals.tokens, seconds[self.part], self.clock()
        inner()
        took = self.clock() - begun - self.inside - (0.0 if self.seen else seconds[self.part] - before)
        self.steps.append((took, engine.totals.tokens - tokens, self.placed))

    def submit(self, inner: Callable[..., None], *arguments: Any) -> None:
        begun = self.clock()
        inner(*arguments)
        self.submits.append(self.clock() - begun)

    def apply(self, inner: Callable[..., None], scheduled: SchedulerOutput) -> None:
        self.placed += len(scheduled.placements)
        inner(scheduled)

    def prefill(self, inner: Callable[..., Any], chunks: Any, prompts: Sequence[Sequence[int]], *more: Any) -> Any:
        waiting = self.clock()
        finish(self.engine.runner.device)
        begun = self.clock()
        found = inner(chunks, prompts, *more)
        finish(self.engine.runner.device)
        self.chunks.append((sum(map(len, prompts)), self.clock() - begun))
        self.inside += self.clock() - waiting
        return found

    def run(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.runs += 1
        return inner(*arguments, **named)

    def one_pass(self, kind: str, inner: Callable[..., None], *arguments: Any) -> None:
        before, begun = self.runs, self.clock()
        inner(*arguments)
        took = self.clock() - begun
        if self.runs > before:  # else nobody had to run, and the pass was left out
            self.passes.setdefault(kind or arguments[0], []).append(took)
            self.inside += took


def calibrate(engine: TimedEngine, workload: Workload, captured: bool | None = None) -> Costs:
    """Run a few sequences and measure passes, prefill and host time. `captured`: passes cannot be timed separately, so whole
    decode steps are replayed; by default on a GPU."""
    device = engine.runner.device
    gpu = device.type == "cuda"
    captured = gpu if captured is None else captured
    with _watched(engine, seen=not captured) as watch:
        if play(engine, workload).interrupted:
            raise KeyboardInterrupt
    engine.forget()
    chunk, prompt_token = _fit([[1.0, tokens] for tokens, _ in watch.chunks], [took for _, took in watch.chunks])
    host = _fit([[1.0, tokens, placed] for _, tokens, placed in watch.steps], [took for took, _, _ in watch.steps])
    decode_step = replay(engine, _middle(workload)) if captured else None
    return Costs(
        name=f"measured here ({device.type})",
        passes={kind: TimeCurve.flat(1e3 * fmean(times)) for kind, times in watch.passes.items()},
        decode_step=decode_step,
        padded=True,
        chunk=1e3 * chunk,
        prompt_token=1e3 * prompt_token,
        host=HostTimes(step=1e3 * host[0], token=1e3 * host[1], placement=1e3 * (host[2] + fmean(watch.submits))),
        overlapped=gpu,
        largest=engine.options.batch_size,
    )


def replay(engine: TimedEngine, context: int) -> float:
    """Milliseconds of a decode step with all slots filled by sequences of about `context` tokens, back to back."""
    runner, scheduler = engine.runner, engine.scheduler
    most = runner.sizes.max_length
    prompt = max(1, min(context, most - replay_room(engine)))
    vocab = engine.model.architecture.vocab
    lookahead = scheduler.lookahead
    ids: list[int] = []
    for _ in range(runner.sizes.max_sequences):
        sampling = Sampling(max_new_tokens=most - prompt, ignore_eos=True)
        tokens = tuple((len(ids) + at) % vocab for at in range(prompt))
        ids.append(engine.new_id())
        engine.submit(Request(id=ids[-1], prompt=tokens, sampling=sampling))
    while scheduler.waiting or any(sequence.state == "prefilling" for sequence in scheduler.placed):
        engine.step()
    scheduler.lookahead = most  # room for all that follows: the host does not look in between
    engine.step()
    times = []
    for _ in range(TRIES):
        finish(runner.device)
        begun = engine.clock()
        for _ in range(DECODE_STEPS // TRIES):
            runner.launch()
        finish(runner.device)
        times.append(1e3 * (engine.clock() - begun) / (DECODE_STEPS // TRIES))
    scheduler.lookahead = lookahead
    for id in ids:
        engine.cancel(id)
    while engine.busy:
        engine.step()
    engine.forget()
    return median(times)


def replay_room(engine: TimedEngine) -> int:
    """Tokens that a sequence may get while decode steps are replayed, and before."""
    program, sizes = engine.runner.program, engine.runner.sizes
    per_step = 1
    if isinstance(program, RoutedProgram):
        per_step = len(program.cores)
    elif isinstance(program, ExitProgram):
        per_step = len(program.passes)
    return per_step * (DECODE_STEPS + SETTLING * sizes.burst * (sizes.lag + 1)) + 2


def _middle(workload: Workload) -> int:
    """What a sequence has before a token, on average."""
    tokens = sum(request.new for request in workload.requests)
    seen = sum(request.new * (len(request.prompt) + request.new / 2) for request in workload.requests)
    return max(1, round(seen / tokens))


@contextmanager
def _watched(engine: TimedEngine, seen: bool) -> Iterator[_Watch]:
    """Put clocks around an engine's work for a while."""
    watch = _Watch(engine, seen)
    methods = watch.methods()
    before = [dict(vars(holder)) for holder, _ in methods]
    for holder, around in methods:
        wrap(holder, **around)
    try:
        yield watch
    finally:
        for (holder, around), own in zip(methods, before, strict=True):
            for name in around:
                del vars(holder)[name]
            vars(holder).update({name: own[name] for name in around if name in own})


def _fit(known: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Least squares with no factor below 0: what would have one is left out."""
    width = len(known[0]) if known else 2
    kept = list(range(width))
    factors = [0.0] * width
    while kept and known:
        found, *_ = np.linalg.lstsq(np.array(known, dtype=float)[:, kept], np.array(wanted), rcond=None)
        if (found >= 0).all():
            for column, value in zip(kept, found, strict=True):
                factors[column] = float(value)
            break
        kept.pop(int(found.argmin()))
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape:
    """What is measured."""

    architecture: Architecture
    plan: DepthPlan
    relaxation: Relaxation | None
    dtype: torch.dtype
    device: torch.device

    def plain(self) -> MeasuredShape:
        """The plain model that is as deep as this one unrolled."""
        architecture = self.architecture.with_layers(tuple(step.origin for step in self.plan))
        return replace(
            self, architecture=architecture, plan=DepthPlan.vanilla(architecture.layers), relaxation=None
        )  # fmt: skip

    def routed(self) -> MeasuredShape:
        """The same layers with a router, whose passes of the block take rows of any depth."""
        plan = self.plan
        if plan.recursions < 2 or not plan.loops:
            raise OptionError("--measure requires a looped model (cycle or middle-cycle, recursions >= 2)")
        if plan.routing is None or not plan.routing.method.picks_tokens:
            plan = plan.with_routing(build_routing("expert", plan.recursions))
        return replace(self, plan=plan)

    def model(self, length: int) -> FathomForCausalLM:
        architecture = with_context(self.architecture, length)
        return random_model(architecture, self.plan, self.relaxation, dtype=self.dtype, device=self.device)


def measure_plain(shape: MeasuredShape, batch_sizes: Sequence[int], context: int, on_size: OnProgress = unwatched) -> Costs:
    """The plain model that `shape` is compared with: a whole pass by batch size, prompts and host."""
    model = shape.plain().model(context + SPARE)

    def measure(batch_size: int) -> Costs:
        engine = _engine(model, batch_size, context)
        costs = calibrate(engine, _requests(model, engine.runner.sizes.max_sequences, context))
        if costs.decode_step is None:
            return costs
        return replace(costs, passes={"step": TimeCurve.flat(replay(engine, context))}, decode_step=None)

    return _by_batch_size(measure, batch_sizes, on_size)


def measure_loop(
    shape: MeasuredShape,
    batch_sizes: Sequence[int],
    context: int,
    on_size: OnProgress = unwatched,
    captured: bool | None = None,
) -> Costs:
    """A looped model: a pass of the block and a turn by batch size, prompts and host. `captured` as in `calibrate`."""
    routed = shape.routed()
    model, recursions = routed.model(context + SPARE), routed.plan.recursions
    # All tokens at full depth, so that every pass has somebody to run.
    fields = {"forced_depths": (1.0,) * recursions}

    def measure(batch_size: int) -> Costs:
        engine = _engine(model, batch_size, context, cores=recursions, **fields)
        costs = calibrate(engine, _requests(model, engine.runner.sizes.max_sequences, context), captured)
        if costs.decode_step is None:
            return costs
        short = replay(_engine(model, batch_size, context, cores=1, **fields), context)
        core = max(0.0, replay(engine, context) - short) / (recursions - 1)
        passes = {"core": TimeCurve.flat(core), "turn": TimeCurve.flat(max(0.0, short - core))}
        return replace(costs, passes=passes, decode_step=None)

    found = _by_batch_size(measure, batch_sizes, on_size)
    return replace(found, passes={**found.passes, "both": found.curve("core") + found.curve("turn")})


def _by_batch_size(measure: Callable[[int], Costs], batch_sizes: Sequence[int], on_size: OnProgress) -> Costs:
    """Passes by batch size; prompts and host of the largest."""
    found: dict[int, Costs] = {}
    for batch_size in batch_sizes:
        found[batch_size] = measure(batch_size)
        on_size(len(found), len(batch_sizes))
    last = found[batch_sizes[-1]]
    curves = {
        kind: TimeCurve(tuple((batch_size, costs.curve(kind).at(batch_size)) for batch_size, costs in found.items()))
        for kind in last.passes
    }
    return replace(last, passes=curves)


def _engine(model: FathomForCausalLM, batch_size: int, context: int, **fields: Any) -> TimedEngine:
    options = EngineOptions(batch_size=batch_size, max_length=context + SPARE, prefix_caching=False, **fields)
    options = replace(options, memory=ample_memory(model.decoder, options, context + SPARE))
    engine = TimedEngine(model, options)
    engine.fix_bursts()
    warm_up(engine, _requests(model, engine.runner.sizes.max_sequences, context))
    return engine


def _requests(model: FathomForCausalLM, max_sequences: int, context: int) -> Workload:
    """Two requests for each place of a sequence, with prompts of different lengths."""
    prompts = sorted({max(1, context // 2), max(1, context * 3 // 4), context})
    vocab = model.architecture.vocab
    requests = [
        WorkloadRequest(tuple((7 * number + at) % vocab for at in range(prompts[number % len(prompts)])), 8 + number % 9)
        for number in range(2 * max_sequences)
    ]
    return Workload("calibration", 0, "together", None, tuple(requests))
