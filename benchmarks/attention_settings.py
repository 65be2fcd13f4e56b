"""Settings of attention over pages, compared: decoding rows, and prompts that are read.

    python benchmarks/attention_settings.py --out attention_settings.json [--seconds 100] [--cases "360M 32 8192"]

Shapes are those of SmolLM-360M and 1.7B in bfloat16, rows and contexts those of engine_scale.py: `short` contexts are of
requests of about 256 new tokens, somewhere on their way; `even` ones are all of 150 tokens; `long` ones are between 512 and
2,560; `8192` ones are all of so many, for which 32 rows must be split to fill the GPU. The floor of decoding rows is their
entries, read once at the bandwidth that a copy reaches; that of prompts is the arithmetic, two products over the half of
all pairs that is seen, at 989 TFLOP/s. A layer of decoding rows is timed as a whole, too, products included. Every
candidate is first compared with the plain twin. Calls are captured in a graph and go around copies that do not fit into the
cache; kernels are compiled on all cores first. A table shows the settings in use (*) and the best others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compile_ahead import compile_ahead
from torch import Tensor

from fathomlm.kernels.attention_blocks import (
    AttentionBlocks,
    attention_blocks,
    choose_splits,
    prefill_blocks,
    workspace_size,
)
from fathomlm.kernels.paged_attention import plain_paged_attention
from fathomlm.kernels.prefill_attention import prefill_attention
from fathomlm.kernels.row_attention import attend_rows
from fathomlm.kernels.wide_rows import gate_rows, turn_rows, wide_add_linear, wide_norm_gated
from fathomlm.lab.common import environment

PAGE, EPS, COLD, FLOPS = 16, 1e-5, 200e6, 989e12
SHAPES = {"360M": (960, 2560, 15, 5, 64), "1.7B": (2048, 8192, 32, 32, 64)}
"""Hidden width, inner width, query heads, key-value heads, head width."""
CASES = [
    ("360M", 256, "short"), ("360M", 256, "even"), ("360M", 64, "short"), ("360M", 512, "short"), ("360M", 256, "long"),
    ("1.7B", 64, "long"), ("1.7B", 256, "short"), ("360M", 32, "8192"), ("1.7B", 32, "8192"),
]  # fmt: skip
LONGEST = {"short": 512, "even": 512, "long": 2562, "8192": 8192}
"""The most tokens of a sequence, by kind of context: splits and the width of page tables follow from it."""
PROMPTS = [("1.7B", 4, 2046), ("360M", 16, 512)]
GATING = [(1024, 4), (512, 4), (512, 2), (1024, 8), (2048, 8), (4096, 8)]
"""Columns and warps of a program of the pass behind gate and up."""
MOST_SPLITS, VOCAB = 8, 49152
NEAR = 2**-6
"""By how much of the largest number a candidate may be off, in bfloat16."""

Record = dict[str, Any]


class Setting(NamedTuple):
    blocks: AttentionBlocks
    splits: int = 1

    def told(self) -> Record:
        return {**self.blocks._asdict(), "splits": self.splits}


def candidates(shape: str) -> list[Setting]:
    """Tiles of entries, warps, stages and splits. `ahead` and `beside`, each of which is also tried without the other."""
    tiles = [
        (16, 1, 4), (16, 1, 8), (32, 1, 2), (32, 1, 3), (32, 1, 4), (32, 1, 6), (64, 1, 2), (64, 1, 3), (64, 1, 4),
        (32, 2, 3), (32, 2, 4), (32, 2, 6), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4),
        (128, 4, 2), (128, 4, 3),
    ]  # fmt: skip
    if shape != "360M":
        tiles = [tile for tile in tiles if tile in ((16, 1, 8), (32, 1, 4), (64, 1, 3), (32, 2, 4), (64, 2, 3), (128, 4, 3))]
    new = partial(AttentionBlocks, ahead=True, beside=True)
    found = [Setting(new(*tile)) for tile in tiles]
    found += [
        Setting(new(32, 2, 4, ahead=False)),
        Setting(new(32, 2, 4, beside=False)),
        Setting(new(32, 1, 4, beside=False)),
    ]
    split = [tile for tile in tiles if tile in ((32, 1, 4), (64, 1, 3), (64, 2, 3), (128, 4, 3))]
    return found + [Setting(new(*tile), splits) for tile in split for splits in (2, 4, 8)]


def prefill_candidates() -> list[AttentionBlocks]:
    tiles = [
        (64, 4, 3, 128), (64, 4, 2, 128), (64, 8, 3, 128), (64, 8, 4, 128), (128, 8, 2, 128), (128, 8, 3, 128),
        (32, 4, 4, 128), (64, 4, 3, 64), (64, 4, 4, 64), (128, 4, 2, 64), (128, 4, 3, 64), (64, 8, 3, 256),
        (64, 16, 3, 256), (128, 16, 2, 256),
    ]  # fmt: skip
    return [AttentionBlocks(*tile, ahead=True) for tile in tiles]


def in_use(shape: str, rows: int, longest: int) -> Setting:
    _, _, _, G, D = SHAPES[shape]
    return Setting(attention_blocks(D, 2, rows * G), choose_splits(rows, G, longest))


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def contexts(rows: int, kind: str) -> list[int]:
    draw, found = random.Random(0), list[int]()
    while len(found) < rows:
        if kind == "even":
            found.append(150)
        elif kind == "8192":
            found.append(8192)
        elif kind == "long":
            found.append(draw.randint(512, 2560))
        elif (whole := draw.gauss(256, 64)) > 2 and draw.random() < whole / 512:  # long requests are there for longer
            found.append(draw.randint(1, min(512, int(whole))))
    return found


@dataclasses.dataclass(frozen=True)
class Rows:
    """Decoding rows of one shape, with copies of their pages."""

    shape: str
    lengths: Sequence[int]
    copies: list[tuple[Tensor, Tensor]]
    table: Tensor
    lengths_N: Tensor
    slots_N: Tensor
    product_NWD: Tensor
    x_NM: Tensor
    angles: tuple[Tensor, Tensor]
    out: Tensor
    space: tuple[Tensor, Tensor]
    """For splits: what each finds, and how many have."""

    @classmethod
    def build(cls, shape: str, lengths: Sequence[int], most_copies: int = 64, longest: int = 2560) -> Rows:
        M, _, H, G, D = SHAPES[shape]
        N, needs = len(lengths), [-(-length // PAGE) for length in lengths]
        total = sum(needs) + 1
        copies = max(1, min(most_copies, round(COLD / (4 * sum(lengths) * G * D) + 0.5)))
        order = torch.randperm(total - 1).split(needs)
        table = torch.zeros(N, -(-longest // PAGE), dtype=torch.int32)
        for row, mine in enumerate(order):
            table[row, : len(mine)] = mine
        at = [int(table[row, (n - 1) // PAGE]) * PAGE + (n - 1) % PAGE if n else -1 for row, n in enumerate(lengths)]
        angle = torch.randn(N, D // 2, device="cuda")
        cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
        return cls(
            shape, lengths, [(bf16(total, PAGE, G, D), bf16(total, PAGE, G, D)) for _ in range(copies)], table.cuda(),
            torch.tensor(lengths, dtype=torch.int32).cuda(), torch.tensor(at).cuda(), bf16(N, H + 2 * G, D), bf16(N, M),
            (cos.bfloat16(), sin.bfloat16()), bf16(N, H, D),
            (
                torch.empty(workspace_size(N, H, D, MOST_SPLITS), device="cuda"),
                torch.zeros(N * G, dtype=torch.int32, device="cuda"),
            ),
        )  # fmt: skip

    @property
    def moved(self) -> int:
        _, _, _, G, D = SHAPES[self.shape]
        return 4 * sum(self.lengths) * G * D

    def call(self, setting: Setting, copy: int = 0) -> Tensor:
        _, _, H, _, D = SHAPES[self.shape]
        pages, blocks, splits = self.copies[copy], setting.blocks, setting.splits
        seen = (*pages, self.table, self.lengths_N, D**-0.5, None, splits, self.space[0])
        return attend_rows(self.product_NWD[:, :H], *seen, out=self.out, arrived=self.space[1], blocks=blocks)


@dataclasses.dataclass(frozen=True)
class Prompts:
    shape: str
    count: int
    length: int
    q_NHD: Tensor
    seen: tuple[Tensor, ...]

    @classmethod
    def build(cls, shape: str, count: int, length: int) -> Prompts:
        _, _, H, G, D = SHAPES[shape]
        pages = -(-length // PAGE)
        table = torch.randperm(count * pages, device="cuda").int().view(count, pages)
        sequence = torch.arange(count, device="cuda").repeat_interleave(length)
        lengths = (torch.arange(length, device="cuda") + 1).repeat(count).int()
        k, v = bf16(count * pages, PAGE, G, D), bf16(count * pages, PAGE, G, D)
        return cls(shape, count, length, bf16(count * length, H, D), (k, v, table[sequence].contiguous(), lengths, sequence))

    def call(self, blocks: AttentionBlocks) -> Tensor:
        return prefill_attention(self.q_NHD, *self.seen, self.q_NHD.shape[2] ** -0.5, blocks=blocks)  # type: ignore[arg-type]

    @property
    def flops(self) -> float:
        _, _, H, _, D = SHAPES[self.shape]
        return 2 * self.count * H * D * float(self.length) ** 2


def timed(calls: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Microseconds a call, the median of some replays of all of them."""
    for call in calls[:1]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / len(calls))
    return sorted(found)[replays // 2]


def bandwidth() -> float:
    """Bytes a second that a copy of half a gigabyte reads and writes."""
    a, b = (torch.empty(2**28, device="cuda", dtype=torch.int8) for _ in range(2))
    return 2 * 2**28 / (timed([lambda: a.copy_(b)] * 4) * 1e-6)


def wrong(rows: Rows, setting: Setting) -> float:
    """How far a candidate is from the plain twin, as a part of the largest number."""
    _, _, H, _, D = SHAPES[rows.shape]
    k, v = rows.copies[0]
    seen = (rows.table, rows.lengths_N, D**-0.5)
    return off(rows.call(setting), plain_paged_attention(rows.product_NWD[:, :H].float(), k.float(), v.float(), *seen))


def off(fast: Tensor, slow: Tensor) -> float:
    return float((fast.float() - slow.float()).abs().max() / slow.float().abs().max())


def case_name(case: tuple[str, int, str]) -> str:
    return " ".join(map(str, case))


def compile_some(number: int, workers: int, *, shapes: Sequence[str], all_else: bool) -> None:
    """In a process of its own: leaves what it compiled in Triton's cache. What fails is told by the measurement. `all_else`:
    prompts and the pass behind gate and up, too."""
    jobs: list[Callable[[], Any]] = []
    for shape in shapes:
        rows = Rows.build(shape, [40] * 80, most_copies=1)
        settings = [*candidates(shape), in_use(shape, 256, 512)]
        jobs += [lambda rows=rows, one=one: rows.call(one) for one in settings]  # type: ignore[misc]
        if not all_else:
            continue
        some = Prompts.build(shape, 1, 160)
        jobs += [lambda some=some, one=one: some.call(one) for one in [*prefill_candidates(), prefill_blocks(64)]]  # type: ignore[misc]
    M, inner, *_ = SHAPES["360M"]
    product, x = bf16(80, 2 * inner), bf16(80, M)
    if all_else:
        jobs += [partial(gate_rows, product, x, EPS, None, *one) for one in GATING]
    random.Random(1).shuffle(jobs)
    for job in jobs[number::workers]:
        with contextlib.suppress(Exception):
            job()
    torch.cuda.synchronize()


def sweep_rows(case: tuple[str, int, str], speed: float, bad: set[Setting]) -> Record:
    shape, count, kind = case
    lengths, longest = contexts(count, kind), LONGEST[kind]
    rows = Rows.build(shape, lengths, longest=max(longest, 2560))
    floor, found = 1e6 * rows.moved / speed, list[Record]()
    usual = in_use(shape, count, longest)
    for setting in dict.fromkeys([usual, *candidates(shape)]):
        if setting in bad:
            continue
        try:
            us = timed([lambda n=n, s=setting: rows.call(s, n) for n in range(len(rows.copies))])  # type: ignore[misc]
        except Exception as error:
            found.append({**setting.told(), "error": str(error)[:200]})
            continue
        found.append({**setting.told(), "us": round(us, 2), "in_use": setting == usual})
    return {"case": f"{shape} {count} {kind}", "floor_us": round(floor, 2), "mean": sum(lengths) / count, "tried": found}


def show(record: Record, most: int = 3) -> None:
    timed_ = sorted((one for one in record["tried"] if "us" in one), key=lambda one: one["us"])
    for one in [one for one in timed_ if one["in_use"]] + [one for one in timed_ if not one["in_use"]][:most]:
        tile = f"entries {one['entries']} warps {one['warps']} stages {one['stages']} splits {one['splits']}"
        mark, share = "*" if one["in_use"] else " ", record["floor_us"] / one["us"]
        how = " ahead" * one["ahead"] + " beside" * one["beside"]
        print(f"{mark} {record['case']:15} {one['us']:7.2f} us {share:6.1%}  {tile}{how}")
    for one in [one for one in record["tried"] if "error" in one][:2]:
        print("!", record["case"], one)


def sweep_prompts(case: tuple[str, int, int]) -> Record:
    shape, count, length = case
    prompts, found, usual = Prompts.build(shape, count, length), list[Record](), prefill_blocks(64)
    floor, wanted = 1e6 * prompts.flops / FLOPS, prompts.call(usual)
    small = Prompts.build(shape, 2, 300)
    near = plain_paged_attention(small.q_NHD.float(), *(t.float() for t in small.seen[:2]), *small.seen[2:4], 64**-0.5)  # type: ignore[arg-type]
    for blocks in dict.fromkeys([usual, *prefill_candidates()]):
        try:
            error = max(off(small.call(blocks), near), off(prompts.call(blocks), wanted))
            us = timed([lambda b=blocks: prompts.call(b)] * 3, 3)  # type: ignore[misc]
        except Exception as problem:
            found.append({**blocks._asdict(), "error": str(problem)[:200]})
            continue
        found.append({**blocks._asdict(), "us": round(us, 1), "off": round(error, 5), "in_use": blocks == usual})
    best = sorted((one for one in found if "us" in one and one["off"] < NEAR), key=lambda one: one["us"])
    for one in [one for one in best if one["in_use"]] + [one for one in best if not one["in_use"]][:4]:
        tile = f"queries {one['queries']} entries {one['entries']} warps {one['warps']} stages {one['stages']}"
        mark, speed = "*" if one["in_use"] else " ", prompts.flops / one["us"] * 1e-6
        print(
            f"{mark} {shape} {count} x {length:4} {one['us']:8.1f} us {speed:4.0f} TFLOP/s  {tile}{' ahead' * one['ahead']}"
        )
    for one in [one for one in found if "error" in one or one["off"] >= NEAR][:3]:
        print("!", shape, one)
    return {"case": f"{shape} {count} x {length}", "floor_us": round(floor, 1), "tried": found}


def sweep_layer(count: int = 256) -> Record:
    """A layer with its products, one kernel behind the other."""
    M, inner, H, G, D = SHAPES["360M"]
    rows = Rows.build("360M", contexts(count, "short"))
    layers = [
        (bf16((H + 2 * G) * D, M) * 0.03, bf16(M, H * D) * 0.03, bf16(2 * inner, M) * 0.03, bf16(M, inner) * 0.03)
        for _ in range(16)
    ]
    stream = bf16(count, M)

    def layer(n: int) -> None:
        qkv, o, both, down = layers[n]
        pages, seen = rows.copies[n % len(rows.copies)], (rows.table, rows.lengths_N, D**-0.5)
        product = torch.mm(stream, qkv.T).view(count, -1, D)
        q_NHD = turn_rows(product, stream, EPS, H, G, *rows.angles, *pages, rows.slots_N, 1.0, 1.0, None)
        wide_add_linear(stream, attend_rows(q_NHD, *pages, *seen).flatten(1), o, stream)
        wide_add_linear(stream, wide_norm_gated(stream, both, EPS, None), down, stream)

    us = timed([partial(layer, n) for n in range(15)])
    print(f"  a layer, {count} rows {us:7.2f} us")
    return {"rows": count, "us": round(us, 2)}


def sweep_products(count: int = 256) -> list[Record]:
    """The library's products of a layer and of the head, by both of its ways in; and the pass behind gate and up."""
    M, inner, H, G, D = SHAPES["360M"]
    shapes = {
        "qkv": ((H + 2 * G) * D, M),
        "o": (M, H * D),
        "gate, up": (2 * inner, M),
        "down": (M, inner),
        "head": (49152, M),
    }
    found = list[Record]()
    for name, (width, depth) in shapes.items():
        x, stream = bf16(count, depth), bf16(count, width)
        weights = [bf16(width, depth) for _ in range(max(2, round(COLD / (2 * width * depth))))]
        one: Record = {"product": name}
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            product = stream.addmm_ if name in ("o", "down") else torch.mm
            one[library] = round(timed([partial(product, x, weight.T) for weight in weights]), 2)
        torch.backends.cuda.preferred_blas_library("default")
        found.append(one)
    x, gated = bf16(count, M), Record(product="gating")
    products = [bf16(count, 2 * inner) for _ in range(40)]
    for block, warps in GATING:
        calls = [partial(gate_rows, one, x, EPS, None, block, warps) for one in products]
        gated[f"{block} columns, {warps} warps"] = round(timed(calls), 2)
    found.append(gated)
    for one in found:
        print(f"  {one['product']:8}", " ".join(f"{name} {us}" for name, us in one.items() if name != "product"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="for all of it, compiling included")
    parser.add_argument(
        "--cases", default=",".join(map(case_name, CASES)), help="decoding rows to time; with the first case all else, too"
    )
    args = parser.parse_args()
    wanted = [name.strip() for name in args.cases.split(",")]
    if unknown := set(wanted) - set(map(case_name, CASES)):
        parser.error(f"--cases: no case {', '.join(sorted(unknown))}; there are {', '.join(map(case_name, CASES))}")
    cases = [case for case in CASES if case_name(case) in wanted]
    shapes = [shape for shape in SHAPES if any(case[0] == shape for case in cases)]
    begun = time.monotonic()
    compile_ahead(partial(compile_some, shapes=shapes, all_else=CASES[0] in cases), 0.6 * args.seconds)
    speed = bandwidth()
    print(f"compiled in {time.monotonic() - begun:.0f} s; a copy moves {speed / 1e12:.2f} TB/s")
    record: Record = {"environment": environment(), "bytes_per_s": speed, "rows": [], "prompts": []}
    bad: set[Setting] = set()
    for shape in shapes:
        rows = Rows.build(shape, [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 500, 700], most_copies=1)
        for setting in candidates(shape):
            try:
                error = wrong(rows, setting)
            except Exception as problem:
                print("!", shape, setting.told(), str(problem)[:120])
                bad.add(setting)
                continue
            if not error < NEAR:
                bad.add(setting)
                print("! off by", error, shape, setting.told())
    for case in cases:
        if time.monotonic() - begun > 0.95 * args.seconds:
            print("time is up before", case)
            break
        found = sweep_rows(case, speed, bad)
        record["rows"].append(found)
        show(found)
        if case == CASES[0]:
            record["layer"] = [sweep_layer(many) for many in (128, 256, 512)]
            record["products"] = sweep_products()
            for prompts in PROMPTS:
                record["prompts"].append(sweep_prompts(prompts))
    record["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps({"seconds": record["seconds"]}))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
