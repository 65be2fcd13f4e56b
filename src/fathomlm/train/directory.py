"""A run's directory: its checkpoints, `last` and `best`, what a killed run may have left half-done, where a run goes on (the
newest checkpoint that verifies, if it belongs to the recipe), and the lock that keeps two runs from writing over each
other's records and removing each other's checkpoints.

`RUN/.lock` names the process that holds it. The lock itself is the operating system's (flock), which lets go of it however
the process ends, so that a run that was killed is never in the way. Where the file system has no such locks, what the file
says is all there is: it is believed while its process lives, and the user is told.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.writing import is_alive, make_directories, remove_empty, sync_directory, whole_file
from fathomlm.errors import CheckpointError, OptionError, TrainingError, writing
from fathomlm.jsonfile import parse_object
from fathomlm.options import check
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.distributed import World
from fathomlm.train.reading import to_yaml
from fathomlm.train.recipe import Recipe, ScheduleRecipe
from fathomlm.train.schedule import LearningRate
from fathomlm.train.state import STATE, TrainingState, UnknownFormat, saved_steps, step_name, verify


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run lives. Only its first rank writes here."""

    path: Path
    recipe: Recipe

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / step_name(step)

    def saved(self) -> dict[int, Path]:
        """The checkpoints, by step."""
        return saved_steps(self.checkpoints)

    def latest(self) -> str | None:
        saved = self.saved()
        return str(saved[max(saved)]) if saved else None

    def settle(self, best: int | None, damaged: Iterable[Path] = ()) -> None:
        """As a run needs it: made, or rid of what a killed run left half-done. Damaged checkpoints get other names, or they
        would count among those that are kept, and the run would meet them in its way."""
        with writing(self.path):
            make_directories(self.checkpoints)
            clean_up(self.checkpoints)
            for checkpoint in damaged:
                set_aside(checkpoint)
            for stale in (*self.path.glob(".*.partial-*"), *self.path.glob(".*.fresh-*")):
                stale.unlink()
        self.tidy(best)
        with whole_file(self.path / "recipe.yaml") as temporary:
            temporary.write_text(to_yaml(self.recipe), encoding="utf-8")

    def tidy(self, best: int | None) -> None:
        """Point `last` and `best` where they belong and remove what is not kept; a killed run may not have come to it."""
        recipe, saved = self.recipe.checkpoint, self.saved()
        with writing(self.path):
            if saved:
                point(self.path / "last", saved[max(saved)])
            if best is not None and best in saved:
                point(self.path / "best", saved[best])
            prune(self.checkpoints, recipe.keep, {*recipe.milestones} | ({best} if best is not None else set()))


def prune(checkpoints: Path, keep: int, protected: set[int]) -> None:
    """Remove all but the latest `keep` (0: all are kept) and the protected ones. The latest are on the disk by now."""
    steps = sorted(saved_steps(checkpoints))
    for step in steps[:-keep] if keep else []:
        if step not in protected:
            remove(checkpoints / step_name(step))


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint: under another name, or a half-deleted one could be met under its own."""
    going = checkpoint.with_name(f".{checkpoint.name}.replaced-{os.getpid()}")  # what `clean_up` finishes if we are killed
    checkpoint.rename(going)
    sync_directory(checkpoint.parent)
    shutil.rmtree(going, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Give a damaged checkpoint another name, so that it is neither counted nor in the way; a person may still want it."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    if aside.exists():
        shutil.rmtree(aside)
    checkpoint.rename(aside)
    sync_directory(checkpoint.parent)
    return aside


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, in one stroke."""
    fresh = link.with_name(f".{link.name}.fresh-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    os.replace(fresh, link)
    sync_directory(link.parent)


def clean_up(checkpoints: Path) -> None:
    """Remove what a killed run left half-written."""
    for stale in (*checkpoints.glob(".step-*.partial-*"), *checkpoints.glob(".step-*.replaced-*")):
        shutil.rmtree(stale, ignore_errors=True)


FREE = {
    "name",
    "out",
    "evaluate",
    "checkpoint",
    "log",
    "hardware",
    "parallel",
    "device",
    "compile",
    "capture",
    "recompute",
    "branch_from",
    "batch.micro",
    "data.path",
    "data.verify",
    "data.sources",
    "data.max_tokens",
    "data.validation_from",
    "data.validation_fraction",
    "optimizer.nonfinite_limit",
    "loss.chunk",
    "loss.distill.cache",
}
"""What a resumed run may change: where and how it runs, not what it computes."""
BUDGET = {"budget", "schedule"}
"""What a branch may change as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    path: Path
    state: TrainingState
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that are not what was written, and what is wrong with each."""


def newest_whole(saved: dict[int, Path]) -> ResumePoint:
    """The newest checkpoint that verifies. A power cut or a bad disk may have spoilt the newest; the one before it costs an
    interval of training, and a spoilt one the whole run."""
    damaged: dict[Path, str] = {}
    for step in sorted(saved, reverse=True):
        try:
            return ResumePoint(path=saved[step], state=verify(saved[step]), damaged=damaged)
        except UnknownFormat:
            raise
        except CheckpointError as error:
            damaged[saved[step]] = str(error)
    (newest, why), *others = damaged.items()
    more = f" (nor are the {len(others)} before it whole)" if others else ""
    raise CheckpointError(f"{newest.parent} has no complete checkpoint to resume from: {why}{more}")


def find_start(found: dict[int, Path] | Path, world: World) -> ResumePoint:
    """The newest whole one of some checkpoints, or a certain one if it is whole; verified by the first rank for all, so that
    each file is read once and all ranks go on from the same one."""
    if isinstance(found, Path):
        return world.on_first(lambda: ResumePoint(path=found, state=verify(found)))
    return world.on_first(lambda: newest_whole(found))


def check_same(recipe: Recipe, saved: dict[str, Any], where: str) -> None:
    """Refuse to resume with a recipe that would make another run of it."""
    _refuse(_differences(dataclasses.asdict(recipe), saved, FREE), where, "--resume goes on with the same recipe")


def data_fingerprint(corpus: Corpus) -> str:
    """What the training tokens are known by. A corpus may move; made again from other text, it is another."""
    shards = corpus.manifest.splits["train"].shards
    return hashlib.sha256("".join(shard.sha256 + shard.index_sha256 for shard in shards).encode()).hexdigest()


def check_data(corpus: Corpus, state: TrainingState, where: str) -> None:
    """Refuse to go on with other data: the position in them would mean nothing."""
    if state.progress.extra.data != data_fingerprint(corpus):
        raise TrainingError(
            f"{where} was trained on other data than {corpus.path} holds now; restore them, or start another run"
        )


def saved_layers(checkpoint: Path) -> list[int] | None:
    """The layers of its source that a checkpoint's model was made of, where some were dropped."""
    path = checkpoint / "config.json"
    try:
        kept: list[int] | None = parse_object(path.read_bytes(), str(path), error=CheckpointError).raw("kept_layers")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return kept


def check_branch(recipe: Recipe, state: TrainingState, rate: LearningRate, where: str) -> None:
    """Refuse a branch that is not a cool-down from a plateau (thesis 4, appendix on the trapezoid schedule)."""
    saved = state.recipe
    _refuse(_differences(dataclasses.asdict(recipe), saved, FREE | BUDGET), where, "a branch changes only the budget")
    step, warmup = state.progress.step, state.progress.extra.warmup
    try:
        schedule = ScheduleRecipe(**saved["schedule"])
        check(schedule, "schedule.")
        end = LearningRate.of(schedule, state.progress.extra.steps).plateau_end
    except (KeyError, TypeError, ValueError, OptionError) as error:
        raise CheckpointError(f"{where}: {STATE} has a schedule that is not understood ({error})") from error
    kinds = {recipe.schedule.kind, str(schedule.kind)}
    if kinds != {"trapezoid"}:
        raise TrainingError(f"branch_from requires schedule.kind: trapezoid in both runs, got {' and '.join(sorted(kinds))}")
    if warmup != rate.warmup:
        raise TrainingError(
            f"{where} warmed up over {warmup} steps, this recipe over {rate.warmup}; give schedule.warmup in steps, the same"
        )
    if step > min(end, rate.plateau_end):
        raise TrainingError(
            f"{where} is at step {step}, past the plateau: its own run cools down from step {end}, this budget from step "
            f"{rate.plateau_end}; branch from an earlier checkpoint (checkpoint.milestones keeps them)"
        )


def _differences(ours: dict[str, Any], theirs: dict[str, Any], free: set[str], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        name = f"{prefix}{key}"
        if name in free:
            continue
        if key not in theirs and not ours[key]:  # a field that is newer than the checkpoint, and not used
            continue
        one, other = ours.get(key), theirs.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, free, f"{name}.")
        elif one != other:
            found.append(f"{name} (was {other!r}, is {one!r})")
    return found


def _refuse(differences: list[str], where: str, rule: str) -> None:
    if differences:
        raise TrainingError(f"{where} was trained with another recipe: {'; '.join(differences)}. {rule}")


NAME = ".lock"
TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def run_lock(directory: Path, world: World, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's directory, which is made where it is missing and goes again where nothing came into it. The
    first rank holds it for all; where it cannot, all ranks raise."""
    directory = directory.absolute()
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    handle: int | None = None
    try:
        handle = world.on_first(lambda: _take(directory, note))
        yield
    finally:
        if world.first:
            if handle is not None:
                with suppress(OSError):
                    (directory / NAME).unlink()
                os.close(handle)
            with suppress(OSError):
                remove_empty(made)


def _take(directory: Path, note: Callable[[str], None]) -> int:
    path, handle = directory / NAME, None
    try:
        with writing(directory):
            make_directories(directory)
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                _lock(handle, directory, note)
                with suppress(FileNotFoundError):
                    if os.stat(path).st_ino == os.fstat(handle).st_ino:
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                        return handle
                stale, handle = handle, None  # its holder removed the file after we had opened it: there is another, or none
                os.close(stale)
    except BaseException:
        if handle is not None:
            _let_go(handle, path)
        raise


def _let_go(handle: int, path: Path) -> None:
    """Undo what was begun where the lock is ours, or could be: a full disk or Ctrl-C came before its file was written."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(handle).st_ino:
            path.unlink()
    os.close(handle)


def _lock(handle: int, directory: Path, note: Callable[[str], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(handle)
        if error.errno in TAKEN:
            who = "another process" if holder is None else f"process {holder[0]} on {holder[1]}"
            raise TrainingError(
                f"{directory} is in use by another run ({who}); wait for it or stop it, or name another directory with --out"
            ) from error
        if error.errno not in UNSUPPORTED:
            raise
        here = holder is not None and holder[1] == socket.gethostname()
        if holder is not None and (not here or is_alive(holder[0])):
            raise TrainingError(
                f"{directory} is in use by another run (process {holder[0]} on {holder[1]}); if it is gone, delete "
                f"{directory / NAME}, which this file system cannot lock"
            ) from error
        note(
            f"{directory} is on a file system without locks ({error.strerror}): another run that starts in the same moment "
            "would not be noticed"
        )


def _holder(handle: int) -> tuple[int, str] | None:
    """The process that the file names; None where it has not come to writing it."""
    words = os.pread(handle, 1024, 0).decode("utf-8", "replace").split()
    return (int(words[0]), words[1]) if len(words) == 2 and words[0].isdecimal() and len(words[0]) < 10 else None
