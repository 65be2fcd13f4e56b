"""A failed engine, built again from the model that is still in memory."""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass

import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.engine.engine import Engine
from fathomlm.engine.heap import collect_heap
from fathomlm.engine.options import EngineOptions, RestartPolicy
from fathomlm.engine.slot_records import Totals
from fathomlm.model.seq2seq import FathomModel


class RestartBudget:
    """What is left of a `RestartPolicy`."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more is allowed; then it is taken. One that fails counts as well."""
        while self._taken and self._taken[0] <= now - self._policy.restart_window:
            self._taken.popleft()
        if len(self._taken) >= self._policy.max_restarts:
            return False
        self._taken.append(now)
        return True


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What an engine was built from. It holds none of the engine's memory, which has to be free before it is built again."""

    model: FathomModel
    options: EngineOptions
    exiting: Exiting | None

    @classmethod
    def of(cls, engine: Engine) -> Blueprint:
        return cls(engine.model, engine.options, engine.runner.exiting)

    def build(self, totals: Totals) -> Engine:
        """One that goes on counting at `totals`. It has generated a token: an engine that cannot is not ready."""
        collect_heap()
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
