"""The configuration of a model, as transformers writes and reads it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fathomlm.depth import Architecture, DepthPlan, ExitParts, Relaxation
from fathomlm.errors import OptionError, is_int
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
        exit_vocab: list[int] | None = None,
        weight_format: str | None = None,
        kept_layers: list[int] | None = None,
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
        self.exit_vocab = exit_vocab
        """The tokens that exits choose among, rising; None is every token. `limit_exits` keeps the decoder in step."""
        self.weight_format = weight_format
        """How the files hold the weights, where that is not as numbers of `dtype`: int8."""
        self.kept_layers = kept_layers
        """Which layers of a larger model this one's are, where it was made by dropping some."""
        derived = {
            "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
            "num_hidden_layers": DepthPlan.from_dict(self.plan).unrolled_layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "max_position_embeddings": shape.context,
        }  # fmt: skip
        for name, value in derived.items():  # they follow from the architecture and the plan; what a file says is not read
            kwargs.pop(name, None)
            setattr(self, name, value)
        self.initializer_range = kwargs.pop("initializer_range", 0.02)
        self.use_cache = kwargs.pop("use_cache", True)
        self.bos_token_id = kwargs.pop("bos_token_id", None)
        self.eos_token_id = kwargs.pop("eos_token_id", None)
        self.pad_token_id = kwargs.pop("pad_token_id", None)
        kwargs.pop("tie_word_embeddings", None)
        # A tied head is no second tensor here (`Decoder.logits`), so transformers has nothing to tie.
        super().__init__(tie_word_embeddings=False, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing, as for the models (`hub.Shell`): transformers would copy this file beside what is saved."""

    @classmethod
    def of(cls, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None = None, **kwargs: Any) -> Self:
        relaxed = None if relaxation is None else relaxation.to_dict()
        return cls(architecture=architecture.to_dict(), plan=plan.to_dict(), relaxation=relaxed, **kwargs)

    @property
    def logit_scale(self) -> float:
        """For trainers that multiply hidden states with the head themselves (TRL)."""
        return float(self.architecture.get("head_scale", 1.0))

    @property
    def exit_parts(self) -> ExitParts:
        """What each exit has of its own."""
        return ExitParts(
            head_rank=self.exit_rank,
            adapter_rank=self.exit_adapter,
            layer=self.plan.get("exit_layer", False),
            classifier=self.exit_classifier,
            draft=self.plan.get("draft", False),
        )

    @property
    def exit_fields(self) -> dict[str, Any]:
        """The same by the names that `Decoder` and `replan` take; the plan says whether there are layers."""
        names = ("exit_rank", "exit_adapter", "exit_classifier")
        return {name: getattr(self, name) for name in names}

    def build_exit_vocab(self) -> Tensor | None:
        """`exit_vocab` as a tensor, checked."""
        if self.exit_vocab is None:
            return None
        if not self.plan.get("exits") and not self.plan.get("draft"):
            raise OptionError("exit_vocab requires a plan with exits or a draft layer")
        if not isinstance(self.exit_vocab, list) or not all(is_int(token) for token in self.exit_vocab):
            raise OptionError(f"exit_vocab must be a list of tokens, or null, got {self.exit_vocab!r:.60}")
        check_rising(self.exit_vocab, self.vocab_size, "exit_vocab")
        return torch.tensor(self.exit_vocab, device="cpu")

    def check_kept_layers(self) -> None:
        """Refuse what cannot be the numbers of this model's layers in a larger one."""
        kept = self.kept_layers
        if kept is None:
            return
        rising = isinstance(kept, list) and all(is_int(layer) for layer in kept) and kept == sorted(kept)
        once = isinstance(kept, list) and (self.plan["recursions"] > 1 or len(set(kept)) == len(kept))
        if not rising or not once or len(kept) != self.architecture["layers"] or kept[0] < 0:
            raise OptionError(f"kept_layers must be one rising number for each layer, or null, got {kept!r:.60}")

    def build_parts(self) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        """The typed objects behind the JSON."""
        relaxation = None if self.relaxation is None else Relaxation.from_dict(self.relaxation)
        return Architecture.from_dict(self.architecture), DepthPlan.from_dict(self.plan), relaxation
