"""Parts of a forward pass over some tokens of some rows: what every way of leaving early is made of.

    x = passes.enter(tokens, place)          the stream in front of the first layer
    x = passes.run(x, steps, place)          behind some layers; their keys and values are stored
    passes.copy(x, steps, place)             the keys and values that layers make of this stream, and nothing else of them
    x = passes.leave(x, index, place)        what the exit after that step reads, by its own layer if it has one
    logits = passes.logits(x, index)         final norm, head, and what the exit adds to it

Shapes: R rows of a pass, N tokens (padded to the longest row), M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathomlm.cache import Focus, SlotCache, Span
from fathomlm.depth import Step
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tokens of a pass are, and what they may look at."""

    focus: Focus
    masks: AttentionMasks

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.focus.spans


class Passes:
    """A decoder over one cache, in parts. The only place that calls the decoder while tokens leave early."""

    def __init__(self, decoder: Decoder, cache: SlotCache, rows: int, memory: EncoderMemory | None = None) -> None:
        """`memory` is the encoder's output for all rows, where there is one."""
        self.decoder = decoder
        self._memory = memory
        self.cache = cache
        self.layers_run = [0] * rows
        """For each row, layers times tokens so far."""
        self._device = decoder.embed.weight.device

    def at(self, spans: Sequence[Span]) -> Place:
        """The place of tokens that are given by their rows and slots. A slot is a true position: no row is padded."""
        focus = Focus(spans, self._device)
        R, reach = len(spans), focus.reach
        slots_RS = torch.arange(reach, device=self._device).expand(R, reach)
        memory = None if self._memory is None else self._memory.select([span.row for span in spans])
        rows = self.decoder.equipped(TokenBatch(positions_BT=slots_RS, keep_BS=None, documents_BT=None, past=0), memory)
        dtype = self.decoder.embed.weight.dtype
        masks = gathered_masks(self.decoder.architecture, self.decoder.plan, rows, dtype, focus.slots_RN, keys_BK=slots_RS)
        return Place(focus, masks)

    def enter(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The stream in front of the first layer, (R, N, M)."""
        longest = max(len(row) for row in tokens)
        padded = [[*row, *[0] * (longest - len(row))] for row in tokens]
        return self.decoder.enter(torch.tensor(padded, device=self._device))

    def run(self, x_RNM: Tensor, steps: Sequence[Step], place: Place) -> Tensor:
        """The stream behind these steps."""
        self.cache.focus(place.focus)
        for span in place.spans:
            self.layers_run[span.row] += span.count * len(steps)
        return self.decoder.run_steps(x_RNM, steps, place.masks, self.cache)

    def read(self, x_RNM: Tensor, steps: Sequence[Step], exits: Sequence[int], place: Place) -> None:
        """A prompt through the first steps of the plan. Nothing is chosen in it, so of the exits' own layers only keys and
        values are made."""
        first = 0
        for index in exits:
            if own := self.decoder.plan.exit_steps((index,)):
                x_RNM = self.run(x_RNM, steps[first : index + 1], place)
                self.copy(x_RNM, own, place)
                first = index + 1
        self.run(x_RNM, steps[first:], place)

    def leave(self, x_RNM: Tensor, index: int, place: Place) -> Tensor:
        """What the exit after the step with this index reads of the stream there."""
        return self.run(x_RNM, self.decoder.plan.exit_steps((index,)), place)

    def copy(self, x_RNM: Tensor, steps: Sequence[Step], place: Place) -> None:
        """State copying: each of these steps stores the keys and values that it makes of the same stream."""
        self.cache.focus(place.focus)
        self.decoder.keep_entries(x_RNM, steps, place.masks, self.cache)

    def logits(self, x_RNM: Tensor, index: int) -> Tensor:
        """Scores after the step with this index, (R, N, V), of what `leave` gives there."""
        return self.decoder.exit_logits(x_RNM, index, layered=True)
