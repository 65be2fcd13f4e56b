"""Decoding, slow and obviously right: what every faster way must agree with, token for token."""

from __future__ import annotations

from fathomlm.decode.full import Generation, Session, decode_step, generate, prefill
from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.text import TextStream

__all__ = ["Generation", "Sampling", "Session", "TextStream", "chat_prompt", "decode_step", "generate", "prefill"]
