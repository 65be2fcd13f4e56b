"""Training encoder-decoder models (thesis 2): where the encoder comes from, how a fresh model starts, and its pass.

The encoder is transformers' own and learns with the decoder; all losses are on the decoder.

Shapes: B rows, S tokens of the source, M hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fathomlm.checkpoints.assemble import end_ids
from fathomlm.checkpoints.resolve import encoder_of
from fathomlm.depth import Architecture
from fathomlm.errors import DataError, OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder import build_encoder, encoder_beside
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.recipe import EncoderRecipe, ModelRecipe


def read_encoder(model: ModelRecipe, architecture: Architecture) -> dict[str, Any] | None:
    """The record of the encoder that a recipe trains; None for a decoder-only model."""
    if not architecture.cross:
        if model.encoder is not None:
            raise OptionError(f"model.encoder requires a t5, mt5 or longt5 model, got {architecture.family}")
        return None
    recipe_encoder = model.encoder or EncoderRecipe()
    if model.architecture is None:
        if recipe_encoder.layers is not None:
            raise OptionError("model.encoder.layers requires model.architecture; a source or a shape has its own encoder")
        return encoder_of(str(model.source or model.shape))
    layers = architecture.layers if recipe_encoder.layers is None else recipe_encoder.layers
    return encoder_beside(architecture, layers, dropout=recipe_encoder.dropout)


@torch.no_grad()
def start_as_t5(decoder: Decoder, generator: torch.Generator) -> None:
    """T5's own start for a decoder's matrices, which its attention without a scale needs: queries are drawn smaller by
    head_dim ** 0.5, every other matrix by the width that it reads. transformers' T5 differs in one thing, a head of its own,
    whose logits would start far too large. Norms and what steps add are left as they are."""
    a = decoder.architecture
    read = {"o": a.query_width, "down": a.intermediate, "q": a.hidden * a.head_dim}
    for layer in decoder.layers:
        for linear in a.linears():
            weight = layer.get_parameter(f"{linear.path}.weight")
            nn.init.normal_(weight, std=read.get(linear.name.removeprefix("cross_"), a.hidden) ** -0.5, generator=generator)
    unscaled_head = a.tied_embeddings and a.head_scale == 1.0
    nn.init.normal_(decoder.embed.weight, std=a.hidden**-0.5 if unscaled_head else 1.0, generator=generator)
    for module in (decoder.relative, decoder.head):
        if module is not None:
            nn.init.normal_(module.weight, std=a.hidden**-0.5, generator=generator)
    decoder.match_weights()


def ready_to_train(student: FathomForSeq2SeqLM, model: ModelRecipe, corpus: Corpus) -> FathomForSeq2SeqLM:
    """The student with the dropout that the recipe asks for; refused where its end is not the corpus's. What is saved
    keeps the dropout that the model came with."""
    ends, separator = end_ids(student.config.eos_token_id), corpus.manifest.separator
    if ends and separator not in ends:
        raise DataError(
            f"{corpus.path} ends targets with token {separator}, but the model stops at {', '.join(map(str, ends))}; "
            "prepare it again with the model's end token (data prepare --separator)"
        )
    record = student.config.encoder_config
    rate = 0.0 if model.encoder is None else model.encoder.dropout
    if record["dropout_rate"] != rate:
        with torch.device("meta"):
            encoder = build_encoder({**record, "dropout_rate": rate})
        encoder.load_state_dict(student.encoder.state_dict(), assign=True)
        student.encoder = encoder
    return student


def encode(encoder: nn.Module, decoder: Decoder, source_BS: Tensor, keep_BS: Tensor) -> EncoderMemory:
    """The encoder's output, for the decoder to attend to."""
    return EncoderMemory(run_encoder(encoder, decoder.embed(source_BS), keep_BS), keep_BS, look=False)


def run_encoder(encoder: nn.Module, embedded_BSM: Tensor, keep_BS: Tensor) -> Tensor:
    """Made without waiting for a GPU; under autocast in its dtype, once for all steps."""
    kind = embedded_BSM.device.type
    if encoder.config.model_type == "longt5":  # type: ignore[union-attr]
        mask = keep_BS.long()
    else:  # transformers takes a mask of scores as it is, and would look into one of tokens
        hidden = torch.zeros_like(keep_BS, dtype=embedded_BSM.dtype).masked_fill(~keep_BS, torch.finfo(torch.bfloat16).min)
        mask = hidden[:, None, None, :]
    states_BSM: Tensor = encoder(inputs_embeds=embedded_BSM, attention_mask=mask).last_hidden_state
    return states_BSM.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else states_BSM


def equip_encoder(encoder: nn.Module, *, learns: bool, recompute: str, compiled: bool, backend: str = "inductor") -> None:
    """An encoder as a run trains it: frozen unless all weights learn, its layers computed again or compiled as the
    decoder's are."""
    encoder.requires_grad_(learns)
    if recompute == "layer" and learns:
        encoder.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if compiled:
        for block in encoder.block:  # type: ignore[union-attr]
            block.compile(dynamic=False, backend=backend)
