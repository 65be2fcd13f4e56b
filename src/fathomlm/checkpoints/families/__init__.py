"""Families: how Hugging Face spells each architecture, and how it names the tensors. One file a family, one dict.

Reading goes from a `config.json` to an `Architecture`; exporting goes back. An option that has no block here is refused
by name rather than ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fathomlm.checkpoints.families import gemma, llama, neox, qwen, t5
from fathomlm.checkpoints.families.shared import Config
from fathomlm.depth import Architecture
from fathomlm.errors import UnsupportedModel
from fathomlm.jsonfile import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one Hugging Face model type is read and written."""

    model_type: str
    architecture_class: str
    """The class that transformers, vLLM and llama.cpp know it by."""
    read: Callable[[Config], Architecture]
    write: Callable[[Architecture], dict[str, Any]]
    layer_names: Mapping[str, str]
    outer_names: Mapping[str, str]


def _llama_like(model_type: str, cls: str, read: Any, write: Any, names: Mapping[str, str] = llama.LLAMA_NAMES) -> Family:
    return Family(
        model_type=model_type,
        architecture_class=cls,
        read=read,
        write=write,
        layer_names=names,
        outer_names=llama.LLAMA_OUTER,
    )


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("llama", "LlamaForCausalLM", llama.read_llama, llama.write_llama),
    "mistral": _llama_like("mistral", "MistralForCausalLM", llama.read_mistral, llama.write_mistral),
    "qwen2": _llama_like("qwen2", "Qwen2ForCausalLM", qwen.read_qwen2, qwen.write_qwen),
    "qwen3": _llama_like("qwen3", "Qwen3ForCausalLM", qwen.read_qwen3, qwen.write_qwen),
    "gemma": _llama_like("gemma", "GemmaForCausalLM", gemma.read_gemma, gemma.write_gemma),
    "gemma3": _llama_like("gemma3_text", "Gemma3ForCausalLM", gemma.read_gemma3, gemma.write_gemma3, gemma.GEMMA3_NAMES),
    "neox": Family(
        model_type="gpt_neox",
        architecture_class="GPTNeoXForCausalLM",
        read=neox.read_neox,
        write=neox.write_neox,
        layer_names=neox.NEOX_NAMES,
        outer_names=neox.NEOX_OUTER,
    ),
}


def _t5_like(model_type: str, cls: str) -> Family:
    return Family(
        model_type=model_type,
        architecture_class=cls,
        read=t5.read_t5,
        write=t5.write_t5,
        layer_names=t5.T5_NAMES,
        outer_names=t5.T5_OUTER,
    )


SEQ2SEQ: dict[str, Family] = {
    "t5": _t5_like("t5", "T5ForConditionalGeneration"),
    "mt5": _t5_like("mt5", "MT5ForConditionalGeneration"),
    "longt5": _t5_like("longt5", "LongT5ForConditionalGeneration"),
}
"""Decoders that look at an encoder's output."""


def family_for(architecture: Architecture) -> Family:
    """The family of an architecture, with the names that its layers' tensors have."""
    if not architecture.cross:
        return FAMILIES[architecture.family]
    family = SEQ2SEQ[architecture.family]
    return family if architecture.gated else dataclasses.replace(family, layer_names=t5.UNGATED_NAMES)


def family_of(model_type: object, where: str) -> Family:
    """The family of a Hugging Face model type, or an error that lists the known ones."""
    known_families = (*FAMILIES.values(), *SEQ2SEQ.values())
    for family in known_families:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in known_families)
    raise UnsupportedModel(f"{where}: model type {shown(model_type)} has no block here; known: {known}")


def hf_name(family: Family, name: str) -> str:
    """Hugging Face's name for one of our tensors (GPT-NeoX's fused qkv is taken apart elsewhere)."""
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{family.outer_names[parts[0]]}.{parts[-1]}"
    inner = ".".join(parts[2:-1])
    return f"{family.outer_names['layers']}.{parts[1]}.{family.layer_names[inner]}.{parts[-1]}"
