"""From a study's runs to recipes on this machine, and to what they will take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fathomlm.depth.cost import Cost, count
from fathomlm.errors import DataError, OptionError, choices
from fathomlm.lab.study.ledger import fingerprint
from fathomlm.lab.study.spec import Planned, Study, merged, read_study
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.flops import forward_flops_per_token
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import Recipe
from fathomlm.train.schedule import LearningRate, RunLength, plan_steps, row_length
from fathomlm.train.setup import make_loader
from fathomlm.train.student import StudentSpec, read_student

NO_CORPUS = "CORPUS"
"""Stands for the corpus where a study is only looked at."""
STUDY = "study:"
"""Before the name of a run, STUDY/VARIANT/BUDGET/SEED: a `model.source` that is the model which that run kept."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs are made: the corpus they read, the directory they work in, the device."""

    corpus: Corpus | None
    work: Path
    device: str = "auto"

    @property
    def corpus_checksum(self) -> str:
        return "" if self.corpus is None else self.corpus.checksum

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
    parts: StudentSpec
    length: RunLength

    @property
    def cost(self) -> Cost:
        parts = self.parts
        return count(parts.architecture, parts.plan, relaxation=parts.relaxation, context=row_length(self.recipe))

    @property
    def flops_per_token(self) -> int:
        return forward_flops_per_token(self.recipe, self.parts)

    @property
    def plateau_end(self) -> int:
        """The step whose checkpoint a larger budget may branch from."""
        return LearningRate.of(self.recipe.schedule, self.length.steps).plateau_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run with what its recipe says of it on this corpus."""

    run: Planned
    fingerprint: str
    corpus_checksum: str
    """The corpus's."""
    shaped: Shaped
    passes: float
    """Over the corpus; 0 where that is not known."""
    most_passes: float

    @property
    def name(self) -> str:
        return f"{self.run.study}/{self.run.key}"

    @property
    def tokens(self) -> int:
        return self.shaped.length.tokens

    @property
    def flops(self) -> float:
        """Forward, as the thesis counts."""
        return float(self.shaped.flops_per_token) * self.tokens

    @property
    def beyond(self) -> bool:
        """Whether it would read the corpus more often than the study allows."""
        return self.passes > self.most_passes


def recipe_of(run: Planned, place: Place) -> Recipe:
    """The recipe of a run; its errors name the study's variant."""
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


def start_of(recipe: Recipe) -> Planned | None:
    """The run of a study whose model a recipe starts from, if it does."""
    if recipe.model.source is None or not recipe.model.source.startswith(STUDY):
        return None
    name, *rest = recipe.model.source.removeprefix(STUDY).split("/")
    if len(rest) != 3 or not rest[2].isdecimal():
        raise OptionError(f"model.source: {recipe.model.source} must be {STUDY}STUDY/VARIANT/BUDGET/SEED")
    study = read_study(name)
    for kind, own, known in (
        ("variant", rest[0], [variant.name for variant in study.variants]),
        ("budget", rest[1], [budget.name for budget in study.budgets]),
    ):
        if own not in known:
            raise OptionError(f"model.source: {recipe.model.source}: {choices(kind, own, known)}")
    budget = next(budget for budget in study.budgets if budget.name == rest[1])
    return study.run(study.variant(rest[0]), budget, int(rest[2]))


def started(recipe: Recipe, place: Place) -> Recipe:
    """The recipe with the directory of the model that it starts from, which must be there."""
    start = start_of(recipe)
    if start is None:
        return recipe
    path = place.directory(start) / "last"
    if not path.exists():
        raise DataError(
            f"there is no {path}, from which the runs start; make it with `fathomlm study run {start.study} --corpus DIR "
            f"--only {start.key} --keep --work {place.work}`, and another --ledger if the ledger has that run already"
        )
    return replace(recipe, model=replace(recipe.model, source=str(path)))


def shape_of(run: Planned, place: Place) -> Shaped:
    recipe = recipe_of(run, place)
    start = start_of(recipe)
    if start is not None and start.study == run.study:
        raise OptionError(f"study {run.study}: model.source: {recipe.model.source} must be a run of another study")
    parts = read_student(recipe, source=None if start is None else shape_of(start, Place(None, Path())).parts)
    rows = None if place.corpus is None else len(make_loader(recipe, place.corpus, "train"))
    return Shaped(recipe, parts, plan_steps(recipe, forward_flops_per_token(recipe, parts), rows))


def jobs_of(study: Study, place: Place) -> list[Job]:
    """All runs of a study, the most urgent first. Seeds change nothing about shapes, and reading a recipe takes a while."""
    shapes: dict[tuple[str, str], Shaped] = {}
    found = []
    for run in study.runs():
        place_of = run.variant.name, run.budget.name
        if place_of not in shapes:
            shapes[place_of] = shape_of(run, place)
        first = shapes[place_of]
        recipe = replace(first.recipe, seed=run.seed, out=str(place.directory(run)))
        shaped = replace(first, recipe=recipe)
        found.append(
            Job(
                run=run,
                fingerprint=fingerprint(recipe),
                corpus_checksum=place.corpus_checksum,
                shaped=shaped,
                passes=shaped.length.tokens / place.tokens if place.tokens else 0.0,
                most_passes=study.passes,
            )
        )
    return found
