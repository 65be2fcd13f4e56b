"""A looped model with a gate, at the released shape: every loop, and early exits by each policy for the KV cache.

    python benchmarks/ouro.py --out ouro_h200.json [--rows 1 8 64] [--depth 2.5] [--preset ouro-1.4b]

Weights are random: time does not depend on them. Where tokens leave is drawn, at each of the first three loops with the same
probability, so that they run `--depth` loops on average; what was drawn is counted (`mean_depth`). The gate itself runs.
Policies: `fill` computes the entries of deeper loops later, exactly; `copy` makes them of the state that a token left with;
`shared` has one KV cache for all loops, so that none are missing. `of_depth_speedup` is how much of the throughput is
reached that fewer loops allow (loops / mean depth times that of every loop). The workload is the thesis': no prompts, about
256 new tokens. There are twice as many sequences as rows where depths differ. Arrivals are Poisson at 80 % of the measured
rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.presets import preset
from fathomlm.lab.bench.floor import reading_speed
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.bench.play import play, warm_up
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import build_workload, shape_of
from fathomlm.lab.environment import environment

Record = dict[str, Any]
POLICIES = ("full", "fill", "copy", "shared")
STACK = 16
LONGEST = 2 * shape_of("thesis").new + 2
"""The most tokens of a sequence in the workload."""


def leaving_rate(loops: int, depth: float) -> float:
    """The probability to leave at each loop but the last at which tokens run `depth` loops on average: by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum((1 - rate) ** k for k in range(loops)) > depth else (low, rate)
    return rate


def looped_shape(args: argparse.Namespace) -> tuple[Architecture, DepthPlan]:
    found = preset(args.preset)
    assert found.plan is not None
    if not args.tiny:
        return dataclasses.replace(found.architecture, context=LONGEST), found.plan
    small = dataclasses.replace(
        found.architecture, layers=8, hidden=32, intermediate=48, heads=4, kv_heads=4, head_dim=8, vocab=96, context=LONGEST
    )
    plan = DepthPlan.build("cycle", 4, 8).with_loop_norm()
    return small, plan.with_exits(plan.recursion_ends(), gate=True)


def build_engine(args: argparse.Namespace, policy: str, rows: int, device: torch.device) -> TimedEngine:
    architecture, plan = looped_shape(args)
    if policy == "shared":
        plan = plan.with_kv("share")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(architecture, plan, dtype=dtype, device=device)
    over = 1 if policy == "full" or rows == 1 else 2
    token = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * dtype.itemsize
    options: Record = {
        "batch_size": rows, "max_sequences": rows * over, "max_length": LONGEST, "prefix_caching": False,
        "penalties": False, "max_logprobs": 0, "max_queue": 10**5,
        "memory": int(1.2 * (rows * over + 1) * (LONGEST + 16) * token),
    }  # fmt: skip
    if policy == "full":
        return TimedEngine(model, **options)
    exiting = Exiting(
        mode="state-copy" if policy == "copy" else "parallel", threshold=0.5, confidence="gate",
        **({} if policy == "copy" else {"max_stack": min(STACK, rows)}),  # type: ignore[arg-type]
    )  # fmt: skip
    return TimedEngine(model, exiting=exiting, forced_exits=leaving_rate(plan.recursions, args.depth), **options)


def measure(args: argparse.Namespace, policy: str, rows: int, device: torch.device, speed: float) -> Record:
    engine = build_engine(args, policy, rows, device)
    model = engine.model
    flying = engine.runner.sizes.max_sequences
    whole = build_workload("thesis", model.architecture.vocab, requests=args.rounds * flying)
    warm_up(engine, whole)
    timing = Timing.of(play(engine, whole))
    totals, layers = engine.totals, model.plan.unrolled_layers // model.plan.recursions
    weights = model.decoder.embed.weight.element_size() * (
        model.plan.unrolled_layers * model.architecture.layer_parameters
        + model.architecture.vocab * model.architecture.hidden
    )
    found: Record = {
        "policy": policy, "rows": rows, "sequences": flying, **dataclasses.asdict(timing),
        "mean_depth": round(totals.depths / totals.tokens / layers, 3) if policy != "full" else model.plan.recursions,
        "floor_tokens_per_s_all_loops": round(rows * speed / weights, 1),
    }  # fmt: skip
    if args.seconds and rows > 1:
        rate = 0.8 * found["tokens_per_s"] / shape_of("thesis").new
        few = max(4, round(rate * args.seconds))
        arriving = build_workload("thesis", model.architecture.vocab, requests=few, rate=rate)
        found["poisson_80"] = {"requests_per_s": round(rate, 2), **dataclasses.asdict(Timing.of(play(engine, arriving)))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="ouro-1.4b")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--depth", type=float, default=2.5, help="mean loops per token where tokens leave early")
    parser.add_argument("--rounds", type=int, default=2, help="requests for each sequence in flight")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long requests arrive at random; 0: not at all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = reading_speed(device)
    record: Record = {"environment": environment(), "preset": args.preset, "reading_gb_per_s": round(speed / 1e9, 1)}
    for rows in args.rows:
        for policy in args.policies:
            found = measure(args, policy, rows, device, speed)
            full = record.get(f"full_{rows}rows", found)
            found["speedup"] = round(found["tokens_per_s"] / full["tokens_per_s"], 3)
            found["of_depth_speedup"] = round(found["speedup"] * found["mean_depth"] / full["mean_depth"], 3)
            record[f"{policy}_{rows}rows"] = found
            print(f"{policy}_{rows}rows", found, flush=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch._dynamo.reset()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
