"""T5 (both versions, Flan-T5), mT5 and LongT5: the decoder's half (thesis 2). The encoder's is `fathomlm.model.encoder`.

The first T5 multiplies hidden states by hidden ** -0.5 before a head that is the embedding; version 1.1 does neither.
Configurations mark it with tie_word_embeddings, which transformers from version 5 on reads as "scale" only: whether the
head is a matrix of its own, the weights say.
"""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import ACTIVATIONS, Config, Family, size
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel

T5_ACTIVATIONS = {**ACTIVATIONS, "relu": "relu"}
T5_NAMES = {
    **{f"attn.{name}": f"layer.0.SelfAttention.{name}" for name in ("q", "k", "v", "o")},
    "norm_attn": "layer.0.layer_norm",
    **{f"cross.{name}": f"layer.1.EncDecAttention.{name}" for name in ("q", "k", "v", "o")},
    "norm_cross": "layer.1.layer_norm",
    "mlp.gate": "layer.2.DenseReluDense.wi_0",
    "mlp.up": "layer.2.DenseReluDense.wi_1",
    "mlp.down": "layer.2.DenseReluDense.wo",
    "norm_mlp": "layer.2.layer_norm",
}
UNGATED_NAMES = {**T5_NAMES, "mlp.up": "layer.2.DenseReluDense.wi"}
T5_OUTER = {
    "embed": "shared",
    "relative": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "layers": "decoder.block",
    "norm": "decoder.final_layer_norm",
    "head": "lm_head",
}


def read_t5(config: Config) -> Architecture:
    family = config.text("model_type")
    projection = config.text("feed_forward_proj", default="gated-gelu" if family == "mt5" else "relu")
    implied = "gelu_new" if projection == "gated-gelu" else projection.split("-")[-1]
    activation = config.text("dense_act_fn", default=implied)
    if activation not in T5_ACTIVATIONS:
        known = ", ".join(sorted(T5_ACTIVATIONS))
        raise UnsupportedModel(f"{family} with activation '{activation:.60}'; known: {known}")
    marked_tied = config.flag("tie_word_embeddings", default=True)
    scaled = family != "mt5" and config.flag("scale_decoder_outputs", default=marked_tied)
    hidden, heads = size(config, "d_model", "hidden"), size(config, "num_heads", "heads")
    layers = size(config, "num_decoder_layers", "layers", None) or size(config, "num_layers", "layers")
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=size(config, "d_ff", "intermediate"),
        heads=heads,
        kv_heads=heads,
        head_dim=size(config, "d_kv", "head_dim"),
        vocab=size(config, "vocab_size", "vocab"),
        context=size(config, "n_positions", "context", 512),
        tied_embeddings=scaled or family == "longt5" or (family == "mt5" and marked_tied),
        norm_eps=config.number("layer_norm_epsilon", default=1e-6),
        activation=T5_ACTIVATIONS[activation],  # type: ignore[arg-type]
        gated=projection.startswith("gated-"),
        rotary_fraction=0.0,
        attention_scale=1.0,
        head_scale=hidden**-0.5 if scaled else 1.0,
        positions="relative",
        relative_buckets=size(config, "relative_attention_num_buckets", "relative_buckets", 32),
        relative_distance=size(config, "relative_attention_max_distance", "relative_distance", 128),
        cross=True,
        memory_width=hidden,
    )


def write_t5(a: Architecture) -> dict[str, Any]:
    """The decoder's part of a configuration; activations and all that the encoder shares are in its own record."""
    scaled = a.head_scale != 1.0
    return {
        "vocab_size": a.vocab,
        "num_decoder_layers": a.layers,
        "n_positions": a.context,
        "is_encoder_decoder": True,
        "tie_word_embeddings": scaled,
        **({} if a.family == "mt5" else {"scale_decoder_outputs": scaled}),
    }


def _family(model_type: str, architecture_class: str) -> Family:
    return Family(
        model_type=model_type,
        architecture_class=architecture_class,
        read=read_t5,
        write=write_t5,
        layer_names=T5_NAMES,
        outer_names=T5_OUTER,
        ungated_names=UNGATED_NAMES,
    )


T5 = _family("t5", "T5ForConditionalGeneration")
MT5 = _family("mt5", "MT5ForConditionalGeneration")
LONGT5 = _family("longt5", "LongT5ForConditionalGeneration")
