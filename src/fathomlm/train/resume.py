"""Where a run goes on: the newest checkpoint that verifies, and whether it belongs to the recipe."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathomlm.errors import CheckpointError, OptionError, TrainingError
from fathomlm.options import check
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.distributed import World
from fathomlm.train.recipe import Recipe, ScheduleRecipe
from fathomlm.train.schedule import LearningRate
from fathomlm.train.state import STATE, TrainingState, UnknownFormat, verify

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
