"""A looped model with a gate, at the released shape: every loop, and early exits by each policy for the KV cache.

    python benchmarks/ouro.py --out ouro_h200.json [--rows 1 8 64] [--depth 2.5] [--preset ouro-1.4b] [--budget 150]

Weights are random: time does not depend on them. Where tokens leave is drawn, at each of the first three loops with the same
probability, so that they run `--depth` loops on average; what was drawn is counted (`mean_depth`). The gate itself runs.
Policies, by what deeper loops see of a token that left: `own` computes its entries there later, exactly; `copy` makes them
of the state that it left with; `last` are those of the last loop that it ran; `shared` has one KV cache for all loops, so
that none are missing. `of_depth_speedup` is how much of the throughput is reached that fewer loops allow (loops / mean depth
times that of every loop).

Every row is busy all the time: sequences of 256 tokens, which begin one after the other, so that contexts are as long on
average whatever the policy; what ends is replaced. The same number of tokens is timed of each policy. Where depths differ
there are twice as many sequences as rows. At one row `own` has passes of several rows, for what waits beside the current
token. With the most rows requests then also arrive at random (Poisson), at 80 % of the measured rate. What does not fit into
`--budget` seconds is left out and named (`left_out`); results are written as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fathomlm.decode.exiting import Exiting, Mode
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.depth.presets import preset
from fathomlm.engine.request import Request
from fathomlm.errors import FathomError
from fathomlm.lab.bench.floor import reading_speed
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.bench.play import play, warm_up
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import build_workload, shape_of
from fathomlm.lab.common import environment
from fathomlm.model.hub import FathomForCausalLM

Record = dict[str, Any]
POLICIES = ("full", "last", "shared", "own", "copy")
MODES: dict[str, Mode] = {"last": "entry-copy", "copy": "state-copy", "own": "parallel", "shared": "parallel"}
STACK = 16
BESIDE = 8
"""Rows of a pass that one sequence's waiting tokens have."""
NEW = shape_of("thesis").new
LONGEST = 2 * NEW + 2
"""The most tokens of a sequence."""
SETTLE = 16
"""Tokens of each row before any is timed."""


def leaving_rate(loops: int, depth: float) -> float:
    """The probability to leave at each loop but the last at which tokens run `depth` loops on average: by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum((1 - rate) ** k for k in range(loops)) > depth else (low, rate)
    return rate


@cache
def looped_model(preset_name: str, tiny: bool, shared: bool, device: torch.device) -> FathomForCausalLM:
    found = preset(preset_name)
    assert found.plan is not None
    architecture, plan = dataclasses.replace(found.architecture, context=LONGEST), found.plan
    if tiny:
        small = {"layers": 8, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 4, "head_dim": 8, "vocab": 96}
        architecture = dataclasses.replace(architecture, **small)
        plan = DepthPlan.build("cycle", 4, 8).with_loop_norm()
        plan = plan.with_exits(plan.recursion_ends(), gate=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return random_model(architecture, plan.with_kv("share") if shared else plan, dtype=dtype, device=device)


def build_engine(args: argparse.Namespace, policy: str, rows: int, device: torch.device) -> TimedEngine:
    model = looped_model(args.preset, args.tiny, policy == "shared", device)
    a, plan = model.architecture, model.plan
    over = 1 if policy == "full" or rows == 1 else 2
    token = plan.unrolled_layers * a.kv_bytes(model.decoder.embed.weight.element_size())
    token //= plan.recursions if policy == "shared" else 1
    options: Record = {
        "batch_size": rows, "max_sequences": rows * over, "max_length": LONGEST, "prefix_caching": False,
        "penalties": False, "max_logprobs": 0, "max_queue": 10**5, "memory": (rows * over + 1) * (LONGEST + 32) * token,
    }  # fmt: skip
    if policy == "full":
        return TimedEngine(model, **options)
    rate = leaving_rate(plan.recursions, args.depth)
    waits = {"max_stack": min(STACK, max(rows, BESIDE)) if policy == "own" else 1} if MODES[policy] == "parallel" else {}
    if policy == "own":
        options["batch_size"] = max(rows, BESIDE)
    exiting = Exiting(mode=MODES[policy], threshold=0.5, confidence="gate", **waits)
    return TimedEngine(model, exiting=exiting, forced_exits=rate, **options)


def busy(engine: TimedEngine, rows: int, tokens: int, seconds: float) -> Record:
    """Tokens a second while all rows are busy, over so many tokens of each row, or over so many seconds."""
    flying, vocab = engine.runner.sizes.max_sequences, engine.model.architecture.vocab

    def ask(before: int) -> None:
        """A sequence that is `before` tokens long already."""
        prompt = tuple((7 * at + before) % vocab for at in range(1 + before))
        sampling = Sampling(max_new_tokens=NEW - before, ignore_eos=True)
        engine.submit(Request(id=engine.new_id(), prompt=prompt, sampling=sampling))

    for number in range(flying):
        ask(number * NEW // flying)
    while engine.totals.tokens < SETTLE * rows:
        _step(engine, ask)
    known, depths, begun = engine.totals.tokens, engine.totals.depths, time.perf_counter()
    while engine.totals.tokens < known + tokens * rows and time.perf_counter() < begun + seconds:
        _step(engine, ask)
    took, made = time.perf_counter() - begun, engine.totals.tokens - known
    layers = engine.model.plan.unrolled_layers / engine.model.plan.recursions
    exits = engine.runner.exits
    mean = (engine.totals.depths - depths) / made / layers if exits else engine.model.plan.recursions
    for id in list(engine._sequences):
        engine.cancel(id)
    while engine.busy:
        engine.step()
    return {
        "tokens_per_s": round(made / took, 1), "ms_per_token_of_a_sequence": round(1e3 * flying * took / made, 3),
        "mean_depth": round(mean, 3), "tokens": made, "seconds": round(took, 2),
    }  # fmt: skip


def _step(engine: TimedEngine, ask: Callable[[int], None]) -> None:
    while engine.scheduler.queued < 2:
        ask(0)
    engine.step()


def measure(args: argparse.Namespace, policy: str, rows: int, device: torch.device, speed: float, end: float) -> Record:
    begun = time.perf_counter()
    engine = build_engine(args, policy, rows, device)
    model, flying = engine.model, engine.runner.sizes.max_sequences
    warm_up(engine, build_workload("thesis", model.architecture.vocab, requests=2 * flying))
    ready = time.perf_counter()
    weights = model.decoder.embed.weight.element_size() * (
        model.plan.unrolled_layers * model.architecture.layer_parameters
        + model.architecture.vocab * model.architecture.hidden
    )
    found: Record = {
        "policy": policy, "rows": rows, "sequences": flying, "built_in_s": round(ready - begun, 1),
        **busy(engine, rows, args.tokens, args.most), "floor_tokens_per_s_all_loops": round(rows * speed / weights, 1),
    }  # fmt: skip
    drained = NEW * found["ms_per_token_of_a_sequence"] / 1e3
    rate = 0.8 * found["tokens_per_s"] / NEW
    few = round(rate * args.seconds)
    if few >= 4 and rows == max(args.rows) > 1 and time.perf_counter() + args.seconds + drained < end:
        arriving = build_workload("thesis", model.architecture.vocab, requests=few, rate=rate)
        found["poisson_80"] = {"requests_per_s": round(rate, 2), **dataclasses.asdict(Timing.of(play(engine, arriving)))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="ouro-1.4b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--depth", type=float, default=2.5, help="mean loops per token where tokens leave early")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each row that are timed")
    parser.add_argument("--most", type=float, default=4.0, help="seconds that are timed at most, of each setting")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long requests arrive at random; 0: not at all")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all; what does not fit is left out")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = reading_speed(device)
    record: Record = {"environment": environment(), "preset": args.preset, "reading_gb_per_s": round(speed / 1e9, 1)}
    longest = 0.0
    for rows in args.rows:
        for policy in args.policies:
            name, start = f"{policy}_{rows}rows", time.perf_counter()
            if start - begun + longest > args.budget:
                record.setdefault("left_out", []).append(name)
                print(f"{name}: left out, {start - begun:.0f} s of {args.budget:g} are over", flush=True)
                continue
            print(f"{name} ...", flush=True)
            try:
                found = measure(args, policy, rows, device, speed, begun + args.budget)
            except (FathomError, RuntimeError) as error:  # the others still tell something
                found = {"failed": f"{type(error).__name__}: {error}"[:500]}
            full = record.get(f"full_{rows}rows", found)
            if "failed" not in found and "failed" not in full:
                found["speedup"] = round(found["tokens_per_s"] / full["tokens_per_s"], 3)
                found["of_depth_speedup"] = round(found["speedup"] * found["mean_depth"] / full["mean_depth"], 3)
            record[name] = found
            record["seconds"] = round(time.perf_counter() - begun, 1)
            print(f"{name} ({record['seconds']} s)", found, flush=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch._dynamo.reset()
                torch.cuda.empty_cache()
            longest = max(longest, time.perf_counter() - start)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
