"""The model: blocks, the decoder that walks the plan, relaxations, and the thin Hugging Face shells."""

from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomSeq2SeqConfig

__all__ = ["Decoder", "EncoderMemory", "FathomConfig", "FathomForCausalLM", "FathomForSeq2SeqLM", "FathomSeq2SeqConfig"]
