"""Conversion with a router: a plain model is tied and routed, a recursive one is only given its router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import describe
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.errors import FathomError, OptionError
from fathomlm.model.hub import FathomForCausalLM
from parity.families import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.arange(3, 23).view(2, 10)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "plain"
    tiny("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def looped(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "looped"
    save(fathomlm.convert(plain, recursions=3, relax="lora", rank=2), directory)
    return directory


def rest_of(model: FathomForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.decoder.named_parameters() if not name.startswith("routers.")}


def assert_only_routers_are_new(given: FathomForCausalLM, model: FathomForCausalLM) -> None:
    ours, theirs = rest_of(given), dict(model.decoder.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("source", ["directory", "model"])
def test_a_plain_model_is_tied_and_routed(source: str, plain: Path) -> None:
    base = plain if source == "directory" else fathomlm.load(plain)
    options: dict[str, Any] = {"sharing": "middle-cycle", "recursions": 2, "init": "average"}
    given = fathomlm.convert(base, **options, router="expert")
    assert given.plan.routing == build_routing("expert", 2, update="interpolate", alpha=2.0)
    assert given.plan.kv == "cache"
    assert describe(given) == "1+2+1 layers looped 2 times (middle-cycle, expert-choice router)"
    assert_only_routers_are_new(given, fathomlm.convert(plain, **options))
    assert given(TOKENS).logits.isfinite().all()


def test_token_choice_keeps_the_thesis_formula(plain: Path) -> None:
    given = fathomlm.convert(plain, recursions=3, router="token", kv="share")
    assert given.plan.routing == build_routing("token", 3)
    assert given.plan.kv == "share"
    assert describe(given) == "2 layers looped 3 times (cycle, token-choice router, shared KV)"


@pytest.mark.parametrize("extra", [{}, {"network": "mlp"}, {"sampling": "aux_router"}])
@pytest.mark.parametrize("looped", [False, True], ids=["from the plain model", "from the recursive one"])
def test_fresh_routers_give_the_recursive_model_back_to_the_last_bit(
    extra: dict[str, Any], looped: bool, plain: Path
) -> None:
    model = fathomlm.convert(plain, recursions=3)
    router = {"kind": "expert", **extra}
    given = fathomlm.convert(model, router=router) if looped else fathomlm.convert(plain, recursions=3, router=router)
    with torch.inference_mode():
        assert torch.equal(given(TOKENS).logits, model(TOKENS).logits)
        assert given.plan.routing is not None
        assert given.plan.routing.capacity[-1] < 1


def test_routers_that_start_open_learn(plain: Path) -> None:
    """All weights are zero, but not their gradients: scores weigh what a recursion adds."""
    given = fathomlm.convert(plain, recursions=3, router="expert")
    loss = given.decoder.states(TOKENS)[given.plan.unrolled_layers - 1].square().sum()
    loss.backward()
    assert all(router.out.weight.grad.abs().max() > 0 for router in given.decoder.routers.main)


def test_routers_that_are_there_keep_their_weights(plain: Path) -> None:
    given = fathomlm.convert(plain, recursions=3, router="expert")
    torch.nn.init.ones_(given.decoder.routers.main[1].out.weight)
    again = fathomlm.convert(given, kv="share")
    assert torch.equal(again.decoder.routers.main[1].out.weight, given.decoder.routers.main[1].out.weight)


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        ({"kind": "expert", "alpha": 0.5}, {"update": "interpolate", "alpha": 0.5}),
        ({"kind": "expert", "update": "add", "alpha": 0.3}, {"update": "add", "alpha": 0.3}),
        ({"kind": "expert", "update": "add"}, {"update": "add", "alpha": 0.1}),
        ({"kind": "expert"}, {"update": "interpolate", "alpha": 2.0}),
        (
            {"kind": "expert", "capacity": [1.0, 0.5, 0.25], "sampling": "aux_router", "network": "mlp", "score": "tanh"},
            {
                "update": "interpolate",
                "alpha": 1.0,
                "capacity": [1.0, 0.5, 0.25],
                "sampling": "aux_router",
                "network": "mlp",
                "score": "tanh",
            },
        ),
        ({"kind": "token", "balancing": "loss_free", "weighting": "last"}, {"balancing": "loss_free", "weighting": "last"}),
    ],
)
def test_options_of_a_router(router: dict[str, Any], expected: dict[str, Any], plain: Path) -> None:
    asked = dict(router)
    given = fathomlm.convert(plain, recursions=3, router=router, kv="hybrid")
    assert given.plan.routing == build_routing(router["kind"], 3, **expected)
    assert given.plan.kv == "hybrid"
    assert router == asked, "what was given is left as it was"


def test_routers_follow_the_seed(plain: Path) -> None:
    router = {"kind": "expert", "update": "add"}
    first, again, other = (fathomlm.convert(plain, recursions=2, router=router, seed=seed) for seed in (1, 1, 2))
    ours, same, theirs = (model.decoder.routers.main[1].out.weight for model in (first, again, other))
    assert torch.equal(ours, same)
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("source", ["directory", "model"])
@pytest.mark.parametrize("options", [{"router": "expert", "kv": "hybrid"}, {"router": "token"}, {"kv": "share"}])
def test_a_recursive_model_is_only_given_what_is_asked_for(source: str, options: dict[str, Any], looped: Path) -> None:
    model = fathomlm.load(looped)
    given = fathomlm.convert(looped if source == "directory" else model, **options)
    assert_only_routers_are_new(given, model)
    assert (given.relaxation, given.plan.kv) == (model.relaxation, options.get("kv", "cache"))
    assert (given.plan.routing is None) == ("router" not in options)
    assert given.plan.steps == model.plan.steps


def test_what_is_made_from_a_model_does_not_change_with_it(looped: Path) -> None:
    """As for plain models: the base is left as it was, whatever is done to the result."""
    model = fathomlm.load(looped)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = fathomlm.convert(model, router="expert")
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_routed_model_is_given_another_router(looped: Path) -> None:
    routed = fathomlm.convert(looped, router="expert", kv="hybrid")
    other = fathomlm.convert(routed, router="token")
    assert other.plan.routing == build_routing("token", 3)
    assert other.plan.kv == "hybrid"
    shared = fathomlm.convert(routed, kv="share")
    assert shared.plan.routing == routed.plan.routing
    weights = zip(shared.decoder.routers.parameters(), routed.decoder.routers.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in weights)


def test_the_result_has_the_dtype_that_was_asked_for(looped: Path) -> None:
    for options in ({"router": "expert"}, {"kv": "share"}):
        given = fathomlm.convert(looped, **options, dtype="bfloat16")
        assert {parameter.dtype for parameter in given.parameters()} == {torch.bfloat16}


def test_exit_heads_stay_where_only_keys_and_values_change(looped: Path) -> None:
    from fathomlm.checkpoints.assemble import replan

    model = fathomlm.load(looped)
    exited = replan(model, model.plan.with_exits((1,)), exit_rank=2)
    with torch.no_grad():
        exited.decoder.exit_delta(1).b.fill_(7.0)
    given = fathomlm.convert(exited, kv="share")
    assert given.plan.exits == (1,)
    assert given.config.exit_rank == 2
    assert given.decoder.exit_delta(1).b.unique().tolist() == [7.0]
    with pytest.raises(FathomError, match="early exits cannot be combined with a router"):
        fathomlm.convert(exited, router="expert")


@pytest.mark.parametrize(
    ("name", "value"), [("init", "average"), ("norm_init", "choice"), ("relax", "lora"), ("rank", 4), ("relax_init", "zero")]
)
def test_how_a_plain_model_is_tied_is_no_question_for_a_recursive_one(name: str, value: Any, looped: Path) -> None:
    with pytest.raises(OptionError, match=rf"{name} says how a plain model is tied; this one is recursive already"):
        fathomlm.convert(looped, router="expert", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("recursions", 6), ("sharing", "middle-cycle"), ("resize", "drop")])
def test_another_plan_for_a_recursive_model_is_refused_not_ignored(name: str, value: Any, looped: Path) -> None:
    with pytest.raises(FathomError, match="recursive already"):
        fathomlm.convert(looped, router="expert", **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "exprt"}, "unknown router 'exprt' .did you mean 'expert'"),
        ({"router": "expert", "recursions": 1}, "recursions >= 2"),
        ({"router": "expert", "sharing": "sequence"}, "a router requires a looped core"),
        ({"router": {"kind": "expert", "capacity": [1.0]}}, "got 1 for 2 recursions"),
        ({"router": {"kind": "token", "update": "add"}}, "update cannot be combined with token-choice"),
        ({"router": {"kind": "expert", "score": "relu"}}, "unknown score 'relu'"),
        ({"router": {"kind": "expert", "alfa": 0.3}}, "alfa"),
        ({"router": {"alpha": 0.3}}, "kind"),
        ({"kv": "hybrid"}, "'hybrid' requires a router"),
        ({"kv": "shard"}, "unknown kv mode 'shard' .did you mean 'share'"),
        ({"kv": "share", "recursions": 1}, "KV sharing on a plain model requires a strategy"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, plain: Path) -> None:
    with pytest.raises(FathomError, match=message):
        fathomlm.convert(plain, **options)


def test_a_routers_mistakes_are_named_before_any_weight_is_read(plain: Path) -> None:
    layers: list[int] = []
    with pytest.raises(FathomError, match="one entry per recursion"):
        fathomlm.convert(plain, router={"kind": "expert", "capacity": [1.0]}, on_layer=lambda at, of: layers.append(at))
    assert layers == []


def test_a_plain_native_model_is_tied_when_it_is_routed(plain: Path, tmp_path: Path) -> None:
    """A FathomLM directory that holds a plain model is converted as any plain model is."""
    save(fathomlm.load(plain), tmp_path / "native")
    given = fathomlm.convert(tmp_path / "native", recursions=2, router="expert", init="lower")
    assert given.plan.with_routing(None) == DepthPlan.build("cycle", 2, 6)
