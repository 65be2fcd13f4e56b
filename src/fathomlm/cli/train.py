"""`fathomlm train RECIPE`: train, uptrain, distil or add exits, as a recipe says."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fathomlm.cli.common import JsonOptions
from fathomlm.cli.first import check_device
from fathomlm.errors import OptionError
from fathomlm.options import option

OPTIONS = ("--resume", "--print-config", "--dry-run", "--list", "--json", "--help")


@dataclass(frozen=True, kw_only=True)
class Train(JsonOptions):
    """Train as RECIPE says: a YAML file, or the name of a shipped recipe (--list). Any field can be changed with
    --section.field value, for example --optimizer.lr 1e-4 --budget.tokens 2B. Ctrl-C or SIGTERM saves and stops; --resume
    continues. For several GPUs: torchrun --nproc-per-node 8 -m fathomlm train RECIPE."""

    recipe: str | None = option(None, positional=True, help="YAML file or shipped recipe; before any fields")
    resume: bool = option(False, help="continue the run in its directory, if there is one")
    print_config: bool = option(False, help="print the complete recipe, every field, and exit")
    dry_run: bool = option(False, help="print parameters, FLOPs, tokens, memory and time, and exit")
    list: bool = option(False, help="list the shipped recipes, and exit")
    fields: tuple[str, ...] = option(())
    """Words that are no options: fields of the recipe."""

    def run(self) -> int:
        try:
            from fathomlm.train.reading import read_recipe, to_yaml
        except ImportError as error:
            raise OptionError(f"training requires the package {error.name}: pip install 'fathomlm[train]'") from error
        if self.list:
            return _list(self.json)
        if self.recipe is None:
            raise OptionError("no recipe: give a YAML file or a name (see: fathomlm train --list)")
        _check_options(self.fields)
        recipe = read_recipe(self.recipe, self.fields)
        if self.print_config:
            print(json.dumps(asdict(recipe)) if self.json else to_yaml(recipe), end="\n" if self.json else "")
            return 0
        if recipe.device != "auto":
            check_device(recipe.device)
        from fathomlm.train.first import check_first, check_models

        if self.dry_run:
            check_models(recipe, foresee=True)
            return _dry_run(recipe, self.json)
        check_first(recipe, self.resume)
        return _train(recipe, self.resume, self.json)


def _check_options(words: Sequence[str]) -> None:
    """`--dryrun` is no field of a recipe, and what was meant is not one either."""
    from fathomlm.train.recipe import Recipe

    known = {field.name for field in fields(Recipe)}
    for word in words:
        name = word.split("=")[0]
        near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.75)
        if near and name.lstrip("-") not in known:
            raise OptionError(f"unknown option '{name}' (did you mean '{near[0]}'?)")


def _list(as_json: bool) -> int:
    from fathomlm.train.reading import shipped_recipes

    found = {name: _first_comment(path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()}
    if as_json:
        print(json.dumps(found))
        return 0
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")
    return 0


def _first_comment(text: str) -> str:
    first = text.splitlines()[0] if text else ""
    return first.removeprefix("#").strip()


def _dry_run(recipe: Any, as_json: bool) -> int:
    import torch

    from fathomlm.train.estimate import estimate, format_estimate
    from fathomlm.train.first import missing_data

    recipe, rows = _with_data(recipe)
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = estimate(recipe, rows_in_epoch=rows, device_name=device_name)
    missing = missing_data(recipe.data)
    if as_json:
        print(json.dumps(found.to_dict() | {"data": recipe.data.path, "data_missing": missing is not None}))
        return 0
    print(format_estimate(found))
    if missing is not None:
        print(f"data          {missing}")
    return 0


def _with_data(recipe: Any) -> tuple[Any, int | None]:
    """What only the prepared data say, where they are there: a fresh model's vocabulary, and the rows of an epoch."""
    from dataclasses import replace
    from pathlib import Path

    from fathomlm.train.data.corpus import Corpus
    from fathomlm.train.setup import make_loader

    if not recipe.data.path or not (Path(recipe.data.path) / "corpus.json").exists():
        return recipe, None
    corpus = Corpus.open(recipe.data.path)
    shape = recipe.model.architecture
    if shape is not None:
        recipe = replace(recipe, model=replace(recipe.model, architecture={"vocab": corpus.manifest.vocab, **shape}))
    return recipe, len(make_loader(recipe, corpus, "train"))


def _train(recipe: Any, resume: bool, as_json: bool) -> int:
    from fathomlm.cli.display import TrainingBar, log
    from fathomlm.train.first import missing_data
    from fathomlm.train.run import train

    if (missing := missing_data(recipe.data)) is not None:
        log(missing)
    with TrainingBar(recipe.name) as bar:
        summary = train(recipe, resume=resume, watcher=bar, on_prepare=bar.prepared)
    if not bar.watching:  # another rank speaks
        return 0 if summary.finished else 2
    if as_json:
        print(json.dumps(summary.to_dict()))
    elif summary.finished:
        exits = "".join(f", after {depth} steps {loss:.4f}" for depth, loss in summary.exits.items())
        value = "no validation data" if summary.validation is None else f"validation loss {summary.validation:.4f}{exits}"
        print(f"{summary.directory}: {summary.steps:,} steps, {summary.tokens:,} tokens, {value}")
        print(f"  try it: fathomlm generate {summary.directory}/last --prompt 'Once upon a time'")
    if not summary.finished:
        print(
            f"fathomlm: stopped at step {summary.step:,} of {summary.steps:,}, saved; --resume goes on",
            file=sys.stderr,
        )
        return 2
    return 0
