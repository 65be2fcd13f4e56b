"""What engine_scale.py measures, one cell at a time: a model at one batch size, or under one workload."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import statistics
import time
from typing import Any, cast

import torch
from engine_scale_record import Record, add_try, compare, write_record
from engine_throughput import LONGEST, Bench, build, kernel_times, one_row, requests
from engine_throughput import plan_for as routed_or_plain

from fathomlm.checkpoints.native import weight_bytes
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Request
from fathomlm.engine.sizing import ample_memory
from fathomlm.kernels.quantized import GPU_KINDS, Kind
from fathomlm.lab.bench.floor import decode_step_bytes, finish, size_of
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import PAGE, batched, hugging_face_model, plain_model, with_context
from fathomlm.lab.bench.play import WorkloadRun, play
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import build_workload, shape_of
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers

TENSOR_FLOPS = 989e12
"""Dense bfloat16 operations a second of an H100 or H200."""
RECURSIONS = {"vanilla": 1, "mor2": 2, "mor3": 3, "mor4": 4}
MODELS = (*RECURSIONS, "exits")
EXIT_RATE, STACK = 0.5, 16
"""Two loops: the part of the tokens that exits after the first, and how many of a sequence may wait for the second."""
WEIGHTS = ("bf16", *GPU_KINDS)
LOADS = (0.5, 0.8, 0.95)
BURSTS = (4, 8, 16, None)
"""Decode steps of a burst; None as the engine chooses them."""
SHORT = Sampling(max_new_tokens=2, ignore_eos=True)
PREFILLS = {"360m": ("vanilla", "360m"), "1.7b": ("vanilla", "1.7b"), "mor3_360m": ("mor3", "360m")}
"""By cell, the model and its shape."""
PROMPTS = {"360m": (512, 512), "1.7b": (2048, 96)}
"""By shape, prompt tokens and requests."""
PROFILED = [("vanilla", 1), ("vanilla", 32), ("vanilla", 256), ("mor3", 32), ("mor3", 256), ("exits", 256)]
"""Cells whose kernels are listed: a profile takes as long as the rest of a cell."""
PEER_NEW, PEER_SECONDS = 64, 15.0
"""Tokens of each of the peer's requests; a first round that takes longer is the figure, else the second is."""


class ScaleBench(Bench):
    """A bench whose record may have been begun by an earlier call."""

    def __init__(self, args: argparse.Namespace, record: Record) -> None:
        super().__init__(args)
        self.kernels = args.profile
        self.record = record
        record.setdefault("reading_gb_per_s", round(self.speed / 1e9, 1))
        self.speed = 1e9 * record["reading_gb_per_s"]

    def note(self, name: str, found: Record, label: str | None = None) -> None:
        """`label`: one of several tries, of which the fastest is the record."""
        if label is None:
            self.record[name] = found
        else:
            add_try(self.record, name, label, found)
        compare(self.record)
        if speedup := self.record[name].get("speedup"):
            found = found | {"speedup": speedup}
        said = {k: v for k, v in found.items() if k not in ("profile", "loop")}
        print("  ", name, label or "", said, flush=True)
        write_record(self.record, self.args.out)

    def profiles(self, wanted: bool) -> None:
        self.args.profile = self.kernels if wanted else 0

    @property
    def shape(self) -> Architecture:
        return self.shapes[self.args.shape]

    def kv_bytes(self) -> int:
        """Of one token in all layers of the plain model."""
        size = 2 if self.device.type == "cuda" else 4
        return self.shape.layers * self.shape.kv_bytes(size)


def plan_for(architecture: Architecture, name: str) -> DepthPlan:
    if name in RECURSIONS:
        return routed_or_plain(architecture, RECURSIONS[name])
    return DepthPlan.build("cycle", 2, architecture.layers).with_exits([architecture.layers // 2 - 1])


def model_and_options(bench: ScaleBench, name: str, rows: int, context: int = 0) -> tuple[FathomForCausalLM, Record]:
    """A model of the bench's shape, and what its engine is told of depths and of sequences."""
    a = with_context(bench.shape, context)
    plan = plan_for(a, name)
    options: Record = {}
    if plan.routing is not None:
        options = {"forced_depths": plan.routing.capacity}
    elif name == "exits":
        exiting = Exiting(mode="parallel", exit_layers=(a.layers // 2,), threshold=0.5, max_stack=STACK)
        options = {"exiting": exiting, "forced_exits": EXIT_RATE}
    if options:
        options["max_sequences"] = round(rows * bench.args.overbook)
    return build(a, plan, bench.device), options


def read_bytes_per_token(bench: ScaleBench, model: FathomForCausalLM, context: float) -> float:
    """Of the KV cache, for one token behind a context. Where tokens differ in depth a recursion holds only those that ran
    it, and is read only by them. With exits every token runs both loops in the end."""
    return context * bench.kv_bytes() / bench.shape.layers * layers_per_token(model.plan, power=2)


def layers_per_token(plan: DepthPlan, power: int = 1) -> float:
    """On average, where as many tokens run each recursion as routers are trained for. With a power of 2, layers times the
    part of the context that each holds: a token that runs a recursion reads those that ran it too."""
    if plan.routing is None:
        return float(plan.unrolled_layers)
    outer = sum(step.part != "core" for step in plan)
    return outer + plan.core_layers * sum(part**power for part in plan.routing.capacity)


def measure(bench: ScaleBench, name: str, rows: int, weights: str = WEIGHTS[0]) -> None:
    """One model at one batch size, with memory for all of its sequences."""
    bench.profiles((name, rows) in PROFILED or weights != WEIGHTS[0])
    model, options = model_and_options(bench, name, rows)
    if weights != WEIGHTS[0]:
        quantize_layers(model.decoder, cast(Kind, weights), None)
    flying = options.get("max_sequences", rows + rows // 32 + 1)
    options["memory"] = int(1.1 * (flying + 1) * LONGEST * bench.kv_bytes())
    engine = bench.engine(model, rows, **options)
    count = max(12, bench.args.rounds * engine.runner.sizes.max_sequences)
    found = bench.throughput(engine, count) | {"requests": count, "weights_gb": round(size_of(model) / 1e9, 4)}
    found |= bench.replay(engine)
    found["memory_gb"] = round(found["kv_gb"] + found["weights_gb"], 4)
    device = 1e3 * found["device_tokens_per_tick"] / found["device_ms_per_tick"]
    found["device_tokens_per_s"] = round(device)
    found["host_us_per_token"] = round(1e6 / found["tokens_per_s"] - 1e6 / device, 3)
    new = [one.sampling.max_new_tokens for one in requests(count, bench.args.mean, bench.args.mean / 4, 2)]
    context = sum(many * (many + 1) / 2 for many in new) / sum(new)
    reads = decode_step_bytes(engine.runner) + found["tokens_per_tick"] * read_bytes_per_token(bench, model, context)
    found["floor_share"] = round(reads / bench.speed * 1e3 / found["ms_per_decode_step"], 4)
    bench.note(f"{name}_{rows}rows" + (f"_{weights}" if weights != WEIGHTS[0] else ""), found)


def same_bytes(bench: ScaleBench, name: str, rows: int) -> None:
    """Weights and KV cache in the same bytes: those of the plain model with room for 32 whole sequences."""
    plain = build(bench.shape, plan_for(bench.shape, "vanilla"), bench.device)
    total = weight_bytes(plain) + 32 * LONGEST * bench.kv_bytes()
    del plain
    model, options = model_and_options(bench, name, rows)
    engine = bench.engine(model, rows, **options, memory=total - weight_bytes(model))
    found = bench.throughput(engine, 32 if bench.args.tiny else 1536) | {"bytes": total}
    bench.note(f"{name}_same_bytes", found, str(rows))


def long_outputs(bench: ScaleBench, name: str, rows: int) -> None:
    """512 prompts of 512 tokens and 2,048 new ones."""
    count = 6 if bench.args.tiny else 512
    planned = build_workload("512-2048", bench.shape.vocab, requests=count)
    planned = planned.shortened(count, 16) if bench.args.tiny else planned
    workload(bench, f"{name}_512_2048", name, rows, [(one.prompt, one.new) for one in planned.requests])


def nano_vllm_work(vocab: int) -> list[tuple[tuple[int, ...], int]]:
    """As its bench.py draws it with seed 0, in the same order, since lengths follow from that: 256 sequences of 100 to 1,024
    tokens in and out, 133,966 out in all."""
    draw, most = random.Random(0), 1024
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, most))] for _ in range(256)]
    return [(tuple(token % vocab for token in prompt), draw.randint(100, most)) for prompt in prompts]


def nano_vllm(bench: ScaleBench, name: str, rows: int) -> None:
    """The workload that nano-vllm publishes."""
    work = nano_vllm_work(bench.shape.vocab)
    if bench.args.tiny:
        work = [(p[: len(p) // 32], n // 32) for p, n in work[:8]]
    workload(bench, f"{name}_nano_vllm", name, rows, work)


def workload(bench: ScaleBench, key: str, name: str, rows: int, work: list[tuple[tuple[int, ...], int]]) -> None:
    """Prompts and numbers of new tokens, all at once, with memory for all that run at a time."""
    longest = max(len(prompt) + new for prompt, new in work) + 2
    model, options = model_and_options(bench, name, rows, longest)
    if "max_sequences" in options:
        options["max_sequences"] = min(options["max_sequences"], max(rows, len(work)))
    flying = options.get("max_sequences", rows + rows // 32 + 1)
    memory = int(1.1 * (min(len(work), flying) + 2) * longest * bench.kv_bytes())
    engine = bench.engine(model, rows, **options, memory=memory, max_length=longest)
    tasks = [
        Request(id=3 * 10**7 + i, prompt=prompt, sampling=Sampling(max_new_tokens=new, ignore_eos=True))
        for i, (prompt, new) in enumerate(work)
    ]
    engine.run([dataclasses.replace(one, id=one.id + 10**8, sampling=SHORT) for one in tasks[:rows]])
    before = engine.counters().preemptions
    begun = time.perf_counter()
    results = engine.run([dataclasses.replace(one, arrival=begun) for one in tasks])
    finish(bench.device)
    seconds = time.perf_counter() - begun
    new_tokens = sum(len(result.tokens) for result in results)
    assert new_tokens == sum(new for _, new in work), "every request gets what it asked for"
    found = {
        "tokens_per_s": round(new_tokens / seconds), "seconds": round(seconds, 2), "rows": rows, "requests": len(work),
        "slots": engine.runner.sizes.max_sequences, "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "new_tokens": new_tokens, "preemptions": engine.counters().preemptions - before,
        "first_token_s_p50": round(statistics.median(r.time_to_first_token or 0.0 for r in results), 3),
        "inter_token_ms_p50": round(1e3 * statistics.median(r.mean_inter_token_time or 0.0 for r in results), 3),
    }  # fmt: skip
    bench.note(key, found, str(rows))


def sustained(played: WorkloadRun) -> float:
    """Tokens a second in the middle of a run: neither its start nor its end, when the last requests run alone."""
    moments = sorted(at for one in played.requests for at in one.times)
    first, last = (moments[int(part * (len(moments) - 1))] for part in (0.2, 0.8))
    return 0.6 * (len(moments) - 1) / (last - first)


def poisson(bench: ScaleBench, name: str, rows: int, seconds: float) -> None:
    """Requests that arrive at random, at parts of the rate that the engine sustains with as many listeners: what they wait
    for."""
    model, options = model_and_options(bench, name, rows)
    flying = options.get("max_sequences", rows + rows // 32 + 1)
    memory = int(1.1 * (flying + 1) * LONGEST * bench.kv_bytes())
    engine = bench.engine(model, rows, kind=TimedEngine, **options, memory=memory)
    assert isinstance(engine, TimedEngine)
    vocab, count = bench.shape.vocab, 8 * engine.runner.sizes.max_sequences
    full = sustained(play(engine, build_workload("thesis", vocab, requests=count)))
    loads: Record = {}
    for part in LOADS:
        rate = part * full / shape_of("thesis").new
        work = build_workload("thesis", vocab, requests=max(2, round(rate * seconds)), rate=rate)
        timing = Timing.of(play(engine, work))
        loads[f"{part:.2f}"] = {"requests_per_s": round(rate, 1), **_rounded(dataclasses.asdict(timing))}
    found = {"rows": rows, "slots": engine.runner.sizes.max_sequences, "tokens_per_s_full": round(full), "loads": loads}
    bench.note(f"{name}_poisson", found | {"preemptions": engine.counters().preemptions})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def bundled(bench: ScaleBench, key: str, rows: int, page_size: int) -> None:
    """The bundled model with its own routers, or a plain one as deep. Prompts from its own words would be better text, but
    time does not depend on it beyond the depths, which are counted. Memory is for every sequence at its deepest."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    model = load("fathom-mor-23m").to(bench.device, dtype)
    model = plain_model(model) if key == "bundled_plain" else model
    engine = bench.engine(model, rows, memory=memory_for(model, rows, page_size), page_size=page_size)
    slots = engine.runner.sizes.max_sequences
    if not bench.args.tiny:
        bench.throughput(engine, slots)  # whatever is still compiled is not timed
    found = bench.throughput(engine, 2 * slots if bench.args.tiny else 6 * slots)
    bench.profiles(False)
    bench.note(key, found | bench.replay(engine), str(rows))


def bursts(bench: ScaleBench, name: str, rows: int) -> None:
    """A model with its own routers and bursts of fixed lengths, and as the engine chooses them."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    model = load(name).to(bench.device, dtype)
    found: Record = {}
    for burst in BURSTS:
        engine = bench.engine(model, rows, memory=memory_for(model, rows), burst=burst)
        slots = engine.runner.sizes.max_sequences
        if not bench.args.tiny:
            bench.throughput(engine, slots)
        found[str(burst or "chosen")] = bench.throughput(engine, (2 if bench.args.tiny else 6) * slots)
        del engine
        bench.clear()
    bench.note(f"bursts_{rows}rows", found)


def memory_for(model: FathomForCausalLM, rows: int, page_size: int = 16) -> int:
    """For every sequence at its deepest."""
    return ample_memory(model.decoder, EngineOptions(batch_size=rows, max_length=LONGEST, page_size=page_size), LONGEST)


def prefill(bench: ScaleBench, cell: str) -> None:
    """Prompts alone: each request has one new token, so nearly all of the time is reading. A round warms up, and the median
    of three counts: while a process begins, the compiler's processes take time from the host. From the third round on
    cached pages of earlier prompts are evicted, as in a server that runs for long. MFU counts two operations for each weight
    of the layers that a token runs, and nothing of attention, logits or embeddings."""
    name, shape = PREFILLS[cell]
    a = bench.shapes[shape]
    prompt, count = PROMPTS[shape]
    plan = plan_for(a, name)
    model = build(a, plan, bench.device)
    prompt, count = (20, 8) if bench.args.tiny else (min(prompt, a.context - 2), count)
    depths = {} if plan.routing is None else {"forced_depths": plan.routing.capacity}
    memory = int(1.1 * 2 * count * (prompt + 16) * a.layers * a.kv_bytes(2))
    engine = bench.engine(model, 64, max_length=prompt + 2, memory=memory, **depths)
    draw, rounds = random.Random(0), []
    for part in range(4):
        work = [
            Request(
                id=10**7 + 10**5 * part + i, prompt=tuple(draw.randrange(a.vocab) for _ in range(prompt)),
                sampling=Sampling(max_new_tokens=1, ignore_eos=True),
            )
            for i in range(count)
        ]  # fmt: skip
        begun = time.perf_counter()
        results = engine.run([dataclasses.replace(one, arrival=begun) for one in work])
        finish(bench.device)
        rounds.append((time.perf_counter() - begun, statistics.median(r.time_to_first_token or 0.0 for r in results)))
    seconds, first_token = sorted(rounds[1:])[1]
    tokens = count * prompt
    flops = 2 * layers_per_token(plan) * a.layer_parameters * tokens
    found = {
        "tokens_per_s": round(tokens / seconds), "mfu": round(flops / seconds / TENSOR_FLOPS, 4), "prompt": prompt,
        "requests": count, "seconds": round(seconds, 3), "chunk": engine.runner.sizes.prefill_chunk,
        "first_token_s_p50": round(first_token, 3), "rounds": [round(took, 3) for took, _ in rounds],
    }  # fmt: skip
    if bench.device.type == "cuda" and bench.kernels:
        few = work[: max(1, engine.runner.sizes.prefill_chunk // prompt)]
        ranked = kernel_times(lambda: engine.run(few))[: bench.kernels]
        found["profile"] = [{"kernel": kernel, "us": round(us), "calls": calls} for kernel, calls, us in ranked]
    bench.note(f"prefill_{cell}", found)


def single(bench: ScaleBench, shape: str) -> None:
    bench.profiles(True)
    bench.note(f"vanilla_{shape}_1row", one_row(bench, shape))


def peer(bench: ScaleBench, label: str, rows: int, settings: Record, *, sized: bool) -> None:
    """transformers' continuous batching, by its own clock: what it prepares before a request is handed in is left out. One
    manager serves both rounds, so that the second finds all graphs captured. `sized`: memory for these requests only."""
    a = bench.shape
    model = hugging_face_model(build(a, plan_for(a, "vanilla"), bench.device))
    work = build_workload("thesis", a.vocab).uniform(4 if bench.args.tiny else rows, PEER_NEW)
    if sized:
        blocks = rows * -(-work.longest // PAGE)
        settings = settings | {"num_blocks": blocks + 1, "max_batch_tokens": max(rows, PAGE)}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    rates: list[float] = []
    try:
        for _ in range(2):
            timing = Timing.of(batched(model, work, rows, keep=True, **settings))
            if timing.failed:
                raise RuntimeError(f"{timing.failed} of {timing.requests} requests failed: {timing.error}")
            rates.append(timing.tokens / timing.seconds)
            if timing.seconds > PEER_SECONDS:
                break
    finally:
        model.destroy_cached_continuous_batching_manager()
    found: Record = {"tokens_per_s": round(max(rates)), "rounds": [round(rate) for rate in rates], "rows": rows}
    found |= {"requests": len(work.requests), "new": PEER_NEW, "settings": settings}
    bench.note("transformers_cb", found, label)
