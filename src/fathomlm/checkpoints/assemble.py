"""Building a model from tensors as they are read, so that no weight is ever held twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from fathomlm.checkpoints.source import BaseCheckpoint, TokenIds, end_ids
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import CheckpointError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, empty_model
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig

Model = TypeVar("Model", FathomForCausalLM, FathomForSeq2SeqLM)
Reader = Callable[[str], torch.Tensor]
Tick = Callable[[int, int], None]
"""Told how many layers of how many are done."""


def configure(
    architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None, tokens: TokenIds, dtype: torch.dtype
) -> FathomConfig:
    """A configuration with the special tokens where transformers looks for them."""
    return FathomConfig.of(architecture, plan, relaxation, dtype=dtype, **_ids(tokens))


def configure_seq2seq(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    encoder: dict[str, Any],
    tokens: TokenIds,
    dtype: torch.dtype,
) -> FathomSeq2SeqConfig:
    """The same for an encoder-decoder model; `encoder` is what `encoder_record` makes."""
    relaxed = None if relaxation is None else relaxation.to_dict()
    return FathomSeq2SeqConfig(
        architecture=architecture.to_dict(),
        plan=plan.to_dict(),
        relaxation=relaxed,
        encoder_config=encoder,
        decoder_start_token_id=tokens.start,
        dtype=dtype,
        **_ids(tokens),
    )


def _ids(tokens: TokenIds) -> dict[str, Any]:
    eos = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos) or None
    return {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.pad}


def fill(module: nn.Module, read: Reader, dtype: torch.dtype, device: torch.device, where: str) -> None:
    """Give every parameter of an empty module (a decoder, an encoder) its tensor, checked for shape."""
    for name, parameter in list(module.named_parameters()):
        put(module, name, read(name), dtype, device, tuple(parameter.shape), where)


def put(
    module: nn.Module,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    where: str,
) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{where}: '{name}' is {tuple(tensor.shape)}, the configuration asks for {shape}")
    value = tensor.to(device=device, dtype=dtype).contiguous()
    module.load_state_dict({name: value}, strict=False, assign=True)


def load_base(base: BaseCheckpoint, dtype: torch.dtype | None, device: torch.device, where: str) -> FathomForCausalLM:
    """A plain model from a base checkpoint: the plan with one recursion."""
    dtype = dtype or base.dtype
    plan = DepthPlan.vanilla(base.architecture.layers)
    model = empty_model(configure(base.architecture, plan, None, base.tokens, dtype))
    fill(model.decoder, base.tensor, dtype, device, where)
    return finish(model, base.tokenizer())


def finish(model: Model, tokenizer: Any | None) -> Model:
    """A model whose weights are in place, ready to run."""
    model.tokenizer = tokenizer
    model.limit_exits(model.config.build_exit_vocab())
    return model.eval()  # type: ignore[no-any-return]


class ModelBase:
    """A loaded plain model seen as a base checkpoint, so that one converter serves files and models alike."""

    def __init__(self, model: FathomModel) -> None:
        self._model = model
        self._tensors = dict(model.decoder.named_parameters())

    @property
    def architecture(self) -> Architecture:
        return self._model.architecture

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors["embed.weight"].dtype

    @property
    def tokens(self) -> TokenIds:
        config = self._model.config
        start = config.decoder_start_token_id if isinstance(config, FathomSeq2SeqConfig) else None
        return TokenIds(bos=config.bos_token_id, eos=end_ids(config.eos_token_id), pad=config.pad_token_id, start=start)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy: what is made from a model must not change with it."""
        return self._tensors[name].detach().clone()

    def tokenizer(self) -> Any | None:
        return self._model.tokenizer
