"""Exits with a layer of their own, trained over a frozen model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import exits_of, load
from fathomlm.cli.main import main
from fathomlm.depth import Architecture, DepthPlan, ExitParts
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.activations import activation_bytes
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.estimate import estimate
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe, read_recipe
from fathomlm.train.recipe import ExitRecipe, LayerwiseRecipe, LossRecipe
from fathomlm.train.report import read_records
from fathomlm.train.student import read_student
from train.exit_runs import (
    SHAPE,
    Trained,
    batch,
    check_compiled_gradients,
    check_resumes,
    check_same_logits,
    decode_every_mode,
    entropy,
    saved_activations,
    train_exit,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(family="llama", **SHAPE)
PLAIN = DepthPlan.vanilla(4)
BLOCK = sum(linear.inputs * linear.outputs for linear in ARCHITECTURE.linears()) + 2 * 16
"""Weights of one layer: its matrices and two norms."""


def decoder(exits: tuple[int, ...] = (1,), adapter: int = 0, classifier: bool = False) -> Decoder:
    made = Decoder(ARCHITECTURE, PLAIN.with_exits(exits, layer=True), None, 0, adapter, classifier)
    made.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return made


# The model.


def hub(plan: DepthPlan, **fields: Any) -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(ARCHITECTURE, plan, dtype=torch.float32, **fields)).eval()
    model.decoder.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def blocks(model: FathomForCausalLM) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.decoder.state_dict().items() if name.startswith("exit_blocks.")}


def test_another_plan_keeps_trained_layers_and_copies_the_others() -> None:
    model = hub(PLAIN.with_exits((0, 1), layer=True))
    with torch.no_grad():
        for parameter in model.decoder.exit_blocks.parameters():
            parameter.fill_(7.0)
    moved = replan(model, PLAIN.with_exits((1, 2), layer=True))
    found, layers = blocks(moved), moved.decoder.layers.state_dict()
    assert {name.split(".")[1] for name in found} == {"1", "2"}
    for name, value in found.items():
        _, index, rest = name.split(".", 2)
        assert torch.equal(value, layers[f"3.{rest}"] if index == "2" else torch.full_like(value, 7.0)), name
    assert replan(model, model.plan) is model
    assert not blocks(replan(model, PLAIN.with_exits((0, 1))))


def test_it_is_saved_and_counted_and_older_models_have_none(tmp_path: Path) -> None:
    model = hub(PLAIN.with_exits((0, 2), layer=True), exit_adapter=3)
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config.exit_parts == exits_of(tmp_path / "model") == ExitParts(adapter_rank=3, layer=True)
    assert again.plan == model.plan
    assert blocks(again).keys() == blocks(model).keys()
    assert all(torch.equal(value, blocks(again)[name]) for name, value in blocks(model).items())
    adapters = sum(p.numel() for p in again.decoder.exit_adapters.parameters())
    assert again.config.exit_parts.parameters(ARCHITECTURE, again.plan) == 2 * BLOCK + adapters
    assert sum(value.numel() for value in blocks(again).values()) == 2 * BLOCK
    place = tmp_path / "model/config.json"
    config = json.loads(place.read_text())
    del config["plan"]["exit_layer"]
    place.write_text(json.dumps(config))
    older = load(tmp_path / "model")
    assert not older.config.exit_parts.layer
    assert not blocks(older)
    place.write_text(json.dumps({**config, "plan": {**config["plan"], "exit_layer": 2}}))
    with pytest.raises(CheckpointError, match="exit_layer must be true or false"):
        load(tmp_path / "model")


def test_int8_leaves_it_as_it_is(tmp_path: Path) -> None:
    """As it leaves all that exits add."""
    model = hub(PLAIN.with_exits((1,), layer=True))
    save(model, tmp_path / "model", quantize="int8")
    again = load(tmp_path / "model", dtype="float32")
    assert all(torch.equal(value, blocks(again)[name]) for name, value in blocks(model).items())
    assert not torch.equal(again.decoder.layers[0].attn.q.weight, model.decoder.layers[0].attn.q.weight)


# The objective.


def by_hand(model: Decoder, tokens: Tensor, targets: Tensor, keep: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Cross entropies of the last output and of the exit, whose layer sees what one more layer behind it would see."""
    twin = Decoder(ARCHITECTURE, DepthPlan.vanilla(4))
    twin.layers[0], twin.layers[1], twin.layers[2] = model.layers[0], model.layers[1], model.exit_blocks["1"]
    twin.embed, twin.norm, twin.head = model.embed, model.norm, model.head
    behind = twin.states(tokens, at=(2,), keep_BS=keep)[2]
    last = model.states(tokens, keep_BS=keep)[3]
    logits = [model.logits(model.norm(last)), model.exit_logits(behind, 1, layered=True)]
    return entropy(logits[0], targets) + 0.4 * entropy(logits[1], targets), logits


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("adapter", [0, 2])
def test_the_objective_is_the_formula(adapter: int, recompute: Any) -> None:
    model, (tokens, targets, keep) = decoder(adapter=adapter), batch()
    recipe = LossRecipe(exits=ExitRecipe(at=[2], coefficient=0.4, layer=True, adapter_rank=adapter), chunk=7)
    found, parts = Objective(model, recipe, recompute=recompute)(tokens, targets, keep)
    wanted, logits = by_hand(model, tokens, targets, keep)
    torch.testing.assert_close(parts, torch.stack([entropy(each, targets) for each in logits]).detach())
    slopes = [torch.autograd.grad(total, list(model.parameters())) for total in (found, wanted)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    model, (tokens, targets, _) = decoder(), batch()
    objective = Objective(model, LossRecipe(exits=ExitRecipe(at=[2], layer=True)))
    behind = targets.masked_fill(torch.arange(10) < 4, IGNORE)
    other = torch.cat((tokens[:, :4].flip(0), tokens[:, 4:]), dim=1)
    documents = torch.tensor([0] * 4 + [1] * 6).expand(3, 10)
    first, second = (objective(text, behind, documents_BT=documents)[1] for text in (tokens, other))
    assert torch.equal(first, second)
    assert not torch.allclose(objective(other, behind)[1], objective(tokens, behind)[1])


def test_layerwise_states_are_without_the_layer() -> None:
    tokens, targets, keep = batch()
    layered, values = decoder(), []
    bare = Decoder(ARCHITECTURE, PLAIN.with_exits((1,)))
    bare.load_state_dict({name: value for name, value in layered.state_dict().items() if not name.startswith("exit_")})
    for model in (bare, layered):
        exits = ExitRecipe(at=[2], layer=model is layered)
        objective = Objective(model, LossRecipe(exits=exits, layerwise=LayerwiseRecipe(shallow=2, mapping="unif")))
        values.append(dict(zip(objective.names, objective(tokens, targets, keep)[1].tolist(), strict=True)))
    assert values[0]["layerwise"] == values[1]["layerwise"]
    assert values[0]["exit_2"] != values[1]["exit_2"]


@pytest.mark.parametrize("distill", [None, "forward_kl"])
def test_only_the_exit_gets_a_gradient(distill: Any) -> None:
    model, (tokens, targets, keep) = decoder(classifier=True), batch()
    torch.nn.init.normal_(model.exit_classifiers["1"].weight, std=0.3)
    choose_trained(model, "exits")
    recipe = LossRecipe(exits=ExitRecipe(at=[2], layer=True, classifier=True, distill=distill))
    Objective(model, recipe)(tokens, targets, keep)[0].backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {
        name for name, _ in model.named_parameters() if name.startswith(("exit_blocks.", "exit_classifiers."))
    }
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


def test_a_compiled_step_over_a_frozen_model_has_the_eager_gradients() -> None:
    """The forms of a layer's halves with a written-out backward pass, of which the stream wants no gradient."""
    model, (tokens, targets, _) = decoder(), batch()
    choose_trained(model, "exits")
    objective = Objective(model, LossRecipe(exits=ExitRecipe(at=[2], layer=True, distill="forward_kl")))

    check_compiled_gradients(model, objective, tokens, targets)


@pytest.mark.parametrize("adapter", [0, 3])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_frozen_model_keeps_only_the_exits_activations(precision: str, adapter: int) -> None:
    """Autograd's own count; weights and their narrow copies are left out."""
    model = decoder(exits=(0, 1), adapter=adapter)
    tokens = torch.randint(0, 37, (2, 50), generator=torch.Generator().manual_seed(5))
    choose_trained(model, "exits")
    with saved_activations(model, precision) as kept:
        model.states(tokens, at=(0, 1))
        assert not kept
        own = model.plan.exit_steps((0, 1))
        states = model.states(tokens, at=[step.index for step in own])
        hidden = [
            model.exit_hidden(states[step.index], index, layered=True) for step, index in zip(own, (0, 1), strict=True)
        ]
    values: dict[str, Any] = {
        "model": {"architecture": {"family": "llama", **SHAPE}},
        "data": {"context": 50},
        "budget": {"steps": 1},
        "batch": {"sequences": 2},
        "precision": precision,
    }
    alone, frozen = (
        build_recipe({**values, "train": "exits", "loss": {"exits": {"at": [1, 2], "classifier": True, **own}}})
        for own in ({}, {"layer": True, "adapter_rank": adapter})
    )
    layers = activation_bytes(frozen, read_student(frozen)) - activation_bytes(alone, read_student(alone))
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    tables = 2 * 8 * (2 if precision == "bf16" else 4)  # of rotations, the same for all layers
    assert found == 100 * (layers + tables)
    assert all(each.requires_grad for each in hidden)


# Whole runs.


@pytest.fixture(scope="module")
def trained(token_corpus: Path, plain_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("exits") / "run"
    return train_exit(token_corpus, plain_source, out, {"layer": True}, steps=60, lr=3e-3)


def test_the_model_under_the_exit_stays_bit_for_bit(trained: Trained, weights_of: Callable[[Path], dict[str, Any]]) -> None:
    before, after = weights_of(trained.source), weights_of(trained.run / "last")
    added = {name.split(".")[1] for name in after if name not in before}
    assert added == {"exit_blocks", "exit_classifiers"}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    check_same_logits(trained.source, trained.run / "last")


def test_training_the_layer_lowers_its_exits_loss(trained: Trained, weights_of: Callable[[Path], dict[str, Any]]) -> None:
    records = [r for r in read_records(trained.run / "metrics.jsonl") if r["kind"] == "validation"]
    first, last = records[0], records[-1]
    assert first["loss"] == last["loss"], "the last output's"
    assert last["exits"]["1"] < first["exits"]["1"] - 0.05
    assert last["parts"]["exit_1_distill"] < 0.8 * first["parts"]["exit_1_distill"]
    weights = weights_of(trained.run / "last")
    block, behind = (weights[f"decoder.{name}.attn.q.weight"] for name in ("exit_blocks.0", "layers.1"))
    assert 0 < (block - behind).abs().max() < behind.abs().max(), "it began as the layer behind the exit"


def test_every_mode_decodes_through_the_layer(trained: Trained) -> None:
    model, tokens, static = decode_every_mode(trained)
    (own,) = model.plan.exit_steps((0,))
    with torch.inference_mode():
        for token in static:
            state = model.decoder.states(torch.tensor([tokens]), at=(own.index,))[own.index]
            assert int(model.decoder.exit_logits(state[:, -1], 0, layered=True).argmax()) == token
            tokens.append(token)


def test_inspect_and_export_say_so(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = str(trained.run / "last")
    assert main(["inspect", last, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert (record["exits"], record["exit_layer"], record["exit_parameters"]) == ([1], True, layer + 33)
    assert main(["inspect", last]) == 0
    assert "exits after 1, each with a layer of its own" in capsys.readouterr().out.replace("\n", " ")
    assert main(["export", last, str(tmp_path / "plain")]) == 0
    assert "left out: the exits after 1 with their layers, classifiers" in capsys.readouterr().err
    check_same_logits(tmp_path / "plain", trained.source)


def test_a_run_is_resumed_exactly(
    trained: Trained, recipe: Callable[..., Any], tmp_path: Path, weights_of: Callable[[Path], dict[str, Any]]
) -> None:
    changes = {"model": {"architecture": None, "source": str(trained.source), "recursions": 1}, "train": "exits"}
    changes["loss"] = {"exits": {"at": [2], "layer": True}}
    check_resumes(recipe, weights_of, tmp_path, **changes)


# Recipes.


def test_the_dry_run_counts_it() -> None:
    values: dict[str, Any] = {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 1}, "batch": {"sequences": 4}}
    found = estimate(build_recipe({**values, "loss": {"exits": {"at": [8], "layer": True}}, "train": "exits"}))
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    assert found.trainable_parameters == found.exit_parameters == layer + 2 * 576
    head, layers = 49_152 * 576, found.flops_per_token_6n // 6 - 49_152 * 576
    assert found.work_flops == found.tokens * (2 * (layers + head) + 4 * head + 6 * layer)


def test_the_shipped_recipe_makes_an_exit_that_ships() -> None:
    """At most 8 MB in bfloat16."""
    found = estimate(read_recipe("exit-layer-smollm2-135m"))
    assert found.exits == (2,)
    assert 2 * found.exit_parameters < 8e6
    assert found.trainable_parameters == found.exit_parameters


def test_recipes_that_no_run_could_mean(tmp_path: Path) -> None:
    values: dict[str, Any] = {"budget": {"steps": 1}, "batch": {"sequences": 1}, "train": "exits"}
    with pytest.raises(OptionError, match=r"loss\.exits\.layer must be"):
        build_recipe({**values, "model": {"shape": "smollm2-135m"}, "loss": {"exits": {"layer": "yes please"}}})
    shape = {"family": "t5", "layers": 3, "hidden": 16, "intermediate": 16, "heads": 2, "vocab": 40}
    seq2seq = {
        "model": {"architecture": shape},
        "data": {"pairs": ["a", "b"]},
        "loss": {"exits": {"at": [1], "layer": True}},
    }
    with pytest.raises(OptionError, match=r"loss\.exits\.layer is for decoder-only models"):
        read_student(build_recipe({**values, **seq2seq}))
