"""The same weights under another plan: with exits, with a router, with shared keys and values."""

from __future__ import annotations

import torch
from torch import nn

from fathomlm.checkpoints.assemble import Model, ModelBase, configure, configure_seq2seq, finish
from fathomlm.depth import DepthPlan
from fathomlm.model.decoder import reset_module
from fathomlm.model.seq2seq import FathomForSeq2SeqLM


def replan(model: Model, plan: DepthPlan, *, exit_rank: int = 0, seed: int = 0) -> Model:
    """`model` under `plan`, which must lay out the same layers. What the new plan adds (routers, low-rank deltas of
    exits) is kept where the model has it already, and fresh otherwise; what it leaves out is dropped. An encoder is the
    same object in both."""
    if model.plan == plan and model.config.exit_rank == exit_rank:
        return model
    dtype = model.decoder.embed.weight.dtype
    parts = model.architecture, plan, model.relaxation
    tokens = ModelBase(model).tokens
    if isinstance(model, FathomForSeq2SeqLM):
        config = configure_seq2seq(*parts, model.config.encoder_config, tokens, dtype)
    else:
        config = configure(*parts, tokens, dtype)
    config.exit_rank = exit_rank
    with torch.device("meta"):
        result = type(model)(config)
    if isinstance(model, FathomForSeq2SeqLM):
        result.encoder = model.encoder
    weights, wanted = model.decoder.state_dict(), result.decoder.state_dict()
    kept = {name: value for name, value in weights.items() if name in wanted and value.shape == wanted[name].shape}
    result.decoder.load_state_dict(kept, strict=False, assign=True)
    torch.manual_seed(seed)  # what has no generator of its own draws from torch's
    generator = torch.Generator().manual_seed(seed)
    for module in result.decoder.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            _materialise(module, dtype, model.decoder.embed.weight.device)
            reset_module(module, model.config.initializer_range, generator)
    return finish(result, model.tokenizer)


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            real = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(real, requires_grad=parameter.requires_grad))
