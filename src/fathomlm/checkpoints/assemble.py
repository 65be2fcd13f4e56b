"""Building a model from tensors as they are read, so that no weight is ever held twice; and from another model's
weights, under another plan: with exits, with a router, with shared keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fathomlm.checkpoints.source import BaseCheckpoint, TokenIds, end_ids
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.decoder import reset_module
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, check_plain, empty_model
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig

Model = TypeVar("Model", FathomForCausalLM, FathomForSeq2SeqLM)
Reader = Callable[[str], torch.Tensor]
OnProgress = Callable[[int, int], None]
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
    own = {"encoder_config": encoder, "decoder_start_token_id": tokens.start, "dtype": dtype}
    return FathomSeq2SeqConfig.of(architecture, plan, relaxation, **own, **_ids(tokens))


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
        raise CheckpointError(f"{where}: '{name}' is {tuple(tensor.shape)}, the configuration requires {shape}")
    value = tensor.to(device=device, dtype=dtype).contiguous()
    owner, _, leaf = name.rpartition(".")  # `load_state_dict` would walk the whole module for each name
    setattr(module.get_submodule(owner), leaf, nn.Parameter(value, module.get_parameter(name).requires_grad))


def load_base(base: BaseCheckpoint, dtype: torch.dtype | None, device: torch.device, where: str) -> FathomForCausalLM:
    """A model from a base checkpoint, under the plan that it comes with."""
    dtype = dtype or base.dtype
    model = empty_model(configure(base.architecture, base.plan, None, base.tokens, dtype))
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
        check_plain(model, "converted")
        self._model = model
        self._tensors = dict(model.decoder.named_parameters())

    @property
    def architecture(self) -> Architecture:
        return self._model.architecture

    @property
    def plan(self) -> DepthPlan:
        return self._model.plan

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


ADAPTERS, BLOCKS, DRAFT = "exit_adapters.", "exit_blocks.", "exit_draft."


def replan(
    model: Model,
    plan: DepthPlan,
    *,
    relaxation: Relaxation | None = None,
    exit_rank: int = 0,
    exit_adapter: int = 0,
    exit_classifier: bool = False,
    seed: int = 0,
    architecture: Architecture | None = None,
) -> Model:
    """`model` under `plan`, which must lay out the same layers. What the new plan adds (routers, what exits and steps have
    of their own) is kept where the model has it already, and fresh otherwise; what it leaves out is dropped. A fresh layer
    of an exit is a copy of the layer behind the exit: it starts as the model that is one layer deeper. The exit vocabulary
    stays while there are exits. Without a `relaxation` the model's own stays. An encoder is the same object in
    both. `architecture` is the model's own with the layers that the plan has."""
    relaxation = model.relaxation if relaxation is None else relaxation
    exits = {"exit_rank": exit_rank, "exit_adapter": exit_adapter, "exit_classifier": exit_classifier}
    if model.plan == plan and model.relaxation == relaxation and model.config.exit_fields == exits:
        return model
    dtype = model.decoder.embed.weight.dtype
    parts = architecture or model.architecture, plan, relaxation
    tokens = ModelBase(model).tokens
    if isinstance(model, FathomForSeq2SeqLM):
        config = configure_seq2seq(*parts, model.config.encoder_config, tokens, dtype)
    else:
        config = configure(*parts, tokens, dtype)
    for field, value in exits.items():
        setattr(config, field, value)
    config.exit_vocab = model.config.exit_vocab if plan.exits or plan.draft else None
    config.kept_layers = model.config.kept_layers
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
    """What the layers of exits start as that the model does not have yet. A draft layer reads the sum of both its inputs at
    first, and is a copy of the last layer."""
    found: dict[str, Tensor] = {}
    if plan.draft and not any(name.startswith(DRAFT) for name in kept):
        layer = f"layers.{plan.steps[-1].layer}."
        found = {f"{DRAFT}block.{name[len(layer) :]}": weights[name].clone() for name in weights if name.startswith(layer)}
        embed_VM = weights["embed.weight"]
        found[f"{DRAFT}mix.weight"] = torch.eye(embed_VM.shape[1], dtype=embed_VM.dtype, device=embed_VM.device).repeat(1, 2)
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


def with_loops(model: Model, loops: int) -> Model:
    """`model` with its core looped another number of times, over the same weights: more depth at test time (Huginn).
    Steps with weights of their own (a relaxation, a router) belong to one number of loops."""
    if model.relaxation is not None:
        raise OptionError(f"another number of loops cannot be combined with a {model.relaxation.kind} relaxation")
    if model.architecture.windows or model.architecture.rotated:
        raise OptionError("another number of loops cannot be combined with layers that differ in window or rotation")
    plan = model.plan.with_recursions(loops)
    architecture = dataclasses.replace(model.architecture, layers=plan.unrolled_layers)
    return replan(model, plan, architecture=architecture, **model.config.exit_fields)
