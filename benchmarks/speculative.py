"""Lossless drafts from a model's own exit in the engine: the same text as full depth, and its speed, by sequences at a time.

    python benchmarks/speculative.py --out speculative.json [--parts smollm2 translator] [--rows 1 8 32]

    smollm2      SmolLM2-135M with the exit that ships for it, asked for 32 short answers, in float32
    smollm2-16   the same in bfloat16, where a pass over several rows rounds otherwise than one over a single row: a near tie
                 may fall the other way
    drafts       SmolLM2-135M with the draft layer that ships for it, in float32; drafts-16 in bfloat16
    translator   a T5 of 6 + 12 layers (float32: a pass of another size must not round otherwise, or texts could differ):
                 with `--translator runs/study/free/last-.../last --sources data/free/translation/test.jsonl` one that the
                 study `free` trained, on sentences; else of its shape with random weights, where what the layers behind the
                 exit add is scaled down, so that exit and full model often agree

Every request is decoded greedily, and its tokens are compared with those at full depth in the same run. The engine drafts
where it has measured that drafting pays (`always_draft` is off): speed is against full depth: the
median over rounds in turn, each with the full one beside it (and the lowest and highest), behind a few rounds in which
kernels are compiled and the engine finds out.

Several processes with a part each and the same `--lock FILE` compile at the same time and measure one after the other.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import fathomlm
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.prompts import chat_prompt, encode_prompt, end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request, Result
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.common import environment, free_memory
from fathomlm.model.encoder import encoder_record
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig
from fathomlm.packaged import packaged_drafts, packaged_exits

Found = TypeVar("Found")
TOPICS = (
    "the tides", "bread", "glaciers", "a violin", "photosynthesis", "the printing press", "chess", "volcanoes", "tea",
    "the moon", "bicycles", "honey bees", "the alphabet", "rainbows", "clocks", "coral reefs", "maps", "paper", "salt",
    "earthquakes", "wool", "the compass", "bridges", "owls", "glass", "deserts", "sleep", "money", "steam engines", "cheese",
    "libraries", "the heart",
)  # fmt: skip
QUIET = 0.05
"""translator with random weights: the scale of what layers behind the exit add."""
ALONE, WARM = 12, 3
"""Requests one at a time, and rounds in front of those that are timed."""
SOURCE = 32
"""Tokens of a sentence that the study's translators read."""


def smollm2(
    args: argparse.Namespace, device: str, dtype: str = "float32", pack: Callable[[str], Path | None] = packaged_exits
) -> tuple[FathomModel, list[list[int]], int, tuple[float, ...]]:
    model = fathomlm.load(args.model, dtype, device, exits=pack("smollm2-135m"))
    asked = [[{"role": "user", "content": f"What is important to know about {topic}?"}] for topic in TOPICS]
    prompts = [encode_prompt(model, chat_prompt(model, one), special=False) for one in asked]
    if model.plan.draft:
        return model, prompts, model.plan.unrolled_layers, (0.0,)
    (exit,) = model.plan.exits
    return model, prompts, exit + 1, args.thresholds


def translator(args: argparse.Namespace, device: str) -> tuple[FathomModel, list[list[int]], int, tuple[float, ...]]:
    if args.translator is None:
        return random_translator(device)
    model = fathomlm.load(args.translator, "float32", device)
    (exit,) = model.plan.exits
    ends = end_tokens(model)
    found = []
    for line in args.sources.read_text(encoding="utf-8").splitlines()[: args.prompts]:
        tokens = [token for token in encode_prompt(model, json.loads(line)["source"]) if token not in ends]
        found.append([*tokens[: SOURCE - 1], min(ends)])  # as in training: the beginning, and a separator
    return model, found, exit + 1, args.thresholds


def random_translator(device: str) -> tuple[FathomModel, list[list[int]], int, tuple[float, ...]]:
    layers, exit_layer = 12, 3
    architecture = Architecture(
        family="t5", layers=layers, hidden=512, intermediate=1024, heads=8, kv_heads=8, head_dim=64, vocab=8192,
        context=512, gated=True, tied_embeddings=True, rotary_fraction=0.0, attention_scale=1.0, positions="relative",
        relative_buckets=32, relative_distance=128, cross=True, memory_width=512,
    )  # fmt: skip
    encoder = {
        "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 8,
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    }  # fmt: skip
    config = FathomSeq2SeqConfig.of(
        architecture, DepthPlan.vanilla(layers), dtype=torch.float32, encoder_config=encoder_record(encoder),
        decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = FathomForSeq2SeqLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.06, generator=generator)
        for layer in model.decoder.layers[exit_layer:]:
            for output in (layer.attn.o, layer.cross.o, layer.mlp.down):
                output.weight.mul_(QUIET)
    sources = torch.randint(2, 8192, (len(TOPICS), 24), generator=generator).tolist()
    return model.to(device).requires_grad_(False), sources, exit_layer, (0.0,)


PARTS = {
    "smollm2": smollm2,
    "smollm2-16": partial(smollm2, dtype="bfloat16"),
    "drafts": partial(smollm2, pack=packaged_drafts),
    "drafts-16": partial(smollm2, dtype="bfloat16", pack=packaged_drafts),
    "translator": translator,
}


class Pair(NamedTuple):
    """Engines for so many sequences, with drafts and without."""

    rows: int
    stack: int
    threshold: float
    engines: dict[str, Engine]


class Bench:
    """One model and its prompts."""

    def __init__(self, args: argparse.Namespace, part: str, device: str) -> None:
        self.new, self.rounds, self.device = args.tokens, args.rounds, torch.device(device)
        self.model, prompts, self.exit_layer, self.thresholds = PARTS[part](args, device)
        self.prompts = prompts[: args.prompts]
        self.sampling = Sampling(max_new_tokens=self.new, ignore_eos=part == "translator" and args.translator is None)

    def engine(self, rows: int, threshold: float | None = None, stack: int = 1) -> Engine:
        """Full depth, or drafts of at most `stack` tokens for each sequence."""
        seq2seq = isinstance(self.model, FathomForSeq2SeqLM)
        longest = max(map(len, self.prompts))
        sizes: dict[str, Any] = {"max_length": self.new + (1 if seq2seq else longest)}
        if seq2seq:
            sizes |= {"max_source": longest}
        exiting, behind = None, self.model.plan.draft
        if threshold is not None:
            where = {} if behind else {"exit_layers": (self.exit_layer,)}
            exiting = Exiting(mode="speculative", threshold=threshold, max_stack=stack, **where)
        return Engine(
            self.model, batch_size=rows if behind else rows * stack, max_sequences=rows, prefix_caching=False,
            penalties=False, max_logprobs=0,
            exiting=exiting, **sizes,
        )  # fmt: skip

    def run(self, engine: Engine, rows: int) -> tuple[list[Result], float]:
        """Every prompt, `rows` at a time: results, and seconds."""
        work = [Request(id=engine.new_id(), prompt=tuple(p), sampling=self.sampling) for p in self.prompts]
        work = work[: ALONE if rows == 1 else None]
        finish(self.device)
        begun = time.perf_counter()
        results = engine.run(work) if rows > 1 else [result for one in work for result in engine.run([one])]
        return results, time.perf_counter() - begun

    def pair(self, rows: int, stack: int, threshold: float) -> Pair:
        engines = {"full": self.engine(rows), "drafts": self.engine(rows, threshold, stack)}
        for _ in range(WARM):
            for engine in engines.values():
                self.run(engine, rows)  # kernels are compiled, and drafting settles
        return Pair(rows, stack, threshold, engines)

    def compare(self, pair: Pair, texts: list[tuple[int, ...]]) -> dict[str, Any]:
        """Full depth and drafts, round by round in turn."""
        rows, stack, threshold, engines = pair
        found: dict[str, list[tuple[list[Result], float]]] = {name: [] for name in engines}
        for number in range(self.rounds):
            for name in sorted(engines, reverse=number % 2 == 0):  # neither is always the first
                found[name].append(self.run(engines[name], rows))
        rated = {
            name: [sum(len(r.tokens) for r in results) / seconds for results, seconds in runs]
            for name, runs in found.items()
        }
        rates = {name: statistics.median(each) for name, each in rated.items()}
        ratios = sorted(ours / full for ours, full in zip(rated["drafts"], rated["full"], strict=True))
        drafted = [result for results, _ in found["drafts"] for result in results]
        alone = [r.tokens for r in found["full"][0][0]]
        ours = [r.tokens for r in found["drafts"][0][0]]
        kept = sum(depth < self.model.plan.unrolled_layers for r in drafted for depth in r.depths or ())
        return {
            "rows": rows,
            "threshold": threshold,
            "batch_size": rows * stack,
            "tokens_per_s": round(rates["drafts"], 1),
            "full_tokens_per_s": round(rates["full"], 1),
            "speed_against_full": round(statistics.median(ratios), 3),
            "rounds_from_to": [round(ratios[0], 3), round(ratios[-1], 3)],
            "requests": len(ours),
            "same_text": sum(a == b for a, b in zip(ours, texts, strict=False)),
            "same_text_as_full_of_these_rows": sum(a == b for a, b in zip(ours, alone, strict=True)),
            "drafted": sum(r.drafted for r in drafted),
            "accepted": kept,
        }

    def full_texts(self) -> list[tuple[int, ...]]:
        """What the full model says: several rows at a time, whose sums do not depend on how many there are."""
        return [r.tokens for r in self.run(self.engine(8), 8)[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--stacks", nargs="*", type=int, default=[4], help="tokens of a sequence that wait for one pass")
    parser.add_argument("--thresholds", nargs="*", type=float, default=[0.3], help="how sure a draft must be")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--translator", metavar="CHECKPOINT", help="a trained one with an exit, in place of random weights")
    parser.add_argument("--sources", type=Path, metavar="FILE", help="JSON lines with its sentences, as `source`")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a request")
    parser.add_argument("--prompts", type=int, default=len(TOPICS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lock", type=Path, metavar="FILE", help="compile beside other processes, measure alone")
    args = parser.parse_args()
    if args.translator is not None and args.sources is None:
        parser.error("--translator requires --sources")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {"environment": environment(), "new_tokens": args.tokens, "prompts": args.prompts}
    failed: list[str] = []

    lock = None if args.lock is None else args.lock.open("w")

    def tried(what: str, measure: Callable[[], Found]) -> Found | None:
        """The device's time is short: what other parts measure is kept where one fails."""
        begun = time.perf_counter()
        try:
            found = measure()
        except Exception:
            failed.append(what)
            traceback.print_exc()
            return None
        said = found if isinstance(found, dict) else "ready"
        print(f"{what} ({time.perf_counter() - begun:.0f} s)", said, flush=True)
        return found

    for part in args.parts:
        bench = Bench(args, part, device)
        record[part] = {"exit_layer": bench.exit_layer, "layers": bench.model.plan.unrolled_layers, "rows": []}
        if part == "translator":
            record[part]["trained"] = args.translator is not None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)  # nobody measures while this is held
        texts = bench.full_texts()
        settings = [
            (rows, stack, threshold) for rows in args.rows for stack in args.stacks for threshold in bench.thresholds
        ]
        pairs = [tried(f"{part}, {one[0]} rows", partial(bench.pair, *one)) for one in settings]
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for pair in pairs:
            if pair is not None and (found := tried(f"{part}, {pair.rows} rows", partial(bench.compare, pair, texts))):
                record[part]["rows"].append(found)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        pairs.clear()
        free_memory()
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)
    if failed:
        raise SystemExit(f"these parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
