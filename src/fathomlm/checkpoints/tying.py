"""Initialisations of tied layers: which base layers each looped layer starts from (thesis 3.3.2; 4 appendix).

stepwise  layers picked at even intervals, the first and last always among them
average   the mean of all base layers that the looped layer stands for
lower     the first layers           upper  the last layers
random    fresh weights; embeddings, head and layers kept apart stay pretrained
influence the layers that change the residual stream most; requires calibration text
aligned   as average, feed-forward neurons matched first and weights averaged by the activations they meet; requires it too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fathomlm.depth import DepthPlan
from fathomlm.depth.dropping import most_influential
from fathomlm.depth.relaxation import RELAXATIONS
from fathomlm.depth.sharing import spread
from fathomlm.options import option

Init = Literal["stepwise", "average", "lower", "upper", "random", "influence", "aligned"]
NormInit = Literal["average", "choice", "zero"]
INITS: tuple[str, ...] = get_args(Init)
MEANS = ("average", "aligned")
"""Inits that make one layer of several."""
CALIBRATED = {"init": ("influence", "aligned"), "relax-init": ("aware",)}
"""What requires calibration text."""
WEIGHTS_ONLY = tuple(init for init in INITS if init not in ("random", *CALIBRATED["init"]))
"""Inits that follow from the base's weights alone."""
CALIBRATION_TOKENS = 16_384
"""Ten for each direction of an input that is 1,600 wide."""
NORM_INITS: tuple[str, ...] = get_args(NormInit)
RELAX_INITS = tuple(dict.fromkeys(name for kind in RELAXATIONS.values() for name in kind.relax_inits))


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Where tied layers and what steps add start from."""

    init: str | None = option(
        None, choices=INITS, help="initialization of tied layers",
        default_text="average with lora and dora, otherwise stepwise, or influence with --calibrate",
    )  # fmt: skip
    norm_init: str | None = option(
        None, choices=NORM_INITS, help="initialization of norms with --init average or aligned", default_text="average"
    )
    relax_init: str | None = option(
        None, choices=RELAX_INITS, default_text="svd; with --calibrate aware",
        help="lora, dora: towards the original weights (svd) or outputs (aware, with --calibrate), or zero",
    )  # fmt: skip


def starting_layers(plan: DepthPlan, init: Init, influence: Sequence[float] = ()) -> list[tuple[int, ...]]:
    """For each unique layer, the base layers whose weights are averaged into it; none for a fresh start.

    Layers that are kept apart always start from the base layer in their own place. `influence` of each base layer is for
    the init of that name.
    """
    prelude, coda = plan.ends
    first, last, count = prelude, plan.base_layers - 1 - coda, plan.core_layers
    core: list[tuple[int, ...]]
    if init in MEANS:
        core = [tuple(step.origin for step in plan.uses(prelude + i)) for i in range(count)]
    elif init == "stepwise":
        core = [(layer,) for layer in spread(first, last, count)]
    elif init == "lower":
        core = [(first + i,) for i in range(count)]
    elif init == "upper":
        core = [(last - count + 1 + i,) for i in range(count)]
    elif init == "influence":
        core = [(layer,) for layer in most_influential(range(first, last + 1), count, influence)]
    else:
        core = [()] * count
    return [*((i,) for i in range(prelude)), *core, *((last + 1 + i,) for i in range(coda))]
