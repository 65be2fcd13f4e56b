"""Workloads as plain data: what is requested, and when. The same seed gives the same requests on every machine.

`thesis` is the setting of the thesis' throughput figures (4.4.3 and its appendix): a thousand sequences that begin from
nothing, with lengths drawn from a normal distribution around 256. The other two are the prompt and completion lengths of its
chapter 3. No tensors here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fathomlm.errors import OptionError, choices

Arrivals = Literal["together", "poisson", "one by one"]
"""All at once; at random moments, at a mean rate; each when the one before is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """How long the requests of a workload are, and how many there are unless somebody says."""

    prompt: int
    """Tokens to read. 1 is a begin token and no prompt."""
    new: int
    """Tokens to make, on average."""
    deviation: float = 0.0
    """The standard deviation of that number. It is cut off below 1 and above twice the mean."""
    requests: int


WORKLOADS: dict[str, WorkloadShape] = {
    # The thesis names the mean alone. A quarter of it is a spread that the cut does not touch.
    "thesis": WorkloadShape(prompt=1, new=256, deviation=64.0, requests=1000),
    "512-2048": WorkloadShape(prompt=512, new=2048, requests=128),
    "64-256": WorkloadShape(prompt=64, new=256, requests=1000),
}


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload."""

    prompt: tuple[int, ...]
    new: int
    """How many tokens it is to get; end tokens are passed over, so that it gets just these."""
    at: float = 0.0
    """Seconds after the first request."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    seed: int
    arrivals: Arrivals
    rate: float | None
    """Requests a second, where they come at random moments."""
    requests: tuple[WorkloadRequest, ...]
    source: str = "random token ids"
    """Where prompts come from."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def new_tokens(self) -> int:
        return sum(request.new for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prompt included."""
        return max(len(request.prompt) + request.new for request in self.requests)

    def shortened(self, requests: int, new: int) -> Workload:
        """The first few requests, with at most `new` tokens each, all at once: for what would take too long otherwise."""
        few = (WorkloadRequest(request.prompt, min(request.new, new)) for request in self.requests[:requests])
        return replace(self, arrivals="together", rate=None, requests=tuple(few))

    def uniform(self, requests: int, new: int) -> Workload:
        """The first few requests with just `new` tokens each, all at once: for a peer that knows one length for all."""
        same = tuple(WorkloadRequest(request.prompt, new) for request in self.requests[:requests])
        return replace(self, arrivals="together", rate=None, requests=same)

    def one_by_one(self) -> Workload:
        """The same requests, each after the one before."""
        return replace(self, arrivals="one by one", rate=None)

    def record(self) -> dict[str, Any]:
        """For people and JSON."""
        return {
            "name": self.name,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "longest": self.longest,
            "arrivals": self.arrivals,
            "rate_per_s": self.rate,
            "prompts": self.source,
            "seed": self.seed,
        }


def build_workload(
    name: str,
    vocab: int,
    *,
    requests: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    text: Sequence[int] | None = None,
) -> Workload:
    """A named workload over a vocabulary. `text` is tokens to cut prompts from, one after the other and from the start again
    where it ends; without it they are drawn. With a `rate` requests come at random moments, else all at once."""
    shape = shape_of(name)
    count = shape.requests if requests is None else requests
    if count < 1:
        raise OptionError(f"requests must be >= 1, got {count}")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise OptionError(f"the rate of arrivals must be > 0 requests a second, got {rate:g}")
    prompts = _drawn_prompts(shape, count, vocab, seed) if text is None else _cut_prompts(shape, count, text)
    lengths, moments = _lengths(shape, count, seed), _moments(count, rate, seed)
    built = tuple(WorkloadRequest(*one) for one in zip(prompts, lengths, moments, strict=True))
    arrivals: Arrivals = "together" if rate is None else "poisson"
    return Workload(name, seed, arrivals, rate, built, "random token ids" if text is None else "text")


def shape_of(name: str) -> WorkloadShape:
    if name not in WORKLOADS:
        raise OptionError(choices("workload", name, WORKLOADS))
    return WORKLOADS[name]


def _drawn(seed: int, what: str) -> random.Random:
    """A generator for each purpose, so that lengths do not change with the vocabulary."""
    return random.Random(f"{what} {seed}")


def _lengths(shape: WorkloadShape, count: int, seed: int) -> list[int]:
    if not shape.deviation:
        return [shape.new] * count
    generator = _drawn(seed, "lengths")
    return [min(max(round(generator.gauss(shape.new, shape.deviation)), 1), 2 * shape.new) for _ in range(count)]


def _moments(count: int, rate: float | None, seed: int) -> list[float]:
    """A Poisson process: what lies between two arrivals is exponential. The first comes at 0."""
    if rate is None:
        return [0.0] * count
    generator = _drawn(seed, "arrivals")
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + generator.expovariate(rate))
    return moments


def _drawn_prompts(shape: WorkloadShape, count: int, vocab: int, seed: int) -> list[tuple[int, ...]]:
    generator = _drawn(seed, "prompts")
    return [tuple(generator.choices(range(vocab), k=shape.prompt)) for _ in range(count)]


def _cut_prompts(shape: WorkloadShape, count: int, text: Sequence[int]) -> list[tuple[int, ...]]:
    whole = len(text) // shape.prompt
    if not whole:
        raise OptionError(f"prompts are {shape.prompt} tokens long, but the text has only {len(text)}")
    starts = (number % whole * shape.prompt for number in range(count))
    return [tuple(text[start : start + shape.prompt]) for start in starts]
