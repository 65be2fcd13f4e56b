"""Mixtures of experts: by hand, counted, tied as they are, and what they cannot be combined with."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fathomlm
from fathomlm.checkpoints.huggingface import plan_from_config
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.cost import count
from fathomlm.errors import FathomError, OptionError, UnsupportedModel
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.model.quantize import quantize_layers
from fathomlm.train.estimate import estimate
from fathomlm.train.reading import build_recipe

SHAPE = Architecture(
    family="qwen3_moe", layers=4, hidden=16, intermediate=12, heads=2, kv_heads=1, head_dim=8, vocab=40, qk_norm=True,
    experts=5, experts_per_token=2, experts_normed=True, tied_embeddings=False,
)  # fmt: skip
TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(architecture: Architecture = SHAPE) -> FathomForCausalLM:
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(architecture.layers))).eval()
    model.decoder.reset_parameters(std=0.4, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("normed", [True, False])
@torch.inference_mode()
def test_a_token_is_the_sum_of_its_experts(normed: bool) -> None:
    mlp: Any = model_of(dataclasses.replace(SHAPE, experts_normed=normed)).decoder.layers[0].mlp
    x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(2))
    found = mlp(x, None)[0]
    for token, made in zip(x[0], found, strict=True):
        parts = (mlp.router.weight @ token).softmax(-1)
        best = parts.argsort(descending=True)[:2].tolist()
        total = sum(parts[e] for e in best) if normed else 1.0
        right = torch.zeros(16)
        for e in best:
            inner = F.silu(mlp.gate.weight[e] @ token) * (mlp.up.weight[e] @ token)
            right += parts[e] / total * (mlp.down.weight[e] @ inner)
        torch.testing.assert_close(made, right)


def test_all_experts_are_parameters_and_the_chosen_ones_are_flops() -> None:
    model = model_of()
    counted = count(SHAPE, model.plan, context=2)
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    one, attention = 3 * 16 * 12, 16 * (16 + 8 + 8 + 16)
    per_layer = 2 * (attention + 5 * 16 + 2 * one) + 4 * 16 * 1
    assert counted.forward_flops_per_token == 4 * per_layer


@torch.inference_mode()
def test_experts_are_tied_as_they_are() -> None:
    model = model_of()
    tied = fathomlm.convert(model, recursions=2, relax="lora", rank=2, init="stepwise")
    for ours, base in enumerate((0, 3)):
        for name in ("router", "gate", "up", "down"):
            own, its = (getattr(each.decoder.layers[n].mlp, name).weight for each, n in ((tied, ours), (model, base)))
            assert torch.equal(own, its)
    mean = fathomlm.convert(model, recursions=2, init="average").decoder.layers[0].mlp.up.weight
    torch.testing.assert_close(mean, (model.decoder.layers[0].mlp.up.weight + model.decoder.layers[2].mlp.up.weight) / 2)


def test_they_learn_and_the_dry_run_counts_them() -> None:
    model = model_of()
    model.decoder.train().states(TOKENS)[3].square().sum().backward()
    layer = model.decoder.layers[0].mlp
    assert all(each.weight.grad.abs().sum() > 0 for each in (layer.router, layer.gate, layer.up, layer.down))
    values: dict[str, Any] = {"model": {"architecture": SHAPE.to_dict()}, "data": {"context": 16}, "budget": {"steps": 1}}
    found = estimate(build_recipe({**values, "batch": {"sequences": 2}}))
    assert found is not None


def test_what_experts_cannot_be_combined_with() -> None:
    with pytest.raises(OptionError, match="quantize cannot be combined with experts"):
        quantize_layers(model_of().decoder, "int8", None)  # type: ignore[arg-type]
    for wrong in ({"experts_per_token": 6}, {"experts_per_token": 0}, {"experts": 0}):
        with pytest.raises(OptionError, match="experts_per_token must be from 1 to"):
            dataclasses.replace(SHAPE, **wrong)
    with pytest.raises(OptionError, match="experts require gated SiLU"):
        dataclasses.replace(SHAPE, residual="sandwich")


CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2,
    "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2, "vocab_size": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mlp_only_layers": [0]}, UnsupportedModel, "layers that have no experts"),
        ({"decoder_sparse_step": 2}, UnsupportedModel, "layers that have no experts"),
        ({"num_experts_per_tok": 9}, FathomError, "experts_per_token must be from 1 to 5, got 9"),
        ({"num_experts": -3}, FathomError, "num_experts must be"),
        ({"moe_intermediate_size": "12"}, FathomError, "moe_intermediate_size must be"),
    ],
)
def test_a_configuration_that_no_block_computes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    assert plan_from_config(CONFIG, "here")[0].intermediate == 12
    with pytest.raises(error, match=message):
        plan_from_config(CONFIG | change, "here")
