"""Whether a checkpoint belongs to a recipe: what may change between the two, and what may not."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from fathomlm.errors import TrainingError
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.recipe import Recipe, ScheduleRecipe
from fathomlm.train.schedule import LearningRate

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
}
"""What a resumed run may change: where and how it runs, not what it computes."""
BUDGET = {"budget", "schedule"}
"""What a branch may change as well."""


def check_same(recipe: Recipe, saved: dict[str, Any], where: str) -> None:
    """Refuse to resume with a recipe that would make another run of it."""
    _refuse(_differences(dataclasses.asdict(recipe), saved, FREE), where, "--resume goes on with the same recipe")


def data_mark(corpus: Corpus) -> str:
    """What the training tokens are known by. A corpus may move; made again from other text, it is another."""
    shards = corpus.manifest.splits["train"].shards
    return hashlib.sha256("".join(shard.sha256 + shard.index_sha256 for shard in shards).encode()).hexdigest()


def check_data(corpus: Corpus, state: dict[str, Any], where: str) -> None:
    """Refuse to go on with other data: the position in them would mean nothing."""
    if state["progress"]["extra"]["data"] != data_mark(corpus):
        raise TrainingError(
            f"{where} was trained on other data than {corpus.path} holds now; bring those back, or start another run"
        )


def check_branch(recipe: Recipe, state: dict[str, Any], rate: LearningRate, where: str) -> None:
    """Refuse a branch that is not a cool-down from a plateau (thesis 4, appendix on the trapezoid schedule)."""
    saved = state["recipe"]
    _refuse(_differences(dataclasses.asdict(recipe), saved, FREE | BUDGET), where, "a branch changes only the budget")
    step, warmup = int(state["progress"]["step"]), int(state["progress"]["extra"]["warmup"])
    kinds = {recipe.schedule.kind, saved["schedule"]["kind"]}
    if kinds != {"trapezoid"}:
        raise TrainingError(f"branch_from needs schedule.kind trapezoid in both runs, got {' and '.join(sorted(kinds))}")
    if warmup != rate.warmup:
        raise TrainingError(
            f"{where} warmed up over {warmup} steps, this recipe over {rate.warmup}; give schedule.warmup in steps, the same"
        )
    end = LearningRate.of(ScheduleRecipe(**saved["schedule"]), int(state["progress"]["extra"]["steps"])).plateau_end
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
