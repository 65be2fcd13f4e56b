"""What all kinds of `fathomlm eval` share: options, checks, and how they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ExitPackOptions, JsonOptions
from fathomlm.cli.decoding import DepthOptions
from fathomlm.engine.options import EngineOptions
from fathomlm.options import like, option

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.outputs import Output
    from fathomlm.model.seq2seq import FathomModel


@dataclass(frozen=True, kw_only=True)
class BatchOptions(JsonOptions):
    """How much is evaluated, and how much at once."""

    limit: int | None = option(None, ge=1, help="evaluate the first N examples, documents or rows only", default_text="all")
    batch_size: int = like(EngineOptions, "batch_size", 8, help="sequences per forward pass")


@dataclass(frozen=True, kw_only=True)
class ShotOptions:
    shots: int | None = option(None, ge=0, help="few-shot examples before each question")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Beginnings of documents, to be completed."""

    prompts: int = option(8, ge=1, help="documents to begin from")
    prompt_tokens: int = option(32, ge=1, help="tokens of each document that are the prompt")


@dataclass(frozen=True, kw_only=True)
class EvaluatedOutputOptions(ExitPackOptions):
    """Which outputs of the model are evaluated."""

    exit: str | None = option(
        None, metavar="WHERE",
        help="exits to evaluate too: recursion, layer, all, or layers such as 4,8", default_text="the last output only",
    )  # fmt: skip
    max_depth: str | None = like(
        DepthOptions, "max_depth", metavar="N", default_text=None,
        help="looped models: at most N recursions; 'all' evaluates every number of them",
    )  # fmt: skip

    def outputs(self, model: str) -> tuple[Output, ...]:
        """From the model's configuration, before its weights are loaded."""
        from fathomlm.checkpoints.resolve import plan_of
        from fathomlm.lab.evaluate.outputs import choose_outputs

        return choose_outputs(plan_of(model, self.exits), self.exit, self.max_depth)


def write_lines(out: Path, records: Iterable[dict[str, Any]]) -> None:
    """JSON lines that appear whole or not at all."""
    from fathomlm.checkpoints.writing import whole_file

    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(_dump(record) + "\n")


def about(options: Any, kind: str, model: FathomModel, exits: Path | None) -> dict[str, Any]:
    """How every record begins."""
    from fathomlm import __version__
    from fathomlm.checkpoints.resolve import describe, dtype_name

    return {
        "kind": kind,
        "model": options.model,
        "exit_pack": None if exits is None else str(exits),
        "plan": describe(model),
        "dtype": dtype_name(model),
        "device": options.device,
        "version": __version__,
        "batch": options.batch_size,
        "limit": options.limit,
    }


def answer(options: JsonOptions, record: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    """A record as JSON, or shown to people."""
    print_record(record) if options.json else show(record)


def print_record(record: dict[str, Any]) -> None:
    print(_dump(record))


def number(value: float) -> str:
    """Four digits behind the point; a perplexity may be beyond all counting."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3e}"


def _dump(record: dict[str, Any]) -> str:
    from fathomlm.train.report import strict

    return json.dumps(strict(record), ensure_ascii=False, allow_nan=False)
