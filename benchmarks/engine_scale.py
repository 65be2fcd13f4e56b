"""The engine at every batch size: plain, routed and exiting models, end to end and the device alone.

    python benchmarks/engine_scale.py --out engine_scale.json --minutes 9        # again, until nothing is left
    python benchmarks/engine_scale.py --draw engine_scale.json [--docs docs/engine.md]  # engine_scale.png and .md beside it
    python benchmarks/engine_scale.py --out engine_weights.json --parts rows --only vanilla --weights bf16 int8 fp8
        --rows 1 8 [--shape 1.7b]

Weights are random, and depths are drawn from what routers are trained for ("forced"), as in engine_throughput.py, whose
workload this is: prompts of one token, output lengths normal around 256. `exits` is two loops of one block, which half of
the tokens leave after the first, with exact fill. Every model gets as many rows as asked and memory for all of its
sequences; equal memory is a comparison of its own, in which each side has as many rows as are best for it.
`host_us_per_token` is what the loop takes end to end for a token above what the device takes when decode steps of a full
batch are launched back to back: the host, and rows that are empty at the end of the workload. The floor is the weights,
read once for each pass, and the KV cache that the step's tokens read. `--weights` compares weights of one byte with the
model's own; `speedup` is then against the plain model's own weights. What they cost in loss is measured in cpu_decode.py.

The record grows over several calls: every cell is written when it is measured, one that is there is not measured again, one
that fails is noted and the others go on (exit status 1). What the benchmark was written to show comes first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import engine_scale_parts as parts
import torch
from engine_scale_page import draw, page, quoted
from engine_scale_parts import MODELS, WEIGHTS, ScaleBench
from engine_scale_record import Record, bar_rows, open_record, source_hash, write_record
from engine_throughput import LONGEST

import fathomlm
from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import FathomError, OptionError
from fathomlm.jsonfile import read_object
from fathomlm.lab.bench.floor import finish
from fathomlm.lab.common import environment

PARTS = {
    "rows": 20,
    "same-bytes": 20,
    "prefill": 20,
    "one": 20,
    "long": 45,
    "bundled": 25,
    "poisson": 40,
    "nano-vllm": 25,
    "peer": 60,
    "bursts": 40,
}
"""The parts, and seconds that a cell of each is thought to take before one was measured."""
ASIDE = ("bursts",)
"""Parts that are measured only where they are asked for."""
SAME_BYTES = {"vanilla": (112, 96, 128), "mor3": (112, 128), "mor4": (112, 128)}
BEYOND = (("mor3", 144), ("mor4", 144), ("mor3", 96), ("mor4", 96), ("vanilla", 80))
"""Rows to try where memory is what is equal, on both sides of what was best for each; those beyond come last."""
LONG = (("vanilla", 512), ("mor3", 256), ("mor3", 512), ("vanilla", 256))
BUNDLED = ((512, 16), (1024, 64), (256, 16), (2048, 64))
"""Rows, and tokens of a page: with many sequences the host has less to do where pages are long."""
NANO = (("vanilla", 256), ("mor3", 256), ("vanilla", 128), ("mor3", 128))
GRAPHS = {"use_cuda_graph": True}
PEERS: dict[str, tuple[int, Record, bool]] = {
    "256, sized": (256, {}, True),
    "256, sized, graphs": (256, GRAPHS, True),
    "256, sized, graphs, async": (256, GRAPHS | {"use_async_batching": True}, True),
    "256": (256, {}, False),
}
"""transformers' continuous batching: rows, settings, and whether its cache is for these requests only."""


@dataclass(frozen=True)
class Cell:
    """What is measured and written as one."""

    name: str
    part: str
    measure: Callable[[ScaleBench], None]

    def expected(self, seconds: Record) -> float:
        """Seconds: somewhat more than cells of its part took so far, of which the first had kernels to compile."""
        known = [spent for name, spent in seconds.items() if name.split()[0] == self.part]
        return 1.25 * statistics.median(known) if known else PARTS[self.part]


def rows_cell(name: str, rows: int, weights: str = WEIGHTS[0]) -> Cell:
    label = f"rows {name} {rows}" + (f" {weights}" if weights != WEIGHTS[0] else "")
    return Cell(label, "rows", partial(parts.measure, name=name, rows=rows, weights=weights))


def cells(args: argparse.Namespace) -> list[Cell]:
    """All that was asked for, in order: first what the benchmark was written to show, last what may be left out."""

    def tried(part: str, measure: Callable[..., None], each: Sequence[tuple[str, int]]) -> list[Cell]:
        each = list(dict.fromkeys((name, 4) for name, _ in each)) if args.tiny else list(each)
        return [Cell(f"{part} {name} {rows}", part, partial(measure, name=name, rows=rows)) for name, rows in each]

    rows_first = sorted(args.rows, key=lambda rows: (rows != 256, rows))
    sweep = [rows_cell(name, rows, weights) for rows in rows_first for name in args.only for weights in args.weights]
    first = [cell for cell in sweep if cell.name in ("rows vanilla 256", "rows mor3 256")]
    same = partial(tried, "same-bytes", parts.same_bytes)
    bundled_rows = ((4, 16),) if args.tiny else BUNDLED
    found = [
        *first,
        *same([(name, rows) for name, each in SAME_BYTES.items() for rows in each]),
        *(Cell(f"one {shape}", "one", partial(parts.single, shape=shape)) for shape in ("360m", "1.7b")),
        *(Cell(f"prefill {cell}", "prefill", partial(parts.prefill, cell=cell)) for cell in parts.PREFILLS),
        *(
            Cell(f"bundled {key} {rows}", "bundled", partial(parts.bundled, key=key, rows=rows, page_size=page))
            for rows, page in bundled_rows
            for key in ("bundled_plain", "bundled")
        ),
        *tried("long", parts.long_outputs, LONG),
        *(cell for cell in sweep if cell not in first),
        *(
            Cell(f"poisson {name}", "poisson", partial(parts.poisson, name=name, rows=4, seconds=0.5))
            if args.tiny
            else Cell(f"poisson {name}", "poisson", partial(parts.poisson, name=name, rows=64, seconds=4.0))
            for name in ("vanilla", "mor3")
        ),
        *tried("nano-vllm", parts.nano_vllm, NANO),
        *(
            Cell(f"peer {label}", "peer", partial(parts.peer, label=label, rows=rows, settings=settings, sized=sized))
            for label, (rows, settings, sized) in PEERS.items()
            if torch.cuda.is_available() or not settings  # graphs are a GPU's
        ),
        *([] if args.tiny else same(BEYOND)),
        *tried("bursts", parts.bursts, [("fathom-mor-23m", rows) for rows in (256, 1024)]),
    ]
    return [cell for cell in found if cell.part in args.parts]


def run(args: argparse.Namespace) -> int:
    begun, wanted = time.perf_counter(), cells(args)
    record = open_record(args.out, head(args), fresh=args.fresh, mixed=args.mixed)
    done, failed = record["seconds"], record["failures"]
    if skipped := [cell.name for cell in wanted if cell.name in done]:
        print(f"measured before: {', '.join(skipped)}", flush=True)
    wanted = sorted((cell for cell in wanted if cell.name not in done), key=lambda cell: cell.name in failed)
    bench = ScaleBench(args, record)
    left_out = []
    for number, cell in enumerate(wanted, 1):
        spent = time.perf_counter() - begun
        if args.minutes is not None and spent + cell.expected(done) > 60 * args.minutes:
            left_out.append(cell.name)
            continue
        print(f"[{number}/{len(wanted)}, {spent:.0f} s] {cell.name}", flush=True)
        if not run_cell(bench, cell):
            left_out += [after.name for after in wanted[number:]]
            break
    if left_out:
        print(f"not begun, call again: {', '.join(left_out)}", flush=True)
    for name, asked, measured, said in bar_rows(record):
        print(f"{name:36}{asked:>10}{measured:>12}  {said}", flush=True)
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def run_cell(bench: ScaleBench, cell: Cell) -> bool:
    """Whether the device is well afterwards: what a failed kernel leaves behind fails everything after it."""
    record, begun = bench.record, time.perf_counter()
    record["failures"][cell.name] = "stopped before its end"
    write_record(record, bench.args.out)
    try:
        cell.measure(bench)
    except Exception as error:  # it must not take the others with it
        record["failures"][cell.name] = f"{type(error).__name__}: {error}"[:400]
        traceback.print_exc()
    else:
        record["seconds"][cell.name] = round(time.perf_counter() - begun, 1)
        del record["failures"][cell.name]
    write_record(record, bench.args.out)
    try:
        bench.clear()
        finish(bench.device)
    except RuntimeError as error:
        print(f"the device failed, so the rest is for another call: {error}", file=sys.stderr, flush=True)
        return False
    return True


def head(args: argparse.Namespace) -> Record:
    """What is run and where; a record of something else is not continued."""
    here, package = Path(__file__).resolve().parent, Path(fathomlm.__file__).parent
    own = ("engine_scale.py", "engine_scale_parts.py", "engine_scale_record.py", "engine_throughput.py")
    files = [*package.rglob("*.py"), *(here / name for name in own)]
    names = ("shape", "rounds", "mean", "overbook", "tiny")
    gpu = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None
    return {
        "environment": environment(),
        "gpu": gpu,
        "source": source_hash(files),
        "commit": args.commit or _commit(here),
        "settings": {name: getattr(args, name) for name in names} | {"longest": LONGEST, "exit_rate": parts.EXIT_RATE},
    }


def _commit(folder: Path) -> str | None:
    """None where this is not a git checkout."""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def draw_record(path: Path, docs: Path | None) -> int:
    record = dict(read_object(path, error=OptionError, nonfinite=True).values)
    draw(record, path.with_suffix(".png"))
    with whole_file(path.with_suffix(".md")) as temporary:
        temporary.write_text(page(record, path.with_suffix(".png").name))
    if docs is not None:
        text = quoted(docs.read_text(), record, os.path.relpath(path, docs.parent))
        with whole_file(docs) as temporary:
            temporary.write_text(text)
    print(", ".join(str(one) for one in (path.with_suffix(".png"), path.with_suffix(".md"), docs) if one))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="the record; one that is there is continued")
    add("--draw", type=Path, metavar="RECORD", help="draw a record and write its page, beside it")
    add("--docs", type=Path, metavar="FILE", help="with --draw: a page whose figures are written anew, between its marks")
    add("--minutes", type=float, help="no cell is begun that would not end within these")
    add("--fresh", action="store_true", help="begin a new record in place of the one that is there")
    add("--mixed", action="store_true", help="continue a record of another source or GPU, which it then says")
    add("--commit", metavar="HASH", help="for the record, where this is not a git checkout")
    add("--only", nargs="*", choices=MODELS, default=list(MODELS), help="models of the part `rows`")
    add("--rows", nargs="*", type=int, default=[1, 32, 128, 256, 512])
    add("--weights", nargs="*", choices=WEIGHTS, default=WEIGHTS[:1])
    add("--shape", choices=["360m", "1.7b"], default="360m")
    add("--rounds", type=int, default=8, help="requests for each sequence in flight")
    add("--mean", type=float, default=256.0, help="new tokens of a request")
    add("--overbook", type=float, default=2.0, help="sequences in flight for each row, where tokens differ in depth")
    add("--profile", type=int, default=10, help="kernels to list")
    add(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=[part for part in PARTS if part not in ASIDE],
        help="what to measure; default: all but bursts",
    )
    add("--tiny", action="store_true", help="a tiny model, to try the script out")
    args = parser.parse_args()
    if (args.out is None) == (args.draw is None):
        parser.error("one of --out and --draw is needed")
    args.requests = args.rounds
    try:
        return draw_record(args.draw, args.docs) if args.draw else run(args)
    except FathomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
