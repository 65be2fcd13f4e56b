"""The feed-forward half of a layer: one for all tokens, or a mixture of experts, where a router sends each token to a few of
many (Qwen3-MoE). The mixture is slow and plain: the chosen experts run one after the other, each over its own tokens.

Shapes: N tokens, K experts of a token, C tokens of an expert, E experts, I inner width, M hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fathomlm.depth import Architecture
from fathomlm.kernels.gates import ACTIVATIONS
from fathomlm.kernels.half import folded, half_dtype
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.swiglu import norm_swiglu_mlp
from fathomlm.model.blocks.attention import build_linear
from fathomlm.model.blocks.step_context import StepContext

NEURONS = 16
"""Kernels load whole vectors of a weight only where they know that its rows begin at multiples of this many entries."""


def aligned(both_2IM: Tensor, down_MI: Tensor) -> tuple[Tensor, Tensor]:
    """Gate with up, and down, with neurons added that put out nothing, where their number would make kernels slow: with 952
    in each of 26 layers, eight more make decoding 64 rows 1.4 times as fast."""
    if not (missing := -down_MI.shape[1] % NEURONS):
        return both_2IM, down_MI
    gate_IM, up_IM = both_2IM.chunk(2)
    below = (0, 0, 0, missing)
    return torch.cat((F.pad(gate_IM, below), F.pad(up_IM, below))), F.pad(down_MI, (0, missing))


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        specs = {spec.name: spec for spec in architecture.linears()}
        self.gate = build_linear(specs["gate"]) if architecture.gated else None
        self.up = build_linear(specs["up"])
        self.down = build_linear(specs["down"])
        self.activation = architecture.activation
        self.residual_scale = architecture.residual_scale
        self.gates = architecture.gated and not architecture.mlp_bias and self.residual_scale == 1.0
        """Whether the kernels for decoding rows run it: a gate and linears without a bias, whatever the activation."""
        self.plain = self.gates and architecture.activation == "silu"

    def behind(self, norm: nn.Module, x: Tensor, step: StepContext) -> Tensor:
        """The residual stream with this part's output for its norm added."""
        if self.plain and step.uses_forms(x) and isinstance(norm, RMSNorm):
            both, down = self.pack(norm, half_dtype(x)) if step.packed is None else step.packed[2:]
            return norm_swiglu_mlp(x.flatten(0, -2), norm.eps, both, down, step.keep_inner).view_as(x)
        out: Tensor = self(step.norm("norm_mlp", norm, x), step)
        return x + (out if self.residual_scale == 1.0 else out * self.residual_scale)

    def pack(self, norm: RMSNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gate and up as one, and down, for `norm_swiglu_mlp`."""
        assert self.gate is not None
        both = folded((self.gate.weight, self.up.weight), norm.weight, norm.plus_one, dtype)
        return both, self.down.weight.to(dtype)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        act = ACTIVATIONS[self.activation]
        up = step.project("up", self.up, x)
        inner = act(up) if self.gate is None else act(step.project("gate", self.gate, x)) * up
        return step.project("down", self.down, inner)


class ExpertLinear(nn.Module):
    """One matrix an expert."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def reset_parameters(self, std: float, generator: torch.Generator | None = None) -> None:
        nn.init.normal_(self.weight, std=std, generator=generator)

    def forward(self, x_CM: Tensor, expert: int) -> Tensor:
        return F.linear(x_CM, self.weight[expert])


class Experts(nn.Module):
    """The sum of down(silu(gate(x)) * up(x)) over a token's experts, each by its part of the router's probabilities."""

    plain = gates = False
    activation = "silu"

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        shape = architecture.experts, architecture.hidden, architecture.intermediate
        self.router = nn.Linear(architecture.hidden, architecture.experts, bias=False)
        self.gate, self.up = ExpertLinear(*shape), ExpertLinear(*shape)
        self.down = ExpertLinear(architecture.experts, architecture.intermediate, architecture.hidden)
        self.chosen, self.normed = architecture.experts_per_token, architecture.experts_normed

    def behind(self, norm: nn.Module, x: Tensor, step: StepContext) -> Tensor:
        """The residual stream with this part's output for its norm added."""
        out: Tensor = self(step.norm("norm_mlp", norm, x), step)
        return x + out

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        x_NM = x.flatten(0, -2)
        parts_NK, experts_NK = F.softmax(self.router(x_NM), dim=-1, dtype=torch.float32).topk(self.chosen, dim=-1)
        if self.normed:
            parts_NK = parts_NK / parts_NK.sum(-1, keepdim=True)
        out_NM = torch.zeros_like(x_NM)
        for expert in self._hit(experts_NK):
            token_C, place_C = self._tokens(experts_NK, expert)
            x_CM = x_NM[token_C]
            made_CM = self.down(F.silu(self.gate(x_CM, expert)) * self.up(x_CM, expert), expert)
            out_NM = out_NM.index_add(0, token_C, (made_CM * parts_NK[token_C, place_C, None]).to(out_NM.dtype))
        return out_NM.view_as(x)

    def _hit(self, experts_NK: Tensor) -> list[int]:
        """The experts that any token was sent to. A dry run has no numbers: there all are, as under a fair router."""
        if isinstance(experts_NK, FakeTensor):
            return list(range(self.router.out_features))
        hit: list[int] = torch.unique(experts_NK).tolist()
        return hit

    def _tokens(self, experts_NK: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        if not isinstance(experts_NK, FakeTensor):
            token_C, place_C = (experts_NK == expert).nonzero(as_tuple=True)
            return token_C, place_C
        fair = -(-experts_NK.numel() // self.router.out_features)
        return experts_NK.new_zeros(fair), experts_NK.new_zeros(fair)
