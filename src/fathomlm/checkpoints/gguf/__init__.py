"""GGUF files as base checkpoints: llama.cpp's names and layouts turned back into this house's.

llama.cpp's converter changes some weights on the way in, and each change is undone here: Llama's q and k rows are
interleaved for its rotary kernel, Gemma's norm weights have 1 added, Pythia's fused projection is sorted into
[q; k; v]. What the metadata announce is checked against the tensors when a file is opened, so that a wrong file fails
at once and in one line, and a tensor that the family's block has no place for is refused rather than left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.assemble import TokenIds
from fathomlm.checkpoints.gguf.architecture import read_architecture
from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.checkpoints.gguf.tokenizer import build_tokenizer
from fathomlm.depth import Architecture
from fathomlm.depth.cost import parameter_shapes
from fathomlm.errors import CheckpointError, UnsupportedModel

_TOP_NAMES = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER_NAMES = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "norm_attn": "attn_norm",
    "norm_mlp": "ffn_norm",
    "norm_attn_out": "post_attention_norm",
    "norm_mlp_out": "post_ffw_norm",
}
_EXPERT_NAMES = {
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_exps",
    "mlp.up": "ffn_up_exps",
    "mlp.down": "ffn_down_exps",
}
INTERLEAVED = ("llama", "mistral", "nanbeige", "smollm3", "granite")
"""Families whose q and k rows are stored for a kernel that rotates neighbours."""
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tables that are computed from the metadata, not learned."""


class GGUFCheckpoint:
    """A GGUF file, memory-mapped: a tensor is unpacked to float32 when it is asked for."""

    def __init__(self, path: Path | str) -> None:
        self._file = GGUFFile(Path(path))
        self.architecture, self.plan = read_architecture(self._file)
        self.encoder: dict[str, Any] | None = None
        self._check_tensors()
        self.tokens = _token_ids(self._file, self.architecture.vocab)

    @property
    def dtype(self) -> torch.dtype:
        kinds = {entry.kind.name for entry in self._file.tensors.values() if len(entry.shape) > 1}
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(kinds.pop() if len(kinds) == 1 else "", torch.float32)

    def tensor(self, name: str) -> torch.Tensor:
        arch = self.architecture
        stored, part = stored_name(name, arch)
        tensor = self._file.tensor(stored)
        if part is not None:
            return tensor.chunk(3)[part].clone()
        if arch.family in INTERLEAVED and (projection := re.search(r"attn\.([qk])\.", name)):
            heads = arch.heads if projection[1] == "q" else arch.kv_heads
            # Undoes llama.cpp's interleaving of each head's two rotary halves.
            return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if arch.norm == "rms_plus_one" and "norm" in name:
            return tensor - 1
        return tensor

    def tokenizer(self) -> Any | None:
        return build_tokenizer(self._file, self.architecture)

    def _check_tensors(self) -> None:
        arch, path = self.architecture, self._file.path
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in parameter_shapes(arch, self.plan).items():
            stored, part = stored_name(name, arch)
            wanted[stored] = shape if part is None else (3 * shape[0], *shape[1:])
        if missing := sorted(set(wanted) - set(self._file.tensors)):
            raise CheckpointError(f"{path}: incomplete: {len(missing)} tensor(s) are missing, such as {missing[0]}")
        for name, shape in wanted.items():
            if (found := self._file.tensors[name].shape) != shape:
                raise CheckpointError(f"{path}: {name} has shape {list(found)}; the metadata require {list(shape)}")
        more = sorted(name for name in set(self._file.tensors) - set(wanted) if not _IGNORED.fullmatch(name))
        if more:
            raise UnsupportedModel(
                f"{path}: {len(more)} tensor(s) are unexpected in a {arch.family} model, such as {more[0]!r}"
            )


def _token_ids(file: GGUFFile, vocab: int) -> TokenIds:
    def token(key: str) -> int | None:
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab):
            raise CheckpointError(f"{file.path}: {key}_token_id is {value!r:.40}, but there are {vocab} tokens")
        return value

    ends = (token(key) for key in ("eos", "eot", "eom"))
    return TokenIds(bos=token("bos"), eos=tuple(dict.fromkeys(i for i in ends if i is not None)), pad=token("padding"))


def stored_name(name: str, arch: Architecture) -> tuple[str, int | None]:
    """A tensor's GGUF name, and which third of it is meant where q, k and v lie in one."""
    module, _, leaf = name.rpartition(".")
    if module in _TOP_NAMES:
        return f"{_TOP_NAMES[module]}.{leaf}", None
    _, layer, module = module.split(".", 2)
    if arch.family == "neox" and module in ("attn.q", "attn.k", "attn.v"):
        return f"blk.{layer}.attn_qkv.{leaf}", "qkv".index(module[-1])
    names = _LAYER_NAMES | (_EXPERT_NAMES if arch.experts else {})
    return f"blk.{layer}.{names[module]}.{leaf}", None
