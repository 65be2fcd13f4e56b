"""The engine with a clock around what the host does, and a count of what the device did. It makes the same tokens.

Time is counted once: what a stage does inside another is the inner one's. On a CPU `launching` is the work itself; on a GPU
it is handing the work over, and `waiting` is the time that the host then had nothing to do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from fathomlm.decode.exiting import Exiting
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import pool_page_bytes
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import VALID, StepOutput
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.runner import Runner
from fathomlm.engine.schedule import SchedulerOutput
from fathomlm.model.hub import FathomForCausalLM

Clock = Callable[[], float]
Stage = Literal["scheduling", "applying", "prefill", "launching", "waiting", "collecting"]
"""Who runs and who gets which page; telling the device; prefilling prompts; starting a decode step; waiting for its end;
taking its tokens to their requests."""
STAGES: tuple[Stage, ...] = get_args(Stage)


class StageClock:
    """How long each of some stages took, while it is `on`. What a stage does inside another is the inner one's."""

    def __init__(self, now: Clock = time.perf_counter, stages: Sequence[str] = (), *, on: bool = True) -> None:
        self.on = on
        self._now, self._stages = now, stages
        self._open: list[str] = []
        self._since = 0.0
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(self._stages, 0.0)

    def begin(self, stage: str) -> None:
        self._switch()
        self._open.append(stage)

    def end(self) -> None:
        self._switch()
        self._open.pop()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.begin(stage)
        try:
            yield
        finally:
            self.end()

    def _switch(self) -> None:
        """The time since the last change belongs to what was innermost."""
        at = self._now()
        if self._open and self.on:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + at - self._since
        self._since = at


def wrap(holder: object, **around: Callable[..., Any]) -> None:
    """Put functions around methods of one object; each is called with the method and its arguments."""
    for name, function in around.items():
        vars(holder)[name] = partial(function, getattr(holder, name))


def clock_methods(clock: StageClock, holder: object, **stages: str | Callable[..., str]) -> None:
    """Put a clock around methods of one object; a stage may follow from a method's arguments."""

    def timed(stage: str | Callable[..., str], method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with clock(stage if isinstance(stage, str) else stage(*arguments, **named)):
            return method(*arguments, **named)

    wrap(holder, **{name: partial(timed, stage) for name, stage in stages.items()})


class BatchFill:
    """How many rows of a program's passes stood for a token.

    A decode step's record has a row for each row of its passes, but for a routed model's core: how many rows ran there
    follows from how deep the chosen tokens went. So a core row counts when its token is chosen, and one whose sequence was
    stopped before that does not.
    """

    def __init__(self, runner: Runner) -> None:
        program = runner.program
        self._batch_size, self._spare = runner.options.batch_size, runner.state.spare
        self._kind = runner.layout.kind
        self._recorded: tuple[str, ...] = ("step",)
        """The passes that a decode step's record is made of, in order."""
        self._cores, self._followed, self._before = 0, runner.core_passes, (0, 0)
        if isinstance(program, RoutedProgram):
            self._recorded, self._cores = ("turn",) * len(program.cores), sum(program.cores)
        elif isinstance(program, ExitProgram):
            self._recorded = program.passes
        self.filled: Counter[str] = Counter()
        """Rows that stood for a token, by kind of pass."""
        self.decode_steps = 0

    @property
    def per_decode_step(self) -> dict[str, float]:
        """Passes of each kind in a decode step; of the core on average, where they follow what is measured."""
        cores: float = self._cores
        if self._followed is not None and (steps := self._followed.steps - self._before[0]):
            cores = (self._followed.passes - self._before[1]) / steps
        return dict(Counter(self._recorded)) | ({"core": cores} if cores else {})

    def reset(self) -> None:
        self.filled.clear()
        self.decode_steps = 0
        if self._followed is not None:
            self._before = self._followed.steps, self._followed.passes

    def add(self, ints_NC: Tensor) -> None:
        """What a decode step's record says, a row (slot, epoch, token, depth, flags, index)."""
        ints = ints_NC.numpy()
        if self._kind == "exits" and len(ints) < self._batch_size * len(self._recorded):
            return  # a pass that the host has chosen, with rows for just what it runs
        valid = ints[:, 4] & VALID != 0
        self.decode_steps += 1
        if self._kind == "whole":
            self.filled["step"] += int(valid.sum())
            return
        for number, kind in enumerate(self._recorded):
            mine = ints[number * self._batch_size : (number + 1) * self._batch_size]
            self.filled[kind] += int((mine[:, 0] != self._spare).sum())
        if self._kind == "routed":
            self.filled["core"] += int(ints[valid, 3].sum())

    def shares(self) -> dict[str, float]:
        """The part of the rows of each kind of pass that stood for a token."""
        return {
            kind: self.filled[kind] / (self.decode_steps * many * self._batch_size) if self.decode_steps else 0.0
            for kind, many in sorted(self.per_decode_step.items())
        }

    def share(self) -> float:
        """The same over all passes."""
        batch_entries = self.decode_steps * sum(self.per_decode_step.values()) * self._batch_size
        return self.filled.total() / batch_entries if batch_entries else 0.0


class TimedEngine(Engine):
    def __init__(
        self,
        model: FathomForCausalLM,
        options: EngineOptions | None = None,
        *,
        exiting: Exiting | None = None,
        clock: Clock = time.perf_counter,
        **fields: Any,
    ) -> None:
        super().__init__(model, options, exiting=exiting, **fields)
        self.clock, self.stages, self.passes = clock, StageClock(clock, STAGES), BatchFill(self.runner)
        self.most_pages = [0] * len(self.scheduler.page_manager.pools)
        """By pool, what sequences held at a time."""
        clock_methods(self.stages, self, _collect="collecting")
        clock_methods(self.stages, self.scheduler, schedule="scheduling")
        clock_methods(
            self.stages, self.runner,
            apply="applying", prefill="prefill", launch="launching", launch_burst="launching", outcome="waiting",
            collect="waiting",
        )  # fmt: skip
        wrap(self.runner, collect=self._count)
        wrap(self.scheduler, schedule=self._watch)

    def _count(self, collect: Callable[..., list[StepOutput]], numbers: Sequence[int]) -> list[StepOutput]:
        found = collect(numbers)
        for output in found:
            self.passes.add(output.ints_NC)
        return found

    def _watch(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        plan = schedule()
        held = (pool.used - pool.spare for pool in self.scheduler.page_manager.pools)
        self.most_pages = [max(pair) for pair in zip(self.most_pages, held, strict=True)]
        return plan

    @property
    def most_kv_bytes(self) -> int:
        """What sequences held at most, pages that only the prefix cache kept left out."""
        runner = self.runner
        sizes = pool_page_bytes(self.model.architecture, runner.layout, self.options.page_size, runner.pages.dtype)
        return sum(pages * size for pages, size in zip(self.most_pages, sizes, strict=True))

    def forget(self) -> None:
        """Count from here: what came before was to warm up."""
        assert not self.busy, "requests are on their way"
        self.stages.reset()
        self.passes.reset()
        self.most_pages = [0] * len(self.most_pages)
        self.totals = type(self.totals)()
