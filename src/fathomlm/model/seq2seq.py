"""Encoder-decoder models in Hugging Face clothes: transformers' encoder, and a `Decoder` that attends to its output.

The thesis' early exits (chapter 2) are on T5, mT5 and LongT5. Everything that is built on `Decoder` works on theirs:
plans, exits, loops, relaxations, caches. Importing this module registers the `fathomlm-seq2seq` model type.

Shapes: B batch, S tokens of the source, T tokens of the target, M hidden width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import OptionError
from fathomlm.model.config import SMALLEST as SMALLEST_DECODER
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder import build_encoder, encoder_record
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, Shell, check_outputs, wanted_states

IGNORED_LABEL = -100
NO_PLACE = {
    "past_key_values": "the decoder a cache of ours (docs/seq2seq.md)",
    "encoder_outputs": "memory, what encode gave",
    "inputs_embeds": "input_ids",
    "decoder_inputs_embeds": "decoder_input_ids",
}
"""What transformers' T5 takes and this does not, and what to give instead."""
SMALLEST = dataclasses.replace(
    SMALLEST_DECODER, family="t5", rotary_fraction=0.0, positions="relative", cross=True, memory_width=2
)
SMALLEST_ENCODER = {"model_type": "t5", "d_model": 2, "d_kv": 2, "d_ff": 2, "num_layers": 1, "num_heads": 1}


class FathomSeq2SeqConfig(FathomConfig):
    """A decoder's architecture, plan and relaxation, and the numbers of its encoder."""

    model_type = "fathomlm-seq2seq"

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        encoder_config: dict[str, Any] | None = None,
        decoder_start_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        # Plain values, not a configuration class: `build_encoder` knows which kinds there are.
        self.encoder_config = encoder_config or encoder_record(SMALLEST_ENCODER)
        self.decoder_start_token_id = decoder_start_token_id
        kwargs["is_encoder_decoder"] = True
        super().__init__(architecture=architecture or SMALLEST.to_dict(), **kwargs)

    def build_parts(self) -> tuple[Architecture, DepthPlan, Relaxation | None]:
        architecture, plan, relaxation = super().build_parts()
        if not architecture.cross or architecture.memory_width != self.encoder_config.get("d_model"):
            raise OptionError(
                f"the decoder attends to an encoder of width {architecture.memory_width}, but the encoder's d_model is "
                f"{self.encoder_config.get('d_model')}"
            )
        if architecture.hidden != architecture.memory_width:
            raise OptionError("the encoder reads the decoder's embedding, so both must be equally wide")
        return architecture, plan, relaxation


class FathomForSeq2SeqLM(Shell):
    """A transformers encoder and a `Decoder` over its output; one embedding for both."""

    config_class = FathomSeq2SeqConfig
    auto_class = "AutoModelForSeq2SeqLM"
    base_model_prefix = "model"
    _no_split_modules = ("CrossBlock", "T5Block", "MT5Block", "LongT5Block")

    def __init__(self, config: FathomSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = build_encoder(config.encoder_config)
        self.decoder = Decoder(*config.build_parts(), **config.exit_fields)
        self.tokenizer = None
        self.post_init()
        self.fit_weights()

    def encode(self, tokens_BS: Tensor, keep_BS: Tensor | None = None) -> EncoderMemory:
        """The encoder's output, for as many calls of the decoder as are wanted. `keep_BS` is False (or 0) at padding."""
        return self._encode(tokens_BS, keep_BS)[0]

    def _encode(self, tokens_BS: Tensor, keep_BS: Tensor | None, *, hidden: bool = False) -> tuple[EncoderMemory, Any]:
        """The same, and the encoder's hidden states where they are wanted."""
        if keep_BS is None:
            keep_BS = torch.ones_like(tokens_BS)
        elif not bool(keep_BS.bool().any(dim=1).all()):
            raise ValueError("every source requires a token that is not padding")
        embedded_BSM = self.decoder.embed(tokens_BS)
        made = self.encoder(inputs_embeds=embedded_BSM, attention_mask=keep_BS.long(), output_hidden_states=hidden)
        return EncoderMemory(made.last_hidden_state, keep_BS.bool()), made.hidden_states if hidden else None

    @property
    def encodes_padded(self) -> bool:
        """Whether `encode_padded` may be called: LongT5 makes masks of its own from the positions that count."""
        return bool(self.config.encoder_config["model_type"] != "longt5")

    def encode_padded(self, tokens_BS: Tensor, lengths_B: Tensor) -> Tensor:
        """The encoder's output for sources padded on the right, asking the device for nothing, so that it can be captured:
        transformers looks whether a mask of two dimensions hides anything at all, and takes one of four as it is."""
        embedded_BSM = self.decoder.embed(tokens_BS)
        padding_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) >= lengths_B.clamp_min(1)[:, None]
        mask_BS = torch.zeros_like(padding_BS, dtype=embedded_BSM.dtype)
        mask_BS = mask_BS.masked_fill(padding_BS, torch.finfo(mask_BS.dtype).min)
        mask_B1SS = mask_BS[:, None, None].expand(-1, 1, tokens_BS.shape[1], -1)
        found: Tensor = self.encoder(inputs_embeds=embedded_BSM, attention_mask=mask_B1SS).last_hidden_state
        return found

    def shift_right(self, labels_BT: Tensor) -> Tensor:
        """What the decoder reads while it learns to say `labels_BT`: the start token, then all labels but the last."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise ValueError("the configuration names no decoder_start_token_id")
        shifted = labels_BT.roll(1, dims=-1)
        shifted[..., 0] = start
        return shifted.masked_fill(shifted == IGNORED_LABEL, start if pad is None else pad)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        memory: EncoderMemory | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits, and the loss where there are labels. `memory` is what `encode` gave, in place of a source.
        `num_items_in_batch` is how many labels the whole step has, of which this may be a micro-batch: the loss is then the
        sum over the labels here divided by it, which transformers' Trainer expects of every model that takes it."""
        check_outputs(self.config, kwargs)
        for name in (name for name in NO_PLACE if kwargs.get(name) is not None):
            raise ValueError(f"{name} is not supported by FathomLM's encoder-decoder models; give {NO_PLACE[name]}")
        states, encoder_states = wanted_states(self.config, output_hidden_states), None
        if memory is None:
            if input_ids is None:
                raise ValueError("give input_ids, the source, or memory, its encoding")
            memory, encoder_states = self._encode(input_ids, attention_mask, hidden=states is not None)
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids or labels")
            decoder_input_ids = self.shift_right(labels)
        hidden = self.decoder(decoder_input_ids, keep_BS=decoder_attention_mask, memory=memory, states=states)
        logits = self.decoder.logits(hidden)
        loss = None
        if labels is not None:
            targets = labels.flatten().to(logits.device)
            loss = fixed_cross_entropy(logits.flatten(0, 1).float(), targets, num_items_in_batch, IGNORED_LABEL)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            decoder_hidden_states=None if states is None else (*states[:-1], hidden),
            encoder_last_hidden_state=memory.states_BSM,
            encoder_hidden_states=encoder_states,
        )


FathomModel = FathomForCausalLM | FathomForSeq2SeqLM
"""What `fathomlm.load` gives."""


AutoConfig.register(FathomSeq2SeqConfig.model_type, FathomSeq2SeqConfig)
AutoModelForSeq2SeqLM.register(FathomSeq2SeqConfig, FathomForSeq2SeqLM)
