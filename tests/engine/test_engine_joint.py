"""Drafts change no probability: over everything that chance decides, two tokens have the full model's exact joint
distribution. The random numbers of a request are put where no token changes around them, one request for each such cell, and
the cells' areas are added up."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine import sampler
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import model_of

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, PROMPT, TEMPERATURE = 3, (1, 0, 2), 1.5
SHAPE: dict[str, Any] = {"hidden": 16, "intermediate": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 16}
PLANS = {
    "exit": DepthPlan.vanilla(2).with_exits([0]),
    "own layer": DepthPlan.vanilla(2).with_exits([0], layer=True),
    "draft layer": DepthPlan.vanilla(2).with_exits((), draft=True),
    "draft tree": DepthPlan.vanilla(2).with_exits((), draft=True),
}
TEXTS = [(), *((token,) for token in range(VOCAB))]


@cache
def model(name: str) -> FathomForCausalLM:
    architecture = Architecture(family="llama", layers=2, vocab=VOCAB, tied_embeddings=False, **SHAPE)
    return model_of(PLANS[name], architecture=architecture, seed=2)


@torch.inference_mode()
def chances(name: str, layer: int, text: tuple[int, ...]) -> Tensor:
    """Of the token behind the prompt and a text, after so many layers."""
    decoder, states = model(name).decoder, list[Tensor]()
    decoder(torch.tensor([[*PROMPT, *text]]), states=states)
    logits_V = decoder.logits(decoder.norm(states[layer][0, -1]))
    return (logits_V / TEMPERATURE).double().softmax(-1)


def cells(cuts: list[float]) -> list[tuple[float, float]]:
    """The middle and the width of what is between all of these numbers."""
    ends = sorted({0.0, 1.0, *cuts})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(ends) if high - low > 1e-6]


def cuts_of(name: str, texts: list[tuple[int, ...]]) -> list[float]:
    """Where the token behind a text changes, the exit's and the full model's; elsewhere than at an exit, many more."""
    at = [chances(name, layer, text).cumsum(0) for layer in (1, 2) for text in texts]
    return [*torch.cat(at).tolist(), *(() if name == "exit" else torch.arange(0.1, 1, 0.2).tolist())]


def joint(
    name: str, exiting: Exiting | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[tuple[int, ...], float], Engine]:
    found: dict[tuple[int, ...], float] = defaultdict(float)
    grid = list(itertools.product(cells(cuts_of(name, TEXTS[:1])), cells(cuts_of(name, TEXTS[1:]))))
    numbers_CK = torch.tensor([[first, second, 0.5] for (first, _), (second, _) in grid], dtype=torch.float64)
    monkeypatch.setattr(sampler, "uniform", lambda seeds, steps: numbers_CK[seeds, steps.clamp_max(2)])
    engine = Engine(model(name), exiting=exiting, always_draft=True, batch_size=8, page_size=4, max_queue=len(grid))
    sampling = Sampling(max_new_tokens=3, temperature=TEMPERATURE, ignore_eos=True)
    asked = [Request(id=number, prompt=PROMPT, sampling=sampling.with_options(seed=number)) for number in range(len(grid))]
    for result, ((_, wide), (_, high)) in zip(engine.run(asked), grid, strict=True):
        found[result.tokens[:2]] += wide * high
    return found, engine


@pytest.mark.parametrize("name", PLANS)
def test_two_tokens_have_the_full_models_exact_joint_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first_V = chances(name, 2, ())
    right = {(a, b): float(first_V[a] * chances(name, 2, (a,))[b]) for a in range(VOCAB) for b in range(VOCAB)}
    drafts: dict[str, Any] = {"draft_tree": (2, 1)} if name == "draft tree" else {"max_stack": 3}
    found, engine = joint(name, Exiting(mode="speculative", threshold=0.0, **drafts), monkeypatch)
    assert found == pytest.approx(right, abs=1e-4)
    assert 0 < engine.totals.accepted < engine.totals.drafted
    if name == "exit":  # what is drafted is not what the full model says
        exits, _ = joint(name, Exiting(mode="static", exit_layers=(1,)), monkeypatch)
        assert exits != pytest.approx(right, abs=0.05)
