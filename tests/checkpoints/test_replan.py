"""The same weights under another plan: what stays is bit for bit what it was, what is new is drawn from a seed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import KV, LLAMA, LOOPS, ROUTERS, model_of, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LOOPED = LOOPS["middle"]
LORA = build_relaxation(LLAMA.linears(), "lora", 2)
TOKENS = some_tokens(2, 10)


@torch.inference_mode()
def logits(model: FathomForCausalLM) -> Tensor:
    return model(TOKENS).logits


def weights(model: FathomForCausalLM) -> dict[str, Tensor]:
    return dict(model.decoder.named_parameters())


def split(model: FathomForCausalLM) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Routers, and the rest."""
    found = weights(model)
    routers = {name: value for name, value in found.items() if name.startswith("routers.")}
    return routers, {name: value for name, value in found.items() if name not in routers}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_is_added_and_nothing_else_changes(router: str) -> None:
    model = model_of(LOOPED, LORA)
    before = {name: value.detach().clone() for name, value in weights(model).items()}
    plan = routed(router)
    given = replan(model, plan, seed=5)
    routers, rest = split(given)
    assert (given.plan, given.relaxation, given.config.exit_rank) == (plan, LORA, 0)
    assert not given.training
    assert rest.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in rest.items())
    assert plan.routing is not None
    assert sum(value.numel() for value in routers.values()) == plan.routing.parameters(24)
    for name, value in routers.items():
        assert value.isfinite().all()
        assert bool(value.any()) == (name != "routers.bias")
        assert value.requires_grad == (name != "routers.bias")
        assert (value.dtype, value.device) == (torch.float32, torch.device("cpu"))
    assert logits(given).isfinite().all()


@pytest.mark.parametrize("router", ["expert", "expert, aux router", "expert, mlp", "token"])
def test_fresh_routers_follow_the_seed(router: str) -> None:
    first, again, other = (split(replan(model_of(LOOPED), routed(router), seed=seed))[0] for seed in (1, 1, 2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
    together = [value.flatten() for value in first.values()]
    assert all(
        not torch.equal(one, two) for i, one in enumerate(together) for two in together[:i] if one.shape == two.shape
    ), "no two routers begin alike"


def test_fresh_routers_have_the_models_own_spread() -> None:
    model = model_of(LOOPED)
    for spread in (0.02, 0.2):
        model.config.initializer_range = spread
        routers, _ = split(replan(model, routed("expert, wide")))
        values = torch.cat([value.flatten() for value in routers.values()])
        assert float(values.detach().std()) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", ["expert", "token, loss-free"])
def test_a_router_taken_away_again_leaves_the_model_as_it_was(router: str, kv: str) -> None:
    model = model_of(LOOPED, LORA)
    before = logits(model)
    given = replan(model, routed(router, kv))
    assert not torch.allclose(logits(given), before, atol=1e-3)
    back = replan(given, LOOPED)
    assert back.plan == LOOPED
    assert back.decoder.routers is None
    assert torch.equal(logits(back), before)


def test_trained_routers_stay_where_they_fit() -> None:
    model = model_of(routed("expert"))
    trained = {name: value.detach().clone() for name, value in split(model)[0].items()}
    for plan in (routed("expert", "hybrid"), routed("expert", capacity=[1.0, 0.5, 0.2]), routed("expert", alpha=0.7)):
        routers, _ = split(replan(model, plan, seed=9))
        assert all(torch.equal(value, trained[name]) for name, value in routers.items())
    beside, _ = split(replan(model, routed("expert, aux router"), seed=9))
    assert all(torch.equal(beside[name], value) for name, value in trained.items())
    assert all(value.isfinite().all() and value.any() for value in beside.values())
    other, _ = split(replan(model, routed("token"), seed=9))
    assert [tuple(value.shape) for value in other.values()] == [(3, 24)]
    assert not torch.equal(other["routers.main.0.out.weight"][0], trained["routers.main.0.out.weight"][0])


def test_the_same_plan_is_the_same_model() -> None:
    model = model_of(routed())
    assert replan(model, model.plan) is model


@pytest.mark.parametrize("kv", KV)
def test_routers_of_a_new_plan_survive_saving(kv: str, tmp_path: Path) -> None:
    given = replan(model_of(LOOPED), routed("token, loss-free", kv), seed=3)
    save(given, tmp_path / "given")
    assert torch.equal(logits(load(tmp_path / "given")), logits(given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_new_has_the_dtype_of_the_rest(dtype: torch.dtype) -> None:
    given = replan(model_of(LOOPED).to(dtype), routed("expert, aux router"))
    assert {parameter.dtype for parameter in given.parameters()} == {dtype}
    exited = replan(model_of(LOOPED).to(dtype), LOOPED.with_exits((2,)), exit_rank=2)
    assert {parameter.dtype for parameter in exited.parameters()} == {dtype}


def test_exits_are_put_on_and_taken_off() -> None:
    model = model_of(LOOPED, LORA)
    before = logits(model)
    exited = replan(model, LOOPED.with_exits((2, 4)), exit_rank=3, seed=1)
    assert (exited.plan.exits, exited.config.exit_rank) == ((2, 4), 3)
    heads = {name: value for name, value in weights(exited).items() if name.startswith("exit_heads.")}
    assert set(heads) == {f"exit_heads.{index}.{part}" for index in (2, 4) for part in "ab"}
    assert all(bool(value.any()) == name.endswith(".a") for name, value in heads.items()), "a head starts as nothing"
    again, other = (replan(model, LOOPED.with_exits((2, 4)), exit_rank=3, seed=seed) for seed in (1, 2))
    assert torch.equal(again.decoder.exit_delta(2).a, exited.decoder.exit_delta(2).a)
    assert not torch.equal(other.decoder.exit_delta(2).a, exited.decoder.exit_delta(2).a)
    assert torch.equal(logits(exited), before)
    with torch.no_grad():
        exited.decoder.exit_delta(2).b.fill_(7.0)
    moved = replan(exited, LOOPED.with_exits((2, 3)), exit_rank=3)
    assert moved.decoder.exit_delta(2).b.unique().tolist() == [7.0]
    assert not moved.decoder.exit_delta(3).b.any()
    assert not replan(exited, LOOPED.with_exits((2,)), exit_rank=4).decoder.exit_delta(2).b.any()
    plain = replan(moved, LOOPED)
    assert torch.equal(logits(plain), before)
    assert weights(plain).keys() == weights(model).keys()


def test_tied_layers_are_one_module_still() -> None:
    given = replan(model_of(LOOPED), routed("expert", "share"))
    layers = given.decoder.unrolled()
    for one in given.plan:
        for other in given.plan:
            assert (layers[one.index] is layers[other.index]) == (one.layer == other.layer)
    assert sum(p.numel() for p in given.parameters()) == sum(
        math.prod(p.shape) for p in {id(p): p for p in given.parameters()}.values()
    )
