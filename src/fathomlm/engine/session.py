"""A few prompts on an engine of their own: what `decode.full.Session` and `generate` are, fast.

The engine is built for what is asked, one batch at most, and kept: a conversation's next turn finds the pages of the turns
before (prefix caching). Greedy tokens are those of the reference; random ones are drawn otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fathomlm.decode.exiting import SERVED_MODES, Exiting, Threshold
from fathomlm.decode.full import check_exiting, generate
from fathomlm.decode.generation import ExitStatistics, Generation
from fathomlm.decode.prompts import Prompt, check_context, encode_prompt
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.request import Event, Request, Result, TokenEvent
from fathomlm.engine.sizing import ample_memory, layout_for, settled_exiting
from fathomlm.errors import FathomError, UnsupportedModel
from fathomlm.interrupts import no_interrupts
from fathomlm.model.route import DepthControl
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

FIRST_LENGTH = 1024
"""Tokens that a conversation has room for at first; each time that is not enough, twice as many."""
FIRST_SOURCE = 64
"""Tokens of an encoder's source, likewise: sources of a file come in any order, and each engine captures its steps anew."""


def reference_only(model: FathomModel, control: DepthControl | None, exiting: Exiting | None) -> str | None:
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


class Decode(Protocol):
    """Continues some prompts; `on_step` gets how many tokens the longest completion has."""

    def __call__(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, on_step: Callable[[int], None] | None = None
    ) -> list[Generation]: ...


def decoder_for(
    model: FathomModel,
    control: DepthControl | None = None,
    exiting: Exiting | None = None,
    *,
    sequences: int = 1,
    reference: bool = False,
) -> Decode:
    """At most `sequences` prompts at a time: on an engine, or by the reference where that is wanted or has to do it."""
    if reference or reference_only(model, control, exiting) is not None:
        return partial(generate, model, control=control, exiting=exiting)
    return EngineSession(model, control, exiting, sequences=sequences).generate_all


class EngineSession:
    """`sequences` prompts at a time. Make a new session after the model's weights change."""

    def __init__(
        self,
        model: FathomModel,
        control: DepthControl | None = None,
        exiting: Exiting | None = None,
        *,
        sequences: int = 1,
    ) -> None:
        self.model, self.control, self.sequences = model, control, sequences
        full = exiting is None or exiting.mode == "full"
        self.exiting = None if exiting is None or full else settled_exiting(exiting, model.decoder, sequences)
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
        threshold: Threshold | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Continue each prompt. `on_text` gets the text of the first as it comes; `on_step` how many tokens the longest
        completion has. `threshold` stands in for that of the session's exits."""
        chosen = (sampling or Sampling()).with_options(**options)
        tokens = [encode_prompt(self.model, prompt) for prompt in prompts]
        longest, new = max(map(len, tokens)), chosen.max_new_tokens
        if isinstance(self.model, FathomForSeq2SeqLM):
            engine = self._with_room(1 + new, longest)
        else:
            check_context(longest, new, self.model.architecture.context)
            engine = self._with_room(longest + new)
        given = threshold
        if threshold is None and self.exiting is not None:
            threshold = self.exiting.threshold_now()
        depth = None if self.control is None else self.control.max_depth
        requests = [
            Request(id=engine.new_id(), prompt=tuple(one), sampling=chosen, max_depth=depth, exit_threshold=given)
            for one in tokens
        ]
        pieces: list[str] = []

        def listen(events: list[Event]) -> None:
            pieces.extend(event.text for event in events if isinstance(event, TokenEvent))

        try:
            sequences = [
                engine.submit(request, listen if on_text is not None and number == 0 else None)
                for number, request in enumerate(requests)
            ]
            shown = 0
            # Where many small operations take their time, views of tensors that nobody differentiates are cheaper.
            cpu = self.model.decoder.embed.weight.device.type == "cpu"
            while any(sequence.result is None for sequence in sequences):
                with no_interrupts(), torch.inference_mode(cpu):  # what a step changes belongs together
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

    def _with_room(self, length: int, source: int = 0) -> Engine:
        """An engine for so many tokens, and for a source of so many."""
        sizes = None if self._engine is None else self._engine.runner.sizes
        if self._engine is None or sizes is None or length > sizes.max_length or source > sizes.max_source:
            if source and sizes is not None:  # a long source and a long completion in turn shall not each need an engine
                length, source = max(length, sizes.max_length), max(source, sizes.max_source)
            room = _doubled(FIRST_LENGTH, length) if self.sequences == 1 and not source else length
            source = _doubled(FIRST_SOURCE, source) if source else 0
            self._engine = None  # its pages and packed weights make room first
            exiting = self.exiting
            stack = 1 if exiting is None else exiting.most_waiting(self.model.plan)
            options = EngineOptions(
                batch_size=max(self.sequences, stack), max_sequences=self.sequences, max_logprobs=0, compile=False,
                max_length=max(length, min(room, self.model.architecture.context)), always_draft=True,
                depth_bias=0.0 if self.control is None else self.control.bias, max_source=source or None,
            )  # fmt: skip
            whole = length + source + (options.page_size if source else 0)  # a source has pages of its own
            ample = ample_memory(self.model.decoder, options, whole, exiting) if self.sequences > 1 else None  # all at once
            self._engine = Engine(self.model, options, exiting=exiting, memory=ample)
        return self._engine

    def _generation(self, result: Result, threshold: Threshold | None) -> Generation:
        if result.finish.reason == "error":
            raise FathomError(f"the engine failed: {result.finish.error}")
        first, last = result.first_token_time, result.last_token_time
        assert first is not None
        assert last is not None
        depths = result.depths
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
        if plan.injection:  # at every exit that a token meets the coda runs
            own = plan.ends[1] * sum(index < depth for depth in depths for index in exiting.exits(plan))
        return ExitStatistics(
            mode=mode, layers=layers, threshold=threshold, layers_run=run + own, deep_passes=None, drafted=result.drafted,
            accepted=kept,
        )  # fmt: skip


def _doubled(first: int, least: int) -> int:
    """`first`, doubled until it is at least so many."""
    return first << max(0, -(-least // first) - 1).bit_length()
