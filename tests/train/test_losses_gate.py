"""The gate's loss: its distribution by hand, tokens that count differently in the head, and gates that learn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fathomlm
from fathomlm.checkpoints.native import save
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.losses.exits import exit_entropy, exit_log_probabilities, expected_exit
from fathomlm.train.losses.head import HeadTerms, head_loss, plain_head_loss
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import ExitRecipe, LossRecipe
from fathomlm.train.report import read_records
from fathomlm.train.run import train
from train.exit_runs import values_for

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHITECTURE = Architecture(
    family="llama", layers=6, hidden=16, intermediate=24, heads=2, kv_heads=1, head_dim=8, context=64, vocab=37
)
CYCLE = DepthPlan.build("cycle", 3, 6).with_loop_norm()
PLAN = CYCLE.with_exits(CYCLE.recursion_ends(), gate=True)


def decoder() -> Decoder:
    made = Decoder(ARCHITECTURE, PLAN)
    made.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))
    return made


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(0, 37, (2, 12), generator=generator) for _ in range(2))
    targets[0, 9:] = IGNORE
    return tokens, targets


def recipe(entropy: float) -> LossRecipe:
    return LossRecipe(exits=ExitRecipe(weights="gate", entropy=entropy), chunk=7)


def test_the_distribution_by_hand() -> None:
    scores = torch.tensor([[0.3, -1.2], [-200.0, 200.0], [200.0, 0.0]])
    a, b = (1 / (1 + math.exp(-s)) for s in (0.3, -1.2))
    log_p = exit_log_probabilities(scores)
    torch.testing.assert_close(log_p[0].exp(), torch.tensor([a, (1 - a) * b, (1 - a) * (1 - b)]))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(3))
    assert log_p.isfinite().all()
    assert expected_exit(log_p)[1:].tolist() == [2.0, 1.0]
    torch.testing.assert_close(exit_entropy(log_p)[1:], torch.zeros(2))
    torch.testing.assert_close(exit_entropy(torch.full((1, 4), -math.log(4))), torch.tensor([math.log(4)]))


def test_tokens_that_count_differently_are_the_twins_in_value_and_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(shape, generator=generator, requires_grad=True) for shape in ((11, 6), (9, 6)))
    weights = torch.rand(11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 9, (11,), generator=generator)
    targets[3] = IGNORE
    terms = HeadTerms(weight=0.7)
    both = (
        head_loss(hidden, weight, targets, terms, chunk=4, weights_N=weights)[0],
        plain_head_loss(hidden, weight, targets, terms, weights_N=weights),
    )
    found = [(loss, *torch.autograd.grad(loss * 1.5, (hidden, weight, weights))) for loss in both]
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow)
    assert float(found[0][3][3]) == 0.0


def test_the_objective_is_the_expected_loss_less_the_entropy() -> None:
    model, (tokens, targets) = decoder(), batch()
    torch.nn.init.normal_(model.exit_gate.weight, generator=torch.Generator().manual_seed(2))
    objective = Objective(model, recipe(0.25))
    total, parts = objective(tokens, targets)
    states = model.states(tokens, at=(1, 3))
    hidden = [model.norm(states[index]).flatten(0, 1) for index in (1, 3, 5)]
    losses = torch.stack([F.cross_entropy(model.logits(h), targets.flatten(), reduction="none") for h in hidden], 1)
    g = [model.exit_gate(h).sigmoid() for h in hidden[:2]]
    p = torch.stack([g[0], (1 - g[0]) * g[1], (1 - g[0]) * (1 - g[1])], 1)
    counted = targets.flatten() != IGNORE
    right = (p * losses)[counted].sum() + 0.25 * (p * p.log())[counted].sum()
    torch.testing.assert_close(total, right)
    named = dict(zip(objective.names, parts.tolist(), strict=True))
    assert set(named) == {"next_token", "exit_2", "exit_4", "gate_entropy", "gate_depth"}
    assert named["exit_2"] == pytest.approx(float(losses[:, 0].detach().sum()), rel=1e-5)
    assert named["gate_depth"] == pytest.approx(float((p.detach() @ torch.tensor([1.0, 2.0, 3.0]))[counted].sum()), rel=1e-5)
    ours, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in (total, right))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entropy", [0.0, 30.0])
def test_a_gate_learns_where_each_token_is_best_chosen(entropy: float) -> None:
    """Over a frozen model: without the entropy it does better than any one exit for all tokens; with much of it, the gate
    stays as undecided as can be."""
    model, (tokens, targets) = decoder(), batch()
    choose_trained(model, "exits")
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["exit_gate.weight", "exit_gate.bias"]
    objective, optimizer = Objective(model, recipe(entropy)), torch.optim.Adam(model.exit_gate.parameters(), lr=0.2)
    first = float(objective(tokens, targets)[0].detach())
    for _ in range(100):
        optimizer.zero_grad()
        total, parts = objective(tokens, targets)
        total.backward()
        optimizer.step()
    named = dict(zip(objective.names, parts.tolist(), strict=True))
    assert float(total.detach()) < first
    if entropy:
        assert named["gate_entropy"] / 21 == pytest.approx(math.log(3), abs=0.01)
    else:
        assert float(total.detach()) < 0.98 * min(named["next_token"], named["exit_2"], named["exit_4"])


def values(corpus: Path, source: Path, out: Path, **more: Any) -> dict[str, Any]:
    own = {"out": str(out), "model": {"source": str(source)}, "budget": {"steps": 12}}
    return values_for(corpus) | own | {"loss": {"exits": {"weights": "gate"}}, "optimizer": {"lr": 3e-3}, **more}


@pytest.mark.parametrize("which", ["all", "exits"])
def test_a_looped_model_is_trained_with_its_gate(token_corpus: Path, tmp_path: Path, which: str) -> None:
    plan = CYCLE if which == "all" else PLAN  # a fresh gate, and one that was there
    architecture = dataclasses.replace(ARCHITECTURE, vocab=257)
    model = FathomForCausalLM(FathomConfig.of(architecture, plan))
    model.decoder.reset_parameters(generator=torch.Generator().manual_seed(0))
    model.tokenizer = Corpus.open(token_corpus).load_tokenizer()
    train(build_recipe(values(token_corpus, save(model, tmp_path / "source"), tmp_path / "run", train=which)))
    records = [r["parts"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert records[0]["gate_depth"] == pytest.approx(1.75)  # of a gate that says 0 everywhere: 1/2, 1/4, 1/4
    assert records[-1]["gate_depth"] != records[0]["gate_depth"]
    trained = fathomlm.load(tmp_path / "run" / "last")
    assert trained.plan == PLAN
    assert trained.decoder.exit_gate.weight.abs().sum() > 0
    same = torch.equal(trained.decoder.layers[0].attn.q.weight, model.decoder.layers[0].attn.q.weight)
    assert same == (which == "exits")
    exiting = fathomlm.Exiting(mode="select", confidence="gate", threshold=0.6)
    found = fathomlm.generate(trained, [[3, 5, 7]], max_new_tokens=4, ignore_eos=True, exiting=exiting)[0]
    assert set(found.exit_layers) <= {2, 4, 6}


def test_a_model_like_ouro_is_trained_from_scratch_and_written_as_one(token_corpus: Path, tmp_path: Path) -> None:
    sizes = ("layers", "hidden", "intermediate", "heads", "head_dim", "context")
    shape = {name: getattr(ARCHITECTURE, name) for name in sizes}
    own = {"family": "ouro", "residual": "sandwich", "kv_heads": 2, "tied_embeddings": False}
    model = {"architecture": shape | own, "recursions": 3, "loop_norm": True}
    train(build_recipe(values(token_corpus, tmp_path, tmp_path / "run", model=model)))
    trained = fathomlm.load(tmp_path / "run" / "last")
    assert trained.plan == PLAN
    again = fathomlm.load(fathomlm.export(trained, tmp_path / "ouro"))
    assert (again.plan, again.architecture.family) == (PLAN, "ouro")
    tokens = torch.tensor([[3, 5, 7]])
    torch.testing.assert_close(again(tokens).logits, trained(tokens).logits)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"exits": {"weights": "gate", "at": [2]}}, "gate requires loss.exits.at: recursions"),
        ({"exits": {"weights": "gate", "distill": "forward_kl"}}, "cannot be combined with loss.exits.distill"),
        ({"exits": {"weights": "gate"}, "distill": {"source": "smollm2-135m"}}, "cannot be combined with loss.distill"),
        ({"exits": {"weights": "gates"}}, "weights"),
        ({"exits": {"weights": "gate", "entropy": -1}}, "entropy must be >= 0"),
    ],
)
def test_what_a_gate_cannot_be_combined_with(tmp_path: Path, loss: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_recipe(values(tmp_path, tmp_path, tmp_path / "out") | {"loss": loss})
