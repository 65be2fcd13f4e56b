"""Parts of a forward pass over some tokens of some sequences, and what happens at an exit: what every mode of early exit is
made of.

    gathered = forward.gather(spans)             which tokens of which sequences, and their attention masks
    x = forward.enter(tokens)                    the stream before the first layer
    x = forward.run(x, steps, gathered)          behind some layers; their keys and values are stored
    forward.copy(x, steps, gathered)             the keys and values that layers make of this stream are stored
    x = forward.exit_state(x, index, gathered)   what the exit after that step reads, by its own layer if it has one
    logits = forward.logits(x, index)            final norm, head, and what the exit adds to it

Shapes: R batch size, N tokens (padded to the longest), M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fathomlm.cache import Focus, SlotCache, Span
from fathomlm.decode.confidence import AtExit, ExitScorer, confidences, find_classifiers, find_gate
from fathomlm.decode.exiting import Exiting, thresholds_of
from fathomlm.decode.generation import ExitingSequence
from fathomlm.depth import Step
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, gathered_masks
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


@dataclass(frozen=True, slots=True)
class GatheredTokens:
    """Where the tokens of a forward pass are, and what they may attend to."""

    focus: Focus
    masks: AttentionMasks

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.focus.spans


class PartialForward:
    """A decoder over one cache, in parts. The only code that calls the decoder while tokens exit early."""

    def __init__(self, decoder: Decoder, cache: SlotCache, batch_size: int, memory: EncoderMemory | None = None) -> None:
        """`memory` is the encoder's output for the whole batch, where there is one."""
        self.decoder = decoder
        self._memory = memory
        self.cache = cache
        self.layers_run = [0] * batch_size
        """For each sequence, layers times tokens so far."""
        self._device = decoder.embed.weight.device

    def gather(self, spans: Sequence[Span]) -> GatheredTokens:
        """Tokens that are given by their sequences and slots. A slot is a true position: no sequence is padded."""
        focus = Focus(spans, self._device)
        R, reach = len(spans), focus.reach
        slots_RS = torch.arange(reach, device=self._device).expand(R, reach)
        memory = None if self._memory is None else self._memory.select([span.row for span in spans])
        rows = self.decoder.equipped(TokenBatch(positions_BT=slots_RS, keep_BS=None, documents_BT=None, past=0), memory)
        dtype = self.decoder.embed.weight.dtype
        masks = gathered_masks(self.decoder.architecture, self.decoder.plan, rows, dtype, focus.slots_RN, keys_BK=slots_RS)
        return GatheredTokens(focus, masks)

    def enter(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The stream before the first layer, (R, N, M)."""
        return self.decoder.enter(self._padded(tokens))

    def _padded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        longest = max(len(row) for row in tokens)
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens], device=self._device)

    def enter_draft(self, tokens: Sequence[Sequence[int]], before_RNM: Tensor) -> Tensor:
        """What a draft layer reads, given the last states of the tokens before."""
        return self.decoder.enter_draft(self._padded(tokens), before_RNM)

    def run(self, x_RNM: Tensor, steps: Sequence[Step], gathered: GatheredTokens) -> Tensor:
        """The stream behind these steps."""
        self.cache.focus(gathered.focus)
        for span in gathered.spans:
            self.layers_run[span.row] += span.count * len(steps)
        return self.decoder.run_steps(x_RNM, steps, gathered.masks, self.cache)

    def prefill(self, x_RNM: Tensor, steps: Sequence[Step], exits: Sequence[int], gathered: GatheredTokens) -> None:
        """A prompt through the first steps of the plan. Nothing is chosen in it, so the exits' own layers only
        store keys and values."""
        first = 0
        for index in exits:
            if own := self.decoder.plan.exit_steps((index,)):
                x_RNM = self.run(x_RNM, steps[first : index + 1], gathered)
                self.copy(x_RNM, own, gathered)
                first = index + 1
        self.run(x_RNM, steps[first:], gathered)

    def exit_state(self, x_RNM: Tensor, index: int, gathered: GatheredTokens) -> Tensor:
        """What the exit after the step with this index reads of the stream there."""
        return self.run(x_RNM, self.decoder.plan.exit_steps((index,)), gathered)

    def copy(self, x_RNM: Tensor, steps: Sequence[Step], gathered: GatheredTokens) -> None:
        """State copying: each of these steps stores the keys and values that it makes of the same stream."""
        self.cache.focus(gathered.focus)
        self.decoder.keep_entries(x_RNM, steps, gathered.masks, self.cache)

    def logits(self, x_RNM: Tensor, index: int) -> Tensor:
        """Scores after the step with this index, (R, N, V), of what `exit_state` gives there."""
        return self.decoder.exit_logits(x_RNM, index, layered=True)


@dataclass(frozen=True, slots=True)
class ExitOutput:
    """What one exit computed, for one token of each sequence and what ran beside it."""

    stream_RNM: Tensor
    """The residual stream after the exit's layer, before the final norm: what goes on from here."""
    state_RM: Tensor
    """That of the token that meets the exit."""
    logits_RV: Tensor
    confidences: list[float] | None
    """None where the mode compares none."""

    def rows(self, some: Sequence[int]) -> ExitOutput:
        assert self.confidences is not None
        sure = [self.confidences[r] for r in some]
        return ExitOutput(self.stream_RNM[some], self.state_RM[some], self.logits_RV[some], sure)


class ExitPolicy:
    """The exits of one model, and when a token exits. The threshold is read once: no sequence depends on another's end."""

    def __init__(self, decoder: Decoder, exiting: Exiting) -> None:
        self.plan = decoder.plan
        self.steps = decoder.plan.steps
        self.exits = exiting.exits(decoder.plan)
        """The indices of the steps that exits follow."""
        self.threshold = exiting.threshold_now()
        self.exiting = exiting
        self.measure = exiting.confidence
        self._classifiers: dict[int, ExitScorer] = {}
        if exiting.confidence == "classifier":
            self._classifiers = find_classifiers(decoder, self.exits)
        elif exiting.confidence == "gate":
            self._classifiers = find_gate(decoder, self.exits)

    @property
    def last(self) -> int:
        """The index of the last step."""
        return self.steps[-1].index

    def run_to_exit(
        self,
        forward: PartialForward,
        x_RNM: Tensor,
        steps: Sequence[Step],
        gathered: GatheredTokens,
        before: Sequence[float] | None = None,
    ) -> ExitOutput:
        """Run the steps up to an exit, or to the end: the last token of each row meets it, the others run beside it.
        `before` are confidences at the exit before."""
        last = (range(len(gathered.spans)), [span.count - 1 for span in gathered.spans])
        before_RNM = forward.run(x_RNM, steps[:-1], gathered)
        after_RNM = forward.run(before_RNM, steps[-1:], gathered)
        index = steps[-1].index
        read_RM = forward.exit_state(after_RNM, index, gathered)[last]
        logits_RV = forward.logits(read_RM[:, None], index)[:, 0]
        at = AtExit(before_RNM[last], after_RNM[last], logits_RV, read_RM=read_RM, before=before)
        return ExitOutput(after_RNM, after_RNM[last], logits_RV, self.judge(index, at))

    def judge(self, index: int, at: AtExit) -> list[float] | None:
        """How sure the exit after the step with this index is; None where nothing is compared there."""
        if self.measure is None or index not in self.exits:
            return None
        return confidences(self.measure, replace(at, classifier=self._classifiers.get(index)))

    def is_confident(self, confidence: float, seq: ExitingSequence, exit: int | None = None) -> bool:
        """Whether the sequence's next token exits after the step with this index, or is drafted behind the last one."""
        assert self.threshold is not None
        threshold = thresholds_of(self.threshold, len(self.exits) or 1)[0 if exit is None else self.exits.index(exit)]
        state = seq.state
        return exceeds(confidence, self.exiting.decayed(threshold, len(state.tokens), state.max_new_tokens))


class ExitMode:
    """One way to exit early."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        self._forward, self._policy = forward, policy
        self.prompt_steps = policy.steps
        """What prompts run."""

    def prefill(self, sequences: Sequence[ExitingSequence], held: int) -> None:
        """Run what the cache does not hold of the prompts, but for their last tokens: the first choice is made there."""
        forward = self._forward
        spans = [Span(seq.index, held, seq.position - held) for seq in sequences if seq.position > held]
        if spans:
            x_RNM = forward.enter([sequences[span.row].token_ids[span.first : span.end] for span in spans])
            forward.prefill(x_RNM, self.prompt_steps, self._policy.exits, forward.gather(spans))

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence, or a draft of one."""
        raise NotImplementedError


def exceeds(confidence: float, threshold: float) -> bool:
    """Whether a token exits: above the threshold, and at threshold 0 always, even where the confidence is 0 too."""
    return threshold == 0 or confidence > threshold
