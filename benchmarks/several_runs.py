"""Training several models alike and setting them side by side: what the comparisons here have in common."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str], **defaults: Any) -> None:
    """How all runs are made; `defaults` are the comparison's own."""
    add = parser.add_argument
    add("--corpus", required=True, help="a directory made by `fathomlm data prepare`")
    add("--work", default=defaults["work"], help="where the runs go")
    add(
        "--out",
        type=Path,
        default=Path(f"{Path(defaults['work']).name}.json"),
        help="the record, added to where it is there",
    )
    add("--tokens", default=defaults["tokens"])
    add("--rows", type=int, default=defaults["rows"])
    add("--micro", type=int, default=defaults["micro"])
    add("--lr", type=float, default=defaults["lr"])
    add("--every", type=int, default=defaults["every"])
    add("--validation-rows", type=int, default=128)
    add("--precision", default="bf16")
    add("--device", default="auto")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--only", nargs="*", choices=list(names))


def settings(args: argparse.Namespace, context: int, warmup: float) -> dict[str, Any]:
    """The part of a recipe that is the same for all."""
    return {
        "data": {"path": args.corpus, "context": context},
        "budget": {"tokens": args.tokens},
        "batch": {"sequences": args.rows, "micro": args.micro},
        "optimizer": {"lr": args.lr, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup": warmup},
        "precision": args.precision,
        "compile": args.compile,
        "device": args.device,
        "evaluate": {"every": args.every, "rows": args.validation_rows},
        "checkpoint": {"every": 10**6, "keep": 1, "best": False},
        "log": {"every": 5, "tensorboard": False},
    }


def open_record(out: Path, shared: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record to add to, and whether it is new."""
    from environment import environment

    if not out.exists():
        return {"environment": environment(), "settings": shared, "runs": {}}, True
    record: dict[str, Any] = json.loads(out.read_text())
    if record["settings"] != shared:
        raise SystemExit(f"{out} was measured with other settings; name another file")
    return record, False


@dataclass(frozen=True)
class Trained:
    """One run, finished."""

    recipe: Any
    validation: float | None
    training: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    seconds: float


def train_one(args: argparse.Namespace, shared: dict[str, Any], name: str, model: dict[str, Any]) -> Trained:
    import torch

    from fathomlm.train.reading import build_recipe
    from fathomlm.train.report import read_records
    from fathomlm.train.run import train

    begin = time.perf_counter()
    slug = "".join(c if c.isalnum() else "-" for c in name.lower())
    recipe = build_recipe({**shared, "name": slug, "out": str(Path(args.work) / slug), "model": model})
    summary = train(recipe)
    curve = read_records(Path(recipe.directory) / "metrics.jsonl")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Trained(
        recipe,
        summary.validation,
        [r for r in curve if r["kind"] == "train"],
        [r for r in curve if r["kind"] == "validation"],
        round(time.perf_counter() - begin, 1),
    )


def publish(
    args: argparse.Namespace, table: Callable[[dict[str, Any]], str], picture: Callable[[dict[str, Any], Path], None]
) -> None:
    """A record as JSON, table and picture beside each other."""
    record = json.loads(args.record.read_text())
    record["settings"]["data"].pop("path", None)  # where it lay on that machine is of no interest
    Path(f"{args.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{args.stem}.md").write_text(table(record))
    picture(record, Path(f"{args.stem}.png"))
    print(table(record))


def command(
    description: str,
    add_run: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], None],
    table: Callable[[dict[str, Any]], str],
    picture: Callable[[dict[str, Any], Path], None],
) -> None:
    """A comparison's two verbs: `run` trains and records, `draw` publishes a record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    go = verbs.add_parser("run")
    add_run(go)
    go.set_defaults(run=run)
    show = verbs.add_parser("draw")
    show.add_argument("record", type=Path)
    show.add_argument("stem")
    show.set_defaults(run=lambda args: publish(args, table, picture))
    args = parser.parse_args()
    args.run(args)
