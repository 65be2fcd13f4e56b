"""Families: how Hugging Face spells each architecture, and how it names the tensors. One dict.

Reading goes from a `config.json` to an `Architecture`; exporting goes back. An option that is not supported is refused
by name rather than ignored.
"""

from __future__ import annotations

import dataclasses

from fathomlm.checkpoints.families import (
    gemma,
    huginn,
    llama,
    looped,
    neox,
    qwen,
    t5,
)
from fathomlm.checkpoints.families.shared import Family
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import UnsupportedModel, choices
from fathomlm.fields import shown

FAMILIES: dict[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "gemma": gemma.GEMMA,
    "gemma3": gemma.GEMMA3,
    "neox": neox.NEOX,
    "smollm3": llama.SMOLLM3,
    "granite": llama.GRANITE,
    "phi3": llama.PHI3,
    "olmo2": llama.OLMO2,
    "nanbeige": looped.NANBEIGE,
    "ouro": looped.OURO,
    "huginn": huginn.HUGINN,
}
"""Decoder-only families by the name that an `Architecture` has."""
SEQ2SEQ: dict[str, Family] = {"t5": t5.T5, "mt5": t5.MT5, "longt5": t5.LONGT5}
"""Decoders that attend to an encoder's output."""


def family_for(architecture: Architecture, plan: DepthPlan | None = None) -> Family:
    """The family of an architecture, with the names that its layers' tensors have; `plan` for formats that divide them."""
    known = FAMILIES | SEQ2SEQ
    if architecture.family not in known:
        raise UnsupportedModel(choices("family", architecture.family, known))
    family = known[architecture.family]
    if family.variant is not None and plan is not None:
        return family.variant(family, architecture, plan)
    if architecture.gated or family.ungated_names is None:
        return family
    return dataclasses.replace(family, layer_names=family.ungated_names)


def family_of(model_type: object, where: str) -> Family:
    """The family of a Hugging Face model type, or an error that lists the known ones."""
    known_families = (*FAMILIES.values(), *SEQ2SEQ.values())
    for family in known_families:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in known_families)
    raise UnsupportedModel(f"{where}: model type {shown(model_type)} is not supported; supported: {known}")


def hf_name(family: Family, name: str) -> str:
    """Hugging Face's name for one of our tensors (GPT-NeoX's fused qkv is taken apart elsewhere)."""
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{family.outer_names[parts[0]]}.{parts[-1]}"
    where, inner = _place(family, int(parts[1])), ".".join(parts[2:])
    if inner in family.layer_names:  # a tensor that has no module of its own
        return f"{where}.{family.layer_names[inner]}"
    return f"{where}.{family.layer_names['.'.join(parts[2:-1])]}.{parts[-1]}"


def _place(family: Family, layer: int) -> str:
    for path, layers in family.sections:
        if layer < layers:
            return f"{path}.{layer}"
        layer -= layers
    return f"{family.outer_names['layers']}.{layer}"


__all__ = ["FAMILIES", "SEQ2SEQ", "Family", "family_for", "family_of", "hf_name"]
