"""A corpus of short documents, one of pairs, and recipes that train a model of a few thousand weights on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsonl import write_jsonl

ARCHITECTURE = {"layers": 4, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "context": 64}


@pytest.fixture(scope="session")
def token_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths, a token a byte. Shared by the whole run: read it, do not write to it."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    place = tmp_path_factory.mktemp("documents")
    texts = (f"{n}: the line is {n * 7919 % 1000} fathoms long" + ", and so on" * (n % 4) for n in range(120))
    write_jsonl(place / "text.jsonl", ({"text": text} for text in texts))
    options = {"sources": (str(place / "text.jsonl"),), "tokenizer": "bytes", "validation_fraction": 0.1}
    return prepare(PrepareOptions(out=place / "corpus", **options)).path


@pytest.fixture(scope="session")
def pair_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of different lengths, so that rows are padded."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    place = tmp_path_factory.mktemp("pairs")
    records = ({"ask": f"{n} fathoms" + "?" * (n % 9), "say": f"{6 * n} feet" + "!" * (n % 5)} for n in range(60))
    write_jsonl(place / "pairs.jsonl", records)
    options = {"sources": (str(place / "pairs.jsonl"),), "tokenizer": "bytes", "pairs": ("ask", "say")}
    return prepare(PrepareOptions(out=place / "corpus", validation_fraction=0.1, **options)).path


@pytest.fixture(scope="session")
def teacher(token_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model of the same vocabulary with weights that say something, as a directory."""
    import torch

    from fathomlm.depth import Architecture, DepthPlan
    from fathomlm.model.hub import FathomConfig, FathomForCausalLM
    from fathomlm.train.data.corpus import Corpus

    architecture = Architecture(family="llama", vocab=257, head_dim=8, **ARCHITECTURE)
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(4), dtype=torch.float32))
    model.decoder.reset_parameters(std=0.2, generator=torch.Generator().manual_seed(1))
    model.tokenizer = Corpus.open(token_corpus).load_tokenizer()
    directory = tmp_path_factory.mktemp("models") / "teacher"
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def plain_source(token_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model that has learnt a little, for exits to be trained over. Shared by the whole run: leave it as it is."""
    from fathomlm.train.reading import build_recipe
    from fathomlm.train.run import train
    from train.exit_runs import values_for

    run = tmp_path_factory.mktemp("plain") / "run"
    first = {"out": str(run), "model": {"architecture": ARCHITECTURE}, "budget": {"steps": 80}, "optimizer": {"lr": 1e-2}}
    train(build_recipe(values_for(token_corpus) | first))
    return run / "last"


@pytest.fixture
def values(token_corpus: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A recipe's values with some changed: `values(budget={"steps": 4}, seed=1)`. It trains a looped model in `tmp_path`."""

    def make(**changes: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "name": "test",
            "out": str(tmp_path / "run"),
            "model": {"architecture": ARCHITECTURE, "recursions": 2},
            "data": {"path": str(token_corpus), "context": 32},
            "budget": {"steps": 6},
            "batch": {"sequences": 4, "micro": 2},
            "optimizer": {"lr": 3e-3},
            "evaluate": {"every": 0, "rows": 8},
            "checkpoint": {"every": 1000},
            "log": {"every": 1, "tensorboard": False},
            "device": "cpu",
        }
        for name, value in changes.items():
            base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
        return base

    return make


@pytest.fixture
def recipe(values: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """The same as a `Recipe`."""
    from fathomlm.train.reading import build_recipe

    return lambda **changes: build_recipe(values(**changes))


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], dict[str, Any]]:
    """The weights of a checkpoint, as they are on disk."""
    from safetensors.torch import load_file

    return lambda directory: load_file(directory / "model.safetensors")
