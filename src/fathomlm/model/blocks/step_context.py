"""What a step hands to the layer that it runs: positions, mask, where entries go, what it adds, and packed weights.

Shapes: B batch, H query heads, G key-value heads, D head width, M hidden width, W all heads of q, k and v, I inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fathomlm.cache import Entries, StepKV
from fathomlm.kernels.half import keeps_gradients
from fathomlm.kernels.row_linear import RowWeight
from fathomlm.model.encoder_memory import StepMemory


class Packed(NamedTuple):
    """A layer's weights as the training forms want them: norms folded in, those that read one input below each other, in
    the dtype to compute in. A looped layer is packed once for all its uses in a pass (`Decoder.states`)."""

    qkv_WM: Tensor
    o_MW: Tensor
    both_2IM: Tensor
    """Gate, and up below it."""
    down_MI: Tensor


class CrossRows(NamedTuple):
    """Attention over an encoder's output; keys and values are made when a source is read."""

    q_WM: RowWeight
    """With the norm in front of it folded in."""
    o_MW: RowWeight


class PackedRows(NamedTuple):
    """The same for the kernels of decoding rows, which also take weights of one byte (`model.quantize`)."""

    qkv_WM: RowWeight
    o_MW: RowWeight
    both_2IM: RowWeight
    down_MI: RowWeight
    after_attn_M: Tensor | None = None
    """The weights of the norms between a half and the stream, in float32; None where there are none."""
    after_mlp_M: Tensor | None = None
    activation: str = "silu"
    """The gate's."""
    cross: CrossRows | None = None
    """Of layers that attend to an encoder's output."""


class Addition(Protocol):
    """What a step adds to the layer it shares: its `StepDelta`, or for rows of different steps each row's own."""

    @property
    def prefix(self) -> Tensor | None: ...

    def project(self, name: str, linear: nn.Linear, x: Tensor) -> Tensor: ...

    def norm(self, name: str, module: nn.Module, x: Tensor) -> Tensor: ...


class StepPages(Protocol):
    """Entries of one step in pages. Whoever keeps them also attends to them, so that nothing is gathered."""

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
    """Entries of another step to attend to; this one then makes none."""
    delta: Addition | None
    """What the step adds to the layer."""
    packed: Packed | None = None
    """The layer's weights, where they were packed before; a training step packs them itself otherwise."""
    keep_inner: bool = True
    """Whether a training form keeps the feed-forward part's inner activations, or makes them again."""
    memory: StepMemory | None = None
    """The encoder's output, for layers that attend to one."""
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
