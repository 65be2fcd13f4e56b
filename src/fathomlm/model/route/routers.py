"""The routers' weights and scores (thesis 4.3.2; its appendix on router design).

Scores are computed in float32 whatever the stream's dtype: half the tokens of a trained router sit near two values, and
bfloat16 would tie them. Inputs are the un-normalised residual stream.

Shapes: B rows, N tokens, M hidden width, R recursions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Routing
from fathomlm.depth.routing import WIDE
from fathomlm.kernels.half import keeps_gradients


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
            x = x_BNM.to(torch.promote_types(x_BNM.dtype, torch.float32))
            if self.inner is not None:
                x = F.gelu(F.linear(x, self.inner.weight.to(x.dtype)))
            return F.linear(x, self.out.weight.to(x.dtype))


class _Fork(torch.autograd.Function):
    """Where a linear router looks at the stream: x, which goes on, and x w in float32 at least. It keeps x as it is, which
    the layers keep too, and adds both gradients in one pass over memory when it is compiled."""

    @staticmethod
    def forward(ctx: Any, x_BNM: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(torch.promote_types(x_BNM.dtype, weight_M.dtype), torch.float32)
        ctx.save_for_backward(x_BNM, weight_M)
        return x_BNM.view_as(x_BNM), (x_BNM.to(wide) * weight_M.to(wide)).sum(-1)

    @staticmethod
    def backward(ctx: Any, d_stream: Tensor, d_logits: Tensor) -> tuple[Tensor, Tensor]:
        x_BNM, weight_M = ctx.saved_tensors
        wide = d_logits.dtype
        d_x = d_stream.to(wide) + d_logits[..., None] * weight_M.to(wide)
        d_weight = (d_logits[..., None] * x_BNM.to(wide)).sum((0, 1))
        return d_x.to(x_BNM.dtype), d_weight.to(weight_M.dtype)


def fork(x_BNM: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(x_BNM.device.type, enabled=False):
        x, logits = _Fork.apply(x_BNM, weight_M)  # type: ignore[no-untyped-call]
    return x, logits


def advance(x_BNM: Tensor, out_BNM: Tensor, scores_BN: Tensor, alpha: float, update: str) -> Tensor:
    """expert: the stream after a recursion, x + g f(x) or x + g (f(x) - x), in the stream's dtype."""
    wide = torch.promote_types(x_BNM.dtype, torch.float32)
    gate = alpha * scores_BN[..., None].to(wide)
    x, out = x_BNM.to(wide), out_BNM.to(wide)
    return (x + gate * (out if update == "add" else out - x)).to(x_BNM.dtype)


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
        self._fork: Callable[..., Any] = fork
        self._advance: Callable[..., Any] = advance

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile what routers do to the stream between two passes of the block, for the shapes it is given."""
        self._fork, self._advance = (torch.compile(f, dynamic=False, backend=backend) for f in (fork, advance))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """expert: what a recursion's router says of each token, (B, N)."""
        out: Tensor = self.main[recursion](x_BNM)
        return out[..., 0]

    def fork(self, recursion: int, x_BNM: Tensor) -> tuple[Tensor, Tensor]:
        """expert, in training: the stream as it goes on, and `logits`."""
        if self.routing.network == "linear":
            router = self.main[recursion]
            assert isinstance(router, Router)
            run = self._fork if keeps_gradients(x_BNM) else fork
            x, logits = run(x_BNM, router.out.weight[0])
            return x, logits
        return x_BNM, self.logits(recursion, x_BNM)

    def advance(self, x_BNM: Tensor, out_BNM: Tensor, logits_BN: Tensor) -> Tensor:
        """expert: the stream after a recursion."""
        new: Tensor = self._advance(x_BNM, out_BNM, self.score(logits_BN), self.routing.alpha, self.routing.update)
        return new

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
