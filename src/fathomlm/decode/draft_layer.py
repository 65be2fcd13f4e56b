"""Speculative decoding with a draft layer behind the model (EAGLE, Li et al. 2024): it sees the last layer's states of all
tokens that are settled, which every pass that verifies leaves behind.

    draft    the layer runs over what was settled since it last ran, each token with the true state of the one before it, and
             then over its own drafts, each with its own output for the one before it
    verify   all layers run over the last settled token and the drafts behind it, in one pass

A token that waits here waits for all layers. The layer's entries for drafts were made of its own output: they are dropped,
and made anew of the true states once those are known. Tokens are chosen, verified and replaced as in `parallel_decoding`, so
greedy completions are the full model's, and drawn ones distributed as its own.

Shapes: R sequences, N tokens (padded to the most), M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fathomlm.cache import Span
from fathomlm.decode.confidence import AtExit, confidences
from fathomlm.decode.exit_forward import ExitPolicy, PartialForward
from fathomlm.decode.generation import ExitingSequence, TokenExit, WaitingToken
from fathomlm.decode.parallel_decoding import ParallelDecoding

DEPTH = 1
"""What a draft counts as, in layers."""


class DraftLayerDecoding(ParallelDecoding):
    """At most `max_stack` tokens run in a pass that verifies: all but one of them are drafts."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        super().__init__(forward, policy)
        self._own = policy.plan.draft_step
        self._states: dict[int, Tensor] = {}
        """By sequence: the last states of the tokens before those that the draft layer has not run yet."""

    def prefill(self, sequences: Sequence[ExitingSequence], held: int) -> None:
        """All tokens of the prompts but the last through all layers, and what follows from their states through the draft
        layer. Of what a cache holds the last token runs again, for the sake of its state."""
        forward, first = self._forward, max(0, held - 1)
        forward.cache.truncate(first, steps=self.prompt_steps)
        spans = [Span(seq.index, first, seq.position - first) for seq in sequences if seq.position > first]
        width = forward.decoder.architecture.hidden
        for seq in sequences:
            self._states[seq.index] = forward.decoder.embed.weight.new_zeros(0 if held else 1, width)
        if not spans:
            return
        tokens = [sequences[span.row].token_ids[span.first : span.end] for span in spans]
        x_RNM = forward.run(forward.enter(tokens), self.prompt_steps, forward.gather(spans))
        for span, states_NM in zip(spans, x_RNM, strict=True):
            self._states[span.row] = torch.cat((self._states[span.row], states_NM[: span.count]))

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """Drafts behind the last token of each sequence, and their verification."""
        going = list(sequences)
        while going:
            asked = [seq for seq in going if self._asks(seq)]
            for seq in (seq for seq in going if seq not in asked):
                nothing_M = self._states[seq.index][-1]
                waiting = WaitingToken(seq.position, nothing_M, nothing_M, -1, TokenExit(self._policy.last + 1))
                seq.stack.append(waiting)
            going = self._draft(asked) if asked else []
        self._catch_up(sequences)

    def _asks(self, seq: ExitingSequence) -> bool:
        """Whether a draft may follow: not where the pass is full, nor for the last token, which the pass itself gives."""
        left = seq.state.max_new_tokens - len(seq.state.tokens) - seq.unverified
        ended = seq.unverified > 0 and seq.token_ids[-1] in seq.state.end_tokens
        return len(seq.stack) + 1 < self._max_stack and left > 1 and not ended

    def _draft(self, sequences: Sequence[ExitingSequence]) -> list[ExitingSequence]:
        """What the layer says of what follows becomes a draft where it is sure enough; returns those sequences."""
        drafted = []
        for seq, x_M, logits_V, sure in zip(sequences, *self._run_draft(sequences), strict=True):
            waiting = WaitingToken(seq.position, x_M, logits_V, seq.likeliest(logits_V), TokenExit(DEPTH, sure))
            seq.stack.append(waiting)
            if self._policy.is_confident(sure, seq):
                waiting.chosen = seq.pick(logits_V)
                seq.token_ids.append(waiting.chosen)
                self._states[seq.index] = x_M[None]
                drafted.append(seq)
        return drafted

    def _run_draft(self, sequences: Sequence[ExitingSequence]) -> tuple[Tensor, Tensor, list[float]]:
        """The layer over what it has not run yet of each sequence: its output and scores at the last token, and how sure."""
        forward = self._forward
        states = [self._states[seq.index] for seq in sequences]
        spans = [
            Span(seq.index, seq.position + 1 - len(known), len(known)) for seq, known in zip(sequences, states, strict=True)
        ]
        tokens = [seq.token_ids[span.first : span.end] for seq, span in zip(sequences, spans, strict=True)]
        x_RNM = forward.enter_draft(tokens, pad_sequence(states, batch_first=True))
        x_RNM = forward.run(x_RNM, (self._own,), forward.gather(spans))
        x_RM = x_RNM[range(len(spans)), [span.count - 1 for span in spans]]
        logits_RV = forward.logits(x_RM[:, None], self._own.index)[:, 0]
        assert self._policy.measure is not None
        return x_RM, logits_RV, confidences(self._policy.measure, AtExit(x_RM, x_RM, logits_RV))

    def _catch_up(self, sequences: Sequence[ExitingSequence]) -> None:
        """Verify all drafts; what is settled leaves its states to the next."""
        forward = self._forward
        firsts = [seq.stack[0].position for seq in sequences]
        spans = [Span(seq.index, first, len(seq.stack)) for seq, first in zip(sequences, firsts, strict=True)]
        tokens = [seq.token_ids[span.first : span.end] for seq, span in zip(sequences, spans, strict=True)]
        x_RNM = forward.run(forward.enter(tokens), self.prompt_steps, forward.gather(spans))
        for seq, first, states_NM, logits_NV in zip(
            sequences, firsts, x_RNM, forward.logits(x_RNM, self._policy.last), strict=True
        ):
            seq.deep_passes += 1
            behind = self._states[seq.index][: 0 if forward.cache.held(self._own, seq.index) > first else None]
            forward.cache.truncate(first + 1, seq.index, (self._own,))
            assert self._verify is not None
            self._settle(seq, logits_NV, self._verify)
            self._states[seq.index] = torch.cat((behind, states_NM[: seq.position - first]))
            self._end(seq)
