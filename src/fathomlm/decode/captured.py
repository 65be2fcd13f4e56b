"""One sequence, decoded in steps of fixed shape that a GPU replays: the fast version of the modes in this package.

`RecordedSteps` is the work; here is what the host does between: read a choice and a confidence, choose the next step.
Decoding is greedy. Tests compare the tokens with the reference modes (`decode/early_exit.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from fathomlm.decode.exit_forward import exceeds
from fathomlm.decode.exiting import DEFAULT_STACK, Exiting
from fathomlm.decode.recorded import RecordedSteps
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory

MODES = ("full", "static", "state-copy", "parallel", "speculative")


@dataclass(slots=True)
class CapturedResult:
    """What came of one prompt."""

    tokens: list[int] = field(default_factory=list)
    exit_layers: list[int] = field(default_factory=list)
    """For each token the layer after which it was chosen."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    confidences: list[float] = field(default_factory=list)
    """At every token that ran up to the exit, drafts that were discarded included."""
    deep_passes: int = 0
    left_waiting: int = 0
    """Tokens before the end that never passed the layers behind the exit: nothing came after them."""
    drafted: int = 0
    judged: int = 0
    """Drafts up to the first that was not kept, that one included."""
    accepted: int = 0


class CapturedDecoder:
    """A decoder with fixed room for one row.

    `compile` also compiles its layers; that changes the decoder itself. `pack` keeps a second copy of the layers' weights
    in fewer, larger matrices (`Decoder.pack_layers`); results then differ by rounding. Make a new one after the weights
    change.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        length: int,
        exit_layers: int | Sequence[int] = (),
        max_stack: int = DEFAULT_STACK,
        compile: bool = False,
        pack: bool = False,
        source: int | None = None,
    ) -> None:
        """`length` is the most tokens that a row may have, `exit_layers` where tokens may exit, from 1; all modes but
        state-copy have one exit. A decoder behind an encoder also has `source`, the most tokens that it may have read."""
        steps = decoder.plan.steps
        if decoder.plan.routing is not None:
            raise OptionError("a routed model's router already chooses each token's depth; it has no exits to decode with")
        exits = (exit_layers,) if isinstance(exit_layers, int) else tuple(sorted(set(exit_layers)))
        for layer in exits:
            if not 1 <= layer < len(steps):
                raise OptionError(f"exit layers must be between 1 and {len(steps) - 1} for this model, got {layer}")
        if decoder.architecture.cross != (source is not None):
            raise OptionError(
                "`source`, the max source length, requires an encoder-decoder model, which requires it in turn"
            )
        if length < 2 or max_stack < 1:
            raise OptionError(f"length must be >= 2 and max_stack >= 1, got {length} and {max_stack}")
        self.steps = RecordedSteps(decoder, length, exits, max_stack, compile, pack, source)

    @torch.no_grad()
    def record(self, exiting: Exiting) -> None:
        """Record what a mode needs, which `generate` otherwise does when it first comes; not behind an encoder, whose
        output it looks at."""
        check_exiting(exiting)
        self.steps.record(_recorded_mode(exiting))

    def generate(
        self,
        prompt: Sequence[int],
        exiting: Exiting,
        max_new_tokens: int,
        ends: Collection[int] = (),
        memory: EncoderMemory | None = None,
        on_token: Callable[[int, int], bool] | None = None,
    ) -> CapturedResult:
        """Continue a prompt greedily, to an end token or `max_new_tokens`. `memory` is an encoder's output, of one row.
        `on_token` is given each token and the layer after which it was chosen, and says whether to go on."""
        self._check(prompt, exiting, max_new_tokens)
        self._check_memory(memory)
        threshold = exiting.threshold_now() or 0.0
        assert not isinstance(threshold, tuple)
        with torch.no_grad():
            if memory is not None and not self.steps.ready:  # recorded work looks at room that is there
                self.steps.set_memory(memory)
            mode = _recorded_mode(exiting)
            self.steps.record(mode)
            begun = time.perf_counter()
            if memory is not None:
                self.steps.set_memory(memory)
            self.steps.read(prompt, shallow=exiting.mode == "static")
            text = CapturedResult()
            run = {"full": self._full, "static": self._static}.get(exiting.mode)
            state = _DecodingState(text, max_new_tokens, frozenset(ends), exiting.estimator is not None, on_token)
            self.steps.synchronize()
            text.prefill_seconds = time.perf_counter() - begun
            begun = time.perf_counter()
            if run is not None:
                run(state)
            elif exiting.mode == "state-copy":
                self._state_copy(state, exiting, threshold)
            elif exiting.mode == "parallel":
                self._parallel(state, threshold)
            elif mode == "cycle":
                self._cycles(state)
            else:
                self._speculative(state, threshold, len(prompt))
            self.steps.synchronize()
            text.decode_seconds = time.perf_counter() - begun
        if exiting.estimator is not None:
            if state.samples:
                exiting.estimator.observe(*map(list, zip(*state.samples, strict=True)))
            exiting.estimator.end_sequence()
        return text

    # The modes. Each tells which recorded step comes next.

    def _full(self, state: _DecodingState) -> None:
        while state.on:
            self.steps.run("full")
            state.take(int(self.steps.result()[1]), self.steps.layers)

    def _static(self, state: _DecodingState) -> None:
        while state.on:
            self.steps.run("static")
            state.take(int(self.steps.result()[1]), self._exit)

    def _state_copy(self, state: _DecodingState, exiting: Exiting, threshold: float) -> None:
        while state.on:
            now = exiting.decayed(threshold, len(state.text.tokens), state.most)
            state.take(*self._run_to_exit(state, now))

    def _run_to_exit(self, state: _DecodingState, threshold: float) -> tuple[int, int]:
        """One token through the layers until an exit is sure: its choice, and the layer."""
        exits = self.steps.exit_layers
        for number, layer in enumerate(exits):
            self.steps.run("segment", number)
            sure, token = self._exit_result(state)
            if exceeds(sure, threshold):
                self.steps.run("copy", number)
                return int(token), layer
        self.steps.run("segment", len(exits))
        return int(self.steps.result()[1]), self.steps.layers

    def _parallel(self, state: _DecodingState, threshold: float) -> None:
        waiting = 0
        while state.on:
            self.steps.run("shallow")
            waiting += 1
            sure, token = self._exit_result(state)
            if not exceeds(sure, threshold):
                self._choose_deep(state, waiting)
                waiting = 0
                continue
            self._take_exit(state, token)
            # At the end of a text they pass only to be learnt from: the next one reads its own prompt.
            if waiting == self.steps.max_stack or (state.learns and not state.on):
                self.steps.run("deep", self.steps.size(waiting), choose=False)
                self._passed_deep(state, waiting)
                waiting = 0
        state.text.left_waiting = waiting

    def _speculative(self, state: _DecodingState, threshold: float, begin: int) -> None:
        """Draft until an exit is not sure, the stack is full or the text would be over; then keep what the full model
        would have chosen. `begin` is how many tokens the prompt has."""
        drafts: list[int] = []
        while state.on:
            self.steps.run("shallow")
            sure, token = self._exit_result(state)
            text, waiting = state.text, len(drafts) + 1
            drafts.append(int(token))
            drafted = exceeds(sure, threshold)
            over = int(token) in state.ends or len(text.tokens) + len(drafts) == state.most
            if drafted and waiting < self.steps.max_stack and not over:
                continue
            self.steps.run("deep", self.steps.size(waiting), choose=False)
            text.deep_passes += 1
            kept = self._keep(state, drafts if drafted else drafts[:-1], self.steps.deep_choices(waiting))
            if state.learns:
                self._note_agreements(state, waiting, min(kept + 1, waiting))
            drafts = []
            if state.on:
                self.steps.move(text.tokens[-1], begin + len(text.tokens) - 2)

    def _cycles(self, state: _DecodingState) -> None:
        """The same where every token is drafted: nothing depends on what an exit says, so drafts and their judgement are one
        recorded step. What is drafted behind an end is as if it had not been."""
        while state.on:
            self.steps.run("cycle")
            sures, drafts, wanted = self.steps.cycle_results()
            text = state.text
            left = state.most - len(text.tokens)
            waiting = next((i for i, token in enumerate(drafts, 1) if token in state.ends or i == left), len(drafts))
            text.confidences += sures[:waiting]
            text.deep_passes += 1
            self._keep(state, drafts[:waiting], wanted[:waiting])

    def _keep(self, state: _DecodingState, proposed: Sequence[int], wanted: Sequence[int]) -> int:
        """Take the drafts that are what the full model wanted, and its own choice in the place of the first other one or
        behind them all, where it has one; returns how many drafts were kept."""
        text = state.text
        kept = next((i for i, (a, b) in enumerate(zip(proposed, wanted, strict=False)) if a != b), len(proposed))
        text.drafted += len(proposed)
        text.judged += min(kept + 1, len(proposed))
        text.accepted += kept
        for draft in proposed[:kept]:
            state.take(draft, self._exit)
        if kept < len(wanted) and state.on:
            state.take(wanted[kept], self.steps.layers)
        return kept

    def _exit_result(self, state: _DecodingState) -> list[float]:
        """What an exit says: how sure it is, and its choice."""
        result = self.steps.result()
        state.text.confidences.append(result[0])
        state.proposed.append(int(result[1]))
        return result

    def _note_agreements(self, state: _DecodingState, waiting: int, settled: int) -> None:
        """Whether the exit chose what the full model chose, for the first `settled` tokens of those that waited."""
        first = len(state.proposed) - waiting
        for i, choice in enumerate(self.steps.deep_choices(waiting)[:settled]):
            state.samples.append((state.text.confidences[first + i], state.proposed[first + i] == choice))

    def _passed_deep(self, state: _DecodingState, waiting: int) -> None:
        state.text.deep_passes += 1
        if state.learns:
            self._note_agreements(state, waiting, waiting)

    @property
    def _exit(self) -> int:
        """The layer of the one exit."""
        (layer,) = self.steps.exit_layers
        return layer

    def _take_exit(self, state: _DecodingState, token: float) -> None:
        state.take(int(token), self._exit)

    def _choose_deep(self, state: _DecodingState, waiting: int) -> None:
        self.steps.run("deep", self.steps.size(waiting), choose=True)
        self._passed_deep(state, waiting)
        state.take(int(self.steps.result()[1]), self.steps.layers)

    def _check_memory(self, memory: EncoderMemory | None) -> None:
        room = self.steps.source
        if (memory is None) != (room is None):
            wants = "requires `memory`, the encoder's output" if memory is None else "does not take `memory`"
            raise OptionError(f"this decoder {wants}")
        if (
            memory is not None
            and room is not None
            and (memory.states_BSM.shape[0] != 1 or memory.states_BSM.shape[1] > room)
        ):
            raise OptionError(f"one source of at most {room} tokens fits, got {tuple(memory.states_BSM.shape[:2])}")

    def _check(self, prompt: Sequence[int], exiting: Exiting, most: int) -> None:
        check_exiting(exiting)
        if not prompt:
            raise OptionError("the prompt has no token to continue")
        steps = self.steps
        if len(prompt) + most > steps.length:
            raise OptionError(f"{len(prompt)} prompt tokens and {most} new ones do not fit into {steps.length} slots")
        if exiting.mode == "full":
            return
        if exiting.drafts_behind(steps.decoder.plan):
            raise OptionError("captured decoding does not run a draft layer; the engine does")
        if not steps.exit_layers:
            raise OptionError(
                f"{exiting.mode} decoding requires an exit; give exit_layers when building the captured decoder"
            )
        if exiting.exits(steps.decoder.plan) != tuple(layer - 1 for layer in steps.exit_layers):
            captured = " and ".join(str(layer) for layer in steps.exit_layers)
            raise OptionError(f"captured with an exit after layer {captured}; ask for just that in exit_layers")
        if exiting.max_stack not in (None, steps.max_stack):
            raise OptionError(f"captured with a stack of {steps.max_stack}, asked for {exiting.max_stack}")


def _recorded_mode(exiting: Exiting) -> str:
    """What steps a mode is made of."""
    drafts_all = exiting.mode == "speculative" and exiting.estimator is None and not exiting.threshold_now()
    return "cycle" if drafts_all else exiting.mode


def check_exiting(exiting: Exiting) -> None:
    """Reject early-exit modes that captured steps do not support."""
    if exiting.mode not in MODES:
        raise OptionError(f"captured decoding supports the modes {', '.join(MODES)}, not {exiting.mode}")
    if exiting.confidence not in (None, "gap") or exiting.refine is not None:
        raise OptionError("captured decoding supports only confidence='gap', without refinement")
    if isinstance(exiting.threshold, tuple):
        raise OptionError("captured decoding supports one threshold for all exits")


@dataclass(slots=True)
class _DecodingState:
    text: CapturedResult
    most: int
    ends: frozenset[int]
    learns: bool = False
    """Whether an estimator observes agreements."""
    on_token: Callable[[int, int], bool] | None = None
    on: bool = True
    proposed: list[int] = field(default_factory=list)
    """What the exit chose, at every token that ran up to it."""
    samples: list[tuple[float, bool]] = field(default_factory=list)

    def take(self, token: int, layer: int) -> None:
        if not self.on:
            return
        self.text.tokens.append(token)
        self.text.exit_layers.append(layer)
        wanted = self.on_token is None or self.on_token(token, layer)
        self.on = wanted and token not in self.ends and len(self.text.tokens) < self.most
