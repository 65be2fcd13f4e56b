"""The engine on one GPU: plain, routed and early-exit models in one run, end to end, against transformers' own batching.

    python benchmarks/engine_throughput.py run --out engine.json [--only vanilla mor2 ...]
    python benchmarks/engine_throughput.py draw engine.json benchmarks/results/engine_h200

Weights are random: time does not depend on their values. What would depend on them, how deep tokens go, is drawn from the
distribution that routers are trained for (recursion r of R runs (R - r + 1) / R of the tokens) or from a given exit rate,
and labelled "forced". Everything else is counted: embedding, scores, sampling, keys and values, scheduling, the host.

The workload is the thesis' (4.4.3): requests without a prompt, output lengths normal around 256, more of them than fit. A
routed model has the rows that the thesis gives it (42, 48, 51 where the plain one has 32), and as many sequences in flight
as fit into the plain model's bytes, weights and keys and values together. The plain model would be faster with more rows
in the same bytes: figures against it are those at 32 rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.native import weight_bytes
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.depth.presets import preset
from fathomlm.engine.engine import Engine
from fathomlm.engine.heap import collect_heap, settle_heap
from fathomlm.engine.request import Request
from fathomlm.lab.bench.floor import finish, reading_speed
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.common import environment
from fathomlm.model.hub import FathomForCausalLM

Record = dict[str, Any]
ROWS = {2: 42, 3: 48, 4: 51}
LONGEST = 512
"""The most tokens of a text in the workload."""


def build(architecture: Architecture, plan: DepthPlan, device: torch.device) -> FathomForCausalLM:
    return random_model(architecture, plan, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)


def requests(
    count: int, mean: float, spread: float, vocab: int, seed: int = 0, max_depth: int | None = None
) -> list[Request]:
    draw = random.Random(seed)
    found = []
    for i in range(count):
        length = max(1, min(LONGEST - 1, round(draw.gauss(mean, spread))))
        sampling = Sampling(max_new_tokens=length, ignore_eos=True)
        prompt = (draw.randrange(vocab),)
        found.append(Request(id=10**6 + i, prompt=prompt, sampling=sampling, max_depth=max_depth))
    return found


def plan_for(architecture: Architecture, recursions: int) -> DepthPlan:
    if recursions == 1:
        return DepthPlan.vanilla(architecture.layers)
    plan = DepthPlan.build("middle-cycle", recursions, architecture.layers, "add")
    return plan.with_routing(build_routing("expert", recursions))


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tiny = Architecture(family="llama", layers=6, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocab=96)
        small = args.tiny
        self.shapes = {
            "360m": tiny if small else preset("smollm-360m").architecture,
            "1.7b": tiny if small else preset("smollm-1.7b").architecture,
        }
        self.speed = reading_speed(self.device)
        self.record: Record = {
            "environment": environment(),
            "reading_gb_per_s": round(self.speed / 1e9, 1),
            "workload": {"requests": args.requests, "prompt": 1, "new": [args.mean, args.mean / 4], "longest": LONGEST},
        }

    def note(self, name: str, found: Record) -> None:
        self.record[name] = found
        print(name, {k: v for k, v in found.items() if k not in ("profile", "loop")}, found.get("loop", ""), flush=True)
        self.args.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def clear(self) -> None:
        collect_heap()
        if self.device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()

    def engine(self, model: FathomForCausalLM, rows: int, kind: type[Engine] = Engine, **options: Any) -> Engine:
        usual = {"max_length": LONGEST, "prefix_caching": False, "penalties": False, "max_logprobs": 0, "max_queue": 10**5}
        begun = time.perf_counter()
        engine = kind(model, batch_size=rows, **(usual | options))
        engine.run(requests(engine.runner.sizes.max_sequences, 12, 2, model.architecture.vocab, seed=1))
        finish(self.device)
        settle_heap()  # as `fathomlm serve` does
        print(f"  set up in {time.perf_counter() - begun:.1f} s", flush=True)
        return engine

    def throughput(self, engine: Engine, count: int, max_depth: int | None = None) -> Record:
        vocab = engine.model.architecture.vocab
        work = requests(count, self.args.mean, self.args.mean / 4, vocab, max_depth=max_depth)
        before = (engine.totals.decode_steps, engine.totals.tokens, engine.totals.depths, engine.totals.exited)
        begun = time.perf_counter()
        results = engine.run(work)
        finish(self.device)
        seconds = time.perf_counter() - begun
        ticks, tokens, depths, left = (
            now - then
            for now, then in zip(
                (engine.totals.decode_steps, engine.totals.tokens, engine.totals.depths, engine.totals.exited),
                before,
                strict=True,
            )
        )
        between = sorted(r.mean_inter_token_time or 0.0 for r in results)
        found: Record = {
            "tokens_per_s": round(tokens / seconds),
            "seconds": round(seconds, 3),
            "ticks": ticks,
            "ms_per_decode_step": round(1e3 * seconds / ticks, 4),
            "tokens_per_tick": round(tokens / ticks, 2),
            "burst": engine.burst,
            "inter_token_ms_p50": round(1e3 * statistics.median(between), 3),
            "preemptions": engine.counters().preemptions,
            "rows": engine.options.batch_size,
            "page_size": engine.options.page_size,
            "slots": engine.runner.sizes.max_sequences,
            "kv_gb": round(engine.runner.pages.bytes / 1e9, 4),
            "weights_gb": round(weight_bytes(engine.model) / 1e9, 4),
        }
        if engine.model.plan.routing is not None:
            found["mean_depth"] = round(depths / tokens, 3)
        if engine.runner.layout.kind == "exits":
            found["exit_rate"] = round(left / tokens, 4)
        return found

    def replay(self, engine: Engine) -> Record:
        """The device alone: a full engine's ticks back to back, launched by the burst as the engine does it, the host out of
        the way, with contexts about as long as they are on average in `throughput`; and what one consists of. Tokens are
        counted: at the end of a workload rows are empty, so its tokens a tick would say too little of the device."""
        many = 40
        vocab, flying = engine.model.architecture.vocab, engine.runner.sizes.max_sequences
        known = engine.totals.tokens
        for i in range(flying):
            sampling = Sampling(max_new_tokens=LONGEST - 2, ignore_eos=True)
            engine.submit(Request(id=2 * 10**6 + i, prompt=(i % vocab,), sampling=sampling))
        while engine.totals.tokens < known + flying * max(32, self.args.mean // 2 - many // 2):
            engine.step()
        finish(self.device)
        found: Record = {}
        if self.device.type == "cuda" and self.args.profile:
            found["loop"] = self._loop(engine)
        engine.fix_bursts()
        engine.scheduler.lookahead = 120
        engine.step()
        finish(self.device)
        made, bursts = _generated(engine), -(-many // engine.burst)
        begun = time.perf_counter()
        for _ in range(bursts):
            engine.runner.launch_burst(engine.burst, sequences=engine.scheduler.occupied)
        finish(self.device)
        ticks = bursts * engine.burst
        found["device_ms_per_tick"] = round(1e3 * (time.perf_counter() - begun) / ticks, 4)
        found["device_tokens_per_tick"] = round((_generated(engine) - made) / ticks, 2)
        if self.device.type == "cuda" and self.args.profile:
            found["profile"] = self._profile(engine)
        return found

    def _loop(self, engine: Engine) -> Record:
        """The engine as it runs, host and all: how much of the time the device works, and where it waits longest."""
        steps, before = 12, engine.totals.decode_steps
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                engine.step()
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        end, last, busy = spans[0][0], spans[0][2], 0.0
        gaps: dict[str, list[float]] = {}
        for start, stop, name in spans:
            if start > end:
                entry = gaps.setdefault(f"{last[:40]} -> {name[:40]}", [0, 0.0])
                entry[0] += 1
                entry[1] += start - end
            busy += max(0.0, stop - max(start, end))
            end, last = max(end, stop), name
        whole = end - spans[0][0]
        ticks = max(1, engine.totals.decode_steps - before)
        ranked = sorted(gaps.items(), key=lambda item: -item[1][1])[:8]
        return {
            "ms_per_decode_step": round(whole / ticks / 1e3, 4),
            "busy": round(busy / whole, 4),
            "gaps": [
                {"between": name, "us_per_tick": round(us / ticks, 2), "per_tick": round(many / ticks, 2)}
                for name, (many, us) in ranked
            ],
        }

    def _profile(self, engine: Engine) -> list[Record]:
        ticks = 4
        ranked = kernel_times(lambda: [engine.runner.launch() for _ in range(ticks)])[: self.args.profile]
        return [
            {
                "kernel": name,
                "us_per_tick": round(us / ticks, 2),
                "calls_per_tick": round(calls / ticks, 1),
                "us": round(us / calls, 2),
            }
            for name, calls, us in ranked
        ]


def _generated(engine: Engine) -> int:
    """Tokens that the requests on the device have."""
    return int(engine.runner.state.generated_S[:-1].sum())


def kernel_times(work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Where the device's time goes: each kernel, how often it ran, and its microseconds in all, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name[:70], []).append(event.device_time)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [(name, len(each), sum(each)) for name, each in ranked]


def one_row(bench: Bench, shape: str) -> Record:
    model = build(bench.shapes[shape], plan_for(bench.shapes[shape], 1), bench.device)
    engine = bench.engine(model, 1)
    sampling = Sampling(max_new_tokens=256, ignore_eos=True)
    times = []
    for i in range(3):
        begun = time.perf_counter()
        engine.run([Request(id=i, prompt=(1,), sampling=sampling)])
        finish(bench.device)
        times.append((time.perf_counter() - begun) / 256)
    ms = 1e3 * statistics.median(times)
    floor = 1e3 * weight_bytes(model) / bench.speed
    found = {"ms_per_token": round(ms, 4), "floor_ms": round(floor, 4), "floor_share": round(floor / ms, 4), "rows": 1}
    return found | bench.replay(engine)


def vanilla(bench: Bench) -> None:
    model = build(bench.shapes["360m"], plan_for(bench.shapes["360m"], 1), bench.device)
    a = model.architecture
    token = a.layers * a.kv_bytes(model.decoder.embed.weight.element_size())
    engine = bench.engine(model, 32, memory=32 * LONGEST * token)
    found = bench.throughput(engine, bench.args.requests)
    bench.note("vanilla_360m_32rows", found | bench.replay(engine) | {"memory_gb": _memory(found)})


def mor(bench: Bench, recursions: int) -> None:
    a = bench.shapes["360m"]
    plan = plan_for(a, recursions)
    model = build(a, plan, bench.device)
    assert plan.routing is not None
    base = bench.record["vanilla_360m_32rows"]
    memory = int(base["memory_gb"] * 1e9) - weight_bytes(model)
    settings: Record = {"forced_depths": plan.routing.capacity, "memory": memory}
    cases = ((f"mor{recursions}", ROWS[recursions]), (f"mor{recursions}_32rows", 32))
    for name, rows in cases if bench.args.both else cases[:1]:
        slots = round(rows * bench.args.overbook)
        cores = bench.args.cores or None
        engine = bench.engine(model, rows, max_sequences=slots, cores=cores, **settings)
        found = bench.throughput(engine, bench.args.requests * rows // 32)
        found |= bench.replay(engine)
        found |= {
            "speedup": round(found["tokens_per_s"] / base["tokens_per_s"], 3),
            "depths": "forced, the distribution that routers are trained for",
            "capacity": list(plan.routing.capacity),
            "memory_gb": _memory(found),
            "cores": engine.runner.program.cores,  # type: ignore[attr-defined]
        }
        bench.note(name, found)
        del engine
        bench.clear()


def _memory(found: Record) -> float:
    return round(found["kv_gb"] + found["weights_gb"], 4)


def recursive_exit(bench: Bench) -> None:
    """Two loops of one block, left after the first."""
    a = bench.shapes["360m"]
    plan = DepthPlan.build("cycle", 2, a.layers)
    half = a.layers // 2
    model = build(a, plan.with_exits([half - 1]), bench.device)
    base = bench.record["vanilla_360m_32rows"]
    memory = int(base["memory_gb"] * 1e9) - weight_bytes(model)
    for rate in bench.args.rates:
        exiting = Exiting(mode="parallel", exit_layers=(half,), threshold=0.5, max_stack=16)
        engine = bench.engine(model, 64, max_sequences=96, memory=memory, exiting=exiting, forced_exits=rate)
        found = bench.throughput(engine, bench.args.requests) | bench.replay(engine)
        found |= {
            "speedup": round(found["tokens_per_s"] / base["tokens_per_s"], 3),
            "exits": f"forced, {rate:.0%} of the tokens leave after the first loop; exact fill",
            "memory_gb": _memory(found),
        }
        bench.note("recursive2_exit" if rate == bench.args.rates[0] else f"recursive2_exit_{rate:g}", found)
        del engine
        bench.clear()


def transformers_peer(bench: Bench, rows: int) -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation import ContinuousBatchingConfig

    a = bench.shapes["360m"]
    config = LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.intermediate, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(bench.device):
        peer = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    many, new = bench.args.peer_requests, 128
    prompts = [[i % a.vocab] for i in range(many)]
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def serve(texts: list[list[int]]) -> float:
        begun = time.perf_counter()
        peer.generate_batch(
            texts,
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=rows),
            progress_bar=False,
        )
        return time.perf_counter() - begun

    serve(prompts[:rows])  # once for whatever it sets up
    seconds = serve(prompts)
    bench.note(
        f"transformers_cb_{rows}rows",
        {
            "tokens_per_s": round(many * new / seconds),
            "seconds": round(seconds, 2),
            "requests": many,
            "new": new,
            "rows": rows,
        },
    )


def run(args: argparse.Namespace) -> None:
    bench = Bench(args)
    if args.base is not None:
        bench.record["vanilla_360m_32rows"] = json.loads(args.base.read_text())["vanilla_360m_32rows"]
    wanted = set(args.only or ("one", "vanilla", "mor2", "mor3", "mor4", "exits", "peer"))
    if "one" in wanted:
        bench.note("vanilla_360m_1row", one_row(bench, "360m"))
        bench.clear()
    if "big" in wanted or "one" in wanted:
        bench.note("vanilla_1.7b_1row", one_row(bench, "1.7b"))
        bench.clear()
    if "vanilla" in wanted:
        vanilla(bench)
        bench.clear()
    for recursions in (2, 3, 4):
        if f"mor{recursions}" in wanted:
            mor(bench, recursions)
            bench.clear()
    if "exits" in wanted:
        recursive_exit(bench)
        bench.clear()
    if "peer" in wanted:
        transformers_peer(bench, 32)


def table(record: Record) -> str:
    where = record["environment"]
    note = [record["note"], ""] if "note" in record else []
    lines = [
        "# The engine, end to end",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. Random weights in bfloat16, greedy, reading speed "
        f"{record['reading_gb_per_s']} GB/s. Workload: {json.dumps(record['workload'])}.",
        "",
        *note,
        "| what | rows | in flight | tokens/s | against vanilla | ms a tick | device alone | memory, GB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in record.items():
        if isinstance(found, dict) and "tokens_per_s" in found:
            cells = [found.get(key, "") for key in ("rows", "slots", "tokens_per_s", "speedup")]
            cells += [_step_ms(found), found.get("device_ms_per_tick", ""), found.get("memory_gb", "")]
            lines.append(f"| {name} | " + " | ".join(str(cell) for cell in cells) + " |")
    lines += ["", "| one row | ms a token | floor, ms | of the floor |", "|---|--:|--:|--:|"]
    for name, found in record.items():
        if isinstance(found, dict) and "ms_per_token" in found:
            lines.append(f"| {name} | {found['ms_per_token']} | {found['floor_ms']} | {found['floor_share']:.0%} |")
    for name, found in record.items():
        if isinstance(found, dict) and "loop" in found:
            loop = found["loop"]
            lines += [
                "",
                f"## {name}: the engine as it runs",
                "",
                f"Under a profiler, {_step_ms(loop)} ms a tick, of which the device works {loop['busy']:.1%}.",
                "",
                "| the device waits between | us a tick | times a tick |",
                "|---|--:|--:|",
                *(f"| `{gap['between']}` | {gap['us_per_tick']} | {gap['per_tick']} |" for gap in loop["gaps"]),
            ]
        if isinstance(found, dict) and "profile" in found:
            lines += [
                "",
                f"## {name}: one tick, kernel by kernel",
                "",
                "| kernel | calls | us each | us a tick |",
                "|---|--:|--:|--:|",
            ]
            lines += [
                f"| `{row['kernel']}` | {row['calls_per_tick']} | {row['us']} | {row['us_per_tick']} |"
                for row in found["profile"]
            ]
    return "\n".join(lines) + "\n"


def _step_ms(found: Record) -> Any:
    """`ms_per_tick` in records of 2026-11-15."""
    return found.get("ms_per_decode_step", found.get("ms_per_tick", ""))


def draw(args: argparse.Namespace) -> None:
    record = json.loads(args.record.read_text())
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    running = verbs.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--only", nargs="*", choices=["one", "big", "vanilla", "mor2", "mor3", "mor4", "exits", "peer"])
    running.add_argument(
        "--base", type=Path, help="an earlier record whose vanilla figure to compare with, while trying out"
    )
    running.add_argument("--requests", type=int, default=1000)
    running.add_argument("--mean", type=float, default=256.0, help="new tokens of a request")
    running.add_argument("--overbook", type=float, default=2.0, help="sequences in flight for each row, routed models")
    running.add_argument("--cores", type=int, help="passes of the block to one turn; by default the mean depth, rounded")
    running.add_argument("--rates", nargs="*", type=float, default=[0.5, 0.8], help="parts of tokens that leave early")
    running.add_argument("--both", action="store_true", help="routed models at 32 rows too")
    running.add_argument("--peer-requests", type=int, default=64)
    running.add_argument("--profile", type=int, default=14, help="kernels to list")
    running.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    running.set_defaults(verb=run)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("record", type=Path)
    drawing.add_argument("out", type=Path)
    drawing.set_defaults(verb=draw)
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
