"""What a recipe says of the encoder of an encoder-decoder model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EncoderRecipe:
    layers: int | None = None
    """Layers of a fresh model's encoder (as many as the decoder has); its other sizes are the decoder's."""
    dropout: float = 0.0
    """The encoder's dropout while it trains, whatever its checkpoint says; the decoder has none. Above 0 a run depends on
    how its batches are split."""
