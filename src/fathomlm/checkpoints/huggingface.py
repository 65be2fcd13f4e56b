"""A plain Hugging Face directory as a base checkpoint: config.json, safetensors, tokenizer files. Of the T5 family the
decoder is the base checkpoint, and the encoder keeps Hugging Face's own names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from fathomlm.checkpoints.assemble import TokenIds, end_ids
from fathomlm.checkpoints.confined import TokenizerTrial, no_panic
from fathomlm.checkpoints.families import SEQ2SEQ, Family, family_for, family_of, hf_name
from fathomlm.checkpoints.locate import check_model_directory
from fathomlm.checkpoints.shards import INDEX, SINGLE, Shards, read_json
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.bounds import BOUNDS
from fathomlm.depth.cost import parameter_shapes
from fathomlm.errors import CheckpointError, FathomError, UnsupportedModel
from fathomlm.fields import Fields
from fathomlm.jsonfile import read_object
from fathomlm.model.encoder import build_encoder, encoder_record

COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attention\.(bias|masked_bias)$|^freqs_cis$")
"""Buffers of old checkpoints that follow from the configuration."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json", "tokenizer_config.json")


class HuggingFaceCheckpoint:
    """Reads lazily: making one touches the configuration and the shards' headers only."""

    def __init__(self, directory: Path, config: dict[str, Any] | None = None) -> None:
        """`config` is the directory's config.json, where it was read before."""
        self._directory = directory
        self._config = read_config(directory) if config is None else config
        self.tokens = tokens_of(directory, self._config)
        self.encoder: dict[str, Any] | None = None
        self._shards = Shards(directory)
        self._lay_out()
        self._refuse_strangers()

    def _lay_out(self) -> None:
        """What the configuration says of the model, compared with the tensors that there are."""
        config, where = self._config, str(self._directory)
        complete = family_of(config.get("model_type"), where).complete
        config = config if complete is None else {**config, **complete(self._shards.names())}
        self.architecture, self.plan = plan_from_config(config, where)
        self._family = family_for(self.architecture, self.plan)
        self._shards.check_layers(self.plan.unique_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor("embed.weight").dtype

    def tensor(self, name: str) -> torch.Tensor:
        stored, part = stored_as(self._family, name)
        where = hf_name(self._family, stored)
        if "*" in where:
            return torch.stack([self._floats(each) for each in self._numbered(where)])
        tensor = self._floats(where)
        if part is None:
            return tensor
        fusion = self._family.fusion(part, name.rpartition(".")[2])
        assert fusion is not None
        tensor = fusion.split(tensor, part, self.architecture)
        return self._family.sorted_rows(part, tensor, self.architecture.head_dim)

    def _floats(self, name: str) -> torch.Tensor:
        """A stored tensor. Integers and floats of 8 bits mean nothing without scales that only their quantizer knows."""
        tensor = self._shards.get(name)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UnsupportedModel(
                f"{self._directory}: '{name}' is quantised ({kind}); give the unquantised checkpoint or a GGUF file"
            )
        return tensor

    def tokenizer(self) -> Any | None:
        return read_tokenizer(self._directory, self._config)

    def _numbered(self, name: str) -> list[str]:
        """The names of a tensor that is stored expert by expert."""
        return [name.replace("*", str(i)) for i in range(self.architecture.experts)] if "*" in name else [name]

    def _refuse_strangers(self) -> None:
        """A tensor without a place here means that the model computes something that our block does not."""
        more = sorted(name for name in set(self._shards.names()) - self._known() if not COMPUTED.search(name))
        if more:
            kind = f"in a {self._family.model_type} model"
            raise UnsupportedModel(
                f"{self._directory}: {len(more)} tensor(s) are unexpected {kind}, the first is '{more[0]}'"
            )

    def _known(self) -> set[str]:
        """What the files may hold."""
        names = parameter_shapes(self.architecture, self.plan)
        stored = {hf_name(self._family, stored_as(self._family, name)[0]) for name in names}
        return {each for name in stored for each in self._numbered(name)} | {hf_name(self._family, "head.weight")}


def stored_as(family: Family, name: str) -> tuple[str, str | None]:
    """The tensor that one of ours is stored in, and which part of it, where a format keeps several as one."""
    front, _, rest = name.partition(".")
    if front != "layers":
        return name, None
    number, _, rest = rest.partition(".")
    module, _, end = rest.rpartition(".")
    fusion = family.fusion(module, end)
    return (name, None) if fusion is None else (f"layers.{number}.{fusion.name}.{end}", module)


def read_config(directory: Path) -> dict[str, Any]:
    check_model_directory(directory)
    return read_json(directory / "config.json")


def plan_from_config(config: dict[str, Any], where: str) -> tuple[Architecture, DepthPlan]:
    """The architecture that a Hugging Face configuration describes, and which of its layers runs when."""
    family: Family = family_of(config.get("model_type"), where)
    fields = Fields(config, f"{where}: config.json", error=CheckpointError)
    if (quantised := fields.record("quantization_config", default=None)) is not None:
        method = quantised.text("quant_method", default="unknown")
        raise UnsupportedModel(f"{where} is quantised ({method:.60}); give the unquantised checkpoint or a GGUF file")
    try:
        architecture = family.read(fields)
        return architecture, family.plan(fields, architecture)
    except FathomError as error:
        raise error if str(error).startswith(where) else type(error)(f"{where}: {error}") from error


def tokens_of(directory: Path, config: dict[str, Any]) -> TokenIds:
    """Special tokens; generation_config.json is newer than config.json where both speak."""
    sources = [Fields(config, f"{directory / 'config.json'}", error=CheckpointError)]
    if (directory / "generation_config.json").is_file():
        sources.append(read_object(directory / "generation_config.json", error=CheckpointError))
    found: dict[str, Any] = {}
    for source in sources:
        found |= {name: value for name, value in token_ids(source).items() if value is not None}
    return TokenIds(
        bos=found.get("bos_token_id"),
        eos=end_ids(found.get("eos_token_id")),
        pad=found.get("pad_token_id"),
        start=found.get("decoder_start_token_id"),
    )


def token_ids(config: Fields) -> dict[str, int | list[int] | None]:
    """The special tokens that a configuration names. Old ones write -1 where they have none."""
    most = BOUNDS["vocab"][1] - 1
    found: dict[str, int | list[int] | None] = {}
    for name in TOKENS:
        if name == "eos_token_id" and isinstance(config.raw(name), list):
            found[name] = config.integers(name, at_least=0, at_most=most)
            continue
        token = config.integer(name, at_least=-1, at_most=most, default=None)
        found[name] = None if token == -1 else token
    return found


def read_tokenizer(directory: Path, config: dict[str, Any] | None = None) -> Any | None:
    """The tokenizer beside the weights, or None. Tokenizers that bring their own code are not run. `config` is config.json,
    where it was read before."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    trial = TokenizerTrial(directory / TOKENIZER) if (directory / TOKENIZER).is_file() else None
    from transformers import AutoTokenizer

    more = _tokenizer_config(directory, config)
    if trial is not None:
        trial.check()
    try:
        with no_panic(str(directory)):
            found = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, **more)
            found("")  # what its configuration says of lengths and padding is read only now
            return found
    except FathomError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception on a corrupt tokenizer.json
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{directory}: the tokenizer cannot be read ({reason:.300})") from error


def _tokenizer_config(directory: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """What transformers needs of config.json to choose a tokenizer's class. It is not given the file, which would build all
    that the file says."""
    if config is None and not (directory / "config.json").is_file():
        return {}
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    record = read_json(directory / "config.json") if config is None else config
    found = Fields(record, f"{directory / 'config.json'}", error=CheckpointError)
    model_type, kind = found.text("model_type", default=""), found.text("tokenizer_class", default=None)
    built = AutoConfig.for_model(model_type) if model_type in CONFIG_MAPPING else PreTrainedConfig()
    built.tokenizer_class = kind
    return {"config": built}


EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""One matrix; some checkpoints store it more than once."""
NEVER_READ = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
"""Of old checkpoints: cross-attention has no positions."""


def is_seq2seq(config: dict[str, Any]) -> bool:
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in SEQ2SEQ


class Seq2SeqCheckpoint(HuggingFaceCheckpoint):
    """Reads lazily, but for the embedding and the head, which are compared where both are stored: whether the decoder's head
    is the embedding is read off the weights, as transformers does."""

    def _lay_out(self) -> None:
        architecture = plan_from_config(self._config, str(self._directory))[0]
        self._shards.check_layers(architecture.layers)
        try:
            self.encoder = encoder_record(self._config)
            self._shards.check_layers(self.encoder["num_layers"])
        except FathomError as error:
            raise CheckpointError(f"{self._directory}: {error}") from error
        tied = self._one_matrix("lm_head.weight")
        self.architecture = dataclasses.replace(architecture, tied_embeddings=tied)
        self.plan = DepthPlan.vanilla(architecture.layers)
        self._family = family_for(architecture)
        if self.tokens.start is None:  # T5 starts with padding where its configuration names no start token
            self.tokens = dataclasses.replace(self.tokens, start=self.tokens.pad)

    def tensor(self, name: str) -> torch.Tensor:
        if name == "embed.weight":
            return self._floats(self._embedding)
        return self._floats(name if name.startswith("encoder.") else hf_name(self._family, name))

    @property
    def _embedding(self) -> str:
        return next((name for name in EMBEDDINGS if name in self._shards), EMBEDDINGS[0])

    def _one_matrix(self, name: str) -> bool:
        """Whether a tensor is the embedding, or not stored because it is."""
        if name not in self._shards or name == self._embedding:
            return True
        other, embedding = self._shards.get(name), self._shards.get(self._embedding)
        return other.shape == embedding.shape and torch.equal(other, embedding)

    def _known(self) -> set[str]:
        for name in EMBEDDINGS:
            if not self._one_matrix(name):
                raise UnsupportedModel(f"{self._directory}: '{name}' is not '{self._embedding}'; here they are one matrix")
        with torch.device("meta"):
            encoder = {f"encoder.{name}" for name in build_encoder(self.encoder or {}).state_dict()}
        return super()._known() | encoder | {*EMBEDDINGS, *NEVER_READ}


def seq2seq_architecture(directory: Path, config: dict[str, Any]) -> Architecture:
    """The decoder's architecture without reading its weights; what they say of the head is used where they are there."""
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return Seq2SeqCheckpoint(directory, config).architecture
    return plan_from_config(config, str(directory))[0]
