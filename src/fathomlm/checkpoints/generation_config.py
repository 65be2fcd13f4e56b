"""How a checkpoint wants its tokens sampled: generation_config.json, where it says that it samples.

The command line keeps its own defaults, greedy; a server takes these where a request names none, as vLLM does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from fathomlm.errors import CheckpointError
from fathomlm.jsonfile import read_object
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

FILE = "generation_config.json"
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")

Model = TypeVar("Model", bound=FathomModel)


def with_sampling(model: Model, path: Path) -> Model:
    """The model, with what the file beside its weights says of sampling in `model.generation_config`, so that it is saved
    with it. Without `do_sample` such a file means greedy decoding, and what else it says nothing. Here are types alone:
    bounds are `Sampling`'s, when the values are used."""
    file = path / FILE
    if not file.is_file() or isinstance(model, FathomForSeq2SeqLM):  # which has no generation_config
        return model
    fields = read_object(file, error=CheckpointError)
    if fields.flag("do_sample", default=False):
        found = {name: fields.number(name, default=None) for name in FLOATS}
        model.generation_config.update(do_sample=True, top_k=fields.integer("top_k", default=None), **found)
    return model


def sampling_defaults(model: FathomModel) -> dict[str, float]:
    """By the names of `Sampling`'s fields; none where the model does not say that it samples."""
    if isinstance(model, FathomForSeq2SeqLM):
        return {}
    config = model.generation_config
    values = {name: getattr(config, name, None) for name in (*FLOATS, "top_k")} if config.do_sample else {}
    return {name: value for name, value in values.items() if value is not None}
