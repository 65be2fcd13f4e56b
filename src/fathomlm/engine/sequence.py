"""What the host knows of one sequence: its tokens, its pages, and how far the device is known to have come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "reading", "running", "done"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One text in the making. The scheduler changes everything below `max_new_tokens`; others only read it."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    """Generated tokens that the host knows. The device may be further."""
    slot: int | None = None
    """Its place on the device; None while it waits and when it is done."""
    epoch: int = 0
    """Raised when it is placed and when it leaves its slot, and unlike that of any other sequence: what an earlier
    placement still reports never has this number."""
    pages: list[list[int]] = field(default_factory=list)
    """By table: the page that holds entries i * page_size and up."""
    entries: list[int] = field(default_factory=list)
    """By table: entries that the device has confirmed."""
    prefilled: int = 0
    """How many of the tokens to read have been issued to the device (or were found in the prefix cache)."""
    state: State = "waiting"
    confirmed: int = 0
    """How many of the tokens to read the device has confirmed."""
    goal: int = 0
    """How many tokens this placement reads: all that were known but the last, which runs as the first decode row."""
    reused: int = 0
    """The fewest tokens that any of its placements took from the prefix cache: what lies behind them may be its own."""
    preemptions: int = 0
    kind: int = 0
    """Texts share a beginning only with texts of their own kind: those whose depth was limited alike."""

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    @property
    def keys(self) -> tuple[int, ...]:
        """What the prefix cache knows the text by."""
        return self.known if not self.kind else tuple(token + self.kind * 2**40 for token in self.known)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def most_entries(self) -> int:
        """The most that a table will ever hold: the very last token is never run."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def unread(self) -> int:
        """Tokens to read that have not been issued yet."""
        return self.goal - self.prefilled

    def reach(self, table: int, more: int) -> int:
        """The entries that a table can hold at most after `more` further tokens.

        Tokens that were issued and not confirmed count in every table: which of them went deep is not known yet.
        """
        return min(self.most_entries, self.entries[table] + self.prefilled - self.confirmed + more)
