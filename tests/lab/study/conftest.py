"""A corpus of short documents with a validation split, and a small study over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jsonl import write_jsonl


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the whole run: read it, do not write to it."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    place = tmp_path_factory.mktemp("study-documents")
    texts = (f"{n}: the line is {n * 7919 % 1000} fathoms long" + ", and so on" * (n % 4) for n in range(200))
    write_jsonl(place / "text.jsonl", ({"text": text} for text in texts))
    options = {"sources": (str(place / "text.jsonl"),), "tokenizer": "bytes", "validation_fraction": 0.2}
    return prepare(PrepareOptions(out=place / "corpus", **options)).path


@pytest.fixture
def values() -> Callable[..., dict[str, Any]]:
    """A study's values with some changed: one layer looped twice between two others, plain and routed beside it."""

    def make(**changes: Any) -> dict[str, Any]:
        looped = {"sharing": "middle-cycle", "recursions": 2}
        shape = {"layers": 4, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "vocab": 257, "context": 32}
        base: dict[str, Any] = {
            "name": "small",
            "title": "A small study",
            "common": {
                "model": {"architecture": shape},
                "data": {"context": 16},
                "batch": {"sequences": 4, "micro": 4},
                "optimizer": {"lr": 3e-3},
                "schedule": {"kind": "trapezoid", "warmup": 2, "cooldown": 0.25},
                "evaluate": {"every": 4, "rows": 4},
                "checkpoint": {"every": 4, "keep": 1, "best": False},
                "log": {"every": 1},
            },
            "variants": {
                "plain": {},
                "recursive": {"model": looped},
                "mor": {"model": {**looped, "router": {"kind": "expert"}}},
            },
            "baseline": "plain",
            "budgets": {"short": {"steps": 8}},
            "seeds": [0, 1],
            "claims": [{"text": "looping costs", "lower": "plain", "higher": "recursive"}],
        }
        return base | changes

    return make
