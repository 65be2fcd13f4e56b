"""Reading a recipe: YAML from a file, `--section.field value` from the command line, types from the dataclasses. What no run
could mean is refused before any work is done; bounds of single fields stand beside them (`recipe.py`)."""

from __future__ import annotations

import copy
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fathomlm.errors import OptionError, choices
from fathomlm.fields import Fields
from fathomlm.options import check, check_required
from fathomlm.sizes import parse_amount
from fathomlm.train.recipe import ExitRecipe, Recipe


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with fields changed by `--section.field value` words; checked. What is wrong in the file names
    it, what the words made wrong does not."""
    if path is None:
        return build_recipe({}, overrides)
    file = find_recipe(path)
    values = read_yaml(file)
    try:
        return build_recipe(values, overrides)
    except OptionError as error:
        if overrides and str(error) != _refusal(values):
            raise
        raise OptionError(f"{file}: {str(error).removeprefix('recipe: ')}") from error


def _refusal(values: dict[str, Any]) -> str | None:
    """Why no recipe can be built from values, if none can."""
    try:
        build_recipe(values)
    except OptionError as error:
        return str(error)
    return None


def build_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from plain values."""
    recipe = Fields(_override(values, overrides), "recipe", error=OptionError).build(Recipe, texts=True)
    check_recipe(recipe)
    return recipe


def shipped_directory() -> Path:
    """Where the recipes that come with FathomLM are: in the package when installed, in `recipes/` of a checkout."""
    packaged = Path(__file__).resolve().parent.parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped_directory().glob("*.yaml"))}


def yet_to_come(source: str) -> str | None:
    """The shipped recipe whose run leaves a model that is not there, by the name of its directory (`runs/NAME/last`)."""
    found = re.fullmatch(r"runs/([\w.-]+)/(?:last|best)/?", source)
    return found[1] if found is not None and found[1] in shipped_recipes() and not Path(source).exists() else None


def find_recipe(path: str | Path) -> Path:
    """A file, or the name of a recipe that is shipped."""
    given = Path(path)
    if given.is_file():
        return given
    known = shipped_recipes()
    if str(path) in known:
        return known[str(path)]
    if given.is_dir():
        raise OptionError(f"{given} is a directory; a recipe is a YAML file")
    if "/" in str(path) or given.suffix:
        raise OptionError(f"there is no recipe file {given}")
    raise OptionError(f"{choices('recipe', str(path), known)}; or give a YAML file")


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, every field, as a file that reads back equal."""
    return str(yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, width=120))


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's safe loader takes the last of two equal keys and says nothing; in a recipe the first was meant as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key.value}'", key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_yaml(path: Path, what: str = "a recipe") -> dict[str, Any]:
    """The fields of a YAML file; a file that is none, or has a key twice, is refused with its line."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f"{path}, line {place.line + 1}" if place is not None else str(path)
        raise OptionError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or 'cannot be read'})") from error
    if not isinstance(values, dict):
        got = "an empty file" if values is None else "a list" if isinstance(values, list) else "a single value"
        raise OptionError(f"{path}: {what} is fields with values (name: tiny), this is {got}")
    return values


def _override(values: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The values with those of `--a.b v` and `--a.b=v` words put in, each name looked up."""
    merged = copy.deepcopy(values)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or not name:
            raise OptionError(f"cannot read '{word}'; fields of the recipe are changed with --section.field value")
        parts = name.replace("-", "_").split(".")
        kind = _check_path(parts)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise OptionError(f"--{name} requires a value")
            text = rest.pop(0)
        here = merged
        for part in parts[:-1]:
            here[part] = here[part] if isinstance(here.get(part), dict) else {}
            here = here[part]
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise OptionError(f"--{name}: cannot read '{text}'") from error
        as_typed = kind in (str, str | None) and value is not None  # --name 12 is a name, not a number
        here[parts[-1]] = text if as_typed and not isinstance(value, str) else value
    return merged


def _check_path(parts: list[str]) -> Any:
    """The type of the field that the parts of a dotted name lead to."""
    cls: type = Recipe
    kind: Any = Recipe
    for depth, part in enumerate(parts):
        names = [f.name for f in dataclasses.fields(cls)]
        if part not in names and depth == 0:
            raise OptionError(choices("option or field", f"--{part}", [f"--{name}" for name in names]))
        if part not in names:
            raise OptionError(choices(f"field in {'.'.join(parts[:depth])}", part, names))
        kind = typing.get_type_hints(cls)[part]
        section = _section(kind)
        if depth + 1 < len(parts):
            if section is None:
                if kind == dict[str, Any] | None:
                    return Any
                raise OptionError(f"{'.'.join(parts[: depth + 1])} has no fields of its own")
            cls = section
    return kind


def _section(kind: Any) -> type | None:
    """The dataclass behind a field's type, if there is one."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no run could mean, each with the field, the rule and the value."""
    check(recipe)
    check_required(recipe)
    model, loss, exits = recipe.model, recipe.loss, recipe.loss.exits
    starts = [n for n in ("source", "shape", "architecture") if getattr(model, n) is not None]
    if len(starts) != 1:
        raise OptionError(f"model requires one of source, shape and architecture, got {_given('model', starts)}")
    budgets = [n for n in ("tokens", "steps", "epochs", "flops") if getattr(recipe.budget, n) is not None]
    if len(budgets) != 1:
        raise OptionError(f"budget requires one of tokens, steps, epochs and flops, got {_given('budget', budgets)}")
    if recipe.budget.steps is not None and parse_amount("budget.steps", recipe.budget.steps) % 1:
        raise OptionError(f"budget.steps must be an integer, got {recipe.budget.steps}")
    batches = [n for n in ("tokens", "sequences") if getattr(recipe.batch, n) is not None]
    if len(batches) != 1:
        raise OptionError(f"batch requires one of tokens and sequences, got {_given('batch', batches)}")
    if len(recipe.optimizer.betas) != 2:
        raise OptionError(f"optimizer.betas requires two numbers, got {recipe.optimizer.betas}")
    if recipe.optimizer.kind == "muon" and recipe.train != "all":
        raise OptionError(f"optimizer.kind: muon moves layers, which train: {recipe.train} freezes; use adamw")
    if recipe.capture and recipe.recompute not in ("none", "inner"):
        raise OptionError(f"capture cannot be combined with recompute: {recipe.recompute}; it requires none or inner")
    if loss.distill is not None and not loss.distill.source:
        raise OptionError("loss.distill requires a source, the teacher")
    if loss.distill is not None and loss.distill.cache is not None and (loss.heal is not None or recipe.data.pairs):
        raise OptionError("loss.distill.cache cannot be combined with loss.heal or data.pairs")
    if loss.heal is not None:
        if loss.distill is None:
            raise OptionError("loss.heal requires loss.distill, whose source is the teacher")
        if loss.exits is not None or model.router is not None:
            raise OptionError("loss.heal cannot be combined with loss.exits or model.router; train those afterwards")
    if model.router is not None and (loss.exits is not None or loss.layerwise is not None):
        raise OptionError(
            "loss.exits and loss.layerwise cannot be combined with model.router: a routed model has one output"
        )
    if loss.routing is not None and loss.routing.capacity_per_document and not recipe.data.document_mask:
        raise OptionError("loss.routing.capacity_per_document requires data.document_mask")
    if len(recipe.data.pairs) not in (0, 2):
        raise OptionError(f"data.pairs names two fields, source and target, got {recipe.data.pairs}")
    if recipe.train == "relaxation" and model.relax is None and model.source is None:
        raise OptionError("train: relaxation requires model.relax")
    if exits is not None and exits.weights == "gate":
        others = {
            "loss.distill": loss.distill,
            "loss.exits.distill": exits.distill,
            "loss.exits.exit_vocab": exits.exit_vocab,
        }
        for name in (name for name, given in others.items() if given):
            raise OptionError(f"loss.exits.weights: gate cannot be combined with {name}")
        if exits.at != "recursions":
            raise OptionError(f"loss.exits.weights: gate requires loss.exits.at: recursions, got {exits.at}")
    if recipe.train == "exit_heads" and (loss.exits is None or loss.exits.head_rank < 1):
        raise OptionError("train: exit_heads requires loss.exits.head_rank >= 1")
    adding = ("adapter_rank", "layer", "head_rank", "classifier", "draft")
    adds = exits is not None and (exits.weights == "gate" or any(getattr(exits, name) for name in adding))
    if recipe.train == "exits" and not adds:
        names = ", ".join(adding)
        raise OptionError(f"train: exits requires something that exits add: loss.exits.{names} or weights: gate")
    if exits is not None and exits.draft:
        _check_draft(recipe, exits)
    _check_layerskip(recipe)
    if exits is not None and exits.exit_vocab and not recipe.exits_only:
        raise OptionError(
            f"loss.exits.exit_vocab requires train: exits, got train: {recipe.train}; exits copy their rows of "
            "the head, which must not learn"
        )


def _check_draft(recipe: Recipe, exits: ExitRecipe) -> None:
    """A draft layer learns alone, over a frozen model, from its last output."""
    if not recipe.exits_only or exits.distill is None:
        raise OptionError("loss.exits.draft requires train: exits and loss.exits.distill, such as forward_kl")
    others = ("head_rank", "adapter_rank", "layer", "classifier")
    given = [name for name in others if getattr(exits, name)]
    given += ["at"] if exits.at != "recursions" else []
    given += [f"weights: {exits.weights}"] if exits.weights != "aggressive" else []
    if given:
        raise OptionError(f"loss.exits.draft cannot be combined with loss.exits.{given[0]}: it is no exit in the model")


def _check_layerskip(recipe: Recipe) -> None:
    """A recorded pass would drop the same layers for ever; classifiers and a gate compare all exits in every step."""
    loss, exits = recipe.loss, recipe.loss.exits
    others = {"capture": recipe.capture, "model.router": recipe.model.router is not None, "loss.heal": loss.heal is not None}
    asked = {"loss.layer_dropout": others} if loss.layer_dropout else {}
    if exits is not None and exits.rotate:
        compared = {"loss.exits.classifier": exits.classifier, "loss.exits.weights: gate": exits.weights == "gate"}
        asked["loss.exits.rotate"] = others | compared
    for name, refused in asked.items():
        for other in (other for other, given in refused.items() if given):
            raise OptionError(f"{name} cannot be combined with {other}")
        if recipe.train != "all":
            raise OptionError(f"{name} requires train: all, got train: {recipe.train}")


def _given(section: str, names: list[str]) -> str:
    if not names:
        return "none"
    return f"{' and '.join(names)}; null takes one out, such as --{section}.{names[-1]} null"
