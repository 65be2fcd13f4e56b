"""What all programs share: the parts they work with, how a token is taken, and what the host is told.

Shapes: N rows, S slots, E end tokens, C columns of the output, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fathomlm.decode.exiting import Threshold, thresholds_of
from fathomlm.depth import DepthPlan
from fathomlm.engine.device_state import IDLE, EngineState, PrefillBatch
from fathomlm.engine.layers import PagedLayers
from fathomlm.engine.layout import Layout
from fathomlm.engine.sampler import Mode, Sampled, SamplerState, note, sample
from fathomlm.engine.schedule import Placement
from fathomlm.kernels.best_token import best_token
from fathomlm.kernels.recompiling import allow_recompiling

VALID, BAD, ENDED, JUDGED, AGREED, DRAFTED = 1, 2, 4, 8, 16, 32
"""Flags of a record: a token was chosen; its scores were no numbers; the sequence is over; the whole model has shown
what it would have chosen where a token exited or might have; it was what the exit chose; it was drafted, and verified."""
SLOT, EPOCH, TOKEN, DEPTH, FLAGS, INDEX = range(6)
"""Columns of `StepOutput.ints_NC`; the last says which token of its sequence it is."""
LOGPROB, CONFIDENCE = range(2)
"""Columns of `StepOutput.floats_NC`."""
NEXT, WAITING = 8, 16
"""Above the flags, where the host chooses passes: the segment that the slot runs next, and how many rows it brings."""
MOST_VARIANTS = 4096
"""How often the engines of one process may compile a function."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """Which sampling the requests in flight need. Recorded work is kept for each."""

    mode: Mode = "greedy"
    penalise: bool = False
    bias: bool = False
    alternatives: bool = False
    drafts: bool = True
    """Whether a program that can draft does."""
    rows: int | None = None
    """How many rows a forward pass has, where few sequences are on the device; None: as many as the batch size."""
    only: str | None = None
    """exits: the pass that the host has chosen, instead of all of a decode step."""
    settled: bool = False
    """No draft waits to be verified and none is made: a step may be the plain model's."""
    steps: int = 1
    """Decode steps that are recorded as one piece of work."""
    passes: int | None = None
    """routed: passes of the block in a step; None: as many as the routers were trained for."""

    @property
    def greedy(self) -> bool:
        """Nothing but the likeliest token is wanted."""
        return self.mode == "greedy" and not (self.penalise or self.bias or self.alternatives)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one decode step chose, row by row."""

    ints_NC: Tensor
    """slot, epoch, token, depth, flags, and which token of its sequence it is"""
    floats_NC: Tensor
    """log probability, and how sure the exit was"""
    top_tokens_NK: Tensor
    top_logprobs_NK: Tensor

    @classmethod
    def empty(cls, rows: int, alternatives: int, device: torch.device, pinned: bool = False) -> StepOutput:
        where: dict[str, Any] = {"device": "cpu", "pin_memory": True} if pinned else {"device": device}
        return cls(
            torch.zeros(rows, INDEX + 1, dtype=torch.int64, **where),
            torch.zeros(rows, CONFIDENCE + 1, dtype=torch.float32, **where),
            torch.zeros(rows, alternatives, dtype=torch.int64, **where),
            torch.zeros(rows, alternatives, dtype=torch.float32, **where),
        )

    def part(self, number: int, rows: int) -> StepOutput:
        """What one of several passes of a decode step chose: a view."""
        here = slice(number * rows, (number + 1) * rows)
        return StepOutput(*(getattr(self, name)[here] for name in self.__slots__))

    def blank(self, spare: int) -> None:
        """Nobody ran, and nothing was chosen."""
        self.ints_NC.zero_()
        self.ints_NC[:, SLOT] = spare

    def copy_(self, other: StepOutput, alternatives: bool) -> None:
        """The other's tokens, with or without the likeliest ones beside them."""
        self.ints_NC.copy_(other.ints_NC, non_blocking=True)
        self.floats_NC.copy_(other.floats_NC, non_blocking=True)
        if alternatives:
            self.top_tokens_NK.copy_(other.top_tokens_NK, non_blocking=True)
            self.top_logprobs_NK.copy_(other.top_logprobs_NK, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ProgramContext:
    """What a program works with."""

    plan: DepthPlan
    layout: Layout
    layers: PagedLayers
    state: EngineState
    sampler: SamplerState
    ends_E: Tensor
    batch_size: int
    """Tokens of a forward pass."""
    page_size: int
    compiled: bool
    """Whether the work between layers is compiled: many small operations become a few."""
    skips: bool = False
    """Whether to ask if anybody runs before a pass is run. A captured step cannot ask, and a GPU should not be asked."""

    def idle(self, valid_N: Tensor) -> bool:
        """Whether a pass may be left out, because nobody runs it."""
        return self.skips and not bool(valid_N.any())

    def small(self, function: F) -> F:
        if not self.compiled:
            return function
        # Each engine of a process compiles the same functions anew, for each number of rows that its passes have; a function
        # that is compiled more often than dynamo's limit allows is an error.
        allow_recompiling(MOST_VARIANTS)
        made: Any = torch.compile(function, dynamic=False, fullgraph=True)
        return made  # type: ignore[no-any-return]


class Program(Protocol):
    output: StepOutput

    def place(self, placements: Sequence[Placement], threshold: Threshold) -> None:
        """New sequences are in their slots."""
        ...

    def decode_step(self, variant: SamplingVariant) -> None:
        """One turn of work; what was chosen is in `record` afterwards."""
        ...

    def prefill(self, batch: PrefillBatch) -> None:
        """Make the entries of known tokens. Recorded where `batch.asks` is False."""
        ...


class SlotThresholds:
    """How sure each exit must be, by slot. Mostly a slot's next request asks for the same, and nothing is sent: a short
    request at one row is some milliseconds, and a small upload takes the host some hundredths of one."""

    def __init__(self, state: EngineState, exits: int) -> None:
        self.of_SB = torch.ones(state.slots + 1, exits, device=state.device)
        self._known = [(1.0,) * exits] * state.slots

    def place(self, state: EngineState, placements: Sequence[Placement], threshold: Threshold) -> None:
        new: dict[int, tuple[float, ...]] = {}
        for placement in placements:
            own = placement.sequence.request.exit_threshold
            wanted = tuple(thresholds_of(threshold if own is None else own, self.of_SB.shape[1]))
            if wanted != self._known[placement.slot]:
                new[placement.slot] = self._known[placement.slot] = wanted
        if new:
            self.of_SB.index_copy_(0, state.upload(list(new)), state.upload(list(new.values()), torch.float32))


class TokenChooser:
    """From scores to tokens in their slots."""

    def __init__(self, parts: ProgramContext) -> None:
        self.state, self.sampler, self.ends_E, self._skips = parts.state, parts.sampler, parts.ends_E, parts.skips
        self._sample = parts.small(sample)
        self._take = parts.small(take)

    def __call__(
        self,
        scores_NV: Tensor,
        rows_N: Tensor,
        chosen_N: Tensor,
        depth_N: Tensor,
        confidence_N: Tensor,
        variant: SamplingVariant,
        output: StepOutput,
        flags_N: Tensor | None = None,
    ) -> None:
        """Where `chosen_N`, a row's scores choose its slot's next token. `flags_N` are flags to tell beside those of the
        choice."""
        s = self.state
        steps_N = rows_N if variant.greedy else s.generated_S.index_select(0, rows_N)  # greedily nobody asks
        sampled = self.sampled(scores_NV, rows_N, steps_N, chosen_N, variant)
        self._take(
            s.numbers_SC, rows_N, chosen_N, sampled.tokens_N, sampled.bad_N, sampled.logprobs_N, depth_N, confidence_N,
            self.ends_E, output.ints_NC, output.floats_NC, flags_N,
        )  # fmt: skip
        self.tell(sampled, rows_N, chosen_N, variant, output)

    def tell(self, sampled: Sampled, rows_N: Tensor, told_N: Tensor, variant: SamplingVariant, output: StepOutput) -> None:
        """Tokens that become their slots' count for penalties, and have the likeliest ones beside them, where asked for."""
        if variant.penalise:
            note(sampled.tokens_N, torch.where(told_N, rows_N, self.state.spare), self.sampler)
        if variant.alternatives:
            output.top_tokens_NK.copy_(sampled.top_tokens_NK)
            output.top_logprobs_NK.copy_(sampled.top_logprobs_NK)

    def sampled(
        self, scores_NV: Tensor, rows_N: Tensor, steps_N: Tensor, chosen_N: Tensor, variant: SamplingVariant
    ) -> Sampled:
        """What each row's request makes of its scores, as the token of that number of its completion. Where the device may
        be asked, rows that choose nothing are left out: their token is 0."""
        if self._skips and not bool(chosen_N.all()):
            at_K = chosen_N.nonzero()[:, 0]
            found = self._of(scores_NV[at_K], rows_N[at_K], steps_N[at_K], variant)
            parts = ((name, getattr(found, name)) for name in found.__slots__)
            return Sampled(
                **{name: part.new_zeros(len(rows_N), *part.shape[1:]).index_copy_(0, at_K, part) for name, part in parts}
            )
        return self._of(scores_NV, rows_N, steps_N, variant)

    def _of(self, scores_NV: Tensor, rows_N: Tensor, steps_N: Tensor, variant: SamplingVariant) -> Sampled:
        return self._best(scores_NV) if variant.greedy else self._drawn(scores_NV, rows_N, steps_N, variant)

    def _best(self, scores_NV: Tensor) -> Sampled:
        tokens_N, logprobs_N, bad_N = best_token(scores_NV)
        none_NK = tokens_N.new_zeros(len(tokens_N), 0)
        return Sampled(
            tokens_N=tokens_N, logprobs_N=logprobs_N, bad_N=bad_N, top_tokens_NK=none_NK, top_logprobs_NK=none_NK.float()
        )

    def _drawn(self, scores_NV: Tensor, rows_N: Tensor, steps_N: Tensor, variant: SamplingVariant) -> Sampled:
        found: Sampled = self._sample(
            scores_NV,
            rows_N,
            steps_N,
            self.sampler,
            mode=variant.mode,
            penalise=variant.penalise,
            bias=variant.bias,
            alternatives=variant.alternatives,
        )
        return found


def ends_sequence(tokens_N: Tensor, ends_E: Tensor, ignores_N: Tensor) -> Tensor:
    """Whether a token is an end token, of a request that heeds those."""
    return (tokens_N[:, None] == ends_E[None, :]).any(1) & (ignores_N == 0)


def take(
    numbers_SC: Tensor, rows_N: Tensor, chosen_N: Tensor, tokens_N: Tensor, bad_N: Tensor, logprobs_N: Tensor,
    depth_N: Tensor, confidence_N: Tensor, ends_E: Tensor, ints_NC: Tensor, floats_NC: Tensor, told_N: Tensor | None = None,
) -> None:  # fmt: skip
    """Chosen tokens become the slots' next, one position further; a sequence that is over stops, and one that is held until
    the host knows the token. Columns as in `state.COLUMNS`.
    A slot may have several rows, and one that is chosen: the others write to the spare slot."""
    columns = numbers_SC.index_select(0, rows_N).unbind(1)
    token, position, stage, since, made, limit, epoch, _, ignores, held = columns
    added = chosen_N.long()
    made_N = made + added
    over_N = ends_sequence(tokens_N, ends_E, ignores) | (made_N >= limit) | bad_N
    goes_on_N = chosen_N & ~over_N & (held == 0)
    stage_N = torch.where(goes_on_N, stage, IDLE)  # what is not chosen goes to the spare slot, which never waits
    new = (torch.where(chosen_N, tokens_N, token), position + added, stage_N, since, made_N, *columns[5:])
    numbers_SC.index_copy_(0, torch.where(chosen_N, rows_N, numbers_SC.shape[0] - 1), torch.stack(new, 1))
    flags_N = added * (VALID + BAD * bad_N.long() + ENDED * over_N.long())
    flags_N = flags_N if told_N is None else flags_N + told_N
    ints_NC.copy_(torch.stack((rows_N, epoch, tokens_N, depth_N, flags_N, made), 1))
    floats_NC.copy_(torch.stack((logprobs_N, confidence_N), 1))


def pick(waits_S: Tensor, since_S: Tensor, many: int) -> Tensor:
    """The `many` slots that have waited longest, in that order, (N); places that nobody fills hold the spare slot.

    The last slot is the spare one and never waits. Counting who came before, S x S comparisons, is one small kernel where
    sorting would be several.
    """
    S = waits_S.shape[0]
    numbers_S = torch.arange(S, device=waits_S.device)
    earlier_SS = (since_S[None, :] < since_S[:, None]) | (
        (since_S[None, :] == since_S[:, None]) & (numbers_S[None, :] < numbers_S[:, None])
    )
    ranks_S = (earlier_SS & waits_S[None, :]).sum(1)
    at_S = torch.where(waits_S & (ranks_S < many), ranks_S, many)
    return torch.full((many + 1,), S - 1, device=waits_S.device).scatter(0, at_S, numbers_S)[:many]


def pick_groups(waits_S: Tensor, since_S: Tensor, sizes_S: Tensor, many: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same for slots that bring `sizes_S` rows each, all or none: (slots, number within its slot, whether a row is
    taken), each (N). Whoever has waited longest comes first; behind a group that does not fit nobody is taken."""
    S = waits_S.shape[0]
    numbers_S = torch.arange(S, device=waits_S.device)
    upto_SS = (since_S[None, :] < since_S[:, None]) | (
        (since_S[None, :] == since_S[:, None]) & (numbers_S[None, :] <= numbers_S[:, None])
    )
    ends_S = ((upto_SS & waits_S[None, :]) * sizes_S[None, :]).sum(1)
    taken_S = waits_S & (ends_S <= many)
    starts_S = ends_S - sizes_S
    rows_N = torch.arange(many, device=waits_S.device)
    inside_NS = taken_S[None, :] & (starts_S[None, :] <= rows_N[:, None]) & (rows_N[:, None] < ends_S[None, :])
    valid_N = inside_NS.any(1)
    slots_N = torch.where(valid_N, (inside_NS * numbers_S[None, :]).sum(1), S - 1)
    return slots_N, torch.where(valid_N, rows_N - starts_S[slots_N], 0), valid_N
