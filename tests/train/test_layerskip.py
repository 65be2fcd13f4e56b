"""LayerSkip: dropped layers, exits that take turns, and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.losses.exits import drop_chances, exit_steps, kept_steps, summed_depth_weights
from fathomlm.train.objective import Objective
from fathomlm.train.reading import build_recipe, read_recipe
from fathomlm.train.recipe import ExitRecipe, LossRecipe
from fathomlm.train.report import read_records
from fathomlm.train.run import train

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(
    family="llama", layers=5, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=4, vocab=37, context=64
)


def decoder(plan: DepthPlan | None = None) -> Decoder:
    made = Decoder(ARCHITECTURE, plan or DepthPlan.vanilla(5).with_exits(range(4)))
    made.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return made


def texts(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, 37, (rows, 9), generator=torch.Generator().manual_seed(5))


def test_layers_are_dropped_as_often_as_the_paper_says() -> None:
    assert drop_chances(5, 0.2) == pytest.approx([0.2 * (2 ** (i / 4) - 1) for i in range(5)])
    assert drop_chances(1, 0.2) == [0.0]
    kept = torch.stack([kept_steps(texts(64), number, 5, 0.4) for number in range(200)]).float()
    part = 1 - kept.mean((0, 2))
    assert part[0] == 0
    assert part.tolist() == pytest.approx(drop_chances(5, 0.4), abs=0.015)
    pairs = kept.permute(1, 0, 2).flatten(1)
    assert torch.corrcoef(pairs[1:]).fill_diagonal_(0).abs().max() < 0.05, "layers are dropped independently"


def test_a_row_drops_the_same_layers_however_the_batch_is_split() -> None:
    tokens = texts(6)
    whole = kept_steps(tokens, 7, 5, 0.5)
    assert torch.equal(whole, torch.cat([kept_steps(part, 7, 5, 0.5) for part in tokens.split(2)], dim=1))
    assert not torch.equal(whole, kept_steps(tokens, 8, 5, 0.5))


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_dropped_layer_changes_nothing(recompute: Any) -> None:
    model, tokens = decoder(), texts()
    kept = torch.ones(5, 3, dtype=torch.bool)
    kept[3, 1] = kept[1, 2] = False
    found = model.states(tokens, at=range(5), kept_SB=kept, recompute=recompute)
    whole = model.states(tokens, at=range(5))
    torch.testing.assert_close(found[4][0], whole[4][0])
    torch.testing.assert_close(found[3][1], found[2][1])
    shorter = Decoder(ARCHITECTURE, DepthPlan.vanilla(5))
    shorter.load_state_dict(model.state_dict())
    shorter.layers[1] = torch.nn.Module()
    shorter.layers[1].forward = lambda x, context: x  # type: ignore[method-assign]
    torch.testing.assert_close(found[4][2], shorter.states(tokens)[4][2])


def test_weights_are_the_papers_and_add_up_to_one() -> None:
    weights = summed_depth_weights((1, 2, 3, 4, 5), 0.2)
    scores = [0.0, 0.2 * 1, 0.2 * 3, 0.2 * 6, 4 + 0.2 * 6]
    assert weights == pytest.approx([score / sum(scores) for score in scores])


def test_exits_take_turns_and_validation_sees_all() -> None:
    model, tokens = decoder(), texts()
    recipe = LossRecipe(exits=ExitRecipe(at="all", weights="layerskip", coefficient=0.2, rotate=3))
    objective = Objective(model, recipe).train()
    states = model.states(tokens, at=range(5))
    losses = [
        F.cross_entropy(model.logits(model.norm(states[i])).flatten(0, 1), tokens.flatten(), reduction="sum")
        for i in range(5)
    ]
    scores = [0.0, 0.2 * 1, 0.2 * 3, 0.2 * 6, 4 + 0.2 * 6]
    seen = []
    for step in range(4):
        objective.warm_up(step, tokens.device)
        total, parts = objective(tokens, tokens)
        turn = [i for i in range(4) if i % 3 == step % 3] + [4]
        wanted = sum(scores[i] * losses[i] for i in turn) / sum(scores[i] for i in turn)
        torch.testing.assert_close(total, wanted)
        seen.append(turn[:-1])
        assert objective.resting == {f"exit_{i + 1}" for i in range(4) if i not in turn}
        by_name = dict(zip(objective.names, parts.tolist(), strict=True))
        assert [name for name, part in by_name.items() if not part] == [f"exit_{i + 1}" for i in range(4) if i not in turn]
    assert seen == [[0, 3], [1], [2], [0, 3]]
    _, parts = objective.eval()(tokens, tokens)
    torch.testing.assert_close(parts, torch.stack([losses[4], *losses[:4]]))
    assert not objective.resting


def test_dropout_is_for_training_alone() -> None:
    model, tokens = decoder(DepthPlan.vanilla(5)), texts(8)
    objective = Objective(model, LossRecipe(layer_dropout=0.9))
    objective.warm_up(3, tokens.device)
    plain = Objective(model, LossRecipe())
    whole = plain(tokens, tokens)[0]
    assert torch.equal(objective.eval()(tokens, tokens)[0], whole)
    dropped = objective.train()(tokens, tokens)[0]
    kept = kept_steps(tokens, 3, 5, 0.9)
    state = model.states(tokens, kept_SB=kept)[4]
    wanted = F.cross_entropy(model.logits(model.norm(state)).flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(dropped, wanted)
    assert not torch.isclose(dropped, whole)


def fields(corpus: Path, source: Path, out: Path) -> dict[str, Any]:
    return {
        "model": {"source": str(source)},
        "data": {"path": str(corpus), "context": 32},
        "budget": {"steps": 24},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 3e-3},
        "loss": {"exits": {"at": "all", "weights": "layerskip", "coefficient": 0.2, "rotate": 2}, "layer_dropout": 0.2},
        "evaluate": {"first": True, "rows": 8},
        "log": {"every": 1, "tensorboard": False},
        "out": str(out),
        "device": "cpu",
    }


def test_a_run_teaches_the_exits_however_its_batch_is_split(
    token_corpus: Path, plain_source: Path, tmp_path: Path, weights_of: Any
) -> None:
    values = fields(token_corpus, plain_source, tmp_path / "run")
    train(build_recipe(values))
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    before, *_, after = (record for record in records if record["kind"] == "validation")
    assert before["exits"].keys() == after["exits"].keys() != set()
    assert all(after["exits"][name] < before["exits"][name] for name in after["exits"])
    trained = [record["parts"].keys() for record in records if record["kind"] == "train"]
    assert trained[0] != trained[1]
    assert trained[0] == trained[2]
    split = build_recipe(values | {"out": str(tmp_path / "split"), "batch": {"sequences": 4, "micro": 2}})
    train(split)
    whole, parted = (weights_of(tmp_path / name / "last") for name in ("run", "split"))
    for name, value in whole.items():
        torch.testing.assert_close(value, parted[name], rtol=1e-3, atol=1e-4)


def test_the_recipe_is_the_papers() -> None:
    recipe = read_recipe("layerskip-smollm2-135m")
    assert (recipe.loss.layer_dropout, recipe.train) == (0.1, "all")
    assert recipe.loss.exits is not None
    assert (recipe.loss.exits.at, recipe.loss.exits.rotate, recipe.loss.exits.coefficient) == ("all", 8, 0.2)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"capture": True}, "loss.layer_dropout cannot be combined with capture"),
        ({"train": "relaxation", "model": {"shape": "smollm2-135m", "relax": "lora"}}, "requires train: all"),
        ({"loss": {"exits": {"at": [2], "rotate": 2, "classifier": True}}}, "rotate cannot be combined with .*classifier"),
        (
            {"loss": {"layer_dropout": 0.1, "exits": {"at": [2], "rotate": 2, "classifier": True}}},
            "rotate cannot be combined with .*classifier",
        ),
        ({"loss": {"layer_dropout": 1.0}}, r"loss\.layer_dropout must be >= 0 and < 1"),
    ],
)
def test_recipes_that_no_run_could_mean(more: dict[str, Any], named: str) -> None:
    values: dict[str, Any] = {"budget": {"steps": 1}, "batch": {"sequences": 1}, "model": {"shape": "smollm2-135m"}}
    with pytest.raises(OptionError, match=named):
        build_recipe(values | {"loss": {"layer_dropout": 0.1}} | more)


def test_one_layer_has_no_exit() -> None:
    for weights in ("layerskip", "aggressive"):
        with pytest.raises(OptionError, match=r"loss.exits.at: all requires a model with at least 2 layers"):
            exit_steps(ExitRecipe(at="all", weights=weights), DepthPlan.vanilla(1))  # type: ignore[arg-type]


def test_a_router_decides_for_itself() -> None:
    from fathomlm.depth.routing import build_routing

    plan = DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3))
    with pytest.raises(OptionError, match="cannot be combined with a router"):
        Objective(decoder(plan), LossRecipe(layer_dropout=0.1))
