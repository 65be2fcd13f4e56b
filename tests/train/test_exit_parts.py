"""What exits have of their own: adapters and classifiers over a frozen model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import exits_of, load
from fathomlm.cli.main import main
from fathomlm.depth import Architecture, DepthPlan, ExitParts
from fathomlm.errors import CheckpointError, TrainingError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.activations import activation_bytes
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.directory import check_same
from fathomlm.train.estimate import estimate, format_estimate
from fathomlm.train.losses.exits import agreement_loss
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import ExitRecipe, LayerwiseRecipe, LossRecipe
from fathomlm.train.report import read_records
from fathomlm.train.student import read_student
from train.exit_runs import (
    SHAPE,
    Trained,
    batch,
    check_refused,
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
OWN = ("exit_heads.", "exit_adapters.", "exit_classifiers.")


def decoder(exits: tuple[int, ...] = (1,), head: int = 0, adapter: int = 3, classifier: bool = False) -> Decoder:
    """Random weights, also where exits would start as nothing."""
    made = Decoder(ARCHITECTURE, PLAIN.with_exits(exits), None, head, adapter, classifier)
    generator = torch.Generator().manual_seed(0)
    made.reset_parameters(std=0.3, generator=generator)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith(OWN):
                parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    return made


def loss_recipe(at: list[int], head: int = 0, adapter: int = 3, classifier: bool = False, **more: Any) -> LossRecipe:
    exits = ExitRecipe(at=at, coefficient=0.4, head_rank=head, adapter_rank=adapter, classifier=classifier, **more)
    return LossRecipe(exits=exits, chunk=7)


# The model.


@torch.inference_mode()
def test_an_adapter_starts_as_the_plain_exit() -> None:
    fresh = Decoder(ARCHITECTURE, PLAIN.with_exits((1,)), exit_adapter=3, exit_classifier=True)
    fresh.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(fresh.exit_logits(x, 1), fresh.logits(fresh.norm(x)))
    assert not fresh.exit_score(x, 1).any()
    assert fresh.exit_adapters["1"].a.any()


@torch.inference_mode()
def test_an_adapter_is_the_formula() -> None:
    model = decoder(head=2, classifier=True)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    own, head = model.exit_adapters["1"], model.exit_delta(1)
    inner = F.silu((x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * own.norm.weight) @ own.a.T)
    hidden = model.norm(x + inner @ own.b.T)
    torch.testing.assert_close(model.exit_hidden(x, 1), hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.exit_logits(x, 1), model.logits(hidden) + hidden @ head.a.T @ head.b.T)
    judge = model.exit_classifiers["1"]
    torch.testing.assert_close(model.exit_score(x, 1), hidden @ judge.weight[0] + judge.bias)
    assert torch.equal(model.exit_logits(x, 3), model.logits(model.norm(x))), "only that exit has it"


def hub(**fields: Any) -> FathomForCausalLM:
    plan = fields.pop("plan", PLAIN.with_exits((0, 1)))
    model = FathomForCausalLM(FathomConfig.of(ARCHITECTURE, plan, dtype=torch.float32, **fields)).eval()
    model.decoder.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def own(model: FathomForCausalLM) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.decoder.state_dict().items() if name.startswith(OWN)}


def test_another_plan_keeps_what_fits_and_nothing_else() -> None:
    model = hub(exit_adapter=3, exit_classifier=True)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name.startswith(OWN):
                parameter.fill_(7.0)
    moved = replan(model, PLAIN.with_exits((1, 2)), exit_adapter=3, exit_classifier=True)
    found = own(moved)
    assert {name.split(".")[1] for name in found} == {"1", "2"}
    for name, value in found.items():
        assert (value.unique().tolist() == [7.0]) == (name.split(".")[1] == "1"), name
    wider = own(replan(model, model.plan, exit_adapter=4))
    assert {name.rsplit(".", 1)[0] for name in wider} == {f"exit_adapters.{i}{end}" for i in (0, 1) for end in ("", ".norm")}
    for index in (0, 1):
        assert wider[f"exit_adapters.{index}.norm.weight"].unique().tolist() == [1.0], "a fresh adapter, its norm too"
        assert not wider[f"exit_adapters.{index}.b"].any()
    assert replan(model, model.plan, exit_adapter=3, exit_classifier=True) is model
    assert not own(replan(model, PLAIN))


def test_they_are_saved_and_older_models_have_none(tmp_path: Path) -> None:
    model = hub(exit_rank=2, exit_adapter=3, exit_classifier=True)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if name.startswith(OWN):
                parameter.normal_()
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.config.exit_parts == exits_of(tmp_path / "model") == ExitParts(head_rank=2, adapter_rank=3, classifier=True)
    assert own(again).keys() == own(model).keys()
    assert all(torch.equal(value, own(again)[name]) for name, value in own(model).items())
    counted = again.config.exit_parts.parameters(ARCHITECTURE, again.plan)
    assert counted == sum(value.numel() for value in own(again).values())
    config = json.loads((tmp_path / "model/config.json").read_text())
    older = {key: value for key, value in config.items() if key not in ("exit_rank", "exit_adapter", "exit_classifier")}
    (tmp_path / "model/config.json").write_text(json.dumps(older))
    assert not load(tmp_path / "model").config.exit_parts
    for wrong in (-1, "many"):
        (tmp_path / "model/config.json").write_text(json.dumps({**older, "exit_adapter": wrong}))
        with pytest.raises(CheckpointError):
            load(tmp_path / "model")


# The objective.


def by_hand(model: Decoder, tokens: Tensor, targets: Tensor, keep: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Cross entropies of the last output and of the exit after the second step, through `exit_logits`."""
    states = model.states(tokens, at=(1,), keep_BS=keep)
    logits = [model.exit_logits(states[3], 3), model.exit_logits(states[1], 1)]
    return entropy(logits[0], targets) + 0.4 * entropy(logits[1], targets), logits


@pytest.mark.parametrize("head", [0, 2])
def test_the_objective_and_decoding_score_an_exit_alike(head: int) -> None:
    model, (tokens, targets, keep) = decoder(head=head), batch()
    found, parts = Objective(model, loss_recipe([2], head=head))(tokens, targets, keep)
    wanted, logits = by_hand(model, tokens, targets, keep)
    torch.testing.assert_close(parts, torch.stack([entropy(each, targets) for each in logits]).detach())
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(total, list(model.parameters())) for total in (found, wanted)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_layerwise_states_are_without_the_adapter() -> None:
    tokens, targets, keep = batch()
    values = []
    for adapter in (0, 3):
        recipe = LossRecipe(
            exits=ExitRecipe(at=[2], adapter_rank=adapter), layerwise=LayerwiseRecipe(shallow=2, mapping="unif")
        )
        objective = Objective(decoder(adapter=adapter), recipe)
        values.append(dict(zip(objective.names, objective(tokens, targets, keep)[1].tolist(), strict=True)))
    assert values[0]["layerwise"] == values[1]["layerwise"]
    assert values[0]["exit_2"] != values[1]["exit_2"]


@pytest.mark.parametrize("distill", [None, "forward_kl"])
def test_only_what_exits_add_gets_a_gradient(distill: str | None) -> None:
    model, (tokens, targets, keep) = decoder(head=2, classifier=True), batch()
    choose_trained(model, "exits")
    recipe = loss_recipe([2], head=2, classifier=True, distill=distill)
    Objective(model, recipe)(tokens, targets, keep)[0].backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if name.startswith(OWN)}
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_frozen_model_keeps_only_the_adapters_activations(precision: str) -> None:
    """Autograd's own count; weights and their narrow copies are left out."""
    model, (tokens, _, _) = decoder(exits=(0, 1)), batch(rows=2, length=50)
    choose_trained(model, "exits")
    with saved_activations(model, precision) as kept:
        states = model.states(tokens, at=(0, 1))
        assert not kept
        hidden = [model.exit_hidden(states[index], index) for index in (0, 1)]
    values: dict[str, Any] = {
        "model": {"architecture": {"family": "llama", **SHAPE}},
        "data": {"context": 50},
        "budget": {"steps": 1},
        "batch": {"sequences": 2},
        "loss": {"exits": {"at": [1, 2], "adapter_rank": 3}},
        "precision": precision,
    }
    alone, frozen = (
        build_recipe({**values, "train": "exits", "loss": {"exits": {**values["loss"]["exits"], **more}}})
        for more in ({"adapter_rank": 0, "classifier": True}, {})
    )
    adapters = activation_bytes(frozen, read_student(frozen)) - activation_bytes(alone, read_student(alone))
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) == 100 * adapters
    assert all(each.requires_grad for each in hidden)
    whole = build_recipe(values)
    assert activation_bytes(frozen, read_student(frozen)) < activation_bytes(whole, read_student(whole)) / 2


# The classifier.


def test_the_classifiers_loss_by_a_plain_formula() -> None:
    model, (tokens, targets, keep) = decoder(head=2, classifier=True), batch()
    objective = Objective(model, loss_recipe([2], head=2, classifier=True, distill="forward_kl"))
    assert objective.names == ("next_token", "exit_2", "exit_2_distill", "exit_2_classifier")
    total, parts = objective(tokens, targets, keep)
    with torch.no_grad():
        states = model.states(tokens, at=(1,), keep_BS=keep)
        agrees = model.exit_logits(states[1], 1).argmax(-1) == model.exit_logits(states[3], 3).argmax(-1)
        p = model.exit_score(states[1], 1).double().sigmoid()
        wanted = -torch.where(agrees, p.log(), (1 - p).log())[targets != IGNORE].sum()
    assert 0 < agrees[targets != IGNORE].sum() < (targets != IGNORE).sum()
    assert float(parts[3]) == pytest.approx(float(wanted), rel=1e-5)
    assert total.item() == pytest.approx(float(parts[0] + 0.4 * (parts[1] + parts[2]) + parts[3]), rel=1e-6)


def test_scores_that_are_sure_have_finite_losses() -> None:
    scores = torch.tensor([200.0, -200.0, 200.0, 0.0])
    loss = agreement_loss(scores, torch.tensor([1, 2, 3, 4]), torch.tensor([1, 9, 9, 4]), torch.tensor([0, 0, 0, IGNORE]))
    assert float(loss) == pytest.approx(200.0)


def test_the_classifiers_sum_does_not_depend_on_how_a_batch_is_split() -> None:
    model, (tokens, targets, keep) = decoder(classifier=True), batch()
    objective = Objective(model, loss_recipe([2], classifier=True))
    whole, parts = objective(tokens, targets, keep)
    split = [objective(tokens[i : i + 1], targets[i : i + 1], keep[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(torch.stack([each for _, each in split]).sum(0), parts, rtol=1e-5, atol=1e-5)
    names = [name for name, _ in model.named_parameters() if name.startswith("exit_")]
    weights = [model.get_parameter(name) for name in names]
    together = torch.autograd.grad(whole, weights)
    apart = torch.autograd.grad(sum(total for total, _ in split), weights)  # type: ignore[arg-type]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_classifier_does_not_change_what_it_judges() -> None:
    tokens, targets, keep = batch()
    slopes = []
    for classifier in (False, True):
        model = decoder(classifier=classifier)
        total, _ = Objective(model, loss_recipe([2], classifier=classifier))(tokens, targets, keep)
        total.backward()
        slopes.append({name: p.grad for name, p in model.named_parameters() if not name.startswith("exit_classifiers.")})
    assert all(torch.equal(slopes[0][name], slopes[1][name]) for name in slopes[0])


def test_a_trained_classifier_tells_agreeing_tokens_from_others() -> None:
    """Half of the words are loud, so that later layers seldom change what is chosen for them. Asked is how often an
    agreeing token is ranked above one that is not, on new rows; a coin: 0.5."""
    shape = Architecture(family="llama", **{**SHAPE, "hidden": 32})
    model, generator = Decoder(shape, PLAIN.with_exits((1,)), exit_classifier=True), torch.Generator().manual_seed(0)
    model.reset_parameters(std=0.3, generator=generator)
    with torch.no_grad():
        model.embed.weight[:18] *= 5
        for layer in model.layers:
            layer.attn.o.weight *= 0.2
            layer.mlp.down.weight *= 0.2
    choose_trained(model, "exits")
    objective = Objective(model, loss_recipe([2], adapter=0, classifier=True))
    optimizer = torch.optim.Adam(model.exit_classifiers.parameters(), lr=0.03)
    for _ in range(120):
        tokens = torch.randint(0, 37, (8, 16), generator=generator)
        objective(tokens, tokens)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        states = model.states(torch.randint(0, 37, (40, 16), generator=generator), at=(1,))
        agrees = (model.exit_logits(states[1], 1).argmax(-1) == model.exit_logits(states[3], 3).argmax(-1)).flatten()
        scores = model.exit_score(states[1], 1).flatten()
    assert 0.2 < agrees.float().mean() < 0.9
    assert (scores[agrees][:, None] > scores[~agrees][None]).float().mean() > 0.65


# Whole runs.


@pytest.fixture(scope="module")
def trained(token_corpus: Path, plain_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("exits") / "run"
    return train_exit(token_corpus, plain_source, out, {"adapter_rank": 2}, steps=150, lr=1e-2)


def test_the_model_under_the_exits_stays_bit_for_bit(trained: Trained, weights_of: Callable[[Path], dict[str, Any]]) -> None:
    before, after = weights_of(trained.source), weights_of(trained.run / "last")
    assert {name for name in after if name not in before} == {
        f"decoder.{name}"
        for name in (
            *(f"exit_adapters.0.{part}" for part in ("a", "b", "norm.weight")),
            *(f"exit_classifiers.0.{part}" for part in ("weight", "bias")),
        )
    }
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    check_same_logits(trained.source, trained.run / "last")


def test_training_an_adapter_lowers_its_exits_loss(trained: Trained) -> None:
    records = [r for r in read_records(trained.run / "metrics.jsonl") if r["kind"] == "validation"]
    first, last = records[0], records[-1]
    assert first["loss"] == last["loss"], "the last output's"
    assert last["exits"].keys() == {"1"}
    assert last["exits"]["1"] < first["exits"]["1"] - 0.1
    assert last["parts"]["exit_1_distill"] < 0.8 * first["parts"]["exit_1_distill"]
    assert first["parts"]["exit_1_classifier"] == pytest.approx(0.6931, abs=1e-3), "it starts undecided"
    assert last["parts"]["exit_1_classifier"] < 0.68


def test_a_trained_classifier_decides_who_leaves(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(trained.run / "last"), "-p", "7: the line is", "--max-new-tokens", "24", "--json"]
    words += ["--decode", "parallel", "--confidence", "classifier"]
    records = {}
    for threshold in ("0.0", "1.0"):
        assert main([*words, "--threshold", threshold]) == 0
        records[threshold] = json.loads(capsys.readouterr().out)
    assert [record["exits"]["exit_rate"] for record in records.values()] == [1, 0]
    found = sorted(records["1.0"]["results"][0]["confidences"])
    middle = range(max(1, len(found) // 3), 2 * len(found) // 3 + 1)
    widest = max(middle, key=lambda i: found[i] - found[i - 1])
    between = (found[widest] + found[widest - 1]) / 2  # no rounding moves a token over it
    assert main([*words, "--threshold", str(between)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    model = load(trained.run / "last")
    with torch.inference_mode():
        states = model.decoder.states(torch.tensor([[*row["prompt_tokens"], *row["tokens"][:-1]]]), at=(0,))
        sure = model.decoder.exit_score(states[0], 0).sigmoid()[0, len(row["prompt_tokens"]) - 1 :].tolist()
    assert row["confidences"] == pytest.approx(sure, abs=1e-4), "of the exact state, as the classifier learnt it"
    assert [layer == 1 for layer in row["exit_layers"]] == [value > between for value in sure]
    assert len(set(row["exit_layers"])) == 2


@torch.inference_mode()
def test_every_mode_decodes_through_the_adapter(trained: Trained) -> None:
    """The shallow model's text is that of the adapted exit, and the whole model's is the source's still."""
    model, tokens, static = decode_every_mode(trained)
    for token in static:
        states = model.decoder.states(torch.tensor([tokens]), at=(0,))
        assert int(model.decoder.exit_logits(states[0][:, -1], 0).argmax()) == token
        tokens.append(token)
    with_adapter, without = model.decoder.exit_hidden(states[0], 0), model.decoder.norm(states[0])
    assert not torch.allclose(with_adapter, without, atol=0.1)


def test_inspect_shows_them(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(trained.run / "last"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["exits"], record["exit_parameters"]) == ([1], 32 + 2 * 2 * 32 + 33)
    assert main(["inspect", str(trained.run / "last")]) == 0
    out = capsys.readouterr().out
    assert "exits after 1" in out
    assert "parameters of exits" in out
    assert main(["inspect", str(trained.source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exits"] == []


def test_an_export_leaves_them_out_and_says_so(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained.run / "last"), str(tmp_path / "plain")]) == 0
    assert "left out: the exits after 1 with their adapters, classifiers" in capsys.readouterr().err
    check_same_logits(tmp_path / "plain", trained.source)


def test_a_run_is_resumed_exactly(
    trained: Trained, recipe: Callable[..., Any], tmp_path: Path, weights_of: Callable[[Path], dict[str, Any]]
) -> None:
    changes = {"model": {"architecture": None, "source": str(trained.source), "recursions": 1}, "train": "exits"}
    changes["loss"] = {"exits": {"at": [2], "adapter_rank": 4, "classifier": True}}
    check_resumes(recipe, weights_of, tmp_path, **changes)


def test_a_checkpoint_from_before_these_fields_goes_on(recipe: Callable[..., Any]) -> None:
    plain, adapted = (recipe(loss={"exits": {"adapter_rank": rank}}) for rank in (0, 2))
    older = dataclasses.asdict(plain)
    del older["loss"]["exits"]["adapter_rank"], older["loss"]["exits"]["classifier"]
    check_same(plain, older, "run")
    with pytest.raises(TrainingError, match=r"loss\.exits\.adapter_rank \(was None, is 2\)"):
        check_same(adapted, older, "run")


# Recipes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": "exits"},
            "train: exits requires something that exits add: loss.exits.adapter_rank, layer, head_rank, classifier",
        ),
        ({"train": "exits", "loss": {"exits": {"at": [2]}}}, "train: exits requires something that exits add"),
        ({"train": "exit_heads", "loss": {"exits": {"adapter_rank": 2}}}, "train: exit_heads requires loss.exits.head_rank"),
        ({"loss": {"exits": {"adapter_rank": -1}}}, "loss.exits.adapter_rank must be >= 0, got -1"),
        ({"loss": {"exits": {"classifier": "yes please"}}}, "recipe: loss.exits.classifier must be"),
    ],
)
def test_recipes_that_no_run_could_mean(changes: dict[str, Any], message: str) -> None:
    check_refused(changes, message)


def test_the_dry_run_counts_them() -> None:
    values: dict[str, Any] = {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 1}, "batch": {"sequences": 4}}
    exits = {"at": [8, 15], "adapter_rank": 64, "classifier": True}
    found = estimate(build_recipe({**values, "loss": {"exits": exits}, "train": "exits"}))
    each = 576 + 2 * 64 * 576 + 577
    assert found.trainable_parameters == found.exit_parameters == 2 * each
    assert (found.memory.gradients, found.memory.optimizer) == (4 * 2 * each, 8 * 2 * each)
    head, layers = 49_152 * 576, found.flops_per_token_6n // 6 - 49_152 * 576
    assert found.work_flops == found.tokens * (2 * (layers + head) + 2 * (4 * head + 6 * (2 * 64 * 576 + 576)))
    assert "  exits       149.8K besides" in format_estimate(found)
    whole = estimate(build_recipe({**values, "loss": {"exits": exits}}))
    assert found.memory.activations < whole.memory.activations / 10
    assert found.memory.head < whole.memory.head
