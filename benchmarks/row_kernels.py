"""How near the kernels for decoding rows come to the time of reading their weights once.

    python benchmarks/row_kernels.py --out rows.json
    python benchmarks/row_kernels.py --sweep --out sweep.json

Shapes are those of SmolLM-360M, SmolLM-1.7B and Llama-2-7B, in bfloat16. The floor is the bytes that must be read, weights
or entries, at 4.3 TB/s, which this GPU reaches on large copies. Calls are recorded in a graph and go around copies of their
weights that together do not fit into the cache, as a model's layers do. Everything is compiled on all cores first. `--sweep`
also times other block sizes than those in use, some of each kernel's in turn, until its time is up; `--kernels`, `--shapes`
and `--rows` give a few kernels more of it. `--library` times the products by a library beside them, with what stands around
each in a kernel of its own (`wide_rows`), and says from how many rows on that is quicker.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compile_ahead import compile_ahead
from triton.testing import do_bench_cudagraph

from fathomlm.kernels import grouped_lora, paged_write, row_attention, row_linear, row_qkv
from fathomlm.kernels.attention_blocks import (
    MAX_SPLITS,
    AttentionBlocks,
    attention_blocks,
    choose_splits,
    workspace_size,
)
from fathomlm.kernels.row_blocks import Blocks, product_blocks, row_block
from fathomlm.kernels.wide_rows import wide_add_linear, wide_linear, wide_norm_gated, wide_norm_qkv_rope_write
from fathomlm.lab.common import environment

DEVICE, BANDWIDTH, COLD, EPS, PAGE, VOCAB, RANK, DEPTHS = "cuda", 4.3e12, 200e6, 1e-5, 16, 49152, 64, 3
SHAPES = {"360M": (960, 2560, 15, 5, 64), "1.7B": (2048, 8192, 32, 32, 64), "7B": (4096, 11008, 32, 32, 128)}
ALL = SHAPES | {"23M": (512, 1408, 8, 2, 64), "135M": (576, 1536, 9, 3, 64)}
ROWS = (1, 32, 51)
LIBRARY_ROWS = (16, 32, 48, 64, 65, 96, 128, 192, 256)
PRODUCTS = ("qkv", "o", "gated", "down", "head, no norm")
KERNELS = [
    "qkv",
    "qkv, product only",
    "o",
    "gated",
    "down",
    "attention 1024",
    "attention 128",
    "head",
    "head, no norm",
    "lora",
    "write",
]
LAYER = ("qkv", "attention 1024", "o", "gated", "down")
"""What a layer calls, one after the other."""

Variant = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One kernel at one shape and number of rows."""

    kernel: str
    shape: str
    rows: int


@dataclass(frozen=True)
class Bench:
    call: Callable[[int, Variant], Any]
    """Runs on the n-th copy of the weights."""
    moved: int
    """Bytes that one call must read."""
    copies: int


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def build(cell: Cell, most_copies: int = 128) -> Bench:
    if cell.kernel.startswith("attention"):
        return attention(cell, int(cell.kernel.split()[1]), most_copies)
    if cell.kernel == "lora":
        return lora(cell, most_copies)
    if cell.kernel == "write":
        return write(cell)
    width, depth = widths(cell)
    copies = copies_of(2 * width * depth, most_copies)
    weights = [bf16(width, depth) for _ in range(copies)]
    product, library = product_of(cell), by_library(cell)
    return Bench(
        lambda n, variant: library(weights[n]) if variant.get("library") else product(weights[n], variant["blocks"]),
        2 * width * depth, copies,
    )  # fmt: skip


def copies_of(moved: int, most: int) -> int:
    """So many that together they do not fit into the cache."""
    return max(1, min(most, round(COLD / moved)))


def by_library(cell: Cell) -> Callable[[torch.Tensor], Any]:
    """The same by a library's product, and a kernel for what stands around it."""
    (_, _, H, G, D), (width, depth), N = ALL[cell.shape], widths(cell), cell.rows
    x, stream = bf16(N, depth), bf16(N, width)
    if cell.kernel == "qkv":
        cos, sin, pages, slots = bf16(N, D), bf16(N, D), bf16(64, PAGE, G, D), torch.arange(N, device=DEVICE)
        rest = (EPS, H, G, cos, sin, pages, pages, slots, 1.0, 1.0, bf16(N, H, D))
        return lambda weight: wide_norm_qkv_rope_write(x, weight, *rest)
    if cell.kernel == "gated":
        return lambda weight: wide_norm_gated(x, weight, EPS, None)
    if cell.kernel in ("o", "down"):
        return lambda weight: wide_add_linear(stream, x, weight, stream)
    return lambda weight: wide_linear(x, weight, torch.float32, None)


def product_of(cell: Cell) -> Callable[[torch.Tensor, Blocks], Any]:
    """The kernel's call for a weight and settings, everything else bound."""
    (_, inner, H, G, D), (width, depth), N = ALL[cell.shape], widths(cell), cell.rows
    x, stream = bf16(N, depth), bf16(N, width)
    if cell.kernel == "qkv":
        cos, sin, pages, slots = bf16(N, D), bf16(N, D), bf16(64, PAGE, G, D), torch.arange(N, device=DEVICE)
        rest = (EPS, H, G, cos, sin, pages, pages, slots, 1.0, 1.0, bf16(N, H, D))
        return lambda weight, blocks: row_qkv._triton_norm_qkv_rope_write(x, weight, *rest, blocks)
    if cell.kernel == "gated":
        gated = bf16(N, inner)
        return lambda weight, blocks: row_linear._triton_norm_gated(x, weight, EPS, gated, blocks)
    if cell.kernel in ("o", "down"):
        space = row_linear.SplitSpace.build(N, width, DEVICE)
        return lambda weight, blocks: row_linear._triton_add_linear(stream, x, weight, stream, space, blocks)
    logits, scale = torch.empty(N, width, device=DEVICE), cell.kernel == "head"
    return lambda weight, blocks: row_linear._triton_norm_linear(x, weight, EPS, scale, None, logits, blocks)


def widths(cell: Cell) -> tuple[int, int]:
    """Rows and columns of the weight."""
    M, inner, H, G, D = ALL[cell.shape]
    wide = ((H + 2 * G) * D, M)
    return {"qkv": wide, "qkv, product only": wide, "o": (M, H * D), "gated": (2 * inner, M), "down": (M, inner)}.get(
        cell.kernel, (VOCAB, M)
    )


def in_use(cell: Cell) -> Variant:
    """The settings that the kernels choose by themselves."""
    if cell.kernel in ("lora", "write"):
        return {}
    if cell.kernel.startswith("attention"):
        _, _, _, G, D = SHAPES[cell.shape]
        return {"blocks": attention_blocks(D, 2), "splits": choose_splits(cell.rows, G, int(cell.kernel.split()[1]))}
    (width, depth), double = widths(cell), 2 if cell.kernel in ("qkv", "gated") else 1
    shared = cell.kernel in ("o", "down")
    return {"blocks": product_blocks(cell.rows, width // double, depth, 2, weights=double, splits=shared)}


def attention(cell: Cell, length: int, most_copies: int) -> Bench:
    _, _, H, G, D = SHAPES[cell.shape]
    N, needs = cell.rows, -(-length // PAGE)
    moved = 2 * 2 * N * length * G * D
    copies = copies_of(moved, most_copies)
    pages = [[bf16(N * needs, PAGE, G, D) for _ in range(2)] for _ in range(copies)]
    table = torch.randperm(N * needs, device=DEVICE).int().view(N, needs)
    lengths, q, out = torch.full((N,), length, device=DEVICE, dtype=torch.int32), bf16(N, H, D), bf16(N, H, D)
    workspace = torch.empty(workspace_size(N, H, D, MAX_SPLITS), device=DEVICE)

    def call(n: int, v: Variant) -> None:
        row_attention.attend_rows(
            q, *pages[n], table, lengths, D**-0.5, None, v["splits"], workspace, out=out, blocks=v["blocks"]
        )

    return Bench(call, moved, copies)


def lora(cell: Cell, most_copies: int) -> Bench:
    """Over the down projection, rows spread over all depths."""
    M, inner, *_ = SHAPES[cell.shape]
    N = cell.rows
    moved = 2 * min(N, DEPTHS) * RANK * (M + inner)
    copies = copies_of(moved, most_copies)
    factors = [(bf16(DEPTHS, RANK, inner), bf16(DEPTHS, M, RANK)) for _ in range(copies)]
    out, x, depth, scratch = bf16(N, M), bf16(N, inner), torch.arange(N, device=DEVICE) % DEPTHS, bf16(N, RANK)
    add = grouped_lora._triton_add_grouped_lora
    return Bench(lambda n, _: add(out, x, *factors[n], depth, 1.0, scratch), moved, copies)


def write(cell: Cell) -> Bench:
    _, _, _, G, D = SHAPES[cell.shape]
    N = cell.rows
    k, v, pages = bf16(N, G, D), bf16(N, G, D), [bf16(8, PAGE, G, D) for _ in range(2)]
    slots = torch.arange(N, device=DEVICE)
    return Bench(lambda n, _: paged_write._triton_write_entries(k, v, *pages, slots), 8 * N * G * D, 32)


def variants(cell: Cell) -> list[Variant]:
    """Other settings, in an order that mixes them, since there may be time for the first few only."""
    if cell.kernel in ("lora", "write", "head, no norm"):
        return []
    found: list[Variant] = []
    if cell.kernel.startswith("attention"):
        for entries, warps, stages, splits in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (1, 2, 4, 8, 16, 32)):
            found.append({"blocks": AttentionBlocks(entries, warps, stages), "splits": splits})
    else:
        double = 2 if cell.kernel in ("qkv", "gated") else 1
        if cell.rows == 1:
            for depth, tile, warps in itertools.product((256, 512, 1024, 2048), (2, 4, 8, 16), (1, 2, 4, 8)):
                if 4 <= tile * depth // (32 * warps) <= 64:  # entries of a tile that a thread holds
                    found.append({"blocks": Blocks(tile // double, depth, warps, 2)})
        else:
            splits = (1, 2, 4, 8) if cell.kernel in ("o", "down") else (1,)
            deep = ((64, 4), (64, 6), (64, 8), (64, 12), (128, 3), (128, 4), (128, 6))
            for (depth, stages), tile, split, warps in itertools.product(deep, (16, 32, 64, 128), splits, (4, 8)):
                if stages * (row_block(cell.rows) + tile) * depth * 2 <= 220 * 1024:
                    found.append({"blocks": Blocks(tile // double, depth, warps, stages, split)})
    found = [variant for variant in found if variant != in_use(cell)]
    random.Random(0).shuffle(found)
    return found


def compile_some(jobs: list[tuple[Cell, Variant]], number: int, workers: int) -> None:
    """A process' share of the jobs (`compile_ahead`)."""
    for cell, group in itertools.groupby(jobs[number::workers], key=lambda job: job[0]):
        bench = build(cell, most_copies=1)
        for _, variant in group:
            with contextlib.suppress(Exception):  # the measurement will say what is wrong
                bench.call(0, variant)
    torch.cuda.synchronize()


def measure(cell: Cell, bench: Bench, variant: Variant) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": cell.kernel, "shape": cell.shape, "rows": cell.rows, **described(variant)}
    row["in_use"] = variant == in_use(cell)
    try:

        def around() -> None:
            for n in range(bench.copies):
                bench.call(n, variant)

        microseconds = do_bench_cudagraph(around, rep=2, return_mode="median") * 1e3 / bench.copies
    except Exception as error:
        torch.cuda.synchronize()
        return {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    floor = bench.moved / BANDWIDTH * 1e6
    return {**row, "us": round(microseconds, 2), "floor_us": round(floor, 2), "share": round(floor / microseconds, 3)}


def described(variant: Variant) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, tuple) else value for name, value in variant.items()}


def sweep(chosen: dict[Cell, list[Variant]], end: float) -> list[dict[str, Any]]:
    """One variant of every cell, then another, so that each cell had its share when time is up."""
    benches = {cell: build(cell) for cell in chosen}
    turns = [
        (cell, v) for turn in itertools.zip_longest(*chosen.values()) for cell, v in zip(chosen, turn, strict=True) if v
    ]
    found = []
    for cell, variant in turns:
        if time.monotonic() > end:
            print(f"time is up; {len(turns) - len(found)} variants were not measured")
            break
        found.append(measure(cell, benches[cell], variant))
    return found


def show(rows: list[dict[str, Any]], best_of: int) -> None:
    """For each cell the settings in use and the `best_of` fastest others."""

    def key(row: dict[str, Any]) -> tuple[str, str, int]:
        return row["kernel"], row["shape"], row["rows"]

    for (kernel, shape, count), group in itertools.groupby(sorted(rows, key=key), key=key):
        cell = list(group)
        timed = sorted((row for row in cell if "us" in row), key=lambda row: row["us"])
        kept = [row for row in timed if row["in_use"]][:1] + [row for row in timed if not row["in_use"]][:best_of]
        for row in kept:
            mark = "*" if row["in_use"] else " "
            settings = " ".join(f"{k}={v}" for k, v in {**row.get("blocks", {}), "splits": row.get("splits")}.items() if v)
            speed = f"{row['us']:8.2f} us  {row['share']:6.1%} of floor"
            print(f"{mark} {kernel:15} {shape:5} {count:3} rows {speed}  {settings}")
        for row in [row for row in cell if "error" in row][: 1 if timed else 2]:
            print(f"! {kernel:15} {shape:5} {count:3} rows {row['error']}")


def crossings(seconds: float) -> list[dict[str, Any]]:
    """Each product in both ways, and the fewest rows from which on the library is never slower."""
    cells = [Cell(*chosen) for chosen in itertools.product(PRODUCTS, ALL, LIBRARY_ROWS)]
    compile_ahead(partial(compile_some, [(cell, in_use(cell)) for cell in cells]), 0.5 * seconds)
    found = []
    for (kernel, shape), group in itertools.groupby(cells, key=lambda cell: (cell.kernel, cell.shape)):
        tried = []
        for cell in group:
            bench = build(cell)
            own, other = (measure(cell, bench, way) for way in (in_use(cell), {"library": True, "blocks": None}))
            tried.append({"rows": cell.rows, "kernel_us": own.get("us"), "library_us": other.get("us")})
        slower = [one["rows"] for one in tried if (one["kernel_us"] or 1e9) < (one["library_us"] or 1e9)]
        width, depth = widths(cell)
        above = [rows for rows in LIBRARY_ROWS if not slower or rows > slower[-1]]
        first = min(above, default=None)
        found.append({"kernel": kernel, "shape": shape, "width": width, "depth": depth, "from": first, "tried": tried})
        said = " ".join(f"{one['rows']}:{one['kernel_us']}/{one['library_us']}" for one in tried)
        print(f"  {kernel:14} {shape:5} {width:6} x {depth:5} library from {first}: {said}", flush=True)
    return found


def layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A whole layer: its kernels one after the other, with the settings in use."""
    found = []
    for shape, count in itertools.product(SHAPES, ROWS):
        mine = {
            row["kernel"]: row
            for row in rows
            if row["in_use"] and "us" in row and (row["shape"], row["rows"]) == (shape, count)
        }
        if all(name in mine for name in LAYER):
            us, floor = (sum(mine[name][what] for name in LAYER) for what in ("us", "floor_us"))
            found.append({"shape": shape, "rows": count, "us": round(us, 2), "floor_us": round(floor, 2)})
            print(f"  a layer         {shape:5} {count:3} rows {us:8.2f} us  {floor / us:6.1%} of floor")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=55, help="for all of it, compiling included")
    parser.add_argument("--kernels", nargs="*", help="only those whose name begins so")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--library", action="store_true", help="products by a library beside them, and nothing else")
    args = parser.parse_args()
    if args.library:
        found = {"environment": environment(), "products": crossings(args.seconds)}
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    end = time.monotonic() + args.seconds
    wanted = [name for name in KERNELS if not args.kernels or name.startswith(tuple(args.kernels))]
    cells = [Cell(*chosen) for chosen in itertools.product(wanted, args.shapes, args.rows)]
    each = max(1, int(8 * args.seconds / len(cells))) if args.sweep else 0  # about what there is time for
    chosen = {cell: variants(cell)[:each] for cell in cells if args.sweep and variants(cell)}
    jobs = [(cell, variant) for cell in cells for variant in (in_use(cell), *chosen.get(cell, ()))]
    compile_ahead(partial(compile_some, jobs), 0.6 * args.seconds)
    rows = [measure(cell, build(cell), in_use(cell)) for cell in cells]
    show(rows, 0)
    record: dict[str, Any] = {"environment": environment(), "in_use": rows, "layers": layers(rows)}
    if args.sweep:
        record["sweep"] = sweep(chosen, end)
        print("\nbest of the sweep (* in use)")
        show([*record["sweep"], *rows], 3)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
