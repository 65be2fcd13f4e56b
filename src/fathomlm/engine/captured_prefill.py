"""Short prompts on a GPU: a forward pass over them is captured by its size, and replayed.

A pass over prompts is launched kernel by kernel, which takes the host longer than the device needs for a few hundred tokens
of a small model: an answer's first token waits for Python. So rows that stand for nothing are added until there are as many
as one of a few sizes, and the second pass of a size is captured; the first has compiled its kernels. Long passes and wide
layers keep the device busy by themselves, and are launched as they are: there, rows that stand for nothing would cost time.

Each recursion of a routed model then has as many rows as the pass, since nobody is asked how many tokens go on. That costs
the device time, and saves the host more than launches: who asks waits until the device has answered, and schedules nothing
meanwhile. So of a routed model long passes are captured, too, where the host would take longer than those rows do.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn

from fathomlm.depth import DepthPlan
from fathomlm.engine.captured_passes import CapturedPasses
from fathomlm.engine.device_state import PrefillBatch
from fathomlm.model.decoder import Decoder

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
LONG_SIZES = tuple(range(3072, 8193, 1024))
"""Of a routed model alone."""
LAUNCH_S = 150e-6
"""What a layer's kernels take the host to launch."""
SCHEDULE_S = 1e-6
"""What a token of a prompt takes the host beside launches."""
SPEED = {2: 4e14, 4: 5e13}
"""Multiplications and additions per second that a GPU reaches in prompts, by the bytes of a number."""


def sizes_for(decoder: Decoder) -> tuple[int, ...]:
    """Those in which a layer takes the device no longer than the host; of a routed model also long ones. Linears are counted
    by their sizes: weights in integers are no parameters."""
    widest = max(
        sum(part.in_features * part.out_features for part in layer.modules() if isinstance(part, nn.Linear))
        for layer in decoder.layers
    )
    row_s = 2 * widest / SPEED.get(decoder.embed.weight.element_size(), SPEED[4])
    short = tuple(size for size in SIZES if row_s * size <= LAUNCH_S)
    return max(short, _routed_sizes(decoder.plan, row_s), key=len)


def _routed_sizes(plan: DepthPlan, row_s: float) -> tuple[int, ...]:
    """Of a routed model: those in which rows that would have stopped, and half of what lies between two sizes, take the
    device no longer than the whole pass takes the host. `row_s` are seconds of the device for a row of a layer."""
    if plan.routing is None:
        return ()
    stopped = plan.core_layers * (plan.recursions - sum(plan.routing.capacity))
    found = []
    for before, size in pairwise((0, *SIZES, *LONG_SIZES)):
        for_nothing = row_s * (stopped * size + plan.unrolled_layers * (size - before) / 2)
        if for_nothing <= plan.unrolled_layers * LAUNCH_S + SCHEDULE_S * size:
            found.append(size)
    return tuple(found)


class CapturedPrefill(CapturedPasses):
    def __init__(self, run: Callable[[PrefillBatch], None], sizes: tuple[int, ...], *, captures: bool) -> None:
        """`run` is a program's prefill. Without `captures` rows are only added; what is run is what would be captured."""
        super().__init__(
            lambda columns_CN: run(PrefillBatch(*columns_CN, asks=columns_CN.shape[1] not in sizes)), captures=captures
        )
        self.sizes = sizes

    def size(self, tokens: int) -> int | None:
        """How many rows a pass over so many tokens has; None where it is run as it is."""
        return next((size for size in self.sizes if size >= tokens), None)
