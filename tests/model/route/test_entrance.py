"""Entering a recursion and coming back has the meaning, and the gradients, of gathering, scattering and a plain product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fathomlm.depth import build_routing
from fathomlm.model.route.entrance import pick
from fathomlm.model.route.expert import ExpertRouters

B, T, N, M = 3, 7, 4, 24
NETWORKS = ["linear", "mlp"]
DTYPES = [torch.float32, torch.bfloat16]


def setting(network: str, dtype: torch.dtype) -> tuple[ExpertRouters, Tensor, Tensor]:
    """Routers, a stream, and the same stream wide."""
    torch.manual_seed(0)
    routers = ExpertRouters(M, build_routing("expert", 3, network=network))
    x = torch.randn(B, T, M).to(dtype).requires_grad_()
    return routers, x, x.detach().float().requires_grad_()


def plain_logits(routers: ExpertRouters, wide: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The router's product, and copies of its weights to look for gradients in."""
    weights = [parameter.detach().clone().requires_grad_() for parameter in routers.main[1].parameters()]
    inner = wide if len(weights) == 1 else torch.nn.functional.gelu(wide @ weights[0].T)
    return (inner @ weights[-1].T)[..., 0], weights


def check_gradients(routers: ExpertRouters, x: Tensor, wide: Tensor, weights: list[Tensor]) -> None:
    assert x.grad is not None
    assert wide.grad is not None
    assert x.grad.dtype == x.dtype
    near = {} if x.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2 * float(wide.grad.abs().max())}
    torch.testing.assert_close(x.grad.float(), wide.grad, **near)
    for parameter, expected in zip(routers.main[1].parameters(), weights, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad, **near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_all_tokens_enter(network: str, dtype: torch.dtype) -> None:
    routers, x, wide = setting(network, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        entered = routers.enter(1, x, routers.seen(1, x), None)
    assert torch.equal(entered.taken, x)
    assert torch.equal(entered.stays, x)
    assert (entered.taken.dtype, entered.logits.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(entered.logits, routers.logits(1, x))
    out = entered.taken.float().square().sum() + entered.stays.float().sin().sum() + (entered.logits * 3).sin().sum()
    out.backward()
    logits, weights = plain_logits(routers, wide)
    (wide.square().sum() + wide.sin().sum() + (logits * 3).sin().sum()).backward()
    check_gradients(routers, x, wide, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_some_tokens_enter_and_come_back(network: str, dtype: torch.dtype) -> None:
    routers, x, wide = setting(network, dtype)
    seen = routers.seen(1, x)
    picked = routers.pick(seen, None, N)
    entered = routers.enter(1, x, seen, picked)
    at = picked.at_BN[..., None].expand(-1, -1, M)
    assert torch.equal(entered.taken, x.gather(1, at))
    new = entered.taken.sin() + entered.stays * 2
    back = routers.rejoin(entered, picked, new)
    assert torch.equal(back, x.scatter(1, at, new))
    (back.float().square().sum() + (entered.logits * 3).sin().sum()).backward()
    logits, weights = plain_logits(routers, wide)
    taken = wide.gather(1, at)
    (wide.scatter(1, at, taken.sin() + taken * 2).square().sum() + (logits * 3).sin().sum()).backward()
    check_gradients(routers, x, wide, weights)


@pytest.mark.parametrize("network", NETWORKS)
def test_recursions_inside_one_another(network: str) -> None:
    """Taken from what was taken, put back in reverse, as a routed core does."""
    routers, x, wide = setting(network, torch.float32)
    stream, left = x, []
    for count in (5, 2):
        seen = routers.seen(1, stream)
        picked = routers.pick(seen, None, count)
        entered = routers.enter(1, stream, seen, picked)
        left.append((entered, picked))
        stream = entered.taken.cos() * entered.logits.gather(1, picked.at_BN)[..., None] + entered.stays
    for entered, picked in reversed(left):
        stream = routers.rejoin(entered, picked, stream)
    stream.square().sum().backward()
    _, weights = plain_logits(routers, wide)
    plain, befores = wide, []
    for _, picked in left:
        inner = plain if len(weights) == 1 else torch.nn.functional.gelu(plain @ weights[0].T)
        logits = (inner @ weights[-1].T)[..., 0]
        at = picked.at_BN[..., None].expand(-1, -1, M)
        befores.append((plain, at))
        taken = plain.gather(1, at)
        plain = taken.cos() * logits.gather(1, picked.at_BN)[..., None] + taken
    for before, at in reversed(befores):
        plain = before.scatter(1, at, plain)
    plain.square().sum().backward()
    torch.testing.assert_close(stream, plain)
    check_gradients(routers, x, wide, weights)


def test_the_highest_are_picked_in_their_order_and_padding_last() -> None:
    rank = torch.tensor([[0.1, 0.9, 0.5, 0.7, 0.3], [5.0, 1.0, 2.0, 4.0, 3.0]])
    picked = pick(rank, None, 3)
    assert picked.at_BN.tolist() == [[1, 2, 3], [0, 3, 4]]
    assert picked.flat.tolist() == [1, 2, 3, 5, 8, 9]
    assert picked.place_BT.tolist() == [[-1, 0, 1, 2, -1], [0, -1, -1, 1, 2]]
    keep = torch.tensor([[True, False, True, True, True], [False, False, False, True, True]])
    picked = pick(rank, keep, 3)
    assert picked.at_BN[0].tolist() == [2, 3, 4]
    assert {3, 4} < set(picked.at_BN[1].tolist())
