"""Loops that a token leaves, whose entries later tokens go on reading (the KV policy "last exited").

A token leaves its loops at the first exit that is confident. Where later tokens go deeper, they attend to the keys and
values that it made in its last loop: each deeper loop runs the same layers, so the entries fit, and nothing more is computed
for them. A model with an injection has no exits of its own; here each of its loops is one. Its coda always runs, over the
state that a token leaves with (Huginn).

Shapes: R sequences, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fathomlm.decode.exit_forward import ExitPolicy, GatheredTokens, PartialForward
from fathomlm.decode.generation import ExitingSequence, TokenExit
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError


def check_loops(plan: DepthPlan, exits: Sequence[int]) -> None:
    """Refuse exits behind which there is no loop that could read the entries of the one before."""
    loops_end = plan.recursion_ends() if plan.loops else ()
    others = sorted(index + 1 for index in set(exits) - set(loops_end))
    if others or plan.exit_layer or plan.kv != "cache" or (plan.ends[1] and not plan.injection):
        at = f"; layer {others[0]} is not one" if others else ""
        raise OptionError(
            "entry-copy decoding requires exits at the ends of loops, without layers of their own, a coda or shared "
            f"keys and values{at}"
        )


@dataclass(frozen=True, slots=True)
class _Passed:
    """What the sequences that stay knew at the exit before."""

    logits_RV: Tensor
    confidences: list[float]

    def rows(self, stay: Sequence[int]) -> _Passed:
        return _Passed(self.logits_RV[stay], [self.confidences[r] for r in stay])


class EntryCopy:
    """See the head of this file."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        plan = policy.plan
        self._forward, self._policy, self._decoder = forward, policy, forward.decoder
        check_loops(plan, policy.exits)
        self._coda = [step for step in plan if step.part == "coda"]
        self.prompt_steps = policy.steps

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence."""
        forward, policy = self._forward, self._policy
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        first = 0
        passed: _Passed | None = None
        for exit in policy.exits:
            gathered = forward.gather([seq.span for seq in sequences])
            before_RM = self._state(x_R1M) if first or not policy.plan.injection else None
            x_R1M = forward.run(x_R1M, policy.steps[first : exit + 1], gathered)
            logits_RV = self._logits(x_R1M, exit, sequences, gathered)
            known = (None, None) if passed is None else (passed.confidences, passed.logits_RV)
            sure = policy.confidences(exit, before_RM, self._state(x_R1M), logits_RV, *known)
            leaves = [policy.is_confident(each, seq, exit) for each, seq in zip(sure, sequences, strict=True)]
            for r in (r for r, leaving in enumerate(leaves) if leaving):
                seq = sequences[r]
                self._copy(seq, exit)
                seq.take(seq.pick(logits_RV[r]), TokenExit(exit + 1, sure[r]))
            stay = [r for r, leaving in enumerate(leaves) if not leaving]
            if not stay:
                return
            sequences, x_R1M = [sequences[r] for r in stay], x_R1M[stay]
            passed, first = _Passed(logits_RV, sure).rows(stay), exit + 1
        assert passed is not None
        gathered = forward.gather([seq.span for seq in sequences])
        self._forget_coda(sequences)
        logits_RV = forward.logits(forward.run(x_R1M, policy.steps[first:], gathered), policy.last)[:, -1]
        for r, (seq, logits_V) in enumerate(zip(sequences, logits_RV, strict=True)):
            agreed = seq.likeliest(passed.logits_RV[r]) == seq.likeliest(logits_V)
            seq.take(seq.pick(logits_V), TokenExit(policy.last + 1, passed.confidences[r], agreed))

    def _state(self, x_R1M: Tensor) -> Tensor:
        return self._decoder.parted(x_R1M)[0][:, -1]

    def _logits(self, x_R1M: Tensor, exit: int, sequences: Sequence[ExitingSequence], gathered: GatheredTokens) -> Tensor:
        """What a token would be chosen from that leaves here. The coda's entries are those of the last state it saw."""
        if not self._coda:
            return self._forward.logits(self._decoder.parted(x_R1M)[0], exit)[:, -1]
        self._forget_coda(sequences)
        return self._forward.logits(self._forward.run(x_R1M, self._coda, gathered), self._policy.last)[:, -1]

    def _forget_coda(self, sequences: Sequence[ExitingSequence]) -> None:
        for seq in sequences:
            self._forward.cache.truncate(seq.position, seq.index, self._coda)

    def _copy(self, seq: ExitingSequence, exit: int) -> None:
        """The last loop's entries of a token, once more for each deeper loop."""
        forward, plan = self._forward, self._policy.plan
        forward.cache.focus(forward.gather([seq.span]).focus)
        for step in plan.recursion_steps(plan.steps[exit].recursion):
            forward.cache.repeat(step, [deeper for deeper in plan.uses(step.layer) if deeper.index > exit])
