"""What one layer is made of, and what stands around the layers.

An `Architecture` describes a plain, untied Transformer: the base that a depth plan is laid over. It is all that the
cost counter needs and all that the model builder needs, so the two cannot disagree. Families differ only in these
traits.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fathomlm.depth.bounds import BOUNDS, read_record, size, to_record
from fathomlm.errors import OptionError, choices
from fathomlm.options import check, option

NormKind = Literal["rms", "rms_plus_one", "layer"]
Residual = Literal["pre", "post", "sandwich", "around", "parallel"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Positions = Literal["rotary", "relative"]
RopeScaling = Literal["none", "linear", "llama3", "yarn", "longrope"]
LATER_ROPE = ("beta_fast", "beta_slow", "truncate", "attention_factor", "factors")
CROSS = ("cross_q", "cross_k", "cross_v", "cross_o")
LINEARS = ("q", "k", "v", "o", *CROSS, "gate", "up", "down")
"""Every linear that a layer may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: the base frequency and how it is stretched to longer contexts."""

    theta: float = option(10_000.0, gt=0)
    scaling: RopeScaling = "none"
    factor: float = option(1.0, gt=0)
    low_freq_factor: float = option(1.0, gt=0)
    """Llama 3 only: wavelengths longer than original_context / this are divided by `factor`."""
    high_freq_factor: float = option(4.0, gt=0)
    """Llama 3 only: wavelengths shorter than original_context / this stay as they are."""
    original_context: int = size("original_context", 8192)
    """Llama 3, YaRN, LongRoPE: the context length that the model was first trained at."""
    beta_fast: float = option(32.0, gt=0)
    """YaRN: frequencies with more turns than this over the original context stay as they are."""
    beta_slow: float = option(1.0, gt=0)
    """YaRN: those with fewer turns than this are divided by `factor`; between the two they are blended."""
    truncate: bool = True
    """YaRN: whether the ends of the blend are rounded to whole frequencies."""
    attention_factor: float = option(1.0, gt=0)
    """YaRN, LongRoPE: what queries and keys are multiplied by, as part of the rotation."""
    factors: tuple[float, ...] = option((), gt=0)
    """LongRoPE: what each frequency is divided by, within the original context."""

    def __post_init__(self) -> None:
        check(self, "rope.")

    def to_dict(self) -> dict[str, Any]:
        return to_record(self, LATER_ROPE)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One weight matrix of a layer, by its name in this house (q, k, v, o, gate, up, down; cross_q, ... over an encoder)."""

    name: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def path(self) -> str:
        """Where a layer keeps it: attn.q, cross.q, mlp.gate."""
        if self.name.startswith("cross_"):
            return self.name.replace("_", ".")
        return f"attn.{self.name}" if self.name in ("q", "k", "v", "o") else f"mlp.{self.name}"

    @property
    def shape(self) -> tuple[int, int]:
        """Of its weight, as torch keeps it."""
        return self.outputs, self.inputs

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A plain Transformer decoder, described by its traits; with `cross`, one that attends to an encoder's output."""

    family: str
    """The checkpoint layout that is read and exported: llama, mistral, ... (`checkpoints.families`)."""
    layers: int = size("layers")
    hidden: int = size("hidden")
    intermediate: int = size("intermediate")
    heads: int = size("heads")
    kv_heads: int = size("kv_heads")
    head_dim: int = size("head_dim")
    vocab: int = size("vocab")
    context: int = size("context", 2048)
    """The longest sequence that the base was trained for."""
    tied_embeddings: bool = True
    """Whether the output head is the input embedding."""
    norm: NormKind = "rms"
    norm_eps: float = option(1e-5, ge=0)
    activation: Activation = "silu"
    gated: bool = True
    """Whether the feed-forward part is down(act(gate(x)) * up(x)); otherwise down(act(up(x)))."""
    residual: Residual = "pre"
    """pre: norm before each half; post: after it, in front of the sum (OLMo 2); sandwich: before and after (Gemma 3);
    around: before it, and over the sum (Huginn); parallel: both halves read one input (Pythia)."""
    residual_scale: float = option(1.0)
    """pre: what each half's output is multiplied by before it is added (Granite)."""
    qk_norm: bool = False
    qk_norm_wide: bool = False
    """qk_norm: over all heads at once (OLMo 2), and not within each."""
    qkv_bias: bool = False
    qk_bias: bool = False
    """Biases of queries and keys alone (Huginn)."""
    o_bias: bool = False
    mlp_bias: bool = False
    rope: Rope = field(default_factory=Rope)
    local_rope: Rope | None = None
    """The rotary base of layers with a window, where it differs (Gemma 3)."""
    rotary_fraction: float = option(1.0, ge=0, le=1)
    """The part of each head that is rotated (Pythia: a quarter)."""
    rotated: tuple[bool, ...] = ()
    """Which layers rotate queries and keys (SmolLM3: three of four); empty means that all do."""
    windows: tuple[int | None, ...] = option((), ge=1, le=BOUNDS["window"][1])
    """The attention window of each layer (None: the whole context); empty means no layer has one."""
    attention_scale: float | None = option(None)
    """What scores are multiplied by; None means head_dim ** -0.5."""
    embedding_scale: float = option(1.0)
    """What embeddings are multiplied by (Gemma: hidden ** 0.5)."""
    head_scale: float = option(1.0)
    """What hidden states are multiplied by before the head (the first T5: hidden ** -0.5)."""
    positions: Positions = "rotary"
    """rotary turns queries and keys; relative adds a learned number for each head and distance to the scores (T5)."""
    relative_buckets: int = size("relative_buckets", 32)
    """relative: how many numbers a head has. Half of them are for one distance each, the others for ever longer ranges."""
    relative_distance: int = size("relative_distance", 128)
    """relative: all distances from this one on have the same number."""
    cross: bool = False
    """Whether each layer also attends to an encoder's output (thesis 2, the T5 family)."""
    memory_width: int = size("memory_width", 0)
    """cross: how wide the encoder's output is."""
    experts: int = size("experts", 0)
    """How many feed-forward parts of width `intermediate` a layer has, of which a router chooses for each token (Qwen3-MoE);
    0 is one for all."""
    experts_per_token: int = size("experts_per_token", 0)
    """experts: how many it chooses."""
    experts_normed: bool = False
    """experts: whether the chosen ones' probabilities are made to add up to 1."""

    def __post_init__(self) -> None:
        check(self, inside=False)
        if self.heads % self.kv_heads:
            raise OptionError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}")
        if self.windows and len(self.windows) != self.layers:
            raise OptionError(f"windows must name every layer: got {len(self.windows)} for {self.layers} layers")
        if self.rotated and len(self.rotated) != self.layers:
            raise OptionError(f"rotated must name every layer: got {len(self.rotated)} for {self.layers} layers")
        if self.residual_scale != 1.0 and self.residual != "pre":
            raise OptionError(f"residual_scale requires the residual 'pre', got {self.residual!r}")
        if self.qk_norm_wide and not self.qk_norm:
            raise OptionError("qk_norm_wide requires qk_norm")
        if self.rope.factors and len(self.rope.factors) != self.rotary_dim // 2:
            raise OptionError(f"rope factors must be {self.rotary_dim // 2}, got {len(self.rope.factors)}")
        if self.rotary_dim % 2:
            raise OptionError(f"the rotated part of a head must be even, got {self.rotary_dim} of {self.head_dim}")
        self._check_relative()
        if self.cross != (self.memory_width > 0):
            raise OptionError(f"memory_width requires cross, got {self.memory_width} with cross={self.cross}")
        if self.cross and self.residual != "pre":
            raise OptionError(f"cross requires residual='pre', got {self.residual!r}")

        if not 0 <= self.experts_per_token <= self.experts or (self.experts_per_token == 0) != (self.experts == 0):
            raise OptionError(f"experts_per_token must be from 1 to {self.experts}, got {self.experts_per_token}")
        usual = self.gated and self.activation == "silu" and not self.mlp_bias and self.residual == "pre" and not self.cross
        if self.experts and (not usual or self.residual_scale != 1.0):
            raise OptionError("experts require gated SiLU feed-forward parts without biases, and residual='pre'")

    def _check_relative(self) -> None:
        if self.positions not in get_args(Positions):  # any other would count as relative
            raise OptionError(choices("positions", self.positions, get_args(Positions)))
        if self.positions == "rotary":
            return
        if self.rotary_dim or self.kv_heads != self.heads:
            raise OptionError("relative positions require rotary_fraction=0 and kv_heads == heads")
        if self.relative_buckets < 2 or self.relative_distance <= self.relative_buckets // 2:
            raise OptionError(
                "relative_buckets must be >= 2 and relative_distance more than half of them, got "
                f"{self.relative_buckets} and {self.relative_distance}"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def kv_bytes(self, element_bytes: int) -> int:
        """A key and a value of one token at one step."""
        return 2 * self.kv_width * element_bytes

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def rotates(self, layer: int) -> bool:
        return self.rotated[layer] if self.rotated else True

    def linears(self) -> tuple[LinearSpec, ...]:
        """The weight matrices of one layer, in the order they are used; those of experts are apart (`expert_shapes`)."""
        attention = (
            LinearSpec("q", self.hidden, self.query_width, self.qkv_bias or self.qk_bias),
            LinearSpec("k", self.hidden, self.kv_width, self.qkv_bias or self.qk_bias),
            LinearSpec("v", self.hidden, self.kv_width, self.qkv_bias),
            LinearSpec("o", self.query_width, self.hidden, self.o_bias),
        )
        if self.experts:
            return attention
        gate = (LinearSpec("gate", self.hidden, self.intermediate, self.mlp_bias),) if self.gated else ()
        cross = (
            LinearSpec("cross_q", self.hidden, self.query_width, self.qkv_bias),
            LinearSpec("cross_k", self.memory_width, self.kv_width, self.qkv_bias),
            LinearSpec("cross_v", self.memory_width, self.kv_width, self.qkv_bias),
            LinearSpec("cross_o", self.query_width, self.hidden, self.o_bias),
        )
        return (
            *attention,
            *(cross if self.cross else ()),
            *gate,
            LinearSpec("up", self.hidden, self.intermediate, self.mlp_bias),
            LinearSpec("down", self.intermediate, self.hidden, self.mlp_bias),
        )

    def vectors(self) -> dict[str, int]:
        """The other tensors of one layer, norms and biases, by name and width."""
        ends = ("weight", "bias") if self.norm == "layer" else ("weight",)
        norms = ["norm_attn", "norm_cross", "norm_mlp"] if self.cross else ["norm_attn", "norm_mlp"]
        if self.residual == "post":
            norms = ["norm_attn_out", "norm_mlp_out"]
        norms += ["norm_attn_out", "norm_mlp_out"] if self.residual in ("sandwich", "around") else []
        widths = {f"{norm}.{end}": self.hidden for norm in norms for end in ends}
        if self.qk_norm:
            q, k = self.qk_norm_widths
            widths |= {f"attn.q_norm.{end}": q for end in ends} | {f"attn.k_norm.{end}": k for end in ends}
        return widths | {f"{linear.path}.bias": linear.outputs for linear in self.linears() if linear.bias}

    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer's experts and of what chooses among them, by name."""
        if not self.experts:
            return {}
        inwards, outwards = (self.experts, self.intermediate, self.hidden), (self.experts, self.hidden, self.intermediate)
        each = {"mlp.gate.weight": inwards, "mlp.up.weight": inwards, "mlp.down.weight": outwards}
        return {"mlp.router.weight": (self.experts, self.hidden), **each}

    @property
    def expert_weights(self) -> int:
        """Of the experts that one token runs, and of what chooses them."""
        return self.experts * self.hidden + 3 * self.experts_per_token * self.hidden * self.intermediate

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Of the norms of queries and keys."""
        return (self.query_width, self.kv_width) if self.qk_norm_wide else (self.head_dim, self.head_dim)

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of one layer, by name."""
        linears = {f"{linear.path}.weight": linear.shape for linear in self.linears()}
        return {**linears, **self.expert_shapes(), **{name: (width,) for name, width in self.vectors().items()}}

    @property
    def layer_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.layer_shapes().values())

    def pair_linear(self, name: str) -> LinearSpec:
        """A linear over two states side by side: what begins a recursion with an injection, and a draft layer."""
        return LinearSpec(name, 2 * self.hidden, self.hidden, bias=False)

    @property
    def head(self) -> LinearSpec:
        """From a hidden state to logits; the embedding itself where the two are tied."""
        return LinearSpec("head", self.hidden, self.vocab, bias=False)

    @property
    def embedding_parameters(self) -> int:
        """Embedding and head, as the thesis counts them (Table of model architectures): a tied head counts once."""
        return self.head.weights * (1 if self.tied_embeddings else 2)

    def with_layers(self, origins: tuple[int, ...]) -> Architecture:
        """The plain architecture whose layer i stands where base layer origins[i] stood (an unrolled export)."""
        windows = tuple(self.windows[origin] for origin in origins) if self.windows else ()
        rotated = tuple(self.rotated[origin] for origin in origins) if self.rotated else ()
        return dataclasses.replace(self, layers=len(origins), windows=windows, rotated=rotated)

    def to_dict(self) -> dict[str, Any]:
        local = None if self.local_rope is None else self.local_rope.to_dict()
        return to_record(self, LATER_TRAITS) | {"rope": self.rope.to_dict(), "local_rope": local}

    @classmethod
    def from_dict(cls, record: object) -> Architecture:
        return read_record(cls, record, "architecture")


LATER_TRAITS = (
    "head_scale", "positions", "relative_buckets", "relative_distance", "cross", "memory_width", "residual_scale",
    "qk_norm_wide", "qk_bias", "rotated", "experts", "experts_per_token", "experts_normed",
)  # fmt: skip
"""Fields that are written only where they are not as usual."""
