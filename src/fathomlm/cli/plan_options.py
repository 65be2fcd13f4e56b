"""Options of commands that plan or convert a model: which layers are tied, what each step adds, and who routes tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.checkpoints.tying import CALIBRATION_TOKENS
from fathomlm.cli.first import check_text
from fathomlm.cli.model_options import ColumnOptions
from fathomlm.cli.progress import progress_bar
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.dropping import DROPS
from fathomlm.depth.plan import DEFAULT_RECURSIONS, KVMode
from fathomlm.depth.relaxation import DEFAULT_PREFIX_LENGTH, DEFAULT_RANK, RELAXATIONS
from fathomlm.depth.routing import NETWORKS, ROUTERS
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.errors import OptionError
from fathomlm.options import like, option

if TYPE_CHECKING:
    from fathomlm.checkpoints.activations import Activations
    from fathomlm.checkpoints.source import BaseCheckpoint
    from fathomlm.model.seq2seq import FathomModel


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which layers are tied, and how often they run."""

    sharing: str | None = option(None, choices=tuple(STRATEGIES), help="which layers are tied", default_text="cycle")
    recursions: int | None = option(None, help="how often the shared block runs", default_text=str(DEFAULT_RECURSIONS))
    resize: Literal["add", "drop"] | None = option(
        None, const="add",
        help="where the recursions do not divide the layers, add steps (also --resize alone) or drop some",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Text over which a plain model's activations are measured."""

    calibrate: tuple[str, ...] | None = option(
        None, metavar="FILE", first=check_text,
        help="measure layers over this text: .txt, .md, JSON Lines (also .gz, .xz, .zst) or Parquet; repeatable",
    )  # fmt: skip
    calibrate_tokens: int | None = option(
        None, ge=2, help="tokens of it to read", default_text=f"{CALIBRATION_TOKENS:,}", requires=("calibrate",)
    )
    column: str | None = like(ColumnOptions, "column", None, default_text="text", requires=("calibrate",))

    def measured(
        self, source: FathomModel | BaseCheckpoint, *, moments: bool = True, device: str = "cpu"
    ) -> Activations | None:
        """What `measure_activations` finds, with a progress bar; None without text."""
        if self.calibrate is None:
            return None
        from fathomlm.checkpoints.activations import measure_activations
        from fathomlm.train.data.sources import expand, read

        documents = (document for each in expand(list(self.calibrate)) for document in read(each, (self.column or "text",)))
        texts = (document.fields[0] for document in documents)
        tokens = self.calibrate_tokens or CALIBRATION_TOKENS
        with progress_bar("calibrating") as update:
            return measure_activations(source, texts, tokens=tokens, moments=moments, device=device, on_layer=update)


@dataclass(frozen=True, kw_only=True)
class DropOptions(CalibrateOptions):
    """Which layers are left out."""

    drop: int | None = option(None, ge=0, help="leave out N layers; the result is an ordinary model with fewer", metavar="N")
    by: str | None = option(
        None, choices=tuple(DROPS), default_text="influence with --calibrate, otherwise stepwise", requires=("drop",),
        help="--drop: those that change the text least (influence), all but evenly spaced ones (stepwise), or the last",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RelaxOptions:
    """What each step adds to the layer that it shares."""

    relax: str | None = option(None, choices=tuple(RELAXATIONS), help="what each step adds", default_text="nothing")
    rank: str | None = option(
        None, metavar="K", default_text=str(DEFAULT_RANK),
        help="lora, dora: one rank, or pairs such as q=64,kv=128,ffn=256, where other linears get none",
    )  # fmt: skip
    linears_only: bool = option(False, help="lora, dora: leave norms and biases tied, as the thesis does")
    prefix_length: int | None = option(None, help="prefix: vectors per step", default_text=str(DEFAULT_PREFIX_LENGTH))


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """How tokens are given their depth, and whose keys and values they attend to."""

    router: str | None = option(
        None, choices=tuple(ROUTERS), help="expert (recursions pick tokens) or token (tokens pick their depth)"
    )
    router_network: str | None = option(None, choices=NETWORKS, help="network of the router", default_text="linear")
    router_score: str | None = option(
        None, metavar="NAME",
        help="expert: sigmoid (default), tanh or identity; token: softmax (default) or sigmoid",
    )  # fmt: skip
    router_alpha: float | None = option(
        None, metavar="A", default_text="2 with interpolate and sigmoid, 0.1 with add",
        help="weight of a recursion's output at score 1",
    )  # fmt: skip
    router_update: str | None = option(
        None, metavar="NAME", default_text="interpolate",
        help="expert: interpolate, x + g (f(x) - x), or add, x + g f(x), as the thesis trains from scratch",
    )  # fmt: skip
    kv: KVMode | None = option(
        None, default_text="cache",
        help="KV cache: every recursion's own (cache), the first one's (share), or both (hybrid, with a router)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.router is None:
            for name in self.given:
                raise OptionError(f"--router-{name} requires --router")

    @property
    def given(self) -> dict[str, Any]:
        """The fields of `build_routing` that were given."""
        values = {name: getattr(self, f"router_{name}") for name in ("network", "score", "alpha", "update")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def routing(self) -> dict[str, Any] | None:
        """What `convert` calls `router`."""
        return None if self.router is None else {"kind": self.router, **self.given}


def planned_over(options: PlanOptions, architecture: Architecture, own: DepthPlan | None) -> tuple[Architecture, DepthPlan]:
    """What the options lay over a model's shape, in place of its own plan; a model whose loops begin with an injection keeps
    its layers, and loops another number of times."""
    if own is None or not own.injection:
        recursions = DEFAULT_RECURSIONS if options.recursions is None else options.recursions
        return architecture, DepthPlan.build(options.sharing or "cycle", recursions, architecture.layers, options.resize)
    if options.recursions is None or options.sharing is not None or options.resize is not None:
        raise OptionError(f"a {architecture.family} model takes --recursions, and neither --sharing nor --resize")
    plan = own.with_recursions(options.recursions)
    return dataclasses.replace(architecture, layers=plan.unrolled_layers), plan
