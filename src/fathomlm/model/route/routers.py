"""The routers' weights and scores (thesis 4.3.2; its appendix on router design).

Scores are computed in float32 whatever the stream's dtype: half the tokens of a trained router sit near two values, and
bfloat16 would tie them. Inputs are the un-normalised residual stream.

Shapes: B rows, N tokens, M hidden width, R recursions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.depth import Routing
from fathomlm.depth.routing import WIDE
from fathomlm.kernels.half import keeps_gradients
from fathomlm.kernels.rows import put, take
from fathomlm.model.route.entrance import Picked, enter_all, enter_some, look, pick, pick_within, rejoin


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


class Entered(NamedTuple):
    """What a recursion works on in training."""

    before: Tensor
    """The stream of all tokens that were asked."""
    taken: Tensor
    """The stream of those that go on, for the recursion."""
    stays: Tensor
    """The same, for what is added to its outcome."""
    logits: Tensor
    """Of all tokens that were asked."""


def advance(x_BNM: Tensor, out_BNM: Tensor, scores_BN: Tensor, alpha: float, update: str) -> Tensor:
    """expert: the stream after a recursion, x + g f(x) or x + g (f(x) - x), in the stream's dtype. The second is computed so
    that at g = 1 it is f(x) to the last bit."""
    wide = torch.promote_types(x_BNM.dtype, torch.float32)
    gate = alpha * scores_BN[..., None].to(wide)
    x, out = x_BNM.to(wide), out_BNM.to(wide)
    return (x + gate * out if update == "add" else (1 - gate) * x + gate * out).to(x_BNM.dtype)


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
        self._advance: Callable[..., Any] = advance
        self._look: Callable[..., Any] = look
        self._pick: Callable[..., Any] = pick
        self._pick_within: Callable[..., Any] = pick_within
        self._enter_all: Callable[..., Any] = enter_all
        self._enter_some: Callable[..., Any] = enter_some

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile what routers do to the stream between two passes of the block, for the shapes it is given."""
        for name, function in (
            ("_advance", advance), ("_look", look), ("_pick", pick), ("_pick_within", pick_within),
            ("_enter_all", enter_all), ("_enter_some", enter_some),
        ):  # fmt: skip
            setattr(self, name, torch.compile(function, dynamic=False, backend=backend))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def logits(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """expert: what a recursion's router says of each token, (B, N)."""
        out: Tensor = self.main[recursion](x_BNM)
        return out[..., 0]

    def seen(self, recursion: int, x_BNM: Tensor) -> Tensor:
        """expert, in training: `logits` to choose by. A linear router's have no gradient; `enter` knows theirs."""
        if self.routing.network != "linear":
            return self.logits(recursion, x_BNM)
        with torch.no_grad():
            seen_BN: Tensor = self._look(x_BNM, self._weight(recursion))
        return seen_BN

    def pick(
        self,
        rank_BN: Tensor,
        keep_BN: Tensor | None,
        count: int,
        groups_BN: Tensor | None = None,
        quota_BN: Tensor | None = None,
    ) -> Picked:
        """expert, in training: who goes on. With quotas, at most as many of each group as its quota says."""
        with torch.no_grad():
            picked: Picked
            if quota_BN is None:
                picked = self._pick(rank_BN.detach(), keep_BN, count)
            else:
                picked = self._pick_within(rank_BN.detach(), keep_BN, groups_BN, quota_BN, count)
        return picked

    def enter(self, recursion: int, x_BNM: Tensor, seen_BN: Tensor, picked: Picked | None) -> Entered:
        """expert, in training: the stream as it enters a recursion, all of it without `picked`."""
        if self.routing.network != "linear":
            taken = x_BNM if picked is None else take(x_BNM, picked.at_BN)
            return Entered(x_BNM, taken, taken, seen_BN)
        compiled = keeps_gradients(x_BNM)
        if picked is None:
            first, second, logits = (self._enter_all if compiled else enter_all)(x_BNM, self._weight(recursion), seen_BN)
            return Entered(first, first, second, logits)
        enter = self._enter_some if compiled else enter_some
        before, taken, logits = enter(x_BNM, self._weight(recursion), seen_BN, picked)
        return Entered(before, taken, taken, logits)

    def rejoin(self, entered: Entered, picked: Picked, new_BNM: Tensor) -> Tensor:
        """expert, in training: the stream with the tokens that went on replaced."""
        if self.routing.network != "linear":
            return put(entered.before, picked.at_BN, new_BNM)
        return rejoin(entered.before, picked.flat, new_BNM)

    def _weight(self, recursion: int) -> Tensor:
        router = self.main[recursion]
        assert isinstance(router, Router)
        return router.out.weight[0]

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
        if self.routing.score == "identity":
            return logits
        return logits.sigmoid() if self.routing.score == "sigmoid" else logits.tanh()

    @torch.no_grad()
    def balance(self, loads_R: Tensor, rate: float | Tensor) -> None:
        """Loss-free balancing: depths that are chosen too seldom become a little more attractive."""
        if self.bias is not None:
            self.bias.add_(rate * (loads_R.mean() - loads_R).sign().to(self.bias.dtype))


def drawn_depth(keys_BN: Tensor, recursions: int) -> Tensor:
    """token, random: each token's last recursion, from 0 on, all equally likely."""
    return (draw(keys_BN, 0) * recursions).long().clamp_max(recursions - 1)


def build_routers(hidden: int, routing: Routing | None) -> Routers | None:
    return None if routing is None else Routers(hidden, routing)


KEY_STRIDE = 1_000_003


def draw_key(tokens_BN: Tensor, positions_BN: Tensor) -> Tensor:
    """What random routing draws by: a token and its position. The position alone would give every sequence the same depths
    (and two thirds of all positions never a last recursion); a generator's state would not be the same in training, prefill
    and decoding."""
    return (positions_BN.long() + KEY_STRIDE * tokens_BN.long()) % 4294967296


def draw(numbers_BN: Tensor, recursion: int) -> Tensor:
    """Random routing: a number in [0, 1) for each key, the same in training, prefill and decoding, in any batch."""
    mixed = (numbers_BN.long() * 2654435761 + (recursion + 1) * 40503 + 12345) % 4294967296
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 4294967296
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 % 4294967296
    return ((mixed ^ (mixed >> 16)) % 4294967296).double() / 4294967296
