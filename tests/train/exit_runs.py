"""Exits trained over a plain model that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathomlm.train.reading import build_recipe
from fathomlm.train.run import train


@dataclass(frozen=True)
class Trained:
    """A plain model, and what was trained over it."""

    source: Path
    run: Path


def values_for(corpus: Path) -> dict[str, Any]:
    return {
        "data": {"path": str(corpus), "context": 32},
        "batch": {"sequences": 8, "micro": 8},
        "evaluate": {"every": 0, "rows": 0},
        "log": {"every": 1, "tensorboard": False},
        "device": "cpu",
    }


def train_exit(corpus: Path, source: Path, out: Path, own: dict[str, Any], steps: int, lr: float) -> Trained:
    """An exit behind the first layer, that has what `own` says."""
    exits = {"at": [1], "coefficient": 1.0, "distill": "forward_kl", "classifier": True, **own}
    values = values_for(corpus) | {"out": str(out), "model": {"source": str(source)}, "budget": {"steps": steps}}
    values |= {"loss": {"exits": exits}, "train": "exits", "optimizer": {"lr": lr, "weight_decay": 0.0}}
    train(build_recipe({**values, "evaluate": {"every": 0, "rows": 0, "first": True}}))
    return Trained(source, out)
