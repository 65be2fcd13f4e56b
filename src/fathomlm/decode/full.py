"""Generation at full depth: every token runs every step of the plan. The oracle that adaptive decoding is held against.

    tokens = prompts
    while some row goes on:
        tokens = pick(next_logits(decoder, tokens, cache))

Prompts of different lengths are padded on the left. A padded slot is seen by no one and has no position, so that a row
computes in a batch what it computes alone.

Shapes: B rows, T new tokens, S all slots so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fathomlm.cache import DenseCache, SlotCache, build_cache
from fathomlm.checkpoints.resolve import decoder_only
from fathomlm.decode import early_exit
from fathomlm.decode.exit_forward import ExitPolicy
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.generation import Generation, SequenceState
from fathomlm.decode.logits import pick, row_generators, seen_tokens
from fathomlm.decode.prompts import Prompt, check_context, encode_prompt, encode_prompts, read_sources, start_token
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, RoutingTrace
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

MOST_RESERVED = 1024
"""New tokens that the cache reserves at once; it grows for longer sequences."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Where rows of a batch do not begin at the first slot."""

    pads: Tensor
    """(B, 1): how many empty slots each row begins with."""
    keep: Tensor
    """(B, S): False at those, over every slot that there will be."""


def next_logits(
    decoder: Decoder, tokens_BT: Tensor, cache: DenseCache, padding: Padding | None = None, **depth: Any
) -> Tensor:
    """Run tokens behind what the cache holds; the scores for what follows the last of them, (B, V). `depth` is as
    `Decoder.forward` has it: `control`, `trace` and `memory`."""
    if padding is None:
        hidden_BTM = decoder(tokens_BT, cache=cache, **depth)
    else:
        end = cache.length + tokens_BT.shape[1]
        slots_T = torch.arange(cache.length, end, device=tokens_BT.device)
        positions_BT = (slots_T - padding.pads).clamp_min(0)
        hidden_BTM = decoder(tokens_BT, positions_BT=positions_BT, keep_BS=padding.keep[:, :end], cache=cache, **depth)
    return decoder.logits(hidden_BTM[:, -1])


def left_pad(rows: Sequence[Sequence[int]], room: int, device: torch.device) -> tuple[Tensor, Padding | None]:
    """Rows as one tensor that ends flush, and where they begin; no padding where all are equally long.

    `room` is how many slots will follow.
    """
    T = max(len(row) for row in rows)
    pads = [T - len(row) for row in rows]
    tokens_BT = torch.tensor([[0] * pad + list(row) for pad, row in zip(pads, rows, strict=True)], device=device)
    if not any(pads):
        return tokens_BT, None
    pads_B1 = torch.tensor(pads, device=device)[:, None]
    return tokens_BT, Padding(pads_B1, torch.arange(T + room, device=device) >= pads_B1)


def generate(
    model: FathomModel,
    prompts: str | Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    max_context: int | None = None,
    control: DepthControl | None = None,
    exiting: Exiting | None = None,
    **options: Any,
) -> list[Generation]:
    """Continue each prompt, all of them in one batch.

    A prompt is a text or a list of token ids; `options` are fields of `Sampling`, for convenience. `on_text` is given
    the row and each piece of text as soon as it is safe to show; `on_step` how many tokens the longest row has so far.
    `max_context` stands in for the context that the model was trained for; `control` limits how deep tokens go;
    `exiting` enables early exit. An encoder-decoder model encodes the prompt, and decodes from
    it.
    """
    chosen = (sampling or Sampling()).with_options(**options)
    check_exiting(model, control, exiting)
    encoded = encode_prompts(model, prompts)
    if not encoded:
        return []
    tell = [None if on_text is None else partial(on_text, i) for i in range(len(encoded))]
    memory = None
    if isinstance(model, FathomForSeq2SeqLM):
        start, longest = start_token(model), 1
        rows = [SequenceState(model, [start], chosen, tell[i], source=tokens) for i, tokens in enumerate(encoded)]
        memory = read_sources(model, encoded)
    else:
        longest = max(len(tokens) for tokens in encoded)
        check_context(longest, chosen.max_new_tokens, model.architecture.context if max_context is None else max_context)
        rows = [SequenceState(model, tokens, chosen, tell[i]) for i, tokens in enumerate(encoded)]
    reserve = longest + min(chosen.max_new_tokens, MOST_RESERVED)
    if exiting is not None:
        slots = early_exit.exit_cache(model.plan, exiting, len(rows), reserve)
        return early_exit.run(model.decoder, rows, chosen, slots, exiting, on_step, memory)
    cache = build_cache(model.plan, reserve, None if control is None else control.kept_loops(model.plan))
    _run(model.decoder, rows, chosen, cache, on_step, control, memory)
    return [row.result() for row in rows]


class Session:
    """One conversation: a cache that stays, so that a prompt which goes on from the last one costs only what is new.

    The tokens are those of `generate`; only the time differs. Make a new session after the model's weights change.
    """

    def __init__(
        self, model: FathomForCausalLM, control: DepthControl | None = None, exiting: Exiting | None = None
    ) -> None:
        decoder_only(model, "a session")
        check_exiting(model, control, exiting)
        self.model = model
        self.control = control
        self.exiting = exiting
        self.held: tuple[int, ...] = ()
        """The tokens whose keys and values are in the cache."""
        self._cache: DenseCache | SlotCache = (
            build_cache(model.plan, 256, None if control is None else control.kept_loops(model.plan))
            if exiting is None
            else early_exit.exit_cache(model.plan, exiting, batch_size=1, reserve=256)
        )

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Continue one prompt. When this is interrupted, what was computed so far is kept and still usable."""
        chosen = (sampling or Sampling()).with_options(**options)
        tokens = encode_prompt(self.model, prompt)
        check_context(len(tokens), chosen.max_new_tokens, self.model.architecture.context)
        row = SequenceState(self.model, tokens, chosen, on_text)
        # The last prompt token always runs: its scores are what the reply begins from.
        self._cache.truncate(min(_common_prefix(self.held, tokens), len(tokens) - 1))
        try:
            return self._continue(row, chosen)
        finally:
            if self.exiting is not None and self.exiting.mode in ("state-copy", "entry-copy", "oracle-copy"):
                # Copied entries are not those of a prompt; the next turn reads the reply at full depth.
                self._cache.truncate(len(tokens) - 1)
            # An interrupted pass leaves some steps with more entries than others. The cache counts what all of them have,
            # and the next call truncates to no more than that.
            self.held = (*tokens, *row.tokens)[: self._cache.length]

    def _continue(self, row: SequenceState, sampling: Sampling) -> Generation:
        if self.exiting is not None:
            assert isinstance(self._cache, SlotCache)
            return early_exit.run(self.model.decoder, [row], sampling, self._cache, self.exiting)[0]
        assert not isinstance(self._cache, SlotCache)
        _run(self.model.decoder, [row], sampling, self._cache, control=self.control)
        return row.result()

    def reset(self) -> None:
        """Forget everything."""
        self._cache.truncate(0)
        self.held = ()


@torch.inference_mode()
def _run(
    decoder: Decoder,
    rows: Sequence[SequenceState],
    sampling: Sampling,
    cache: DenseCache,
    on_step: Callable[[int], None] | None = None,
    control: DepthControl | None = None,
    memory: EncoderMemory | None = None,
) -> None:
    """Prefill what the cache does not hold yet, then one token a row and pass until every row has finished."""
    begun = time.perf_counter()
    device = decoder.embed.weight.device
    tokens_BT, padding = left_pad([row.prompt[cache.length :] for row in rows], sampling.max_new_tokens, device)
    generators = row_generators(sampling, len(rows), device)
    seen_BV = seen_tokens(sampling, [row.prompt for row in rows], decoder.architecture.vocab, device)
    prefilled: float | None = None
    going = True
    while going:
        trace = None if decoder.plan.routing is None else RoutingTrace()
        scores_BV = next_logits(decoder, tokens_BT, cache, padding, control=control, trace=trace, memory=memory)
        next_B = pick(scores_BV, sampling, generators, seen_BV)
        chosen = next_B.tolist()
        prefilled = prefilled or time.perf_counter()
        going = _take_all(rows, chosen, trace)
        if going and on_step is not None:
            on_step(max(len(row.tokens) for row in rows))
        if seen_BV is not None:
            seen_BV.scatter_(1, next_B[:, None], True)
        tokens_BT = next_B[:, None]
    assert prefilled is not None
    for row in rows:
        row.note_times(begun, prefilled)


def _take_all(rows: Sequence[SequenceState], chosen: Sequence[int], trace: RoutingTrace | None) -> bool:
    """Each row its token; says whether any goes on."""
    depths: Sequence[int | None] = [None] * len(rows)
    if trace is not None and trace.depths_BT is not None:
        depths = trace.depths_BT[:, -1].tolist()
    going = [row.take(token, depth) for row, token, depth in zip(rows, chosen, depths, strict=True)]
    return any(going)


def check_exiting(model: FathomModel, control: DepthControl | None, exiting: Exiting | None) -> None:
    """Refuse what this model cannot do, before any work is done."""
    if exiting is None:
        return
    if control is not None:
        raise OptionError("depth control cannot be combined with early exit")
    ExitPolicy(model.decoder, exiting)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
