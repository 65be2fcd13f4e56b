"""A request to the engine, the events while it runs, and its result."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from fathomlm.decode.exiting import Threshold, thresholds_of
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError, is_int, is_number, require
from fathomlm.options import check, option

MAX_LOGPROBS = 20
"""The most alternatives whose log probabilities a request may ask for at each token."""


class Matcher(Protocol):
    """How far a completion has come in what it has to follow."""

    def advance(self, token: int) -> None:
        """The next token of the completion, which was allowed and does not end it. Raises `FathomError` where the rest
        cannot be followed."""
        ...

    def allowed(self) -> bytes:
        """A byte for each token of the vocabulary: 1 where it may come next, else 0. Raises `FathomError`."""
        ...


class Constraint(Protocol):
    """What a completion has to follow, such as a JSON schema (`engine.grammar`)."""

    def begin(self) -> Matcher: ...


FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]
"""The model's end token, a stop string, max_new_tokens; it was cancelled; it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it. The settings of the reference decoder are `sampling`; the rest is beside it."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = option(None, ge=0, le=MAX_LOGPROBS)
    """Log probabilities to report: None is none, 0 the chosen token's, more also of so many likeliest tokens."""
    presence_penalty: float = option(0.0, ge=-2, le=2)
    """Taken from the score of every token of the completion so far, once. The prompt does not count."""
    frequency_penalty: float = option(0.0, ge=-2, le=2)
    """Taken from a token's score for each time that it is in the completion so far. The prompt does not count."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """By token: added to its score before it is chosen. -100 to 100, of which the ends all but forbid and demand it."""
    constraint: Constraint | None = field(default=None, compare=False)
    """What the completion has to follow: of the tokens that it does not allow none is chosen."""
    max_depth: int | None = option(None, ge=1)
    """No token runs deeper than this; None leaves depth to the model."""
    exit_threshold: Threshold | None = None
    """How sure an exit must be for a token to leave there, from 0 (always) to 1 (never), or one number for each exit; None
    is the engine's own."""
    arrival: float = field(default_factory=time.perf_counter)
    """When it came in, on `time.perf_counter`'s clock."""
    seed: int = field(init=False, compare=False, repr=False)
    """What its draws come from: the sampling's seed, or a random one. It belongs to the request, so that a
    preempted sequence goes on as it would have."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _token_ids(self.prompt))
        require(is_int(self.id), "id", "an integer", self.id)
        require(isinstance(self.sampling, Sampling), "sampling", "a Sampling", self.sampling)
        check(self, inside=False)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        ends = self.constraint is None or not self.sampling.ignore_eos
        require(ends, "ignore_eos", "False where the completion is constrained", self.sampling.ignore_eos)
        each = () if self.exit_threshold is None else thresholds_of(self.exit_threshold, 1)
        inside = self.exit_threshold != () and all(is_number(one) and 0 <= one <= 1 for one in each)
        require(inside, "exit_threshold", "None or from 0 to 1", self.exit_threshold)
        require(is_number(self.arrival), "arrival", "a time in seconds", self.arrival)
        seed = self.sampling.seed
        object.__setattr__(self, "seed", secrets.randbits(63) if seed is None else seed)

    @property
    def penalised(self) -> bool:
        """Whether its logits depend on the tokens before."""
        return self.sampling.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def biased(self) -> bool:
        """Whether something is added to its logits."""
        return bool(self.logit_bias) or self.constraint is not None


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        tokens = tuple(map(operator.index, prompt))
    except TypeError as error:
        raise OptionError(f"prompt must be token ids, got {prompt!r}") from error
    require(bool(tokens), "prompt", "at least one token id", prompt)
    require(min(tokens) >= 0, "prompt", "token ids of at least 0", min(tokens))
    return tokens


def _biases(given: Mapping[int, float]) -> dict[int, float]:
    rule = "token ids of at least 0 with numbers between -100 and 100"
    require(isinstance(given, Mapping), "logit_bias", rule, given)
    for token, value in given.items():
        right = is_int(token) and token >= 0 and is_number(value) and -100 <= value <= 100
        require(right, "logit_bias", rule, {token: value})
    return dict(given)


class TokenEvent(NamedTuple):
    """One more token of a sequence. A tuple: there is one for every token, and anything else takes longer to make."""

    token: int
    text: str
    """What is now safe to show, often empty: a character may be spread over tokens, a stop string may have begun."""
    index: int  # type: ignore[assignment]  # in place of the tuple's method
    """Its place in the completion, from 0."""
    logprob: float | None = None
    """Under the model's own distribution: no temperature, no filter, no penalty. None where the request wants none."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, likeliest first."""
    depth: int | None = None
    """How deep it was chosen; None where the model has one depth."""
    confidence: float | None = None
    """How sure the exit was where it left; None without exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Why a sequence ended."""

    reason: FinishReason
    error: str | None = None
    """What went wrong, for the reason "error" alone."""

    def __post_init__(self) -> None:
        assert (self.reason == "error") == (self.error is not None), "an error, and only an error, has a message"


Event = TokenEvent | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log probabilities of one token, as in `TokenEvent`."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The completion of one request."""

    id: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """Every token that was chosen, the end token and those of a stop string included."""
    text: str
    """The tokens as text, without special tokens and cut before the stop string; empty without a tokenizer."""
    finish: Finished
    arrival: float
    """Times are on `time.perf_counter`'s clock."""
    first_token_time: float | None = None
    """None where there was none."""
    last_token_time: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """For each token; None where the request wants none."""
    depths: tuple[int, ...] | None = None
    """For each token, how deep it was chosen; None where the model has one depth."""
    confidences: tuple[float, ...] | None = None
    """For each token, of the exit where it exited; None without exits."""
    drafted: int = 0
    """speculative: drafts that the full model verified. The tokens that are not of full depth are those it kept."""
    preemptions: int = 0
    """How often it was put aside for want of memory, and read again."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival, waiting in the queue included; None where no token came."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival

    @property
    def mean_inter_token_time(self) -> float | None:
        """Seconds from one token to the next, on average; None where there were fewer than two."""
        first, last = self.first_token_time, self.last_token_time
        if first is None or last is None or len(self.tokens) < 2:
            return None
        return (last - first) / (len(self.tokens) - 1)
