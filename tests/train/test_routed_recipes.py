"""Recipes with routers: mistakes are named before any work is done, and a dry run counts what a run will have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fathomlm.depth.cost import count
from fathomlm.errors import FathomError, OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.activations import activation_bytes
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.directory import check_same
from fathomlm.train.estimate import estimate, format_estimate
from fathomlm.train.flops import flops_per_token_6n, work_flops_per_token
from fathomlm.train.memory import count_memory
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe, read_recipe, to_yaml
from fathomlm.train.recipe import Recipe
from fathomlm.train.setup import build_student
from fathomlm.train.student import read_student

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {"layers": 8, "hidden": 96, "intermediate": 160, "heads": 3, "kv_heads": 1, "head_dim": 32, "vocab": 257}
LAYER = 2 * 96 * 96 + 2 * 96 * 32 + 3 * 96 * 160
PRELUDE_AND_CODA, CORE = 2, 2
EXPERT: dict[str, Any] = {"sharing": "middle-cycle", "recursions": 3, "router": {"kind": "expert"}}
ROUTERS: dict[str, dict[str, Any]] = {
    "expert": {},
    "capacity": {"capacity": [1.0, 0.5, 0.25]},
    "mlp": {"network": "mlp"},
    "wide, aux router": {"network": "wide", "sampling": "aux_router"},
    "token": {"kind": "token"},
    "token, loss-free": {"kind": "token", "balancing": "loss_free"},
}


def small(model: dict[str, Any], **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"architecture": {"family": "llama", **SHAPE}, **model},
        "data": {"context": 48},
        "budget": {"steps": 10},
        "batch": {"sequences": 8, "micro": 4},
    }
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return build_recipe(values)


def with_router(name: str, **changes: Any) -> Recipe:
    return small({**EXPERT, "router": ROUTERS[name], **changes.pop("model", {})}, **changes)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ({"router": {}}, {}, r"model\.router requires model\.recursions >= 2"),
        ({**EXPERT, "recursions": 1}, {}, r"model\.recursions >= 2"),
        (
            EXPERT,
            {"loss": {"exits": {}}},
            r"loss\.exits and loss\.layerwise cannot be combined with model\.router",
        ),
        (EXPERT, {"loss": {"layerwise": {"shallow": 2}}}, r"cannot be combined with model\.router"),
        ({**EXPERT, "router": {"knid": "token"}}, {}, r"field in model\.router 'knid' \(did you mean 'kind'\?\)"),
        ({**EXPERT, "router": {"kind": "expret"}}, {}, r"invalid model.router.kind 'expret' \(did you mean 'expert'\?\)"),
        ({**EXPERT, "router": "expert"}, {}, r"model\.router must be a section of fields or null, got 'expert'"),
        ({**EXPERT, "router": {"capacity": [1.0, 0.5]}}, {}, "got 2 for 3 recursions"),
        ({**EXPERT, "router": {"capacity": [1.0, 0.5, 0.6]}}, {}, "capacities must fall.*got 1, 0.5, 0.6"),
        ({**EXPERT, "router": {"capacity": [1.0, 0.5, 0.0]}}, {}, "stay above 0"),
        ({**EXPERT, "router": {"alpha": 0.0}}, {}, "alpha must be > 0, got 0.0"),
        ({**EXPERT, "router": {"score": "softmax"}}, {}, "unknown score 'softmax'; known: identity, sigmoid, tanh"),
        (
            {**EXPERT, "router": {"kind": "token", "capacity": [1.0, 0.6, 0.3]}},
            {},
            "capacity cannot be combined with token-choice",
        ),
        (
            EXPERT,
            {"loss": {"routing": {"capacity_per_document": True}}},
            r"capacity_per_document requires data\.document_mask",
        ),
        (
            EXPERT,
            {"loss": {"routing": {"capacity_warmup_shape": "smooth"}}},
            r"capacity_warmup_shape requires loss\.routing\.capacity_warmup$",
        ),
        ({**EXPERT, "router": {"balancing": "loss_free"}}, {}, "balancing cannot be combined with expert-choice"),
        ({"sharing": "sequence", "recursions": 2, "router": {}}, {}, "a router requires a looped core"),
        ({**EXPERT, "kv": "share", "router": {"capacity": [0.9, 0.5, 0.2]}}, {}, "its capacity must be 1"),
        ({"recursions": 2, "kv": "hybrid"}, {}, "'hybrid' requires a router"),
        ({"kv": "hybrid"}, {}, "'hybrid' requires a router"),
        ({"kv": "share"}, {}, "KV sharing on a plain model requires a strategy"),
        ({"kv": "share", "kv_sharing": "cycle", "kv_loops": 3}, {}, "3 kv loops do not divide 8 layers; these do: 2, 4, 8"),
        ({**EXPERT, "kv": "shared"}, {}, r"model\.kv must be one of"),
        (EXPERT, {"loss": {"routing": {"capacity_warmup": -1}}}, r"loss\.routing\.capacity_warmup must be >= 0"),
        (EXPERT, {"loss": {"routing": {"coeficient": 1}}}, r"field in loss\.routing 'coeficient' \(did you mean"),
    ],
)
def test_mistakes_are_named_before_any_work(model: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FathomError, match=message):
        estimate(small(model, **changes))


@pytest.mark.parametrize("recompute", ["layer", "recursion"])
@pytest.mark.parametrize("kv", ["share", "hybrid"])
def test_recomputation_with_shared_entries_is_refused_by_the_dry_run_too(kv: str, recompute: str) -> None:
    with pytest.raises(FathomError, match=rf"recompute: {recompute} cannot be combined with kv mode '{kv}'"):
        estimate(small({**EXPERT, "kv": kv}, recompute=recompute))


def test_the_run_refuses_what_the_dry_run_refuses(recipe: Callable[..., Any], token_corpus: Path) -> None:
    """Both lay the plan by the same rules."""
    for model, message in (
        ({"recursions": 1, "router": {}}, r"model\.recursions >= 2"),
        ({"router": {"capacity": [1.0, 0.5, 0.25]}}, "got 3 for 2 recursions"),
        ({"kv": "hybrid"}, "'hybrid' requires a router"),
        ({"recursions": 1, "kv": "share"}, "KV sharing on a plain model requires a strategy"),
    ):
        with pytest.raises(FathomError, match=message):
            build_student(recipe(model=model), Corpus.open(token_corpus))


def test_exits_on_a_source_that_is_routed_already(recipe: Callable[..., Any], token_corpus: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(token_corpus)
    build_student(recipe(model={"router": {}}), corpus).save_pretrained(tmp_path / "routed")
    onwards = {"architecture": None, "source": str(tmp_path / "routed"), "recursions": 1}
    assert build_student(recipe(model=onwards), corpus).plan.routing is not None
    with pytest.raises(FathomError, match="early exits cannot be combined with a router"):
        build_student(recipe(model=onwards, loss={"exits": {}}), corpus)
    with pytest.raises(FathomError, match="layerwise"):
        build_student(recipe(model=onwards, loss={"layerwise": {"shallow": 2}}), corpus)


def test_trained_exit_heads_of_a_source_go_on(recipe: Callable[..., Any], token_corpus: Path, tmp_path: Path) -> None:
    """Laying the source's plan again for a router or for shared entries must not drop what its exits learned."""
    corpus, loss = Corpus.open(token_corpus), {"exits": {"at": [2], "head_rank": 2}}
    trained = build_student(recipe(loss=loss), corpus)
    with torch.no_grad():
        trained.decoder.exit_delta(1).b.fill_(7.0)
    trained.save_pretrained(tmp_path / "exits")
    onwards = {"architecture": None, "source": str(tmp_path / "exits"), "recursions": 1}
    for model in (onwards, {**onwards, "kv": "share"}):
        student = build_student(recipe(model=model, loss=loss), corpus)
        assert student.decoder.exit_delta(1).b.unique().tolist() == [7.0]


def test_a_run_goes_on_with_the_capacities_that_its_checkpoint_kept() -> None:
    ours = small({**EXPERT, "router": {"kind": "expert", "capacity": [1.0, 0.5, 0.25]}})
    check_same(ours, json.loads(json.dumps(dataclasses.asdict(ours))), "a checkpoint")


def test_recipes_with_routers_read_back_equal() -> None:
    import yaml

    made = with_router("capacity", loss={"routing": {"coefficient": 0.2, "capacity_warmup": 8}}, model={"kv": "hybrid"})
    assert build_recipe(yaml.safe_load(to_yaml(made))) == made
    changed = read_recipe("tiny-mor", ["--model.router.alpha", "0.2", "--loss.routing.z", "0.01", "--model.kv", "share"])
    assert changed.model.router is not None
    assert changed.loss.routing is not None
    assert (changed.model.router.alpha, changed.loss.routing.z, changed.model.kv) == (0.2, 0.01, "share")
    assert changed.loss.routing.coefficient == 0.01, "the file's own"


# --- the dry run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["cache", "share"])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_parameters_are_those_of_the_model(name: str, kv: str) -> None:
    recipe = with_router(name, model={"kv": kv})
    found, parts = estimate(recipe), read_student(recipe)
    with torch.device("meta"):
        decoder = Decoder(parts.architecture, parts.plan, parts.relaxation)
    assert found.total_parameters == sum(p.numel() for p in decoder.parameters())
    assert found.router == parts.plan.routing.kind  # type: ignore[union-attr]
    assert f"{found.router}-choice router" in format_estimate(found)
    assert json.loads(json.dumps(found.to_dict()))["router"] == found.router


@pytest.mark.parametrize("name", ROUTERS)
def test_what_learns_is_what_the_optimizer_is_given(name: str) -> None:
    """The bias of loss-free balancing is moved by hand: it has neither a gradient nor moments."""
    recipe = with_router(name)
    parts = read_student(recipe)
    with torch.device("meta"):
        decoder: nn.Module = Decoder(parts.architecture, parts.plan, parts.relaxation)
    choose_trained(decoder, "all")
    learning = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    found = estimate(recipe)
    assert found.trainable_parameters == learning
    assert found.memory.optimizer == 8 * learning


@pytest.mark.parametrize(
    ("name", "runs"), [("expert", 1 + 2 / 3 + 1 / 3), ("capacity", 1 + 0.5 + 0.25), ("token", 1 + 2 / 3 + 1 / 3)]
)
def test_compute_follows_the_part_of_the_tokens_that_runs(name: str, runs: float) -> None:
    recipe = with_router(name)
    parts, head = read_student(recipe), 257 * 96
    met = (PRELUDE_AND_CODA + CORE * runs) * LAYER
    assert flops_per_token_6n(parts.architecture, parts.plan, None) == round(6 * (met + head))
    # Token-choice computes every recursion for every token in training, and discards.
    worked = (PRELUDE_AND_CODA + CORE * (3 if name == "token" else runs)) * LAYER
    assert work_flops_per_token(recipe, parts, None) == round(6 * (worked + head))
    found = estimate(recipe)
    assert found.flops_per_token_6n == round(6 * (met + head))
    assert found.forward_flops_per_token == count(parts.architecture, parts.plan, context=48).forward_flops_per_token
    assert found.model_flops == pytest.approx(found.tokens * 6 * (met + head))


def test_shared_entries_spare_their_projections() -> None:
    found = estimate(with_router("expert", model={"kv": "share"}))
    spared = CORE * (2 / 3 + 1 / 3) * 2 * 96 * 32
    assert found.flops_per_token_6n == round(6 * ((PRELUDE_AND_CODA + CORE * 2) * LAYER - spared + 257 * 96))
    assert estimate(with_router("expert", model={"kv": "hybrid"})).flops_per_token_6n == round(
        6 * ((PRELUDE_AND_CODA + CORE * 2) * LAYER + 257 * 96)
    )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_activations_follow_the_capacity_under_expert_choice_only(precision: str) -> None:
    plain = small({**EXPERT, "router": None}, precision=precision)
    whole = activation_bytes(plain, read_student(plain))
    for name, runs in (("expert", 2.0), ("capacity", 1.75), ("token", 3.0)):
        recipe = with_router(name, precision=precision)
        kept = activation_bytes(recipe, read_student(recipe))
        assert kept == pytest.approx(whole * (PRELUDE_AND_CODA + CORE * runs) / 8, abs=8)
    memory = count_memory(with_router("token"), read_student(with_router("token")), 0, "none")
    assert memory.activations == 4 * 48 * activation_bytes(with_router("token"), read_student(with_router("token")))


@pytest.mark.parametrize("name", ["pretrain-mor2-360m", "pretrain-mor3-360m", "pretrain-mor4-360m"])
def test_shipped_recipes_cost_less_than_the_models_they_are_held_against(name: str) -> None:
    """Table of the thesis: at equal tokens, relative to the plain model."""
    ratio = {"2": 0.746, "3": 0.664, "4": 0.661}[name[12]]
    plain, routed = (estimate(read_recipe(n)) for n in ("pretrain-vanilla-360m", name))
    assert routed.forward_flops_per_token / plain.forward_flops_per_token == pytest.approx(ratio, abs=0.003)


def test_a_router_needs_a_recursive_source(tiny_model_dir: Path) -> None:
    length = {"budget": {"steps": 1}, "batch": {"sequences": 1}, "data": {"context": 256}}
    found = estimate(build_recipe({"model": {"source": str(tiny_model_dir), "router": {"kind": "token"}}, **length}))
    assert (found.router, found.recursions) == ("token", 2)
    with pytest.raises(OptionError, match=r"model\.recursions >= 2"):
        estimate(build_recipe({"model": {"source": "smollm2-135m", "router": {}}, **length}))
