"""Generation at full depth: every token runs every step of the plan. The oracle that adaptive decoding is held against.

    logits = prefill(decoder, prompts, cache)
    while some row goes on:
        token = pick(logits)
        logits = decode_step(decoder, token, cache)

Prompts of different lengths are padded on the left. A padded slot is seen by no one and has no position, so that a row
computes in a batch what it computes alone.

Shapes: B rows, T new tokens, S all slots so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fathomlm.cache import DenseCache, RoutedCache, build_cache
from fathomlm.decode.prompts import Prompt, check_context, encode_prompt, encode_prompts, end_tokens
from fathomlm.decode.sampling import Sampling, pick, row_generators, seen_tokens
from fathomlm.decode.text import TextStream
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, RoutingTrace

AnyCache = DenseCache | RoutedCache
Finish = Literal["eos", "stop", "length"]
MOST_RESERVED = 1024
"""New tokens that the cache sets room aside for at once; longer texts make it grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one prompt."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """Every token that was chosen, the end token included."""
    text: str
    """The tokens as text, without special tokens and cut before the stop string; empty without a tokenizer."""
    finish: Finish
    """Why it ended: the model's end token, a stop string, or max_new_tokens."""
    prefill_seconds: float
    """Reading the prompt, up to the first new token. Rows of a batch are read together and share it."""
    decode_seconds: float
    """From the first new token to this row's last."""
    depths: tuple[int, ...] | None = None
    """For each token, how many recursions ran at the position that chose it; None where the model has no router."""

    @property
    def tokens_per_second(self) -> float:
        """The rate of decoding; the first token belongs to the prefill. 0 where there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Padding:
    """Where rows of a batch do not begin at the first slot."""

    pads: Tensor
    """(B, 1): how many empty slots each row begins with."""
    keep: Tensor
    """(B, S): False at those, over every slot that there will be."""


def prefill(
    decoder: Decoder,
    tokens_BT: Tensor,
    cache: AnyCache,
    padding: Padding | None = None,
    control: DepthControl | None = None,
    trace: RoutingTrace | None = None,
) -> Tensor:
    """Run tokens behind what the cache holds; the scores for what follows the last of them, (B, V)."""
    depth = {"control": control, "trace": trace}
    if padding is None:
        hidden_BTM = decoder(tokens_BT, cache=cache, **depth)
    else:
        end = cache.length + tokens_BT.shape[1]
        slots_T = torch.arange(cache.length, end, device=tokens_BT.device)
        positions_BT = (slots_T - padding.pads).clamp_min(0)
        hidden_BTM = decoder(tokens_BT, positions_BT=positions_BT, keep_BS=padding.keep[:, :end], cache=cache, **depth)
    return decoder.logits(hidden_BTM[:, -1])


def decode_step(
    decoder: Decoder,
    tokens_B: Tensor,
    cache: AnyCache,
    padding: Padding | None = None,
    control: DepthControl | None = None,
    trace: RoutingTrace | None = None,
) -> Tensor:
    """One more token in each row; the scores for the next, (B, V)."""
    return prefill(decoder, tokens_B[:, None], cache, padding, control, trace)


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
    model: FathomForCausalLM,
    prompts: str | Sequence[Prompt],
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    max_context: int | None = None,
    control: DepthControl | None = None,
    **options: Any,
) -> list[Generation]:
    """Continue each prompt, all of them in one batch.

    A prompt is a text or a list of token ids; `options` are fields of `Sampling`, for convenience. `on_text` is given
    the row and each piece of text as soon as it is safe to show; `on_step` how many tokens each row has so far.
    `max_context` stands in for the context that the model was trained for; `control` limits how deep tokens go.
    """
    chosen = (sampling or Sampling()).with_options(**options)
    encoded = encode_prompts(model, prompts)
    if not encoded:
        return []
    longest = max(len(tokens) for tokens in encoded)
    check_context(longest, chosen.max_new_tokens, model.architecture.context if max_context is None else max_context)
    rows = [
        _Row(model, tokens, chosen, None if on_text is None else _tell_row(on_text, i)) for i, tokens in enumerate(encoded)
    ]
    cache = build_cache(model.plan, reserve=longest + min(chosen.max_new_tokens, MOST_RESERVED))
    _run(model.decoder, rows, chosen, cache, on_step, control)
    return [row.result() for row in rows]


class Session:
    """One conversation: a cache that stays, so that a prompt which goes on from the last one costs only what is new.

    The tokens are those of `generate`; only the time differs. Make a new session after the model's weights change.
    """

    def __init__(self, model: FathomForCausalLM, control: DepthControl | None = None) -> None:
        self.model = model
        self.control = control
        self.held: tuple[int, ...] = ()
        """The tokens whose keys and values are in the cache."""
        self._cache = build_cache(model.plan, reserve=256)

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
        row = _Row(self.model, tokens, chosen, on_text)
        # The last prompt token always runs: its scores are what the reply begins from.
        self._cache.truncate(min(_common_prefix(self.held, tokens), len(tokens) - 1))
        try:
            _run(self.model.decoder, [row], chosen, self._cache, control=self.control)
        finally:
            # An interrupted pass leaves some steps with more entries than others. The cache counts what all of them have,
            # and the next call truncates to no more than that.
            self.held = (*tokens, *row.tokens)[: self._cache.length]
        return row.result()

    def reset(self) -> None:
        """Forget everything."""
        self._cache.truncate(0)
        self.held = ()


@torch.inference_mode()
def _run(
    decoder: Decoder,
    rows: Sequence[_Row],
    sampling: Sampling,
    cache: AnyCache,
    on_step: Callable[[int], None] | None = None,
    control: DepthControl | None = None,
) -> None:
    """Prefill what the cache does not hold yet, then one token a row and pass until every row has finished."""
    begun = time.perf_counter()
    device = decoder.embed.weight.device
    tokens_BT, padding = left_pad([row.prompt[cache.length :] for row in rows], sampling.max_new_tokens, device)
    generators = row_generators(sampling, len(rows), device)
    seen_BV = seen_tokens(sampling, [row.prompt for row in rows], decoder.architecture.vocab, device)
    trace = None if decoder.plan.routing is None else RoutingTrace()
    next_B = pick(prefill(decoder, tokens_BT, cache, padding, control, trace), sampling, generators, seen_BV)
    chosen = next_B.tolist()
    prefilled = time.perf_counter()
    while _take_all(rows, chosen, trace):
        if on_step is not None:
            on_step(max(len(row.tokens) for row in rows))
        if seen_BV is not None:
            seen_BV.scatter_(1, next_B[:, None], True)
        trace = None if trace is None else RoutingTrace()
        next_B = pick(decode_step(decoder, next_B, cache, padding, control, trace), sampling, generators, seen_BV)
        chosen = next_B.tolist()
    for row in rows:
        row.note_times(begun, prefilled)


class _Row:
    """One prompt on its way: what was chosen, what was shown, and whether it is over."""

    def __init__(
        self, model: FathomForCausalLM, prompt: list[int], sampling: Sampling, on_text: Callable[[str], None] | None
    ) -> None:
        if sampling.stop and model.tokenizer is None:
            raise OptionError("stop strings need a tokenizer, and this model has none")
        self.prompt = prompt
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.finish: Finish | None = None
        self._ends = frozenset() if sampling.ignore_eos else end_tokens(model)
        self._most = sampling.max_new_tokens
        self._stream = None if model.tokenizer is None else TextStream(model.tokenizer, stop=sampling.stop, context=prompt)
        self._watched = bool(sampling.stop) or on_text is not None
        self._on_text = on_text
        self._pieces: list[str] = []
        self._ended = self._prefill_seconds = self._decode_seconds = 0.0

    def take(self, token: int, depth: int | None) -> bool:
        """Add a token, and the depth that it was chosen at; says whether the row goes on. A row that is over ignores what
        its place in the batch computes."""
        if self.finish is not None:
            return False
        self.tokens.append(token)
        if depth is not None:
            self.depths.append(depth)
        if token in self._ends:
            self.finish = "eos"
        elif self._watched and self._stream is not None:
            self._show(self._stream.push(token))
            if self._stream.stopped:
                self.finish = "stop"
        if self.finish is None and len(self.tokens) == self._most:
            self.finish = "length"
        if self.finish is None:
            return True
        self._ended = time.perf_counter()
        if self._watched:
            self._close_text()
        return False

    def note_times(self, begun: float, prefilled: float) -> None:
        self._prefill_seconds, self._decode_seconds = prefilled - begun, self._ended - prefilled

    def result(self) -> Generation:
        assert self.finish is not None
        if self._stream is not None and not self._watched:
            # Nobody waits for pieces, so the text is made once the model has had the processor to itself.
            for token in self.tokens[:-1] if self.finish == "eos" else self.tokens:
                self._pieces.append(self._stream.push(token))
            self._close_text()
        return Generation(
            prompt_tokens=tuple(self.prompt),
            tokens=tuple(self.tokens),
            text="".join(self._pieces),
            finish=self.finish,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            depths=tuple(self.depths) if self.depths else None,
        )

    def _close_text(self) -> None:
        if self._stream is None:
            return
        self._show(self._stream.finish())
        if self._stream.stopped:
            self.finish = "stop"

    def _show(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)


def _take_all(rows: Sequence[_Row], chosen: Sequence[int], trace: RoutingTrace | None) -> bool:
    """Each row its token; says whether any goes on."""
    depths: Sequence[int | None] = [None] * len(rows)
    if trace is not None and trace.depths_BT is not None:
        depths = trace.depths_BT[:, -1].tolist()
    going = [row.take(token, depth) for row, token, depth in zip(rows, chosen, depths, strict=True)]
    return any(going)


def _tell_row(on_text: Callable[[int, str], None], row: int) -> Callable[[str], None]:
    return lambda piece: on_text(row, piece)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
