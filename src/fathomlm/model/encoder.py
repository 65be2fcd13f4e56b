"""The encoders of encoder-decoder models: transformers' own, used as they are (thesis 2: T5, mT5, LongT5).

A checkpoint names one of the kinds below and gives it numbers; nothing else of what it says is looked at. The embedding
is the decoder's, so an encoder here has none and is given embedded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LongT5Config, LongT5EncoderModel, MT5Config, MT5EncoderModel, T5Config, T5EncoderModel

from fathomlm.depth import Architecture
from fathomlm.depth.bounds import check_size
from fathomlm.errors import OptionError, choices, is_number, require
from fathomlm.fields import shown

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
"""How Hugging Face spells them."""
FIELDS: dict[str, str | type] = {
    "d_model": "hidden",
    "d_kv": "head_dim",
    "d_ff": "intermediate",
    "num_layers": "layers",
    "num_heads": "heads",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_distance",
    "dropout_rate": float,
    "layer_norm_epsilon": float,
    "initializer_factor": float,
    "feed_forward_proj": str,
    "dense_act_fn": str,
}
"""What is read of an encoder: sizes, each with its bound, numbers and names."""
LONG_FIELDS = FIELDS | {"local_radius": "context", "global_block_size": "context", "encoder_attention_type": str}


@dataclass(frozen=True, slots=True)
class EncoderKind:
    """How transformers builds one kind of encoder."""

    config: Any
    model: Any
    fields: dict[str, str | type]


ENCODERS: dict[str, EncoderKind] = {
    "t5": EncoderKind(T5Config, T5EncoderModel, FIELDS),
    "mt5": EncoderKind(MT5Config, MT5EncoderModel, FIELDS),
    "longt5": EncoderKind(LongT5Config, LongT5EncoderModel, LONG_FIELDS),
}


def encoder_record(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a Hugging Face configuration says of its encoder, as plain values with the defaults written out."""
    kind = _kind(config)
    built = _config(kind, {name: config[name] for name in kind.fields if config.get(name) is not None})
    return {"model_type": config["model_type"], **{name: getattr(built, name) for name in kind.fields}}


def build_encoder(record: Mapping[str, Any]) -> nn.Module:
    """The encoder that `encoder_record` describes, without an embedding."""
    kind = _kind(record)
    if unknown := sorted(set(record) - {"model_type", *kind.fields}):
        raise OptionError(f"unknown encoder field(s) {', '.join(unknown)}; known: {', '.join(kind.fields)}")
    fields = {name: value for name, value in record.items() if name != "model_type"}
    config = _config(kind, fields | {"vocab_size": 1, "pad_token_id": None, "eos_token_id": None})  # no embedding is kept
    try:
        encoder: nn.Module = kind.model(config).encoder
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise OptionError(f"the encoder cannot be built: {error}") from error
    encoder.embed_tokens = None  # type: ignore[assignment]
    return encoder


def encoder_beside(
    architecture: Architecture, layers: int, more: Mapping[str, Any] | None = None, *, dropout: float | None = None
) -> dict[str, Any]:
    """The record of an encoder that goes with a decoder: all sizes but the number of layers are the decoder's, as in every
    published T5, so that the model can be exported as one. `more` are fields in Hugging Face's words."""
    a = architecture
    spelled = "gelu" if a.gated and a.activation == "gelu_tanh" else ACTIVATIONS[a.activation]
    if a.gated and a.activation == "gelu":
        raise OptionError("a gated T5 encoder has the activation gelu_tanh, relu or silu, not gelu")
    return encoder_record(
        {
            "model_type": a.family,
            "d_model": a.hidden,
            "d_kv": a.head_dim,
            "d_ff": a.intermediate,
            "num_layers": layers,
            "num_heads": a.heads,
            "relative_attention_num_buckets": a.relative_buckets,
            "relative_attention_max_distance": a.relative_distance,
            "layer_norm_epsilon": a.norm_eps,
            "feed_forward_proj": f"gated-{spelled}" if a.gated else spelled,
            "dropout_rate": dropout,
            **(more or {}),
        }
    )


def encoder_parameters(record: Mapping[str, Any]) -> int:
    """How many parameters the encoder has; the embedding is the decoder's and not among them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_encoder(record).parameters())


def _kind(record: Mapping[str, Any]) -> EncoderKind:
    if not isinstance(record, Mapping):
        raise OptionError(f"the encoder must be an object, got {shown(record)}")
    name = record.get("model_type")
    if not isinstance(name, str) or name not in ENCODERS:
        raise OptionError(choices("encoder", str(name)[:60], ENCODERS))
    return ENCODERS[name]


def _config(kind: EncoderKind, values: dict[str, Any]) -> Any:
    """Checked before transformers sees it: it builds what a configuration says."""
    for name, value in values.items():
        rule = kind.fields.get(name)
        if isinstance(rule, str):
            check_size(rule, value, called=f"the encoder's {name}")
        elif rule is not None:
            right = isinstance(value, str) if rule is str else is_number(value)
            require(right, f"the encoder's {name}", "a name" if rule is str else "a finite number", value)
    try:
        return kind.config(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise OptionError(f"the encoder's configuration cannot be read ({' '.join(str(error).split())})") from error
