"""The engine at every batch size: plain and routed models in one run, end to end and the device alone.

    python benchmarks/engine_scale.py --out engine_scale.json [--only vanilla mor3] [--rows 32 128 256]
    python benchmarks/engine_scale.py --out engine_weights.json --only vanilla --weights bf16 int8 fp8 --rows 1 8
        [--shape 1.7b]

Weights are random, and depths are drawn from what routers are trained for ("forced"), as in engine_throughput.py, whose
workload this is: prompts of one token, output lengths normal around 256. Every model gets as many rows as asked and memory
for all of them; equal memory is a comparison of its own. `host_us_per_token` is what the loop takes end to end above what
the device takes when decode steps are launched back to back. The floor is the weights and the mean KV cache, read once for
each decode step (once for every pass of a routed model). `--weights` compares weights of one byte with the model's own, in
turn at every batch size; `speedup` is then against the plain model's own weights. What they cost in loss is measured in
cpu_decode.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import cast

from engine_throughput import LONGEST, Bench, Record, _memory, build, plan_for

from fathomlm.kernels.quantized import GPU_KINDS, Kind
from fathomlm.lab.bench.floor import decode_step_bytes, finish, size_of
from fathomlm.model.quantize import quantize_layers

WEIGHTS = ("bf16", *GPU_KINDS)
MODELS = {"vanilla": 1, "mor2": 2, "mor3": 3, "mor4": 4}


def measure(bench: Bench, name: str, rows: int, weights: str) -> Record:
    """One model at one batch size."""
    a = bench.shapes[bench.args.shape]
    plan = plan_for(a, MODELS[name])
    model = build(a, plan, bench.device)
    token = 2 * a.layers * a.kv_heads * a.head_dim * model.decoder.embed.weight.element_size()
    if weights != WEIGHTS[0]:
        quantize_layers(model.decoder, cast(Kind, weights), None)
    settings: Record = {"memory": int(1.1 * rows * LONGEST * token * (1 if plan.routing is None else 2))}
    if plan.routing is not None:
        settings |= {"forced_depths": plan.routing.capacity, "max_sequences": round(rows * bench.args.overbook)}
    engine = bench.engine(model, rows, **settings)
    found = bench.throughput(engine, max(64, bench.args.rounds * engine.runner.sizes.max_sequences))
    found["weights_gb"] = round(size_of(model) / 1e9, 4)
    found |= bench.replay(engine) | {"memory_gb": _memory(found)}
    device = 1e3 * found["tokens_per_tick"] / found["device_ms_per_tick"]
    found["device_tokens_per_s"] = round(device)
    found["host_us_per_token"] = round(1e6 / found["tokens_per_s"] - 1e6 / device, 3)
    if plan.routing is None:
        entries = rows * bench.args.mean / 2 * token
        reads = decode_step_bytes(engine.runner) + entries
        found["floor_share"] = round(reads / bench.speed * 1e3 / found["ms_per_decode_step"], 4)
    finish(bench.device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=["vanilla", "mor3"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 128, 256, 512])
    parser.add_argument("--shape", choices=["360m", "1.7b"], default="360m")
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=WEIGHTS[:1])
    parser.add_argument("--rounds", type=int, default=4, help="requests for each sequence in flight")
    parser.add_argument("--mean", type=float, default=256.0, help="new tokens of a request")
    parser.add_argument("--overbook", type=float, default=2.0, help="sequences in flight for each row, routed models")
    parser.add_argument("--profile", type=int, default=10, help="kernels to list")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    args.requests = 0
    bench = Bench(args)
    for rows in args.rows:
        for name, weights in itertools.product(args.only, args.weights):
            found = measure(bench, name, rows, weights)
            base = bench.record.get(f"vanilla_{rows}rows", found)
            found["speedup"] = round(found["tokens_per_s"] / base["tokens_per_s"], 3)
            bench.note(f"{name}_{rows}rows" + (f"_{weights}" if weights != WEIGHTS[0] else ""), found)
            for line in found.get("profile", []):
                print("   ", json.dumps(line), flush=True)
            bench.clear()


if __name__ == "__main__":
    main()
