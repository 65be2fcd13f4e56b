"""A Hugging Face directory of the T5 family: its decoder as a base checkpoint, its encoder by Hugging Face's own names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.assemble import configure_seq2seq, fill, finish
from fathomlm.checkpoints.families import SEQ2SEQ, family_for, hf_name
from fathomlm.checkpoints.huggingface import architecture_from_config, read_config, read_tokenizer, refuse_tensors, tokens_of
from fathomlm.checkpoints.shards import INDEX, SINGLE, Shards
from fathomlm.checkpoints.source import TokenIds, parameter_shapes
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import CheckpointError, FathomError, UnsupportedModel
from fathomlm.model.encoder import build_encoder, encoder_record
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, empty_seq2seq

EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""One matrix; some checkpoints store it more than once."""
NEVER_READ = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
"""Of old checkpoints: cross-attention has no positions."""


def is_seq2seq(config: dict[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in SEQ2SEQ


class Seq2SeqCheckpoint:
    """Reads lazily, but for the embedding and the head, which are compared where both are stored."""

    def __init__(self, directory: Path, config: dict[str, Any] | None = None) -> None:
        """`config` is the directory's config.json, where it was read before."""
        self._directory = directory
        self._config = config = read_config(directory) if config is None else config
        self._tokens = tokens_of(directory, config)
        self._shards = Shards(directory)
        architecture = architecture_from_config(config, str(directory))
        self._shards.check_layers(architecture.layers)
        try:
            self.encoder = encoder_record(config)
            self._shards.check_layers(self.encoder["num_layers"])
        except FathomError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        tied = self._one_matrix("lm_head.weight")
        self._architecture = dataclasses.replace(architecture, tied_embeddings=tied)
        self._family = family_for(architecture)
        self._refuse_strangers()

    @property
    def architecture(self) -> Architecture:
        """The decoder's. Whether its head is the embedding is read off the weights, as transformers does."""
        return self._architecture

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor("embed.weight").dtype

    @property
    def tokens(self) -> TokenIds:
        """T5 starts with padding where its configuration names no start token."""
        start = self._tokens.pad if self._tokens.start is None else self._tokens.start
        return dataclasses.replace(self._tokens, start=start)

    def tensor(self, name: str) -> torch.Tensor:
        if name == "embed.weight":
            return self._shards.get(self._embedding)
        return self._shards.get(hf_name(self._family, name))

    def encoder_tensor(self, name: str) -> torch.Tensor:
        return self._shards.get(f"encoder.{name}")

    def tokenizer(self) -> Any | None:
        return read_tokenizer(self._directory, self._config)

    @property
    def _embedding(self) -> str:
        return next((name for name in EMBEDDINGS if name in self._shards), EMBEDDINGS[0])

    def _one_matrix(self, name: str) -> bool:
        """Whether a tensor is the embedding, or not stored because it is."""
        if name not in self._shards or name == self._embedding:
            return True
        other, embedding = self._shards.get(name), self._shards.get(self._embedding)
        return other.shape == embedding.shape and torch.equal(other, embedding)

    def _refuse_strangers(self) -> None:
        """A tensor without a place here means that the model computes something that our block does not."""
        for name in EMBEDDINGS:
            if not self._one_matrix(name):
                raise UnsupportedModel(f"{self._directory}: '{name}' is not '{self._embedding}'; here they are one matrix")
        known = {hf_name(self._family, name) for name in parameter_shapes(self._architecture)}
        with torch.device("meta"):
            known |= {f"encoder.{name}" for name in build_encoder(self.encoder).state_dict()}
        known |= {*EMBEDDINGS, *NEVER_READ, "lm_head.weight"}
        refuse_tensors(self._directory, self._family, sorted(set(self._shards.names()) - known))


def load_seq2seq(base: Seq2SeqCheckpoint, dtype: torch.dtype | None, device: torch.device, where: str) -> FathomForSeq2SeqLM:
    """A plain encoder-decoder model: the plan with one recursion."""
    dtype = dtype or base.dtype
    plan = DepthPlan.vanilla(base.architecture.layers)
    model = empty_seq2seq(configure_seq2seq(base.architecture, plan, None, base.encoder, base.tokens, dtype))
    fill(model.decoder, base.tensor, dtype, device, where)
    fill(model.encoder, base.encoder_tensor, dtype, device, where)
    return finish(model, base.tokenizer())


def seq2seq_architecture(directory: Path, config: dict[str, Any]) -> Architecture:
    """The decoder's architecture without reading its weights; what they say of the head is used where they are there."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return Seq2SeqCheckpoint(directory, config).architecture
    return architecture_from_config(config, str(directory))
