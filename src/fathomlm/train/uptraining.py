"""The command that trains a converted model further, for its model card: a shipped recipe with the fields that differ."""

from __future__ import annotations

import shlex
from pathlib import Path

from fathomlm.checkpoints.card import Conversion
from fathomlm.train.reading import read_recipe
from fathomlm.train.recipe import Recipe

LOOPED, PLAIN, SEQ2SEQ = "uptrain-smollm2-135m", "compress-smollm2-135m", "free-samsum"
"""The shipped recipes that the command starts from: for looped models, for others, and for encoder-decoder models."""
PAIRS = "pairs.jsonl"


def uptraining(made: Conversion, out: Path) -> str:
    """What to do with a converted model, with the command that does it. Models of one base that start from one recipe read
    one corpus."""
    cross = made.base.cross
    name = SEQ2SEQ if cross else PLAIN if made.model.plan.plain else LOOPED
    recipe = read_recipe(name)
    given = {"name": out.name, "model.source": str(out)} | _as_it_is(recipe)
    given |= _pairs(made) if cross else _text(made, recipe)
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    on = ""
    if cross:
        on = f"on pairs of your own in {PAIRS}, JSON lines with the fields `source` and `target`, and "
    return (
        "The weights are a starting point. Train the model before you judge its output, here "
        f"{on}with the base as the teacher:\n\n```\n{shlex.join(['fathomlm', 'train', name, *words])}\n```"
    )


def _as_it_is(recipe: Recipe) -> dict[str, str]:
    """The source is converted already: what the recipe would make of it is taken back."""
    fields = ("drop", "by", "neurons", "calibrate", "sharing", "init")
    found = {f"model.{name}": "null" for name in fields if getattr(recipe.model, name) is not None}
    return found | ({} if recipe.model.recursions == 1 else {"model.recursions": "1"})


def _text(made: Conversion, recipe: Recipe) -> dict[str, str]:
    path = f"data/{Path(made.name).name}-{recipe.data.max_tokens}"
    context = made.base.context
    given = {"loss.distill.source": made.name, "data.tokenizer": made.name, "data.path": path}
    return given | ({"data.context": str(context)} if context < recipe.data.context else {})


def _pairs(made: Conversion) -> dict[str, str]:
    """The recipe's own task and its exits are taken out; its lengths, batch and optimizer stay."""
    given = {"loss.exits": "null", "loss.layerwise": "null", "loss.distill.source": made.name}
    given |= {"data.path": f"data/{Path(made.name).name}-pairs", "data.tokenizer": made.name}
    given |= {"data.sources": f"[{PAIRS}]", "data.pairs": "[source, target]", "data.source_prefix": "null"}
    return given | {"data.validation_from": "[]", "data.validation_fraction": "0.01"}
