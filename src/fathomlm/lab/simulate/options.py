"""The options of `fathomlm simulate`. Nothing here loads a tensor library: what they do is in the other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fathomlm.cli.common import SOURCE, ColumnOptions, JsonOptions
from fathomlm.cli.first import check_shape, check_text, check_written_directory, check_written_file
from fathomlm.decode.exiting import DEFAULT_THRESHOLD, Exiting
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from fathomlm.lab.bench.options import (
    DEPTHS,
    EngineBenchOptions,
    ForcedDepthOptions,
    GpuOptions,
    PlannedModelOptions,
    WorkloadOptions,
)
from fathomlm.lab.common import PromptOptions
from fathomlm.options import like, option, section

TOKENS = 512
"""Tokens of a sequence from --data, where the model's context has room for so many."""
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class SequenceOptions(ColumnOptions):
    """The sequences, and how deep their tokens go: recorded, drawn, or from text through a model."""

    trajectories: Path | None = option(
        None, metavar="FILE", help='JSON Lines, one sequence each: {"prompt": 12, "depths": [1, 2, 1]}'
    )
    depths: tuple[float, ...] | None = like(
        ForcedDepthOptions, "depths", gt=None, le=None, default_text=None, help=f"drawn: {DEPTHS}"
    )
    workload: str | None = like(
        WorkloadOptions,
        "workload",
        None,
        default_text="thesis",
        requires=("depths",),
        help="--depths: lengths as in `bench`",
    )
    requests: int | None = like(
        WorkloadOptions, "requests", default_text="as in `bench`", requires=("depths",), help="--depths: number of sequences"
    )
    data: tuple[str, ...] = option(
        (), metavar="FILE", first=check_text, help="text through MODEL (.txt, .md, .jsonl, a corpus); repeatable"
    )
    depth: Literal["oracle", "confidence", "router"] | None = like(
        ForcedDepthOptions, "depth", default_text="router with a router, oracle without", requires=("data",),
        help="--data: what decides: the last layer's own choice (oracle), the confidence at an exit, or the router",
    )  # fmt: skip
    threshold: float = like(
        Exiting, "threshold", DEFAULT_THRESHOLD, parse=None, default_text=None,
        help="--depth confidence: exit where the confidence exceeds T",
    )  # fmt: skip
    exit_layers: tuple[int, ...] | None = like(
        Exiting, "exit_layers", default_text="the model's, or its recursions", requires=("data",)
    )
    sequences: int = option(32, ge=1, help="--data: number of sequences")
    tokens: int | None = option(None, ge=1, help="--data: tokens of each", default_text=f"the context, at most {TOKENS}")
    prompt_tokens: int = like(PromptOptions, "prompt_tokens", 1, help="--data: how many of them are the prompt")
    save: Path | None = option(None, metavar="FILE", first=check_written_file, help="write the depths, for --trajectories")

    def __post_init__(self) -> None:
        chosen = [name for name in ("trajectories", "depths", "data") if getattr(self, name)]
        if len(chosen) != 1:
            raise OptionError("give the depths of tokens with one of --trajectories FILE, --depths P,P and --data FILE")


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """How long forward passes take."""

    preset: str | None = option(
        None, metavar="NAME", help="the thesis' A100: 40gb/gemma-2b/2, 16gb/pythia-1b/2/64 (table/model/blocks/rank)"
    )
    ends: bool = option(False, requires=("preset",), help="--preset: count embedding and head, which the thesis leaves out")
    costs: Path | None = option(None, metavar="FILE", help="table of milliseconds by batch size (JSON or YAML)")
    measure: bool = option(False, help="time the engine's own passes of MODEL on this device, with random weights")
    context: int = option(256, ge=1, help="--measure: tokens that each sequence attends to")

    def __post_init__(self) -> None:
        if len([name for name in ("preset", "costs", "measure") if getattr(self, name)]) != 1:
            raise OptionError("give the times of passes with one of --preset NAME, --costs FILE and --measure")


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """The batches, and what fits."""

    batch_size: int | None = like(EngineOptions, "batch_size", None, default_text=f"the preset's largest, or {BATCH}")
    plain_batch_size: int | None = like(
        EngineOptions,
        "batch_size",
        None,
        help="batch size of the plain model",
        default_text="its preset's largest, or as many",
    )
    max_sequences: int | None = like(
        EngineOptions, "max_sequences", default_text="--batch-size; with --measure twice that",
        help="max concurrent sequences, depth-wise",
    )  # fmt: skip
    gpu_memory: int | None = like(GpuOptions, "gpu_memory", help="limit the sequences to those that fit a GPU, such as 16GB")
    fill: Literal["free", "exact"] = option(
        "free",
        help="deeper KV of a token that exits: free, as in the thesis, or exact, as the engine computes it",
    )  # fmt: skip
    waiting: Literal["shrink", "pad"] = option(
        "shrink",
        help="vanilla: a batch whose sequences end takes the time of those left, as in the thesis, or as before",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulateThroughput(PlannedModelOptions, JsonOptions):
    """Compare vanilla, sequence-wise and depth-wise batching of the same sequences. Requires how deep tokens go
    (--trajectories, --depths, or --data through MODEL) and how long passes take (--preset, --costs or --measure). All
    sequences are there from the start. The plain model is the baseline: without and with sequence-wise batching. The last
    two ways run the engine's scheduler and page pool, with a clock for a device."""

    model: str | None = option(
        None, positional=True, first=check_shape,
        help=f"{SOURCE}: for --data and --measure, and for --gpu-memory without a preset",
    )  # fmt: skip
    out: Path | None = option(
        None, metavar="DIR", first=check_written_directory,
        help="also write simulation.json, and simulation.png where matplotlib is installed",
    )  # fmt: skip
    sequences: SequenceOptions = section(SequenceOptions, "sequences")
    costs: CostOptions = section(CostOptions, "times")
    batching: BatchingOptions = section(BatchingOptions, "batching")

    def __post_init__(self) -> None:
        data, costs, batching = self.sequences.data, self.costs, self.batching
        if costs.measure and self.model is None:
            raise OptionError("--measure requires a MODEL, such as smollm-135m --dummy --recursions 3")
        if batching.fill == "exact" and costs.measure:
            raise OptionError("--fill exact cannot be combined with --measure; `simulate validate` measures exits exactly")
        if batching.gpu_memory is not None and self.model is None and costs.preset is None:
            raise OptionError("--gpu-memory requires a MODEL or a --preset, whose weights and KV cache are counted")
        if data and self.model is None:
            raise OptionError("--data requires a MODEL")
        if data and self.dummy:
            raise OptionError("--data cannot be combined with --dummy: it requires the model's own weights")
        if self.model is not None and not data and not costs.measure and batching.gpu_memory is None:
            raise OptionError(
                "MODEL requires --data, --measure or --gpu-memory; the preset and the table of times need none"
            )


@dataclass(frozen=True, kw_only=True)
class Thesis(JsonOptions):
    """Simulate every row of tab_rrt:final_performance_throughput (40gb) and its 16 GB twin. The thesis prints neither exit
    trajectories nor sequence lengths; mean depths and two mean lengths are those at which some of its printed figures come
    out, and the rest is predicted. docs/simulate.md says which is which."""

    table: tuple[Literal["40gb", "16gb"], ...] = option((), help="which table; repeatable", default_text="both")
    sequences: int = option(2000, ge=1, help="sequences of SlimPajama and of RedPajama; the thesis: 20000")
    out: Path | None = option(None, metavar="FILE", first=check_written_file, help="also write the JSON object there")


@dataclass(frozen=True, kw_only=True)
class Validate(EngineBenchOptions):
    """Measure what passes, prompts and the host take, simulate a workload with that, run it with the engine, and report how
    far apart the two are. Depths are forced: --depths with a router, --exit-rate without; a plain model has none."""

    kind = "validate"
    workload: WorkloadOptions = section(WorkloadOptions, "workload", requests=64)
    rounds: int = option(5, ge=1, help="how often to measure, simulate and run; the median counts")
    within: float | None = option(
        None, gt=0, metavar="P", help="exit with code 1 where the two differ by more than this part, such as 0.15"
    )
    peer: tuple[str, ...] = ()
