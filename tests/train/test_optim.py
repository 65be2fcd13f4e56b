"""Optimizers: who learns, who decays, each weight once."""

from __future__ import annotations

import pytest
import torch

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.optim import build_optimizer, choose_trained, named_state, parameter_groups, set_rate
from fathomlm.train.recipe import OptimizerRecipe

SHAPE = {"layers": 4, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab": 37}
ARCHITECTURE = Architecture(family="qwen2", qkv_bias=True, **SHAPE)


def decoder(relax=None, exits=(), rank=0, plan=None):
    plan = plan or DepthPlan.build("cycle", 2, 4)
    relaxation = build_relaxation(ARCHITECTURE.linears(), relax, 2 if relax == "lora" else None, None)
    made = Decoder(ARCHITECTURE, plan.with_exits(exits), relaxation, exit_rank=rank)
    made.reset_parameters()
    return made


def test_shared_weights_are_in_one_group_once():
    model = decoder("lora")
    groups = parameter_groups(model, 0.1)
    held = [parameter for group in groups for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len([p for p in held if p is model.layers[0].mlp.up.weight]) == 1
    assert len(model.layers) == 2


def test_vectors_do_not_decay():
    model = decoder("lora")
    matrices, vectors = parameter_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left_out = {names[id(p)] for p in vectors["params"]}
    assert {"norm.weight", "layers.0.attn.q.bias"} <= left_out
    assert any(name.startswith("deltas.0.offsets.") for name in left_out)


def test_decay_shrinks_matrices_and_leaves_vectors():
    model = decoder()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerRecipe(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.dim() > 1 else 1.0))


def test_only_what_learns_is_held():
    model = decoder("lora")
    choose_trained(model, "relaxation")
    held = {id(p) for group in parameter_groups(model, 0.1) for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if name.startswith("deltas.")}
    encoded = decoder("encoding")
    choose_trained(encoded, "relaxation")
    assert [name for name, p in encoded.named_parameters() if p.requires_grad] == ["encodings.0", "encodings.1"]
    (vectors,) = parameter_groups(encoded, 0.1)
    assert vectors["weight_decay"] == 0.0
    choose_trained(encoded, "all")
    assert all(p.requires_grad for p in encoded.parameters())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("relaxation", "the model has no relaxation"),
        ("exits", "the model has no exits that add anything"),
        ("exit_heads", "the model has no exits that add anything"),
    ],
)
def test_nothing_to_learn(what, message):
    with pytest.raises(OptionError, match=message):
        choose_trained(decoder(), what)


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_the_rate_is_what_it_says(kind):
    """A first step moves each weight by about the rate, whatever its size (torch's own Adafactor would scale by it)."""
    model = torch.nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(100.0)
    optimizer = build_optimizer(model, OptimizerRecipe(kind=kind, lr=1.0, weight_decay=0.0))
    set_rate(optimizer, 0.25)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert (100.0 - model.weight).mean().item() == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_state_goes_by_name(kind):
    model = decoder()
    optimizer = build_optimizer(model, OptimizerRecipe(kind=kind))
    assert named_state(model, optimizer) == {}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert named_state(model, optimizer).keys() == {name for name, _ in model.named_parameters()}


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest():
    model = decoder("lora")
    optimizer = build_optimizer(model, OptimizerRecipe(kind="muon", lr=0.01, weight_decay=0.0))
    set_rate(optimizer, 0.02)
    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    moved = {name for name, state in named_state(model, optimizer).items() if "momentum_buffer" in state}
    assert moved == {name for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
    update = before["layers.0.mlp.up.weight"] - model.layers[0].mlp.up.weight.detach()
    # Five Newton-Schulz steps leave every singular value near 1: the update is that times 0.2 sqrt(24) of the rate.
    assert ((torch.linalg.svdvals(update) / (0.02 * 0.2 * 24**0.5) - 1).abs() < 0.4).all()
    embedding = (before["embed.weight"] - model.embed.weight.detach()).abs()
    torch.testing.assert_close(embedding, torch.full_like(embedding, 0.02), rtol=1e-3, atol=0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_muon_requires_a_matrix_of_a_layer():
    model = decoder("lora")
    choose_trained(model, "relaxation")
    with pytest.raises(OptionError, match="no matrix of a layer learns"):
        build_optimizer(model, OptimizerRecipe(kind="muon"))
