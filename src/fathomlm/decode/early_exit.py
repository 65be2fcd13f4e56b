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
from typing import Protocol

import torch
from torch import Tensor

from fathomlm.cache import SlotCache, Span
from fathomlm.decode.draft_layer import DraftLayerDecoding
from fathomlm.decode.draft_tree import DraftTreeDecoding
from fathomlm.decode.entry_copy import EntryCopy
from fathomlm.decode.exit_forward import ExitOutput, ExitPolicy, PartialForward
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import ExitingSequence, ExitStatistics, Generation, SequenceState, TokenExit
from fathomlm.decode.logits import row_generators
from fathomlm.decode.parallel_decoding import ParallelDecoding, refined, verified
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan, Step
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory


class ExitMode(Protocol):
    """One way to exit early."""

    @property
    def prompt_steps(self) -> Sequence[Step]:
        """What prompts run."""
        ...

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence, or a draft of one."""
        ...


class StaticExit:
    """Every token exits at the same layer: a shallow model, deeper layers never run. Without an exit, the full model."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        self._forward, self._policy = forward, policy
        (exit,) = policy.exits or (policy.last,)
        self.prompt_steps = policy.steps[: exit + 1]

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence."""
        forward = self._forward
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        output = self._policy.run_to_exit(forward, x_R1M, self.prompt_steps, forward.gather([seq.span for seq in sequences]))
        for seq, logits_V in zip(sequences, output.logits_RV, strict=True):
            seq.take(seq.pick(logits_V), TokenExit(len(self.prompt_steps)))


class StateCopy:
    """A token exits at the first exit that is confident (CALM, Schuster et al. 2022; thesis 2.3).

    Tokens to come attend to its keys and values in the deeper layers too. They are made of the state that exited, by each
    deeper layer's own norm and projections, as if no layer in between had changed it. That is an approximation, and it adds
    up over a sequence (thesis 2.4.1).
    """

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        self._forward, self._policy = forward, policy
        self.prompt_steps = policy.steps

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence."""
        forward, policy = self._forward, self._policy
        x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
        first = 0
        passed: list[tuple[int, float]] = []
        before: list[float] | None = None
        for exit in policy.exits:
            gathered = forward.gather([seq.span for seq in sequences])
            output = policy.run_to_exit(forward, x_R1M, policy.steps[first : exit + 1], gathered, before)
            assert output.confidences is not None
            sure = zip(output.confidences, sequences, strict=True)
            confident = [policy.is_confident(each, seq, exit) for each, seq in sure]
            stay = [r for r, exits in enumerate(confident) if not exits]
            self._exit(sequences, output, [r for r, exits in enumerate(confident) if exits], exit)
            if not stay:
                return
            passed = [(sequences[r].likeliest(output.logits_RV[r]), output.confidences[r]) for r in stay]
            sequences = [sequences[r] for r in stay]
            before = [output.confidences[r] for r in stay]
            x_R1M = output.state_RM[stay][:, None]
            first = exit + 1
        gathered = forward.gather([seq.span for seq in sequences])
        x_R1M = forward.run(x_R1M, policy.steps[first:], gathered)
        self._finish(sequences, forward.logits(x_R1M, policy.last)[:, -1], passed)

    def _exit(self, sequences: Sequence[ExitingSequence], output: ExitOutput, exiting: list[int], exit: int) -> None:
        """These sequences' tokens are chosen here, and their state stands in for what deeper layers would have seen."""
        if not exiting:
            return
        assert output.confidences is not None
        copy_state(self._forward, self._policy, output.state_RM[exiting], [sequences[r] for r in exiting], exit)
        for r in exiting:
            seq, token_exit = sequences[r], TokenExit(exit + 1, output.confidences[r])
            seq.take(seq.pick(output.logits_RV[r]), token_exit)

    def _finish(self, sequences: Sequence[ExitingSequence], logits_RV: Tensor, passed: Sequence[tuple[int, float]]) -> None:
        """The others are chosen at the end. What the last exit would have chosen is known, so agreement is too."""
        for seq, logits_V, (likeliest, confidence) in zip(sequences, logits_RV, passed, strict=True):
            agreed = likeliest == seq.likeliest(logits_V)
            seq.take(seq.pick(logits_V), TokenExit(self._policy.last + 1, confidence, agreed))


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


class SelectExit:
    """Every layer runs, and a token is chosen at the first exit that is confident: keys and values are the full model's, and
    nothing is saved. The meaning of exits with exact fill, and what the released code of looped models with a gate does."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        self._forward, self._policy = forward, policy
        self.prompt_steps = policy.steps

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence."""
        seen, last = run_all(self._forward, self._policy, sequences)
        for r, (seq, logits_V) in enumerate(zip(sequences, last.logits_RV, strict=True)):
            sure = [output.confidences[r] for output in seen if output.confidences is not None]
            exits = enumerate(zip(sure, self._policy.exits, strict=True))
            at = next((i for i, (each, exit) in exits if self._policy.is_confident(each, seq, exit)), None)
            output = seen[-1 if at is None else at]
            agreed = seq.likeliest(output.logits_RV[r]) == seq.likeliest(logits_V)
            if at is None:
                seq.take(seq.pick(logits_V), TokenExit(self._policy.last + 1, sure[-1], agreed))
            else:
                seq.take(seq.pick(output.logits_RV[r]), TokenExit(self._policy.exits[at] + 1, sure[at], agreed))


def run_all(
    forward: PartialForward, policy: ExitPolicy, sequences: Sequence[ExitingSequence]
) -> tuple[list[ExitOutput], ExitOutput]:
    """What every exit computes for the last token of each sequence, and what the last layer does."""
    gathered = forward.gather([seq.span for seq in sequences])
    x_R1M = forward.enter([seq.token_ids[-1:] for seq in sequences])
    seen: list[ExitOutput] = []
    first = 0
    for exit in policy.exits:
        before = seen[-1].confidences if seen else None
        seen.append(policy.run_to_exit(forward, x_R1M, policy.steps[first : exit + 1], gathered, before))
        x_R1M = seen[-1].state_RM[:, None]
        first = exit + 1
    return seen, policy.run_to_exit(forward, x_R1M, policy.steps[first:], gathered)


class OracleExit:
    """A token exits at the earliest exit whose most likely token is the last layer's too (thesis 2.4.1).

    No real decoding knows the last layer's choice before it has run, and here it does run, for every token. So the tokens
    are those of the full model, and the exits show how early tokens could have exited at best. With `copies` its state there
    stands in for what deeper layers saw of it, as in `StateCopy`: what is lost then is what copying alone costs.
    """

    def __init__(self, forward: PartialForward, policy: ExitPolicy, copies: bool = False) -> None:
        self._forward, self._policy, self._copies = forward, policy, copies
        self.prompt_steps = policy.steps

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        """One more token in each sequence."""
        policy = self._policy
        seen, last = run_all(self._forward, policy, sequences)
        for r, (seq, logits_V) in enumerate(zip(sequences, last.logits_RV, strict=True)):
            best = seq.likeliest(logits_V)
            agreed = [seq.likeliest(output.logits_RV[r]) == best for output in seen]
            sure = [output.confidences[r] for output in seen if output.confidences is not None]
            seq.samples += zip(sure, agreed, strict=True)
            if any(agreed):
                at = agreed.index(True)
                token_exit = TokenExit(policy.exits[at] + 1, sure[at], True)
                if self._copies:
                    copy_state(self._forward, policy, seen[at].state_RM[[r]], [seq], policy.exits[at])
            else:
                token_exit = TokenExit(policy.last + 1, sure[-1], False)
            seq.take(seq.pick(logits_V), token_exit)


EXIT_MODES: dict[str, Callable[[PartialForward, ExitPolicy, Exiting], ExitMode]] = {
    "full": lambda forward, policy, exiting: StaticExit(forward, policy),
    "static": lambda forward, policy, exiting: StaticExit(forward, policy),
    "state-copy": lambda forward, policy, exiting: StateCopy(forward, policy),
    "entry-copy": lambda forward, policy, exiting: EntryCopy(forward, policy),
    "parallel": lambda forward, policy, exiting: ParallelDecoding(
        forward, policy, exiting.max_stack, refined(exiting.refine)
    ),
    "speculative": lambda forward, policy, exiting: (
        ParallelDecoding(forward, policy, exiting.max_stack, verified)
        if policy.exits
        else DraftTreeDecoding(forward, policy, exiting.draft_tree)
        if exiting.draft_tree is not None
        else DraftLayerDecoding(forward, policy, exiting.max_stack)
    ),
    "select": lambda forward, policy, exiting: SelectExit(forward, policy),
    "oracle": lambda forward, policy, exiting: OracleExit(forward, policy),
    "oracle-copy": lambda forward, policy, exiting: OracleExit(forward, policy, copies=True),
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
    mode = EXIT_MODES[exiting.mode](forward, policy, exiting)
    generators = row_generators(sampling, len(states), decoder.embed.weight.device)
    sequences = [ExitingSequence(i, state, sampling, generators[i : i + 1]) for i, state in enumerate(states)]
    if isinstance(mode, DraftLayerDecoding):
        mode.prefill(sequences, cache.length)
    else:
        _prefill(forward, sequences, cache.length, mode.prompt_steps, policy.exits)
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
    return [seq.state.exited_result(_statistics(seq, policy, forward, exiting)) for seq in sequences]


def _prefill(
    forward: PartialForward, sequences: Sequence[ExitingSequence], held: int, steps: Sequence[Step], exits: Sequence[int]
) -> None:
    """Run what the cache does not hold of the prompts, but for the last token of each: the first choice is made there."""
    spans = [Span(seq.index, held, seq.position - held) for seq in sequences if seq.position > held]
    if spans:
        x_RNM = forward.enter([sequences[span.row].token_ids[span.first : span.end] for span in spans])
        forward.prefill(x_RNM, steps, exits, forward.gather(spans))


def _observe(exiting: Exiting, sequences: Sequence[ExitingSequence]) -> None:
    """Let an estimator observe the sequences one by one: only now, so that no threshold depends on a neighbour."""
    if exiting.estimator is None:
        return
    for seq in sequences:
        if seq.samples:
            exiting.estimator.observe(*map(list, zip(*seq.samples, strict=True)))
        exiting.estimator.end_sequence()


def _statistics(seq: ExitingSequence, policy: ExitPolicy, forward: PartialForward, exiting: Exiting) -> ExitStatistics:
    return ExitStatistics(
        mode=exiting.mode,
        layers=policy.last + 1,
        threshold=policy.threshold,
        layers_run=forward.layers_run[seq.index],
        deep_passes=seq.deep_passes,
        drafted=seq.drafted,
        accepted=seq.accepted,
    )
