"""T5-style decoders as shapes (thesis 2): what the family fixes, so that a shape names only what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathomlm.depth.architecture import Architecture

T5_FAMILIES = ("t5", "mt5", "longt5")


def with_t5_traits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a T5-style decoder; what is left out is as the family's models have it.

    Without a gate `t5` is the first version: ReLU, and a head that is the embedding behind a factor of hidden ** -0.5.
    With one it is version 1.1, and so are mT5 and LongT5: a GELU gate and a head of its own.
    """
    fields = dict(given)
    gated = fields.setdefault("gated", fields["family"] != "t5")
    fields.setdefault("activation", "gelu_tanh" if gated else "relu")
    tied = fields.setdefault("tied_embeddings", not gated)
    hidden = fields.get("hidden")
    if hidden is not None:
        fields.setdefault("head_scale", int(hidden) ** -0.5 if tied and fields["family"] != "mt5" else 1.0)
        fields.setdefault("memory_width", hidden)
    fixed = {"rotary_fraction": 0.0, "attention_scale": 1.0, "norm_eps": 1e-6, "positions": "relative", "cross": True}
    return {"context": 512, **fixed, **fields}


def t5_architecture(
    layers: int, hidden: int, intermediate: int, heads: int, vocab: int = 32_128, *, family: str = "t5", **more: Any
) -> Architecture:
    """A published decoder; its heads are 64 wide unless `head_dim` says otherwise."""
    sizes = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": heads}
    return Architecture.from_dict(with_t5_traits({"family": family, "head_dim": 64, "vocab": vocab, **sizes, **more}))
