"""Models to measure: with random weights of any shape and plan, and the plain one that every figure is compared with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.engine.kv_pages import entry_dtype, page_bytes
from fathomlm.engine.layout import build_layout
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.runner import OVERBOOKED, pool_shares
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


def ample_memory(model: FathomForCausalLM, options: EngineOptions, tokens: int, exits: Sequence[int] = ()) -> int:
    """Bytes of a KV cache that never preempts: for every sequence `tokens` tokens, each of which goes as deep as it can, and
    one more page per table."""
    layout = build_layout(model.architecture, model.plan, model.relaxation, exits)
    slots = options.max_sequences or options.batch_size * (1 if layout.kind == "whole" else OVERBOOKED)
    dtype, size = entry_dtype(options.kv_dtype, model.decoder.embed.weight.dtype), options.page_size
    pages = slots * (-(-tokens // size) + 1)
    sizes = [page_bytes(model.architecture, planes, size, dtype) for planes in layout.planes]
    shares = pool_shares(model.plan, layout)
    # Memory is divided among pools by the trained depths: the pool with the least decides.
    times = max(layout.tables.count(pool) / share for pool, share in enumerate(shares))
    return math.ceil(pages * times * sum(one * share for one, share in zip(sizes, shares, strict=True)))
