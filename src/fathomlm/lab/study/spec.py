"""A study: which runs are made, and which claims they are to decide (`recipes/studies/NAME.yaml`).

A run is a variant under a budget with a seed. Its recipe is the study's `common` part, the variant's changes over it, the
budget and the seed: nothing else differs between two runs that are compared. Order in the file is priority: all variants of
the first seed come before any of the second, so that every visit to a machine finishes whole comparisons.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.cli.common import JsonOptions
from fathomlm.cli.display import print_table
from fathomlm.errors import OptionError, choices
from fathomlm.fields import Fields
from fathomlm.train.reading import read_yaml, shipped_directory

KINDS = ("train",)
"""What a study's runs are. Another kind needs an executor beside `study/training.py`."""
FIELDS = (
    "name", "title", "note", "thesis", "kind", "common", "variants", "axes", "without", "baseline", "budgets", "chain",
    "seeds", "passes", "scores", "claims", "example",
)  # fmt: skip
PASSES = 4.0
"""Over the corpus; beyond that repeated text says more about memory than about the model."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One of the things that are compared."""

    name: str
    changes: Values
    """Fields of the recipe over the common ones."""
    labels: Mapping[str, str]
    """Its place on each axis; empty where variants are listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    name: str
    section: Values
    """The recipe's `budget`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about a metric of two variants, or of two values of an axis (then for every place on the other axes)."""

    text: str
    thesis: str = "ours"
    """The table, figure or section that makes it, or `ours`."""
    lower: str | None = None
    """The variant whose metric is claimed to be lower than `higher`'s."""
    higher: str | None = None
    same: tuple[str, str] | None = None
    """Two variants that are claimed to differ by less than `within`."""
    within: float = 0.0
    metric: str = "loss"
    best: bool = False
    """Compare the best of each side over the other axes, instead of every place."""
    budgets: tuple[str, ...] = ()
    """Under these budgets only."""
    after: bool = False
    """It was stated when runs that decide it were known. The thesis' claims say themselves which side is the lower one, but
    not which metric and which settings are compared."""

    @property
    def sides(self) -> tuple[str, str]:
        """The difference is the first one's metric less the second one's."""
        if self.same is not None:
            return self.same
        assert self.lower is not None
        assert self.higher is not None
        return self.lower, self.higher


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One run of a study."""

    study: str
    variant: Variant
    budget: Budget
    seed: int
    values: Values
    """The recipe's values, those left out that depend on the machine."""

    @property
    def key(self) -> str:
        """What it is known by within its study: VARIANT/BUDGET/SEED."""
        return f"{self.variant.name}/{self.budget.name}/{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    name: str
    title: str
    note: str
    """What a reader of the results has to know of the whole study, such as that another one replaced it."""
    thesis: tuple[str, ...]
    """Labels of the tables and figures that it answers."""
    kind: str
    common: Values
    variants: tuple[Variant, ...]
    baseline: str
    """The variant, or the value of an axis, that differences are against."""
    budgets: tuple[Budget, ...]
    chain: bool
    """Budgets share their plateau: a larger one branches from the smaller one's checkpoint before its cool-down."""
    seeds: tuple[int, ...]
    passes: float
    scores: Mapping[str, int | None]
    """Tasks and texts that finished models are scored on, each with how many of its first rows; None is all."""
    claims: tuple[Claim, ...]
    axes: Mapping[str, tuple[str, ...]]
    example: bool
    """Shows how studies work; left out of reports unless it is named."""

    def runs(self) -> list[Planned]:
        """All runs, the most urgent first."""
        return [self.run(variant, budget, seed) for seed in self.seeds for variant, budget in self._places()]

    def _places(self) -> Iterator[tuple[Variant, Budget]]:
        if self.chain:
            return itertools.product(self.variants, self.budgets)
        return ((variant, budget) for budget in self.budgets for variant in self.variants)

    def run(self, variant: Variant, budget: Budget, seed: int) -> Planned:
        values = merged(self.common, variant.changes)
        values = merged(values, {"name": f"{self.name}-{variant.name}", "budget": budget.section, "seed": seed})
        return Planned(study=self.name, variant=variant, budget=budget, seed=seed, values=values)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def at(self, side: str, labels: Mapping[str, str]) -> Variant | None:
        """The variant that a side of a comparison means beside `labels` of the other axes; None where there is none."""
        named = next((variant for variant in self.variants if variant.name == side), None)
        if named is not None:
            return named
        wanted = dict(labels) | {self.axis_of(side): side}
        return next((variant for variant in self.variants if variant.labels == wanted), None)

    def axis_of(self, value: str) -> str:
        return next(axis for axis, values in self.axes.items() if value in values)

    def baseline_of(self, variant: Variant) -> Variant:
        """What a variant is compared with in the table."""
        found = self.at(self.baseline, variant.labels)
        assert found is not None
        return found


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """`base` with `changes` put in, section by section."""
    out = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else copy.deepcopy(value)
    return out


def shipped_studies() -> dict[str, Path]:
    """The studies that come with FathomLM, by name."""
    return {path.stem: path for path in sorted((shipped_directory() / "studies").glob("*.yaml"))}


def read_study(name: str | Path) -> Study:
    """A study by its name, or from a YAML file."""
    given, known = Path(name), shipped_studies()
    if str(name) in known:
        path = known[str(name)]
    elif given.is_file():
        path = given
    elif "/" in str(name) or given.suffix:
        raise OptionError(f"there is no study file {given}")
    else:
        raise OptionError(f"{choices('study', str(name), known)}; or give a YAML file")
    return build_study(read_yaml(path, "a study"), str(path))


def read_studies(names: Sequence[str]) -> list[Study]:
    """The studies that were named, each once; all shipped ones where none was."""
    return [read_study(name) for name in dict.fromkeys(names or list(shipped_studies()))]


def build_study(values: Values, where: str) -> Study:
    """A study from plain values; `where` is named in messages."""
    for key in values:
        if key not in FIELDS:
            raise OptionError(f"{where}: {choices('field', str(key), FIELDS)}")
    for key in ("name", "title", "common", "baseline", "budgets", "seeds"):
        if not values.get(key):
            raise OptionError(f"{where}: {key} is required")
    if values.get("kind", "train") not in KINDS:
        raise OptionError(f"{where}: {choices('kind', str(values['kind']), KINDS)}")
    if bool(values.get("variants")) == bool(values.get("axes")):
        raise OptionError(f"{where}: give either variants or axes")
    axes, variants = _variants(values, where)
    seeds = values["seeds"]
    if (
        not isinstance(seeds, list)
        or not all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
        or len({*seeds}) < len(seeds)
    ):
        raise OptionError(f"{where}: seeds must be a list of different integers such as [0, 1], got {seeds!r}")
    study = Study(
        name=str(values["name"]),
        title=str(values["title"]),
        note=" ".join(str(values.get("note") or "").split()),
        thesis=tuple(str(label) for label in values.get("thesis") or ()),
        kind=str(values.get("kind", "train")),
        common=values["common"],
        variants=variants,
        baseline=str(values["baseline"]),
        budgets=tuple(Budget(name=str(name), section=section) for name, section in values["budgets"].items()),
        chain=bool(values.get("chain", False)),
        seeds=tuple(seeds),
        passes=float(values.get("passes", PASSES)),
        scores=_scores(values.get("scores") or {}, where),
        claims=tuple(_claim(claim, where) for claim in values.get("claims") or ()),
        axes=axes,
        example=bool(values.get("example", False)),
    )
    _check(study, where)
    return study


def _variants(values: Values, where: str) -> tuple[dict[str, tuple[str, ...]], tuple[Variant, ...]]:
    """The axes, and the variants; of axes all combinations but those in `without`, the last axis fastest."""
    if values.get("variants"):
        listed = values["variants"].items()
        return {}, tuple(Variant(name=str(name), changes=changes or {}, labels={}) for name, changes in listed)
    axes = {
        str(axis): {str(name): changes or {} for name, changes in places.items()} for axis, places in values["axes"].items()
    }
    found = []
    for combination in itertools.product(*(places.items() for places in axes.values())):
        changes: Values = {}
        for _, change in combination:
            changes = merged(changes, change)
        labels = dict(zip(axes, (name for name, _ in combination), strict=True))
        found.append(Variant(name="-".join(labels.values()), changes=changes, labels=labels))
    names = [variant.name for variant in found]
    for name in values.get("without") or ():
        if name not in names:
            raise OptionError(f"{where}: {choices('variant in without', str(name), names)}")
    found = [variant for variant in found if variant.name not in (values.get("without") or ())]
    return {axis: tuple(places) for axis, places in axes.items()}, tuple(found)


def _scores(values: Any, where: str) -> dict[str, int | None]:
    def fits(rows: object) -> bool:
        return rows is None or (type(rows) is int and rows >= 1)

    if not isinstance(values, dict) or not all(fits(rows) for rows in values.values()):
        raise OptionError(f"{where}: scores must name tasks with a number of rows, such as hellaswag: 500, or null for all")
    return {str(task): rows for task, rows in values.items()}


def _claim(values: Values, where: str) -> Claim:
    claim = Fields(values, where, error=OptionError, prefix="claims.").build(Claim)
    ordered, same = claim.lower is not None and claim.higher is not None, claim.same is not None
    if ordered == same or same != (claim.within > 0):
        raise OptionError(f"{where}: a claim requires a text, and either lower and higher or same and within > 0")
    return claim


def _check(study: Study, where: str) -> None:
    sides = [study.baseline, *(side for claim in study.claims for side in claim.sides)]
    known = [variant.name for variant in study.variants] + [name for names in study.axes.values() for name in names]
    for side in sides:
        if side not in known:
            raise OptionError(f"{where}: {choices('variant', side, known)}")
    names = {variant.name for variant in study.variants}
    for claim in study.claims:
        if (claim.sides[0] in names) != (claim.sides[1] in names) or (claim.best and claim.sides[0] in names):
            raise OptionError(f"{where}: the claim '{claim.text}' must name two variants, or two values of one axis")
        if claim.sides[0] not in names and study.axis_of(claim.sides[0]) != study.axis_of(claim.sides[1]):
            raise OptionError(f"{where}: the claim '{claim.text}' must name two values of one axis")
    for name in (name for claim in study.claims for name in claim.budgets):
        if name not in (budgets := [budget.name for budget in study.budgets]):
            raise OptionError(f"{where}: {choices('budget', name, budgets)}")
    for variant in study.variants:
        if study.at(study.baseline, variant.labels) is None:
            raise OptionError(f"{where}: the baseline {study.baseline} cannot be compared with {variant.name}")
    if study.chain and study.common.get("schedule", {}).get("kind") != "trapezoid":
        raise OptionError(f"{where}: chain requires schedule.kind: trapezoid, whose plateau the budgets share")


def run_list(options: JsonOptions) -> int:
    found = [
        {
            "name": study.name,
            "title": study.title,
            "thesis": list(study.thesis),
            **{name: len(getattr(study, name)) for name in ("variants", "budgets", "seeds")},
            "runs": len(study.runs()),
        }
        for study in read_studies([])
    ]

    def show(record: dict[str, Any]) -> None:
        header = ["study", "runs", "variants", "budgets", "seeds"]
        print_table([header, *([str(study[key]) for key in ("name", *header[1:])] for study in found)])
        for study in record["studies"]:
            print(f"\n{study['name']}: {study['title']} ({', '.join(study['thesis']) or 'ours'})")

    return options.answer({"studies": found}, show)
