"""Recipes: everything that one training run depends on, as typed records that a YAML file fills.

One loop serves pretraining, uptraining, distillation and exits; what differs is a recipe. Fields are checked where they
are read, so a mistake is named before any work is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fathomlm.checkpoints.tying import InitOptions
from fathomlm.depth import Routing
from fathomlm.depth.dropping import DropOptions
from fathomlm.depth.options import PlanOptions, RelaxOptions, RoutingOptions
from fathomlm.depth.plan import KVMode
from fathomlm.depth.routing import RouterOptions
from fathomlm.options import like, option
from fathomlm.sizes import Amount, parse_amount
from fathomlm.train.data import PrepareOptions
from fathomlm.train.losses.divergence import DIVERGENCES

Recompute = Literal["none", "inner", "recursion", "layer"]


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe:
    layers: int | None = option(None, ge=1)
    """Layers of a fresh model's encoder (as many as the decoder has); its other sizes are the decoder's."""
    dropout: float = option(0.0, ge=0, lt=1)
    """The encoder's dropout while it trains, whatever its checkpoint says; the decoder has none. Above 0 a run depends on
    how its batches are split."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(PlanOptions, RelaxOptions, DropOptions, InitOptions):
    """The model to train: one of `source`, `shape` and `architecture`, and the depth plan laid over it, by the options that
    `convert` has. With recursions, layers are dropped before the others are tied. lora and dora with `recursions: 1`
    fine-tune a plain `source`: they start as nothing, on every layer, on linears only."""

    source: str | None = None
    """Weights to start from: a preset, a Hugging Face directory or hub id, a GGUF file, a FathomLM directory."""
    shape: str | None = None
    """A preset whose shape is trained from scratch."""
    architecture: dict[str, Any] | None = None
    """A shape of your own, field by field (hidden, layers, heads, ...), trained from scratch. With `family: t5` (mt5,
    longt5) it is the decoder of an encoder-decoder model."""
    encoder: EncoderRecipe | None = None
    """Of an encoder-decoder model: how its encoder trains, and how deep a fresh one is."""
    calibrate: Amount | None = option(None, also=parse_amount)
    """Tokens of the training split over which layers of `source` are measured, for what `convert --calibrate` offers."""
    vocab: int | None = option(None, ge=1)
    """Of a plain `source`, and of the teacher, keep the tokens that the corpus' tokenizer has, so many: one that
    `fathomlm convert --vocab` made of theirs."""
    recursions: int = like(PlanOptions, "recursions", 1, ge=1)
    """1 leaves the model plain, or as `source` has it."""
    loop_norm: bool = False
    """Put the final norm between recursions too, as Nanbeige and Ouro have it; a `source` with it keeps it."""
    router: RouterOptions | None = None
    """Give each token its own depth (thesis 4); requires recursions, or a `source` that has them."""
    kv: KVMode | None = like(RoutingOptions, "kv")
    kv_sharing: str | None = None
    """kv: share without recursions: which layers read the same entries, cycle, sequence, ..."""
    kv_loops: int = option(1, ge=1)
    """kv: share without recursions: how many layers read the same entries."""
    init_std: float = 0.02
    """Standard deviation of fresh weights."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The prepared corpus, and how it is cut into training rows."""

    path: str = ""
    """A directory made by `fathomlm data prepare`."""
    sources: list[str] = like(PrepareOptions, "sources", list)
    """What `path` is prepared from when it is missing, with the options of `fathomlm data prepare`."""
    validation_from: list[str] = like(PrepareOptions, "validation_from", list)
    tokenizer: str | None = like(PrepareOptions, "tokenizer", None)
    column: str = like(PrepareOptions, "column")
    pairs: list[str] = like(PrepareOptions, "pairs", list)
    """The loss is then on targets only."""
    source_prefix: str | None = like(PrepareOptions, "source_prefix", None)
    max_tokens: Amount | None = like(PrepareOptions, "max_tokens", also=parse_amount)
    validation_fraction: float | None = like(PrepareOptions, "validation_fraction")
    context: int = option(2048, ge=1)
    """Tokens in a training row."""
    document_mask: bool = False
    """Hide the documents packed into one row from each other."""
    source_length: int = option(512, ge=1)
    """pairs: the longest source, in tokens."""
    target_length: int = option(128, ge=1)
    """pairs: the longest target, in tokens."""
    verify: bool | Literal["off", "sample", "full"] = "sample"
    """What is compared with the corpus's checksums before training: random blocks of 64 MiB in all (`sample`), everything
    (`full`, or true), or sizes only (`off`, or false)."""


@dataclass(frozen=True, kw_only=True)
class BudgetRecipe:
    """How long to train: exactly one of these."""

    tokens: Amount | None = option(None, also=parse_amount)
    steps: Amount | None = option(None, also=parse_amount)
    epochs: float | None = option(None, gt=0)
    flops: Amount | None = option(None, also=parse_amount)
    """Forward FLOPs, counted as the thesis counts its budgets (appendix of chapter 4); 2e18 is its 2EB."""


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """The global batch, which does not depend on how it is split."""

    tokens: Amount | None = option(None, also=parse_amount)
    """Tokens in one optimizer step, over all ranks; rounded to whole rows."""
    sequences: int | None = option(None, ge=1)
    """The same in rows."""
    micro: int = option(8, ge=1)
    """Rows that one forward pass of one rank takes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    kind: Literal["adamw", "muon", "adafactor"] = "adamw"
    """muon moves the matrices of layers, each update made orthogonal, and leaves the rest to adamw."""
    lr: float = option(3e-4, gt=0)
    """The highest learning rate."""
    betas: list[float] = option([0.9, 0.95], ge=0, lt=1)
    eps: float = option(1e-8, ge=0)
    weight_decay: float = option(0.1, ge=0)
    """On matrices; norms, biases and other vectors are left out."""
    clip: float = option(1.0, ge=0)
    """The largest gradient norm; 0 does not clip."""
    nonfinite_limit: int = option(3, ge=1)
    """Steps in a row whose loss is not finite before the run stops; each is skipped."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    kind: Literal["cosine", "linear", "trapezoid", "constant"] = "cosine"
    warmup: float = option(0.02, ge=0)
    """Steps (1 or more) or a part of the run (below 1) over which the rate rises."""
    cooldown: float = option(0.2, ge=0)
    """trapezoid: steps, or a part of the run, over which it falls to the floor."""
    floor: float = option(0.0, ge=0, le=1)
    """The last rate, as a part of the highest."""


@dataclass(frozen=True, kw_only=True)
class DistillRecipe:
    """Distillation from a teacher that runs beside the student (thesis 3, knowledge distillation)."""

    source: str = ""
    """The teacher: any model source."""
    kind: str = option("forward_kl", choices=tuple(DIVERGENCES))
    weight: float = option(1.0, ge=0)
    """What the divergence is multiplied by; the next-token loss keeps weight 1."""
    top_k: int = option(0, ge=0)
    """Compare this many of the teacher's likeliest tokens, and all others as one; 0 compares every token."""
    cache: str | None = option(None, requires=("top_k",))
    """top_k: a directory that keeps them, so that a second run on the same rows needs no teacher; 4 K bytes per token
    (6 K where the vocabulary exceeds 65,536)."""


@dataclass(frozen=True, kw_only=True)
class ExitRecipe:
    """Losses at early exits (thesis 2, shallow-deep; thesis 3, early-exit training)."""

    at: Literal["recursions", "all"] | list[int] = "recursions"
    """After every recursion, after every step, or after these numbers of steps (6 means after the sixth)."""
    weights: Literal["weighted", "unweighted", "aggressive", "gate", "layerskip"] = "aggressive"
    """i / sum(i) by depth; 1/n each; `coefficient` on every early exit and 1 on the last output; token by token, how likely
    a gate that learns beside the model lets it exit there (losses/exits.py): `generate --confidence gate`; or LayerSkip's,
    where an early exit counts `coefficient` times the sum of the depths below it."""
    coefficient: float = option(0.1, ge=0)
    rotate: int = option(0, ge=0)
    """Of the exits only every so-manieth counts in a step, and which ones moves on step by step (LayerSkip); 0 is all."""
    entropy: float = option(0.1, ge=0)
    """gate: what the entropy of its choice counts against the expected loss."""
    distill: str | None = option(None, choices=tuple(DIVERGENCES))
    """Teach exits from the detached last output as well."""
    distill_weight: float = option(1.0, ge=0)
    head_rank: int = option(0, ge=0)
    """Give each exit a low-rank delta on the head; with `train: exits` the rest is frozen."""
    adapter_rank: int = option(0, ge=0)
    """Give each exit a low-rank adapter in front of the final norm, x + B silu(A norm(x)); it starts as nothing."""
    layer: bool = False
    """Give each exit a whole layer over the states there, with keys and values of its own; it starts as a copy of the layer
    behind the exit."""
    draft: int = option(0, ge=0)
    """Instead of exits in the model a draft layer behind it, over each token's embedding and the last state of the token
    before (EAGLE): it learns to foretell this many tokens ahead, over its own output for all but the first. With `train:
    exits` and `distill`; it starts as a copy of the last layer."""
    classifier: bool = False
    """Teach each exit to tell whether its likeliest token is the last output's: `generate --confidence classifier`."""
    exit_vocab: int = option(0, ge=0)
    """With `train: exits`: exits learn, and later choose, among this many most frequent tokens of the training text; 0 is
    all."""


@dataclass(frozen=True, kw_only=True)
class LayerwiseRecipe:
    """The shallow model's hidden states are drawn towards the deep model's (thesis 2, layerwise distillation)."""

    shallow: int = option(0, ge=1)
    """How many layers the shallow model has."""
    mapping: Literal["last", "last_pair", "unif", "dyna", "dyna_equation"] = "dyna"
    """Which shallow layer is drawn towards which deep one: losses/layerwise.py."""
    weight: float = option(1.0, ge=0)
    """1 in the thesis' equation, 0.5 in the public research code's scripts."""


@dataclass(frozen=True, kw_only=True)
class HealRecipe:
    """Each step's output is drawn towards that of the teacher's layer in its place, after layers were tied or dropped:
    losses/layerwise.py. Requires `distill`, whose source is the teacher."""

    weight: float = option(1.0, gt=0)
    alone: bool = False
    """Train on this alone, without a head: faster, as a first stage. Validation reports the next-token loss all the same."""


@dataclass(frozen=True, kw_only=True)
class RoutingLossRecipe:
    """What teaches a router beside the next token."""

    coefficient: float | None = option(None, ge=0)
    """Of the auxiliary or balancing loss (0.001 for aux_loss, 1 for aux_router, 0.1 for balancing)."""
    z: float | None = option(None, ge=0)
    """Of the z-loss, which keeps logits small (expert 0, token 0.001)."""
    bias_rate: float = option(0.001, ge=0)
    """token, loss_free: how far the bias moves in a step."""
    capacity_warmup: int = option(0, ge=0)
    """expert: optimizer steps over which capacities fall from 1 to their value."""
    capacity_warmup_shape: Literal["stairs", "smooth"] = option("stairs", requires=("capacity_warmup",))
    """stairs: capacities fall in eight equal stairs. smooth: they fall with every step, in the shapes of the stairs, so that
    a step costs what it does on its stair."""
    capacity_per_document: bool = False
    """expert: each packed document keeps its own part of its tokens; otherwise (the default, as in the thesis) all tokens of
    a row compete. Requires data.document_mask."""
    aux_lr: float = option(1.0, ge=0)
    """aux_router: its learning rate, as a part of the model's."""

    def weight(self, routing: Routing) -> float:
        return routing.method.loss_weight(routing) if self.coefficient is None else self.coefficient

    def z_weight(self, routing: Routing) -> float:
        return routing.method.z_weight(routing) if self.z is None else self.z


@dataclass(frozen=True, kw_only=True)
class LossRecipe:
    distill: DistillRecipe | None = None
    exits: ExitRecipe | None = None
    layerwise: LayerwiseRecipe | None = None
    heal: HealRecipe | None = None
    routing: RoutingLossRecipe | None = None
    """What teaches a router; by default what the thesis chose for its kind."""
    layer_dropout: float = option(0.0, ge=0, lt=1)
    """Rows skip steps, never the first, the last with this probability (LayerSkip: losses/exits.py)."""
    chunk: int | None = option(None, ge=1)
    """Tokens whose logits are held at once; by default as many as make 2^26 of them on a CPU and 3 x 2^26 on a GPU, where
    large passes without a teacher hold more."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRecipe:
    every: int = option(250, ge=0)
    """Steps between validations; 0 validates at the end only."""
    first: bool = False
    """Validate before the first step too."""
    rows: int = option(128, ge=0)
    """Rows of the validation split that are read, always the same ones; 0 reads all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    every: int = option(500, ge=1)
    """Steps between checkpoints; the end is always saved."""
    keep: int = option(2, ge=0)
    """How many of the latest are kept; 0 keeps all."""
    best: bool = True
    """Keep the one with the lowest validation loss too."""
    milestones: list[int] = field(default_factory=list)
    """Steps whose checkpoints are made and kept for ever: plateaus to cool down from later."""


@dataclass(frozen=True, kw_only=True)
class LogRecipe:
    every: int = option(10, ge=1)
    """Steps between records; losses are of single steps."""
    tensorboard: bool = True
    wandb: str | None = None
    """A Weights & Biases project to log to, if the package is installed."""


@dataclass(frozen=True, kw_only=True)
class HardwareRecipe:
    """What the run is planned for; used by --dry-run, and for the MFU."""

    gpu: str | None = None
    """A known accelerator (a100, h100, h200, rtx3090, ...); by default the one that is there."""
    count: int = option(1, ge=1)
    peak_tflops: float | None = option(None, gt=0)
    """Dense bf16 TFLOP/s of one device, where its name is not known."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run."""

    name: str = "run"
    out: str | None = None
    """The run's directory (runs/NAME)."""
    seed: int = option(0, ge=0, le=2**63 - 1)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    budget: BudgetRecipe = field(default_factory=BudgetRecipe)
    batch: BatchRecipe = field(default_factory=BatchRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    train: Literal["all", "relaxation", "exits", "exit_heads"] = "all"
    """Which weights learn: all of them, what the steps add, or what the exits add (`exit_heads` is an older name of it)."""
    branch_from: str | None = None
    """A checkpoint of another run to go on from, its optimizer and data position included: a cool-down for a smaller
    budget starts from any plateau checkpoint of a trapezoid run."""
    precision: Literal["bf16", "float32"] = "float32"
    """bf16 computes in bfloat16 and keeps the weights and the optimizer in float32."""
    compile: bool = False
    capture: bool = False
    """Replay whole passes as CUDA graphs: for one GPU and rows of one length (no pairs), with `recompute` none or inner.
    Where it cannot be, on a CPU and under torchrun, it changes nothing."""
    recompute: Recompute = option("none", help="activation checkpointing in training")
    """Keep only what enters each recursion, or each layer. `inner` makes the feed-forward part's
    inner activations again in compiled layers without relaxation, which costs little."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun: copies of the model, or shards of it; auto shards where a copy would not fit comfortably."""
    device: str = "auto"
    evaluate: EvaluateRecipe = field(default_factory=EvaluateRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    log: LogRecipe = field(default_factory=LogRecipe)
    hardware: HardwareRecipe = field(default_factory=HardwareRecipe)

    @property
    def exits_only(self) -> bool:
        """Whether only what exits add learns, over a frozen model."""
        return self.train in ("exits", "exit_heads")

    @property
    def directory(self) -> str:
        return self.out or f"runs/{self.name}"
