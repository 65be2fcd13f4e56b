"""One request in the engine: its tokens, its pages, how far the device is known to have come, and what it has to show.

The scheduler changes everything down to `preemptions`, but for tokens that arrive, and looks at nothing below; the rest is
the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fathomlm.decode.text import TextStream
from fathomlm.engine.request import Event, Finished, Matcher, Request, Result, TokenEvent, TokenLogprobs

OnEvents = Callable[[list[Event]], None]
"""Called with what is new of a sequence, a burst at a time."""
State = Literal["waiting", "prefilling", "running", "done"]


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    start: int | None = None
    """Encoder-decoder models: what the decoder begins from. The request's prompt is then the encoder's."""
    id: int = field(init=False)
    prompt: tuple[int, ...] = field(init=False)
    source: tuple[int, ...] = field(init=False)
    """What an encoder reads; empty where there is none."""
    max_new_tokens: int = field(init=False)
    spare: int = 0
    """Entries of drafts that a pass may leave behind those of its tokens, where there are pages for them."""
    most_entries: int = field(init=False)
    """The most that a table will ever hold, spare ones included: the very last token is never run."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens that the host knows. The device may be further."""
    slot: int | None = None
    """Its place on the device; None while it waits and when it is done."""
    epoch: int = 0
    """Raised when it is placed and when it leaves its slot, and unlike that of any other sequence: what an earlier
    placement still reports never has this number."""
    pages: list[list[int]] = field(default_factory=list)
    """By table: the page that holds entries i * page_size and up."""
    source_pages: list[int] = field(default_factory=list)
    """Those of the source's keys and values, of the first pool."""
    entries: list[int] = field(default_factory=list)
    """By table: entries that the device has confirmed."""
    prefilled: int = 0
    """How many of the tokens to prefill have been issued to the device (or were found in the prefix cache)."""
    state: State = "waiting"
    confirmed: int = 0
    """How many of the tokens to prefill the device has confirmed."""
    goal: int = 0
    """How many tokens this placement prefills: all that were known but the last, which runs as the first decode row."""
    reused: int = 0
    """The fewest tokens that any of its placements took from the prefix cache: what lies behind them may be its own."""
    replays: bool = False
    """Whether its generated tokens have entries that follow from where they left: other sequences share only its prompt, and
    where it is prefilled again they leave where they left before."""
    exact: int | None = None
    """Where tokens exit early: how many have their exact entries in every layer by now, those that are prefilled apart."""
    preemptions: int = 0
    matcher: Matcher | None = None
    """How far it has come in its constraint; None without one."""
    allowed: bytes | None = None
    """What the constraint allows as the next token that the host does not know."""
    stream: TextStream | None = None
    on_events: OnEvents | None = None
    each: bool = field(init=False)
    """Whether the host must see each of its tokens."""
    watched: bool = field(init=False)
    """Whether its tokens are wanted as they come, and not only when it has ended."""
    told: int = 0
    """Tokens whose text is in `pieces`, and of which the listener has heard."""
    pieces: list[str] = field(default_factory=list)
    """The completion so far, as text."""
    logprobs: list[TokenLogprobs] | None = None
    """These three for each token; None where nobody asked, the model has one depth, or there is no exit."""
    depths: list[int] | None = None
    confidences: list[float] | None = None
    judged: list[tuple[float, bool]] = field(default_factory=list)
    """The exit's confidence at each token that ran all layers, and whether they agreed."""
    drafted: int = 0
    """Drafts that the full model has verified, kept or not."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    result: Result | None = None
    """When it has ended."""

    def __post_init__(self) -> None:
        self.id, given = self.request.id, self.request.prompt
        self.each = bool(self.request.sampling.stop) or self.request.constraint is not None
        self.watched = self.each or self.on_events is not None
        self.prompt, self.source = (given, ()) if self.start is None else ((self.start,), given)
        self.max_new_tokens = self.request.sampling.max_new_tokens
        self.most_entries = len(self.prompt) + self.max_new_tokens - 1 + self.spare

    def due(self, interval: int) -> int:
        """With how many tokens it is visited next, where it is watched: the first at once, and then where there are
        `interval` new ones, unless the host must see each."""
        return self.told + (1 if self.each or not self.told else interval)

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    @property
    def keys(self) -> tuple[int, ...]:
        """What the prefix cache knows it by: sequences share a prefix only with those whose depth was limited alike."""
        limit, known = self.request.max_depth, self._cacheable
        return known if not limit else tuple(token + limit * 2**40 for token in known)

    def page(self, first: int, size: int) -> tuple[int | None, int, tuple[int, ...]]:
        """What tells so many of its tokens from those of others at the same place: `keys` of a part."""
        return self.request.max_depth, first, self._cacheable[first : first + size]

    @property
    def _cacheable(self) -> tuple[int, ...]:
        """The tokens whose entries other sequences may share."""
        return self.prompt if self.replays or not self.tokens else self.known

    def shared_entries(self, entries: int) -> int:
        """How many of its first entries other sequences may share."""
        return min(entries, len(self.prompt) - 1) if self.replays else entries

    def depths_from(self, first: int, count: int, full: int) -> list[int]:
        """After how many layers the tokens at these positions left; those of the prompt ran all of them."""
        assert self.depths is not None
        before = len(self.prompt) - 1
        return [full if at < before else self.depths[at - before] for at in range(first, first + count)]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def unissued(self) -> int:
        """Tokens to prefill that have not been issued yet."""
        return self.goal - self.prefilled


def events_of(sequence: Sequence, told: int, pieces: list[str]) -> list[Event]:
    """An event for each token from number `told` on."""
    tokens, logprobs, depths, confidences = sequence.tokens, sequence.logprobs, sequence.depths, sequence.confidences
    events: list[Event] = []
    for index, text in enumerate(pieces, told):
        logprob, top = (None, ()) if logprobs is None else (logprobs[index].logprob, logprobs[index].top)
        depth = None if depths is None else depths[index]
        confidence = None if confidences is None else confidences[index]
        # Half of what it takes by the class's own way.
        events.append(tuple.__new__(TokenEvent, (tokens[index], text, index, logprob, top, depth, confidence)))
    return events


def result_of(sequence: Sequence, finish: Finished) -> Result:
    """What a sequence has so far; it is called at its end, or when its engine broke."""
    depths, confidences, logprobs = sequence.depths, sequence.confidences, sequence.logprobs
    return Result(
        id=sequence.id, prompt_tokens=sequence.request.prompt, tokens=tuple(sequence.tokens), text="".join(sequence.pieces),
        finish=finish, arrival=sequence.request.arrival, first_token_time=sequence.first_token_time,
        last_token_time=sequence.last_token_time, preemptions=sequence.preemptions, drafted=sequence.drafted,
        logprobs=None if logprobs is None else tuple(logprobs[: len(sequence.tokens)]),
        depths=None if depths is None else tuple(depths),
        confidences=None if confidences is None else tuple(confidences),
    )  # fmt: skip
