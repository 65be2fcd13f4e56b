"""The options of `fathomlm analyze`, `plot`, `plan` and `calibrate`. Nothing here loads a tensor library: what they do is
in the other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fathomlm.checkpoints.tying import WEIGHTS_ONLY, InitOptions
from fathomlm.cli.common import (
    SOURCE,
    ExitPackOptions,
    ForceOptions,
    JsonOptions,
    ModelOptions,
    TextOptions,
    ThreadOptions,
)
from fathomlm.cli.decoding import MessageOptions
from fathomlm.cli.display import model_name
from fathomlm.cli.first import check_model, check_shape, check_written_directory
from fathomlm.decode.exiting import ONE_EXIT, Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import ThresholdOptions
from fathomlm.depth.options import PlanOptions, RoutingOptions
from fathomlm.depth.plan import KVMode
from fathomlm.errors import OptionError
from fathomlm.lab.bench.options import GpuOptions
from fathomlm.lab.common import PromptOptions, check_directory
from fathomlm.lab.drawing import check_matplotlib
from fathomlm.options import ChecksFirst, check, like, option, section
from fathomlm.sizes import parse_amount
from fathomlm.train.recipe import Recipe, Recompute

LONGEST_EXIT_ROW = 256
"""Every layer is asked at every token, which takes a while: rows are short enough for a bar to move."""
AXES: dict[str, tuple[str, str]] = {
    "tokens": ("tokens", "training tokens"),
    "steps": ("step", "optimizer steps"),
    "time": ("seconds", "training time"),
    "flops": ("flops", "training compute"),
}
"""What a curve can be drawn over: the field of a record, and what the axis is called."""
METRICS: dict[str, tuple[str, str]] = {
    "loss": ("training loss", "nats per token"),
    "validation": ("validation loss", "nats per token"),
    "exits": ("validation loss at each exit", "nats per token"),
    "lr": ("learning rate", ""),
    "tokens_per_s": ("speed", "tokens per second"),
    "mfu": ("utilisation (MFU)", "% of peak"),
    "mfu_sustained": ("utilisation of what is sustained", "% of sustained rate"),
    "grad_norm": ("gradient norm", "before clipping"),
}
"""What can be drawn: the panel's title, and the unit of its axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """How the curves of training runs are drawn."""

    x: str = option("tokens", choices=tuple(AXES), help="horizontal axis")
    metric: str | None = option(
        None, choices=tuple(METRICS), help="what to draw", default_text="training and validation loss"
    )
    smooth: float | None = option(
        None, ge=0, le=0.99, metavar="F", default_text="by length",
        help="smoothing of the curves, from 0 (none) to 0.99",
    )  # fmt: skip
    """None lets the mean reach over about a fortieth of the run, so that a short run is not drawn above where it is."""
    logy: bool = option(False, help="logarithmic vertical axis")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(ForceOptions, JsonOptions, ChecksFirst):
    """What all kinds share: where they write, and how they answer."""

    kind: ClassVar[str]
    out: Path | None = option(None, metavar="DIR", help="directory to write", default_text="analysis/KIND-NAME")

    @property
    def source(self) -> str:
        """What is looked at, as the user named it."""
        raise NotImplementedError

    @property
    def directory(self) -> Path:
        return self.out or Path("analysis") / f"{self.kind}-{model_name(self.source)}"

    def check_first(self) -> None:
        check_matplotlib()
        check_directory(self.directory, self.kind, self.force)


@dataclass(frozen=True, kw_only=True)
class TextAnalysis(AnalysisOptions, ModelOptions, TextOptions):
    """What the kinds share that run text through a model."""

    data: tuple[str, ...] = like(
        TextOptions, "data",
        help="text (.txt, .md), JSON Lines (.jsonl, also .gz, .xz, .zst), or the validation split of a corpus; repeatable",
    )  # fmt: skip
    context: int | None = option(None, ge=1, help="tokens per row", default_text="the model's context, at most 1024")

    def check_first(self) -> None:
        AnalysisOptions.check_first(self)
        TextOptions.check_first(self)

    @property
    def source(self) -> str:
        return self.model


@dataclass(frozen=True, kw_only=True)
class AnalyzeRouting(TextAnalysis):
    """Run text through a routed MODEL as in training (top-k) and as in inference (causal): metrics of both, router scores,
    compute, the loss at every maximum depth, whether depth is spent where it lowers the loss, which tokens go deep, and text
    colored by depth."""

    kind = "routing"
    rows: int = option(64, ge=1, help="max rows of text")
    samples: int = option(4, ge=1, help="rows whose beginning is shown as colored text")


@dataclass(frozen=True, kw_only=True)
class KeysAndValues(TextAnalysis):
    """Run text through any MODEL and map hidden states, keys and values over its steps: their norms and how similar they
    are. Where recursions compute nearly the same keys and values, they could share them."""

    kind = "kv"
    data: tuple[str, ...] = like(TextAnalysis, "data", ())
    text: str | None = option(None, help="text to run instead of --data")
    tokens: int = option(2048, ge=2, help="run about N tokens")


@dataclass(frozen=True, kw_only=True)
class Exits(TextAnalysis, ExitPackOptions):
    """Run text through MODEL and treat every layer as an exit: agreement with the last layer, cosine similarity of the
    states, confidences by agreement with the fitted Beta densities. Then complete a few prompts and break down the time:
    layers, heads, confidences, cache, copied states. An encoder-decoder reads each document and is evaluated on its own
    completion."""

    kind = "exits"
    context: int | None = like(TextAnalysis, "context", default_text=f"the model's context, at most {LONGEST_EXIT_ROW}")
    tokens: int = option(1024, ge=2, help="evaluate about N tokens")
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers", default_text="the model's own, or some of the layers")
    confidence: str = like(Exiting, "confidence", "gap", default_text=None, choices=ONE_EXIT)
    rule: ThresholdOptions = section(ThresholdOptions, rule="thesis")
    prompts: int = like(PromptOptions, "prompts", 4, ge=0, help="documents to complete for the times; 0 skips them")
    max_new_tokens: int = like(Sampling, "max_new_tokens", 32, ge=2)


@dataclass(frozen=True, kw_only=True)
class AnalyzeWeights(AnalysisOptions, ThreadOptions):
    """Tie the layers of a plain MODEL on paper, as `convert` would, and analyze what each step loses: the singular values of
    the residuals that a LoRA or DoRA would start from. Shows for each linear and depth which rank captures how much, and
    what it costs. No text is needed, and nothing is converted."""

    kind = "weights"
    model: str = option(positional=True, help=SOURCE, first=check_model)
    init: tuple[str, ...] = like(
        InitOptions, "init", ("average", "stepwise"), comma=True, choices=WEIGHTS_ONLY, metavar="NAME,...",
        default_text=None, help="initializations of tied layers",
    )  # fmt: skip
    plan: PlanOptions = section(PlanOptions, "depth plan")

    @property
    def source(self) -> str:
        return self.model


@dataclass(frozen=True, kw_only=True)
class Runs(AnalysisOptions):
    """Write a page about training runs: losses, validation, exits, learning rate, speed and gradient norms, with the final
    numbers. RUN is a run's directory, a directory of runs, or a metrics.jsonl. `fathomlm plot` draws one of them."""

    kind = "runs"
    runs: tuple[Path, ...] = option(positional=True, metavar="RUN", help="such as runs/*, runs, runs/tiny/metrics.jsonl")
    curves: PlotOptions = section(PlotOptions, skip=("metric",))

    @property
    def source(self) -> str:
        return str(self.runs[0]) if len(self.runs) == 1 else f"{len(self.runs)}-places"


@dataclass(frozen=True, kw_only=True)
class Plot(JsonOptions):
    """Draw training and validation loss of several runs, or another metric, into one picture; the final numbers stand
    beneath it and are printed. RUN is a run's directory, a directory of runs, or a metrics.jsonl."""

    runs: tuple[Path, ...] = option(positional=True, metavar="RUN", help="such as runs/*, runs, runs/tiny/metrics.jsonl")
    out: Path = option(Path("curves.png"), metavar="FILE", help="picture to write: .png, .svg or .pdf")
    curves: PlotOptions = section(PlotOptions)


@dataclass(frozen=True, kw_only=True)
class Plan(JsonOptions, ChecksFirst):
    """Three plans, any of them together. --budget: how many tokens it buys for the plain, the recursive and the routed (MoR)
    model of each base. --runs: which model size each budget was best spent on, from finished runs. --gpu-memory: which
    recursions, ranks and batch sizes fit. FLOPs are the forward pass without embedding and head, as the thesis counts."""

    models: tuple[str, ...] = option(
        (), comma=True, metavar="MODEL,...", first=check_shape,
        help="presets, or other models by their configuration: smollm-135m,smollm-360m",
    )  # fmt: skip
    recursions: tuple[int, ...] | None = like(
        PlanOptions, "recursions", ge=1, metavar="N,...", default_text="3; 1,2,3 for --gpu-memory"
    )
    budget: tuple[float, ...] = option(
        (), metavar="FLOPS,...", parse=lambda text, flag: parse_amount(flag, text),
        help="forward FLOPs: 16.5e18, or several such as 2e18,5e18,16.5e18",
    )  # fmt: skip
    wide_kv: bool = option(False, help="count k and v as wide as q, as the thesis' printed budgets do")
    runs: tuple[Path, ...] = option((), nargs="+", metavar="DIR", help="finished runs, or directories of runs")
    out: Path | None = option(
        None, metavar="FILE", help="picture of the fits to write: .png, .svg or .pdf", requires=("runs",)
    )
    gpu_memory: int | None = like(
        GpuOptions, "gpu_memory", help="80GB, 24GiB (a number alone is bytes); nine tenths of it are planned for"
    )
    ranks: tuple[int, ...] | None = option(
        None, ge=0, metavar="K,...", default_text="0,64,256", requires=("gpu_memory",),
        help="LoRA ranks to try on every linear; 0 is none",
    )  # fmt: skip
    recompute: Recompute = like(Recipe, "recompute")
    sharing: str = like(PlanOptions, "sharing", "middle-cycle", default_text=None)
    router: str | None = like(RoutingOptions, "router", "expert", help="router of the MoR rows")
    kv: KVMode = like(RoutingOptions, "kv", "cache", help="KV cache of the MoR rows", default_text=None)
    context: int = option(2048, ge=1, help="tokens per sequence")

    def check_first(self) -> None:
        counted = bool(self.budget) or self.gpu_memory is not None
        if not counted and not self.runs:
            raise OptionError("nothing to plan: give --budget FLOPS, --runs DIR or --gpu-memory SIZE")
        if counted and not self.models:
            raise OptionError("--budget and --gpu-memory require --models, such as smollm-135m,smollm-360m")
        if self.models and not counted:
            raise OptionError("--models requires --budget or --gpu-memory")


@dataclass(frozen=True, kw_only=True)
class Calibrate(TextOptions, ModelOptions, ExitPackOptions, JsonOptions):
    """Complete the beginnings of documents, compare at every token the choice of an exit with that of the full model, and
    find the smallest confidence threshold at which few enough tokens are wrong (--risk), or from which on the two mostly
    agree (--rule thesis). The result goes into the model's directory as threshold.json, with a picture, and
    `generate --threshold adaptive` reads it there."""

    data: tuple[str, ...] = like(TextOptions, "data", nargs="+")
    prompts: int = like(PromptOptions, "prompts", 32)
    prompt_tokens: int | None = like(PromptOptions, "prompt_tokens", None, default_text="32; 512 for an encoder")
    chat: bool = like(MessageOptions, "chat", help="documents are messages, each wrapped in the model's chat template")
    max_new_tokens: int = like(Sampling, "max_new_tokens", 64)
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers", help="the exit, counted from 1 in unrolled depth")
    confidence: str | None = like(Exiting, "confidence", choices=(*ONE_EXIT, "gate"))
    rule: ThresholdOptions = section(ThresholdOptions)
    out: Path | None = option(
        None, metavar="DIR", first=check_written_directory, help="directory to write",
        default_text="--exits, or MODEL if it is a directory",
    )  # fmt: skip
