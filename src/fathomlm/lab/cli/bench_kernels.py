"""`fathomlm bench kernels MODEL`: each kernel for rows alone, at the model's shape."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.device import memory_errors, use_threads
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import add_dtype_argument
from fathomlm.lab.cli.bench_options import check_numbers
from fathomlm.lab.cli.bench_record import about, print_record, say_interrupted
from fathomlm.lab.cli.bench_tables import print_kernels

HELP = "each kernel alone: microseconds, and how near to reading its weights once"
DESCRIPTION = (
    "Times each kernel that the engine runs rows through, at MODEL's shape and with random weights: only the configuration "
    "is read. The floor is the time that reading the weights (or entries) once takes at this device's own reading speed. On "
    "a CPU the plain twins run, which are there to be right and not fast: ratios alone are shown."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, Hugging Face directory, hub id, GGUF file or FathomLM directory")
    add("--rows", metavar="N", type=int, default=32, help="tokens of a pass (32)")
    add("--context", metavar="N", type=int, default=512, help="entries that each row attends to (512)")
    add("--rank", metavar="K", type=int, default=64, help="of the low-rank deltas (64)")
    add("--recursions", metavar="N", type=int, default=2, help="depths that rows are spread over (2)")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    check_numbers(args, {"rows": 1, "context": 1, "rank": 1, "recursions": 1, "threads": 1})

    import torch

    from fathomlm.checkpoints.resolve import architecture_of
    from fathomlm.lab.bench.floor import reading_speed
    from fathomlm.lab.bench.kernels import KernelOptions, check, time_kernels
    from fathomlm.lab.cli.bench_model import read_device, read_dtype

    device = read_device(args.device)
    use_threads(args.threads)
    architecture = architecture_of(args.model)[0]
    check(architecture)
    dtype = read_dtype(args, device)
    options = KernelOptions(rows=args.rows, context=args.context, rank=args.rank, recursions=args.recursions)
    torch.manual_seed(0)
    with memory_errors("--rows, --context, --rank or --recursions"), layer_bar("timing", unit="kernels") as tick:
        speed = reading_speed(device)
        found, complete = time_kernels(architecture, options, dtype=dtype, device=device, speed=speed, on_done=tick)
    if not found:
        raise KeyboardInterrupt
    twin = any(one.twin for one in found)
    record: dict[str, Any] = about(args, str(dtype).removeprefix("torch.")) | {
        "settings": asdict(options),
        "implementation": ("CPU twin" if device.type == "cpu" else "plain twin") if twin else "Triton",
        "reading_bytes_per_s": speed if device.type == "cuda" else None,
        "kernels": [asdict(one) for one in found],
        "interrupted": not complete,
    }
    if args.json:
        print_record(record)
    else:
        print_kernels(record)
    if not complete:
        say_interrupted()
    return 0 if complete else 2
