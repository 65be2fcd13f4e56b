"""The same weights under another plan: with exits, with a router, with shared keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathomlm.checkpoints.assemble import Model, ModelBase, configure, configure_seq2seq, finish
from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.model.decoder import reset_module
from fathomlm.model.seq2seq import FathomForSeq2SeqLM

ADAPTERS, BLOCKS = "exit_adapters.", "exit_blocks."


def replan(
    model: Model,
    plan: DepthPlan,
    *,
    relaxation: Relaxation | None = None,
    exit_rank: int = 0,
    exit_adapter: int = 0,
    exit_classifier: bool = False,
    seed: int = 0,
) -> Model:
    """`model` under `plan`, which must lay out the same layers. What the new plan adds (routers, what exits and steps have
    of their own) is kept where the model has it already, and fresh otherwise; what it leaves out is dropped. A fresh layer
    of an exit is a copy of the layer behind the exit: it starts as the model that is one layer deeper. The exit vocabulary
    stays while there are exits. Without a `relaxation` the model's own stays. An encoder is the same object in
    both."""
    relaxation = model.relaxation if relaxation is None else relaxation
    exits = {"exit_rank": exit_rank, "exit_adapter": exit_adapter, "exit_classifier": exit_classifier}
    if model.plan == plan and model.relaxation == relaxation and model.config.exit_fields == exits:
        return model
    dtype = model.decoder.embed.weight.dtype
    parts = model.architecture, plan, relaxation
    tokens = ModelBase(model).tokens
    if isinstance(model, FathomForSeq2SeqLM):
        config = configure_seq2seq(*parts, model.config.encoder_config, tokens, dtype)
    else:
        config = configure(*parts, tokens, dtype)
    for field, value in exits.items():
        setattr(config, field, value)
    config.exit_vocab = model.config.exit_vocab if plan.exits else None
    with torch.device("meta"):
        result = type(model)(config)
    if isinstance(model, FathomForSeq2SeqLM):
        result.encoder = model.encoder
    weights, wanted = model.decoder.state_dict(), result.decoder.state_dict()
    kept = {name: value for name, value in weights.items() if name in wanted and value.shape == wanted[name].shape}
    kept = _whole_adapters(kept, wanted) | _copied_layers(kept, weights, plan)
    result.decoder.load_state_dict(kept, strict=False, assign=True)
    torch.manual_seed(seed)  # what has no generator of its own draws from torch's
    generator = torch.Generator().manual_seed(seed)
    for module in result.decoder.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            _materialise(module, dtype, model.decoder.embed.weight.device)
            reset_module(module, model.config.initializer_range, generator)
    if relaxation != model.relaxation:
        result.decoder.match_weights()
    return finish(result, model.tokenizer)


def _whole_adapters(kept: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter of another rank is another adapter, also where its norm would fit."""
    lost = {_part(name) for name in wanted if name not in kept and name.startswith(ADAPTERS)}
    return {name: value for name, value in kept.items() if _part(name) not in lost}


def _copied_layers(kept: dict[str, Tensor], weights: dict[str, Tensor], plan: DepthPlan) -> dict[str, Tensor]:
    """What the layers of exits start as that the model does not have yet."""
    found: dict[str, Tensor] = {}
    for index in plan.exits if plan.exit_layer else ():
        block, layer = f"{BLOCKS}{index}.", f"layers.{plan.steps[index + 1].layer}."
        if not any(name.startswith(block) for name in kept):
            found |= {block + name[len(layer) :]: weights[name].clone() for name in weights if name.startswith(layer)}
    return found


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            real = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(real, requires_grad=parameter.requires_grad))
