"""From scores to the next tokens, for rows of many requests at once, each with its own settings.

A row's token depends on its scores, its settings, its seed and its position in the sequence alone, and on what the sequence
holds where a penalty asks for that. So it does not matter what else is in the batch, and a sequence that was preempted and
read again goes on as it would have.

Nothing here waits for the device, and every shape follows from the arguments' shapes, so `sample` and `note` can be recorded
in a CUDA graph. What the work consists of is said by the host (`mode`, `penalise`, `bias`, `alternatives`): `SamplerState`
knows the least that serves the requests it holds.

Shapes: N rows, V vocabulary, S slots (and one more, for rows that stand for nothing), K alternatives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fathomlm.engine.draws import Settings, draw, likeliest_tokens, row_chances, uniform
from fathomlm.engine.request import Request
from fathomlm.errors import OptionError

Mode = Literal["greedy", "plain", "filtered"]
"""Which settings a call heeds: penalties only; also temperature and min-p; also top-k and top-p, which need a whole sort."""
MODES: tuple[Mode, ...] = ("greedy", "plain", "filtered")

HOTTEST = 1e38
"""A higher temperature is as flat, and would overflow float32."""
NEUTRAL = (0.0, -1.0, 0.0, 1.0, 0.0, 0.0)
"""The float settings of a slot that holds nothing, in `Settings`' order: greedy, without filters and penalties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What came of one call."""

    tokens_N: Tensor
    logprobs_N: Tensor
    """Of the tokens, under the model's own distribution: the scores as they came, without temperature or penalties."""
    bad_N: Tensor
    """Rows that have no choice: a score is NaN or +inf, or none is finite. Their token and log probabilities are 0."""
    top_tokens_NK: Tensor
    """The likeliest tokens under the same distribution, likeliest first."""
    top_logprobs_NK: Tensor


class SlotSettings(NamedTuple):
    """What the device is told of a slot, in `Settings`' order."""

    floats: tuple[float, ...]
    ints: tuple[int, int]


class SamplerState:
    """The settings of the requests in their slots, and what each has said where a penalty asks for it.

    `penalties` makes room for the latter, five bytes for each slot and token of the vocabulary; without it a request with
    penalties is refused. The slot `scratch`, behind the last, is for rows that stand for nothing.
    """

    def __init__(
        self, slots: int, vocab: int, device: torch.device, max_logprobs: int = 0, *, penalties: bool = False
    ) -> None:
        self.scratch = slots
        self.vocab = vocab
        self.max_logprobs = min(max_logprobs, vocab)
        self.penalties = penalties
        self._device = device
        self._neutral = SlotSettings(NEUTRAL, (vocab, 0))
        self._written = [self._neutral] * (slots + 1)
        self._floats_SF = torch.tensor([NEUTRAL] * (slots + 1), device=device)
        self._ints_SW = torch.tensor([(vocab, 0)] * (slots + 1), device=device)
        kept = slots + 1 if penalties else 0
        self._counts_SV = torch.zeros(kept, vocab, dtype=torch.int32, device=device)
        self._seen_SV = torch.zeros(kept, vocab, dtype=torch.bool, device=device)
        self._bias_SV = torch.zeros(0, vocab, device=device)  # until a request has a bias
        self._held: dict[int, tuple[Request, list[str]]] = {}
        self._needs: Counter[str] = Counter()

    @property
    def mode(self) -> Mode:
        """The cheapest mode that serves every request in its slot."""
        return next((mode for mode in reversed(MODES) if self._needs[mode]), "greedy")

    @property
    def penalised(self) -> bool:
        """Whether a request in its slot has penalties."""
        return self._needs["penalties"] > 0

    @property
    def biased(self) -> bool:
        """Whether something is added to the logits of a request in its slot."""
        return self._needs["bias"] > 0

    @property
    def alternatives(self) -> bool:
        """Whether a request in its slot wants to know the likeliest tokens."""
        return self._needs["alternatives"] > 0

    @property
    def scored(self) -> bool:
        """Whether a request in its slot wants to know log probabilities."""
        return self._needs["logprobs"] > 0

    def place(self, slot: int, request: Request, generated: Sequence[int] = (), allowed: bytes | None = None) -> None:
        """Write one slot's settings. `generated` is what the request has said so far, where it was put aside; `allowed` as
        in `set_bias`."""
        self.check(request)
        self.place_all([(slot, request, request.prompt, generated, allowed)])

    def place_all(self, placed: Sequence[tuple[int, Request, Sequence[int], Sequence[int], bytes | None]]) -> None:
        """The same for several slots, each with what its decoder reads as a prompt. Their requests were checked."""
        settings: dict[int, SlotSettings] = {}
        for slot, request, prompt, generated, allowed in placed:
            assert 0 <= slot < self.scratch, f"slot {slot} of {self.scratch}"
            self._forget(slot)
            settings[slot] = self._settings_of(request)
            if request.penalised:
                self._recall(slot, prompt, generated)
            if request.biased:
                self.set_bias(slot, request, allowed)
            needs = _needs(request)
            self._held[slot] = request, needs
            for name in needs:
                self._needs[name] += 1
        self._write(settings)

    def clear(self, slots: Sequence[int]) -> None:
        """The slots hold nothing any more. What they last said stays until a request with penalties takes the slot."""
        self._write({slot: self._neutral for slot in slots if self._forget(slot)})

    def _settings_of(self, request: Request) -> SlotSettings:
        """Whoever takes the likeliest token draws nothing, whatever the seed: most slots are alike then."""
        sampling = request.sampling
        penalties = sampling.repetition_penalty, request.presence_penalty, request.frequency_penalty
        if sampling.greedy:
            return SlotSettings((*NEUTRAL[:3], *penalties), self._neutral.ints)
        tail = 1 - sampling.top_p if sampling.top_p < 1 else -1.0
        floats = (min(sampling.temperature, HOTTEST), tail, sampling.min_p, *penalties)
        return SlotSettings(floats, (min(sampling.top_k, self.vocab) or self.vocab, request.seed))

    def _write(self, settings: Mapping[int, SlotSettings]) -> None:
        """Tell the device of slots whose settings are not those that it has: each upload takes the host as long as many
        tokens."""
        changed = {slot: one for slot, one in settings.items() if one != self._written[slot]}
        if changed:
            slots_K = self._upload(list(changed), torch.int64)
            self._floats_SF.index_copy_(0, slots_K, self._upload([one.floats for one in changed.values()], torch.float32))
            self._ints_SW.index_copy_(0, slots_K, self._upload([one.ints for one in changed.values()], torch.int64))
            for slot, one in changed.items():
                self._written[slot] = one

    def _forget(self, slot: int) -> bool:
        """Whether a request was there."""
        held = self._held.pop(slot, None)
        if held is not None:
            request, needs = held
            for name in needs:
                self._needs[name] -= 1
            if request.biased:
                self._bias_SV[slot].zero_()
        return held is not None

    def set_bias(self, slot: int, request: Request, allowed: bytes | None = None) -> None:
        """What is added to a slot's logits from now on, minus infinity where `allowed` has a 0 for a token. There is room
        for it from the first request on that needs any."""
        if not len(self._bias_SV):
            self._bias_SV = torch.zeros(self.scratch + 1, self.vocab, device=self._device)
        row_V = torch.zeros(self.vocab)
        for token, value in request.logit_bias.items():
            row_V[token] = value
        if allowed is not None:
            row_V[torch.frombuffer(bytearray(allowed), dtype=torch.uint8) == 0] = -math.inf
        self._bias_SV[slot].copy_(row_V.pin_memory() if self._device.type == "cuda" else row_V, non_blocking=True)

    def bias(self, scores_NV: Tensor, slots_N: Tensor) -> Tensor:
        """Scores with what their requests add."""
        return scores_NV + self._bias_SV.index_select(0, slots_N)

    def settings(self, slots_N: Tensor) -> Settings:
        floats = self._floats_SF.index_select(0, slots_N).unsqueeze(-1).unbind(1)
        ints = self._ints_SW.index_select(0, slots_N).unsqueeze(-1).unbind(1)
        return Settings(*floats, *ints)

    def penalise(self, scores_NV: Tensor, slots_N: Tensor, settings: Settings) -> Tensor:
        """Scores with the repetition penalty for prompt and completion, then the other two for the completion alone."""
        assert self.penalties
        seen_NV = self._seen_SV.index_select(0, slots_N)
        counts_NV = self._counts_SV.index_select(0, slots_N)
        penalty_N1 = settings.repetition_N1
        repeated_NV = torch.where(scores_NV < 0, scores_NV * penalty_N1, scores_NV / penalty_N1)
        scores_NV = torch.where(seen_NV, repeated_NV, scores_NV)
        return scores_NV - counts_NV * settings.frequency_N1 - (counts_NV > 0) * settings.presence_N1

    def penalises(self, slots_N: Tensor) -> Tensor:
        """Whether what a row's request has said so far counts, (N)."""
        s = self.settings(slots_N)
        return ((s.repetition_N1 != 1) | (s.presence_N1 != 0) | (s.frequency_N1 != 0))[:, 0]

    def add(self, tokens_N: Tensor, slots_N: Tensor) -> None:
        """These tokens were said in these slots."""
        at_N = slots_N.long() * self.vocab + tokens_N
        self._counts_SV.view(-1).scatter_add_(0, at_N, torch.ones_like(at_N, dtype=torch.int32))
        self._seen_SV.view(-1).index_fill_(0, at_N, True)

    def check(self, request: Request) -> None:
        if request.penalised and not self.penalties:
            raise OptionError("this engine was started without penalties; leave them out of the request")
        if (request.logprobs or 0) > self.max_logprobs:
            raise OptionError(f"logprobs must be <= {self.max_logprobs} in this engine, got {request.logprobs}")
        for name, most in (("", max(request.prompt)), ("logit_bias: ", max(request.logit_bias, default=0))):
            if most >= self.vocab:
                raise OptionError(f"{name}token id {most} is outside the model's vocabulary of {self.vocab}")

    def _recall(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._counts_SV[slot].zero_()
        self._seen_SV[slot].zero_()
        self._seen_SV[slot].index_fill_(0, self._upload(prompt, torch.int64), True)
        if generated:
            said_N = self._upload(generated, torch.int64)
            self.add(said_N, torch.full_like(said_N, slot))

    def _upload(self, values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        """From pinned memory, because a copy from elsewhere would wait until the device has done all it was given."""
        pinned = self._device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(self._device, non_blocking=True)


def mode_of(request: Request) -> Mode:
    """The cheapest mode that serves a request."""
    sampling = request.sampling
    if sampling.greedy:
        return "greedy"
    return "filtered" if sampling.top_k or sampling.top_p < 1 else "plain"


def _needs(request: Request) -> list[str]:
    extras = {
        "penalties": request.penalised,
        "bias": request.biased,
        "alternatives": bool(request.logprobs),
        "logprobs": request.logprobs is not None,
    }
    return [mode_of(request), *(name for name, wanted in extras.items() if wanted)]


def sample(
    logits_NV: Tensor,
    slots_N: Tensor,
    steps_N: Tensor,
    state: SamplerState,
    *,
    mode: Mode = "filtered",
    penalise: bool | None = None,
    bias: bool = False,
    alternatives: bool | None = None,
) -> Sampled:
    """The next token of each row: row n belongs to slot slots_n, and the token is number steps_n of its completion, from 0.

    A row's result is the same in every mode that serves its request. None does all that the state has room for; without
    alternatives K is 0.
    """
    assert logits_NV.shape[-1] == state.vocab
    settings = state.settings(slots_N)
    scores_NV = logits_NV.float()
    if state.penalties if penalise is None else penalise:
        scores_NV = state.penalise(scores_NV, slots_N, settings)
    if bias:
        scores_NV = state.bias(scores_NV, slots_N)
    # torch promises the first of equal maxima, and takes NaN for the highest.
    best_N1, tokens_N1 = scores_NV.max(-1, keepdim=True)
    bad_N1 = ~best_N1.isfinite()
    if mode != "greedy":
        # Of a bad or a greedy row anything may come, and is thrown away below.
        chances_NV = row_chances(scores_NV - best_N1, settings, filtered=mode == "filtered")
        drawn_N1 = draw(chances_NV, uniform(settings.seed_N1, steps_N[:, None]))
        tokens_N1 = torch.where(settings.temperature_N1 == 0, tokens_N1, drawn_N1)
    tokens_N1 = tokens_N1.masked_fill(bad_N1, 0)
    logprobs_NV = logits_NV.log_softmax(-1, dtype=torch.float32)
    wanted = state.max_logprobs > 0 if alternatives is None else alternatives
    top_NK = likeliest_tokens(logits_NV, state.max_logprobs if wanted else 0)
    return Sampled(
        tokens_N=tokens_N1[:, 0],
        logprobs_N=logprobs_NV.gather(-1, tokens_N1).masked_fill(bad_N1, 0.0)[:, 0],
        bad_N=bad_N1[:, 0],
        top_tokens_NK=top_NK.masked_fill(bad_N1, 0),
        top_logprobs_NK=logprobs_NV.gather(-1, top_NK).masked_fill(bad_N1, 0.0),
    )


def note(tokens_N: Tensor, slots_N: Tensor, state: SamplerState) -> None:
    """What was chosen counts as said, for penalties. A row of the scratch slot changes nothing that matters."""
    if state.penalties:
        state.add(tokens_N, slots_N)
