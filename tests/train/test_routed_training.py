"""Steps of routed models: equal however a batch is split, capacities that come down, and who learns at which rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fathomlm.model.decoder import Decoder
from fathomlm.model.route.trace import RoutingMeter
from fathomlm.train.data.loader import prefetch
from fathomlm.train.losses.head import IGNORE
from fathomlm.train.losses.routing import openness, routing_names
from fathomlm.train.objective import Objective
from fathomlm.train.optim import build_optimizer, choose_trained, parameter_groups, set_rate
from fathomlm.train.recipe import BatchRecipe, LossRecipe, OptimizerRecipe, RoutingLossRecipe
from fathomlm.train.report import SilentWatcher
from fathomlm.train.run import TrainingRun, World
from model.route.small import KV, model_of, padded, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

TEACHES = RoutingLossRecipe(coefficient=0.5, z=0.1)
"""Large enough that a loss which did depend on the split would show."""
SPLIT = ["expert", "expert, aux router", "token", "token, loss-free"]
CPU = World(0, 1, torch.device("cpu"))


def objective(router: str = "expert", kv: str = "cache", dtype: torch.dtype = torch.float64, **options: Any) -> Objective:
    decoder = model_of(routed(router, kv, **options)).decoder.to(dtype)
    choose_trained(decoder, "all")
    return Objective(decoder, LossRecipe(routing=TEACHES)).train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Rows of different lengths, some of whose tokens have no target."""
    tokens, keep = padded([12, 7, 12, 4])
    targets = tokens.roll(-1, 1).masked_fill(~keep, IGNORE)
    targets[0, :5] = IGNORE
    return tokens, targets, keep


def gradients(asked: Objective, total: Tensor) -> dict[str, Tensor]:
    learns = {name: p for name, p in asked.decoder.named_parameters() if p.requires_grad}
    return dict(zip(learns, torch.autograd.grad(total, list(learns.values())), strict=True))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("router", SPLIT)
def test_losses_and_gradients_of_a_batch_are_the_sums_of_its_rows(router: str, kv: str) -> None:
    asked, rows = objective(router, kv), batch()
    total, parts = asked(*rows)
    whole = gradients(asked, total)
    for size in (2, 1):
        cuts = [tuple(part[i : i + size] for part in rows) for i in range(0, 4, size)]
        found = [asked(*cut) for cut in cuts]
        torch.testing.assert_close(sum(each for each, _ in found), total)
        torch.testing.assert_close(sum(each for _, each in found), parts)
        slopes = [gradients(asked, each) for each, _ in found]
        for name, value in whole.items():
            torch.testing.assert_close(sum(slope[name] for slope in slopes), value, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("router", SPLIT)
def test_the_total_is_the_weighted_sum_of_its_parts(router: str) -> None:
    asked = objective(router)
    total, parts = asked(*batch())
    by_name = dict(zip(asked.names, parts.tolist(), strict=True))
    assert asked.names == ("next_token", *routing_names(asked.decoder.plan.routing))
    assert total.item() == pytest.approx(by_name["next_token"] + 0.5 * by_name["router"] + 0.1 * by_name["router_z"])


@pytest.mark.parametrize("router", ["expert", "expert, aux router", "token"])
def test_padding_changes_no_sum_of_token_choice_and_teaches_no_router(router: str) -> None:
    """What padding holds is never seen; that expert-choice keeps a part of the padded length is the method's own."""
    asked, (tokens, targets, keep) = objective(router), batch()
    total, parts = asked(tokens, targets, keep)
    other, other_parts = asked(tokens.masked_fill(~keep, 7), targets, keep)
    torch.testing.assert_close((other, other_parts), (total, parts))
    if router == "token":
        rows = [asked(tokens[i : i + 1, 12 - n :], targets[i : i + 1, 12 - n :])[1] for i, n in enumerate([12, 7, 12, 4])]
        torch.testing.assert_close(sum(rows), parts)


@pytest.mark.parametrize("kv", KV)
def test_documents_with_a_capacity_each_learn_as_rows_of_their_own(kv: str) -> None:
    asked, tokens = objective("expert", kv), some_tokens(2, 24)
    targets = tokens.roll(-1, 1)
    targets[:, [11, 23]] = IGNORE
    documents = torch.tensor([[0] * 12 + [1] * 12] * 2)
    expected = asked(tokens.view(4, 12), targets.view(4, 12))
    rows_compete = asked(tokens, targets, documents_BT=documents)
    asked._teaches = dataclasses.replace(TEACHES, capacity_per_document=True)
    torch.testing.assert_close(asked(tokens, targets, documents_BT=documents), expected)
    assert not torch.allclose(rows_compete[1], expected[1]), "where the row competes the documents' parts differ"


@pytest.mark.parametrize("shape", ["smooth", "stairs"])
def test_capacities_fall_with_every_step_or_in_stairs(shape: Literal["smooth", "stairs"]) -> None:
    """By the mean depth of what is trained: the tokens that each recursion keeps."""
    asked = objective("expert")
    asked._teaches = teaches = dataclasses.replace(TEACHES, capacity_warmup=24, capacity_warmup_shape=shape)
    tokens = some_tokens(1, 48)
    routing, at = asked.decoder.plan.routing, asked.names.index("mean_depth")
    assert routing is not None
    left = {"smooth": lambda step: max(0.0, 1 - step / 24), "stairs": lambda step: max(0.0, 1 - step // 3 / 8)}[shape]
    found = []
    for step in (*range(26), 40):
        asked.warm_up(step, torch.device("cpu"))
        assert asked.openness == openness(teaches, step)
        found.append(asked(tokens, tokens.roll(-1, 1))[1][at].item())
        kept = [routing.kept(recursion, 48, left(step)) for recursion in range(3)]
        assert found[-1] == pytest.approx(sum(kept)), (step, kept)
    assert len(set(found)) == (25 if shape == "smooth" else 9)


@pytest.mark.parametrize("router", [*SPLIT, "expert, random"])
def test_everything_that_learns_has_a_gradient_even_where_nothing_teaches_routers(router: str) -> None:
    """Ranks under DDP wait for every gradient: a recipe that turns the losses off must not make one never come."""
    asked = objective(router)
    asked._teaches = RoutingLossRecipe(coefficient=0.0, z=0.0)
    assert gradients(asked, asked(*batch())[0])


@pytest.mark.parametrize("kind", ["expert", "token"])
@pytest.mark.parametrize("recompute", ["recursion", "layer"])
def test_recomputing_activations_changes_no_gradient(recompute: str, kind: str) -> None:
    asked, rows = objective(kind), batch()
    whole = gradients(asked, asked(*rows)[0])
    asked.recompute = recompute  # type: ignore[assignment]
    again = gradients(asked, asked(*rows)[0])
    assert all(torch.equal(again[name], value) for name, value in whole.items())


# --- whole steps ----------------------------------------------------------------------------------------------------

THREE = {"architecture": {"layers": 5, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "context": 64}}
THREE |= {"sharing": "middle-cycle", "recursions": 3}  # type: ignore[dict-item]
STEPPED: dict[str, dict[str, Any]] = {
    "aux loss": {"model": {"router": {}}, "loss": {"routing": {"coefficient": 0.1}}},
    "aux loss, share, z": {"model": {"router": {}, "kv": "share"}, "loss": {"routing": {"z": 0.01}}},
    "aux loss, hybrid": {"model": {"router": {}, "kv": "hybrid"}},
    "aux router": {"model": {"router": {"sampling": "aux_router"}}, "loss": {"routing": {"aux_lr": 0.3}}},
    "token": {"model": {"router": {"kind": "token"}}},
    "token, loss-free": {
        "model": {"router": {"kind": "token", "balancing": "loss_free"}, "kv": "hybrid"},
        "loss": {"routing": {"bias_rate": 0.02}},
    },
    "warm-up": {"model": {"router": {}}, "loss": {"routing": {"capacity_warmup": 3}}},
    "pairs": {
        "model": {"router": {}},
        "data": {"path": "PAIRS", "pairs": ["ask", "say"], "source_length": 16, "target_length": 12},
    },
}


@pytest.mark.parametrize("name", STEPPED)
def test_a_batch_may_be_split_into_any_micro_batches(
    name: str, recipe: Callable[..., Any], pair_corpus: Path, tmp_path: Path
) -> None:
    """A large eps keeps Adam's first steps from turning rounding into a sign."""
    changes = {"optimizer": {"eps": 0.01}, "budget": {"steps": 2}, **STEPPED[name]}
    changes["model"] = {**THREE, **changes["model"], "init_std": 0.2}
    if changes.get("data", {}).get("path") == "PAIRS":
        changes["data"] = {**changes["data"], "path": str(pair_corpus)}
    made, found = recipe(**changes), {}
    for micro in (4, 2, 1):
        split = dataclasses.replace(made, out=str(tmp_path / f"{micro}"), batch=BatchRecipe(sequences=4, micro=micro))
        run = TrainingRun(split, CPU, SilentWatcher())
        before = {key: value.clone() for key, value in run._student.decoder.state_dict().items()}
        with prefetch(run._data.train, micro=micro) as batches:
            for step in range(2):
                run._stepper.step([next(batches) for _ in range(4 // micro)], step, wants_stop=False)
        found[micro] = run._student.decoder.state_dict()
        moved = {key for key, value in before.items() if not torch.equal(value, found[micro][key])}
        assert moved == before.keys(), "everything learns"
    for micro in (2, 1):
        for key, value in found[4].items():
            torch.testing.assert_close(found[micro][key], value, rtol=0, atol=1e-6)
    if name == "token, loss-free":
        assert torch.equal(found[1]["routers.bias"], found[4]["routers.bias"])


def test_a_step_that_is_not_finite_leaves_the_bias_too(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainingRun(recipe(**STEPPED["token, loss-free"], budget={"steps": 1}), CPU, SilentWatcher())
    plain = Objective.forward

    def broken(asked: Objective, **inputs: Any) -> tuple[Tensor, Tensor]:
        total, parts = plain(asked, **inputs)
        return total * (float("nan") if asked.training else 1.0), parts

    monkeypatch.setattr(Objective, "forward", broken)
    assert run.go(False).skipped == 1
    assert not run._student.decoder.routers.bias.any()


# --- the capacity's warm-up -----------------------------------------------------------------------------------------


def depths(asked: Objective, openness: float) -> list[float]:
    """The part of the tokens that runs each recursion, of one pass by top-k."""
    asked.openness = openness
    asked.meter = RoutingMeter(asked.decoder.plan.routing, 24)
    tokens = some_tokens(3, 24)
    asked(tokens, tokens)
    return asked.meter.running()


@pytest.mark.parametrize("kv", KV)
def test_a_warm_up_begins_with_all_tokens_and_ends_at_the_capacity(kv: str) -> None:
    asked = objective(kv=kv)
    assert depths(asked, 1.0) == [1.0, 1.0, 1.0]
    assert depths(asked, 0.5) == pytest.approx([1.0, 20 / 24, 16 / 24])
    assert depths(asked, 0.0) == pytest.approx([1.0, 16 / 24, 8 / 24])


def test_evaluation_takes_no_notice_of_a_warm_up() -> None:
    asked, tokens = objective().eval(), some_tokens(3, 24)
    assert depths(asked, 1.0) == pytest.approx([1.0, 16 / 24, 8 / 24])
    with torch.no_grad():
        opened = asked(tokens, tokens)[1]
        asked.openness = 0.0
        assert torch.equal(asked(tokens, tokens)[1], opened)
        causal = asked(tokens, tokens, causal=True)[1]
    assert not torch.equal(causal, opened)


def test_the_loop_sets_the_warm_up_by_the_step(recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"model": {**THREE, "router": {}}, "loss": {"routing": {"capacity_warmup": 4}}, "budget": {"steps": 6}}
    run, seen = TrainingRun(recipe(**changes, batch={"micro": 4}), CPU, SilentWatcher()), []
    plain = Objective.forward

    def watched(asked: Objective, **inputs: Any) -> tuple[Tensor, Tensor]:
        total, parts = plain(asked, **inputs)
        if asked.training:
            count = int((inputs["targets_BT"] != IGNORE).sum())
            seen.append((asked.openness, parts[asked.names.index("mean_depth")].item() / count))
        return total, parts

    monkeypatch.setattr(Objective, "forward", watched)
    run.go(False)
    assert [opened for opened, _ in seen] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    kept = [sum(run._student.plan.routing.kept(r, 32, opened) for r in range(3)) / 32 for opened, _ in seen]
    assert [mean for _, mean in seen] == pytest.approx(kept)


# --- who learns -----------------------------------------------------------------------------------------------------


def decoder_of(router: str) -> Decoder:
    return model_of(routed(router)).decoder


def test_auxiliary_routers_have_a_rate_of_their_own() -> None:
    decoder = decoder_of("expert, aux router")
    choose_trained(decoder, "all")
    optimizer = build_optimizer(decoder, OptimizerRecipe(lr=1e-3, weight_decay=0.1), aux_rate=0.25)
    names = {id(p): name for name, p in decoder.named_parameters()}
    groups = [({names[id(p)] for p in group["params"]}, group) for group in optimizer.param_groups]
    (aux,) = (group for held, group in groups if any(name.startswith("routers.aux.") for name in held))
    assert {names[id(p)] for p in aux["params"]} == {n for n in names.values() if n.startswith("routers.aux.")}
    assert aux["weight_decay"] == 0.1
    for rate in (1e-3, 4e-4):
        set_rate(optimizer, rate)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [rate * (0.25 if group is aux else 1.0) for group in optimizer.param_groups]
        )
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(names), "each weight once"


def test_without_a_rate_of_their_own_they_are_among_the_others() -> None:
    decoder = decoder_of("expert, aux router")
    assert len(parameter_groups(decoder, 0.1)) == len(parameter_groups(decoder_of("expert"), 0.1)) == 2
    assert len(parameter_groups(decoder_of("expert"), 0.1, aux_rate=0.25)) == 2


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_a_step_moves_auxiliary_routers_by_their_own_rate(kind: str) -> None:
    moved = []
    for aux_rate in (1.0, 0.125):
        decoder = decoder_of("expert, aux router")
        before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
        optimizer = build_optimizer(decoder, OptimizerRecipe(kind=kind, lr=0.01, weight_decay=0.0), aux_rate)  # type: ignore[arg-type]
        set_rate(optimizer, 0.01)
        for parameter in decoder.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved.append({name: float((before[name] - p.detach()).mean()) for name, p in decoder.named_parameters()})
    for name, whole in moved[0].items():
        assert moved[1][name] == pytest.approx(whole * (0.125 if name.startswith("routers.aux.") else 1.0), rel=1e-3)


def test_the_bias_of_loss_free_balancing_never_learns_by_gradient() -> None:
    decoder = decoder_of("token, loss-free")
    decoder.requires_grad_(True)
    choose_trained(decoder, "all")
    assert [name for name, p in decoder.named_parameters() if not p.requires_grad] == ["routers.bias"]
    held = {id(p) for group in build_optimizer(decoder, OptimizerRecipe()).param_groups for p in group["params"]}
    assert id(decoder.routers.bias) not in held
    assert len(held) == len(list(decoder.parameters())) - 1
