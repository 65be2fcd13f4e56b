"""What relaxing a looped model costs in the engine: a tied one, and LoRA of several ranks, norm offsets and DoRA.

    python benchmarks/engine_lora.py --out benchmarks/results/engine_lora_h200.json

The shape is SmolLM2-135M's in 15 layers looped twice, with random weights: time does not depend on their values. All engines
are built first and then take turns, round after round, so that every figure has the tied model beside it: `share` is the
median over rounds of a model's tokens/s to the tied one's in the same round. By default an engine merges what steps add into
weights of their own (`merge`); "rank 64, not merged" keeps the bytes and runs the model's modules instead. `weights_gb` is
what a checkpoint holds, `served_gb` the layers' weights as the engine keeps them beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from engine_throughput import LONGEST, requests

from fathomlm.checkpoints.native import weight_bytes
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.presets import preset
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine.engine import Engine
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.common import environment

Record = dict[str, Any]
TIED = "rank 0"
VARIANTS: dict[str, Record] = {
    TIED: {},
    "rank 64": {"relax": "lora", "rank": 64, "linears_only": True},
    "rank 128": {"relax": "lora", "rank": 128, "linears_only": True},
    "rank 256": {"relax": "lora", "rank": 256, "linears_only": True},
    "rank 64, norm offsets": {"relax": "lora", "rank": 64},
    "rank 64, DoRA, norm offsets": {"relax": "dora", "rank": 64},
    "rank 64, not merged": {"relax": "lora", "rank": 64, "linears_only": True, "merge": False},
}


def build(name: str, architecture: Architecture, device: torch.device, args: argparse.Namespace) -> Engine:
    settings = dict(VARIANTS[name])
    merge = settings.pop("merge", True)
    relaxation = build_relaxation(
        architecture.linears(), settings.pop("relax", None), settings.pop("rank", None), **settings
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(
        architecture, DepthPlan.build("cycle", 2, architecture.layers), relaxation, dtype=dtype, device=device
    )
    token = architecture.layers * architecture.kv_bytes(dtype.itemsize)
    engine = Engine(
        model, batch_size=args.rows, max_length=LONGEST, memory=int(1.1 * args.rows * LONGEST * token), prefix_caching=False,
        penalties=False, max_logprobs=0, max_queue=10**5, fuse=True, merge=merge,
    )  # fmt: skip
    engine.run(requests(args.rows, 12, 2, architecture.vocab, seed=1))
    finish(device)
    return engine


def one_round(engine: Engine, device: torch.device, args: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second, and milliseconds of a decode step with its host."""
    work = requests(args.waves * args.rows, args.mean, args.mean / 4, engine.model.architecture.vocab)
    tokens, steps, begun = engine.totals.tokens, engine.totals.decode_steps, time.perf_counter()
    engine.run(work)
    finish(device)
    seconds = time.perf_counter() - begun
    return (engine.totals.tokens - tokens) / seconds, 1e3 * seconds / (engine.totals.decode_steps - steps)


def served_bytes(engine: Engine) -> int:
    """Packed weights, each once however many steps it serves."""
    packed = (each for rows in engine.runner.layers.packed.values() for each in rows if isinstance(each, torch.Tensor))
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in packed}.values())


def table(record: Record) -> str:
    lines = [
        "| model | tokens/s | of the tied model | ms a decode step | checkpoint, GB | packed layers, GB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in record["models"].items():
        if "tokens_per_s" in found:
            lines.append(
                f"| {name} | {found['tokens_per_s']:,} | {found['share']:.3f} | {found['ms_per_decode_step']:.4f} "
                f"| {found['weights_gb']:.4f} | {found['served_gb']:.4f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waves", type=int, default=3, help="requests of a round for each row")
    parser.add_argument("--mean", type=float, default=128.0, help="new tokens of a request")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="beside the tied model, which is always measured")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = Architecture(family="llama", layers=6, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=96)
    architecture = tiny if args.tiny else preset("smollm-135m").architecture
    names = [name for name in VARIANTS if name == TIED or args.only is None or name in args.only]
    settings = {"rows": args.rows, "rounds": args.rounds, "waves": args.waves, "mean": args.mean, "plan": "cycle, 2 loops"}
    record: Record = {"environment": environment(), "settings": settings, "models": {}}
    engines: dict[str, Engine] = {}
    for name in names:
        begun = time.perf_counter()
        engine = engines[name] = build(name, architecture, device, args)
        assert engine.runner.layers.fused is not name.endswith("not merged")
        record["models"][name] = {
            "weights_gb": round(weight_bytes(engine.model) / 1e9, 4), "served_gb": round(served_bytes(engine) / 1e9, 4),
            "set_up_s": round(time.perf_counter() - begun, 1), "rounds": [],
        }  # fmt: skip
        print(name, record["models"][name], flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    for _ in range(args.rounds):
        for name, engine in engines.items():
            rate, ms = one_round(engine, device, args)
            record["models"][name]["rounds"].append([round(rate, 1), round(ms, 4)])
        for found in record["models"].values():
            rates = [rate for rate, _ in found["rounds"]]
            against = [rate for rate, _ in record["models"][TIED]["rounds"]]
            found["tokens_per_s"] = round(statistics.median(rates))
            found["ms_per_decode_step"] = round(statistics.median(ms for _, ms in found["rounds"]), 4)
            found["share"] = round(statistics.median(a / b for a, b in zip(rates, against, strict=True)), 4)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    print(json.dumps({name: found["share"] for name, found in record["models"].items()}))


if __name__ == "__main__":
    main()
