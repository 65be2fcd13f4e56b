"""The options of commands that run the engine over a workload: the model under any plan, the workload, the engine, and how
deep tokens go."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import ColumnOptions, DeviceOptions, SeedOptions
from fathomlm.cli.first import check_text
from fathomlm.decode.exiting import Exiting
from fathomlm.depth.options import PlanOptions, RelaxOptions, RoutingOptions
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.lab.bench.workload import WORKLOADS, shape_of
from fathomlm.options import like, option, section
from fathomlm.sizes import MEGABYTE

if TYPE_CHECKING:
    import torch

    from fathomlm.decode.exiting import Mode
    from fathomlm.depth import Architecture, DepthPlan, Relaxation
    from fathomlm.lab.bench.measure import DepthChoice
    from fathomlm.model.hub import FathomForCausalLM

DEPTHS = "part of the tokens that runs each recursion, such as 1,0.67,0.33"


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

    def shape(self, model: str) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The model's shape and the plan that the options lay over it, without weights."""
        from fathomlm.checkpoints.convert import routed_plan
        from fathomlm.checkpoints.resolve import architecture_of
        from fathomlm.depth import DepthPlan
        from fathomlm.depth.relaxation import check_fits

        architecture, plan, relaxation = architecture_of(model)
        if architecture.cross:
            raise OptionError(f"bench takes decoder-only models; this is an encoder-decoder ({architecture.family})")
        if self.plan.planned:
            architecture, plan = self.plan.over(architecture, plan)
            relaxation = None
        plan = DepthPlan.vanilla(architecture.layers) if plan is None else plan
        relaxation = self.relaxation.build_relaxation(architecture.linears()) or relaxation
        check_fits(relaxation, plan)
        return architecture, routed_plan(plan, self.routing.routing, self.routing.kv), relaxation

    def load_planned(self, model: str) -> FathomForCausalLM:
        from fathomlm.checkpoints.convert import convert
        from fathomlm.checkpoints.resolve import decoder_only, quantize_model

        if not self.replanned:
            return decoder_only(self.load_source(model), "this benchmark")
        fields = asdict(self.plan) | asdict(self.relaxation) | {"router": self.routing.routing, "kv": self.routing.kv}
        found = convert(model, dtype=self.dtype, device=self.device, seed=self.seed, **fields)
        if (kind := self.quantized(model)) is not None:
            quantize_model(found, kind)
        return decoder_only(found, "this benchmark")

    def dummy_dtype(self, device: torch.device) -> torch.dtype:
        """Of random weights: what was asked for, or what a GPU is made for."""
        from fathomlm.checkpoints.resolve import parse_dtype

        return parse_dtype(self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))  # type: ignore[return-value]


def engine_device(text: str) -> torch.device:
    """The engine's kernels and their twins are for CUDA and the CPU."""
    import torch

    from fathomlm.checkpoints.resolve import parse_device

    device = parse_device(text)
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"the engine runs on cpu, cuda or cuda:N, not on '{text}'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no '{text}': this machine's {torch.cuda.device_count()} GPUs are counted from cuda:0")
    return device


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
        for name in ("depths", *_EXIT_FLAGS):
            if getattr(self, name) is not None and source is not None and name not in allowed[source]:
                flag = _EXIT_FLAGS.get(name, "--depths")
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
        return "confidence" if any(getattr(self, name) is not None for name in _EXIT_FLAGS) else None

    def resolve(self, plan: DepthPlan) -> ResolvedDepth:
        """What the options ask for, checked against a model."""
        from fathomlm.lab.bench.measure import DepthChoice

        source = self.source
        if source in (None, "router"):
            if plan.routing is None and source is not None:
                raise OptionError("--depth router requires a model with a router, or --router expert")
            routed = DepthChoice(source="router", label="each token as deep as its router says")
            return ResolvedDepth(DepthChoice() if plan.routing is None else routed)
        if source == "forced" and plan.routing is not None:
            return self._forced_depths(plan)
        if self.depths is not None:
            raise OptionError("--depths requires a model with a router; --exit-rate forces exits without one")
        if source == "forced" and self.exit_rate is None:
            raise OptionError("--depth forced requires --exit-rate P without a router")
        return self._exits(plan)

    def _forced_depths(self, plan: DepthPlan) -> ResolvedDepth:
        from fathomlm.lab.bench.measure import DepthChoice

        assert plan.routing is not None
        for name, flag in _EXIT_FLAGS.items():
            if getattr(self, name) is not None:
                raise OptionError(f"{flag} requires a model without a router; --depths forces depths with one")
        if not plan.routing.method.picks_tokens:
            raise OptionError(
                "forced depths require an expert-choice router; a token-choice router gives each token its depth"
            )
        parts = plan.routing.capacity if self.depths is None else self.depths
        if len(parts) != plan.recursions:
            raise OptionError(f"--depths has {len(parts)} parts, but the model has {plan.recursions} recursions")
        shown = ", ".join(f"{part:.4g}" for part in parts)
        label = f"forced: parts {shown} of all tokens run recursions 1 to {plan.recursions}, drawn and not decided"
        return ResolvedDepth(DepthChoice(source="forced", label=label), fields={"forced_depths": parts})

    def _exits(self, plan: DepthPlan) -> ResolvedDepth:
        from fathomlm.lab.bench.measure import DepthChoice

        mode: Mode = self.mode or "parallel"  # type: ignore[assignment]
        exits = Exiting(mode=mode, exit_layers=self.exit_layers).exits(plan)
        layers = tuple(index + 1 for index in exits)
        exiting = Exiting(mode=mode, exit_layers=layers, threshold=self.threshold, max_stack=self.max_stack)
        layer = ", ".join(map(str, layers))
        if self.exit_rate is None:
            label = f"tokens exit after layer {layer} where the confidence exceeds {exiting.threshold_now():g} ({mode})"
            return ResolvedDepth(DepthChoice(source="confidence", label=label), exiting)
        label = f"forced: {self.exit_rate:.4g} of all tokens exit after layer {layer}, drawn and not decided ({mode})"
        return ResolvedDepth(DepthChoice(source="forced", label=label), exiting, {"forced_exits": self.exit_rate})


_EXIT_FLAGS = {
    "exit_layers": "--exit-layer", "exit_rate": "--exit-rate", "threshold": "--threshold", "mode": "--decode",
    "max_stack": "--max-stack",
}  # fmt: skip
"""Options for tokens that exit early."""


def check_depths(parts: tuple[float, ...]) -> None:
    """Every token runs the first recursion, and none runs one without those before it."""
    if parts[0] != 1 or any(later > earlier for earlier, later in pairwise(parts)):
        raise OptionError(f"--depths must begin with 1 and never rise, got {','.join(f'{part:g}' for part in parts)}")


@dataclass(frozen=True, slots=True)
class ResolvedDepth:
    """How deep tokens go in one model."""

    choice: DepthChoice
    exiting: Exiting | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    """Of `EngineOptions`."""
