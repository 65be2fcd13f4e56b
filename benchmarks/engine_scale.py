"""The engine at every batch size: plain and routed models in one run, end to end and the device alone.

    python benchmarks/engine_scale.py --out engine_scale.json [--parts rows prefill] [--only vanilla mor3] [--rows 32 256]
    python benchmarks/engine_scale.py --out engine_weights.json --parts rows --only vanilla --weights bf16 int8 fp8
        --rows 1 8 [--shape 1.7b]

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
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from engine_throughput import LONGEST, Bench, Record, _memory, build, kernel_times, one_row, plan_for, transformers_peer

from fathomlm.checkpoints.native import weight_bytes
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Request
from fathomlm.engine.sizing import ample_memory
from fathomlm.kernels.quantized import GPU_KINDS, Kind
from fathomlm.lab.bench.floor import decode_step_bytes, finish, size_of
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import plain_model, with_context
from fathomlm.lab.bench.play import play
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import build_workload, shape_of
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers

TENSOR_FLOPS = 989e12
"""Dense bfloat16 operations a second of an H100 or H200."""
PARTS = ("rows", "prefill", "one", "same-bytes", "long", "nano-vllm", "poisson", "bundled", "peer")
SAME_BYTES = {"vanilla": (80, 96, 112), "mor3": (96, 112), "mor4": (96, 112)}
"""Rows to try where memory is what is equal."""
LOADS = (0.5, 0.8, 0.95)
SHORT = Sampling(max_new_tokens=2, ignore_eos=True)
PREFILLS = (("360m", 512, 512), ("1.7b", 2048, 96))
"""Shape, prompt tokens and requests."""
WEIGHTS = ("bf16", *GPU_KINDS)
MODELS = {"vanilla": 1, "mor2": 2, "mor3": 3, "mor4": 4}


def measure(bench: Bench, name: str, rows: int, weights: str) -> Record:
    """One model at one batch size."""
    a = bench.shapes[bench.args.shape]
    plan = plan_for(a, MODELS[name])
    model = build(a, plan, bench.device)
    if weights != WEIGHTS[0]:
        quantize_layers(model.decoder, cast(Kind, weights), None)
    token = a.layers * a.kv_bytes(model.decoder.embed.weight.element_size())
    settings: Record = {"memory": int(1.1 * rows * LONGEST * token * (1 if plan.routing is None else 2))}
    if plan.routing is not None:
        settings |= {"forced_depths": plan.routing.capacity, "max_sequences": round(rows * bench.args.overbook)}
    engine = bench.engine(model, rows, **settings)
    found = bench.throughput(engine, max(12, bench.args.rounds * engine.runner.sizes.max_sequences))
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


def plain_or_routed(bench: Bench, name: str, context: int = 0) -> tuple[FathomForCausalLM, Record]:
    """A model of the bench's shape and what its engine is told of depths."""
    a = with_context(bench.shapes[bench.args.shape], context)
    plan = plan_for(a, MODELS[name])
    settings: Record = {} if plan.routing is None else {"forced_depths": plan.routing.capacity}
    return build(a, plan, bench.device), settings


def batch_options(name: str, rows: int, overbook: float) -> Record:
    return {} if name == "vanilla" else {"max_sequences": round(rows * overbook)}


def same_bytes(bench: Bench, names: list[str]) -> None:
    """Weights and KV cache in the same bytes (those of the plain model with room for 32 whole sequences), each side at the
    number of rows that is best for it."""
    a, args = bench.shapes[bench.args.shape], bench.args
    token = a.layers * a.kv_bytes(2)
    base: Record = {}
    for name in names:
        tried = []
        for rows in SAME_BYTES[name]:
            model, settings = plain_or_routed(bench, name)
            if name == "vanilla" and not base:
                base["bytes"] = weight_bytes(model) + 32 * LONGEST * token
            settings |= batch_options(name, rows, args.overbook) | {"memory": base["bytes"] - weight_bytes(model)}
            engine = bench.engine(model, rows, **settings)
            found = bench.throughput(engine, 32 if args.tiny else 1536)
            tried.append(found)
            print("  ", name, rows, found["tokens_per_s"], found["preemptions"], flush=True)
            del engine, model
            bench.clear()
        best = max(tried, key=lambda found: found["tokens_per_s"])
        base.setdefault("best", best)
        best["speedup"] = round(best["tokens_per_s"] / base["best"]["tokens_per_s"], 3)
        best["tried"] = {found["rows"]: found["tokens_per_s"] for found in tried}
        bench.note(f"{name}_same_bytes", best)


def long_outputs(bench: Bench, name: str, rows_tried: Sequence[int], count: int = 256) -> None:
    """Prompts of 512 tokens and 2,048 new ones, each side at its best rows."""
    planned = build_workload("512-2048", bench.shapes[bench.args.shape].vocab, requests=count)
    planned = planned.shortened(count, 16) if bench.args.tiny else planned
    work = [
        Request(id=3 * 10**7 + i, prompt=one.prompt, sampling=dataclasses.replace(SHORT, max_new_tokens=one.new))
        for i, one in enumerate(planned.requests)
    ]
    longest = max(len(one.prompt) + one.new for one in planned.requests)
    workload(bench, f"{name}_512_2048", name, rows_tried, work, longest + 2)


def nano_vllm(bench: Bench, name: str) -> None:
    """The workload that nano-vllm publishes: 256 sequences, 100 to 1,024 tokens in and out, seed 0."""
    a, draw = bench.shapes[bench.args.shape], random.Random(0)
    most = 32 if bench.args.tiny else 1024
    prompts = [tuple(draw.randrange(a.vocab) for _ in range(draw.randint(most // 10, most))) for _ in range(256)]
    work = [
        Request(
            id=4 * 10**7 + i, prompt=p, sampling=Sampling(max_new_tokens=draw.randint(most // 10, most), ignore_eos=True)
        )
        for i, p in enumerate(prompts)
    ]
    workload(bench, f"{name}_nano_vllm", name, (256,), work, 2 * most + 2)


def workload(
    bench: Bench, key: str, name: str, rows_tried: Sequence[int], work: list[Request], max_length: int
) -> None:  # fmt: skip
    """Requests at each of some row counts, with memory for all of them; the best is the record."""
    a, tried = bench.shapes[bench.args.shape], []
    token = a.layers * a.kv_bytes(2)
    for rows in rows_tried:
        model, settings = plain_or_routed(bench, name, max_length)
        settings |= batch_options(name, rows, bench.args.overbook)
        flying = min(len(work), settings.get("max_sequences", rows))
        settings |= {"memory": int(1.1 * (flying + 2) * max_length * token), "max_length": max_length}
        engine = bench.engine(model, rows, **settings)
        engine.run([dataclasses.replace(one, id=one.id + 10**8, sampling=SHORT) for one in work[:rows]])
        begun = time.perf_counter()
        results = engine.run([dataclasses.replace(one, arrival=begun) for one in work])
        finish(bench.device)
        seconds = time.perf_counter() - begun
        new = sum(len(result.tokens) for result in results)
        tried.append(
            {
                "tokens_per_s": round(new / seconds), "seconds": round(seconds, 2), "rows": rows, "requests": len(work),
                "prompt_tokens": sum(len(one.prompt) for one in work), "new_tokens": new,
                "first_token_s_p50": round(statistics.median(r.time_to_first_token or 0.0 for r in results), 3),
                "preemptions": engine.counters().preemptions,
            }
        )  # fmt: skip
        print("  ", key, rows, tried[-1]["tokens_per_s"], flush=True)
        del engine, model
        bench.clear()
    best = max(tried, key=lambda found: found["tokens_per_s"])
    base = bench.record.get(key.replace(name, "vanilla"), best)
    best["speedup"] = round(best["tokens_per_s"] / base["tokens_per_s"], 3)
    best["tried"] = {found["rows"]: found["tokens_per_s"] for found in tried}
    bench.note(key, best)


def poisson(bench: Bench, name: str, rows: int, seconds: float) -> None:
    """Requests that arrive at random, at parts of the rate that the engine sustains with these rows: what they wait for."""
    a = bench.shapes[bench.args.shape]
    model, settings = plain_or_routed(bench, name)
    token = a.layers * a.kv_bytes(2)
    settings |= batch_options(name, rows, bench.args.overbook) | {"memory": int(3 * rows * LONGEST * token)}
    engine = bench.engine(model, rows, kind=TimedEngine, **settings)
    assert isinstance(engine, TimedEngine)
    full = bench.throughput(engine, 4 * engine.runner.sizes.max_sequences)
    found: Record = {"rows": rows, "tokens_per_s_full": full["tokens_per_s"], "loads": {}}
    for part in LOADS:
        rate = part * full["tokens_per_s"] / shape_of("thesis").new
        work = build_workload("thesis", a.vocab, requests=max(1, round(rate * seconds)), rate=rate)
        timing = Timing.of(play(engine, work))
        found["loads"][f"{part:.2f}"] = {"requests_per_s": round(rate, 1), **dataclasses.asdict(timing)}
    bench.note(f"{name}_poisson", found)


def bundled(bench: Bench) -> None:
    """The bundled model with its own routers against a plain one as deep, each at its best rows; prompts from its own words
    would be better text, but time does not depend on it beyond the depths, which are counted."""
    model = load("fathom-mor-23m").to(bench.device, torch.bfloat16)
    plain = plain_model(model)
    for key, one in (("bundled_plain", plain), ("bundled", model)):
        tried = []
        for rows in (64, 256):
            options = EngineOptions(batch_size=rows, max_length=min(LONGEST, one.architecture.context))
            engine = bench.engine(
                one, rows, max_length=options.max_length, memory=ample_memory(one.decoder, options, LONGEST)
            )
            bench.throughput(engine, engine.runner.sizes.max_sequences)  # whatever is still compiled is not timed
            tried.append(bench.throughput(engine, 6 * engine.runner.sizes.max_sequences))
            tried[-1] |= bench.replay(engine)
            print("  ", key, rows, tried[-1]["tokens_per_s"], tried[-1].get("mean_depth"), flush=True)
            del engine
            bench.clear()
        best = max(tried, key=lambda found: found["tokens_per_s"])
        best["speedup"] = round(best["tokens_per_s"] / bench.record.get("bundled_plain", best)["tokens_per_s"], 3)
        best["tried"] = {found["rows"]: found["tokens_per_s"] for found in tried}
        bench.note(key, best)


def prefill(bench: Bench, shape: str, prompt: int, count: int) -> Record:
    """Prompts alone: each request has one new token, so nearly all of the time is reading. MFU counts two operations for
    each weight of the layers and token, and nothing of attention, logits or embeddings."""
    a = bench.shapes[shape]
    model = build(a, plan_for(a, 1), bench.device)
    prompt, count = (20, 8) if bench.args.tiny else (min(prompt, a.context - 2), count)
    memory = int(1.1 * 2 * count * (prompt + 16) * a.layers * a.kv_bytes(2))
    engine = bench.engine(model, 64, max_length=prompt + 2, memory=memory)
    draw = random.Random(0)
    found: Record = {}
    for part in ("warm", "timed"):
        work = [
            Request(
                id=10**7 + 10**5 * (part == "timed") + i, prompt=tuple(draw.randrange(a.vocab) for _ in range(prompt)),
                sampling=Sampling(max_new_tokens=1, ignore_eos=True),
            )
            for i in range(count)
        ]  # fmt: skip
        begun = time.perf_counter()
        results = engine.run([dataclasses.replace(one, arrival=begun) for one in work])
        finish(bench.device)
        seconds = time.perf_counter() - begun
        tokens = count * prompt
        flops = 2 * a.layers * a.layer_parameters * tokens
        found = {
            "tokens_per_s": round(tokens / seconds), "mfu": round(flops / seconds / TENSOR_FLOPS, 4), "prompt": prompt,
            "requests": count, "seconds": round(seconds, 3), "chunk": engine.runner.sizes.prefill_chunk,
            "first_token_s_p50": round(statistics.median(r.time_to_first_token or 0.0 for r in results), 3),
        }  # fmt: skip
    if bench.device.type == "cuda" and bench.args.profile:
        few = work[: max(1, engine.runner.sizes.prefill_chunk // prompt)]
        ranked = kernel_times(lambda: engine.run(few))[: bench.args.profile]
        found["profile"] = [{"kernel": kernel, "us": round(us), "calls": calls} for kernel, calls, us in ranked]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=["vanilla", "mor3"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 32, 128, 256, 512])
    parser.add_argument("--weights", nargs="*", choices=WEIGHTS, default=WEIGHTS[:1])
    parser.add_argument("--shape", choices=["360m", "1.7b"], default="360m")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each sequence in flight")
    parser.add_argument("--mean", type=float, default=256.0, help="new tokens of a request")
    parser.add_argument("--overbook", type=float, default=2.0, help="sequences in flight for each row, routed models")
    parser.add_argument("--profile", type=int, default=10, help="kernels to list")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    args.requests, args.peer_requests = 0, 128
    bench = Bench(args)
    told = {"one": one_rows, "prefill": prefills, "rows": sweep, "same-bytes": lambda b: same_bytes(b, list(SAME_BYTES))}
    told |= {"long": long_both, "nano-vllm": nano_both, "poisson": poisson_both, "bundled": bundled, "peer": peers}
    for part in args.parts:
        begun = time.perf_counter()
        told[part](bench)
        bench.clear()
        print(f"{part}: {time.perf_counter() - begun:.1f} s", flush=True)


def one_rows(bench: Bench) -> None:
    for shape in ("360m", "1.7b"):
        bench.note(f"vanilla_{shape}_1row", one_row(bench, shape))
        bench.clear()


def prefills(bench: Bench) -> None:
    for shape, prompt, count in PREFILLS:
        found = prefill(bench, shape, prompt, count)
        bench.note(f"prefill_{shape}", found)
        for line in found.get("profile", []):
            print("   ", json.dumps(line), flush=True)
        bench.clear()


def sweep(bench: Bench) -> None:
    for rows in bench.args.rows:
        for name, weights in itertools.product(bench.args.only, bench.args.weights):
            found = measure(bench, name, rows, weights)
            base = bench.record.get(f"vanilla_{rows}rows", found)
            found["speedup"] = round(found["tokens_per_s"] / base["tokens_per_s"], 3)
            bench.note(f"{name}_{rows}rows" + (f"_{weights}" if weights != WEIGHTS[0] else ""), found)
            bench.clear()


def long_both(bench: Bench) -> None:
    for name, rows in (("vanilla", (256, 512)), ("mor3", (256,))):  # 512 sequences at once, or 256
        long_outputs(bench, name, (4,) if bench.args.tiny else rows, 6 if bench.args.tiny else 512)


def nano_both(bench: Bench) -> None:
    for name in ("vanilla", "mor3"):
        nano_vllm(bench, name)


def poisson_both(bench: Bench) -> None:
    for name in ("vanilla", "mor3"):
        poisson(bench, name, 4 if bench.args.tiny else 64, 3.0)
        bench.clear()


def peers(bench: Bench) -> None:
    """transformers' continuous batching, at each of some batch sizes; its best is what counts."""
    for rows in (64, 256):
        transformers_peer(bench, rows)


if __name__ == "__main__":
    main()
