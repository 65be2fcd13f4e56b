"""Attention over a sequence's own tokens and over an encoder's output, and the norms and linears it is made of.

Shapes: B batch, T tokens, S tokens of the source, H query heads, G key-value heads, D head width, M hidden width, E the
encoder's width, P prefix length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import Entries
from fathomlm.cache.dense import stack_prefix
from fathomlm.depth import Architecture, LinearSpec
from fathomlm.kernels.attention import attention, split_heads
from fathomlm.kernels.half import folded, half_dtype
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.qkv import norm_qkv_rope
from fathomlm.kernels.quantized import QuantizedWeight
from fathomlm.kernels.rope import apply_rope
from fathomlm.kernels.row_linear import few_rows, norm_linear
from fathomlm.model.blocks.step_context import Addition, StepContext


def build_norm(architecture: Architecture, width: int | None = None) -> nn.Module:
    width = architecture.hidden if width is None else width
    if architecture.norm == "layer":
        return nn.LayerNorm(width, eps=architecture.norm_eps)
    return RMSNorm(width, architecture.norm_eps, plus_one=architecture.norm == "rms_plus_one")


def build_linear(spec: LinearSpec) -> nn.Linear:
    return nn.Linear(spec.inputs, spec.outputs, bias=spec.bias)


class QuantizedLinear(nn.Linear):
    """A linear whose weight is a `QuantizedWeight`. It has no gradient; `weight` is multiplied out whenever it is read,
    right everywhere and fast nowhere."""

    def __init__(self, quantized: QuantizedWeight, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = quantized.shape
        self.quantized = quantized
        self.bias = bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.quantized.multiplied_out()

    def forward(self, x: Tensor) -> Tensor:
        if few_rows(x) and x.numel() > 0:
            rows_NI = x.reshape(-1, self.in_features).contiguous()
            out = norm_linear(rows_NI, self.quantized, 0.0, scale=False).view(*x.shape[:-1], self.out_features)
        else:
            out = self.quantized.product(x)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantized.kind}"


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
        bare = not architecture.qk_norm and not specs["q"].bias and self.residual_scale == 1.0
        self.plain = whole and bare
        self.packs_rows = bare and (whole or not self.rotates)
        """Whether the kernels for decoding rows run it: heads are turned whole, or not at all (relative positions)."""
        self.o_bias = architecture.o_bias

    def forward(self, x_BTM: Tensor, step: StepContext) -> Tensor:
        """What the tokens gather, from the normed stream."""
        if step.pages is not None:
            made = None if step.pages.reads else self.entries(x_BTM, step)
            mixed = step.pages.attend(self._rotated_q(x_BTM, step), made, self.scale)
            return step.project("o", self.o, mixed.transpose(1, 2).flatten(2))
        if step.reads is not None:
            return self._mixed(self._rotated_q(x_BTM, step), *step.reads, step)
        return self._attend(self._rotated_q(x_BTM, step), *self.entries(x_BTM, step), step)

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


class CrossAttention(nn.Module):
    """Queries from the stream, keys and values from the encoder's output; no positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        specs = [spec for spec in architecture.linears() if spec.name.startswith("cross_")]
        self.q, self.k, self.v, self.o = (build_linear(spec) for spec in specs)
        self.head_dim = architecture.head_dim
        self.scale = architecture.scale

    def forward(self, x_BTM: Tensor, step: StepContext) -> Tensor:
        """What the tokens gather from the source, from the normed stream."""
        q = self._heads(step.project("cross_q", self.q, x_BTM))
        if step.pages is not None:
            mixed = step.pages.attend_source(q, self.scale)
            return step.project("cross_o", self.o, mixed.transpose(1, 2).flatten(2))
        assert step.memory is not None
        k, v = step.memory.entries(lambda states_BSE: self._entries(states_BSE, step))
        mixed = attention(q, k, v, scale=self.scale, mask=step.memory.mask, causal=False)
        return step.project("cross_o", self.o, mixed.transpose(1, 2).flatten(2))

    def entries(self, states_BSE: Tensor, delta: Addition | None) -> Entries:
        """Keys and values (B, G, S, D) of an encoder's output, with what a step adds to this layer."""
        none = torch.empty(0)
        return self._entries(states_BSE, StepContext(none, none, None, False, None, None, delta))

    def _entries(self, states_BSE: Tensor, step: StepContext) -> Entries:
        k = self._heads(step.project("cross_k", self.k, states_BSE))
        return k, self._heads(step.project("cross_v", self.v, states_BSE))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return split_heads(x_BTW, self.head_dim)
