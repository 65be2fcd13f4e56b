"""Generation in which tokens may exit early: one loop for every mode.

    prefill the prompts, all but their last tokens, at full depth (static: up to the exit)
    while some sequence goes on:
        mode.step(sequences that go on)

Slow and plain: the next layers run for the sequences that need them and for no other, gathered. A sequence gives alone what
it gives in a batch. The modes that let tokens wait are in parallel_decoding.py.

Shapes: R sequences, M hidden width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fathomlm.cache import SlotCache
from fathomlm.decode.confidence import AtExit
from fathomlm.decode.draft_layer import DraftLayerDecoding
from fathomlm.decode.draft_tree import DraftBestDecoding, DraftTreeDecoding
from fathomlm.decode.exit_forward import ExitMode, ExitOutput, ExitPolicy, PartialForward
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import ExitingSequence, ExitStatistics, Generation, SequenceState, TokenExit
from fathomlm.decode.logits import row_generators
from fathomlm.decode.parallel_decoding import ParallelDecoding
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan, Step
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


class StaticExit(ExitMode):
    """Every token exits at the same layer: a shallow model, deeper layers never run. Without an exit, the full model."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        super().__init__(forward, policy)
        (exit,) = policy.exits or (policy.last,)
        self.prompt_steps = policy.steps[: exit + 1]

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        forward = self._forward
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        output = self._policy.run_to_exit(forward, x_R1M, self.prompt_steps, forward.gather([seq.span for seq in sequences]))
        for seq, logits_V in zip(sequences, output.logits_RV, strict=True):
            seq.take(seq.pick(logits_V), TokenExit(len(self.prompt_steps)))


class StateCopy(ExitMode):
    """A token exits at the first exit that is confident (CALM, Schuster et al. 2022; thesis 2.3).

    Tokens to come attend to its keys and values in the deeper layers too. They are made of the state that exited, by each
    deeper layer's own norm and projections, as if no layer in between had changed it. That is an approximation, and it adds
    up over a sequence (thesis 2.4.1).
    """

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        forward, policy = self._forward, self._policy
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        first, before = 0, None
        for exit in policy.exits:
            output = self._meet(x_R1M, policy.steps[first : exit + 1], sequences, before)
            assert output.confidences is not None
            sure = zip(output.confidences, sequences, strict=True)
            confident = [policy.is_confident(each, seq, exit) for each, seq in sure]
            leave, stay = ([r for r, leaves in enumerate(confident) if leaves is which] for which in (True, False))
            if leave:
                self._copy(output.rows(leave), [sequences[r] for r in leave], exit)
            for r in leave:
                seq = sequences[r]
                seq.take(seq.pick(output.logits_RV[r]), TokenExit(exit + 1, output.confidences[r]))
            if not stay:
                return
            sequences, before = [sequences[r] for r in stay], output.rows(stay)
            x_R1M, first = before.stream_RNM, exit + 1
        assert before is not None
        assert before.confidences is not None
        logits_RV = self._finish(x_R1M, policy.steps[first:], sequences)
        for r, (seq, logits_V) in enumerate(zip(sequences, logits_RV, strict=True)):
            # What the last exit would have chosen is known, so agreement is too.
            agreed = seq.likeliest(before.logits_RV[r]) == seq.likeliest(logits_V)
            seq.take(seq.pick(logits_V), TokenExit(policy.last + 1, before.confidences[r], agreed))

    def _meet(
        self, x_R1M: Tensor, steps: Sequence[Step], sequences: Sequence[ExitingSequence], before: ExitOutput | None
    ) -> ExitOutput:
        """Run up to an exit; `before` is what these sequences had at the exit before."""
        gathered = self._forward.gather([seq.span for seq in sequences])
        sure = None if before is None else before.confidences
        return self._policy.run_to_exit(self._forward, x_R1M, steps, gathered, sure)

    def _copy(self, output: ExitOutput, sequences: Sequence[ExitingSequence], exit: int) -> None:
        """What stands in for what deeper layers would have stored of tokens that exit here."""
        copy_state(self._forward, self._policy, output.state_RM, sequences, exit)

    def _finish(self, x_R1M: Tensor, steps: Sequence[Step], sequences: Sequence[ExitingSequence]) -> Tensor:
        forward = self._forward
        x_R1M = forward.run(x_R1M, steps, forward.gather([seq.span for seq in sequences]))
        return forward.logits(x_R1M, self._policy.last)[:, -1]


def copy_state(
    forward: PartialForward, policy: ExitPolicy, state_RM: Tensor, sequences: Sequence[ExitingSequence], exit: int
) -> None:
    """Deeper layers, and deeper exits' own, make the last tokens' entries of the states that they exited with, in place of
    those that they have made."""
    own = policy.plan.exit_steps(index for index in policy.exits if index > exit)
    deeper = (*policy.steps[exit + 1 :], *own)
    for seq in sequences:
        forward.cache.truncate(seq.position, seq.index, deeper)
    forward.copy(state_RM[:, None], deeper, forward.gather([seq.span for seq in sequences]))


class EntryCopy(StateCopy):
    """Loops that a token leaves, whose entries later tokens go on reading (the KV policy "last exited").

    A token leaves its loops at the first exit that is confident. Where later tokens go deeper, they attend to the keys and
    values that it made in its last loop: each deeper loop runs the same layers, so the entries fit, and nothing more is
    computed for them. A model with an injection has no exits of its own; here each of its loops is one. Its coda always
    runs, over the state that a token leaves with (Huginn), and its entries are those of the last state it saw.
    """

    def _meet(
        self, x_R1M: Tensor, steps: Sequence[Step], sequences: Sequence[ExitingSequence], before: ExitOutput | None
    ) -> ExitOutput:
        forward, policy, exit = self._forward, self._policy, steps[-1].index
        gathered = forward.gather([seq.span for seq in sequences])
        start_RM = self._state(x_R1M)
        if before is None and policy.plan.injection:  # its first loop begins from zeros
            start_RM = torch.zeros_like(start_RM)
        x_R1M = forward.run(x_R1M, steps, gathered)
        if self._coda:
            self._forget_coda(sequences)
            logits_RV = forward.logits(forward.run(x_R1M, self._coda, gathered), policy.last)[:, -1]
        else:
            logits_RV = forward.logits(self._state(x_R1M)[:, None], exit)[:, -1]
        at = AtExit(start_RM, self._state(x_R1M), logits_RV)
        if before is not None:
            at = replace(at, before=before.confidences, logits_before_RV=before.logits_RV)
        return ExitOutput(x_R1M, self._state(x_R1M), logits_RV, policy.judge(exit, at))

    def _copy(self, output: ExitOutput, sequences: Sequence[ExitingSequence], exit: int) -> None:
        """The last loop's entries of a token, once more for each deeper loop."""
        forward, plan = self._forward, self._policy.plan
        forward.cache.focus(forward.gather([seq.span for seq in sequences]).focus)
        for step in plan.recursion_steps(plan.steps[exit].recursion):
            forward.cache.repeat(step, [deeper for deeper in plan.uses(step.layer) if deeper.index > exit])

    def _finish(self, x_R1M: Tensor, steps: Sequence[Step], sequences: Sequence[ExitingSequence]) -> Tensor:
        self._forget_coda(sequences)
        return super()._finish(x_R1M, steps, sequences)

    def _state(self, x_R1M: Tensor) -> Tensor:
        return self._forward.decoder.parted(x_R1M)[0][:, -1]

    @property
    def _coda(self) -> list[Step]:
        return [step for step in self._policy.plan if step.part == "coda"]

    def _forget_coda(self, sequences: Sequence[ExitingSequence]) -> None:
        for seq in sequences:
            self._forward.cache.truncate(seq.position, seq.index, self._coda)


class SelectExit(ExitMode):
    """Every layer runs, and a token is chosen at the first exit that is confident: keys and values are the full model's, and
    nothing is saved. The meaning of exits with exact fill, and what the released code of looped models with a gate does."""

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        forward, policy = self._forward, self._policy
        gathered = forward.gather([seq.span for seq in sequences])
        x_RNM = forward.enter([seq.token_ids[-1:] for seq in sequences])
        outputs: list[ExitOutput] = []
        first = 0
        for end in (*policy.exits, policy.last):
            before = outputs[-1].confidences if outputs else None
            outputs.append(policy.run_to_exit(forward, x_RNM, policy.steps[first : end + 1], gathered, before))
            x_RNM, first = outputs[-1].stream_RNM, end + 1
        for r, seq in enumerate(sequences):
            best = seq.likeliest(outputs[-1].logits_RV[r])
            agreed = [seq.likeliest(output.logits_RV[r]) == best for output in outputs[:-1]]
            sure = [output.confidences[r] for output in outputs[:-1] if output.confidences is not None]
            at = self._exit_of(seq, sure, agreed)
            known = -1 if at is None else at
            layer = (policy.last if at is None else policy.exits[at]) + 1
            self._take(seq, outputs, r, at, TokenExit(layer, sure[known], agreed[known]))

    def _exit_of(self, seq: ExitingSequence, sure: Sequence[float], agreed: Sequence[bool]) -> int | None:
        """Which exit the sequence's token leaves by, given how sure each is and whether it agrees with the last layer."""
        exits = enumerate(zip(sure, self._policy.exits, strict=True))
        return next((at for at, (each, exit) in exits if self._policy.is_confident(each, seq, exit)), None)

    def _take(
        self, seq: ExitingSequence, outputs: Sequence[ExitOutput], r: int, at: int | None, token_exit: TokenExit
    ) -> None:
        seq.take(seq.pick(outputs[-1 if at is None else at].logits_RV[r]), token_exit)


class OracleExit(SelectExit):
    """A token exits at the earliest exit whose most likely token is the last layer's too (thesis 2.4.1).

    No real decoding knows the last layer's choice before it has run, and here it does run, for every token. So the tokens
    are those of the full model, and the exits show how early tokens could have exited at best. In the mode oracle-copy its
    state there stands in for what deeper layers saw of it, as in `StateCopy`: what is lost then is what copying alone costs.
    """

    def _exit_of(self, seq: ExitingSequence, sure: Sequence[float], agreed: Sequence[bool]) -> int | None:
        seq.samples += zip(sure, agreed, strict=True)
        return agreed.index(True) if any(agreed) else None

    def _take(
        self, seq: ExitingSequence, outputs: Sequence[ExitOutput], r: int, at: int | None, token_exit: TokenExit
    ) -> None:
        if self._policy.exiting.mode == "oracle-copy" and at is not None:
            copy_state(self._forward, self._policy, outputs[at].state_RM[[r]], [seq], self._policy.exits[at])
        seq.take(seq.pick(outputs[-1].logits_RV[r]), token_exit)


def _speculative(forward: PartialForward, policy: ExitPolicy) -> ExitMode:
    """Drafts of an exit, or of a draft layer behind the model, one after the other or as a tree."""
    if policy.exits:
        return ParallelDecoding(forward, policy)
    if policy.exiting.draft_best is not None:
        return DraftBestDecoding(forward, policy)
    return (DraftLayerDecoding if policy.exiting.draft_tree is None else DraftTreeDecoding)(forward, policy)


EXIT_MODES: dict[str, Callable[[PartialForward, ExitPolicy], ExitMode]] = {
    "full": StaticExit,
    "static": StaticExit,
    "state-copy": StateCopy,
    "entry-copy": EntryCopy,
    "parallel": ParallelDecoding,
    "speculative": _speculative,
    "select": SelectExit,
    "oracle": OracleExit,
    "oracle-copy": OracleExit,
}


def exit_cache(plan: DepthPlan, exiting: Exiting, batch_size: int, reserve: int) -> SlotCache:
    """A cache for the steps that will run."""
    exits = exiting.exits(plan)
    steps = plan.steps[: exits[0] + 1] if exiting.mode == "static" else plan.steps
    return SlotCache(plan, batch_size, steps=(*steps, *exiting.own_steps(plan)), reserve=reserve)


@torch.inference_mode()
def run(
    decoder: Decoder,
    states: Sequence[SequenceState],
    sampling: Sampling,
    cache: SlotCache,
    exiting: Exiting,
    on_step: Callable[[int], None] | None = None,
    memory: EncoderMemory | None = None,
) -> list[Generation]:
    """Continue each sequence behind what the cache holds of all of them."""
    begun = time.perf_counter()
    exiting = exiting.for_plan(decoder.plan, decoder.embed.weight.device.type)
    policy = ExitPolicy(decoder, exiting)
    forward = PartialForward(decoder, cache, len(states), memory)
    mode = EXIT_MODES[exiting.mode](forward, policy)
    generators = row_generators(sampling, len(states), decoder.embed.weight.device)
    sequences = [ExitingSequence(i, state, sampling, generators[i : i + 1]) for i, state in enumerate(states)]
    mode.prefill(sequences, cache.length)
    forward.layers_run = [0] * len(states)
    mode.step(sequences)
    prefilled = time.perf_counter()
    while going := [seq for seq in sequences if seq.state.finish is None]:
        if on_step is not None:
            on_step(max(len(state.tokens) for state in states))
        mode.step(going)
    for state in states:
        state.note_times(begun, prefilled)
    _observe(exiting, sequences)
    return [seq.state.exited_result(_statistics(seq, policy, forward)) for seq in sequences]


def _observe(exiting: Exiting, sequences: Sequence[ExitingSequence]) -> None:
    """Let an estimator observe the sequences one by one: only now, so that no threshold depends on a neighbour."""
    if exiting.estimator is None:
        return
    for seq in sequences:
        if seq.samples:
            exiting.estimator.observe(*map(list, zip(*seq.samples, strict=True)))
        exiting.estimator.end_sequence()


def _statistics(seq: ExitingSequence, policy: ExitPolicy, forward: PartialForward) -> ExitStatistics:
    return ExitStatistics(
        mode=policy.exiting.mode,
        layers=policy.last + 1,
        threshold=policy.threshold,
        layers_run=forward.layers_run[seq.index],
        deep_passes=seq.deep_passes,
        drafted=seq.drafted,
        accepted=seq.accepted,
    )
