"""Generation in which tokens may leave early: one loop for every mode.

    read the prompts, all but their last tokens, at full depth (static: up to the exit)
    while some row goes on:
        mode.step(rows that go on)

Slow and plain: the next layers run for the rows that need them and for no other, gathered. A row gives alone what it gives
in a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fathomlm.cache import SlotCache, Span
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.judge import Judge
from fathomlm.decode.lines import Line
from fathomlm.decode.logits import row_generators
from fathomlm.decode.oracle import Oracle
from fathomlm.decode.parallel import Parallel
from fathomlm.decode.passes import Passes
from fathomlm.decode.refine import refine
from fathomlm.decode.rows import ExitStatistics, Generation, Row
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.speculative import accept
from fathomlm.decode.state_copy import StateCopy
from fathomlm.decode.static import Static
from fathomlm.depth import DepthPlan, Step
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


class Method(Protocol):
    """One way to leave early."""

    @property
    def prompt_steps(self) -> Sequence[Step]:
        """What prompts run."""
        ...

    def step(self, lines: Sequence[Line]) -> None:
        """One more token in each row, or a draft of one."""
        ...


def _parallel(passes: Passes, judge: Judge, exiting: Exiting) -> Method:
    assert exiting.max_stack is not None
    return Parallel(passes, judge, exiting.max_stack, None if exiting.refine is None else refine(exiting.refine))


def _speculative(passes: Passes, judge: Judge, exiting: Exiting) -> Method:
    assert exiting.max_stack is not None
    return Parallel(passes, judge, exiting.max_stack, accept)


METHODS: dict[str, Callable[[Passes, Judge, Exiting], Method]] = {
    "full": lambda passes, judge, exiting: Static(passes, judge),
    "static": lambda passes, judge, exiting: Static(passes, judge),
    "state-copy": lambda passes, judge, exiting: StateCopy(passes, judge),
    "parallel": _parallel,
    "speculative": _speculative,
    "oracle": lambda passes, judge, exiting: Oracle(passes, judge),
}


def exit_cache(plan: DepthPlan, exiting: Exiting, rows: int, reserve: int) -> SlotCache:
    """A cache for the steps that will run."""
    exits = exiting.exits(plan)
    steps = plan.steps[: exits[0] + 1] if exiting.mode == "static" else plan.steps
    return SlotCache(plan, rows, steps=(*steps, *plan.exit_steps(exits)), reserve=reserve)


@torch.inference_mode()
def run(
    decoder: Decoder,
    rows: Sequence[Row],
    sampling: Sampling,
    cache: SlotCache,
    exiting: Exiting,
    on_step: Callable[[int], None] | None = None,
    memory: EncoderMemory | None = None,
) -> list[Generation]:
    """Continue each row behind what the cache holds of all of them."""
    begun = time.perf_counter()
    judge = Judge(decoder, exiting)
    passes = Passes(decoder, cache, len(rows), memory)
    method = METHODS[exiting.mode](passes, judge, exiting)
    generators = row_generators(sampling, len(rows), decoder.embed.weight.device)
    lines = [Line(i, row, sampling, generators[i : i + 1]) for i, row in enumerate(rows)]
    _read(passes, lines, cache.length, method.prompt_steps, judge.exits)
    passes.layers_run = [0] * len(rows)
    method.step(lines)
    prefilled = time.perf_counter()
    while going := [line for line in lines if line.row.finish is None]:
        if on_step is not None:
            on_step(max(len(row.tokens) for row in rows))
        method.step(going)
    for row in rows:
        row.note_times(begun, prefilled)
    _teach(exiting, lines)
    return [line.row.exited_result(_statistics(line, judge, passes, exiting)) for line in lines]


def _read(passes: Passes, lines: Sequence[Line], held: int, steps: Sequence[Step], exits: Sequence[int]) -> None:
    """Run what the cache lacks of the prompts. The last token of each is left: the first choice is made there."""
    spans = [Span(line.index, held, line.slot - held) for line in lines if line.slot > held]
    if spans:
        x_RNM = passes.enter([lines[span.row].text[span.first : span.end] for span in spans])
        passes.read(x_RNM, steps, exits, passes.at(spans))


def _teach(exiting: Exiting, lines: Sequence[Line]) -> None:
    """Tell an estimator what was seen, text by text: only now, so that no row's threshold depends on its neighbours."""
    if exiting.estimator is None:
        return
    for line in lines:
        if line.samples:
            exiting.estimator.observe(*map(list, zip(*line.samples, strict=True)))
        exiting.estimator.end_sequence()


def _statistics(line: Line, judge: Judge, passes: Passes, exiting: Exiting) -> ExitStatistics:
    return ExitStatistics(
        mode=exiting.mode,
        layers=judge.last + 1,
        threshold=judge.threshold,
        layers_run=passes.layers_run[line.index],
        deep_passes=line.deep_passes,
        drafted=line.drafted,
        accepted=line.accepted,
    )
