"""Times of a model's passes at several numbers of rows, measured on this device: the costs of a simulation of it.

Models with random weights stand in for the real ones, because time does not depend on weights where depths are forced. On a
CPU each pass is timed while a few texts run. On a GPU full ticks are replayed, and the shared block and the turn are told
apart by two ticks that have a different number of passes of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.lab.bench.models import ample_memory, random_model, with_context
from fathomlm.lab.bench.play import warm_up
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Asked, Workload
from fathomlm.lab.simulate.costs import Costs, Curve
from fathomlm.lab.simulate.measured import TICKS, calibrate, replay
from fathomlm.model.hub import FathomForCausalLM

SPARE = 4 * TICKS
"""Tokens of a text beyond its context, for ticks that are replayed."""
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is measured."""

    architecture: Architecture
    plan: DepthPlan
    relaxation: Relaxation | None
    dtype: torch.dtype
    device: torch.device

    def plain(self) -> Shape:
        """The plain model that is as deep as this one unrolled."""
        architecture = self.architecture.with_layers(tuple(step.origin for step in self.plan))
        return replace(
            self, architecture=architecture, plan=DepthPlan.vanilla(architecture.layers), relaxation=None
        )  # fmt: skip

    def routed(self) -> Shape:
        """The same layers with a router, whose passes of the block take rows of any depth."""
        plan = self.plan
        if plan.recursions < 2 or not plan.loops:
            raise OptionError("--measure needs a looped model (cycle or middle-cycle, at least 2 recursions)")
        if plan.routing is None or not plan.routing.method.picks_tokens:
            plan = plan.with_routing(build_routing("expert", plan.recursions))
        return replace(self, plan=plan)

    def model(self, length: int) -> FathomForCausalLM:
        architecture = with_context(self.architecture, length)
        return random_model(architecture, self.plan, self.relaxation, dtype=self.dtype, device=self.device)


def measure_plain(shape: Shape, rows: Sequence[int], context: int, on_rows: Tell | None = None) -> Costs:
    """The plain model that `shape` is compared with: a whole pass by rows, prompts and host."""
    model = shape.plain().model(context + SPARE)
    found = []
    for done, many in enumerate(rows, start=1):
        engine = _engine(model, many, context)
        costs = calibrate(engine, _texts(model, engine.runner.sizes.max_sequences, context))
        if costs.tick is not None:
            costs = replace(costs, passes={"step": Curve.flat(replay(engine, context))}, tick=None)
        found.append((many, costs))
        if on_rows is not None:
            on_rows(done, len(rows))
    return _joined(found)


def measure_loop(
    shape: Shape, rows: Sequence[int], context: int, on_rows: Tell | None = None, captured: bool | None = None
) -> Costs:
    """A looped model: a pass of the block and a turn by rows, prompts and host. `captured` as in `calibrate`."""
    routed = shape.routed()
    model, recursions = routed.model(context + SPARE), routed.plan.recursions
    # All tokens at full depth, so that every pass has somebody to run.
    fields = {"forced_depths": (1.0,) * recursions}
    found = []
    for done, many in enumerate(rows, start=1):
        engine = _engine(model, many, context, cores=recursions, **fields)
        costs = calibrate(engine, _texts(model, engine.runner.sizes.max_sequences, context), captured)
        if costs.tick is not None:
            short = replay(_engine(model, many, context, cores=1, **fields), context)
            core = max(0.0, replay(engine, context) - short) / (recursions - 1)
            passes = {"core": Curve.flat(core), "turn": Curve.flat(max(0.0, short - core))}
            costs = replace(costs, passes=passes, tick=None)
        found.append((many, costs))
        if on_rows is not None:
            on_rows(done, len(rows))
    joined = _joined(found)
    both = joined.curve("core") + joined.curve("turn")
    return replace(joined, passes={**joined.passes, "both": both})


def _joined(found: Sequence[tuple[int, Costs]]) -> Costs:
    """Passes by rows; prompts and host of the most rows."""
    _, last = found[-1]
    curves = {kind: Curve(tuple((rows, costs.curve(kind).at(rows)) for rows, costs in found)) for kind in last.passes}
    return replace(last, passes=curves)


def _engine(model: FathomForCausalLM, rows: int, context: int, **fields: Any) -> TimedEngine:
    options = EngineOptions(batch_size=rows, max_length=context + SPARE, prefix_caching=False, **fields)
    options = replace(options, memory=ample_memory(model, options, context + SPARE))
    engine = TimedEngine(model, options)
    warm_up(engine, _texts(model, engine.runner.sizes.max_sequences, context))
    return engine


def _texts(model: FathomForCausalLM, slots: int, context: int) -> Workload:
    """Two texts for each slot, with prompts of different lengths."""
    prompts = sorted({max(1, context // 2), max(1, context * 3 // 4), context})
    vocab = model.architecture.vocab
    asked = [
        Asked(tuple((7 * number + at) % vocab for at in range(prompts[number % len(prompts)])), 8 + number % 9)
        for number in range(2 * slots)
    ]
    return Workload("calibration", 0, "together", None, tuple(asked))
