"""The executor of studies whose runs are trainings: each can be stopped and continued, and leaves one record.

Budgets of a chain share their plateau (thesis 4, appendix "Trapezoid learning-rate schedule with checkpoint reuse"): a run
keeps its checkpoint from before the cool-down, and the next larger budget branches from it where it is at hand. A branch
equals a direct run bit for bit, so records do not depend on whether the disk was kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fathomlm
from fathomlm.errors import DataError, writing
from fathomlm.kernels.recompiling import allow_recompiling
from fathomlm.lab.common import environment as measured_in
from fathomlm.lab.common import free_memory
from fathomlm.lab.evaluate.outputs import FULL
from fathomlm.lab.study.guard import Guard
from fathomlm.lab.study.jobs import Job, Place, Shaped, shape_of, started
from fathomlm.lab.study.ledger import Record, identifying_settings
from fathomlm.lab.study.queue import Broken, Stopped, Visit, overhead_of
from fathomlm.lab.study.scores import read_wanted, score
from fathomlm.lab.study.spec import Budget, Planned, Study
from fathomlm.train.directory import newest_whole, remove
from fathomlm.train.report import SilentWatcher, Watcher, read_records, strict
from fathomlm.train.run import TrainingResult, train
from fathomlm.train.state import read_state, saved_steps, step_name

CURVE = 100
"""Points of a training curve that a record keeps."""
SHAPES = 512
"""Compiled versions of one function that a process may hold: those of all variants of a study, so that none is compiled
twice and none falls back to eager for its place in the queue."""


class TrainingExecutor:
    """Trains the runs of some studies, one after another, in one process."""

    def __init__(
        self,
        studies: list[Study],
        place: Place,
        *,
        commit: str | None = None,
        keep: bool = False,
        tasks: Path | None = None,
        processes: Callable[[], int] = lambda: 1,
        watch: Callable[[Job], Watcher] = lambda job: SilentWatcher(),
    ) -> None:
        """`keep` leaves the trained models under the work directory; `tasks` has the files of what studies score;
        `processes` says how many share the device now."""
        self._studies = {study.name: study for study in studies}
        self._scored = {study.name: read_wanted(study, tasks) for study in studies}
        self._place = place
        self._commit = commit
        self._keep = keep
        self._processes = processes
        self._watch = watch
        self._shapes: dict[str, Shaped] = {}
        self._environment = environment(place.device)
        assert place.corpus is not None
        if not place.corpus.has("validation"):
            raise DataError(f"{place.corpus.path} has no validation split; a study compares validation losses")

    @property
    def device(self) -> str:
        return str(self._environment["device"])

    def started(self, job: Job) -> bool:
        return bool(saved_steps(self._place.directory(job.run) / "checkpoints"))

    def tokens_left(self, job: Job) -> int:
        shaped = job.shaped
        saved = saved_steps(self._place.directory(job.run) / "checkpoints")
        source = self._branch(job)
        begun = max(saved) if saved else 0 if source is None else int(source.name.removeprefix("step-"))
        return (shaped.length.steps - begun) * shaped.length.tokens_per_step

    def execute(self, job: Job, visit: Visit, *, split: bool) -> Record:
        begin, processes = time.perf_counter(), self._processes()
        shaped = job.shaped
        saved = saved_steps(self._place.directory(job.run) / "checkpoints")
        source = None if saved else self._branch(job)
        recipe = replace(started(shaped.recipe, self._place), branch_from=None if source is None else str(source))
        if self._next(job) is not None:
            milestones = [*recipe.checkpoint.milestones, shaped.plateau_end]
            recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, milestones=milestones))
        guard = Guard(self._watch(job), visit, shaped.length.tokens_per_step, split=split)
        allow_recompiling(SHAPES)
        begun = newest_whole(saved).state if saved else None if source is None else read_state(source)
        before = 0 if begun is None else begun.progress.step
        try:
            summary = train(recipe, resume=True, watcher=guard)
        except torch.OutOfMemoryError:
            raise
        except torch.AcceleratorError as error:
            raise Broken(str(error)) from error
        finally:
            free_memory()
        if not summary.finished:
            raise Stopped(by_user=not guard.stop_requested, rate=guard.rate)
        record = self._finished(job, summary, wall=time.perf_counter() - begin, steps=summary.step - before)
        if wanted := self._scored[job.run.study]:
            found = score(self._place.directory(job.run) / "last", wanted, shaped.recipe.device)
            record |= {"scores": strict(found.pop(FULL.name)), "exit_scores": strict(found)}
            free_memory()
        record["processes"] = max(processes, self._processes())
        return record

    def failed(self, job: Job, reason: str) -> Record:
        return self._head(job) | {"status": "failed", "reason": reason}

    def _head(self, job: Job) -> Record:
        run, place = job.run, self._place
        assert place.corpus is not None
        return {
            "study": run.study,
            "variant": run.variant.name,
            "budget": run.budget.name,
            "seed": run.seed,
            "fingerprint": job.fingerprint,
            "settings": identifying_settings(job.shaped.recipe),
            "data": {
                "mark": job.corpus_checksum,
                "tokens": place.tokens,
                "vocab": place.corpus.manifest.vocab,
                "passes": round(job.passes, 4),
            },
            "tokens": job.tokens,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self._commit,
            "environment": self._environment,
        }

    def _finished(self, job: Job, summary: TrainingResult, *, wall: float, steps: int) -> Record:
        """`wall` and `steps` are what this process took, and did; a branch's `seconds` are also those of its plateau."""
        shaped, records = job.shaped, self._records(job)
        checks = [record for record in records if record["kind"] == "validation"]
        trained = [record for record in records if record["kind"] == "train"]
        last = checks[-1]["parts"]
        rates = [r["tokens_per_s"] for r in trained if r.get("tokens_per_s")]
        rate = median(rates[len(rates) // 2 :]) if rates else None
        thin = trained[:: max(1, len(trained) // CURVE)]
        cost = shaped.cost
        found = self._head(job) | {
            "status": "finished",
            "steps": summary.steps,
            "flops": checks[-1]["flops"],
            "flops_per_token": shaped.flops_per_token,
            "layout": cost.layout,
            "unrolled_layers": cost.unrolled_layers,
            "recursions": shaped.parts.plan.recursions,
            "router": None if shaped.parts.plan.routing is None else shaped.parts.plan.routing.kind,
            "parameters": cost.non_embedding_parameters,
            "embedding_parameters": cost.embedding_parameters,
            "loss": loss_of(last),
            "final": last,
            "validation": [
                {"step": r["step"], "tokens": r["tokens"], "seconds": r["seconds"], "loss": loss_of(r["parts"])}
                for r in checks
            ],
            "training": [[r["tokens"], r["loss"]] for r in thin],
            "tokens_per_s": None if rate is None else round(rate, 1),
            "memory_gb": max((r["memory_gb"] for r in trained if r.get("memory_gb")), default=None),
            "skipped": summary.skipped,
            "seconds": summary.seconds,
            "process_seconds": round(wall, 1),
            "overhead_seconds": overhead_of(wall=wall, tokens=steps * shaped.length.tokens_per_step, rate=rate),
        }
        record: Record = strict(found)
        return record

    def _records(self, job: Job) -> list[Record]:
        """The run's records, with those of the plateau that it branched from, as far as they are on this disk."""
        own = read_records(self._place.directory(job.run) / "metrics.jsonl")
        before: list[Record] = []
        for smaller in self._smaller(job):
            path = self._place.directory(smaller) / "metrics.jsonl"
            end = min(self._shape(smaller).plateau_end, own[0]["step"] - 1)
            if path.exists():
                reached = before[-1]["step"] if before else 0
                before += [record for record in read_records(path) if reached < record["step"] <= end]
        return [*before, *own]

    def _shape(self, run: Planned) -> Shaped:
        key = f"{run.study}/{run.key}"
        if key not in self._shapes:
            self._shapes[key] = shape_of(run, self._place)
        return self._shapes[key]

    def _smaller(self, job: Job) -> list[Planned]:
        """The runs of a chain before this one, the smallest first."""
        study, run = self._studies[job.run.study], job.run
        if not study.chain:
            return []
        return [study.run(run.variant, budget, run.seed) for budget in study.budgets[: study.budgets.index(run.budget)]]

    def _next(self, job: Job) -> Budget | None:
        """The budget of a chain that may branch from this run."""
        study = self._studies[job.run.study]
        place = study.budgets.index(job.run.budget) + 1
        return study.budgets[place] if study.chain and place < len(study.budgets) else None

    def _branch(self, job: Job) -> Path | None:
        """The latest checkpoint of the common plateau that is at hand."""
        for smaller in reversed(self._smaller(job)):
            step = self._shape(smaller).plateau_end
            path = self._place.directory(smaller) / "checkpoints" / step_name(step)
            if step <= job.shaped.plateau_end and (path / "training" / "state.json").is_file():
                return path
        return None

    def tidy(self, job: Job) -> None:
        """Remove checkpoints that nobody needs any more: a study's runs together would fill a disk."""
        if self._keep:
            return
        for smaller in self._smaller(job):
            _remove(self._place.directory(smaller), spare=None)
        spare = job.shaped.plateau_end if self._next(job) is not None else None
        _remove(self._place.directory(job.run), spare=spare)


def loss_of(parts: dict[str, float]) -> float:
    """What models are compared by: a routed one by what it does at inference, where top-k could look ahead."""
    return parts.get("causal", parts["next_token"])


def _remove(directory: Path, *, spare: int | None) -> None:
    with writing(directory):
        for link in ("last", "best"):
            (directory / link).unlink(missing_ok=True)
        for step, path in saved_steps(directory / "checkpoints").items():
            if step != spare:
                remove(path)


def commit_of_checkout() -> str | None:
    """The commit of the checkout that this code runs from, with `-dirty` where it was changed; None outside one."""
    root = Path(fathomlm.__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=root, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def code_checksum() -> str:
    """What the package's code is known by, also where there is no checkout."""
    root, digest = Path(fathomlm.__file__).resolve().parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(device: str) -> dict[str, Any]:
    """The environment of a record, with the code that made it; a record has its own date."""
    about = measured_in(device)
    del about["date"], about["transformers"]
    return {**about, "code": code_checksum()}
