"""The decoder: embeddings, a walk over the depth plan, the head.

Shapes: B batch, T new tokens, S all tokens so far, M hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathomlm.cache import StepKV
from fathomlm.depth import Architecture, DepthPlan, LinearSpec, Relaxation, Step
from fathomlm.kernels.attention import attention_mask
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.rope import rope_table
from fathomlm.model.blocks import StepContext, build_block
from fathomlm.model.blocks.parts import build_norm
from fathomlm.model.relax import LoraDelta, StepDelta, build_deltas, build_encodings

Recompute = Literal["none", "recursion", "layer"]
"""Activation checkpointing: what the backward pass computes again instead of keeping."""


class Cache(Protocol):
    """What the decoder asks of a key-value cache."""

    @property
    def length(self) -> int: ...

    def at(self, step: Step) -> StepKV: ...

    def advance(self, tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Sight:
    """Rotary tables and mask of one kind of attention (whole context, or a window)."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    causal: bool


class Decoder(nn.Module):
    """Unique layers and the plan that says which runs when. Tied layers are one module, so a tie cannot come apart."""

    def __init__(
        self, architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None = None, exit_rank: int = 0
    ) -> None:
        """`exit_rank` gives each early exit a low-rank delta of its own on the head (thesis 3, early-exit appendix)."""
        super().__init__()
        self.architecture = architecture
        self.plan = plan
        self.relaxation = relaxation
        self.embed = nn.Embedding(architecture.vocab, architecture.hidden)
        self.layers = nn.ModuleList(build_block(architecture) for _ in range(plan.unique_layers))
        self.deltas = build_deltas(architecture, plan, relaxation)
        self.encodings = build_encodings(architecture, plan, relaxation)
        self.norm = build_norm(architecture)
        self.head = None if architecture.tied_embeddings else nn.Linear(architecture.hidden, architecture.vocab, bias=False)
        spec = LinearSpec("head", architecture.hidden, architecture.vocab, bias=False)
        self.exit_heads = nn.ModuleDict({str(index): LoraDelta(spec, exit_rank) for index in plan.exits if exit_rank})

    def unrolled(self) -> list[nn.Module]:
        """The layer of each step in order; tied steps give the same object."""
        return [self.layers[step.layer] for step in self.plan]

    def delta(self, step: Step) -> StepDelta | None:
        """What a step adds of its own, or None."""
        name = str(step.index)
        if name not in self.deltas:
            return None
        delta = self.deltas[name]
        assert isinstance(delta, StepDelta)
        return delta

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fresh weights: Gaussian linears and embeddings, neutral norms, deltas that add nothing."""
        for module in self.modules():
            reset_module(module, std, generator)
        self.match_lengths()

    def match_lengths(self) -> None:
        """Set DoRA's row lengths, which follow from the shared weights, so that new deltas add nothing."""
        for step in self.plan:
            if (delta := self.delta(step)) is not None:
                delta.match_lengths(self.layers[step.layer])

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        keep_BS: Tensor | None = None,
        cache: Cache | None = None,
        embeddings_BTM: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        `keep_BS` is False at padding, over all slots so far; `positions_BT` are true positions, which default to counting
        the kept slots. With a `cache`, tokens continue what it holds.
        """
        x = self._embed(tokens_BT) if embeddings_BTM is None else self._scale(embeddings_BTM)
        sights = self._sights(x, positions_BT, keep_BS, past=0 if cache is None else cache.length)
        x = self._walk(x, self.plan.steps, sights, cache)
        if cache is not None:
            cache.advance(x.shape[1])
        out: Tensor = self.norm(x)
        return out

    def states(
        self,
        tokens_BT: Tensor,
        *,
        at: Collection[int] = (),
        keep_BS: Tensor | None = None,
        documents_BT: Tensor | None = None,
        recompute: Recompute = "none",
    ) -> dict[int, Tensor]:
        """The residual stream after each step in `at` and after the last one, before the final norm: what training reads.

        `documents_BT` numbers the documents packed into a row; tokens then see their own document only.
        """
        x = self._embed(tokens_BT)
        if torch.is_autocast_enabled(x.device.type):  # autocast leaves embeddings wide, and with them the whole stream
            x = x.to(torch.get_autocast_dtype(x.device.type))
        sights = self._sights(x, None, keep_BS, past=0, documents_BT=documents_BT)
        found: dict[int, Tensor] = {}
        for steps in self._segments(at, recompute):
            if recompute == "none" or not torch.is_grad_enabled():
                x = self._walk(x, steps, sights, None)
            else:
                x = checkpoint(self._walk, x, steps, sights, None, use_reentrant=False)
            if steps[-1].index in at or steps[-1].index == self.plan.unrolled_layers - 1:
                found[steps[-1].index] = x
        return found

    def logits(self, hidden_BTM: Tensor) -> Tensor:
        """Scores over the vocabulary; the head is the embedding where the two are tied."""
        return F.linear(hidden_BTM, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def exit_delta(self, index: int) -> LoraDelta | None:
        """What the exit after step `index` adds to the head, or None."""
        if str(index) not in self.exit_heads:
            return None
        delta = self.exit_heads[str(index)]
        assert isinstance(delta, LoraDelta)
        return delta

    def _segments(self, at: Collection[int], recompute: Recompute) -> Iterator[Sequence[Step]]:
        """The steps in runs that end where a state is asked for, or where recomputation starts anew."""
        run: list[Step] = []
        for step in self.plan:
            run.append(step)
            pause = step.index in at or step.index == self.plan.unrolled_layers - 1
            if pause or recompute == "layer" or (recompute == "recursion" and self.plan.is_last_of_recursion(step)):
                yield run
                run = []

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        return self._scale(self.embed(tokens_BT))

    def _scale(self, x: Tensor) -> Tensor:
        if self.architecture.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self.architecture.embedding_scale, dtype=x.dtype, device=x.device)

    def _walk(self, x: Tensor, steps: Sequence[Step], sights: dict[int | None, _Sight], cache: Cache | None) -> Tensor:
        """Run some steps of the plan, in order."""
        for step in steps:
            sight = sights[self.architecture.window(step.origin)]
            kv = None if cache is None else cache.at(step)
            context = StepContext(sight.cos, sight.sin, sight.mask, sight.causal, kv, self.delta(step))
            x = self.layers[step.layer](x, context)
            if self.encodings and self.plan.is_last_of_recursion(step):
                x = (x * self.encodings[step.recursion]).to(x.dtype)
        return x

    def _sights(
        self,
        x_BTM: Tensor,
        positions_BT: Tensor | None,
        keep_BS: Tensor | None,
        past: int,
        documents_BT: Tensor | None = None,
    ) -> dict[int | None, _Sight]:
        """Tables and masks for each window that the plan's steps have, made once a pass."""
        B, T, _ = x_BTM.shape
        if keep_BS is not None and bool(keep_BS.all()):
            keep_BS = None
        if positions_BT is None:
            positions_BT = _count_positions(B, T, past, keep_BS, x_BTM.device)
        a = self.architecture
        sights: dict[int | None, _Sight] = {}
        for window in {a.window(step.origin) for step in self.plan}:
            rope = a.rope if window is None or a.local_rope is None else a.local_rope
            cos, sin = rope_table(rope, a.rotary_dim, positions_BT, x_BTM.dtype)
            mask = attention_mask(
                T, past + T, window=window, keep_BS=keep_BS, documents_BT=documents_BT, device=x_BTM.device
            )
            sights[window] = _Sight(cos, sin, mask, causal=mask is None and T > 1)
        return sights


def _count_positions(B: int, T: int, past: int, keep_BS: Tensor | None, device: torch.device) -> Tensor:
    if keep_BS is None:
        return torch.arange(past, past + T, device=device)[None].expand(B, T)
    return (keep_BS.long().cumsum(-1) - 1).clamp_min(0)[:, -T:]


def reset_module(module: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Fresh weights for one module of ours; containers and modules without weights are left alone."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RMSNorm | nn.LayerNorm | LoraDelta | StepDelta):
        module.reset_parameters()
    elif isinstance(module, nn.ParameterDict):  # a step's offsets
        for offset in module.values():
            nn.init.zeros_(offset)
    elif isinstance(module, nn.ParameterList):  # the recursions' encodings
        for encoding in module:
            nn.init.ones_(encoding)


__all__ = ["Cache", "Decoder", "Recompute", "reset_module"]
