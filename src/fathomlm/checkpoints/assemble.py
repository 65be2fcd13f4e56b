"""Building a model from tensors as they are read, so that no weight is ever held twice; and from another model's
weights, under another plan: with exits, with a router, with shared keys and values.

What every base checkpoint offers, whatever file it lies in, are tensors one at a time, by this house's names:

    embed.weight                              layers.I.norm_attn.{weight,bias}
    layers.I.attn.{q,k,v,o}.{weight,bias}     layers.I.norm_mlp.{weight,bias}
    layers.I.attn.{q_norm,k_norm}.weight      layers.I.{norm_attn_out,norm_mlp_out}.weight   (sandwich)
    layers.I.mlp.{gate,up,down}.{weight,bias} norm.{weight,bias}, head.weight                (untied)
    layers.I.mlp.router.weight, and mlp.{gate,up,down}.weight with a matrix for each expert  (Qwen3-MoE)
    layers.I.cross.{q,k,v,o}.weight           layers.I.norm_cross.weight, relative.weight    (T5)

Reading a tensor at a time is what keeps a conversion's memory near the size of its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, check_plain
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel, FathomSeq2SeqConfig
from fathomlm.model.stack import reset_module

Model = TypeVar("Model", FathomForCausalLM, FathomForSeq2SeqLM)
Reader = Callable[[str], Tensor]
OnProgress = Callable[[int, int], None]
"""Told how many layers of how many are done."""
Item = TypeVar("Item")


def telling(items: Sequence[Item], on_progress: OnProgress | None) -> Iterator[Item]:
    """The items, telling before each and behind the last how many are done."""
    for done, item in enumerate(items):
        if on_progress is not None:
            on_progress(done, len(items))
        yield item
    if on_progress is not None:
        on_progress(len(items), len(items))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The special tokens that decoding needs to know."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Every token that ends a text; some checkpoints have several."""
    pad: int | None = None
    start: int | None = None
    """What the decoder of an encoder-decoder model reads first."""


def end_ids(eos: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End tokens as a tuple; configurations write none, one or several."""
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


class BaseCheckpoint(Protocol):
    """A checkpoint that is no FathomLM directory, read lazily: an untied model, or one whose format has loops."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def plan(self) -> DepthPlan:
        """Which of the stored layers runs when."""
        ...

    @property
    def encoder(self) -> dict[str, Any] | None:
        """The record of the encoder that the layers attend to, where there is one."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in (float32 for quantised files)."""
        ...

    @property
    def tokens(self) -> TokenIds: ...

    def tensor(self, name: str) -> Tensor:
        """One tensor by this house's name, in any floating dtype; an encoder's are `encoder.` and Hugging Face's name."""
        ...

    def tokenizer(self) -> Any | None:
        """The transformers tokenizer with its chat template, or None where the checkpoint has none."""
        ...


def configure(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    tokens: TokenIds,
    dtype: torch.dtype,
    encoder: dict[str, Any] | None = None,
) -> FathomConfig:
    """A configuration with the special tokens where transformers looks for them; of an encoder-decoder model where the
    record of an `encoder` is given (`encoder_record`)."""
    eos = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos) or None
    ids: dict[str, Any] = {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.pad, "dtype": dtype}
    if encoder is None:
        return FathomConfig.of(architecture, plan, relaxation, **ids)
    ids |= {"encoder_config": encoder, "decoder_start_token_id": tokens.start}
    return FathomSeq2SeqConfig.of(architecture, plan, relaxation, **ids)


def empty_model(config: FathomConfig) -> FathomModel:
    """A model whose weights are not allocated yet; they are assigned as they are read."""
    with torch.device("meta"):
        return FathomForSeq2SeqLM(config) if isinstance(config, FathomSeq2SeqConfig) else FathomForCausalLM(config)


def empty_beside(model: Model, config: FathomConfig) -> Model:
    """The same of another model's class, with that model's encoder."""
    with torch.device("meta"):
        result = type(model)(config)
    if isinstance(model, FathomForSeq2SeqLM):
        result.encoder = model.encoder
    return result


def fill(module: nn.Module, read: Reader, dtype: torch.dtype, device: torch.device, where: str) -> None:
    """Give every parameter of an empty module (a decoder, an encoder) its tensor, checked for shape."""
    for name, parameter in list(module.named_parameters()):
        put(module, name, read(name), dtype, device, tuple(parameter.shape), where)


def put(
    module: nn.Module,
    name: str,
    tensor: Tensor,
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


def load_base(base: BaseCheckpoint, dtype: torch.dtype | None, device: torch.device, where: str) -> FathomModel:
    """A model from a base checkpoint, under the plan that it comes with."""
    dtype = dtype or base.dtype
    model = empty_model(configure(base.architecture, base.plan, None, base.tokens, dtype, base.encoder))
    fill(model.decoder, base.tensor, dtype, device, where)
    if isinstance(model, FathomForSeq2SeqLM):
        fill(model.encoder, lambda name: base.tensor(f"encoder.{name}"), dtype, device, where)
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
        config = model.config
        self.architecture, self.plan = model.architecture, model.plan
        self.dtype = model.decoder.embed.weight.dtype
        self.encoder, start = None, None
        if isinstance(config, FathomSeq2SeqConfig):
            self.encoder, start = config.encoder_config, config.decoder_start_token_id
        ids = {"bos": config.bos_token_id, "eos": end_ids(config.eos_token_id), "pad": config.pad_token_id}
        self.tokens = TokenIds(**ids, start=start)
        self._tensors = dict(model.decoder.named_parameters())
        self._tokenizer = model.tokenizer

    def tensor(self, name: str) -> Tensor:
        """A copy: what is made from a model must not change with it."""
        return self._tensors[name].detach().clone()

    def tokenizer(self) -> Any | None:
        return self._tokenizer


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
    base = ModelBase(model)
    config = configure(architecture or base.architecture, plan, relaxation, base.tokens, dtype, base.encoder)
    for field, value in exits.items():
        setattr(config, field, value)
    config.exit_vocab = model.config.exit_vocab if plan.exits or plan.draft else None
    config.kept_layers = model.config.kept_layers
    result = empty_beside(model, config)
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


def put_base(model: FathomModel, name: str, base: BaseCheckpoint, device: torch.device) -> None:
    """One of a base checkpoint's tensors in its place in a model's decoder, in float32."""
    shape = tuple(model.decoder.get_parameter(name).shape)
    put(model.decoder, name, base.tensor(name), torch.float32, device, shape, "the base checkpoint")


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
