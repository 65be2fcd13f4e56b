"""From a study's runs to recipes on this machine, and to what they will take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fathomlm.depth.cost import Cost, count
from fathomlm.errors import OptionError
from fathomlm.study.ledger import corpus_mark, fingerprint
from fathomlm.study.queue import Job
from fathomlm.study.spec import Planned, Study, merged
from fathomlm.train.budget import Schedule, forward_flops_per_token, plan_steps, row_length
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.parts import Parts, read_parts
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import Recipe
from fathomlm.train.schedule import LearningRate
from fathomlm.train.setup import make_loader

NO_CORPUS = "CORPUS"
"""Stands for the corpus where a study is only looked at."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs are made: the corpus they read, the directory they work in, the device."""

    corpus: Corpus | None
    work: Path
    device: str = "auto"

    @property
    def mark(self) -> str:
        return "" if self.corpus is None else corpus_mark(self.corpus)

    @property
    def tokens(self) -> int | None:
        """Tokens of one pass."""
        return None if self.corpus is None else self.corpus.manifest.splits["train"].tokens

    def directory(self, run: Planned) -> Path:
        return self.work / run.study / f"{run.variant.name}-{run.budget.name}-seed{run.seed}"


@dataclass(frozen=True, slots=True)
class Shaped:
    """A recipe with the shapes of its model and the length of its run."""

    recipe: Recipe
    parts: Parts
    length: Schedule

    @property
    def cost(self) -> Cost:
        parts = self.parts
        return count(parts.architecture, parts.plan, relaxation=parts.relaxation, context=row_length(self.recipe))

    @property
    def flops_per_token(self) -> int:
        parts = self.parts
        return forward_flops_per_token(self.recipe, parts.architecture, parts.plan, parts.relaxation)

    @property
    def plateau_end(self) -> int:
        """The step whose checkpoint a larger budget may branch from."""
        return LearningRate.of(self.recipe.schedule, self.length.steps).plateau_end


def recipe_of(run: Planned, place: Place) -> Recipe:
    """The recipe of a run; what is wrong with it is said of the study's variant."""
    path = NO_CORPUS if place.corpus is None else str(place.corpus.path)
    own = {
        "out": str(place.directory(run)),
        "data": {"path": path},
        "device": place.device,
        "log": {"tensorboard": False},
    }
    values = merged(run.values, own)
    shape = values.get("model", {}).get("architecture")
    if shape is not None and place.corpus is not None:
        shape.setdefault("vocab", place.corpus.manifest.vocab)
    try:
        return build_recipe(values)
    except OptionError as error:
        raise OptionError(f"study {run.study}, variant {run.variant.name}: {error}") from error


def shape_of(run: Planned, place: Place) -> Shaped:
    recipe = recipe_of(run, place)
    parts = read_parts(recipe)
    rows = None if place.corpus is None else len(make_loader(recipe, place.corpus, "train"))
    return Shaped(recipe, parts, plan_steps(recipe, parts.architecture, parts.plan, parts.relaxation, rows))


def job_of(run: Planned, study: Study, place: Place) -> Job:
    shaped = shape_of(run, place)
    tokens = shaped.length.tokens
    return Job(
        run=run,
        fingerprint=fingerprint(shaped.recipe),
        mark=place.mark,
        tokens=tokens,
        flops=float(shaped.flops_per_token) * tokens,
        passes=tokens / place.tokens if place.tokens else 0.0,
        most_passes=study.passes,
    )


def jobs_of(study: Study, place: Place) -> list[Job]:
    """All runs of a study, the most urgent first."""
    return [job_of(run, study, place) for run in study.runs()]
