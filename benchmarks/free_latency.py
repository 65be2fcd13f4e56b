"""How long a token takes, one row at a time, in every way of leaving early, on compiled and graph-captured steps.

    python benchmarks/free_latency.py run --out free_latency.json
    python benchmarks/free_latency.py draw free_latency.json benchmarks/results/free_latency_h200

The weights are random, in the shape of a model of 7 billion parameters: time does not depend on their values. What depends
on them is how often the exit and the last layer agree, so the layers behind the exit are scaled down until they often do,
and thresholds are searched that let a wanted part of the tokens leave. Exit rates are then measured, not assumed.

The floor is the time that reading the weights takes: those of the layers and heads that the steps taken really ran, over
the reading speed of this device, measured in the same run. Every mode has prompts, lengths and steps in common with full.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fathomlm.decode.captured import CapturedDecoder, CapturedResult
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.presets import preset
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request, Result
from fathomlm.lab.bench.floor import finish, reading_speed
from fathomlm.lab.bench.models import random_model
from fathomlm.lab.environment import environment, free_memory
from fathomlm.model.hub import FathomForCausalLM

SEVEN = Architecture(
    family="llama", layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000,
    tied_embeddings=False,
)  # fmt: skip
SHAPES = {
    "7b": SEVEN,
    "360m": preset("smollm-360m").architecture,
    "tiny": dataclasses.replace(SEVEN, layers=8, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512),
}
RATES = (0.5, 0.8, 0.9)
MAIN_RATE = 0.8
PROMPTS, PROMPT = 2, 32


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


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.architecture = SHAPES[args.shape]
        self.exit_layer = self.architecture.layers // 4
        self.model = build(self.architecture, self.exit_layer, self.device, args.quiet)
        decoder = self.model.decoder
        size = decoder.embed.weight.element_size()
        self.layer_bytes = size * self.architecture.layer_parameters
        self.head_bytes = size * self.architecture.vocab * self.architecture.hidden
        entry = {spec.name: spec.inputs * spec.outputs for spec in self.architecture.linears()}
        self.entry_bytes = size * (entry["k"] + entry["v"])
        self.speed = reading_speed(self.device)
        stack = {"max_stack": args.max_stack}
        compile = self.device.type == "cuda"
        self.captured = CapturedDecoder(
            decoder, length=PROMPT + args.tokens, exit_layers=self.exit_layer, compile=compile, pack=args.pack, **stack
        )
        generator = torch.Generator().manual_seed(1)
        shape = (PROMPTS, PROMPT)
        self.prompts = torch.randint(0, self.architecture.vocab, shape, generator=generator).tolist()
        self.max_stack, self.new = args.max_stack, args.tokens

    def exiting(self, mode: Any, threshold: float | None) -> Exiting:
        layers = {} if mode == "full" else {"exit_layers": (self.exit_layer,)}
        stack = {"max_stack": self.max_stack} if mode in ("parallel", "speculative") else {}
        return Exiting(mode=mode, threshold=None if mode in ("full", "static") else threshold, **layers, **stack)

    def free_captured(self) -> None:
        """Its packed weights and graphs make room for an engine's."""
        del self.captured
        free_memory()

    def texts(self, mode: str, threshold: float | None) -> list[CapturedResult]:
        return [self.captured.generate(prompt, self.exiting(mode, threshold), self.new) for prompt in self.prompts]

    def rate(self, texts: list[CapturedResult]) -> float:
        layers = [layer for text in texts for layer in text.exit_layers]
        return sum(layer == self.exit_layer for layer in layers) / len(layers)

    def threshold_for(self, mode: str, wanted: float) -> float:
        """The threshold at which about so many tokens leave: by halving, then around what that found, since another
        threshold also gives another text, and the rate jumps. The nearest rate that is not below counts."""
        low, high, found = 0.0, 1.0, {}
        for _ in range(9):
            middle = (low + high) / 2
            found[middle] = self.rate(self.texts(mode, middle))
            low, high = (middle, high) if found[middle] > wanted else (low, middle)
        around = (low + high) / 2
        for part in (-0.06, -0.04, -0.02, 0.02, 0.04, 0.06):
            found[around * (1 + part)] = self.rate(self.texts(mode, around * (1 + part)))
        return min(found, key=lambda threshold: (found[threshold] < wanted, abs(found[threshold] - wanted)))

    def floor_ms(self, mode: str, texts: list[CapturedResult]) -> float:
        """A token's share of the weights that were read."""
        layers, exit = self.architecture.layers, self.exit_layer
        tokens = sum(len(text.tokens) for text in texts)
        shallow = sum(len(text.confidences) for text in texts)
        deep = sum(text.deep_passes for text in texts)
        if mode in ("full", "static"):
            read = tokens * ((layers if mode == "full" else exit) * self.layer_bytes + self.head_bytes)
        else:
            left = sum(layer == exit for text in texts for layer in text.exit_layers)
            if mode == "state-copy":  # who does not leave runs on at once; who leaves reads what makes keys and values
                deep = tokens - left
            read = shallow * (exit * self.layer_bytes + self.head_bytes)
            read += deep * ((layers - exit) * self.layer_bytes + self.head_bytes)
            read += left * (layers - exit) * self.entry_bytes if mode == "state-copy" else 0
        return 1e3 * read / self.speed / tokens

    def measure(self, mode: str, threshold: float | None) -> dict[str, Any]:
        self.texts(mode, threshold)
        rounds, walls = [], []
        for _ in range(3):
            finish(self.device)
            begun = time.perf_counter()
            rounds.append(self.texts(mode, threshold))
            walls.append((time.perf_counter() - begun) / PROMPTS)
        times = [sum(text.decode_seconds for text in texts) / sum(len(text.tokens) for text in texts) for texts in rounds]
        texts = rounds[0]
        ms, floor = 1e3 * statistics.median(times), self.floor_ms(mode, texts)
        found: dict[str, Any] = {
            "ms_per_token": round(ms, 4),
            "ms_per_text": round(1e3 * statistics.median(walls), 3),
            "exit_rate": round(self.rate(texts), 4),
            "threshold": threshold,
            "floor_ms": round(floor, 4),
            "of_floor": round(floor / ms, 4),
            "deep_passes_per_token": round(sum(t.deep_passes for t in texts) / sum(len(t.tokens) for t in texts), 4),
        }
        if mode == "speculative":
            found["accepted"] = round(sum(t.accepted for t in texts) / max(1, sum(t.drafted for t in texts)), 4)
        return found

    def engine(self, mode: str, threshold: float | None, rows: int = 1, **options: Any) -> dict[str, Any]:
        """The same prompts in the engine, one after the other or `rows` at a time: milliseconds between a sequence's tokens
        and for a text (prompt and waiting for the last token included), and tokens per second of all. `options` are the
        engine's."""
        exiting = None if mode == "full" else self.exiting(mode, threshold)
        sizes = {"batch_size": rows, "max_sequences": rows} | options
        engine = Engine(
            self.model, max_length=PROMPT + self.new, prefix_caching=False, penalties=False, max_logprobs=0, exiting=exiting,
            **sizes,
        )  # fmt: skip
        sampling = Sampling(max_new_tokens=self.new, ignore_eos=True)

        def texts(number: int) -> tuple[list[Result], float]:
            prompts = [self.prompts[i % PROMPTS] for i in range(max(PROMPTS, rows))]
            work = [Request(id=1000 * number + i, prompt=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
            finish(self.device)
            begun = time.perf_counter()
            found = engine.run(work) if rows > 1 else [result for one in work for result in engine.run([one])]
            return found, time.perf_counter() - begun

        for number in range(3):
            texts(number)  # kernels are compiled, and drafting settles
        rounds = [texts(3 + number) for number in range(3)]
        times = [statistics.mean(r.mean_inter_token_time or 0.0 for r in results) for results, _ in rounds]
        results, _ = rounds[0]
        depths = [depth for r in results for depth in r.depths or ()]
        return {
            "ms_per_token": round(1e3 * statistics.median(times), 4),
            "ms_per_text": round(1e3 * statistics.median(s / max(PROMPTS, rows) for _, s in rounds), 3),
            "tokens_per_s": round(statistics.median(sum(len(r.tokens) for r in found) / s for found, s in rounds), 1),
            "exit_rate": round(sum(depth <= self.exit_layer for depth in depths) / max(1, len(depths)), 4),
            "drafted": sum(r.drafted for r in results),
            "tokens": [list(r.tokens) for r in results[:PROMPTS]],
        }

    def where(self, mode: str, threshold: float | None, most: int) -> list[dict[str, Any]]:
        """The kernels that take longest, prefill included: milliseconds and calls for each token."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiling

        with profiling(activities=[ProfilerActivity.CUDA]) as trace:
            tokens = sum(len(text.tokens) for text in self.texts(mode, threshold))
            torch.cuda.synchronize()
        events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
        return [
            {
                "kernel": event.key[:80],
                "ms_per_token": round(event.self_device_time_total / 1e3 / tokens, 4),
                "calls_per_token": round(event.count / tokens, 2),
                "us_each": round(event.self_device_time_total / max(1, event.count), 1),
            }
            for event in events[:most]
        ]


def run(args: argparse.Namespace) -> None:
    bench = Bench(args)
    a = bench.architecture
    record: dict[str, Any] = {
        "environment": environment(),
        "shape": {"layers": a.layers, "hidden": a.hidden, "vocab": a.vocab, "exit_layer": bench.exit_layer},
        "weights_gb": round((a.layers * bench.layer_bytes + bench.head_bytes) / 1e9, 3),
        "reading_gb_per_s": round(bench.speed / 1e9, 1),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT,
        "new_tokens": bench.new,
        "max_stack": args.max_stack,
        "deep_scale": args.quiet,
        "packed": args.pack,
    }

    def note(name: str, mode: str, threshold: float | None) -> None:
        record[name] = bench.measure(mode, threshold)
        record[name]["speedup"] = round(record["full"]["ms_per_token"] / record[name]["ms_per_token"], 3)
        print(name, record[name], flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    def engine_note(mode: str, threshold: float | None, rows: int, **options: Any) -> None:
        name = f"engine, {mode}" + (f", {rows} rows" if rows > 1 else "")
        name += "".join(f", {option} {value}" for option, value in options.items())
        found = bench.engine(mode, threshold, rows, **options)
        free_memory()
        full = record.get("engine, full" + (f", {rows} rows" if rows > 1 else ""), found)
        if mode != "full":
            found["speedup"] = round(full["ms_per_token"] / found["ms_per_token"], 3)
            found["same_text_as_full"] = found["tokens"] == engine_texts[rows]
        engine_texts.setdefault(rows, found["tokens"])
        record[name] = {key: value for key, value in found.items() if key != "tokens"}
        if rows == 1 and mode in record:
            record[name]["against_captured"] = round(record[mode]["ms_per_token"] / found["ms_per_token"], 3)
            record[name]["text_against_captured"] = round(record[mode]["ms_per_text"] / found["ms_per_text"], 3)
        print(name, record[name], flush=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    engine_texts: dict[int, list[list[int]]] = {}
    for mode in ("full", "static"):
        if mode in args.captured:
            note(mode, mode, None)
    for rate in args.only or RATES:
        threshold = args.threshold or bench.threshold_for("parallel", rate)
        note("parallel" if rate == MAIN_RATE else f"parallel, {rate:.0%} leave", "parallel", threshold)
    threshold = record["parallel"]["threshold"]
    if args.profile:
        record["where_parallel"] = bench.where("parallel", threshold, args.profile)
        for line in record["where_parallel"]:
            print(line, flush=True)
    if "speculative" in args.captured:
        note("speculative", "speculative", threshold)
    if "state-copy" in args.captured:
        note("state-copy", "state-copy", bench.threshold_for("state-copy", MAIN_RATE))
    bench.free_captured()
    for rows in args.rows:
        for mode in args.modes:
            waits = mode in ("parallel", "speculative")
            for stack in args.stacks if waits and rows == 1 else [rows]:
                engine_note(mode, threshold, rows, **({"batch_size": stack} if stack > rows else {}))


def table(record: dict[str, Any]) -> str:
    where, shape = record["environment"], record["shape"]
    lines = [
        "# One row: time for a token, by how tokens leave",
        "",
        f"{where['device']}, torch {where['torch']}, {where['date']}. {shape['layers']} layers of width {shape['hidden']}, "
        f"{record['weights_gb']} GB of bfloat16 weights",
        f"(random, the layers behind the exit scaled by {record['deep_scale']}), exit after layer {shape['exit_layer']}. "
        f"{record['prompts']} prompts of {record['prompt_tokens']} tokens, {record['new_tokens']} new each, greedy.",
        f"Compiled layers, captured graphs. Floor: the weights that were read, at {record['reading_gb_per_s']} GB/s, this "
        "device's own reading speed.",
        "",
        "| mode | ms a token | speed against full | tokens that left | deep passes a token | floor, ms | of the floor |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in record.items():
        if isinstance(found, dict) and "ms_per_token" in found:
            drafts = f" ({found['accepted']:.0%} of drafts kept)" if "accepted" in found else ""
            lines.append(
                f"| {name}{drafts} | {found['ms_per_token']:.3f} | {found['speedup']:.2f} | {found['exit_rate']:.1%} | "
                f"{found['deep_passes_per_token']:.2f} | {found['floor_ms']:.3f} | {found['of_floor']:.0%} |"
            )
    notes = [
        "",
        "static never runs the layers behind the exit. parallel and state-copy keep what the exit chose: their tokens are",
        "not full's. speculative's are.",
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
    running.add_argument("--pack", action=argparse.BooleanOptionalAction, default=True, help="fewer, larger matrices")
    running.add_argument("--only", nargs="*", help="rates of parallel decoding to measure, as parts of 1", type=float)
    running.add_argument("--threshold", type=float, help="of parallel decoding, instead of searching for it")
    running.add_argument("--rows", nargs="*", type=int, default=[1], help="sequences at a time in the engine")
    running.add_argument(
        "--modes", nargs="*", default=["full", "static", "parallel", "speculative"], help="modes to run in the engine"
    )
    running.add_argument("--stacks", nargs="*", type=int, default=[16], help="one row: tokens per forward pass with exits")
    modes = ["full", "static", "parallel", "speculative", "state-copy"]
    running.add_argument(
        "--captured", nargs="*", choices=modes, default=modes, help="modes of captured steps; parallel always"
    )
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
