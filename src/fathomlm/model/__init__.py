"""The model: blocks, the decoder that walks the plan, relaxations, and the thin Hugging Face shell."""

from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

__all__ = ["Decoder", "FathomConfig", "FathomForCausalLM"]
