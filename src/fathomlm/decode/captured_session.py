"""A conversation on captured steps: what `Session` is, for one who waits for replies on a GPU.

Tokens are `Session`'s, which is the slow twin, but for rounding where compiled layers round otherwise. Every turn reads the
whole conversation: on a GPU that is one pass, little beside the reply, and the steps need no second way to begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fathomlm.decode.captured import CapturedDecoder, CapturedResult, check_exiting
from fathomlm.decode.exiting import DEFAULT_STACK, Exiting, Threshold
from fathomlm.decode.generation import ExitStatistics, Generation, SequenceState, TokenExit
from fathomlm.decode.prompts import Prompt, check_context, encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM

FIRST_LENGTH = 1024
"""Tokens that there is room for at first. Every step attends over all of that room, so there is no more than is needed."""


class CapturedSession:
    """One conversation. The first reply records the steps, and compiles layers where `compile` says so, which takes a
    minute; so does the first one that needs more room. Make a new session after the model's weights change."""

    def __init__(
        self, model: FathomForCausalLM, exiting: Exiting | None = None, *, compile: bool = False, pack: bool = False
    ) -> None:
        self.model = model
        self.exiting = exiting or Exiting(mode="full")
        if model.plan.routing is not None:
            raise OptionError("captured decoding does not support models with a router; `fathomlm serve` does")
        check_exiting(self.exiting)
        full = self.exiting.mode == "full"
        self._exit_layers = () if full else tuple(index + 1 for index in self.exiting.exits(model.plan))
        self._how = {"compile": compile, "pack": pack}
        self._decoder: CapturedDecoder | None = None

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continue one prompt greedily. When this is interrupted, the session is still usable."""
        chosen = (sampling or Sampling()).with_options(**options)
        check_greedy(chosen)
        tokens = encode_prompt(self.model, prompt)
        check_context(len(tokens), chosen.max_new_tokens, self.model.architecture.context)
        row = SequenceState(self.model, tokens, chosen, on_text)
        decoder = self._with_room(len(tokens) + chosen.max_new_tokens)
        decoder.record(self.exiting)  # now: the minute that it takes is not the prompt's
        threshold = self.exiting.threshold_now()
        begun, first = time.perf_counter(), 0.0

        def take(token: int, layer: int) -> bool:
            nonlocal first
            first = first or time.perf_counter()
            return row.take(token, token_exit=TokenExit(layer) if self._exit_layers else None)

        found = decoder.generate(tokens, self.exiting, chosen.max_new_tokens, row.end_tokens, on_token=take)
        row.note_times(begun, first)
        return row.exited_result(self._statistics(found, threshold)) if self._exit_layers else row.result()

    def reset(self) -> None:
        """There is nothing to forget: every turn reads the conversation anew."""

    def _with_room(self, length: int) -> CapturedDecoder:
        if self._decoder is None or length > self._decoder.steps.length:
            room = FIRST_LENGTH
            while room < length:
                room *= 2
            self._decoder = None  # its cache and packed weights make room first
            self._decoder = CapturedDecoder(
                self.model.decoder,
                length=max(length, min(room, self.model.architecture.context)),
                exit_layers=self._exit_layers,
                max_stack=self.exiting.max_stack or DEFAULT_STACK,
                **self._how,
            )
        return self._decoder

    def _statistics(self, found: CapturedResult, threshold: Threshold | None) -> ExitStatistics:
        plan, layers = self.model.plan, self.model.plan.unrolled_layers
        # What waits for the layers behind the exit passes them, drafts that are discarded too, but at the end of a text.
        run = sum(found.exit_layers)
        if self.exiting.mode in ("parallel", "speculative"):
            run = layers * len(found.confidences) - found.left_waiting * (layers - self._exit_layers[0])
        if plan.exit_steps(self.exiting.exits(plan)):  # an exit's own layer, at every look
            run += len(found.confidences or found.tokens)
        return ExitStatistics(
            mode=self.exiting.mode,
            layers=layers,
            threshold=threshold,
            layers_run=run,
            deep_passes=found.deep_passes,
            drafted=found.judged,
            accepted=found.accepted,
        )


def check_greedy(sampling: Sampling) -> None:
    """Refuse what captured steps cannot choose by."""
    if not sampling.greedy or sampling.repetition_penalty != 1:
        what = "repetition_penalty" if sampling.greedy else "temperature"
        raise OptionError(f"captured decoding is greedy; {what} {getattr(sampling, what):g} asks for another")
