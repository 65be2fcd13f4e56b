"""What a study scores its trained models by: tasks and texts of a folder, at the end and at every exit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

import fathomlm
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.likelihood import LocalTask, answer, read_task
from fathomlm.lab.evaluate.outputs import FULL, Output
from fathomlm.lab.evaluate.scoring import DEFAULT_BATCH, Scorer, TextEncoder, predict
from fathomlm.lab.evaluate.tasks import TASKS, Metrics, check_folder, find_file, read_rows
from fathomlm.lab.study.spec import Study
from fathomlm.model.hub import FathomForCausalLM

BATCH = 64
"""On a GPU."""
SCORED_WINDOW = 2048
"""Tokens that a model reads at once: as many as studies train with, not all that its base was made for."""
COUNTED = ("acc_norm", "acc", "nats_per_token")
"""What a task is compared by: the first of these that it has. LAMBADA has no choices to normalise."""
Wanted = Mapping[str, LocalTask | list[str]]
"""Tasks by name, read; of a text its parts."""


def read_wanted(study: Study, folder: Path | None) -> dict[str, LocalTask | list[str]]:
    """The tasks and texts that a study scores, from a folder: checked before anything is trained."""
    if not study.scores:
        return {}
    if folder is None:
        raise OptionError(
            f"study {study.name} scores {', '.join(study.scores)}; --tasks must name the folder of their files"
        )
    check_folder(folder)
    found: dict[str, LocalTask | list[str]] = {}
    for name, rows in study.scores.items():
        path = find_file(folder, name)
        if path is None:
            raise DataError(f"{folder} has no file for {name}, which study {study.name} scores")
        if name in TASKS:
            found[name] = read_task(path, name=name, limit=rows)
        else:
            found[name] = [row.text("text") for row in read_rows(path, rows)]
    return found


def score(directory: Path, wanted: Wanted, device: str) -> dict[str, dict[str, Metrics]]:
    """A trained model's metrics by task, at its end ("full") and at each of its exits ("exit_15", by layers run, as losses
    are named); texts are predicted as one, as is usual for WikiText."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model = fathomlm.load(directory, "float32" if kind == "cpu" else "bfloat16", kind)
    if not isinstance(model, FathomForCausalLM):
        raise OptionError("scores are for decoder-only models; leave them out of this study")
    window = min(SCORED_WINDOW, model.architecture.context)
    outputs = (FULL, *(Output(layer=index + 1) for index in model.plan.exits))
    scorer = Scorer(model, outputs, batch=DEFAULT_BATCH if kind == "cpu" else BATCH, max_length=window)
    encoder = TextEncoder(model)
    names = [FULL.name, *(f"exit_{output.layer}" for output in outputs[1:])]
    found: dict[str, dict[str, Metrics]] = {name: {} for name in names}
    for task, each in wanted.items():
        if isinstance(each, LocalTask):
            metrics = [answered.metrics for answered in answer(each, scorer, encoder)]
        else:
            texts = predict(scorer, encoder, each, join=True)
            metrics = [{"tokens": text.tokens, "nats_per_token": text.nats_per_token} for text in texts]
        for name, one in zip(names, metrics, strict=True):
            found[name][task] = one
    return found


def counted(metrics: Metrics) -> tuple[float, float | None]:
    """The number that a task is compared by, and its standard error over the examples, where that is known."""
    name = next(name for name in COUNTED if name in metrics)
    error = metrics.get(f"{name}_stderr")
    return float(metrics[name]), None if error is None else float(error)
