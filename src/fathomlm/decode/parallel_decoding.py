"""Synchronized parallel decoding (FREE, thesis 2.5.2): tokens that exited early wait, and the deeper layers run for all of
them together with the first that does not exit. With several exits they wait at the exit where they left.

So every token gets its exact keys and values at every layer, only later. The tokens themselves are not those of the whole
model: one that exited early was chosen at the exit, and stays. With `verify` what was chosen at the exit is a draft. When
the deeper layers have run it is kept or replaced, and what follows a replaced one is discarded: by how surprised the whole
model is (`refined`), or so that its distribution is kept (`verified`, speculative decoding). Drafts are not streamed and end
no sequence before they are verified.

Shapes: R sequences, N waiting tokens (padded to the most), M hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fathomlm.cache import Span
from fathomlm.decode.exit_forward import ExitMode, ExitOutput, ExitPolicy, PartialForward
from fathomlm.decode.generation import ExitingSequence, TokenExit, WaitingToken

Verify = Callable[[ExitingSequence, WaitingToken, Tensor], int | None]
"""Given the full model's scores at a draft: the token to put in its place, or None to keep it."""


class ParallelDecoding(ExitMode):
    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        super().__init__(forward, policy)
        exiting = policy.exiting
        self._verify = verified if exiting.mode == "speculative" else refined(exiting.refine)
        self._max_stack = exiting.max_stack or 0
        assert self._verify is None or len(policy.exits) <= 1, "drafts come from one exit, or from a draft layer"
        cuts = [0, *(index + 1 for index in policy.exits), len(policy.steps)]
        self._segments = [policy.steps[first:end] for first, end in pairwise(cuts)]

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """The layers up to the first exit for one more token of each sequence, and those behind it where they are due."""
        forward, policy = self._forward, self._policy
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        gathered = forward.gather([seq.span for seq in sequences])
        output = policy.run_to_exit(forward, x_R1M, self._segments[0], gathered)
        for r, seq in enumerate(sequences):
            self._meet(seq, output, r, 0)
        for level in range(1, len(policy.exits)):
            self._go_on(self._due(sequences, level), level)
        if due := self._due(sequences, len(policy.exits)):
            self._catch_up(due)

    def _due(self, sequences: Sequence[ExitingSequence], level: int) -> list[ExitingSequence]:
        """Those that have to run on behind the exits that some of their tokens have met."""
        return [
            seq
            for seq in sequences
            if any(waiting.level == level for waiting in seq.stack)
            and ((seq.stack[-1].chosen is None and seq.stack[-1].level == level) or self._must_catch_up(seq))
        ]

    def _meet(self, seq: ExitingSequence, output: ExitOutput, r: int, number: int) -> None:
        """A sequence's current token has come to an exit, and is chosen there or not."""
        assert output.confidences is not None
        confidence, logits_V, state_M = output.confidences[r], output.logits_RV[r], output.state_RM[r]
        token_exit, likeliest = TokenExit(self._policy.exits[number] + 1, confidence), seq.likeliest(logits_V)
        if number:
            seq.stack.pop()
        waiting = WaitingToken(seq.position, state_M, logits_V, likeliest, token_exit, level=number + 1)
        seq.stack.append(waiting)
        if self._policy.is_confident(confidence, seq, self._policy.exits[number]):
            waiting.chosen = seq.pick(logits_V)
            self._advance(seq, waiting.chosen, token_exit)

    def _go_on(self, sequences: Sequence[ExitingSequence], level: int) -> None:
        """Run what waits at a level up to the next exit; a token that is not chosen yet meets it."""
        if not sequences:
            return
        forward, policy = self._forward, self._policy
        waits = [[waiting for waiting in seq.stack if waiting.level == level] for seq in sequences]
        gathered = forward.gather([Span(s.index, w[0].position, len(w)) for s, w in zip(sequences, waits, strict=True)])
        states = [torch.stack([waiting.state_M for waiting in waiting_here]) for waiting_here in waits]
        before = [waiting_here[-1].token_exit.confidence or 0.0 for waiting_here in waits]
        output = policy.run_to_exit(forward, pad_sequence(states, batch_first=True), self._segments[level], gathered, before)
        for r, (seq, waiting_here) in enumerate(zip(sequences, waits, strict=True)):
            seq.deep_passes += 1
            for waiting, state_M in zip(waiting_here, output.stream_RNM[r], strict=False):
                waiting.state_M, waiting.level = state_M, level + 1
            if waiting_here[-1].chosen is None:
                self._meet(seq, output, r, level)

    def _advance(self, seq: ExitingSequence, token: int, token_exit: TokenExit) -> None:
        if self._verify is None:
            seq.take(token, token_exit)
        else:
            seq.token_ids.append(token)

    def _must_catch_up(self, seq: ExitingSequence) -> bool:
        """Whether the sequence may not go on: too many wait, it is over, or it is if its drafts are kept."""
        state = seq.state
        if state.finish is not None or len(seq.stack) == self._max_stack:
            return True
        return bool(seq.unverified) and (
            seq.token_ids[-1] in state.end_tokens or len(state.tokens) + seq.unverified == state.max_new_tokens
        )

    def _catch_up(self, sequences: Sequence[ExitingSequence]) -> None:
        """Run the deeper layers over all that waits in these sequences."""
        forward = self._forward
        gathered = forward.gather([Span(seq.index, seq.stack[0].position, len(seq.stack)) for seq in sequences])
        states = [torch.stack([waiting.state_M for waiting in seq.stack]) for seq in sequences]
        x_RNM = forward.run(pad_sequence(states, batch_first=True), self._segments[-1], gathered)
        for seq, logits_NV in zip(sequences, forward.logits(x_RNM, self._policy.last), strict=True):
            seq.deep_passes += 1
            if self._verify is None:
                self._complete(seq, logits_NV)
            else:
                self._settle(seq, logits_NV, self._verify)
            self._end(seq)

    def _end(self, seq: ExitingSequence) -> None:
        """Where the sequence is over, forget what ran behind its end."""
        if seq.state.finish is not None:
            self._forward.cache.truncate(len(seq.state.prompt) + len(seq.state.tokens) - 1, seq.index)
            seq.state.note_end()

    def _complete(self, seq: ExitingSequence, logits_NV: Tensor) -> None:
        """What was chosen at the exit stays; the last token is chosen here if it was not there."""
        stack, seq.stack = seq.stack, []
        for waiting, logits_V in zip(stack, logits_NV, strict=False):
            seq.record_agreement(waiting.token_exit, waiting.likeliest == seq.likeliest(logits_V, waiting.position))
            if waiting.chosen is None:
                waiting.token_exit.layer = self._policy.last + 1
                seq.take(seq.pick(logits_V, waiting.position), waiting.token_exit)

    def _settle(self, seq: ExitingSequence, logits_NV: Tensor, verify: Verify) -> None:
        """Keep drafts up to the first that is replaced. The cache lets go of the rest before the state takes any token, so
        that it is right whenever this is interrupted."""
        stack, seq.stack = seq.stack, []
        settled: list[tuple[int, WaitingToken, bool]] = []
        for waiting, logits_V in zip(stack, logits_NV, strict=False):
            agreed = waiting.likeliest == seq.likeliest(logits_V, waiting.position)
            token = self._deep_choice(seq, waiting, logits_V, verify)
            if token is None:
                assert waiting.chosen is not None
                settled.append((waiting.chosen, waiting, agreed))
                continue
            waiting.token_exit.layer = self._policy.last + 1
            settled.append((token, waiting, agreed))
            self._forward.cache.truncate(waiting.position + 1, seq.index)
            seq.token_ids[waiting.position + 1 :] = [token]
            break
        for token, waiting, agreed in settled:
            if waiting.token_exit.confidence is not None:
                seq.record_agreement(waiting.token_exit, agreed)
            if not seq.state.take(token, token_exit=waiting.token_exit):
                break

    def _deep_choice(self, seq: ExitingSequence, waiting: WaitingToken, logits_V: Tensor, verify: Verify) -> int | None:
        """What the full model puts here, or None where a draft is kept."""
        if waiting.chosen is None:
            return seq.pick(logits_V, waiting.position)
        instead = verify(seq, waiting, logits_V)
        seq.drafted += 1
        seq.accepted += instead is None
        return instead


def refined(limit: float | None) -> Verify | None:
    """Replace what surprises the full model by more than `limit` (thesis 2.6.3; BiLD, Kim et al. 2023); None keeps all.

    The surprise at a token that was chosen at the exit is -log p, with p its probability in the full model's distribution:
    the one that a token would be drawn from, or at temperature 0 the model's own (both with the repetition penalty). A token
    that is the full model's most likely is never replaced. At a limit of 0 greedy decoding therefore gives the full model's
    tokens. With sampling this does not give its distribution; speculative decoding does.
    """
    if limit is None:
        return None

    def verify(seq: ExitingSequence, waiting: WaitingToken, logits_V: Tensor) -> int | None:
        chosen, position = waiting.chosen, waiting.position
        assert chosen is not None
        p = float(seq.probabilities(logits_V, position)[chosen])
        surprise = math.inf if p == 0 else -math.log(p)
        if surprise <= limit or chosen == seq.likeliest(logits_V, position):
            return None
        return seq.pick(logits_V, position)

    return verify


def verified(seq: ExitingSequence, waiting: WaitingToken, logits_V: Tensor) -> int | None:
    """Speculative decoding within one model: the layers up to the exit draft, the full model accepts or replaces (thesis
    2.2.2; Leviathan et al. 2023, section 2.3).

    A drafted token x stays with probability min(1, p(x) / q(x)), where q is the distribution it was drawn from and p the
    full model's, both as filtered by the sampling. A replaced one is drawn from what p has more than q. So tokens come out
    distributed as if the full model had drawn each; at temperature 0 they are the same tokens. Whether a token is drafted
    at all depends on the tokens before it, never on the token.
    """
    chosen, position = waiting.chosen, waiting.position
    assert chosen is not None
    if seq.sampling.greedy:
        best = seq.likeliest(logits_V, position)
        return None if best == chosen else best
    p_V, q_V = seq.probabilities(logits_V, position), seq.probabilities(waiting.logits_V, position)
    if seq.uniform() * float(q_V[chosen]) < float(p_V[chosen]):
        return None
    return seq.draw(residual(p_V, q_V))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """What p has more than q; p itself where rounding leaves nothing."""
    more_V = (p_V - q_V).clamp_min(0)
    return more_V if bool(more_V.any()) else p_V
