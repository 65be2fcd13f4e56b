"""What every base checkpoint offers, whatever file it lies in: tensors one at a time, by this house's names.

    embed.weight                              layers.I.norm_attn.{weight,bias}
    layers.I.attn.{q,k,v,o}.{weight,bias}     layers.I.norm_mlp.{weight,bias}
    layers.I.attn.{q_norm,k_norm}.weight      layers.I.{norm_attn_out,norm_mlp_out}.weight   (sandwich)
    layers.I.mlp.{gate,up,down}.{weight,bias} norm.{weight,bias}, head.weight                (untied)
    layers.I.mlp.router.weight, and mlp.{gate,up,down}.weight with a matrix for each expert  (Qwen3-MoE)
    layers.I.cross.{q,k,v,o}.weight           layers.I.norm_cross.weight, relative.weight    (T5)

Reading a tensor at a time is what keeps a conversion's memory near the size of its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fathomlm.depth import Architecture, DepthPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The special tokens that decoding needs to know."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Every token that ends a text; some checkpoints have several."""
    pad: int | None = None
    start: int | None = None
    """What the decoder of an encoder-decoder model reads first."""


def end_ids(eos: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End tokens as a tuple; configurations write none, one or several."""
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


class BaseCheckpoint(Protocol):
    """A checkpoint that is no FathomLM directory, read lazily: an untied model, or one whose format has loops."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def plan(self) -> DepthPlan:
        """Which of the stored layers runs when."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in (float32 for quantised files)."""
        ...

    @property
    def tokens(self) -> TokenIds: ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by this house's name, in any floating dtype."""
        ...

    def tokenizer(self) -> Any | None:
        """The transformers tokenizer with its chat template, or None where the checkpoint has none."""
        ...
