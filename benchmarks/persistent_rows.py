"""All layers of a decode step of one sequence in one persistent kernel, beside the present kernels: right, and faster?

    python benchmarks/persistent_rows.py --out persistent_rows.json

An experiment: the kernel (`persistent_rows_kernel.py`) was compiled ahead of time for sm_90 but has not run yet. With one
sequence the present kernels spend most of a step between the end of one kernel and the first product of the next
(docs/engine.md, "One persistent kernel for all layers"). An earlier variant that asked for a phase's weights only when the
phase began was no faster; its figures are in benchmarks/results/engine_one_row_h200.json (`persistent_kernel`). This one has
the whole next layer on its way to shared memory all the time. If it gains, it belongs into the engine, with a plain twin and
tests; if not, the record is what is left to keep.

Random layers of SmolLM-360M's shape in bfloat16, no embedding, head or sampling. Both ways are recorded in a graph and
timed, and both are compared with plain torch, which computes in float32 and rounds where the kernels round: the stream
behind the last layer, and the keys and values stored. The persistent kernel is right if its errors are at most twice
those of the present kernels. Exit code 0: right; 1: wrong, or a wait was given up; 2: no Hopper GPU, or no Gluon. Every
wait in the kernel is bounded, and launches behind one that gave up do nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fathomlm.kernels.attention_blocks import choose_splits, workspace_size
from fathomlm.kernels.paged_attention import paged_attention
from fathomlm.kernels.row_linear import SplitSpace, add_linear, norm_gated
from fathomlm.kernels.row_qkv import norm_qkv_rope_write
from fathomlm.lab.common import environment

HIDDEN, INNER, HEADS, GROUPS, HEAD_DIM, LAYERS = 960, 2560, 15, 5, 64, 32
WIDTHS = ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)
"""Rows and columns of a layer's QKV, attention output, gate and up, and down."""
EPS, PAGE, LONGEST, BANDWIDTH = 1e-5, 16, 1024, 4.278e12
"""The bandwidth is what the earlier record's H200 reads at."""
ROWS, PIECE, WARPS, ENTRIES, MOST_SPLITS = 8, 256, 8, 128, 8
"""Rows of a weight that a program takes at a time, entries of a row in a piece, warps, entries of a sequence in a tile of
attention, and the most programs that share a head's entries. A warp has one row of a piece, 16 bytes to a thread."""
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on an H100 or H200."""
NEAR = 2.0
"""The most that the persistent kernel may be off, in errors of the present kernels."""


class Case:
    """Random weights in one piece, pages of one sequence, and everything else that a step needs."""

    def __init__(self, length: int, layers: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        self.length, self.device = length, device
        sizes = [rows * columns for rows, columns in WIDTHS]
        self.w = torch.empty(sum(sizes) * layers, device=device, dtype=torch.bfloat16)
        self.layers: list[list[Tensor]] = []
        for part in self.w.split(sum(sizes)):
            weights = [each.view(width) for each, width in zip(part.split(sizes), WIDTHS, strict=True)]
            for weight in weights:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            self.layers.append(weights)
        pages = LONGEST // PAGE + 1
        self.k, self.v = (random(layers, pages, PAGE, GROUPS, HEAD_DIM) for _ in range(2))
        self.x = random(1, HIDDEN)
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1))
        self.table = order.to(device, torch.int32)[None].contiguous()
        angle = (length - 1) / 10000 ** (torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2))
        self.cos = torch.cat((angle.cos(), angle.cos()))[None].bfloat16()
        self.sin = torch.cat((-angle.sin(), angle.sin()))[None].bfloat16()
        entry = torch.arange(length, device=device)
        self.slots = self.table[0, entry // PAGE].long() * PAGE + entry % PAGE
        self.slot = self.slots[-1:].clone()
        self.lengths = torch.tensor([length], dtype=torch.int32, device=device)

    def entries(self) -> Tensor:
        """Keys and values of the newest entry in every layer, as they are in the pages."""
        return torch.stack([pages.flatten(1, 2)[:, self.slot[0]] for pages in (self.k, self.v)])

    def forget(self) -> None:
        """Empty the newest entry, so that whoever runs next has to store it."""
        for pages in (self.k, self.v):
            pages.flatten(1, 2)[:, self.slot[0]] = 0

    def plain(self) -> tuple[Tensor, Tensor]:
        """The stream and the newest entries by plain torch, rounded to bfloat16 where the kernels round. Pages stay."""
        x, cos, sin = self.x[0].float(), self.cos[0].float(), self.sin[0].float()
        newest = []
        for number, weights in enumerate(self.layers):
            qkv, o, both, down = (weight.float() for weight in weights)
            product = (qkv @ x * _inverse_rms(x)).view(-1, HEAD_DIM)
            turned = product * cos + product.roll(HEAD_DIM // 2, -1) * sin
            q, k, v = _rounded(turned[:HEADS]), _rounded(turned[HEADS:-GROUPS]), _rounded(product[-GROUPS:])
            newest.append(torch.stack((k, v)))
            before = [pages[number].flatten(0, 1)[self.slots[:-1]].float() for pages in (self.k, self.v)]
            keys, values = (torch.cat((old, new[None])) for old, new in zip(before, (k, v), strict=True))
            scores = torch.einsum("grd,egd->gre", q.view(GROUPS, -1, HEAD_DIM), keys) * HEAD_DIM**-0.5
            mixed = torch.einsum("gre,egd->grd", scores.softmax(-1), values).flatten()
            x = _rounded(x + o @ _rounded(mixed))
            gate, up = (both @ x * _inverse_rms(x)).chunk(2)
            x = _rounded(x + down @ _rounded(gate * gate.sigmoid() * up))
        return x, torch.stack(newest, 1)


def present(case: Case, x: Tensor) -> Callable[[], None]:
    """The engine's kernels of one row, a launch each, on the stream in place."""
    splits = choose_splits(1, GROUPS, LONGEST)
    room = torch.empty(workspace_size(1, HEADS, HEAD_DIM, splits), device=case.device)
    arrived = torch.zeros(GROUPS, dtype=torch.int32, device=case.device)
    space = SplitSpace.build(1, HIDDEN, case.device)

    def run() -> None:
        for (qkv, o, both, down), k, v in zip(case.layers, case.k, case.v, strict=True):
            q = norm_qkv_rope_write(x, qkv, EPS, HEADS, GROUPS, case.cos, case.sin, k, v, case.slot)
            mixed = paged_attention(q, k, v, case.table, case.lengths, HEAD_DIM**-0.5, None, splits, room, arrived=arrived)
            add_linear(x, mixed.flatten(1), o, out=x, space=space)
            add_linear(x, norm_gated(x, both, EPS), down, out=x, space=space)

    return run


class Persistent:
    """The launch of the persistent kernel. What programs send each other and their marks stay between launches."""

    def __init__(self, case: Case, x: Tensor, kernel: Any, programs: int) -> None:
        self.case, self.x, self.kernel, self.programs = case, x, kernel, programs
        bases = (case.w,) * 4 + (case.k, case.v)
        places = [(*weights, k, v) for weights, k, v in zip(case.layers, case.k, case.v, strict=True)]
        offsets = [
            [(each.data_ptr() - base.data_ptr()) // 2 for each, base in zip(place, bases, strict=True)] for place in places
        ]
        self.offsets_L6 = torch.tensor(offsets, dtype=torch.int64, device=case.device)
        self.settings = settings(programs)
        sent = (2 * HEADS + 2 * GROUPS) * HEAD_DIM + 2 * HIDDEN + INNER + 4 * HEADS * HEAD_DIM * self.settings["SPLITS"]
        self.words = torch.zeros((len(places) + 1) * sent, dtype=torch.int32, device=case.device)
        self.sync = torch.zeros(3, dtype=torch.int32, device=case.device)

    def __call__(self) -> None:
        case, pages = self.case, self.case.k.shape[1]
        self.kernel[(self.programs,)](
            self.x, case.w, case.k, case.v, self.offsets_L6, case.cos, case.sin, self.words, self.sync, case.slot,
            case.table, case.lengths, len(case.layers), pages * PAGE, pages, case.table.shape[1],
            HEAD_DIM**-0.5 * math.log2(math.e), EPS,
            **self.settings,
        )  # fmt: skip

    def gave_up(self) -> bool:
        return bool(self.sync[2])


def settings(programs: int) -> dict[str, Any]:
    splits = max(1, min(programs // HEADS, MOST_SPLITS))
    return {
        "M": HIDDEN, "I": INNER, "H": HEADS, "G": GROUPS, "D": HEAD_DIM, "PAGE": PAGE, "P": programs, "R": ROWS, "KB": PIECE,
        "WARPS": WARPS, "BLOCK": ENTRIES, "SPLITS": splits, "WIDE_A": _power(HEADS * HEAD_DIM), "WIDE_M": _power(HIDDEN),
        "WIDE_I": _power(INNER), "ROOM": _power(4 * HEAD_DIM * splits), "num_warps": WARPS, "launch_cooperative_grid": True,
    }  # fmt: skip


def shared_bytes(programs: int) -> int:
    """What a program's rows of a layer take, and a row of numbers."""
    pieces = 0
    for rows, columns in WIDTHS:
        pair = 1 if rows == HIDDEN else 2  # a unit of QKV is the halves of a head, of gate and up a row of each
        pieces += pair * math.ceil(rows // pair / ROWS / programs) * math.ceil(columns / PIECE)
    sizes = settings(programs)
    return pieces * ROWS * PIECE * 2 + 4 * max(sizes[name] for name in ("WIDE_A", "WIDE_M", "WIDE_I", "ROOM"))


def timed(run: Callable[[], None], x: Tensor, first: Tensor, rounds: int = 5, replays: int = 20) -> float:
    """Microseconds of one call, recorded in a graph: the median of some rounds."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        found = []
        for _ in range(rounds):
            x.copy_(first)
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(found)


def measure(length: int, layers: int, kernel: Any) -> dict[str, Any]:
    case = Case(length, layers, "cuda")
    want = case.plain()
    x = case.x.clone()

    def errors() -> tuple[float, float]:
        return _off(x[0], want[0]), _off(case.entries(), want[1])

    run = present(case, x)
    case.forget()
    run()
    torch.cuda.synchronize()
    present_errors = errors()
    present_us = timed(run, x, case.x)

    programs = torch.cuda.get_device_properties(0).multi_processor_count
    persistent = Persistent(case, x, kernel, programs)
    found = []
    for _ in range(2):
        x.copy_(case.x)
        case.forget()
        persistent()
        torch.cuda.synchronize()
        found.append(x.clone())
    persistent_errors = errors()
    us = None if persistent.gave_up() else timed(persistent, x, case.x)
    gave_up = persistent.gave_up()
    right = not gave_up and all(new <= NEAR * old for new, old in zip(persistent_errors, present_errors, strict=True))
    floor = 2 * case.w.numel() / BANDWIDTH * 1e6
    return {
        "length": length, "layers": layers, "floor_us": floor, "present_us": present_us, "persistent_us": us,
        "speedup": None if us is None else present_us / us, "present_error": _told(present_errors[0]),
        "persistent_error": _told(persistent_errors[0]), "present_stored_error": _told(present_errors[1]),
        "persistent_stored_error": _told(persistent_errors[1]), "same_bits_twice": torch.equal(*found), "gave_up": gave_up,
        "right": right,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    print(f"{row['layers']} layers, {row['length']} entries: " + ("right" if row["right"] else "WRONG"))
    print(f"  present     {row['present_us']:8.1f} us  error {_number(row['present_error'])}", end="")
    print(f", stored {_number(row['present_stored_error'])}  (reading the weights takes {row['floor_us']:.1f} us)")
    took = "not timed  " if row["persistent_us"] is None else f"{row['persistent_us']:8.1f} us"
    print(
        f"  persistent  {took}  error {_number(row['persistent_error'])}, stored {_number(row['persistent_stored_error'])}",
        end="",
    )
    print(f", the same bits twice: {row['same_bits_twice']}, a wait was given up: {row['gave_up']}")
    if row["speedup"] is not None:
        print(f"  speed-up    {row['speedup']:8.3f}", flush=True)


def find_kernel() -> Any:
    """The persistent kernel, or exit code 2 where it cannot run."""
    if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0):
        _refuse("this needs a Hopper GPU (H100, H200), and there is none here")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    if shared_bytes(programs) > SHARED:
        _refuse(f"a layer does not fit into the shared memory of this GPU's {programs} multiprocessors")
    try:
        from persistent_rows_kernel import persistent_rows_kernel
    except ImportError as error:
        _refuse(f"this needs Gluon, which comes with Triton 3.6: {error}")
    return persistent_rows_kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the record, JSON, written after each length")
    parser.add_argument("--lengths", nargs="+", type=int, default=[129, 1, 300, 1000], help="entries of the sequence")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=int, default=40, help="for all of it, compiling included; then it is ended")
    args = parser.parse_args()
    if not all(1 <= length <= LONGEST for length in args.lengths) or args.layers < 1 or args.seconds < 1:
        parser.error(f"lengths must be between 1 and {LONGEST}, layers and seconds at least 1")
    begun = time.monotonic()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    kernel = find_kernel()
    record: dict[str, Any] = {"environment": environment(), "rows": []}
    for number, length in enumerate(args.lengths):
        if number and time.monotonic() - begun > 0.75 * args.seconds:
            print(f"no time left for lengths {args.lengths[number:]}")
            break
        row = measure(length, args.layers, kernel)
        record["rows"].append(row)
        show(row)
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        if row["gave_up"]:
            break
    return 0 if all(row["right"] for row in record["rows"]) else 1


def _off(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def _told(error: float) -> float | None:
    """JSON knows no NaN."""
    return error if math.isfinite(error) else None


def _number(error: float | None) -> str:
    return "not a number" if error is None else f"{error:.4f}"


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean() + EPS)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _refuse(why: str) -> NoReturn:
    print(f"persistent_rows: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    raise SystemExit(main())
