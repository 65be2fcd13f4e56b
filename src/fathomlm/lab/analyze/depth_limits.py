"""A model with fewer recursions than it has (thesis 4.6.3 "Test-time Scaling Analysis"): its loss and its cost at every
maximum depth.

Routed models decide causally, as in use: a token goes as deep as its router says, and no deeper than the limit. Without a
router, a limit is the depth of all tokens.

Shapes: B rows, T tokens of a row, M hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.token_rows import TokenRows
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, RoutingTrace
from fathomlm.model.route.trace import RoutingMeter
from fathomlm.train.losses.head import default_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthLimit:
    """Inference with at most so many recursions."""

    max_depth: int
    loss: float
    """Next-token loss in nats."""
    mean_depth: float
    running: list[float]
    """The part of the tokens that ran each recursion."""
    flops_per_token: int
    log_likelihood: list[float]
    """By position: the sum of log p of all tokens up to there, in nats, averaged over rows."""


class LimitedPasses:
    """Makes passes with one maximum depth, and adds up what they did."""

    def __init__(self, model: FathomForCausalLM, depth: int, context: int) -> None:
        self.depth = depth
        routing, device = model.plan.routing, model.decoder.embed.weight.device
        self.meter = None if routing is None else RoutingMeter(routing, context, device)
        self._model = model
        self._losses_T = torch.zeros(context, dtype=torch.float64, device=device)
        self._rows = 0

    def run(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, RoutingTrace]:
        """The losses of a pass, and what its routers decided; nothing without routers."""
        trace, decoder = RoutingTrace(), self._model.decoder
        hidden_BTM = decoder(tokens_BT, control=DepthControl(max_depth=self.depth), trace=trace)
        losses_BT = token_losses(decoder, hidden_BTM, targets_BT)
        self._losses_T += losses_BT.sum(0, dtype=torch.float64)
        self._rows += losses_BT.shape[0]
        if self.meter is not None:
            self.meter.add(trace)
        return losses_BT, trace

    def read(self) -> DepthLimit:
        losses_T = self._losses_T.cpu() / self._rows
        loss = float(losses_T.mean())
        check_finite(loss)
        running = self.meter.running() if self.meter is not None else self._whole()
        return DepthLimit(
            max_depth=self.depth,
            loss=loss,
            mean_depth=sum(running),
            running=running,
            flops_per_token=flops_per_token(self._model, len(losses_T), running),
            log_likelihood=(-losses_T.cumsum(0)).tolist(),
        )

    def _whole(self) -> list[float]:
        return [float(recursion < self.depth) for recursion in range(self._model.plan.recursions)]


@torch.inference_mode()
def measure_limits(model: FathomForCausalLM, rows: TokenRows, *, on_rows: OnProgress = unwatched) -> list[DepthLimit]:
    """A model at each maximum depth, the last of which is no limit; a plain model has this one only. `on_rows` is called
    with (done, total)."""
    limits = [LimitedPasses(model, depth, rows.context) for depth in range(1, model.plan.recursions + 1)]
    done = 0
    for tokens_BT, targets_BT in rows.batches(model.decoder.embed.weight.device):
        for limit in limits:
            limit.run(tokens_BT, targets_BT)
        done += tokens_BT.shape[0]
        on_rows(done, len(rows))
    return [limit.read() for limit in limits]


def token_losses(decoder: Decoder, hidden_BTM: Tensor, targets_BT: Tensor) -> Tensor:
    """The next-token loss at each place, in nats and float32; so many logits at once as the device bears."""
    chunk = default_chunk(hidden_BTM.device.type, decoder.architecture.vocab)
    parts = [
        F.cross_entropy(decoder.logits(hidden).float(), targets, reduction="none")
        for hidden, targets in zip(
            torch.split(hidden_BTM.flatten(0, 1), chunk), torch.split(targets_BT.flatten(), chunk), strict=True
        )
    ]
    return torch.cat(parts).view_as(targets_BT)


def check_finite(loss: float) -> None:
    if not math.isfinite(loss):
        raise OptionError("the model's loss on this text is not finite; try --dtype float32, or another checkpoint")


def flops_per_token(model: FathomForCausalLM, context: int, running: Sequence[float] | None = None) -> int:
    """Forward FLOPs, by the capacities or by the part of the tokens that ran each recursion."""
    cost = count(model.architecture, model.plan, relaxation=model.relaxation, context=context, capacity=running)
    return cost.forward_flops_per_token
