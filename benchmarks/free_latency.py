"""How long a token takes, one sequence at a time, in every way of leaving early, in the engine.

    python benchmarks/free_latency.py run --out free_latency.json
    python benchmarks/free_latency.py draw free_latency.json benchmarks/results/free_latency_h200

The weights are random, in the shape of a model of 7 billion parameters: time does not depend on their values. What depends
on them is how often the exit and the last layer agree, so the layers behind the exit are scaled down until they often do,
and thresholds are searched that let a wanted part of the tokens leave. Exit rates are then measured, not assumed.

A token's time is that of a text, less that of one with a single token, over the other tokens: reading the prompt and waiting
for the last result are in both. The floor is the time that reading the weights takes: those of the layers and heads that the
passes really ran, over the reading speed of this device, measured in the same run. Every mode has prompts, lengths and
rounds in common with full.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.presets import preset
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request, Result
from fathomlm.lab.bench.floor import finish, reading_speed
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.bench.play import PassCounts
from fathomlm.lab.common import environment, free_memory
from fathomlm.model.hub import FathomForCausalLM

SEVEN = Architecture(
    family="llama", layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000,
    tied_embeddings=False,
)  # fmt: skip
SHAPES = {
    "7b": SEVEN,
    "360m": preset("smollm-360m").architecture,
    "135m": preset("smollm2-135m").architecture,
    "tiny": dataclasses.replace(SEVEN, layers=8, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512),
}
MODES = ("full", "static", "parallel", "speculative", "state-copy")
EXITS = ("parallel", "speculative", "state-copy")
"""Modes whose tokens leave where an exit is sure."""
MAIN_RATE = 0.8
PROMPTS, PROMPT = 2, 32
WARM_UPS, ROUNDS = 3, 3
GAPS_US = (3.0, 10.0, 30.0, 100.0, 300.0, float("inf"))


def build(architecture: Architecture, exit_layer: int, device: torch.device, quiet: float) -> FathomForCausalLM:
    """Random weights; what the layers behind the exit add is scaled by `quiet`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(architecture, DepthPlan.vanilla(architecture.layers), dtype=dtype, device=device)
    with torch.no_grad():
        model.decoder.head_weight.mul_(8.0)  # a trained head is sure of some tokens; a fresh one of none
        for layer in model.decoder.layers[exit_layer:]:
            layer.attn.o.weight.mul_(quiet)
            layer.mlp.down.weight.mul_(quiet)
    return model


@dataclasses.dataclass(slots=True)
class Round:
    """Every prompt once."""

    results: list[Result]
    seconds: float
    passes: Counter[str]
    """How often passes ran: shallow, deep, and whole ones."""


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.architecture = SHAPES[args.shape]
        self.exit_layer = self.architecture.layers // 4
        self.model = build(self.architecture, self.exit_layer, self.device, args.quiet)
        size = self.model.decoder.embed.weight.element_size()
        self.layer_bytes = size * self.architecture.layer_parameters
        self.head_bytes = size * self.architecture.vocab * self.architecture.hidden
        entry = {spec.name: spec.inputs * spec.outputs for spec in self.architecture.linears()}
        self.entry_bytes = size * (entry["k"] + entry["v"])
        self.speed = reading_speed(self.device)
        generator = torch.Generator().manual_seed(1)
        shape = (PROMPTS, PROMPT)
        self.prompts = torch.randint(0, self.architecture.vocab, shape, generator=generator).tolist()
        self.max_stack, self.new = args.max_stack, args.tokens

    def exiting(self, mode: Any, threshold: float | None) -> Exiting:
        layers = {} if mode == "full" else {"exit_layers": (self.exit_layer,)}
        stack = {"max_stack": self.max_stack} if mode in ("parallel", "speculative") else {}
        return Exiting(mode=mode, threshold=threshold if mode in EXITS else None, **layers, **stack)

    def floor_ms(self, mode: str, passes: Counter[str], left: int, tokens: int) -> float:
        """A token's share of the weights that were read."""
        layers = {"full": self.architecture.layers, "shallow": self.exit_layer}
        layers["deep"] = layers["full"] - self.exit_layer
        read = sum(many * (layers[name] * self.layer_bytes + self.head_bytes) for name, many in passes.items())
        if mode == "state-copy":  # who leaves reads what makes keys and values
            read += left * layers["deep"] * self.entry_bytes
        return 1e3 * read / self.speed / tokens


class Timed:
    """One engine, and what it does with the bench's prompts, `rows` at a time."""

    def __init__(self, bench: Bench, mode: str, rows: int = 1, stack: int | None = None) -> None:
        self.bench, self.mode, self.rows = bench, mode, rows
        waits = mode in ("parallel", "speculative")
        self.engine = Engine(
            bench.model, max_length=PROMPT + bench.new, prefix_caching=False, penalties=False, max_logprobs=0,
            exiting=None if mode == "full" else bench.exiting(mode, 0.5), max_sequences=rows,
            batch_size=max(rows, stack or bench.max_stack) if waits else rows,
        )  # fmt: skip
        self._passes = PassCounts(self.engine)

    def round(self, threshold: float | None, new: int | None = None) -> Round:
        bench, many = self.bench, max(PROMPTS, self.rows)
        sampling = Sampling(max_new_tokens=new or bench.new, ignore_eos=True)
        work = [
            Request(
                id=self.engine.new_id(), prompt=tuple(bench.prompts[i % PROMPTS]), sampling=sampling,
                exit_threshold=threshold if self.mode in EXITS else None,
            )
            for i in range(many)
        ]  # fmt: skip
        self._passes.counts.clear()
        finish(bench.device)
        begun = time.perf_counter()
        results = self.engine.run(work) if self.rows > 1 else [found for one in work for found in self.engine.run([one])]
        finish(bench.device)
        return Round(results, time.perf_counter() - begun, Counter(self._passes.counts))

    def rate(self, threshold: float | None) -> float:
        return self.left(self.round(threshold).results) / (PROMPTS * self.bench.new)

    def left(self, results: Sequence[Result]) -> int:
        if self.mode == "full":
            return 0
        return sum(depth <= self.bench.exit_layer for result in results for depth in result.depths or ())

    def measure(self, threshold: float | None) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
        """What was measured, and the texts."""
        bench = self.bench
        for _ in range(WARM_UPS):
            self.round(threshold)  # kernels are compiled, and drafting settles
        rounds = [(self.round(threshold), self.round(threshold, 1)) for _ in range(ROUNDS)]
        spans = [(long.seconds - short.seconds) / (bench.new - 1) for long, short in rounds]
        first, single = rounds[0]
        tokens = sum(len(result.tokens) for result in first.results)
        ms = 1e3 * statistics.median(spans) / (PROMPTS if self.rows == 1 else 1)
        found: dict[str, Any] = {
            "ms_per_token": round(ms, 4),
            "ms_per_text": round(1e3 * statistics.median(long.seconds for long, _ in rounds) / len(first.results), 3),
            "tokens_per_s": round(tokens / statistics.median(long.seconds for long, _ in rounds), 1),
            "exit_rate": round(self.left(first.results) / tokens, 4),
            "threshold": threshold,
        }
        if self.rows == 1:
            later = first.passes - single.passes
            floor = bench.floor_ms(self.mode, later, self.left(first.results), tokens - PROMPTS)
            found |= {
                "floor_ms": round(floor, 4),
                "of_floor": round(floor / ms, 4),
                "deep_passes_per_token": round(later["deep"] / (tokens - PROMPTS), 4),
            }
        if self.mode == "speculative":
            drafted = sum(result.drafted for result in first.results)
            found |= {"drafted": drafted, "accepted": round(self.left(first.results) / max(1, drafted), 4)}
        return found, [result.tokens for result in first.results[:PROMPTS]]

    def where(self, threshold: float | None, most: int) -> dict[str, Any]:
        """The kernels that take longest, prefill included: milliseconds and calls for each token; how long the device was
        busy, and how long it was not, by the length of the gap."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiling

        with profiling(activities=[ProfilerActivity.CUDA]) as trace:
            done = self.round(threshold)
        tokens = sum(len(result.tokens) for result in done.results)
        events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in trace.events() or ()
            if event.device_type == DeviceType.CUDA
        )
        busy, end, gaps, many = 0.0, spans[0][0], dict.fromkeys(GAPS_US, 0.0), Counter[float]()
        for begun, ended in spans:
            if begun > end:
                length = next(length for length in GAPS_US if begun - end <= length)
                gaps[length] += begun - end
                many[length] += 1
            busy, end = busy + max(0.0, ended - max(begun, end)), max(end, ended)
        return {
            "passes": dict(done.passes),
            "ms_per_token": round(1e3 * done.seconds / tokens, 4),
            "busy_ms_per_token": round(busy / 1e3 / tokens, 4),
            "launched_per_token": round(len(spans) / tokens, 1),
            "gaps_ms_per_token": {
                f"up to {length:g} us": [round(gap / 1e3 / tokens, 4), round(many[length] / tokens, 2)]
                for length, gap in gaps.items()
            },
            "kernels": [
                {
                    "kernel": event.key[:80],
                    "ms_per_token": round(event.self_device_time_total / 1e3 / tokens, 4),
                    "calls_per_token": round(event.count / tokens, 2),
                    "us_each": round(event.self_device_time_total / max(1, event.count), 1),
                }
                for event in events[:most]
            ],
        }


def threshold_for(rate: Callable[[float], float], wanted: float) -> float:
    """The threshold at which about so many tokens leave: by halving, then around what that found, since another threshold
    also gives another text, and the rate jumps. The nearest rate that is not below counts."""
    low, high, found = 0.0, 1.0, {}
    for _ in range(8):
        middle = (low + high) / 2
        found[middle] = rate(middle)
        low, high = (middle, high) if found[middle] > wanted else (low, middle)
    around = (low + high) / 2
    for part in (-0.06, -0.04, -0.02, 0.02, 0.04, 0.06):
        near = min(1.0, around * (1 + part))
        found[near] = rate(near)
    return min(found, key=lambda threshold: (found[threshold] < wanted, abs(found[threshold] - wanted)))


class Record:
    """What was measured so far, written after every part."""

    def __init__(self, out: Path, begun: dict[str, Any]) -> None:
        self.out, self.parts, self.failed = out, begun, list[str]()

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A part that fails does not end the run: a device's time is short, and what other parts measure is kept."""
        try:
            yield
        except Exception:
            self.failed.append(name)
            traceback.print_exc()

    def add(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        begun = time.perf_counter()
        with self.attempt(name):
            self.parts[name] = measure()
            print(f"{name} ({time.perf_counter() - begun:.0f} s)", self.parts[name], flush=True)
            self.out.write_text(json.dumps(self.parts, indent=1) + "\n")


def run(args: argparse.Namespace) -> None:
    bench = Bench(args)
    a = bench.architecture
    record = Record(
        args.out,
        {
            "environment": environment(),
            "shape": {"layers": a.layers, "hidden": a.hidden, "vocab": a.vocab, "exit_layer": bench.exit_layer},
            "weights_gb": round((a.layers * bench.layer_bytes + bench.head_bytes) / 1e9, 3),
            "reading_gb_per_s": round(bench.speed / 1e9, 1),
            "prompts": PROMPTS,
            "prompt_tokens": PROMPT,
            "new_tokens": bench.new,
            "max_stack": args.max_stack,
            "deep_scale": args.quiet,
        },
    )
    parts = record.parts
    texts: dict[int, list[tuple[int, ...]]] = {}
    thresholds: dict[str, float] = {}

    def engine(name: str, mode: str, rows: int, stack: int | None, rates: Sequence[float] = (MAIN_RATE,)) -> None:
        """One engine for all rates of a mode: a threshold is a request's."""
        free_memory()
        timed = Timed(bench, mode, rows, stack)
        for rate in rates:
            label = name if rate == MAIN_RATE else f"{name}, {rate:.0%} leave"
            record.add(label, partial(one, timed, rate))
        if args.profile and name == "parallel":
            record.add("where_parallel", lambda: timed.where(thresholds["parallel"], args.profile))

    def one(timed: Timed, rate: float) -> dict[str, Any]:
        mode, rows = timed.mode, timed.rows
        threshold = None
        if mode in EXITS:
            searched = "parallel" if mode == "speculative" and "parallel" in thresholds else mode
            known = args.threshold or (thresholds.get(searched) if rate == MAIN_RATE else None)
            threshold = known if known is not None else threshold_for(timed.rate, rate)
            if rate == MAIN_RATE:
                thresholds.setdefault(searched, threshold)
        found, said = timed.measure(threshold)
        full = parts.get("full" if rows == 1 else f"full, {rows} rows", found)
        found["speedup"] = round(full["ms_per_token"] / found["ms_per_token"], 3)
        if mode == "full":
            texts[rows] = said
        elif rows in texts:
            found["same_text_as_full"] = said == texts[rows]
        return found

    for rows in args.rows:
        for mode in args.modes:
            waits = mode in ("parallel", "speculative")
            for stack in args.stacks if waits and rows == 1 else [None]:
                name = mode + (f", {rows} rows" if rows > 1 else "")
                name += "" if stack in (None, args.stacks[0]) else f", batch_size {stack}"
                with record.attempt(name):
                    engine(name, mode, rows, stack, args.rates if name == "parallel" else (MAIN_RATE,))
    if record.failed:
        raise SystemExit(f"these parts failed: {', '.join(record.failed)}")


def table(record: dict[str, Any]) -> str:
    where, shape = record["environment"], record["shape"]
    lines = [
        "# One sequence: time for a token, by how tokens leave",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. {shape['layers']} layers of width {shape['hidden']}, "
        f"{record['weights_gb']} GB of bfloat16 weights",
        f"(random, the layers behind the exit scaled by {record['deep_scale']}), exit after layer {shape['exit_layer']}. "
        f"{record['prompts']} prompts of {record['prompt_tokens']} tokens, {record['new_tokens']} new each, greedy.",
        f"The engine, one sequence. Floor: the weights that were read, at {record['reading_gb_per_s']} GB/s, this "
        "device's own reading speed.",
        "",
        "| mode | ms a token | speed against full | tokens that left | deep passes a token | floor, ms | of the floor |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in record.items():
        if isinstance(found, dict) and "floor_ms" in found:
            drafts = f" ({found['accepted']:.0%} of drafts kept)" if found.get("drafted") else ""
            lines.append(
                f"| {name}{drafts} | {found['ms_per_token']:.3f} | {found['speedup']:.2f} | {found['exit_rate']:.1%} | "
                f"{found['deep_passes_per_token']:.2f} | {found['floor_ms']:.3f} | {found['of_floor']:.0%} |"
            )
    notes = [
        "",
        "static never runs the layers behind the exit. parallel and state-copy keep what the exit chose: their tokens are",
        "not full's. speculative's are; the engine drafts where it has measured that drafting pays.",
    ]
    return "\n".join([*lines, *notes]) + "\n"


def draw(args: argparse.Namespace) -> None:
    record = json.loads(args.record.read_text())
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(record))
    print(table(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    running = verbs.add_parser("run")
    running.add_argument("--shape", choices=list(SHAPES), default="7b")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--tokens", type=int, default=192, help="new tokens of a prompt")
    running.add_argument("--quiet", type=float, default=0.1)
    running.add_argument("--max-stack", type=int, default=16)
    running.add_argument(
        "--rates", nargs="*", type=float, default=[MAIN_RATE], help="parts of the tokens that leave, of parallel decoding"
    )
    running.add_argument("--threshold", type=float, help="instead of searching for it")
    running.add_argument("--rows", nargs="*", type=int, default=[1], help="sequences at a time")
    running.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    running.add_argument("--stacks", nargs="*", type=int, default=[16], help="one row: tokens per forward pass with exits")
    running.add_argument("--profile", type=int, default=0, help="list so many kernels of parallel decoding")
    running.set_defaults(verb=run)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("record", type=Path)
    drawing.add_argument("out", type=Path)
    drawing.set_defaults(verb=draw)
    args = parser.parse_args()
    args.verb(args)


if __name__ == "__main__":
    main()
