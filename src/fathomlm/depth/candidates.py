"""Plans of one model that fit a byte budget, for comparison: dropped layers, loops, and loops with LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fathomlm.depth.architecture import Architecture
from fathomlm.depth.cost import Cost, count
from fathomlm.depth.dropping import kept_layers
from fathomlm.depth.plan import DepthPlan
from fathomlm.depth.relaxation import Relaxation, build_relaxation
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.errors import OptionError

MOST_LOOPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    options: str
    """What `fathomlm convert` is given for it."""
    cost: Cost

    def share(self, base: Cost) -> float:
        """Its part of the base's bytes, in the same number format."""
        return self.cost.parameters / base.parameters


def candidates(architecture: Architecture, budget: float, sharing: str = "cycle", context: int = 2048) -> list[Candidate]:
    """The fewest layers to drop, each number of loops that fits, and with it the highest rank that does."""
    limit = budget * count(architecture, DepthPlan.vanilla(architecture.layers)).parameters
    found = [*_dropped(architecture, limit, context), *_looped(architecture, limit, sharing, context)]
    if not found:
        raise OptionError(
            f"no plan has {budget:.0%} of the bytes: the embeddings alone are "
            f"{architecture.embedding_parameters / (limit / budget):.0%}"
        )
    return found


def _dropped(architecture: Architecture, limit: float, context: int) -> Iterator[Candidate]:
    for drop in range(architecture.layers):
        small = architecture.with_layers(kept_layers(architecture.layers, drop, "stepwise"))
        cost = count(small, DepthPlan.vanilla(small.layers), context=context)
        if cost.parameters <= limit:
            yield Candidate(options=f"--drop {drop}", cost=cost)
            return


def _looped(architecture: Architecture, limit: float, sharing: str, context: int) -> Iterator[Candidate]:
    core = architecture.layers - 2 * STRATEGIES[sharing].kept_apart
    for loops in (loops for loops in range(2, MOST_LOOPS + 1) if core > 0 and core % loops == 0):
        plan = DepthPlan.build(sharing, loops, architecture.layers)
        tied = count(architecture, plan, context=context)
        options = f"--recursions {loops}" if sharing == "cycle" else f"--sharing {sharing} --recursions {loops}"
        if tied.parameters > limit:
            continue
        yield Candidate(options=options, cost=tied)
        widest = max(min(linear.inputs, linear.outputs) for linear in architecture.linears())
        low, high = 0, widest
        while low < high:  # the highest rank that fits
            middle = (low + high + 1) // 2
            fits = count(architecture, plan, relaxation=_lora(architecture, middle)).parameters <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            cost = count(architecture, plan, relaxation=_lora(architecture, low), context=context)
            yield Candidate(options=f"{options} --relax lora --rank {low}", cost=cost)


def _lora(architecture: Architecture, rank: int) -> Relaxation | None:
    return build_relaxation(architecture.linears(), "lora", rank)
