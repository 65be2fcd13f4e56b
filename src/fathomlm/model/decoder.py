"""The decoder: whole passes over the depth plan, for inference and for training.

Shapes: B batch, T new tokens, S all tokens so far, M hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fathomlm.cache import Cache, NoCache, RolledEntries, RoutedCache
from fathomlm.depth import Step
from fathomlm.errors import OptionError, UnsupportedModel
from fathomlm.kernels.half import half_dtype, keeps_gradients
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, full_masks, gathered_masks, rolled_mask
from fathomlm.model.blocks import Block, Packed
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.route import DepthControl, RoutedWalk, Routers, RoutingTrace, RunSteps, TopKOptions
from fathomlm.model.stack import LayerStack, scaled

Recompute = Literal["none", "inner", "recursion", "layer"]
"""Activation checkpointing: what the backward pass computes again instead of keeping. `inner` are the feed-forward part's
activations, cheap to make; a compiled layer without relaxation does so, any other keeps them."""


class Decoder(LayerStack):
    """A stack of layers with the passes that are made over all of it."""

    _pack: Callable[[Block, torch.dtype], Packed] | None = None
    """Compiled, where a training pass is."""
    _look_up: Callable[[Tensor, Tensor, float, torch.dtype], Tensor] | None = None
    _see: Callable[..., AttentionMasks] = staticmethod(gathered_masks)

    def compile_for_training(self, backend: str = "inductor") -> None:
        """Compile all that a training pass runs."""
        self.compile_layers(backend)
        self._pack = torch.compile(Block.pack, dynamic=False, backend=backend)
        self._look_up = torch.compile(_look_up, dynamic=False, backend=backend)
        if self.routers is not None:
            self.routers.compile_parts(backend)
            self._see = torch.compile(gathered_masks, dynamic=False, backend=backend)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        keep_BS: Tensor | None = None,
        cache: Cache | None = None,
        embeddings_BTM: Tensor | None = None,
        memory: EncoderMemory | None = None,
        control: DepthControl | None = None,
        trace: RoutingTrace | None = None,
        states: list[Tensor] | None = None,
        recompute: Recompute = "none",
    ) -> Tensor:
        """Hidden states after the final norm; a routed model routes causally.

        `keep_BS` is False at padding, over all slots so far; `positions_BT` are true positions, which default to counting
        the kept slots. With a `cache`, tokens continue what it holds. `memory` is the encoder's output, for models that
        have an encoder; behind a cache its keys and values are made once. `control` limits depth; `trace` is told what a
        router decided. `states` is given the residual stream in front of the first step and after each; in a routed model
        tokens differ in their steps, and there are none. `recompute` is for training without a cache.
        """
        scale = self.architecture.embedding_scale
        x = self.enter(tokens_BT) if embeddings_BTM is None else scaled(embeddings_BTM, scale)
        past = 0 if cache is None else cache.length
        ids = tokens_BT if embeddings_BTM is None else None
        rows = self.equipped(TokenBatch.of(x, positions_BT, keep_BS, past=past, tokens_BT=ids), memory)
        control = DepthControl() if control is None else control
        if control.start_scale:
            if self.inject is None:
                raise OptionError("a start scale requires a model whose loops begin with an injection (huginn)")
            x = self.start_state(x, control.start_scale, rows.positions_BT, control.seed)
        kv = NoCache(self.plan) if cache is None else cache
        masks = full_masks(self.architecture, self.plan, rows, x.dtype)
        if control.bias and (self.plan.routing is None or self.plan.routing.random):
            raise OptionError("a depth bias moves what a router decides; this model has none that learned to")
        if states is not None and self.plan.routing is not None:
            raise UnsupportedModel("a routed model has no hidden states step by step: its tokens run different steps")
        walk = self._again(self.run_steps, recompute)
        if self.plan.routing is None:
            control.check(self.plan.recursions)
            deepest = control.recursions(self.plan.recursions)
            steps = [step for step in self.plan if step.recursion < deepest]
            if states is None:
                x = walk(x, steps, masks, kv)
            else:
                states.append(self.parted(x)[0])
                for step in steps:
                    x = walk(x, (step,), masks, kv)
                    states.append(self.parted(x)[0])
        else:
            routed = self._routed(walk)
            x = walk(x, self._part("prelude"), masks, kv)
            if isinstance(kv, RoutedCache):
                x = routed.cached(x, rows, kv, control, trace)
            elif isinstance(kv, NoCache):
                x = routed.whole(x, rows, kv, control, trace)
            else:
                raise ValueError("a routed model keeps its entries in a RoutedCache (fathomlm.cache.build_cache)")
            x = walk(x, self._part("coda"), masks, kv)
        if cache is not None:
            cache.advance(x.shape[1])
        out: Tensor = self.norm(self.parted(x)[0])
        return out

    def states(
        self,
        tokens_BT: Tensor,
        *,
        at: Collection[int] = (),
        keep_BS: Tensor | None = None,
        documents_BT: Tensor | None = None,
        memory: EncoderMemory | None = None,
        recompute: Recompute = "none",
        causal: bool = False,
        top_k: TopKOptions | None = None,
        trace: RoutingTrace | None = None,
        kept_SB: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """The residual stream after each step in `at` and after the last one, before the final norm: what training reads.
        `at` may name steps of exits too (`plan.exit_steps`).

        `documents_BT` numbers the documents packed into a row; tokens then see their own document only. A routed model
        takes the top k, or with `causal` decides as at inference; `top_k` says how many those are during a warm-up and
        among packed documents. Rows that are False in `kept_SB` skip that step (layer dropout).
        """
        x = self._stream(tokens_BT)
        if self.inject is not None and self.training:
            x = self.start_state(x, 1.0)
        rows = self.equipped(TokenBatch.of(x, None, keep_BS, past=0, documents_BT=documents_BT, tokens_BT=tokens_BT), memory)
        masks = full_masks(self.architecture, self.plan, rows, x.dtype)
        kv = NoCache(self.plan)
        walk = partial(self.run_steps, packed=self._packed(x), keep_inner=recompute != "inner", kept_SB=kept_SB)
        if self.plan.routing is not None:
            return self._routed_states(x, rows, masks, kv, at, walk, recompute, causal, top_k, trace)
        found: dict[int, Tensor] = {}
        for steps in self._segments(at, recompute):
            x = self._again(walk, recompute)(x, steps, masks, kv)
            last = steps[-1].index
            if last in at or last == self.plan.unrolled_layers - 1:
                found[last] = self.parted(x)[0]
            for own in self.plan.exit_steps((last,)):
                if own.index in at:
                    found[own.index] = self._again(walk, recompute)(x, (own,), masks, kv)
        return found

    def draft_states(
        self,
        tokens_BT: Tensor,
        last_BTM: Tensor,
        ahead: int,
        *,
        keep_BS: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """What the draft layer makes of every token `ahead` times: first from the true last states `last_BTM` of the tokens
        before, then from its own output for them, and so on: as if drafting had begun 0, 1, ... tokens before each. So
        trained on its own mistakes (HASS, EAGLE-3).

        In the n-th rolling a token sees, as in decoding, the entries from true states up to n tokens before it, one of each
        rolling between, and its own."""
        step, a = self.plan.draft_step, self.architecture
        x_BTM = self._stream(tokens_BT)
        batch = TokenBatch.of(x_BTM, None, keep_BS, past=0, documents_BT=documents_BT, tokens_BT=tokens_BT)
        masks = full_masks(a, (step,), batch, x_BTM.dtype)
        window, begins_BT = a.window(step.origin), None
        if documents_BT is not None:
            begins_BT = torch.nn.functional.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
        kv = NoCache(self.plan, RolledEntries(a.heads // a.kv_heads))
        assert self.exit_draft is not None
        state_BTM = last_BTM
        for rolled in range(ahead):
            if rolled:
                masks = {window: rolled_mask(masks[window], tokens_BT.shape[1], begins_BT)}
            state_BTM = self.run_steps(self.exit_draft(x_BTM, _shifted(state_BTM, begins_BT)), (step,), masks, kv)
            yield state_BTM

    def _routed_states(
        self,
        x: Tensor,
        rows: TokenBatch,
        masks: AttentionMasks,
        kv: NoCache,
        at: Collection[int],
        walk: RunSteps,
        recompute: Recompute,
        causal: bool,
        top_k: TopKOptions | None,
        trace: RoutingTrace | None,
    ) -> dict[int, Tensor]:
        last = self.plan.unrolled_layers - 1
        if set(at) - {last}:
            raise ValueError("a routed model has one output, after its last step")
        routed = self._routed(self._again(walk, recompute))
        x = walk(x, self._part("prelude"), masks, kv)
        if causal:
            x = routed.whole(x, rows, kv, DepthControl(), trace)
        else:
            x = routed.routers.train_walk(routed, x, rows, kv, top_k or TopKOptions(), trace)
        return {last: walk(x, self._part("coda"), masks, kv)}

    def _segments(self, at: Collection[int], recompute: Recompute) -> Iterator[Sequence[Step]]:
        """The steps in runs that end where a state is asked for, or where recomputation starts anew."""
        run: list[Step] = []
        for step in self.plan:
            run.append(step)
            outputs = {step.index, *(own.index for own in self.plan.exit_steps((step.index,)))}
            pause = not outputs.isdisjoint(at) or step.index == self.plan.unrolled_layers - 1
            if pause or recompute == "layer" or (recompute == "recursion" and self.plan.is_last_of_recursion(step)):
                yield run
                run = []

    def _stream(self, tokens_BT: Tensor) -> Tensor:
        """What enters the first step of a training pass. Autocast would leave embeddings wide, and with them all that
        follows. Compiled, rows are narrowed as they are looked up, and gradients added where they belong, in any order: a
        GPU adds attention's in any order too, and a CPU, which does not, looks up as ever."""
        kind = tokens_BT.device.type
        weight = self.embed.weight
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        if self._look_up is not None and tokens_BT.is_cuda and torch.is_grad_enabled():
            x: Tensor = self._look_up(tokens_BT, weight, self.architecture.embedding_scale, dtype)
            return x
        return self.enter(tokens_BT).to(dtype)

    def _part(self, part: str) -> list[Step]:
        return [step for step in self.plan if step.part == part]

    def _routed(self, run: RunSteps) -> RoutedWalk:
        assert isinstance(self.routers, Routers)
        return RoutedWalk(self.architecture, self.plan, self.routers, run, self._see)

    def _again(self, walk: RunSteps, recompute: Recompute) -> RunSteps:
        """The walk, keeping activations or computing them again in the backward pass."""
        if recompute in ("none", "inner") or not torch.is_grad_enabled():
            return walk
        self.plan.check_recompute(recompute)

        def run(x: Tensor, steps: Sequence[Step], masks: AttentionMasks, kv: Cache | NoCache) -> Tensor:
            parts = [[step] for step in steps] if recompute == "layer" else [steps]
            for part in parts:
                x = checkpoint(walk, x, part, masks, kv, use_reentrant=False)
            return x

        return run

    def _packed(self, x: Tensor) -> dict[int, Packed]:
        """The weights of layers that a compiled training pass runs more than once, packed for all uses together: that is
        less work and less memory than to pack them at every use, and their gradients are unpacked once."""
        if self._pack is None or self.deltas or not torch.is_grad_enabled() or not keeps_gradients(x):
            return {}
        looped = {step.layer: self.layers[step.layer] for step in self.plan if self.plan.is_shared(step)}
        blocks = {number: layer for number, layer in looped.items() if isinstance(layer, Block) and layer.packs}
        return {number: self._pack(layer, half_dtype(x)) for number, layer in blocks.items()}


def _look_up(tokens_BT: Tensor, weight_VM: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return scaled(torch.nn.functional.embedding(tokens_BT, weight_VM), scale).to(dtype)


def _shifted(state_BTM: Tensor, begins_BT: Tensor | None) -> Tensor:
    """Each token's state at the next one's place; zeros where there is none before it in its document."""
    before_BTM = torch.nn.functional.pad(state_BTM[:, :-1], (0, 0, 1, 0))
    return before_BTM if begins_BT is None else before_BTM.masked_fill(begins_BT[..., None], 0)
