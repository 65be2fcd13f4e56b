"""Building a model from tensors as they are read, so that no weight is ever held twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fathomlm.checkpoints.source import BaseCheckpoint, TokenIds, end_ids
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import CheckpointError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, empty_model

Reader = Callable[[str], torch.Tensor]
Tick = Callable[[int, int], None]
"""Told how many layers of how many are done."""


def configure(
    architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None, tokens: TokenIds, dtype: torch.dtype
) -> FathomConfig:
    """A configuration with the special tokens where transformers looks for them."""
    eos = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos) or None
    ids = {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.pad}
    return FathomConfig.of(architecture, plan, relaxation, dtype=dtype, **ids)


def fill(model: FathomForCausalLM, read: Reader, dtype: torch.dtype, device: torch.device, where: str) -> None:
    """Give every parameter of an empty model its tensor, checked for shape."""
    for name, parameter in list(model.decoder.named_parameters()):
        put(model, name, read(name), dtype, device, tuple(parameter.shape), where)


def put(
    model: FathomForCausalLM,
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
    model.decoder.load_state_dict({name: value}, strict=False, assign=True)


def load_base(base: BaseCheckpoint, dtype: torch.dtype | None, device: torch.device, where: str) -> FathomForCausalLM:
    """A plain model from a base checkpoint: the plan with one recursion."""
    dtype = dtype or base.dtype
    plan = DepthPlan.vanilla(base.architecture.layers)
    model = empty_model(configure(base.architecture, plan, None, base.tokens, dtype))
    fill(model, base.tensor, dtype, device, where)
    return finish(model, base.tokenizer())


def finish(model: FathomForCausalLM, tokenizer: Any | None) -> FathomForCausalLM:
    model.tokenizer = tokenizer
    return model.eval()  # type: ignore[no-any-return]


class ModelBase:
    """A loaded plain model seen as a base checkpoint, so that one converter serves files and models alike."""

    def __init__(self, model: FathomForCausalLM) -> None:
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
        return TokenIds(bos=config.bos_token_id, eos=end_ids(config.eos_token_id), pad=config.pad_token_id)

    def tensor(self, name: str) -> torch.Tensor:
        """A copy: what is made from a model must not change with it."""
        return self._tensors[name].detach().clone()

    def tokenizer(self) -> Any | None:
        return self._model.tokenizer
