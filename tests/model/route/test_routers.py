"""Routers: their weights and scores, the draw of random routing, loss-free balancing."""

from __future__ import annotations

import pytest
import torch

from fathomlm.depth import Routing, build_routing
from fathomlm.depth.cost import count
from fathomlm.model.route import build_routers, draw
from model.route.small import LLAMA, LOOPS, ROUTERS, decoder_of, model_of, routed


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("router", ROUTERS)
def test_the_cost_counter_counts_the_weights_that_routers_have(router: str, loop: str) -> None:
    plan = routed(router, loop=loop)
    decoder = decoder_of(plan)
    assert decoder.routers is not None
    held = sum(p.numel() for p in decoder.routers.parameters())
    cost = count(LLAMA, plan)
    assert plan.routing is not None
    assert held == plan.routing.parameters(24) == cost.router_parameters
    assert sum(p.numel() for p in decoder.parameters()) == cost.non_embedding_parameters + cost.embedding_parameters


def test_no_routing_no_routers() -> None:
    assert build_routers(24, None) is None
    assert not any("routers" in name for name, _ in decoder_of(LOOPS["middle"]).named_parameters())


@pytest.mark.parametrize(("kind", "score"), [("expert", "sigmoid"), ("expert", "tanh"), ("token", "sigmoid")])
def test_scores_by_hand(kind: str, score: str) -> None:
    x = torch.randn(2, 5, 24)
    routers = build_routers(24, build_routing(kind, 3, score=score))
    logits = routers.logits(1, x) if kind == "expert" else routers.depth_logits(x)
    weight = routers.main[1 if kind == "expert" else 0].out.weight
    by_hand = x @ weight.T
    torch.testing.assert_close(logits, by_hand[..., 0] if kind == "expert" else by_hand)
    torch.testing.assert_close(routers.score(logits), 1 / (1 + (-logits).exp()) if score == "sigmoid" else logits.tanh())


def test_softmax_scores_are_shares() -> None:
    routers = build_routers(24, build_routing("token", 3))
    logits = routers.depth_logits(torch.randn(2, 5, 24))
    torch.testing.assert_close(routers.score(logits), logits.exp() / logits.exp().sum(-1, keepdim=True))


@pytest.mark.parametrize(("network", "width"), [("mlp", 24), ("wide", 96)])
def test_networks_have_a_gelu_between(network: str, width: int) -> None:
    x = torch.randn(2, 5, 24)
    router = build_routers(24, build_routing("expert", 3, network=network)).main[2]
    assert router.inner.weight.shape == (width, 24)
    inner = x @ router.inner.weight.T
    expected = inner * 0.5 * (1 + torch.erf(inner / 2**0.5)) @ router.out.weight.T
    torch.testing.assert_close(router(x), expected)


def test_scores_are_float32_under_autocast_and_in_narrow_models() -> None:
    routers = build_routers(24, build_routing("expert", 3)).to(torch.bfloat16)
    x = torch.randn(2, 5, 24).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        logits = routers.logits(0, x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (x.float() @ routers.main[0].out.weight.float().T)[..., 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", ["linear", "mlp"])
def test_gradients_are_those_of_the_same_maps_in_float32(network: str, dtype: torch.dtype) -> None:
    """A router keeps its input as it is for the backward pass, so it says for itself what the gradients are."""
    router = build_routers(24, build_routing("token", 3, network=network)).main[0]
    weights = [parameter.detach().clone().requires_grad_() for parameter in router.parameters()]
    x = torch.randn(2, 5, 24).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    weigh = torch.randn(2, 5, 3)
    (router(x) * weigh).sum().backward()
    inner = wide if network == "linear" else torch.nn.functional.gelu(wide @ weights[0].T)
    (inner @ weights[-1].T * weigh).sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, wide.grad.to(dtype))
    for parameter, expected in zip(router.parameters(), weights, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_an_auxiliary_router_judges_beside_the_main_one() -> None:
    routers = build_routers(24, build_routing("expert", 3, sampling="aux_router"))
    x = torch.randn(2, 5, 24, requires_grad=True)
    logits = routers.logits(1, x)
    judged = routers.judge(1, x, logits)
    torch.testing.assert_close(judged, routers.aux[1](x)[..., 0])
    judged.sum().backward()
    assert x.grad is None
    alone = build_routers(24, build_routing("expert", 3))
    assert alone.judge(1, x, logits) is logits


def test_balancing_moves_the_bias_against_the_load() -> None:
    routers = build_routers(24, build_routing("token", 3, balancing="loss_free"))
    assert routers.bias is not None
    assert not routers.bias.requires_grad
    routers.reset_parameters()
    routers.balance(torch.tensor([7.0, 3.0, 5.0]), 0.001)
    torch.testing.assert_close(routers.bias.data, torch.tensor([-0.001, 0.001, 0.0]))
    routers.balance(torch.tensor([7.0, 3.0, 2.0]), 0.5)
    torch.testing.assert_close(routers.bias.data, torch.tensor([-0.501, 0.501, 0.5]))
    routers.reset_parameters()
    assert not routers.bias.any()
    plain = build_routers(24, build_routing("token", 3))
    plain.balance(torch.tensor([7.0, 3.0, 5.0]), 0.001)
    assert plain.bias is None


def test_fresh_routers_are_small_and_the_bias_is_nothing() -> None:
    decoder = model_of(routed("token, loss-free")).decoder
    decoder.reset_parameters(std=0.02)
    assert not decoder.routers.bias.any()
    assert 0.01 < float(decoder.routers.main[0].out.weight.detach().std()) < 0.03


# --- random routing ------------------------------------------------------------------------------------------------

POSITIONS = torch.arange(20_000)[None]


@pytest.mark.parametrize("recursion", [0, 1, 2, 3, 7])
def test_the_draw_is_even(recursion: int) -> None:
    drawn = draw(POSITIONS, recursion)[0]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.002)
    for threshold in (0.1, 1 / 3, 0.5, 2 / 3, 0.9):
        assert float((drawn >= threshold).double().mean()) == pytest.approx(1 - threshold, abs=0.015)
    counts = torch.histc(drawn.float(), 50, 0, 1)
    assert float(((counts - 400) ** 2 / 400).sum()) < 100, "chi-squared, 49 degrees of freedom"


def test_draws_of_neighbours_and_of_recursions_have_nothing_to_do_with_each_other() -> None:
    first, second = draw(POSITIONS, 0)[0], draw(POSITIONS, 1)[0]

    def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack((a, b)))[0, 1])

    assert abs(correlation(first, second)) < 0.03
    for lag in (1, 2, 3, 64):
        assert abs(correlation(first[:-lag], first[lag:])) < 0.03
    assert not torch.isin(first[:1000], second[:1000]).all()


def test_the_draw_knows_the_position_only() -> None:
    alone = draw(torch.tensor([[5]]), 1)
    shuffled = torch.randperm(100)
    together = draw(torch.stack((shuffled, torch.arange(100))), 1)
    assert together[1, 5] == together[0, int((shuffled == 5).nonzero())] == alone[0, 0]
    assert torch.equal(draw(POSITIONS.int(), 2), draw(POSITIONS, 2))
    assert draw(torch.tensor([[2**31 - 1]]), 3).isfinite().all()


def test_shares_of_random_inference_follow_the_capacity() -> None:
    """A chain of draws: 2/3 of all go on, then half of those, so that a third is left."""
    routing: Routing = build_routing("expert", 3, random=True)
    second = draw(POSITIONS, 1) >= 1 - routing.capacity[1]
    third = second & (draw(POSITIONS, 2) >= 1 - routing.capacity[2] / routing.capacity[1])
    assert float(second.double().mean()) == pytest.approx(2 / 3, abs=0.015)
    assert float(third.double().mean()) == pytest.approx(1 / 3, abs=0.015)
