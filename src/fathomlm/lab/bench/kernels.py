"""Each kernel that the engine runs rows through, alone, at a model's shape: how long it takes, and how near that is to
reading what it must read.

Calls go around copies of their weights that together are larger than any cache, as a model's layers are. On a GPU they are
recorded in a graph, so that launching them costs what it costs the engine. On a CPU the plain twins run: they are there to
are the reference and not meant to be fast, so only ratios are shown.

Shapes: N rows, M hidden width, I inner width, H query heads, G key-value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.resolve import architecture_of
from fathomlm.cli.common import memory_errors
from fathomlm.cli.display import print_table, progress_bar
from fathomlm.depth import Architecture
from fathomlm.engine.options import PAGE
from fathomlm.errors import UnsupportedModel
from fathomlm.kernels.attention_blocks import choose_splits, workspace_size
from fathomlm.kernels.grouped_lora import add_grouped_lora
from fathomlm.kernels.paged_attention import paged_attention
from fathomlm.kernels.row_linear import SplitSpace, add_linear, norm_gated, norm_linear
from fathomlm.kernels.row_qkv import norm_qkv_rope_write
from fathomlm.kernels.triton_here import triton
from fathomlm.lab.bench.floor import reading_speed
from fathomlm.lab.bench.models import dummy_dtype, engine_device
from fathomlm.lab.bench.options import Kernels
from fathomlm.lab.bench.report import Found, about, ms, percent, tell_interrupted
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.model.blocks import build_block

COLD_BYTES, MOST_COPIES = 200e6, 128
"""What all copies of a weight should come to, and how many there may be."""
KERNELS, IN_LAYER = 7, 5
"""How many cases there are, and how many of them make up a layer."""
ROUNDS, LEAST_ROUNDS, SECONDS = 20, 3, 0.5
"""Timed trips around the copies, and when to stop early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    rows: int
    context: int
    """Entries that each row attends to."""
    rank: int
    """Of the low-rank deltas."""
    recursions: int
    """Depths that rows are spread over."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    use: str
    """What it does in the model."""
    in_layer: bool
    """Whether a layer calls it once."""
    reads: int
    """Bytes of weights, or of entries, that a call must read."""
    copies: int
    call: Callable[[int], object]
    """Runs on the n-th copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    kernel: str
    use: str
    twin: bool
    """Whether it was the plain twin that ran."""
    us: float | None
    """Microseconds of a call; None on a CPU, where no claim is made."""
    floor_us: float | None
    reads_bytes: int
    floor_share: float
    """The part of the time that reading alone takes at this device's reading speed."""
    layer_share: float | None
    """Its part of a whole layer's time; None for what is no part of a layer."""


def check(architecture: Architecture) -> None:
    """These kernels are for layers whose weights can be packed; others run as the model's own modules."""
    with torch.device("meta"):
        block = build_block(architecture)
    if not block.packs:
        family = architecture.family
        raise UnsupportedModel(f"there are no kernels for rows of {family} layers; they run as the model's own modules")


def time_kernels(
    architecture: Architecture,
    options: KernelOptions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    speed: float,
    on_done: OnProgress = unwatched,
) -> tuple[list[KernelTime], bool]:
    """One after the other, and whether all were: Ctrl-C ends it with what there is. `speed` is the device's reading speed in
    bytes a second."""
    check(architecture)
    timed: list[tuple[KernelCase, float]] = []
    try:
        for case in build_cases(architecture, options, dtype, device):
            timed.append((case, time_case(case, device)))
            on_done(len(timed), KERNELS)
    except KeyboardInterrupt:
        pass
    layer = [seconds for case, seconds in timed if case.in_layer]
    whole = sum(layer) if len(layer) == IN_LAYER else None
    return [_told(case, seconds, whole, device, speed) for case, seconds in timed], len(timed) == KERNELS


def _told(case: KernelCase, seconds: float, layer: float | None, device: torch.device, speed: float) -> KernelTime:
    gpu, floor = device.type == "cuda", case.reads / speed
    return KernelTime(
        kernel=case.kernel,
        use=case.use,
        twin=triton is None or not gpu,
        us=1e6 * seconds if gpu else None,
        floor_us=1e6 * floor if gpu else None,
        reads_bytes=case.reads,
        floor_share=floor / seconds,
        layer_share=seconds / layer if case.in_layer and layer is not None else None,
    )


def build_cases(
    architecture: Architecture, options: KernelOptions, dtype: torch.dtype, device: torch.device
) -> Iterator[KernelCase]:
    """Built when asked for, so that one case's copies are gone before the next one's are made."""
    make = _Maker(architecture, options, dtype, device)
    yield make.qkv()
    yield make.attention()
    yield make.add("the output of attention", architecture.query_width)
    yield make.gated()
    yield make.add("the way down of the feed-forward part", architecture.intermediate)
    yield make.head()
    yield make.lora()


class _Maker:
    def __init__(self, a: Architecture, options: KernelOptions, dtype: torch.dtype, device: torch.device) -> None:
        self.a, self.o = a, options
        self.dtype, self.device = dtype, device
        self.on_gpu, self.size = device.type == "cuda", dtype.itemsize

    def _drawn(self, *shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, dtype=self.dtype, device=self.device)

    def _copies(self, *shape: int) -> list[Tensor]:
        first = self._drawn(*shape)
        many = self._many(first.numel() * self.size)
        return [first, *(first.clone() for _ in range(many - 1))]

    @staticmethod
    def _many(reads: int) -> int:
        return max(1, min(MOST_COPIES, round(COLD_BYTES / reads)))

    def _case(
        self, kernel: str, use: str, weights: list[Tensor], call: Callable[[int], object], layer: bool = True
    ) -> KernelCase:
        return KernelCase(kernel, use, layer, weights[0].numel() * self.size, len(weights), call)

    def qkv(self) -> KernelCase:
        a, rows, eps = self.a, self.o.rows, self.a.norm_eps
        weights = self._copies((a.heads + 2 * a.kv_heads) * a.head_dim, a.hidden)
        x, cos, sin, out = (self._drawn(rows, n) for n in (a.hidden, a.head_dim, a.head_dim, a.query_width))
        k, v = (self._drawn(-(-rows // PAGE) + 1, PAGE, a.kv_heads, a.head_dim) for _ in range(2))
        slots, out = torch.arange(rows, device=x.device), out.view(rows, a.heads, a.head_dim)

        def call(n: int) -> Tensor:
            return norm_qkv_rope_write(x, weights[n], eps, a.heads, a.kv_heads, cos, sin, k, v, slots, out=out)

        return self._case("norm_qkv_rope_write", "norm, queries, keys and values, rotated and stored", weights, call)

    def attention(self) -> KernelCase:
        a, rows, length = self.a, self.o.rows, self.o.context
        pages = -(-length // PAGE)
        shape = (rows * pages, PAGE, a.kv_heads, a.head_dim)
        reads = rows * length * a.kv_bytes(self.size)
        entries = [self._drawn(*shape)]
        entries += [entries[0].clone() for _ in range(2 * self._many(reads) - 1)]
        q = self._drawn(rows, a.heads, a.head_dim)
        out, device = torch.empty_like(q), q.device
        table = torch.randperm(rows * pages, device=device).int().view(rows, pages)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        splits = choose_splits(rows, a.kv_heads, length) if self.on_gpu else 1
        space = torch.empty(workspace_size(rows, a.heads, a.head_dim, splits), device=device)

        def call(n: int) -> Tensor:
            k, v = entries[2 * n], entries[2 * n + 1]
            return paged_attention(q, k, v, table, lengths, a.scale, None, splits, space, out=out)

        use = f"attention to {length} entries a row"
        return KernelCase("paged_attention", use, True, reads, len(entries) // 2, call)

    def add(self, use: str, inputs: int) -> KernelCase:
        weights = self._copies(self.a.hidden, inputs)
        stream, x = self._drawn(self.o.rows, self.a.hidden), self._drawn(self.o.rows, inputs)
        space = SplitSpace.build(self.o.rows, self.a.hidden, x.device)
        out = torch.empty_like(stream)
        return self._case("add_linear", use, weights, lambda n: add_linear(stream, x, weights[n], out=out, space=space))

    def gated(self) -> KernelCase:
        a = self.a
        weights = self._copies(2 * a.intermediate, a.hidden)
        x, out = self._drawn(self.o.rows, a.hidden), self._drawn(self.o.rows, a.intermediate)
        use = "norm, and the way up of the feed-forward part"
        return self._case("norm_gated", use, weights, lambda n: norm_gated(x, weights[n], a.norm_eps, out))

    def head(self) -> KernelCase:
        a = self.a
        weights = self._copies(a.vocab, a.hidden)
        x = self._drawn(self.o.rows, a.hidden)
        out = torch.empty(self.o.rows, a.vocab, device=x.device)
        call: Callable[[int], object] = lambda n: norm_linear(x, weights[n], 0.0, False, torch.float32, out)  # noqa: E731
        return self._case("norm_linear", "the head", weights, call, layer=False)

    def lora(self) -> KernelCase:
        """Over the way down, which has the widest input."""
        a, rows, rank, depths = self.a, self.o.rows, self.o.rank, self.o.recursions
        reads = min(rows, depths) * rank * (a.hidden + a.intermediate) * self.size
        many = self._many(reads)
        down, up = self._drawn(depths, rank, a.intermediate), self._drawn(depths, a.hidden, rank)
        factors = [(down.clone(), up.clone()) for _ in range(many)]
        x, out, inner = self._drawn(rows, a.intermediate), self._drawn(rows, a.hidden), self._drawn(rows, rank)
        depth = torch.arange(rows, device=x.device) % depths

        def call(n: int) -> Tensor:
            return add_grouped_lora(out, x, *factors[n], depth, 1.0, inner)

        use = f"what {depths} recursions add to a linear, rank {rank}"
        return KernelCase("add_grouped_lora", use, False, reads, many, call)


@torch.inference_mode()
def time_case(case: KernelCase, device: torch.device) -> float:
    """Seconds of a call: the median of a few trips around its copies."""
    trip = _recorded(case) if device.type == "cuda" else _clocked(case)
    trip()
    times: list[float] = []
    while len(times) < ROUNDS and (len(times) < LEAST_ROUNDS or sum(times) < SECONDS):
        times.append(trip())
    return statistics.median(times) / case.copies


def _around(case: KernelCase) -> None:
    for n in range(case.copies):
        case.call(n)


def _clocked(case: KernelCase) -> Callable[[], float]:
    def trip() -> float:
        begun = time.perf_counter()
        _around(case)
        return time.perf_counter() - begun

    return trip


def _recorded(case: KernelCase) -> Callable[[], float]:
    """The same as one graph, timed by the device."""
    _around(case)  # kernels are compiled before anything is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _around(case)

    def trip() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    return trip


def run(options: Kernels) -> int:

    device = engine_device(options.device)
    options.use_threads()
    architecture = architecture_of(options.model)[0]
    check(architecture)
    dtype = dummy_dtype(options, device)
    sizes = KernelOptions(rows=options.batch_size, context=options.context, rank=options.rank, recursions=options.recursions)
    torch.manual_seed(0)
    with (
        memory_errors("--batch-size, --context, --rank or --recursions"),
        progress_bar("timing", unit="kernels") as update,
    ):
        speed = reading_speed(device)
        found, complete = time_kernels(architecture, sizes, dtype=dtype, device=device, speed=speed, on_done=update)
    if not found:
        raise KeyboardInterrupt
    twin = any(one.twin for one in found)
    record: dict[str, Any] = about(options, str(dtype).removeprefix("torch.")) | {
        "settings": asdict(sizes),
        "implementation": ("CPU twin" if device.type == "cpu" else "plain twin") if twin else "Triton",
        "reading_bytes_per_s": speed if device.type == "cuda" else None,
        "kernels": [asdict(one) for one in found],
        "interrupted": not complete,
    }
    options.answer(record, print_kernels)
    if not complete:
        tell_interrupted()
    return 0 if complete else 2


def print_kernels(record: Found) -> None:
    settings, kernels = record["settings"], record["kernels"]
    absolute = any(one["us"] is not None for one in kernels)
    head = ["kernel", "what for", *(["us", "floor, us"] if absolute else []), "floor's share", "part of a layer"]
    rows = []
    for one in kernels:
        times = [ms(one["us"]), ms(one["floor_us"])] if absolute else []
        layer = "-" if one["layer_share"] is None else percent(one["layer_share"])
        rows.append([one["kernel"], one["use"], *times, percent(one["floor_share"]), layer])
    title = (
        f"{record['model']}: {settings['rows']} rows, {record['dtype']}, {record['environment']['device']}, "
        f"{record['implementation']}"
    )
    caption = "The floor is reading what a call must read at this device's own reading speed, measured in the same run."
    if not absolute:
        caption = "CPU twin: these say what is right and are not made to be fast, so only ratios are shown. " + caption
    print_table([head, *rows], title, caption=caption, text_columns=2)
