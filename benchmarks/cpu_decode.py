"""CPU, side by side in one run: greedy decoding of SmolLM2-135M here and in transformers, and the time of a conversion.

    python benchmarks/cpu_decode.py [--tokens 64] [--rounds 5] [--out benchmarks/results/cpu_decode.json]

Both sides decode the same prompt in float32 at one row, turn about, so that a slow moment of the machine hits both. On a
CPU only ratios are quoted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.fetch import fetch
from fathomlm.lab.environment import environment

PROMPT = "The history of the lighthouse begins"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    file = fetch("smollm2-135m")
    ours = fathomlm.load(file, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = ours.tokenizer(PROMPT).input_ids
    tensor = torch.tensor([prompt])
    options = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 2}

    def run_ours() -> tuple[float, list[int]]:
        begin = time.perf_counter()
        row = fathomlm.generate(ours, [prompt], max_new_tokens=args.tokens, ignore_eos=True)[0]
        return time.perf_counter() - begin, list(row.tokens)

    @torch.inference_mode()
    def run_theirs() -> tuple[float, list[int]]:
        begin = time.perf_counter()
        tokens = theirs.generate(tensor, attention_mask=torch.ones_like(tensor), **options)
        return time.perf_counter() - begin, tokens[0, len(prompt) :].tolist()

    run_ours(), run_theirs()
    pairs = []
    for i in range(args.rounds):
        mine, his = run_ours(), run_theirs()
        assert mine[1] == his[1], "the two sides must say the same"
        pairs.append((mine[0], his[0]))
        print(
            f"round {i + 1}/{args.rounds}: ours {args.tokens / mine[0]:.1f}, "
            f"transformers {args.tokens / his[0]:.1f} tokens/s"
        )
    ratio = statistics.median(his / mine for mine, his in pairs)

    begin = time.perf_counter()
    fathomlm.convert(file, recursions=2, init="average", relax="lora", rank=64)
    convert_seconds = time.perf_counter() - begin

    table = Table(title=f"SmolLM2-135M, float32, one row, {args.tokens} tokens, CPU")
    for column in ("what", "figure"):
        table.add_column(column)
    table.add_row("decoding speed, ours / transformers (median of rounds)", f"{ratio:.2f}x")
    table.add_row("slowest and fastest round", f"{min(h / m for m, h in pairs):.2f}x, {max(h / m for m, h in pairs):.2f}x")
    table.add_row("converting with rank-64 SVD LoRA", f"{convert_seconds:.1f} s")
    Console().print(table)
    record = {
        "benchmark": "cpu_decode",
        "environment": environment(),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "ratio_ours_to_transformers": round(ratio, 3),
        "ratios": [round(his / mine, 3) for mine, his in pairs],
        "convert_rank64_svd_seconds": round(convert_seconds, 1),
    }
    print(json.dumps(record))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
