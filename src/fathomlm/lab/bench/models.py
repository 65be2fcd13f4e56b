"""Models to measure: with random weights of any shape and plan, and the plain one that every figure is compared with."""

from __future__ import annotations

import dataclasses

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.model.hub import FathomConfig, FathomForCausalLM, empty_model


def random_model(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> FathomForCausalLM:
    """A model that was never trained. Time does not depend on weights, but for what they decide: where depth is to be a
    trained model's, force it."""
    model = empty_model(FathomConfig.of(architecture, plan, relaxation, dtype=dtype))
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(seed)  # what has no generator of its own draws from torch's
    model.decoder.reset_parameters(generator=torch.Generator(device).manual_seed(seed))
    ready: FathomForCausalLM = model.eval().requires_grad_(False)
    return ready


def plain_model(model: FathomForCausalLM, seed: int = 0) -> FathomForCausalLM:
    """The plain Transformer that is as deep as `model` unrolled, with random weights. That is also the thesis' rule: a
    model to which layers were added is compared with a base that has them too (its appendix on throughput)."""
    architecture = model.architecture.with_layers(tuple(step.origin for step in model.plan))
    weight = model.decoder.embed.weight
    plan = DepthPlan.vanilla(architecture.layers)
    return random_model(architecture, plan, dtype=weight.dtype, device=weight.device, seed=seed)


def with_context(architecture: Architecture, tokens: int) -> Architecture:
    """Long enough for sequences of so many tokens. Random weights were trained for no length."""
    return architecture if architecture.context >= tokens else dataclasses.replace(architecture, context=tokens)
