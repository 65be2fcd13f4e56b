"""Tiny GGUF files, written as llama.cpp's converter writes them: its names, its metadata, its changed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from fathomlm.checkpoints.gguf.writer import add_value

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "gpt_neox": "gptneox"}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """A transformers model as a GGUF file.

    `kind` packs the matrices whose rows it fits; `metadata` and `tensors` replace what would be written (None: left out).
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    facts = {**_metadata(config, name), **(metadata or {})}
    writer = gguf.GGUFWriter(path, facts.pop("general.architecture", name))
    for key, value in facts.items():
        if value is not None:
            add_value(writer, key, value)
    arrays = {**_tensors(model, name), **(tensors or {})}
    for key, array in arrays.items():
        if array is None:
            continue
        if kind is not None and array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer as GGUF metadata."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
        **changes,
    }


def pieces_metadata(words: list[str], **changes: Any) -> dict[str, Any]:
    """A SentencePiece-like tokenizer of a few words as GGUF metadata: bytes, letters, then each word's beginnings."""
    tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    beginnings = sorted({word[:length] for word in words for length in range(2, len(word) + 1)}, key=len)
    pieces = [*beginnings, *sorted(set("".join(words)))]
    tokens += pieces
    types += [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def _metadata(config: Any, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
    }
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name == "gptneox":
        facts["gptneox.rope.dimension_count"] = int(rope["partial_rotary_factor"] * head_dim)
        facts["gptneox.use_parallel_residual"] = config.use_parallel_residual
        facts["gptneox.attention.layer_norm_epsilon"] = float(config.layer_norm_eps)
        return facts
    facts[f"{name}.attention.head_count_kv"] = config.num_key_value_heads
    facts[f"{name}.attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    if name == "llama":
        facts["llama.rope.dimension_count"] = head_dim
    if name in ("gemma", "gemma3", "qwen3") or head_dim * config.num_attention_heads != config.hidden_size:
        facts |= {f"{name}.attention.key_length": head_dim, f"{name}.attention.value_length": head_dim}
    if name == "gemma3":
        facts["gemma3.attention.sliding_window"] = config.sliding_window
        rope = rope["full_attention"]
    if name != "gemma":
        facts[f"{name}.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        facts |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": float(rope["factor"])}
    return facts


def _tensors(model: PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name), config.num_hidden_layers
    )
    arrays = {}
    for key, tensor in model.state_dict().items():
        if key in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        if name == "llama" and ".q_proj." in key:
            tensor = _interleave(tensor, config.num_attention_heads)
        elif name == "llama" and ".k_proj." in key:
            tensor = _interleave(tensor, config.num_key_value_heads)
        elif name.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + 1
        elif ".query_key_value." in key:
            heads = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            tensor = torch.cat([heads[:, part].flatten(0, 1) for part in range(3)])
        renamed = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, key
        arrays[renamed] = tensor.numpy().copy()
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        arrays["rope_freqs.weight"] = _llama3_divisors(config)
    return arrays


def _interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _llama3_divisors(config: Any) -> np.ndarray:
    rope, size = config.rope_parameters, config.hidden_size // config.num_attention_heads
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for index in range(0, size, 2):
        turns = rope["original_max_position_embeddings"] / (2 * np.pi * rope["rope_theta"] ** (index / size))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)
