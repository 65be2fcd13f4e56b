"""What the routers of a model do on a text, in numbers (thesis 4.6.2 "Routing Analysis", 4.6.3 "Test-time Scaling
Analysis", and its appendix on router metrics).

Two passes see the same rows. The top-k pass is how expert-choice trains: each recursion keeps a fixed part of a row, which
it needs the whole row to choose. The causal pass is how a model is used: a score decides on each token by itself. Where
they differ in loss, the router has not learned to decide without the future. Token-choice has the causal pass only.

Shapes: B rows, T tokens of a row, M hidden width, R recursions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fathomlm.cli.display import pieces
from fathomlm.depth import DepthPlan
from fathomlm.depth.cost import count
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.depth_limits import DepthLimit, LimitedPasses, check_finite, flops_per_token, token_losses
from fathomlm.lab.analyze.routing_meters import (
    DepthGain,
    GainMeter,
    ScoreCounts,
    ScoreHistogram,
    TokenDepth,
    TokenDepths,
    threshold,
    token_scores,
)
from fathomlm.lab.common import OnProgress, unwatched, without
from fathomlm.lab.token_rows import TokenRows
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl, Routers, RoutingTrace
from fathomlm.model.route.trace import RoutingMeter

SHOWN = 120
"""Tokens of each sample text."""
SEEN = 10
"""How often a token must occur to be named among the deepest or shallowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingFlops:
    """Forward FLOPs per token, by the thesis' rules (`fathomlm inspect`)."""

    nominal: int
    """As the capacities say."""
    actual: int
    """As the causal pass did."""
    unrouted: int
    """Every token at full depth, with keys and values of its own at each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A token of a sample text."""

    token: int
    text: str
    """What it adds to the text; empty where it ends within a character."""
    depth: int
    """Recursions that ran at its place, to predict the token behind it."""
    scores: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingNumbers:
    """All that was measured."""

    rows: int
    context: int
    router: str
    capacity: list[float]
    top_k: dict[str, float] | None
    """`RoutingMeter`'s metrics of the top-k pass; None for token-choice."""
    causal: dict[str, float]
    top_k_loss: float | None
    causal_loss: float
    flops: RoutingFlops
    threshold: float | None
    """The score from which on the causal rule lets a token go on; None where no score decides."""
    histograms: list[ScoreHistogram]
    scaling: list[DepthLimit]
    gain: DepthGain
    """Whether depth is spent where it lowers the loss."""
    seen: int
    deepest: list[TokenDepth]
    shallowest: list[TokenDepth]
    samples: list[list[ShownToken]]

    @property
    def loss_difference(self) -> float | None:
        """How much causal decisions cost, in nats."""
        return None if self.top_k_loss is None else self.causal_loss - self.top_k_loss

    def depth_shares(self) -> dict[int, float]:
        """The part of the tokens at each depth in the causal pass; depth 0 only where a token ran no recursion."""
        ran = [1.0, *self.scaling[-1].running, 0.0]
        shares = {depth: ran[depth] - ran[depth + 1] for depth in range(len(ran) - 1)}
        return {depth: share for depth, share in shares.items() if depth or share > 1e-9}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"loss_difference": self.loss_difference}

    def summary(self) -> dict[str, Any]:
        """Without what only plots need: curves, histograms, samples."""
        plotted = ("histograms", "samples", "deepest", "shallowest", "seen", "log_likelihood")
        found: dict[str, Any] = without(self.to_dict(), plotted)
        return found


def check_routed(plan: DepthPlan | None, source: str) -> None:
    """Refuse a model without a router, and say where routers come from."""
    if plan is None or plan.routing is None:
        raise OptionError(
            f"{source} has no router: each of its tokens runs every step. `fathomlm convert {source} OUT --router expert` "
            "gives it one to uptrain, `fathomlm train tiny-mor` trains a small routed model"
        )


@torch.inference_mode()
def measure(
    model: FathomForCausalLM,
    rows: TokenRows,
    *,
    samples: int = 4,
    seen: int = SEEN,
    on_rows: OnProgress = unwatched,
) -> RoutingNumbers:
    """Run all rows through both passes, and through the causal one at every maximum depth and at given depths.

    `on_rows` is called with (done, total).
    """
    decoder, routers = model.decoder, model.decoder.routers
    assert isinstance(routers, Routers)
    routing, device = routers.routing, decoder.embed.weight.device
    expert = routing.method.picks_tokens
    top_k = RoutingMeter(routing, rows.context, device)
    top_k_sum, counts = 0.0, ScoreCounts(routers, device)
    limits = [LimitedPasses(model, depth, rows.context) for depth in range(1, routing.recursions + 1)]
    depths, gain = TokenDepths(model.architecture.vocab), GainMeter(routing.recursions)
    shown: list[list[ShownToken]] = []
    done = 0
    for tokens_BT, targets_BT in rows.batches(device):
        if expert:
            trace = RoutingTrace()
            (state_BTM,) = decoder.states(tokens_BT, trace=trace).values()
            top_k_sum += float(token_losses(decoder, decoder.norm(state_BTM), targets_BT).sum(dtype=torch.float64))
            top_k.add(trace)
            counts.add(trace)
        losses: list[Tensor] = []
        for limit in limits:
            losses_BT, trace = limit.run(tokens_BT, targets_BT)
            losses.append(losses_BT)
        # The last of them had no limit: it is the causal pass.
        depths.add(tokens_BT, trace)
        assert trace.depths_BT is not None
        gain.add(partial(_losses_at, decoder, tokens_BT, targets_BT), trace.depths_BT, losses[0], losses[-1])
        if not expert:
            counts.add(trace)
        left = tokens_BT[: samples - len(shown), :SHOWN].tolist()
        shown += [_shown(routers, rows.tokenizer, tokens, trace, row) for row, tokens in enumerate(left)]
        done += tokens_BT.shape[0]
        on_rows(done, len(rows))
    scaling = [limit.read() for limit in limits]
    check_finite(top_k_sum)
    deepest, shallowest = depths.read(rows.tokenizer, seen)
    tokens, causal = len(rows) * rows.context, limits[-1].meter
    assert causal is not None
    return RoutingNumbers(
        rows=len(rows),
        context=rows.context,
        router=routing.kind,
        capacity=list(routing.capacity),
        top_k=_metrics(top_k) if expert else None,
        # By the causal rule all causal decisions are right; only the top-k pass says how often the rule agrees with it.
        causal={name: value for name, value in _metrics(causal).items() if name != "sampling_accuracy"},
        top_k_loss=top_k_sum / tokens if expert else None,
        causal_loss=scaling[-1].loss,
        flops=RoutingFlops(
            nominal=flops_per_token(model, rows.context),
            actual=scaling[-1].flops_per_token,
            unrouted=_unrouted_flops(model, rows.context),
        ),
        threshold=threshold(routers),
        histograms=counts.read(),
        scaling=scaling,
        gain=gain.read(),
        seen=seen,
        deepest=deepest,
        shallowest=shallowest,
        samples=shown,
    )


def _losses_at(decoder: Decoder, tokens_BT: Tensor, targets_BT: Tensor, control: DepthControl) -> Tensor:
    return token_losses(decoder, decoder(tokens_BT, control=control), targets_BT)


def _metrics(meter: RoutingMeter) -> dict[str, float]:
    """The meter's, with the tokens that no recursion took as load_0, where the first one may turn tokens away."""
    found = meter.read()
    if not meter.routing.method.takes_all_first(meter.routing):
        loads = (found[f"load_{depth}"] for depth in range(1, meter.routing.recursions + 1))
        found["load_0"] = max(0.0, 1 - sum(loads))
    return found


def _unrouted_flops(model: FathomForCausalLM, context: int) -> int:
    plan = model.plan.with_kv("cache").with_routing(None)  # in this order: hybrid entries exist under a router only
    return count(model.architecture, plan, relaxation=model.relaxation, context=context).forward_flops_per_token


def _shown(routers: Routers, tokenizer: Any, tokens: list[int], trace: RoutingTrace, row: int) -> list[ShownToken]:
    assert trace.depths_BT is not None
    depths = trace.depths_BT[row].tolist()
    return [
        ShownToken(token=token, text=text, depth=depths[at], scores=token_scores(routers, trace, row, at))
        for at, (token, text) in enumerate(zip(tokens, pieces(tokenizer, tokens), strict=True))
    ]
