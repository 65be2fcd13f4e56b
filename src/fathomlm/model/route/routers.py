"""The routers' weights and scores (thesis 4.3.2; its appendix on router design).

Scores are computed in float32 whatever the stream's dtype: half the tokens of a trained router sit near two values, and
bfloat16 would tie them. Inputs are the un-normalised residual stream.

Shapes: B rows, N tokens, M hidden width, R recursions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Routing
from fathomlm.depth.routing import WIDE


class Router(nn.Module):
    """One router: a linear map, or two with a GELU between."""

    def __init__(self, hidden: int, outputs: int, network: str) -> None:
        super().__init__()
        inner = {"linear": None, "mlp": hidden, "wide": WIDE * hidden}[network]
        self.inner = None if inner is None else nn.Linear(hidden, inner, bias=False)
        self.out = nn.Linear(hidden if inner is None else inner, outputs, bias=False)

    def forward(self, x_BNM: Tensor) -> Tensor:
        """Logits (B, N, outputs)."""
        with torch.autocast(x_BNM.device.type, enabled=False):
            if self.inner is None:
                out: Tensor = _WideLinear.apply(x_BNM, self.out.weight)  # type: ignore[no-untyped-call]
                return out
            inner: Tensor = _WideLinear.apply(x_BNM, self.inner.weight)  # type: ignore[no-untyped-call]
            return F.linear(F.gelu(inner), self.out.weight.to(inner.dtype))


class _WideLinear(torch.autograd.Function):
    """x W^T in float32 at least. Unlike `F.linear(x.float(), w)` it keeps x as it is for the backward pass: the layers keep
    the very same tensor, so a router costs no memory for it."""

    @staticmethod
    def forward(ctx: Any, x_BNM: Tensor, weight_OM: Tensor) -> Tensor:
        wide = torch.promote_types(torch.promote_types(x_BNM.dtype, weight_OM.dtype), torch.float32)
        ctx.save_for_backward(x_BNM, weight_OM)
        return F.linear(x_BNM.to(wide), weight_OM.to(wide))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        x_BNM, weight_OM = ctx.saved_tensors
        d_x = d_out @ weight_OM.to(d_out.dtype)
        d_weight = d_out.flatten(0, -2).T @ x_BNM.to(d_out.dtype).flatten(0, -2)
        return d_x.to(x_BNM.dtype), d_weight.to(weight_OM.dtype)


class Routers(nn.Module):
    """All routers of a model. `main` weighs and, in training, selects; `aux` decides at inference where there is one."""

    def __init__(self, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        expert = routing.kind == "expert"
        count, outputs = (routing.recursions, 1) if expert else (1, routing.recursions)
        self.main = nn.ModuleList(Router(hidden, outputs, routing.network) for _ in range(count))
        beside = count if expert and routing.sampling == "aux_router" else 0
        self.aux = nn.ModuleList(Router(hidden, outputs, routing.network) for _ in range(beside))
        self.bias: nn.Parameter | None = None
        """token, loss-free: added to the scores for the selection only, and moved by `balance`; no gradient reaches it."""
        if not expert and routing.balancing == "loss_free":
            self.bias = nn.Parameter(torch.zeros(routing.recursions), requires_grad=False)

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """expert: what a recursion's router says of each token, (B, N)."""
        out: Tensor = self.main[recursion](x_BNM)
        return out[..., 0]

    def judge(self, recursion: int, x_BNM: Tensor, logits_BN: Tensor) -> Tensor:
        """expert: what decides at inference. An auxiliary router sees the stream but does not move it."""
        if not self.aux:
            return logits_BN
        out: Tensor = self.aux[recursion](x_BNM.detach())
        return out[..., 0]

    def depth_logits(self, x_BNM: Tensor) -> Tensor:
        """token: what the router says of each depth, (B, N, R)."""
        out: Tensor = self.main[0](x_BNM)
        return out

    def score(self, logits: Tensor) -> Tensor:
        """Logits as scores; expert scores one number, token a whole row of depths."""
        if self.routing.score == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.routing.score == "sigmoid" else logits.tanh()

    @torch.no_grad()
    def balance(self, loads_R: Tensor, rate: float | Tensor) -> None:
        """Loss-free balancing: depths that are chosen too seldom become a little more attractive."""
        if self.bias is not None:
            self.bias.add_(rate * (loads_R.mean() - loads_R).sign().to(self.bias.dtype))


def build_routers(hidden: int, routing: Routing | None) -> Routers | None:
    return None if routing is None else Routers(hidden, routing)


def draw(positions_BN: Tensor, recursion: int) -> Tensor:
    """Random routing: a number in [0, 1) for each position, the same in training, prefill and decoding, in any batch."""
    mixed = (positions_BN.long() * 2654435761 + (recursion + 1) * 40503 + 12345) % 4294967296
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 4294967296
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 % 4294967296
    return ((mixed ^ (mixed >> 16)) % 4294967296).double() / 4294967296
