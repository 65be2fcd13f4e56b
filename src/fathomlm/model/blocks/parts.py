"""What blocks are made of: norms, attention, feed-forward, and what a step hands to them.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head width, M hidden width, P prefix length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import Entries, StepKV
from fathomlm.cache.dense import stack_prefix
from fathomlm.depth import Architecture, LinearSpec
from fathomlm.kernels.attention import attention, split_heads
from fathomlm.kernels.half import folded, half_dtype, keeps_gradients
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.qkv import norm_qkv_rope
from fathomlm.kernels.rope import apply_rope
from fathomlm.kernels.row_linear import RowWeight
from fathomlm.kernels.swiglu import norm_swiglu_mlp
from fathomlm.model.blocks.experts import Experts
from fathomlm.model.encoder_memory import StepMemory


class Packed(NamedTuple):
    """A layer's weights as the training forms want them: norms folded in, those that read one input below each other, in
    the dtype to compute in. A looped layer is packed once for all its uses in a pass (`Decoder.states`)."""

    qkv_WM: Tensor
    o_MW: Tensor
    both_2IM: Tensor
    """Gate, and up below it."""
    down_MI: Tensor


class PackedRows(NamedTuple):
    """The same for the kernels of decoding rows, which also take weights of one byte (`model.quantize`)."""

    qkv_WM: RowWeight
    o_MW: RowWeight
    both_2IM: RowWeight
    down_MI: RowWeight
    after_attn_M: Tensor | None = None
    """The weights of the norms between a half and the stream, in float32; None where there are none."""
    after_mlp_M: Tensor | None = None


class Addition(Protocol):
    """What a step adds to the layer it shares: its `StepDelta`, or for rows of different steps each row's own."""

    @property
    def prefix(self) -> Tensor | None: ...

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor: ...

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor: ...


class StepPages(Protocol):
    """Entries of one step in pages. Whoever keeps them also looks at them, so that nothing is gathered."""

    @property
    def reads(self) -> bool:
        """Whether the entries are another step's, and this one makes none."""
        ...

    def store(self, entries: Entries) -> None:
        """Keep entries, (B, G, 1, D) each."""
        ...

    def attend(self, q_BH1D: Tensor, entries: Entries | None, scale: float) -> Tensor:
        """Store entries (B, G, 1, D) if there are any, and return what the queries gather, (B, H, 1, D)."""
        ...

    def attend_source(self, q_BH1D: Tensor, scale: float) -> Tensor:
        """What queries gather from an encoder's output."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a layer needs to know about the step it runs at."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    """Which keys each query sees; None where all, or all up to itself, are seen (`causal`). With relative positions a
    number for each score, -inf where a key is not seen."""
    causal: bool
    kv: StepKV | None
    """Where the step's keys and values go, if anywhere."""
    reads: Entries | None
    """Entries of another step to look at; this one then makes none."""
    delta: Addition | None
    """What the step adds to the layer."""
    packed: Packed | None = None
    """The layer's weights, where they were packed before; a training step packs them itself otherwise."""
    keep_inner: bool = True
    """Whether a training form keeps the feed-forward part's inner activations, or makes them again."""
    memory: StepMemory | None = None
    """The encoder's output, for layers that look at one."""
    pages: StepPages | None = None
    """Where entries are kept in pages, row by row (the engine); each of B rows then is one token."""

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor:
        """A linear of the layer, with what this step adds to it."""
        if self.delta is not None:
            return self.delta.project(name, linear, x)
        out: Tensor = linear(x)
        return out

    def uses_forms(self, x: Tensor) -> bool:
        """Whether the halves run in their forms for packed weights: where those are given, and where a compiler packs."""
        return self.packed is not None or self.fuses(x)

    def fuses(self, x: Tensor) -> bool:
        """Whether this is a compiled training step that adds nothing to its layer: some parts then have a faster form."""
        stays = self.kv is not None and self.kv.stores
        plain = self.delta is None and not stays and torch.is_grad_enabled() and torch.compiler.is_compiling()
        return plain and keeps_gradients(x)

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        """A norm of the layer, with what this step adds to it."""
        if self.delta is not None:
            return self.delta.norm(name, module, x)
        out: Tensor = module(x)
        return out


class Block(nn.Module):
    """One layer. Subclasses wire the same parts differently around the residual stream."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.attn = Attention(architecture)
        self.mlp: FeedForward | Experts = Experts(architecture) if architecture.experts else FeedForward(architecture)
        self.rows: PackedRows | None = None
        """What the layer's linears are views of, where they are of one byte a weight."""
        if architecture.residual != "post":
            self.norm_attn = build_norm(architecture)
            self.norm_mlp = build_norm(architecture)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """The residual stream after this layer."""
        raise AssertionError("a block says how it is wired")

    def keep_entries(self, x: Tensor, step: StepContext) -> None:
        """Store this layer's keys and values of a residual stream, and run nothing else of it."""
        if step.pages is not None and not step.pages.reads:
            step.pages.store(self.attn.entries(self.attention_input(x, step), step))
        elif step.kv is not None:
            step.kv.append(*self.attn.entries(self.attention_input(x, step), step))

    def attention_input(self, x: Tensor, step: StepContext) -> Tensor:
        """What keys and values are made of."""
        return step.norm("norm_attn", self.norm_attn, x)

    @property
    def packs(self) -> bool:
        """Whether both halves have training forms that take packed weights."""
        return False

    @property
    def packs_rows(self) -> bool:
        """Whether the kernels for decoding rows run it. Those also know a norm behind each half (`after`)."""
        return self.packs

    @property
    def _plain_halves(self) -> bool:
        normed = all(isinstance(norm, RMSNorm) for norm in (self.norm_attn, self.norm_mlp))
        # Linears that another package has wrapped (PEFT) add to what their weights say.
        linears = (self.attn.q, self.attn.k, self.attn.v, self.attn.o, *self.mlp.children())
        own = all(isinstance(linear, nn.Linear) for linear in linears if not isinstance(linear, RMSNorm))
        return normed and own and self.attn.plain and self.mlp.plain and not self.attn.o_bias

    def after(self) -> tuple[Tensor | None, Tensor | None]:
        """The last two of `PackedRows`."""
        return None, None

    def pack(self, dtype: torch.dtype) -> Packed:
        """The weights for `StepContext.packed`."""
        assert isinstance(self.norm_attn, RMSNorm)
        assert isinstance(self.norm_mlp, RMSNorm)
        assert isinstance(self.mlp, FeedForward)
        qkv = self.attn.pack(self.norm_attn, dtype)
        return Packed(qkv, self.attn.o.weight.to(dtype), *self.mlp.pack(self.norm_mlp, dtype))


def build_norm(architecture: Architecture, width: int | None = None) -> nn.Module:
    width = architecture.hidden if width is None else width
    if architecture.norm == "layer":
        return nn.LayerNorm(width, eps=architecture.norm_eps)
    return RMSNorm(width, architecture.norm_eps, plus_one=architecture.norm == "rms_plus_one")


def build_linear(spec: LinearSpec) -> nn.Linear:
    return nn.Linear(spec.inputs, spec.outputs, bias=spec.bias)


class Attention(nn.Module):
    """Grouped-query attention with rotary or relative positions, and per-head norms where the family has them."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        specs = {spec.name: spec for spec in architecture.linears()}
        self.q, self.k, self.v, self.o = (build_linear(specs[name]) for name in ("q", "k", "v", "o"))
        q, k = architecture.qk_norm_widths
        self.q_norm = build_norm(architecture, q) if architecture.qk_norm else None
        self.k_norm = build_norm(architecture, k) if architecture.qk_norm else None
        self.norm_wide = architecture.qk_norm_wide
        self.residual_scale = architecture.residual_scale
        self.head_dim = architecture.head_dim
        self.scale = architecture.scale
        self.rotates = architecture.rotary_dim > 0
        whole = architecture.rotary_dim == architecture.head_dim
        self.plain = whole and not architecture.qk_norm and not specs["q"].bias and self.residual_scale == 1.0
        self.o_bias = architecture.o_bias

    def forward(self, x_BTM: Tensor, step: StepContext) -> Tensor:
        """What the tokens gather, from the normed stream."""
        if step.pages is not None:
            made = None if step.pages.reads else self.entries(x_BTM, step)
            mixed = step.pages.attend(self._rotated_q(x_BTM, step), made, self.scale)
            return step.project("o", self.o, mixed.transpose(1, 2).flatten(2))
        if step.reads is not None:
            return self._mixed(self._rotated_q(x_BTM, step), *step.reads, step)
        return self._attend(*self._rotated(x_BTM, step), step)

    def behind(self, norm: nn.Module, x_BTM: Tensor, step: StepContext) -> Tensor:
        """The residual stream with what the tokens gather from its norm added."""
        if self.plain and step.uses_forms(x_BTM) and step.reads is None and isinstance(norm, RMSNorm):
            qkv_WM = self.pack(norm, half_dtype(x_BTM)) if step.packed is None else step.packed.qkv_WM
            groups = self.k.weight.shape[0] // self.head_dim
            heads = qkv_WM.shape[0] // self.head_dim - 2 * groups
            x_BTM, q, k, v = norm_qkv_rope(x_BTM, norm.eps, qkv_WM, heads, groups, step.cos, step.sin)
            return x_BTM + self._attend(q, k, v, step)
        out_BTM: Tensor = self(step.norm("norm_attn", norm, x_BTM), step)
        return x_BTM + (out_BTM if self.residual_scale == 1.0 else out_BTM * self.residual_scale)

    def pack(self, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
        """Query, key and value weights as one, for `norm_qkv_rope`."""
        return folded((self.q.weight, self.k.weight, self.v.weight), norm.weight, norm.plus_one, dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepContext) -> Tensor:
        k, v = (k, v) if step.kv is None else step.kv.append(k, v)
        return self._mixed(q, k, v, step)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, step: StepContext) -> Tensor:
        """What attention finds, heads side by side, through the last linear."""
        mask, causal = step.mask, step.causal
        if step.delta is not None and step.delta.prefix is not None:
            k, v, mask = self._with_prefix(k, v, queries=q.shape[2], step=step)
            causal = False
        mixed = attention(q, k, v, scale=self.scale, mask=mask, causal=causal).transpose(1, 2).flatten(2)
        if step.packed is not None:
            return F.linear(mixed, step.packed.o_MW)
        return step.project("o", self.o, mixed)

    def _rotated(self, x_BTM: Tensor, step: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of queries, keys and values, the first two at their positions."""
        k, v = self.entries(x_BTM, step)
        return self._rotated_q(x_BTM, step), k, v

    def entries(self, x_BTM: Tensor, step: StepContext) -> Entries:
        """Heads of keys, at their positions, and of values."""
        k = self._normed_heads("k", self.k, self.k_norm, x_BTM, step)
        return self._turned(k, step), self._heads(step.project("v", self.v, x_BTM))

    def _rotated_q(self, x_BTM: Tensor, step: StepContext) -> Tensor:
        return self._turned(self._normed_heads("q", self.q, self.q_norm, x_BTM, step), step)

    def _normed_heads(
        self, name: str, linear: nn.Linear, norm: nn.Module | None, x_BTM: Tensor, step: StepContext
    ) -> Tensor:
        """Heads of queries or keys, normed within each or all at once, where the family norms them."""
        out = step.project(name, linear, x_BTM)
        if norm is None:
            return self._heads(out)
        if self.norm_wide:
            return self._heads(step.norm(f"attn.{name}_norm", norm, out))
        return step.norm(f"attn.{name}_norm", norm, self._heads(out))

    def _turned(self, x_BHTD: Tensor, step: StepContext) -> Tensor:
        return apply_rope(x_BHTD, step.cos, step.sin) if self.rotates else x_BHTD

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)

    def _with_prefix(self, k: Tensor, v: Tensor, *, queries: int, step: StepContext) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask with the step's prefix in front; every query sees all of the prefix."""
        prefix_k, prefix_v = self._prefix_kv(step) if step.kv is None else step.kv.prefix(lambda: self._prefix_kv(step))
        mask = step.mask
        if mask is None and step.causal:
            mask = torch.ones(queries, k.shape[2], dtype=torch.bool, device=k.device).tril()[None, None]
        if mask is not None:
            mask = F.pad(mask, (prefix_k.shape[2], 0), value=mask.dtype == torch.bool)  # a bias has nothing to add there
        return stack_prefix(prefix_k, k), stack_prefix(prefix_v, v), mask

    def prefix_entries(self, delta: Addition | None) -> Entries:
        """What a step's prefix stands for: without a position, so that any context will do."""
        none = torch.empty(0)
        return self._prefix_kv(StepContext(none, none, None, False, None, None, delta))

    def _prefix_kv(self, step: StepContext) -> tuple[Tensor, Tensor]:
        assert step.delta is not None
        assert step.delta.prefix is not None
        prefix_1PM = step.delta.prefix[None]
        k = self._normed_heads("k", self.k, self.k_norm, prefix_1PM, step)
        return k, self._heads(step.project("v", self.v, prefix_1PM))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        specs = {spec.name: spec for spec in architecture.linears()}
        self.gate = build_linear(specs["gate"]) if architecture.gated else None
        self.up = build_linear(specs["up"])
        self.down = build_linear(specs["down"])
        self.activation = architecture.activation
        self.residual_scale = architecture.residual_scale
        usual = not architecture.mlp_bias and self.residual_scale == 1.0
        self.plain = architecture.gated and architecture.activation == "silu" and usual

    def behind(self, norm: nn.Module, x: Tensor, step: StepContext) -> Tensor:
        """The residual stream with this part's output for its norm added."""
        if self.plain and step.uses_forms(x) and isinstance(norm, RMSNorm):
            both, down = self.pack(norm, half_dtype(x)) if step.packed is None else step.packed[2:]
            return norm_swiglu_mlp(x.flatten(0, -2), norm.eps, both, down, step.keep_inner).view_as(x)
        out: Tensor = self(step.norm("norm_mlp", norm, x), step)
        return x + (out if self.residual_scale == 1.0 else out * self.residual_scale)

    def pack(self, norm: RMSNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gate and up as one, and down, for `norm_swiglu_mlp`."""
        assert self.gate is not None
        both = folded((self.gate.weight, self.up.weight), norm.weight, norm.plus_one, dtype)
        return both, self.down.weight.to(dtype)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        act = ACTIVATIONS[self.activation]
        up = step.project("up", self.up, x)
        inner = act(up) if self.gate is None else act(step.project("gate", self.gate, x)) * up
        return step.project("down", self.down, inner)
