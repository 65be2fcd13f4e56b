"""A whole run: set up, train, validate, save, stop when asked, go on where it was."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.resolve import architecture_of
from fathomlm.errors import TrainingError
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from fathomlm.train.checkpoint import load_checkpoint, save_checkpoint
from fathomlm.train.data.loader import Prefetched, prefetch
from fathomlm.train.data.prepare import PreparationProgress
from fathomlm.train.directory import (
    ResumePoint,
    RunDirectory,
    check_branch,
    check_data,
    check_same,
    data_fingerprint,
    find_start,
    run_lock,
    saved_layers,
)
from fathomlm.train.distributed import World, choose_parallel, join, parallelize, whole
from fathomlm.train.first import check_models
from fathomlm.train.flops import Rates, forward_flops_per_token, model_flops_per_token
from fathomlm.train.loop import PendingStep, SpeedMeter, Stepper, StepResult, stop_requested
from fathomlm.train.objective import Objective
from fathomlm.train.optim import STATE_BYTES, build_optimizer, check_sharded, choose_trained
from fathomlm.train.recipe import Recipe
from fathomlm.train.report import Record, Reporter, SilentWatcher, Watcher, measuring
from fathomlm.train.schedule import LearningRate, micro_batch_size, plan_steps
from fathomlm.train.seq2seq import equip_encoder
from fathomlm.train.setup import (
    as_the_model_reads,
    build_student,
    build_teacher,
    describe_student,
    open_data,
)
from fathomlm.train.state import RunFacts, TrainingProgress, check_fresh, read_state
from fathomlm.train.student import StudentSpec, read_source
from fathomlm.train.teacher_cache import taught_data


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """How a run ended."""

    directory: str
    step: int
    steps: int
    tokens: int
    finished: bool
    """False where it was asked to stop before the end."""
    loss: float | None
    validation: float | None
    exits: dict[str, float]
    best: float | None
    skipped: int
    checkpoint: str | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    on_prepare: Callable[[PreparationProgress], None] | None = None,
) -> TrainingResult:
    """Train as a recipe says. Under torchrun every rank calls this."""
    with join(recipe.device) as world:
        follows = watcher if watcher is not None and world.first else SilentWatcher()
        with run_lock(Path(recipe.directory), world, follows.note):
            find_saved(recipe, world, resume)  # before a model is built, for one that no one wants
            return TrainingRun(recipe, world, follows, on_prepare).go(resume)


class TrainingRun:
    """One run on one rank."""

    def __init__(
        self, recipe: Recipe, world: World, watcher: Watcher, on_prepare: Callable[[PreparationProgress], None] | None = None
    ) -> None:
        self.recipe = recipe
        self.world = world
        self.directory = Path(recipe.directory)
        self._place = RunDirectory(self.directory, recipe)
        self._watcher = watcher
        for source in check_models(recipe):  # by their configurations, before data are prepared for hours
            read_source(source)
        self._data = open_data(recipe, world, on_prepare)
        torch.manual_seed(recipe.seed)
        self._student = build_student(recipe, self._data.corpus, world.device, measuring(watcher))
        self._data = as_the_model_reads(self._data, self._student)
        distill = recipe.loss.distill
        kept = distill is not None and distill.cache is not None
        self._teacher = None if kept else build_teacher(recipe, self._data.corpus, self._student, world)
        s = self._student
        encoder = s.config.encoder_config if isinstance(s, FathomForSeq2SeqLM) else None
        spec = StudentSpec(architecture=s.architecture, plan=s.plan, relaxation=s.relaxation, encoder=encoder)
        self._forward_flops = forward_flops_per_token(recipe, spec)
        self._model_flops = model_flops_per_token(recipe, spec)
        self._length = plan_steps(recipe, self._forward_flops, len(self._data.train))
        if kept:
            rows = self._length.steps * self._length.rows_per_step
            self._data = taught_data(recipe, self._data, self._student, world, rows, watcher.note)
        self._rate = LearningRate.of(recipe.schedule, self._length.steps)
        self._micro = micro_batch_size(self._length.rows_per_step, world.size, recipe.batch.micro)
        self._progress = TrainingProgress()
        self._last_loss: float | None = None
        self._in_a_row = 0
        self._rates: Record = {}
        self._live: Record = {}
        self._validated: int | None = None
        self._exits: dict[str, float] = {}
        self._reporter: Reporter | None = None
        """Of the first rank, while it trains."""
        self._build()

    def _build(self) -> None:
        recipe, world, decoder = self.recipe, self.world, self._student.decoder
        choose_trained(decoder, recipe.train)
        encoder = self._student.encoder if isinstance(self._student, FathomForSeq2SeqLM) else None
        if encoder is not None:
            equip_encoder(encoder, learns=recipe.train == "all", recompute=recipe.recompute, compiled=recipe.compile)
        self._student.to(world.device)
        self._objective = Objective(
            decoder,
            recipe.loss,
            teacher=None if self._teacher is None else self._teacher.decoder,
            recompute=recipe.recompute,
            encoder=encoder,
            teacher_encoder=self._teacher.encoder if isinstance(self._teacher, FathomForSeq2SeqLM) else None,
            kept_layers=self._student.config.kept_layers,
        )
        if recipe.compile:
            for module in (decoder, *(() if self._teacher is None else (self._teacher.decoder,))):
                module.compile_for_training()
            self._objective.compile_parts()
        if self._heals_alone and world.size > 1 and decoder.head is not None:
            raise TrainingError("loss.heal.alone with a head of its own requires one process: that head learns nothing")
        weights = sum(p.numel() for p in self._objective.parameters() if p.requires_grad)
        kind = choose_parallel(recipe.parallel, world, weights * STATE_BYTES[recipe.optimizer.kind])
        check_sharded(recipe.optimizer, kind)
        module = parallelize(self._objective, kind, world, recipe.precision)
        if kind == "fsdp" and decoder.routers is not None and decoder.routers.bias is not None:
            raise TrainingError(
                "loss_free balancing moves a bias that fsdp would shard; use parallel: ddp or balancing: loss"
            )
        aux_rate = 1.0 if recipe.loss.routing is None else recipe.loss.routing.aux_lr
        self._optimizer = build_optimizer(module, recipe.optimizer, aux_rate)
        self._stepper = Stepper(recipe, self._objective, module, self._optimizer, self._rate, world)
        device_name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
        rates = Rates.of(recipe.hardware, device_name)
        self._meter = SpeedMeter(self._model_flops, rates, world, self._stepper.memory_gb)

    def go(self, resume: bool) -> TrainingResult:
        """Start, or go on, and train to the end of the budget or to a request to stop."""
        self._start(resume)
        recipe, world, progress = self.recipe, self.world, self._progress
        if world.first:
            self._reporter = Reporter(self.directory, recipe, after_step=progress.step)
            if self._reporter.dropped is not None:
                self._watcher.note(self._reporter.dropped)
        try:
            with stop_requested() as stop_event, self._batches() as batches:
                self._loop(batches, stop_event)
        finally:
            if self._reporter is not None:
                self._reporter.close()
        return self._summary()

    def _batches(self) -> Prefetched:
        """Micro-batches from where the run is."""
        ranks: dict[str, Any] = {"rank": self.world.rank, "world": self.world.size, "pin": self.world.device.type == "cuda"}
        return prefetch(self._data.train, start=self._progress.rows, micro=self._micro, **ranks)

    def _loop(self, batches: Prefetched, stop_event: threading.Event) -> None:
        """Step after step; results are read one step behind, except where something is due."""
        progress, stop = self._progress, False
        if self.recipe.evaluate.first and progress.step == 0:
            self._validate()
        behind: PendingStep | None = None
        micro_steps = self._length.rows_per_step // self.world.size // self._micro
        while progress.step < self._length.steps and not stop:
            with self._meter.timed(progress, self._length.tokens_per_step):
                micro = [next(batches) for _ in range(micro_steps)]
                pending = self._stepper.step(micro, progress.step, stop_event.is_set())
                progress.step += 1
                progress.rows += self._length.rows_per_step
                progress.tokens += self._length.tokens_per_step
                stop = behind is not None and self._judge(behind.read(), progress.step - 1)
                behind = pending
                due = stop or self._is_due(progress.step)
                if due:
                    result, behind = pending.read(), None
                    stop |= self._judge(result, progress.step)
            if due:
                self._attend(result, stop)
            self._watcher.step(progress.step, self._length.steps, self._live)
        if self.world.broadcast(progress.step not in self._place.saved()):
            self._save()

    def _is_due(self, step: int) -> bool:
        recipe = self.recipe
        cadences = (recipe.log.every, recipe.checkpoint.every, recipe.evaluate.every)
        counted = any(every and step % every == 0 for every in cadences)
        return counted or step in (1, self._length.steps) or step in recipe.checkpoint.milestones

    def _judge(self, result: StepResult, step: int) -> bool:
        """Take a step's result in; whether a rank was asked to stop."""
        self._last_loss = result.loss
        self._progress.skipped += result.skipped
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        self._live = {"loss": result.loss, "skipped": self._progress.skipped, **self._rates}
        if self._in_a_row >= self.recipe.optimizer.nonfinite_limit:
            first, last = step - self._in_a_row + 1, self._place.latest() or "none, the run had not saved yet"
            raise TrainingError(
                f"the loss or its gradient was not finite in steps {first} to {step}; stopped. The last good checkpoint: "
                f"{last}. A lower optimizer.lr, a longer schedule.warmup or a smaller optimizer.clip usually helps"
            )
        return result.stop

    def _attend(self, result: StepResult, stop: bool) -> None:
        """What is due after a step: a record, a validation, a checkpoint."""
        recipe, step = self.recipe, self._progress.step
        done = step == self._length.steps
        if step % recipe.log.every == 0 or step == 1 or done or stop or result.skipped:
            self._record(result)
        if recipe.evaluate.every and step % recipe.evaluate.every == 0:
            self._validate()
        if step % recipe.checkpoint.every == 0 or step in recipe.checkpoint.milestones or done or stop:
            self._save()

    @property
    def _heals_alone(self) -> bool:
        heal = self.recipe.loss.heal
        return heal is not None and heal.alone

    def _record(self, result: StepResult) -> None:
        progress = self._progress
        record: Record = self._stamp("train") | {
            "loss": result.loss,
            "parts": {"heal": result.parts["heal"]} if self._heals_alone else result.parts,
            "lr": self.recipe.optimizer.lr * self._rate.at(progress.step - 1),
            "grad_norm": result.grad_norm,
            "skipped": progress.skipped,
        }
        self._rates = self._meter.read()
        self._tell(record | self._rates)

    def _tell(self, record: Record) -> None:
        if self._reporter is not None:
            self._reporter.write(record)
        self._watcher.record(record)

    def _stamp(self, kind: str) -> Record:
        """Where the run is: how every record begins."""
        progress = self._progress
        return {
            "kind": kind,
            "step": progress.step,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 3),
            "flops": float(self._forward_flops) * progress.tokens,
        }

    def _validate(self) -> None:
        progress = self._progress
        if self._data.validation is None or self._validated == progress.step:
            return
        parts, tokens = self._stepper.validate(self._data.validation, self.recipe.evaluate.rows)
        progress.validation = parts["next_token"]
        own = {name: value for name, value in parts.items() if not name.endswith(("_distill", "_classifier"))}
        exits = {name.removeprefix("exit_"): own[name] for name in own if name.startswith(("exit_", "draft_"))}
        record: Record = self._stamp("validation") | {
            "loss": parts["next_token"],
            "exits": exits,
            "parts": parts,
            "tokens_seen": tokens,
            "best": _is_better(parts["next_token"], progress.best),
        }
        self._validated, self._exits = progress.step, exits
        self._tell(record)

    def _save(self) -> None:
        """Validate if that was not just done, write a checkpoint, move `last` and `best`, remove the old."""
        recipe, progress = self.recipe, self._progress
        self._validate()
        value = progress.validation
        better = recipe.checkpoint.best and value is not None and _is_better(value, progress.best)
        if better:
            progress.best, progress.best_step = value, progress.step
        target = self._place.at(progress.step)
        progress.extra = RunFacts(
            steps=self._length.steps,
            warmup=self._rate.warmup,
            exits=dict(self._exits),
            data=data_fingerprint(self._data.corpus),
        )
        if self._reporter is not None:
            self._reporter.sync()  # a run that goes on from this checkpoint has the records up to it
        save_checkpoint(
            target, self._student, self._objective, self._optimizer, progress, dataclasses.asdict(recipe), self.world
        )
        if self.world.first:
            self._place.tidy(progress.best_step)
        self.world.wait()

    def _start(self, resume: bool) -> None:
        saved = find_saved(self.recipe, self.world, resume)
        start: ResumePoint | None = None
        if saved:
            start = find_start(saved, self.world)
            check_same(self.recipe, start.state.recipe, str(self.directory))
            check_data(self._data.corpus, start.state, str(self.directory))
            self._load(start)
        elif self.recipe.branch_from is not None:
            source = Path(self.recipe.branch_from).resolve()
            start = find_start(source, self.world)
            check_branch(self.recipe, start.state, self._rate, str(source))
            check_data(self._data.corpus, start.state, str(source))
            self._load(start)
            self._progress.best = self._progress.best_step = None
        if self.world.first:
            self._place.settle(self._progress.best_step, () if start is None else start.damaged)
        self._watcher.note(self._headline())

    def _load(self, start: ResumePoint) -> None:
        for path, why in start.damaged.items():
            self._watcher.note(f"{path} is damaged and is left out, as damaged-{path.name}: {why}")
        if not start.state.verifiable:
            self._watcher.note(f"{start.path} was written by an earlier version, without checksums: it is not verified")
        self._take_layers(start.path)
        self._progress = load_checkpoint(start.path, start.state, self._objective, self._optimizer, self.world)
        decoder = self._student.decoder
        if decoder.exit_vocab is not None:
            decoder.exit_vocab.take_rows(whole(decoder.head_weight))
        self._exits = self._progress.extra.exits
        self._watcher.note(f"going on from {start.path} (step {self._progress.step})")

    def _take_layers(self, saved: Path) -> None:
        """A run that goes on has the layers that it began with: measured again, elsewhere, others may come out."""
        kept, student = saved_layers(saved), self._student
        if kept is None or kept == student.config.kept_layers:
            return
        if self.recipe.loss.heal is not None or architecture_of(saved)[0] != student.architecture:
            raise TrainingError(
                f"{saved} has layers {', '.join(map(str, kept))} of {self.recipe.model.source}; measured here, others would "
                "be kept. Go on where the run began, or start another from the checkpoint (model.source)"
            )
        student.config.kept_layers = kept

    def _headline(self) -> str:
        weights = sum(p.numel() for p in self._student.parameters())
        return (
            f"{describe_student(self._student)}; {weights:,} parameters; {self._length.steps:,} steps of "
            f"{self._length.tokens_per_step:,} tokens; micro-batches of {self._micro} on {self.world.size} x "
            f"{self.world.device.type}"
        )

    def _summary(self) -> TrainingResult:
        progress = self._progress
        return TrainingResult(
            directory=str(self.directory),
            step=progress.step,
            steps=self._length.steps,
            tokens=progress.tokens,
            finished=progress.step >= self._length.steps,
            loss=self._last_loss,
            validation=progress.validation,
            exits=self._exits,
            best=progress.best,
            skipped=progress.skipped,
            checkpoint=self._place.latest(),
            seconds=round(progress.seconds, 3),
        )


def find_saved(recipe: Recipe, world: World, resume: bool) -> dict[int, Path]:
    """The checkpoints that are in a run's directory; refuses to overwrite a run, and to branch from nowhere."""
    saved: dict[int, Path] = world.broadcast(RunDirectory(Path(recipe.directory), recipe).saved())
    check_fresh(Path(recipe.directory), saved, resume)
    if not saved and recipe.branch_from is not None:
        read_state(Path(recipe.branch_from).resolve())
    return saved


def _is_better(value: float, best: float | None) -> bool:
    return math.isfinite(value) and (best is None or value < best)
