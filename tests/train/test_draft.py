"""A draft layer behind a frozen model: rolled forward in training as in decoding, trained, saved, packed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.cache import NoCache
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.exiting import DRAFT_STACKS
from fathomlm.depth import Architecture, DepthPlan, ExitParts
from fathomlm.errors import OptionError
from fathomlm.model.attention_mask import TokenBatch, full_masks
from fathomlm.model.decoder import Decoder
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.estimate import estimate
from fathomlm.train.losses.outputs import FURTHER
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe, read_recipe
from fathomlm.train.recipe import ExitRecipe, LossRecipe
from fathomlm.train.report import read_records
from train.exit_runs import Trained, check_compiled_gradients, train_exit

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(
    family="llama", layers=3, hidden=16, intermediate=24, heads=4, kv_heads=2, head_dim=4, vocab=37, context=64
)
PLAN = DepthPlan.vanilla(3).with_exits((), draft=True)
AHEAD = 4


def decoder(layers: int = 3) -> Decoder:
    plan = DepthPlan.vanilla(layers).with_exits((), draft=True)
    made = Decoder(replace(ARCHITECTURE, layers=layers), plan)
    made.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return made


def texts() -> Tensor:
    return torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(5))


def rolled_by_hand(model: Decoder, tokens_1T: Tensor, first: int) -> list[Tensor]:
    """The layer's outputs for the tokens from `first` on, where drafting begins there: one token at a time, over all inputs
    so far."""
    true_1TM = model.states(tokens_1T)[PLAN.unrolled_layers - 1]
    before_1TM, made = F.pad(true_1TM[:, :first], (0, 0, 1, 0)), []
    for end in range(first + 1, tokens_1T.shape[1] + 1):
        x_1TM = model.enter_draft(tokens_1T[:, :end], before_1TM)
        masks = full_masks(ARCHITECTURE, (PLAN.draft_step,), TokenBatch.of(x_1TM, None, None, past=0), x_1TM.dtype)
        made.append(model.run_steps(x_1TM, (PLAN.draft_step,), masks, NoCache(PLAN))[:, -1:])
        before_1TM = torch.cat((before_1TM, made[-1]), dim=1)
    return made


def test_training_rolls_it_forward_as_decoding_does() -> None:
    model, tokens = decoder(), texts()
    with torch.inference_mode():
        last = model.states(tokens)[2]
        found = list(model.draft_states(tokens, last, AHEAD))
        for r, row in enumerate(tokens):
            for first in range(9):
                for ahead, state in enumerate(rolled_by_hand(model, row[None], first)[:AHEAD]):
                    torch.testing.assert_close(found[ahead][r, first + ahead], state[0, 0], rtol=1e-4, atol=1e-5)


def test_documents_of_a_row_are_drafted_apart() -> None:
    model, tokens = decoder(), texts()
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2)
    with torch.inference_mode():
        last = model.states(tokens, documents_BT=documents)[2]
        together = list(model.draft_states(tokens, last, AHEAD, documents_BT=documents))
        alone = list(model.draft_states(tokens[:, :4], last[:, :4], AHEAD))
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[:, :4], other)
        changed = tokens.clone()
        changed[:, :4] = tokens[:, :4].flip(1)
        last[:, :4] += 1
        for one, other in zip(together, model.draft_states(changed, last, AHEAD, documents_BT=documents), strict=True):
            assert torch.equal(one[:, 4:], other[:, 4:])


def test_the_objective_is_the_formula_and_only_the_layer_learns() -> None:
    model, tokens = decoder(), texts()
    targets = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(6))
    targets[0, 3] = IGNORE
    choose_trained(model, "exits")
    exits = ExitRecipe(draft=2, coefficient=0.5, distill="forward_kl", distill_weight=3.0)
    objective = Objective(model, LossRecipe(exits=exits, chunk=7))
    assert objective.names == ("next_token", "draft_1", "draft_1_distill", "draft_2", "draft_2_distill")
    total, parts = objective(tokens, targets)
    last = model.states(tokens)[2]
    wanted = F.cross_entropy(model.logits(model.norm(last)).flatten(0, 1), targets.flatten(), reduction="sum")
    log_p = model.logits(model.norm(last)).log_softmax(-1).detach()
    for ahead, state in enumerate(model.draft_states(tokens, last.detach(), 2)):
        logits = model.logits(model.norm(state))
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        distance = F.kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="none").sum(-1)
        distance = distance[targets != IGNORE].sum()
        wanted = wanted + 0.5 * FURTHER**ahead * (entropy + 3 * distance)
        torch.testing.assert_close(parts[1 + 2 * ahead :][:2], torch.stack((entropy, distance)).detach())
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in learns} == {"exit_draft"}
    slopes = [torch.autograd.grad(loss, list(learns.values())) for loss in (total, wanted)]
    for name, one, other in zip(learns, *slopes, strict=True):
        assert one.abs().max() > 0, name
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # of a frozen model's exits `test_exit_layer` has one that is not
def test_a_compiled_step_has_the_eager_gradients() -> None:
    model, tokens = decoder(layers=1), texts()  # each is traced, which takes a second
    choose_trained(model, "exits")
    objective = Objective(model, LossRecipe(exits=ExitRecipe(draft=2, distill="forward_kl")))

    check_compiled_gradients(model, objective, tokens, tokens)


@pytest.fixture(scope="module")
def trained(token_corpus: Path, plain_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    own = {"at": "recursions", "classifier": False, "draft": 3, "exit_vocab": 128}
    return train_exit(token_corpus, plain_source, tmp_path_factory.mktemp("draft") / "run", own, steps=40, lr=3e-3)


def test_a_run_teaches_it_and_leaves_the_model_as_it_was(trained: Trained, weights_of: Any) -> None:
    before, after = weights_of(trained.source), weights_of(trained.run / "last")
    assert {name.split(".")[1] for name in after if name not in before} == {"exit_draft"}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    records = [r for r in read_records(trained.run / "metrics.jsonl") if r["kind"] == "validation"]
    for name in ("draft_1", "draft_3"):
        assert records[-1]["exits"][name] < records[0]["exits"][name] - 0.05
        assert records[-1]["parts"][f"{name}_distill"] < 0.8 * records[0]["parts"][f"{name}_distill"]
    model = load(trained.run / "last")
    assert model.config.exit_parts == ExitParts(draft=True)
    assert model.plan.draft
    assert len(model.config.exit_vocab) == 128
    own = sum(p.numel() for p in model.decoder.exit_draft.parameters())
    assert own == model.config.exit_parts.parameters(model.architecture, model.plan)


def test_commands_use_it_and_say_so(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last, pack = str(trained.run / "last"), str(tmp_path / "pack")
    assert main(["inspect", last]) == 0
    assert "a draft layer" in " ".join(capsys.readouterr().out.split())
    ask = ["-p", "7: the line is", "--max-new-tokens", "12", "--json"]
    assert main(["generate", str(trained.source), *ask]) == 0
    full = json.loads(capsys.readouterr().out)
    assert main(["export", last, pack, "--format", "exits"]) == 0
    capsys.readouterr()
    for model, more in ((last, ()), (str(trained.source), ("--exits", pack))):
        assert main(["generate", model, *ask, "--decode", "speculative", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["results"][0]["text"] == full["results"][0]["text"]
        assert found["results"][0]["exits"]["drafted"] > 0
        assert (found["exits"]["threshold"], found["exits"]["max_stack"]) == (0.0, DRAFT_STACKS["cpu"])
    assert main(["generate", last, *ask, "--decode", "speculative", "--draft-tree", "3,2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"][0]["text"] == full["results"][0]["text"]
    assert (found["exits"]["draft_tree"], found["exits"]["max_stack"]) == ([3, 2], None)
    for flags, said in (
        (["--draft-tree", "3,2"], "--draft-tree requires --decode"),
        (["--decode", "speculative", "--draft-tree", "3,x"], "--draft-tree"),
        (["--decode", "speculative", "--draft-tree", "3", "--max-stack", "4"], "cannot be combined with"),
    ):
        assert main(["generate", last, *ask, *flags]) == 2
        assert said in capsys.readouterr().err
    again = load(trained.source, exits=pack)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in load(last).state_dict().items())
    assert again.config.exit_vocab == load(last).config.exit_vocab
    save(load(last), tmp_path / "int8", quantize="int8")
    kept, stored = (load(path, dtype="float32").decoder.exit_draft.state_dict() for path in (last, tmp_path / "int8"))
    assert all(torch.equal(value, stored[name]) for name, value in kept.items())
    assert main(["generate", last, *ask, "--decode", "parallel"]) == 2
    assert "has a draft layer, for speculative decoding" in capsys.readouterr().err
    assert main(["export", last, str(tmp_path / "plain")]) == 0
    assert "left out: the draft layer" in capsys.readouterr().err


def test_the_dry_run_counts_it_and_the_shipped_recipe_ships() -> None:
    found = estimate(read_recipe("draft-smollm2-135m"))
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert found.trainable_parameters == found.exit_parameters == layer + 2 * 576 * 576 + 2 * 576
    assert 2 * found.exit_parameters < 12e6


@pytest.mark.parametrize(
    ("exits", "train", "named"),
    [
        ({"draft": 2}, "exits", "requires train: exits and loss.exits.distill"),
        ({"draft": 2, "distill": "forward_kl"}, "all", "requires train: exits and loss.exits.distill"),
        ({"draft": 2, "distill": "forward_kl", "at": [2]}, "exits", "cannot be combined with loss.exits.at"),
        ({"draft": 2, "distill": "forward_kl", "layer": True}, "exits", "cannot be combined with loss.exits.layer"),
        ({"draft": -1}, "exits", r"loss\.exits\.draft must be >= 0"),
    ],
)
def test_recipes_that_no_run_could_mean(exits: dict[str, Any], train: str, named: str) -> None:
    values: dict[str, Any] = {"budget": {"steps": 1}, "batch": {"sequences": 1}, "model": {"shape": "smollm2-135m"}}
    with pytest.raises(OptionError, match=named):
        build_recipe({**values, "loss": {"exits": exits}, "train": train})
