"""What a recipe asks of this machine, checked before torch is imported: models and data that are there, and a directory that
holds no other run."""

from __future__ import annotations

import shlex
from pathlib import Path

from fathomlm.checkpoints.locate import check_source
from fathomlm.errors import DataError, OptionError
from fathomlm.train.data.manifest import FILE
from fathomlm.train.data.sources import expand
from fathomlm.train.reading import yet_to_come
from fathomlm.train.recipe import DataRecipe, Recipe
from fathomlm.train.state import check_fresh, saved_steps


def check_first(recipe: Recipe, resume: bool) -> None:
    directory = Path(recipe.directory)
    check_fresh(directory, saved_steps(directory / "checkpoints"), resume)
    check_models(recipe)
    check_corpus(recipe.data)


def check_models(recipe: Recipe, *, foresee: bool = False) -> list[str]:
    """The models that a recipe starts from and learns from; refuses those that are not there, unless a
    shipped recipe makes them and the caller can `foresee` what it makes."""
    distill = recipe.loss.distill
    sources = {"model.source": recipe.model.source, "loss.distill.source": None if distill is None else distill.source}
    found = {field: source for field, source in sources.items() if source is not None}
    for field, source in found.items():
        name = yet_to_come(source)
        if name is None:
            check_source(source)
        elif not foresee:
            raise OptionError(f"{field}: {source} does not exist; it is what fathomlm train {name} leaves")
    return list(found.values())


def check_corpus(data: DataRecipe, *, alone: bool = True) -> bool:
    """Whether the corpus is there; refuses where it is not and nothing says from what it is made. Only a process that trains
    `alone` makes it."""
    if not data.path:
        raise OptionError("data.path is not set; name a directory made by `fathomlm data prepare`")
    if (Path(data.path) / FILE).exists():
        return True
    if not data.sources or not alone:
        raise DataError(f"there is no prepared corpus at {data.path}; make it with: {prepare_command(data)}")
    if data.tokenizer is None:
        raise OptionError("data.sources requires data.tokenizer, a model source or `bytes`")
    expand(data.sources, validation_from=data.validation_from)
    return False


def missing_data(data: DataRecipe) -> str | None:
    """What happens where the corpus is not there; None where it is. A mistyped path would have the recipe's own text
    prepared under that name, perhaps for hours."""
    if not data.path or (Path(data.path) / FILE).exists():
        return None
    if not data.sources:
        return f"{data.path} does not exist; make it with: {prepare_command(data)}"
    size = "" if data.max_tokens is None else f", {data.max_tokens} tokens"
    return f"{data.path} does not exist; it is prepared first, from {', '.join(data.sources)}{size}"


def prepare_command(data: DataRecipe) -> str:
    """What a user would type to prepare a recipe's data."""
    words = ["fathomlm", "data", "prepare", *(data.sources or ["SOURCES"]), data.path]
    words += ["--tokenizer", data.tokenizer or "TOKENIZER"]
    words += [] if data.column == "text" else ["--column", data.column]
    words += ["--pairs", *data.pairs] if data.pairs else []
    words += ["--source-prefix", data.source_prefix] if data.source_prefix else []
    words += [word for source in data.validation_from for word in ("--validation-from", source)]
    words += [] if data.max_tokens is None else ["--max-tokens", str(data.max_tokens)]
    words += [] if data.validation_fraction is None else ["--validation-fraction", str(data.validation_fraction)]
    return shlex.join(words)
