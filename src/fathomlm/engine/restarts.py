"""A broken engine, built again from the model that is still in memory."""

from __future__ import annotations

import gc
import traceback
from collections import deque
from dataclasses import dataclass

import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.engine.engine import Engine, Totals
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import is_int, is_number, require
from fathomlm.model.hub import FathomForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often an engine may be built again. Beyond that something is wrong that building again does not mend."""

    most: int = 3
    """Times within a window; 0 is never."""
    within: float = 600.0
    """Seconds of the window, counted back from now."""

    def __post_init__(self) -> None:
        require(is_int(self.most) and self.most >= 0, "restarts", "an integer >= 0", self.most)
        seconds = is_number(self.within) and self.within > 0
        require(seconds, "the window of restarts", "a number of seconds above 0", self.within)


class Allowance:
    """What is left of a `Restarts`."""

    def __init__(self, limits: Restarts) -> None:
        self._limits = limits
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more is allowed; then it is taken. One that fails counts as well."""
        while self._taken and self._taken[0] <= now - self._limits.within:
            self._taken.popleft()
        if len(self._taken) >= self._limits.most:
            return False
        self._taken.append(now)
        return True


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What an engine was built from. It holds none of the engine's memory, which has to be free before it is built again."""

    model: FathomForCausalLM
    options: EngineOptions
    exiting: Exiting | None

    @classmethod
    def of(cls, engine: Engine) -> Blueprint:
        return cls(engine.model, engine.options, engine.runner.exiting)

    def build(self, totals: Totals) -> Engine:
        """One that goes on counting at `totals`. It has made a token: an engine that cannot is not ready."""
        gc.collect()
        if self.model.decoder.embed.weight.device.type == "cuda":
            torch.cuda.empty_cache()
        engine = Engine(self.model, self.options, exiting=self.exiting)
        engine.generate([[0]], max_new_tokens=1)
        engine.totals = totals
        return engine


def let_go(error: BaseException) -> None:
    """Clear what the calls behind an error still hold, the engine above all; where they were stays to be read."""
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        one = links.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            links += [one.__cause__, one.__context__]
