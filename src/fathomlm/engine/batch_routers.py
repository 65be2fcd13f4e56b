"""What routers say of rows at different recursions; the same rules as `model.route`, row by row.

Shapes: N rows, R recursions, M hidden width, C columns of a slot's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fathomlm.depth import Routing
from fathomlm.engine.device_state import COLUMNS
from fathomlm.errors import OptionError
from fathomlm.model.route import Routers, draw, draw_key
from fathomlm.model.route.expert import ExpertRouters, advance
from fathomlm.model.route.token import TokenRouters, drawn_depth

TOKEN, POSITION, MAX_DEPTH, EPOCH = (COLUMNS.index(name) for name in ("token", "position", "max_depth", "epoch"))


class RouterWeights(NamedTuple):
    """All that a linear expert-choice router decides by."""

    main_RM: Tensor
    judge_RM: Tensor
    """What decides; `main` itself, where there is no auxiliary router."""
    selective_R: Tensor
    """Which recursions leave tokens out at all."""
    least_R: Tensor
    """Where depth is drawn: what a draw must reach."""


class BatchRouters:
    """The routers of one model. What a row was told is kept in R numbers: by expert-choice what each recursion's router says
    when the row comes to it, by token-choice the weight of every depth."""

    def __init__(self, routers: Routers, bias: float = 0.0, forced: Sequence[float] | None = None) -> None:
        """`bias` moves what routers decide (`DepthControl`). `forced` are parts of all tokens that run each recursion: depth
        is then drawn and not decided, for measurements."""
        self.routers, self.bias, self.forced = routers, bias, None if forced is None else tuple(forced)
        self.routing: Routing = routers.routing
        self.keeps_first = not self.routing.method.picks_tokens
        if forced is not None and self.keeps_first:
            raise OptionError("depth can be forced on expert-choice models only")
        device = next(routers.parameters()).device
        capacity = self.routing.capacity
        self._selective_R = torch.tensor([part < 1 for part in capacity], device=device)
        drawn = capacity if self.forced is None else self.forced
        shares = [part / before for part, before in zip(drawn, (1.0, *drawn), strict=False)]
        self._least_R = torch.tensor([1 - share for share in shares], dtype=torch.float64, device=device)
        linear = self.routing.network == "linear" and not self.keeps_first
        self._main_RM = _stacked(routers.main) if linear else None
        self._aux_RM = _stacked(routers.aux) if linear and routers.aux else None

    @property
    def linear(self) -> bool:
        return self._main_RM is not None

    @property
    def _expert(self) -> ExpertRouters:
        assert isinstance(self.routers, ExpertRouters)
        return self.routers

    @property
    def _token(self) -> TokenRouters:
        assert isinstance(self.routers, TokenRouters)
        return self.routers

    def weights(self) -> RouterWeights:
        assert self._main_RM is not None
        judge_RM = self._main_RM if self._aux_RM is None else self._aux_RM
        return RouterWeights(self._main_RM, judge_RM, self._selective_R, self._least_R)

    def ask(self, x_NM: Tensor) -> Tensor:
        """What is to be known in front of the core, (N, R)."""
        if self.keeps_first:
            return self.routers.score(self._token.depth_logits(x_NM[None])[0])
        return x_NM.new_zeros(x_NM.shape[0], self.routing.recursions, dtype=torch.float32)

    def decide(
        self, recursion_N: Tensor, x_NM: Tensor, gates_NR: Tensor, positions_N: Tensor, numbers_NC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which rows go on to these recursions, and what was said of them. `numbers_NC` are a slot's, with the token and the
        position of the row."""
        R = self.routing.recursions
        last_N = recursion_N >= R
        recursion_N = recursion_N.clamp_max(R - 1)
        if self.keeps_first:
            go_N = self._last_recursion(gates_NR, numbers_NC) >= recursion_N
        else:
            logits_N = self._logits(recursion_N, x_NM)
            gates_NR = gates_NR.scatter(1, recursion_N[:, None], logits_N[:, None].to(gates_NR.dtype))
            go_N = self._expert_goes(recursion_N, x_NM, logits_N, numbers_NC)
        if self.forced is not None:
            go_N = self._drawn(recursion_N, positions_N + 7919 * numbers_NC[:, EPOCH])
        return go_N & (recursion_N < numbers_NC[:, MAX_DEPTH]) & ~last_N, gates_NR

    def updated(
        self,
        recursion_N: Tensor,
        x_NM: Tensor,
        out_NM: Tensor,
        gates_NR: Tensor,
        first_NM: Tensor,
        numbers_NC: Tensor,
    ) -> Tensor:
        """The stream after a recursion."""
        routing = self.routing
        gates_N = gates_NR.gather(1, recursion_N[:, None])[:, 0]
        if not self.keeps_first:
            return advance(x_NM, out_NM, self.routers.score(gates_N), routing.alpha, routing.update)
        weight_N1 = (routing.alpha * gates_N)[:, None].to(x_NM.dtype)
        ends_N1 = (self._last_recursion(gates_NR, numbers_NC) == recursion_N)[:, None]
        if routing.weighting == "every":
            return weight_N1 * out_NM + torch.where(ends_N1, first_NM, 0.0)
        return torch.where(ends_N1, first_NM + weight_N1 * out_NM, out_NM)

    def _expert_goes(self, recursion_N: Tensor, x_NM: Tensor, logits_N: Tensor, numbers_NC: Tensor) -> Tensor:
        selective_N = self._selective_R[recursion_N]
        if self.routing.random:
            return self._drawn(recursion_N, _keys(numbers_NC)) | ~selective_N
        judged_N = self._judged(recursion_N, x_NM, logits_N) if self.routers.aux else logits_N
        return (judged_N + self.bias >= 0) | ~selective_N

    def _logits(self, recursion_N: Tensor, x_NM: Tensor) -> Tensor:
        """What each row's router says of it. A linear router is one product for each row with its own weights."""
        if self._main_RM is not None:
            return (x_NM.to(self._main_RM.dtype) * self._main_RM[recursion_N]).sum(-1)
        each = [self._expert.logits(r, x_NM[None])[0] for r in range(self.routing.recursions)]
        return torch.stack(each, 1).gather(1, recursion_N[:, None])[:, 0]

    def _judged(self, recursion_N: Tensor, x_NM: Tensor, logits_N: Tensor) -> Tensor:
        if self._aux_RM is not None:
            return (x_NM.to(self._aux_RM.dtype) * self._aux_RM[recursion_N]).sum(-1)
        each = [self._expert.judge(r, x_NM[None], logits_N)[0] for r in range(self.routing.recursions)]
        return torch.stack(each, 1).gather(1, recursion_N[:, None])[:, 0]

    def _drawn(self, recursion_N: Tensor, numbers_N: Tensor) -> Tensor:
        drawn_NR = torch.stack([draw(numbers_N, r) for r in range(self.routing.recursions)], 1)
        return drawn_NR.gather(1, recursion_N[:, None])[:, 0] >= self._least_R[recursion_N]

    def _last_recursion(self, scores_NR: Tensor, numbers_NC: Tensor) -> Tensor:
        """token: the one that each row was given, or the deepest that it may run."""
        if self.routing.random:
            last_N = drawn_depth(_keys(numbers_NC), self.routing.recursions)
        else:
            last_N = self._token.last_recursion(scores_NR, self.bias)
        return torch.minimum(last_N, numbers_NC[:, MAX_DEPTH] - 1)


def _keys(numbers_NC: Tensor) -> Tensor:
    return draw_key(numbers_NC[:, TOKEN], numbers_NC[:, POSITION])


def _stacked(routers: nn.ModuleList) -> Tensor:
    """The weights of linear routers, in float32 at least, as they are applied."""
    weights = [router.get_parameter("out.weight")[0].detach() for router in routers]
    return torch.stack([weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights])
