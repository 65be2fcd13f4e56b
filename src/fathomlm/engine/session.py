"""A few prompts on an engine of their own: what `decode.full.Session` and `generate` are, fast.

The engine is built for what is asked, one batch at most, and kept: a conversation's next turn finds the pages of the turns
before (prefix caching). Greedy tokens are those of the reference; random ones are drawn otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fathomlm.decode.exiting import DEFAULT_STACK, SERVED_MODES, Exiting, Threshold
from fathomlm.decode.full import check_exiting
from fathomlm.decode.generation import ExitStatistics, Generation
from fathomlm.decode.prompts import Prompt, check_context, encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Event, Request, Result, TokenEvent
from fathomlm.engine.runner import ample_memory, layout_for
from fathomlm.errors import FathomError, UnsupportedModel
from fathomlm.interrupts import no_interrupts
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; each time that is not enough, twice as many."""


def reference_only(model: FathomForCausalLM, control: DepthControl | None, exiting: Exiting | None) -> str | None:
    """What of this the engine does not do, so that the reference has to; None where it does all."""
    if exiting is not None and exiting.mode not in (*SERVED_MODES, "full"):
        return f"--decode {exiting.mode}"
    if exiting is not None and exiting.refine is not None:
        return "--refine"
    if control is not None and control.max_depth is not None and model.plan.routing is None:
        return "--max-depth without a router"
    if control is not None and (control.start_scale or control.kv_loops is not None):
        return "--start-scale" if control.start_scale else "--kv-loops"
    try:
        layout_for(model.decoder, exiting)
    except UnsupportedModel as error:
        return str(error)
    return None


class EngineSession:
    """`sequences` prompts at a time. Make a new session after the model's weights change."""

    def __init__(
        self,
        model: FathomForCausalLM,
        control: DepthControl | None = None,
        exiting: Exiting | None = None,
        *,
        sequences: int = 1,
    ) -> None:
        self.model, self.control, self.sequences = model, control, sequences
        self.exiting = None if exiting is None or exiting.mode == "full" else exiting.for_plan(model.plan)
        self._engine: Engine | None = None
        check_exiting(model, control, self.exiting)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continue one prompt. When this is interrupted, the session is still usable."""
        return self.generate_all([prompt], sampling, on_text=on_text, **options)[0]

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Continue each prompt. `on_text` gets the text of the first as it comes; `on_step` how many tokens the longest
        completion has."""
        chosen = (sampling or Sampling()).with_options(**options)
        tokens = [encode_prompt(self.model, prompt) for prompt in prompts]
        for one in tokens:
            check_context(len(one), chosen.max_new_tokens, self.model.architecture.context)
        engine = self._with_room(max(map(len, tokens)) + chosen.max_new_tokens)
        threshold = None if self.exiting is None else self.exiting.threshold_now()
        depth = None if self.control is None else self.control.max_depth
        requests = [Request(id=engine.new_id(), prompt=tuple(one), sampling=chosen, max_depth=depth) for one in tokens]
        pieces: list[str] = []

        def listen(events: list[Event]) -> None:
            pieces.extend(event.text for event in events if isinstance(event, TokenEvent))

        try:
            sequences = [
                engine.submit(request, listen if on_text is not None and number == 0 else None)
                for number, request in enumerate(requests)
            ]
            shown = 0
            while any(sequence.result is None for sequence in sequences):
                with no_interrupts():  # what a step changes belongs together
                    engine.step()
                if on_step is not None:
                    on_step(max(len(sequence.tokens) for sequence in sequences))
                while on_text is not None and shown < len(pieces):
                    shown += 1
                    on_text(pieces[shown - 1])
        finally:
            for request in requests:
                engine.cancel(request.id)
        results = [sequence.result for sequence in sequences if sequence.result is not None]
        if on_text is not None and (rest := results[0].text[sum(map(len, pieces)) :]):
            on_text(rest)
        return [self._generation(result, threshold) for result in results]

    def reset(self) -> None:
        """There is nothing to forget: a prompt is compared with what is cached."""

    def _with_room(self, length: int) -> Engine:
        if self._engine is None or length > self._engine.runner.sizes.max_length:
            room = FIRST_LENGTH if self.sequences == 1 else length
            while room < length:
                room *= 2
            self._engine = None  # its pages and packed weights make room first
            stack, exiting = 1, self.exiting
            if exiting is not None and exiting.mode in ("parallel", "speculative"):  # what waits must fit into a pass
                stack = 1 if exiting.drafts_behind(self.model.plan) else exiting.max_stack or DEFAULT_STACK
            options = EngineOptions(
                batch_size=max(self.sequences, stack), max_sequences=self.sequences, max_logprobs=0, compile=False,
                max_length=max(length, min(room, self.model.architecture.context)), always_draft=True,
                depth_bias=0.0 if self.control is None else self.control.bias,
            )  # fmt: skip
            ample = ample_memory(self.model.decoder, options, length, exiting) if self.sequences > 1 else None  # all at once
            self._engine = Engine(self.model, options, exiting=exiting, memory=ample)
        return self._engine

    def _generation(self, result: Result, threshold: Threshold | None) -> Generation:
        if result.finish.reason == "error":
            raise FathomError(f"the engine failed: {result.finish.error}")
        first, last = result.first_token_time, result.last_token_time
        assert first is not None
        assert last is not None
        depths = result.depths
        if self.exiting is not None and self.exiting.mode == "static":  # the engine runs a shallow model, of one depth
            depths = (self.exiting.exits(self.model.plan)[0] + 1,) * len(result.tokens)
        exits = None if self.exiting is None or depths is None else self._statistics(self.exiting, result, depths, threshold)
        return Generation(
            prompt_tokens=result.prompt_tokens,
            tokens=result.tokens,
            text=result.text,
            finish=result.finish.reason,  # type: ignore[arg-type]
            prefill_seconds=first - result.arrival,
            decode_seconds=last - first,
            depths=depths if exits is None else None,
            exit_layers=None if exits is None else depths,
            confidences=result.confidences,
            exits=exits,
        )

    def _statistics(
        self, exiting: Exiting, result: Result, depths: Sequence[int], threshold: Threshold | None
    ) -> ExitStatistics:
        plan, mode = self.model.plan, exiting.mode
        layers, many = plan.unrolled_layers, len(result.tokens)
        kept = sum(depth < layers for depth in depths) if mode == "speculative" else 0
        # What waits for the layers behind the exit passes them in the end, drafts that are discarded too.
        waits = mode in ("parallel", "speculative")
        run = layers * (many + result.drafted - kept) if waits else sum(depths)
        own = many + result.drafted - kept if exiting.own_steps(plan) else 0
        return ExitStatistics(
            mode=mode, layers=layers, threshold=threshold, layers_run=run + own, deep_passes=None, drafted=result.drafted,
            accepted=kept,
        )  # fmt: skip
