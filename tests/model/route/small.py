"""Small routed decoders with random weights, wide enough apart that routers send tokens to every depth."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from pairwise import in_turn

VOCAB = 61
SHAPE: dict[str, Any] = {
    "layers": 8, "hidden": 24, "intermediate": 40, "heads": 4, "kv_heads": 2, "head_dim": 6, "vocab": VOCAB, "context": 96,
    "tied_embeddings": False,
}  # fmt: skip
LLAMA = Architecture(family="llama", **SHAPE)
WINDOWS = Architecture(family="mistral", windows=(4, None, 5, None, 3, None, 4, None), **SHAPE)
LOOPS = {"middle": DepthPlan.build("middle-cycle", 3, 8), "cycle": DepthPlan.build("cycle", 2, 8)}
KV = ("cache", "share", "hybrid")
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "expert": ("expert", {}),
    "expert, aux router": ("expert", {"sampling": "aux_router"}),
    "expert, tanh": ("expert", {"score": "tanh", "alpha": 0.5}),
    "expert, identity": ("expert", {"score": "identity", "alpha": 0.5}),
    "expert, mlp": ("expert", {"network": "mlp"}),
    "expert, wide": ("expert", {"network": "wide"}),
    "expert, random": ("expert", {"random": True}),
    "expert, interpolate": ("expert", {"update": "interpolate", "alpha": 1.0}),
    "token": ("token", {}),
    "token, loss-free": ("token", {"balancing": "loss_free"}),
    "token, last": ("token", {"weighting": "last"}),
    "token, sigmoid": ("token", {"score": "sigmoid"}),
    "token, random": ("token", {"random": True}),
}
EXPERTS = [name for name, (kind, _) in ROUTERS.items() if kind == "expert"]


def routed(router: str = "expert", kv: str = "cache", loop: str = "middle", **options: Any) -> DepthPlan:
    kind, known = ROUTERS[router]
    plan = LOOPS[loop]
    return plan.with_routing(build_routing(kind, plan.recursions, **known | options)).with_kv(kv)  # type: ignore[arg-type]


FEW = ("expert", "expert, aux router", "expert, random", "token", "token, random")
"""Routers that choose by a rule of their own. The others differ in how they score and weigh a token, not in who runs."""


def routed_cases(turn: int, routers: Iterable[str] = ROUTERS) -> pytest.MarkDecorator:
    """Parametrizes `plan`: routers on three recursions after a prelude and some on two without, each with another KV mode
    each turn, so that over three tests every router has every mode."""
    cases = [(*pair, "middle") for pair in in_turn(routers, KV, turn)]
    cases += [(*pair, "cycle") for pair in in_turn(("expert, random", "token", "token, last"), KV, turn)]
    return pytest.mark.parametrize("plan", [routed(*case) for case in cases], ids=["-".join(case) for case in cases])


def model_of(
    plan: DepthPlan, relaxation: Relaxation | None = None, architecture: Architecture = LLAMA, seed: int = 0
) -> FathomForCausalLM:
    """Every parameter drawn, the loss-free bias and what relaxations add included."""
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, relaxation, dtype=torch.float32)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near_one = ("norm" in name and "offsets" not in name) or "encoding" in name or "magnitude" in name
            parameter.normal_(mean=1.0 if near_one else 0.0, std=0.3, generator=generator)
    return model


@cache
def decoder_of(plan: DepthPlan, windows: bool = False) -> Decoder:
    """Shared by all tests: read it, do not write to it."""
    with torch.inference_mode(False):  # the first test to ask may be in it, and weights made there could not learn
        return model_of(plan, architecture=WINDOWS if windows else LLAMA).decoder


def some_tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens that end flush and where they are real, (B, T) each."""
    T = max(lengths)
    keep = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    return some_tokens(len(lengths), T, seed), keep


def same(got: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.detach().abs().max()))
    )
