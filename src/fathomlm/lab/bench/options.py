"""The options of `fathomlm bench`, and of other commands that run the engine over a workload: the model under any plan, the
workload, the engine, and how deep tokens go. Nothing here loads a tensor library: what they do is in the other files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from fathomlm.cli.common import (
    SOURCE,
    ColumnOptions,
    DeviceOptions,
    JsonOptions,
    ModelOptions,
    QuantizeOptions,
    SeedOptions,
)
from fathomlm.cli.first import check_memory, check_model, check_shape, check_text
from fathomlm.decode.exiting import Exiting
from fathomlm.depth.options import PlanOptions, RelaxOptions, RoutingOptions
from fathomlm.engine.burst_length import BURST, LONGER
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.lab.bench.workload import WORKLOADS, shape_of
from fathomlm.options import ChecksFirst, like, option, section
from fathomlm.sizes import MEGABYTE
from fathomlm.train.data import PrepareOptions

DEPTHS = "part of the tokens that runs each recursion, such as 1,0.67,0.33"
PEERS = ("vanilla", "transformers")
EXIT_FLAGS = {
    "exit_layers": "--exit-layer", "exit_rate": "--exit-rate", "threshold": "--threshold", "mode": "--decode",
    "max_stack": "--max-stack",
}  # fmt: skip
"""Options for tokens that exit early."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What a model has to fit."""

    gpu_memory: int | None = option(None, size=MEGABYTE, help="memory of a GPU, for weights and all else, such as 80GB")


@dataclass(frozen=True, kw_only=True)
class PlannedModelOptions(DeviceOptions, SeedOptions):
    """A model with its own weights or random ones, under its own plan or another."""

    dummy: bool = option(False, help="random weights: only the configuration is read, nothing is downloaded")
    plan: PlanOptions = section(PlanOptions, "depth plan")
    relaxation: RelaxOptions = section(RelaxOptions, "relaxation")
    routing: RoutingOptions = section(RoutingOptions, "routing")

    @property
    def replanned(self) -> bool:
        """Whether an option changes the model's plan."""
        return (self.plan, self.relaxation, self.routing) != (PlanOptions(), RelaxOptions(), RoutingOptions())


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(ColumnOptions):
    """Which requests there are."""

    workload: str = option(
        "thesis", choices=tuple(WORKLOADS),
        help="thesis (no prompts, about 256 new tokens), or prompt and new tokens",
    )  # fmt: skip
    requests: int | None = option(
        None, ge=1, help="number of requests",
        default_text=", ".join(f"{name}: {shape.requests}" for name, shape in WORKLOADS.items()),
    )  # fmt: skip
    data: tuple[str, ...] = option(
        (), metavar="FILE", first=check_text,
        help="cut prompts from text (.txt, .md, .jsonl) instead of random token ids; repeatable",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.data and shape_of(self.workload).prompt == 1:
            raise OptionError(f"the workload {self.workload} has no prompts to cut from --data; choose another --workload")


@dataclass(frozen=True, kw_only=True)
class BenchEngineOptions(EngineOptions):
    """Options of the engine, and of what it is compared with; what is None is chosen for the model and the device."""

    memory: int | None = like(EngineOptions, "memory", default_text="enough for every sequence")
    peer_batch_size: int | None = like(
        EngineOptions, "batch_size", None, help="batch size of the peers", default_text="as many"
    )


TUNED = ("memory", "kv_dtype", "prefill_chunk", "page_size", "burst", "cores", "shallows", "merge")
BATCHED = (*TUNED, "batch_size", "max_sequences")
"""What of it has flags, for one sequence and for many."""


@dataclass(frozen=True, kw_only=True)
class ForcedDepthOptions:
    """How deep tokens go: as the model decides, or drawn."""

    depth: Literal["router", "confidence", "forced"] | None = option(
        None, default_text="router with a router, full depth without",
        help="what decides: the router, the confidence at an exit, or a draw (forced)",
    )  # fmt: skip
    depths: tuple[float, ...] | None = option(
        None, gt=0, le=1, metavar="P,...", help=f"forced, with a router: {DEPTHS}", default_text="the capacities"
    )
    exit_rate: float | None = option(
        None, ge=0, le=1, metavar="P", help="forced, without a router: fraction of tokens that exit early"
    )
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers")
    threshold: float | None = like(
        Exiting, "threshold", parse=None,
        help="exit where the confidence exceeds T, from 0 (always) to 1 (never)",
    )  # fmt: skip
    mode: str | None = like(
        Exiting, "mode", None, choices=("parallel", "state-copy", "entry-copy"), default_text="parallel", metavar=None,
        help="what happens at an exit: the deeper layers run later (exact), or get the exit's state, or deeper loops get "
        "the keys and values of the last one that ran",
    )  # fmt: skip
    max_stack: int | None = like(Exiting, "max_stack")

    def __post_init__(self) -> None:
        if self.depths is not None and self.exit_rate is not None:
            raise OptionError("--depths cannot be combined with --exit-rate: it requires a router")
        allowed = {
            "router": (),
            "confidence": ("exit_layers", "threshold", "mode", "max_stack"),
            "forced": ("depths", "exit_layers", "exit_rate", "mode", "max_stack"),
        }
        source = self.source
        for name in ("depths", *EXIT_FLAGS):
            if getattr(self, name) is not None and source is not None and name not in allowed[source]:
                flag = EXIT_FLAGS.get(name, "--depths")
                raise OptionError(f"{flag} cannot be combined with {'--depth ' + source if self.depth else 'forced depths'}")
        if self.depths is not None:
            check_depths(self.depths)

    @property
    def source(self) -> str | None:
        """What decides how deep tokens go, as far as the options say it."""
        if self.depth is not None:
            return self.depth
        if self.depths is not None or self.exit_rate is not None:
            return "forced"
        return "confidence" if any(getattr(self, name) is not None for name in EXIT_FLAGS) else None


def check_depths(parts: tuple[float, ...]) -> None:
    """Every token runs the first recursion, and none runs one without those before it."""
    if parts[0] != 1 or any(later > earlier for earlier, later in pairwise(parts)):
        raise OptionError(f"--depths must begin with 1 and never rise, got {','.join(f'{part:g}' for part in parts)}")


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions(QuantizeOptions, PlannedModelOptions, JsonOptions, ChecksFirst):
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

    def check_first(self) -> None:
        if not self.dummy:
            check_model(self.model)
        check_memory(self.engine.memory, self.device)

    def quantized(self, model: str) -> str | None:
        """By default not where the weights are not the model's own, or peers are to have the same."""
        given = self.quantize is not None or not (self.peer or self.dummy or self.replanned)
        return super().quantized(model) if given else None

    @property
    def arrival_rate(self) -> float | None:
        """Requests per second; None where all are there at once."""
        return None


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


@dataclass(frozen=True, kw_only=True)
class Host(JsonOptions):
    """Measure what the engine costs the host: microseconds of processor time per token over a device that does nothing. The
    engine, its scheduler and its asyncio front are real; tokens come at once, and no model runs. Without listeners, text is
    made when a request ends; a callback gets the tokens of each burst; async is a task for each request behind the asyncio
    front; http is a streamed completion of the server's for each, in the same process and without sockets."""

    kind: ClassVar[str] = "host"
    batch_sizes: tuple[int, ...] = like(
        EngineOptions, "batch_size", (1, 32, 128, 256, 512), le=4096, flag="--batch-size", metavar="N,..."
    )
    plans: tuple[str, ...] = option(
        ("plain", "routed"), choices=("plain", "routed"), comma=True, flag="--plan", metavar="NAME,...",
        help="plain, or a mixture of three recursions, with twice as many sequences as tokens per pass",
    )  # fmt: skip
    listeners: tuple[str, ...] = option(
        ("none", "callback", "async"), choices=("none", "callback", "async", "http"), comma=True, metavar="NAME,...",
        help="who waits for tokens",
    )  # fmt: skip
    stream_interval: int = like(EngineOptions, "stream_interval")
    burst: int = like(
        EngineOptions,
        "burst",
        BURST,
        default_text=f"{BURST}; on a GPU an engine goes up to {BURST * LONGER} if the host is late",
    )
    page_size: int = like(EngineOptions, "page_size")
    prompt: int = option(
        1,
        ge=1,
        le=4096,
        help="tokens per prompt; with more than one, time is per prompt token, and requests have one new token",
    )
    tokens: int = option(30_000, ge=1000, help="tokens per round; the quickest of three rounds counts")
    tokenizer: str = like(PrepareOptions, "tokenizer", "fathom-mor-23m")
