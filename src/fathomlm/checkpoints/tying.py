"""Initialisations of tied layers: which base layers each looped layer starts from (thesis 3.3.2; 4 appendix).

stepwise  layers picked at even intervals, the first and last always among them
average   the mean of all base layers that the looped layer stands for
lower     the first layers           upper  the last layers
random    fresh weights; embeddings, head and layers kept apart stay pretrained
"""

from __future__ import annotations

from typing import Literal, get_args

from fathomlm.depth import DepthPlan
from fathomlm.depth.relaxation import RELAXATIONS
from fathomlm.depth.sharing import STRATEGIES, spread

Init = Literal["stepwise", "average", "lower", "upper", "random"]
NormInit = Literal["average", "choice", "zero"]
INITS: tuple[str, ...] = get_args(Init)
NORM_INITS: tuple[str, ...] = get_args(NormInit)
RELAX_INITS = tuple(dict.fromkeys(name for kind in RELAXATIONS.values() for name in kind.relax_inits))


def starting_layers(plan: DepthPlan, init: Init) -> list[tuple[int, ...]]:
    """For each unique layer, the base layers whose weights are averaged into it; none for a fresh start.

    Layers that are kept apart always start from the base layer in their own place.
    """
    ends = STRATEGIES[plan.sharing].kept_apart
    first, last, count = ends, plan.base_layers - 1 - ends, plan.core_layers
    core: list[tuple[int, ...]]
    if init == "average":
        core = [tuple(step.origin for step in plan.uses(ends + i)) for i in range(count)]
    elif init == "stepwise":
        core = [(layer,) for layer in spread(first, last, count)]
    elif init == "lower":
        core = [(first + i,) for i in range(count)]
    elif init == "upper":
        core = [(last - count + 1 + i,) for i in range(count)]
    else:
        core = [()] * count
    return [(0,), *core, (plan.base_layers - 1,)] if ends else core
