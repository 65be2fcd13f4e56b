"""How long a run will take, from what the ledger says of the same variant; and how much time a visit has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from fathomlm.lab.study.ledger import Record

RESERVE = 15.0
"""Seconds at the end of a visit that are kept for a last validation, a checkpoint and the record."""
OVERHEAD = 30.0
"""Seconds that a run takes beyond its tokens at full rate (setting up, compiling, validating) where none is recorded."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Visit:
    """The time that one call of `study run` may take; without a limit, all of it."""

    seconds: float | None = None
    clock: Clock = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.clock())

    @property
    def left(self) -> float:
        """Seconds that steps may still take."""
        return float("inf") if self.seconds is None else self.seconds - RESERVE - (self.clock() - self.began)


def overhead_of(*, wall: float, tokens: int, rate: float | None) -> float:
    """Seconds of a process that its tokens at full rate do not explain; compiling is among them."""
    return round(max(0.0, wall - (tokens / rate if rate else 0.0)), 1)


class Pace:
    """Rates and overheads by variant, on one kind of device."""

    def __init__(self, records: Iterable[Record], device: str, processes: int = 1) -> None:
        """`processes` share the device: a rate holds for as many only."""
        self._rates: dict[tuple[str, str], float] = {}
        self._flops: dict[tuple[str, str], float] = {}
        """Forward FLOPs a second, from which the rates of variants that were never trained are estimated."""
        self._overheads: list[float] = []
        self._device = device
        self._processes = processes
        for record in records:
            self.learn(record)

    def learn(self, record: Record) -> None:
        if record["status"] != "finished" or record["environment"]["device"] != self._device:
            return
        if record.get("processes", 1) != self._processes:
            return
        if record.get("tokens_per_s"):
            place = record["study"], record["variant"]
            self._rates[place] = float(record["tokens_per_s"])
            self._flops[place] = self._rates[place] * float(record.get("flops_per_token") or 0)
        self._overheads.append(float(record["overhead_seconds"]))

    def measured(self, study: str, variant: str, rate: float) -> None:
        """A rate that was seen in a run's first steps."""
        self._rates[study, variant] = rate

    def seconds(self, study: str, variant: str, tokens: float, flops_per_token: float = 0) -> float | None:
        """What so many tokens of a variant will take: by its own rate, or else by the FLOPs a second of the others; None
        where nothing is known."""
        rate = self._rates.get((study, variant))
        known = [rate for rate in self._flops.values() if rate]
        if rate is None and known and flops_per_token:
            rate = median(known) / flops_per_token
        return None if not rate else tokens / rate + self.overhead

    @property
    def overhead(self) -> float:
        return fmean(self._overheads) if self._overheads else OVERHEAD
