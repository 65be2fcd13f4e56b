"""The thin Hugging Face shell: `save_pretrained`, `from_pretrained`, the Auto classes, `generate`.

Everything inside is ours; everything outside is what users of transformers know. Importing this module registers the
`fathomlm` model type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from fathomlm.depth import Architecture, DepthPlan, Relaxation, Step
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.config import FathomConfig
from fathomlm.model.decoder import Decoder
from fathomlm.model.stack import reset_module

INTRODUCTION = "fathomlm_auto"
"""The module beside a saved model that names our classes."""


class Shell(PreTrainedModel):  # type: ignore[misc]
    """What every model here shows of its decoder, in transformers' words."""

    config_class: type[FathomConfig] = FathomConfig
    main_input_name = "input_ids"
    auto_class = "AutoModelForCausalLM"
    """The one of transformers that reads it."""
    _supports_sdpa = True
    decoder: Decoder
    tokenizer: Any | None
    """The transformers tokenizer that came with the checkpoint; `save_pretrained` writes it beside the weights."""

    @property
    def architecture(self) -> Architecture:
        return self.decoder.architecture

    @property
    def plan(self) -> DepthPlan:
        return self.decoder.plan

    @property
    def relaxation(self) -> Relaxation | None:
        return self.decoder.relaxation

    def fit_weights(self) -> None:
        """Derive what follows from weights, where there are any: DoRA's row lengths, and the rows of the exit vocabulary."""
        if self.decoder.embed.weight.device.type != "meta":
            self.decoder.match_weights()
            self.limit_exits(self.config.build_exit_vocab())

    def limit_exits(self, vocab_W: Tensor | None) -> None:
        """Limit early exits to a vocabulary of their own, or (None) to all tokens, and keep that with the model. Call it
        after the weights are there, and again when they change."""
        if vocab_W is not None and not self.plan.exits and not self.plan.draft:
            raise OptionError("an exit vocabulary requires a model with exits or a draft layer")
        ordered_W = None if vocab_W is None else vocab_W.sort().values
        self.decoder.limit_exits(ordered_W)
        self.config.exit_vocab = None if ordered_W is None else ordered_W.tolist()

    def _init_weights(self, module: nn.Module) -> None:
        """transformers asks this of each module that holds parameters directly and was not read from a file; an encoder's
        are initialised by its own class."""
        reset_module(module, self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.decoder.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.decoder.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """A head that is the embedding follows it."""
        if self.decoder.head is not None:
            self.decoder.head = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """transformers' own for the embedding and the head; what else follows from the number of tokens goes along: the
        architecture, what exits add to the head, and the exit vocabulary, which new tokens are not part of."""
        embed: nn.Embedding = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        vocab = embed.num_embeddings
        if vocab != self.architecture.vocab:
            self.decoder.resize_vocab(vocab)
            self.config.architecture = self.architecture.to_dict()
            tokens = self.config.exit_vocab
            kept = (
                None
                if tokens is None
                else torch.tensor([token for token in tokens if token < vocab], device=embed.weight.device)
            )
            self.limit_exits(kept)
        return embed

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, which would take integers for weights and leave their scales unread, and knows nothing of what
        follows from weights."""
        found = super().from_pretrained(*args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        if model.config.weight_format is not None:
            raise CheckpointError(
                f"{args[0] if args else 'the model'} holds {model.config.weight_format} weights with scales, which "
                "fathomlm.load reads and transformers does not; save what it gives to have plain weights"
            )
        model.limit_exits(model.config.build_exit_vocab())
        return found

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        check_plain(self, "saved")
        main = kwargs.get("is_main_process", True)
        if main:
            introduce(self, self.config, Path(save_directory))
        super().save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None and main:
            self.tokenizer.save_pretrained(save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """transformers calls this on classes that it found through `introduce`, and would then copy their source files
        beside what they save."""


def introduce(model: Shell, config: FathomConfig, directory: Path) -> None:
    """Lets transformers' Auto classes read a directory where nobody imported fathomlm: with `trust_remote_code=True` they
    import it, and say what to install where it is not. The file holds no code of the model."""
    directory.mkdir(parents=True, exist_ok=True)
    name = type(model).__name__.removeprefix("FSDP")  # what sharding puts in front, as transformers leaves it out
    names = {"AutoConfig": type(config).__name__, model.auto_class: name}
    config.auto_map = {auto: f"{INTRODUCTION}.{name}" for auto, name in names.items()}
    text = '"""Read by transformers with trust_remote_code=True; the model is in the fathomlm package."""\n\n'
    text += f"from fathomlm import {', '.join(names.values())}  # noqa: F401\n"
    (directory / f"{INTRODUCTION}.py").write_text(text, encoding="utf-8")


def check_plain(model: Shell, done: str) -> None:
    """Refuse integer weights where weights are asked for."""
    if model.decoder.quantized is not None:
        raise OptionError(f"a model loaded with quantize='{model.decoder.quantized}' cannot be {done}; load it without")


class FathomForCausalLM(Shell, GenerationMixin):  # type: ignore[misc]
    """A `Decoder` in Hugging Face clothes."""

    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = ("PreNormBlock", "PostNormBlock", "SandwichBlock", "AroundBlock", "ParallelBlock")

    def __init__(self, config: FathomConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(*config.build_parts(), **config.exit_fields)
        self.tokenizer = None
        self.post_init()
        if self.plan.routing is not None:
            self.config.use_cache = self.generation_config.use_cache = False
        self.fit_weights()

    @property
    def base_model(self) -> nn.Module:
        """The backbone as transformers and TRL call it, by `input_ids`; the decoder itself has words of its own."""
        return Backbone(self)

    def get_output_embeddings(self) -> nn.Module:
        """The head; where it is the embedding, that module, which PEFT looks for among the model's own. TRL asks it for the
        bias that a linear would have."""
        if self.decoder.head is not None:
            return self.decoder.head
        self.decoder.embed.bias = None  # type: ignore[assignment]
        return self.decoder.embed

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Every step's activations are computed again in the backward pass, by torch's checkpointing without reentry."""
        try:
            self.plan.check_recompute("layer")
        except OptionError as error:
            raise ValueError(f"{error}; train without gradient checkpointing") from error
        super().gradient_checkpointing_enable(*args, **kwargs)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As in any transformers causal model, also in what it returns. `past_key_values` is a transformers cache, one entry
        a step; hidden states are the embeddings and what each step made of them, the last one behind the final norm."""
        found = self.run_backbone(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            **kwargs,
        )
        hidden = found.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.logits(hidden[:, keep])
        loss = None
        if labels is not None:
            # transformers' own, which also reads `num_items_in_batch`: the Trainer counts the labels of all micro-batches of
            # a step and leaves the division to the model.
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )

    def run_backbone(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """All of `forward` up to the head."""
        check_outputs(self.config, kwargs)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be (batch, tokens), got {tuple(attention_mask.shape)}")
        if past_key_values is not None and self.plan.routing is not None:
            raise ValueError(
                "a transformers cache has one entry for every token and layer, which a routed model has not: call with "
                "use_cache=False, or generate with fathomlm.generate, which keeps a recursion-wise cache"
            )
        if use_cache and self.plan.routing is not None:
            raise ValueError("use_cache=True is not supported by routed models; fathomlm.generate has a cache for them")
        again = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        cached = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is None and cached and self.plan.routing is None and not again:
            past_key_values = DynamicCache(config=self.config)
        states = wanted_states(self.config, output_hidden_states)
        hidden = self.decoder(
            input_ids,
            positions_BT=position_ids,
            keep_BS=attention_mask,
            cache=None if past_key_values is None else HubCache(past_key_values, self.plan),
            embeddings_BTM=inputs_embeds,
            states=states,
            recompute="layer" if again and past_key_values is None else "none",
        )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=None if states is None else (*states[:-1], hidden),
        )


class Backbone(nn.Module):
    """A model's decoder in transformers' words. It is made when it is asked for and is no part of the model: its modules are
    the model's own."""

    def __init__(self, model: FathomForCausalLM) -> None:
        super().__init__()
        self.decoder = model.decoder
        self.config = model.config
        self.training = model.training
        self._run = model.run_backbone

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return self._run(*args, **kwargs)


def check_outputs(config: FathomConfig, requested: dict[str, Any]) -> None:
    """Refuse what would be asked for in vain: other models of transformers take it, and change what they return or see."""
    named = {
        name: requested.get(name, getattr(config, name, None)) for name in ("output_attentions", "output_router_logits")
    }
    named |= {name: requested.get(name) for name in REFUSED}
    for name in (name for name, value in named.items() if value is not None and value is not False):
        raise ValueError(f"{name} is not supported by FathomLM models; leave it out")


REFUSED = ("cu_seq_lens_q", "cu_seq_lens_k", "head_mask", "decoder_head_mask", "cross_attn_head_mask")
"""Sequences packed into one row, and heads left out."""


def wanted_states(config: FathomConfig, requested: bool | None) -> list[Tensor] | None:
    """Where the hidden states go, if they are wanted."""
    requested = config.output_hidden_states if requested is None else requested
    if not isinstance(requested, bool):
        raise ValueError(f"output_hidden_states must be True or False, got {requested!r}")
    return [] if requested else None


class HubCache:
    """A transformers cache seen through this house's protocol: its layers are our steps."""

    def __init__(self, cache: Any, plan: DepthPlan) -> None:
        self._cache = cache
        self._plan = plan
        self.length = int(cache.get_seq_length())

    def at(self, step: Step) -> HubKV | None:
        return None if self._plan.reads_kv(step) else HubKV(self._cache, step.index)

    def reads(self, step: Step) -> tuple[Tensor, Tensor] | None:
        if not self._plan.reads_kv(step):
            return None
        layer = self._cache.layers[self._plan.kv_sources[step.index]]
        return layer.keys, layer.values

    def advance(self, tokens: int) -> None:
        """transformers counts for itself."""


class HubKV:
    """One step's entries in a transformers cache."""

    stores = True

    def __init__(self, cache: Any, index: int) -> None:
        self._cache = cache
        self._index = index

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self._cache.update(k_BGTD, v_BGTD, self._index)
        return k, v

    def prefix(self, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Made anew each time: a transformers cache has no place for entries that are not tokens."""
        return make()


AutoConfig.register("fathomlm", FathomConfig)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM)
# The Trainer's label smoothing shifts the labels of the classes that are named here, and takes those of others as they are.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("fathomlm", FathomForCausalLM.__name__)

__all__ = ["FathomConfig", "FathomForCausalLM", "HubCache", "Shell", "check_outputs", "wanted_states"]
