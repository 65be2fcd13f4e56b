"""The loop: one for pretraining, uptraining, distillation and exits (thesis 2, 3, 4).

A step reads its share of the global batch in micro-batches, adds up gradients of *sums* divided by the tokens of the
whole step, clips, and learns. Losses and weights therefore do not depend on micro-batches or ranks beyond rounding, and
with the same split a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fathomlm.errors import DataError
from fathomlm.interrupts import on_signals
from fathomlm.model.route.trace import RoutingMeter
from fathomlm.train.captured import CapturedPass
from fathomlm.train.data.loader import IGNORE, Batch, BatchLoader
from fathomlm.train.data.pairs import round_up
from fathomlm.train.distributed import World, accumulating, whole
from fathomlm.train.flops import Rates
from fathomlm.train.objective import Objective
from fathomlm.train.optim import set_rate
from fathomlm.train.recipe import Recipe, RoutingLossRecipe
from fathomlm.train.report import Record
from fathomlm.train.schedule import LearningRate, row_length
from fathomlm.train.state import TrainingProgress


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did; losses are means over the tokens of the global batch."""

    loss: float
    parts: dict[str, float]
    grad_norm: float
    tokens: int
    """Tokens with a target, over all ranks."""
    skipped: bool
    stop: bool
    """Whether any rank was asked to stop."""


class PendingStep:
    """A step that a GPU may still be busy with. Reading its result waits for that step and nothing after it, so a loop
    that reads a step behind keeps the GPU from ever waiting for the loop."""

    def __init__(self, values: Tensor, names: tuple[str, ...], resting: frozenset[str] = frozenset()) -> None:
        """`values`: mean loss, its parts, gradient norm, whether it was skipped, tokens, ranks that were asked to stop.
        Parts that are `resting` were not computed."""
        self.names, self._resting = names, resting
        self._done: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def read(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        loss, *parts, norm, bad, count, stops = self._values.tolist()
        by_name = {name: part for name, part in zip(self.names, parts, strict=True) if name not in self._resting}
        return StepResult(loss, by_name, norm, int(count), bad > 0, stops > 0)


class Stepper:
    """Takes optimizer steps. Everything that must agree between ranks is settled here."""

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        module: nn.Module,
        optimizer: Optimizer,
        rate: LearningRate,
        world: World,
    ) -> None:
        self.objective = objective
        self.world = world
        self._recipe = recipe
        self._module = module
        self._optimizer = optimizer
        self._rate = rate
        self._skips_on_device = isinstance(optimizer, torch.optim.AdamW) and not isinstance(module, FSDPModule)
        self._teaches = recipe.loss.routing or RoutingLossRecipe()
        self._learns = [parameter for parameter in module.parameters() if parameter.requires_grad]
        routing = objective.decoder.plan.routing
        # The host then asks the device how many tokens go on, which cannot be recorded.
        asks = routing is not None and not routing.method.picks_tokens
        captures = recipe.capture and world.device.type == "cuda" and module is objective and not asks
        self._captured = CapturedPass(self._pass, self._learns) if captures else None

    def step(self, micro_batches: list[Batch], number: int, wants_stop: bool) -> PendingStep:
        """Optimizer step `number` (from 0). A step whose loss or gradient is not finite leaves the weights as they are."""
        world, names = self.world, self.objective.names
        set_rate(self._optimizer, self._recipe.optimizer.lr * self._rate.at(number))
        self.objective.warm_up(number, world.device)
        own = sum(int((batch.targets_BT != IGNORE).sum()) for batch in micro_batches)
        count = world.sum(torch.full((), float(own), device=world.device))
        micro_batches = [batch.to(world.device) for batch in micro_batches]
        sums = torch.zeros(len(names) + 2, device=world.device)
        self._module.train()
        scale = world.size / count  # DDP and FSDP average over ranks; the factor makes that a sum
        for i, batch in enumerate(micro_batches):
            with accumulating(self._module, last=i == len(micro_batches) - 1):
                if self._captured is None:
                    total, parts = self._pass(batch, scale)
                else:
                    total, parts = self._captured(batch, scale, also=self.objective.openness)
            sums[0] += total
            sums[1:-1] += parts
        sums[-1].fill_(float(wants_stop))
        limit = self._recipe.optimizer.clip or math.inf
        norm = whole(nn.utils.clip_grad_norm_(self._learns, limit)).to(world.device)
        sums = world.sum(sums)
        means = sums[:-1] / count
        bad = (~(means[0].isfinite() & norm.isfinite())).float()
        self._learn(bad)
        self._balance(means, bad)
        return PendingStep(torch.cat((means, torch.stack((norm, bad, count)), sums[-1:])), names, self.objective.resting)

    def _pass(self, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and back: gradients of the scaled loss are added, the loss and its parts returned."""
        total, parts = self._forward(batch)
        torch.autograd.backward(total * scale)
        return total.detach(), parts

    def memory_gb(self) -> float | None:
        """The most that was needed of the GPU's memory. What a recorded pass needs counts beside all that is held now: it
        was recorded before the optimizer had its state, and is not lent to anybody else."""
        device = self.world.device
        if device.type != "cuda":
            return None
        kept = 0 if self._captured is None else self._captured.reserved
        needed = max(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device) + kept)
        return round(needed / 1e9, 2)

    def _learn(self, bad: Tensor) -> None:
        if self._skips_on_device:
            # What GradScaler tells a fused optimizer: it leaves everything as it is where this is 1, and nobody waits.
            self._optimizer.found_inf = bad  # type: ignore[attr-defined]
            self._optimizer.step()
        elif not bool(bad):
            self._optimizer.step()
        # DDP's gradients are views of its buckets, a recorded pass adds to where they are: neither may be let go.
        held = self._captured is not None and self._captured.holds_gradients
        self._optimizer.zero_grad(set_to_none=not held and not isinstance(self._module, DistributedDataParallel))

    def _balance(self, means: Tensor, bad: Tensor) -> None:
        """Move a loss-free router's bias by the loads of the whole step."""
        routers = self.objective.decoder.routers
        if routers is None or routers.bias is None:
            return
        first = 1 + self.objective.names.index("load_1")  # means begins with the whole loss
        loads = means[first : first + routers.routing.recursions]
        routers.balance(loads, (1 - bad) * self._teaches.bias_rate)

    def validate(self, loader: BatchLoader, rows: int) -> tuple[dict[str, float], int]:
        """Mean losses over the first `rows` validation rows (0: all), and their tokens; the same rows in any world.

        A routed model is read twice: `next_token` is its loss by top-k, as in training, `causal` by what it does at
        inference; the routers' metrics are of the first reading.
        """
        world, micro = self.world, self._recipe.batch.micro
        rows = min(rows, len(loader)) if rows else len(loader)
        # Float64: in a large split there are more tokens than float32 can count.
        sums = torch.zeros(len(self.objective.names) + 1, dtype=torch.float64, device=world.device)
        self._module.eval()
        routing = self.objective.decoder.plan.routing
        meter = None if routing is None else RoutingMeter(routing, round_up(row_length(self._recipe)), world.device)
        causal = torch.zeros((), dtype=torch.float64, device=world.device)
        with torch.no_grad():
            for start in range(0, rows, micro * world.size):
                batch = _validation_rows(loader, start + world.rank * micro, micro, rows).to(world.device)
                self.objective.meter = meter
                _, parts = self._forward(batch)
                sums[:-1] += parts
                sums[-1] += (batch.targets_BT != IGNORE).sum()
                if meter is not None:
                    self.objective.meter = None
                    causal += self._forward(batch, causal=True)[1][0]
        *totals, count = world.sum(sums).tolist()
        if not count:
            raise DataError(
                f"no token of the first {rows} validation rows has a target; raise evaluate.rows, or data.target_length"
            )
        found = {name: total / count for name, total in zip(self.objective.names, totals, strict=True)}
        if meter is not None:
            meter.sums = world.sum(meter.sums)
            found |= meter.read() | {"causal": float(world.sum(causal)) / count}
        return found, int(count)

    def _forward(self, batch: Batch, causal: bool = False) -> tuple[Tensor, Tensor]:
        kind = self.world.device.type
        autocast = torch.autocast(kind, torch.bfloat16) if self._recipe.precision == "bf16" else nullcontext()
        with autocast:
            total, parts = self._module(**batch.inputs, causal=causal)
        return total, parts


def _validation_rows(loader: BatchLoader, start: int, count: int, rows: int) -> Batch:
    """`count` rows from `start`; those past the end are there, so that every rank runs as often, but do not count."""
    taken = [min(start + i, rows - 1) for i in range(count)]
    batch = loader.batch_at(taken[0], max(taken) - taken[0] + 1)
    index = torch.tensor([i - taken[0] for i in taken])
    past = torch.tensor([start + i >= rows for i in range(count)])
    batch = batch.pick(index)
    return replace(batch, targets_BT=batch.targets_BT.masked_fill(past[:, None], IGNORE))


class SpeedMeter:
    """Speed over the steps since the last record, validation and saving left out."""

    def __init__(self, flops_per_token: float, rates: Rates, world: World, memory_gb: Callable[[], float | None]) -> None:
        self._flops = flops_per_token
        self._memory = memory_gb
        self._rates = rates
        self._world = world
        self._tokens = 0
        self._seconds = 0.0

    @contextmanager
    def timed(self, progress: TrainingProgress, tokens: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        passed = time.perf_counter() - begin
        progress.seconds += passed
        self._seconds += passed
        self._tokens += tokens

    def read(self) -> Record:
        """Rate and memory since the last reading."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self._tokens, self._seconds = 0, 0.0
        return {
            "tokens_per_s": round(rate, 1),
            **self._rates.parts(rate * self._flops / self._world.size),
            "memory_gb": self._memory(),
        }


TOGETHER = 1.0
"""Seconds within which Ctrl-C pressed twice is Ctrl-C pressed once."""


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, for the loop to finish its step and save. A second Ctrl-C breaks off at once,
    unless it came together with the first one: that may not cost what was trained since the last checkpoint. A second
    SIGTERM does not, since a scheduler and torchrun may each send one."""
    stop_event = threading.Event()
    first = math.inf

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if stop_event.is_set() and number == signal.SIGINT and now - first > TOGETHER:
            raise KeyboardInterrupt
        first = min(first, now)
        stop_event.set()

    with on_signals(ask):
        yield stop_event
