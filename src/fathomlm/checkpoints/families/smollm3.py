"""SmolLM3: Llama's layers, some of them without rotary positions."""

from __future__ import annotations

from typing import Any

from fathomlm.checkpoints.families.shared import (
    HF_ACTIVATIONS,
    Config,
    Family,
    llama_traits,
    windows_of,
    write_common,
    write_windows,
)
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel


def read_smollm3(config: Config) -> Architecture:
    traits = llama_traits(config, "smollm3")
    layers, bias = traits["layers"], config.flag("attention_bias", default=False)
    every = config.integer("no_rope_layer_interval", at_least=1, default=4)
    usual = [int((i + 1) % every != 0) for i in range(layers)]
    given = config.integers("no_rope_layers", at_least=0, at_most=1) if config.raw("no_rope_layers") else usual
    if len(given) != layers:
        raise UnsupportedModel(f"no_rope_layers names {len(given)} layers, the model has {layers}")
    rotated = tuple(bool(uses) for uses in given)  # 1 means that a layer does use rotary positions
    return Architecture(
        **traits,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        rotated=() if all(rotated) else rotated,
        windows=windows_of(config, layers) if config.flag("use_sliding_window", default=False) else (),
    )


def write_smollm3(a: Architecture) -> dict[str, Any]:
    return {
        **write_common(a),
        "hidden_act": HF_ACTIVATIONS[a.activation],
        "attention_bias": a.qkv_bias,
        "mlp_bias": a.mlp_bias,
        "no_rope_layers": [int(a.rotates(i)) for i in range(a.layers)],
        "use_sliding_window": bool(a.windows),
        **write_windows(a),
    }


SMOLLM3 = Family(model_type="smollm3", architecture_class="SmolLM3ForCausalLM", read=read_smollm3, write=write_smollm3)
