"""What teaching every layer to be the last (LayerSkip) costs a whole model, and what its exits gain: held-out loss of the
full model and of each exit, before and after.

    python benchmarks/layerskip.py --data data/smollm2/corpus --tokens 20M --out benchmarks/results/layerskip_h200.json

Runs recipes/layerskip-smollm2-135m.yaml, which validates before its first step and after its last, on the same rows. A
second run without exits and dropout on the same text (`--plain`) says what of a change is the text's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fathomlm.lab.common import environment
from fathomlm.train.reading import read_recipe
from fathomlm.train.report import read_records
from fathomlm.train.run import SilentWatcher, train


class Watcher(SilentWatcher):
    """A line for each record."""

    def record(self, record: dict[str, Any]) -> None:
        rate = f", {record['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in record else ""
        half = record.get("exits", {}).get("15")
        exit = "" if half is None else f", exit after 15 layers {half:.4f}"
        print(f"  {record['kind']:10} step {record['step']:5}  {record['parts']['next_token']:.4f}{exit}{rate}", flush=True)


def run(args: argparse.Namespace, *fields: str) -> dict[str, Any]:
    """One run's losses on held-out text."""
    words = [
        *("--model.source", args.source),
        *("--data.path", str(args.data)),
        *("--budget.tokens", args.tokens),
        *("--evaluate.rows", str(args.rows)),
        *("--log.tensorboard", "false"),
        *fields,
        *(f"--{field}" for field in args.fields),
    ]
    recipe = read_recipe("layerskip-smollm2-135m", words)
    found = train(recipe, resume=True, watcher=Watcher())
    first, *_, last = (r for r in read_records(Path(recipe.directory) / "metrics.jsonl") if r["kind"] == "validation")
    return {
        "full": {"before": first["loss"], "after": last["loss"]},
        "exits": {name: {"before": first["exits"][name], "after": loss} for name, loss in last["exits"].items()},
        "tokens": found.tokens,
        "seconds": found.seconds,
        "finished": found.finished,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a prepared corpus with a validation split")
    add("--source", default="smollm2-135m")
    add("--tokens", default="20M")
    add("--rows", type=int, default=256, help="rows of held-out text")
    add("--work", type=Path, default=Path("runs"))
    add("--plain", action="store_true", help="run without exits and dropout too: what the text alone changes")
    add("--out", type=Path, required=True, help="the record")
    add("--fields", nargs="*", default=[], help="other values for the recipe: --fields device=cpu data.context=512")
    args = parser.parse_args()
    record = {"environment": environment(), "layerskip": run(args, "--out", str(args.work / "layerskip"))}
    _write(args.out, record)
    if args.plain:
        plain = ["--loss.exits", "null", "--loss.layer_dropout", "0", "--out", str(args.work / "layerskip-plain")]
        record["plain"] = run(args, *plain)
        _write(args.out, record)
    full, exits = record["layerskip"]["full"], record["layerskip"]["exits"]
    print(f"| output | before | after |\n|---|---|---|\n| full | {full['before']:.3f} | {full['after']:.3f} |")
    for name, found in exits.items():
        print(f"| after {name} layers | {found['before']:.3f} | {found['after']:.3f} |")
    print(json.dumps(record))


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
