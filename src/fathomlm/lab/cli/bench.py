"""`fathomlm bench throughput | latency | kernels | host`: how fast a model is, and what the host costs."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fathomlm.cli.common import SOURCE, DeviceOptions, JsonOptions, ModelOptions, QuantizeOptions, memory_errors
from fathomlm.cli.first import check_memory, check_model, check_shape
from fathomlm.cli.progress import progress_bar
from fathomlm.depth.options import PlanOptions, RelaxOptions
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.lab.cli.bench_setup import (
    BATCHED,
    TUNED,
    BenchEngineOptions,
    ForcedDepthOptions,
    PlannedModelOptions,
    WorkloadOptions,
    engine_device,
)
from fathomlm.lab.cli.eval_common import answer
from fathomlm.options import like, option, section
from fathomlm.train.data.options import PrepareOptions

LOWER = "--batch-size, --max-sequences, --memory or --requests"
PEERS = ("vanilla", "transformers")


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions(QuantizeOptions, PlannedModelOptions, JsonOptions):
    """What benchmarks of the engine share."""

    kind: ClassVar[str]
    batched: ClassVar[bool] = True
    """Whether several sequences run at once."""
    model: str = option(positional=True, help=SOURCE, first=check_shape)
    workload: WorkloadOptions = section(WorkloadOptions, "workload")
    engine: BenchEngineOptions = section(BenchEngineOptions, "engine", only=BATCHED)
    depth: ForcedDepthOptions = section(ForcedDepthOptions, "depth")
    peer: tuple[str, ...] = option(
        (), choices=PEERS,
        help="compare with the plain model of the same depth in our engine (vanilla), or with transformers; repeatable",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workload.data and self.dummy:
            raise OptionError("--data cannot be combined with --dummy: it requires the model's tokenizer")
        if len(set(self.peer)) < len(self.peer):
            raise OptionError("duplicate --peer")
        if self.peer and self.quantize not in (None, "none"):
            raise OptionError("--peer cannot be combined with --quantize: peers compute with plain weights")

    def quantized(self, model: str) -> str | None:
        """By default not where the weights are not the model's own, or peers are to have the same."""
        given = self.quantize is not None or not (self.peer or self.dummy or self.replanned)
        return super().quantized(model) if given else None

    @property
    def arrival_rate(self) -> float | None:
        """Requests per second; None where all are there at once."""
        return None

    def run(self) -> int:
        if not self.dummy:
            check_model(self.model)
        check_memory(self.engine.memory, self.device)

        from fathomlm.lab.cli.bench_engine import Bench

        with memory_errors(LOWER):
            return Bench(self).run()


@dataclass(frozen=True, kw_only=True)
class ThroughputWorkload(WorkloadOptions):
    arrivals: float | None = option(
        None, gt=0, metavar="RATE", help="Poisson arrivals at RATE requests per second", default_text="all at once"
    )


@dataclass(frozen=True, kw_only=True)
class Throughput(EngineBenchOptions):
    """Run a workload through the engine and report tokens per second, end to end, and where the time went. With --dummy any
    shape and plan can be measured without weights, such as `smollm-360m --sharing middle-cycle --recursions 3 --router
    expert --dummy --depth forced`. Peers are measured in the same process afterwards; transformers with its continuous
    batching of the same weights, 64 requests of 128 tokens."""

    kind = "throughput"
    workload: ThroughputWorkload = section(ThroughputWorkload, "workload")
    engine: BenchEngineOptions = section(BenchEngineOptions, "engine", only=(*BATCHED, "peer_batch_size"))

    @property
    def arrival_rate(self) -> float | None:
        return self.workload.arrivals


@dataclass(frozen=True, kw_only=True)
class Latency(EngineBenchOptions):
    """Run one request after the other through the engine and report the time per token. The floor is the time that reading
    the weights takes at this device's own reading speed, measured in the same run. The peer transformers is its `generate`
    over the same weights."""

    kind = "latency"
    batched = False
    workload: WorkloadOptions = section(WorkloadOptions, "workload", workload="64-256", requests=8)
    engine: BenchEngineOptions = section(BenchEngineOptions, "engine", only=TUNED)


@dataclass(frozen=True, kw_only=True)
class Kernels(DeviceOptions, JsonOptions):
    """Time each kernel of a decode step, at MODEL's shape and with random weights: only the configuration is read. The floor
    is the time that reading the weights (or KV entries) once takes at this device's own reading speed. On a CPU the plain
    twins run, which are there to be right and not fast: only ratios are shown."""

    kind: ClassVar[str] = "kernels"
    model: str = like(ModelOptions, "model", first=check_shape)
    batch_size: int = like(EngineOptions, "batch_size")
    context: int = option(512, ge=1, help="tokens that each sequence attends to")
    rank: int = like(RelaxOptions, "rank", 64, ge=1, metavar=None, default_text=None, help="rank of the low-rank deltas")
    recursions: int = like(
        PlanOptions, "recursions", 2, ge=1, default_text=None, help="depths that the batch is spread over"
    )

    def run(self) -> int:
        import torch

        from fathomlm.checkpoints.resolve import architecture_of, parse_dtype
        from fathomlm.lab.bench.floor import reading_speed
        from fathomlm.lab.bench.kernels import KernelOptions, check, time_kernels
        from fathomlm.lab.cli.bench_engine import about, tell_interrupted
        from fathomlm.lab.cli.bench_tables import print_kernels

        device = engine_device(self.device)
        self.use_threads()
        architecture = architecture_of(self.model)[0]
        check(architecture)
        dtype = parse_dtype(self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        assert dtype is not None
        options = KernelOptions(rows=self.batch_size, context=self.context, rank=self.rank, recursions=self.recursions)
        torch.manual_seed(0)
        with (
            memory_errors("--batch-size, --context, --rank or --recursions"),
            progress_bar("timing", unit="kernels") as update,
        ):
            speed = reading_speed(device)
            found, complete = time_kernels(architecture, options, dtype=dtype, device=device, speed=speed, on_done=update)
        if not found:
            raise KeyboardInterrupt
        twin = any(one.twin for one in found)
        record: dict[str, Any] = about(self, str(dtype).removeprefix("torch.")) | {
            "settings": asdict(options),
            "implementation": ("CPU twin" if device.type == "cpu" else "plain twin") if twin else "Triton",
            "reading_bytes_per_s": speed if device.type == "cuda" else None,
            "kernels": [asdict(one) for one in found],
            "interrupted": not complete,
        }
        answer(self, record, print_kernels)
        if not complete:
            tell_interrupted()
        return 0 if complete else 2


@dataclass(frozen=True, kw_only=True)
class Host(JsonOptions):
    """Measure what the engine costs the host: microseconds of processor time per token over a device that does nothing. The
    engine, its scheduler and its asyncio front are real; tokens come at once, and no model runs. Without listeners, text is
    made when a request ends; a callback gets the tokens of each burst; async is a task for each request behind the asyncio
    front."""

    kind: ClassVar[str] = "host"
    batch_sizes: tuple[int, ...] = like(
        EngineOptions, "batch_size", (1, 32, 128, 256, 512), le=4096, flag="--batch-size", metavar="N,..."
    )
    plans: tuple[str, ...] = option(
        ("plain", "routed"), choices=("plain", "routed"), comma=True, flag="--plan", metavar="NAME,...",
        help="plain, or a mixture of three recursions, with twice as many sequences as tokens per pass",
    )  # fmt: skip
    listeners: tuple[str, ...] = option(
        ("none", "callback", "async"), choices=("none", "callback", "async"), comma=True, metavar="NAME,...",
        help="who waits for tokens",
    )  # fmt: skip
    tokens: int = option(30_000, ge=1000, help="tokens per round; the quickest of three rounds counts")
    tokenizer: str = like(PrepareOptions, "tokenizer", "fathom-mor-23m")

    def run(self) -> int:
        import torch

        from fathomlm.lab.bench.host import FEW_ROWS, measure_host, python_speed
        from fathomlm.lab.cli.bench_tables import print_host
        from fathomlm.lab.environment import environment
        from fathomlm.train.data.tokenizers import find_tokenizer

        tokenizer = find_tokenizer(self.tokenizer)
        torch.set_num_threads(1)
        cases = list(itertools.product(self.plans, self.batch_sizes, self.listeners))
        costs = []
        with progress_bar("measuring", unit="cases", still=True) as update:
            for done, (plan, size, listeners) in enumerate(cases, start=1):
                tokens = self.tokens if size >= FEW_ROWS else self.tokens // 8
                costs.append(asdict(measure_host(plan, size, listeners, tokenizer, tokens=tokens)))  # type: ignore[arg-type]
                update(done, len(cases))
        record = {
            "kind": self.kind,
            "environment": environment("cpu") | {"empty_loop_ns": python_speed()},
            "tokenizer": self.tokenizer,
            "costs": costs,
        }
        answer(self, record, print_host)
        return 0
