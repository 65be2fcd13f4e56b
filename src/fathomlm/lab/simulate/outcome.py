"""What a simulation amounts to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy over all texts."""

    tokens: int
    ms: float
    """Until the last token was heard of."""
    ticks: int
    rows: int
    slots: int
    offered: dict[str, int]
    """By kind of pass: its rows, over all passes."""
    filled: dict[str, int]
    """Those that stood for a token."""
    spent: dict[str, float]
    """Milliseconds by stage: kinds of passes, reading, host."""
    preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms if self.ms else float("inf")

    @property
    def rows_filled(self) -> float:
        """Of all passes but a loop's turns, which have nothing to run where only blocks count."""
        kinds = [kind for kind in self.offered if kind != "turn"]
        offered = sum(self.offered[kind] for kind in kinds)
        return sum(self.filled[kind] for kind in kinds) / offered if offered else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Parts of all that was spent. On a device that works beside its host that is more than the time it took."""
        total = sum(self.spent.values())
        return {kind: ms / total for kind, ms in sorted(self.spent.items())} if total else {}

    def record(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.ms / 1e3,
            "tokens_per_s": self.tokens_per_s,
            "ticks": self.ticks,
            "rows": self.rows,
            "slots": self.slots,
            "rows_filled": self.rows_filled,
            "rows_filled_by_pass": {k: self.filled[k] / self.offered[k] for k in sorted(self.offered)},
            "stages": self.shares,
            "preemptions": self.preemptions,
        }
