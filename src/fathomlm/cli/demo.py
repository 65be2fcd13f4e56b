"""`fathomlm demo`: a real model, made recursive, the two side by side. What `make demo` runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import amount, layer_bar

if TYPE_CHECKING:
    from fathomlm.model.hub import FathomForCausalLM

HELP = "fetch a real model, make it recursive, compare the two"
DESCRIPTION = (
    "Fetches SmolLM2-135M (a 93 MB download, once), ties its 30 layers into a block of 15 that is run twice, with a rank-64 "
    "LoRA delta at each step, and shows both models' sizes, memory and speed on this machine's CPU."
)
MODEL = "smollm2-135m"
PROMPT = "Explain in two sentences why the sky is blue."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where the converted model goes (default: demo)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens that each model generates (default: 48)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One model's figures, each measured here except where its name says otherwise."""

    name: str
    layers: str
    parameters: int
    non_embedding_parameters: int
    disk_bytes: int
    disk_format: str
    bfloat16_bytes: int
    memory_bytes: int
    """Weights and KV cache as they were held while the text was made (float32)."""
    tokens: int
    tokens_per_second: float
    text: str


def run(args: argparse.Namespace) -> int:
    from fathomlm.checkpoints.fetch import fetch
    from fathomlm.checkpoints.resolve import load

    begin = time.perf_counter()
    _say("1/3  SmolLM2-135M-Instruct (Apache-2.0): fetched once")
    file = fetch(MODEL)
    _say(f"     {file}")
    base = load(file, dtype="float32")
    small_dir = args.out / f"{MODEL}-cycle2-lora64"
    _make_recursive(base, small_dir)
    small = load(small_dir, dtype="float32")
    _say(f"3/3  the same question to both, {args.tokens} tokens each, greedy")
    columns = [
        _measure(base, "original", file, "4-bit GGUF", args.tokens),
        _measure(small, "recursive", small_dir, "bfloat16", args.tokens),
    ]
    seconds = time.perf_counter() - begin
    if args.json:
        print(
            json.dumps({"model": MODEL, "out": str(small_dir), "seconds": seconds, "columns": [asdict(c) for c in columns]})
        )
        return 0
    _show(columns, small_dir, seconds)
    return 0


def _make_recursive(base: FathomForCausalLM, out: Path) -> None:
    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.save import save

    if (out / "config.json").is_file():
        _say(f"2/3  {out} is there already (delete it to convert again)")
        return
    _say("2/3  tying 30 layers into 15 that run twice; what tying takes away is put into rank-64 LoRA by SVD")
    with layer_bar("     converting") as tick:
        small = convert(
            base, sharing="cycle", recursions=2, init="average", relax="lora", rank=64, dtype="bfloat16", on_layer=tick
        )
    save(small, out)


def _measure(model: FathomForCausalLM, name: str, path: Path, disk_format: str, tokens: int) -> Column:
    from fathomlm.checkpoints.resolve import describe
    from fathomlm.checkpoints.save import directory_bytes, weight_bytes
    from fathomlm.decode.full import generate
    from fathomlm.decode.prompts import chat_prompt
    from fathomlm.depth.cost import count

    prompt = chat_prompt(model, [{"role": "user", "content": PROMPT}])
    generate(model, [prompt], max_new_tokens=2, ignore_eos=True)  # the first pass pays for allocations
    with layer_bar(f"     {name}", "tokens") as tick:
        result = generate(
            model, [prompt], max_new_tokens=tokens, ignore_eos=True, on_step=lambda done, *_: tick(done, tokens)
        )[0]
    cost = count(model.architecture, model.plan, relaxation=model.relaxation, kv_element_bytes=4)
    parameters = cost.non_embedding_parameters + cost.embedding_parameters
    held = len(prompt) + len(result.tokens)
    return Column(
        name=name,
        layers=describe(model),
        parameters=parameters,
        non_embedding_parameters=cost.non_embedding_parameters,
        disk_bytes=directory_bytes(path),
        disk_format=disk_format,
        bfloat16_bytes=2 * parameters,
        memory_bytes=weight_bytes(model) + held * cost.kv_bytes_per_token,
        tokens=len(result.tokens),
        tokens_per_second=result.tokens_per_second,
        text=result.text.strip(),
    )


def _show(columns: list[Column], out: Path, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="SmolLM2-135M, original and recursive", title_justify="left", show_lines=False)
    table.add_column("")
    for column in columns:
        table.add_column(column.name, overflow="fold", max_width=48)
    rows: list[tuple[str, Any]] = [
        ("layers", lambda c: c.layers),
        ("parameters", lambda c: amount(c.parameters)),
        ("without embeddings", lambda c: amount(c.non_embedding_parameters)),
        ("size on disk", lambda c: f"{amount(c.disk_bytes, 'B')} ({c.disk_format})"),
        ("size in bfloat16", lambda c: amount(c.bfloat16_bytes, "B")),
        ("memory while running (float32)", lambda c: amount(c.memory_bytes, "B")),
        ("tokens generated", lambda c: str(c.tokens)),
        ("tokens/s, one row, this CPU", lambda c: f"{c.tokens_per_second:.1f}"),
        ("text", lambda c: c.text),
    ]
    for label, value in rows:
        table.add_row(label, *(value(column) for column in columns))
    Console().print(table)
    print(
        "The recursive model has not been trained yet: tying is a starting point, and its text shows it. At full rank it\n"
        "would compute what the original computes; at rank 64 it needs uptraining, which comes with a later release.\n"
        "A loop runs as many steps as before, so one row is not faster: LoRA even adds work. What shrinks is the weights.\n"
        f"\n{seconds:.0f} s in all. Try next:\n"
        f"  fathomlm chat {MODEL}\n"
        f"  fathomlm generate {out} -p 'The capital of France is' --stream\n"
        f"  fathomlm inspect {MODEL} --sharing middle-cycle --recursions 3 --resize --router expert\n"
        f"  fathomlm convert {MODEL} my-model --sharing middle-cycle --recursions 2 --relax lora --rank 128\n"
        f"  fathomlm export {out} plain-model      # a plain Hugging Face checkpoint\n"
        "(in this checkout the command is .venv/bin/fathomlm)"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
