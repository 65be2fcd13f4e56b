"""The thin Hugging Face shell: configuration, `save_pretrained`, `from_pretrained`, the Auto classes, `generate`.

Everything inside is ours; everything outside is what users of transformers know. Importing this module registers the
`fathomlm` model type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fathomlm.depth import Architecture, DepthPlan, ExitParts, Relaxation, Step
from fathomlm.errors import CheckpointError, OptionError, is_whole
from fathomlm.model.decoder import Decoder, reset_module
from fathomlm.model.exits import check_rising

SMALLEST = Architecture(family="llama", layers=1, hidden=2, intermediate=2, heads=1, kv_heads=1, head_dim=2, vocab=2)


class FathomConfig(PreTrainedConfig):  # type: ignore[misc]
    """An architecture, a plan over it and a relaxation, with the field names that transformers' tools look for."""

    model_type = "fathomlm"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        plan: dict[str, Any] | None = None,
        relaxation: dict[str, Any] | None = None,
        exit_rank: int = 0,
        exit_adapter: int = 0,
        exit_classifier: bool = False,
        exit_words: list[int] | None = None,
        weight_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        # transformers builds a default instance of every configuration class, so there is a smallest one.
        self.architecture = architecture or SMALLEST.to_dict()
        shape = Architecture.from_dict(self.architecture)
        self.plan = plan or DepthPlan.vanilla(shape.layers).to_dict()
        self.relaxation = relaxation
        self.exit_rank = exit_rank
        self.exit_adapter = exit_adapter
        self.exit_classifier = exit_classifier
        self.exit_words = exit_words
        """The tokens that exits choose among, rising; None is every token. `limit_exits` keeps the decoder in step."""
        self.weight_format = weight_format
        """How the files hold the weights, where that is not as numbers of `dtype`: int8."""
        self.vocab_size = shape.vocab
        self.hidden_size = shape.hidden
        self.intermediate_size = shape.intermediate
        self.num_hidden_layers = DepthPlan.from_dict(self.plan).unrolled_layers
        self.num_attention_heads = shape.heads
        self.num_key_value_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.max_position_embeddings = shape.context
        self.initializer_range = kwargs.pop("initializer_range", 0.02)
        self.use_cache = kwargs.pop("use_cache", True)
        self.bos_token_id = kwargs.pop("bos_token_id", None)
        self.eos_token_id = kwargs.pop("eos_token_id", None)
        self.pad_token_id = kwargs.pop("pad_token_id", None)
        for derived in DERIVED:
            kwargs.pop(derived, None)
        # A tied head is no second tensor here (`Decoder.logits`), so transformers has nothing to tie.
        super().__init__(tie_word_embeddings=False, **kwargs)

    @classmethod
    def of(
        cls, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None = None, **kwargs: Any
    ) -> FathomConfig:
        relaxed = None if relaxation is None else relaxation.to_dict()
        return cls(architecture=architecture.to_dict(), plan=plan.to_dict(), relaxation=relaxed, **kwargs)

    @property
    def exit_parts(self) -> ExitParts:
        """What each exit has of its own."""
        return ExitParts(
            head_rank=self.exit_rank,
            adapter_rank=self.exit_adapter,
            layer=self.plan.get("exit_layer", False),
            classifier=self.exit_classifier,
        )

    @property
    def exit_fields(self) -> dict[str, Any]:
        """The same by the names that `Decoder` and `replan` take; the plan says whether there are layers."""
        names = ("exit_rank", "exit_adapter", "exit_classifier")
        return {name: getattr(self, name) for name in names}

    def build_words(self) -> Tensor | None:
        """`exit_words` as a tensor, checked."""
        if self.exit_words is None:
            return None
        if not self.plan.get("exits"):
            raise OptionError("exit_words are what exits choose among, and the plan has none")
        if not isinstance(self.exit_words, list) or not all(is_whole(word) for word in self.exit_words):
            raise OptionError(f"exit_words must be a list of tokens, or null, got {self.exit_words!r:.60}")
        check_rising(self.exit_words, self.vocab_size, "exit_words")
        return torch.tensor(self.exit_words, device="cpu")

    def build_parts(self) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The typed objects behind the JSON."""
        relaxation = None if self.relaxation is None else Relaxation.from_dict(self.relaxation)
        return Architecture.from_dict(self.architecture), DepthPlan.from_dict(self.plan), relaxation


DERIVED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Fields that follow from the architecture and the plan; what a file says of them is not read back."""


class Shell(PreTrainedModel):  # type: ignore[misc]
    """What every model here shows of its decoder, in transformers' words."""

    config_class: type[FathomConfig] = FathomConfig
    main_input_name = "input_ids"
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
        """Make what follows from weights, where there are any yet: DoRA's row lengths, and the rows of exits' words."""
        if self.decoder.embed.weight.device.type != "meta":
            self.decoder.match_lengths()
            self.limit_exits(self.config.build_words())

    def limit_exits(self, words_W: Tensor | None) -> None:
        """Let early exits choose among some words only, or (None) among all, and keep the choice with the model. Say so
        after the weights are there, and again when they change."""
        if words_W is not None and not self.plan.exits:
            raise OptionError("the model has no exits that could choose among some words")
        ordered_W = None if words_W is None else words_W.sort().values
        self.decoder.limit_exits(ordered_W)
        self.config.exit_words = None if ordered_W is None else ordered_W.tolist()

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
        model.limit_exits(model.config.build_words())
        return found

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None and kwargs.get("is_main_process", True):
            self.tokenizer.save_pretrained(save_directory)


class FathomForCausalLM(Shell, GenerationMixin):  # type: ignore[misc]
    """A `Decoder` in Hugging Face clothes."""

    base_model_prefix = "decoder"
    _no_split_modules = ("PreNormBlock", "SandwichBlock", "ParallelBlock")

    def __init__(self, config: FathomConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(*config.build_parts(), **config.exit_fields)
        self.tokenizer = None
        self.post_init()
        if self.plan.routing is not None:
            self.config.use_cache = self.generation_config.use_cache = False
        self.fit_weights()

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As in any transformers causal model; `past_key_values` is a transformers cache, one entry a step."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask must be (batch, tokens), got {tuple(attention_mask.shape)}")
        if past_key_values is not None and self.plan.routing is not None:
            raise ValueError(
                "a transformers cache has one entry for every token and layer, which a routed model has not: call with "
                "use_cache=False, or generate with fathomlm.generate, which keeps a recursion-wise cache"
            )
        hidden = self.decoder(
            input_ids,
            positions_BT=position_ids,
            keep_BS=attention_mask,
            cache=None if past_key_values is None else HubCache(past_key_values, self.plan),
            embeddings_BTM=inputs_embeds,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.logits(hidden[:, keep])
        loss = None
        if labels is not None:
            # transformers' own, which also reads `num_items_in_batch`: the Trainer counts the labels of all micro-batches of
            # a step and leaves the division to the model.
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


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


def empty_model(config: FathomConfig) -> FathomForCausalLM:
    """A model whose weights are not allocated yet; they are assigned as they are read."""
    with torch.device("meta"):
        return FathomForCausalLM(config)


AutoConfig.register("fathomlm", FathomConfig)
AutoModelForCausalLM.register(FathomConfig, FathomForCausalLM)
# The Trainer's label smoothing shifts the labels of the classes that are named here, and takes those of others as they are.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("fathomlm", FathomForCausalLM.__name__)
