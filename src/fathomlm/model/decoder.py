"""The decoder: embeddings, a walk over the depth plan, the head.

Shapes: B batch, T new tokens, S all tokens so far, M hidden width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fathomlm.cache import Entries, Passing, RoutedCache, StepKV
from fathomlm.depth import Architecture, DepthPlan, LinearSpec, Relaxation, Step
from fathomlm.errors import OptionError, UnsupportedModel
from fathomlm.kernels.half import half_dtype, keeps_gradients
from fathomlm.kernels.norm import RMSNorm
from fathomlm.model.blocks import Block, Packed, StepContext, build_block
from fathomlm.model.blocks.parts import build_norm
from fathomlm.model.exits import ExitAdapter, ExitClassifier
from fathomlm.model.memory import Memory
from fathomlm.model.relative import RelativeBias
from fathomlm.model.relax import LoraDelta, StepDelta, build_deltas, build_encodings
from fathomlm.model.route import DepthControl, RoutedWalk, Routers, RoutingTrace, build_routers
from fathomlm.model.sight import Rows, Sights, whole_sights

Recompute = Literal["none", "inner", "recursion", "layer"]
"""Activation checkpointing: what the backward pass computes again instead of keeping. `inner` are the feed-forward part's
activations, cheap to make; a compiled layer without relaxation does so, any other keeps them."""


MOST_SHAPES = 64
"""Of one layer in a run: recursions times the stairs of a capacity's warm-up, with gradients and without."""


class Cache(Protocol):
    """What the decoder asks of a key-value cache."""

    @property
    def length(self) -> int: ...

    def at(self, step: Step) -> StepKV | None: ...

    def reads(self, step: Step) -> Entries | None: ...

    def advance(self, tokens: int) -> None: ...


class _Walk(Protocol):
    def __call__(self, x: Tensor, steps: Sequence[Step], sights: Sights, kv: Cache | Passing) -> Tensor: ...


class Decoder(nn.Module):
    """Unique layers and the plan that says which runs when. Tied layers are one module, so a tie cannot come apart."""

    def __init__(
        self,
        architecture: Architecture,
        plan: DepthPlan,
        relaxation: Relaxation | None = None,
        exit_rank: int = 0,
        exit_adapter: int = 0,
        exit_classifier: bool = False,
    ) -> None:
        """`exit_rank` gives each early exit a low-rank delta of its own on the head (thesis 3, early-exit appendix),
        `exit_adapter` an adapter of that rank in front of the final norm, `exit_classifier` a judge of its choices. The plan
        says whether exits have layers of their own."""
        super().__init__()
        _check_rotation(architecture, plan)
        if plan.exit_layer and architecture.cross:
            raise UnsupportedModel(f"an exit of a {architecture.family} decoder has no layer of its own: it has an encoder")
        self.architecture = architecture
        self.plan = plan
        self.relaxation = relaxation
        self.embed = nn.Embedding(architecture.vocab, architecture.hidden)
        self.layers = nn.ModuleList(build_block(architecture) for _ in range(plan.unique_layers))
        self.deltas = build_deltas(architecture, plan, relaxation)
        self.encodings = build_encodings(architecture, plan, relaxation)
        self.routers = build_routers(architecture.hidden, plan.routing)
        self.norm = build_norm(architecture)
        self.relative = RelativeBias(architecture) if architecture.positions == "relative" else None
        self.head = None if architecture.tied_embeddings else nn.Linear(architecture.hidden, architecture.vocab, bias=False)
        spec = LinearSpec("head", architecture.hidden, architecture.vocab, bias=False)
        self.exit_heads = nn.ModuleDict({str(index): LoraDelta(spec, exit_rank) for index in plan.exits if exit_rank})
        self.exit_blocks = nn.ModuleDict({str(index): build_block(architecture) for index in plan.exits if plan.exit_layer})
        """What `plan.exit_steps` run, by the index of the step that an exit follows."""
        self.exit_adapters = nn.ModuleDict(
            {str(index): ExitAdapter(architecture, exit_adapter) for index in plan.exits if exit_adapter}
        )
        self.exit_classifiers = nn.ModuleDict(
            {str(index): ExitClassifier(architecture) for index in plan.exits if exit_classifier}
        )
        """By the index of a step, as exit heads are: from `exit_hidden` to one score, high where leaving is safe."""
        self._pack: Callable[[Block, torch.dtype], Packed] | None = None

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile each layer for the shapes it is given: a run has few, one for each capacity of a router or size of a pass,
        and each is worth its own code; a compiler that guesses at shapes to come makes slower code for all."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
        for layer in (*self.layers, self.norm, *self.exit_blocks.values(), *self.exit_adapters.values()):
            layer.compile(dynamic=False, backend=backend)

    def compile_for_training(self, backend: str = "inductor") -> None:
        """Compile all that a training pass runs."""
        self.compile_layers(backend)
        self._pack = torch.compile(_pack, dynamic=False, backend=backend)
        if self.routers is not None:
            self.routers.compile_parts(backend)

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
        memory: Memory | None = None,
        control: DepthControl | None = None,
        trace: RoutingTrace | None = None,
    ) -> Tensor:
        """Hidden states after the final norm; a routed model routes causally.

        `keep_BS` is False at padding, over all slots so far; `positions_BT` are true positions, which default to counting
        the kept slots. With a `cache`, tokens continue what it holds. `memory` is the encoder's output, for models that
        have an encoder; behind a cache its keys and values are made once. `control` limits depth; `trace` is told what a
        router decided.
        """
        x = self._embed(tokens_BT) if embeddings_BTM is None else self._scale(embeddings_BTM)
        rows = self.equipped(Rows.of(x, positions_BT, keep_BS, past=0 if cache is None else cache.length), memory)
        control = DepthControl() if control is None else control
        kv = Passing(self.plan) if cache is None else cache
        sights = whole_sights(self.architecture, self.plan, rows, x.dtype)
        if control.bias and (self.plan.routing is None or self.plan.routing.random):
            raise OptionError("a depth bias moves what a router decides; this model has none that learned to")
        if self.plan.routing is None:
            control.check(self.plan.recursions)
            deepest = control.recursions(self.plan.recursions)
            x = self._walk(x, [step for step in self.plan if step.recursion < deepest], sights, kv)
        else:
            routed = self._routed(self._walk)
            x = self._walk(x, self._part("prelude"), sights, kv)
            if isinstance(kv, RoutedCache):
                x = routed.cached(x, rows, kv, control, trace)
            elif isinstance(kv, Passing):
                x = routed.whole(x, rows, kv, control, trace)
            else:
                raise ValueError("a routed model keeps its entries in a RoutedCache (fathomlm.cache.build_cache)")
            x = self._walk(x, self._part("coda"), sights, kv)
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
        memory: Memory | None = None,
        recompute: Recompute = "none",
        causal: bool = False,
        openness: float = 0.0,
        trace: RoutingTrace | None = None,
    ) -> dict[int, Tensor]:
        """The residual stream after each step in `at` and after the last one, before the final norm: what training reads.
        `at` may name steps of exits too (`plan.exit_steps`).

        `documents_BT` numbers the documents packed into a row; tokens then see their own document only. A routed model
        takes the top k, or with `causal` decides as at inference; `openness` (1 to 0) is what is left of the capacity's
        warm-up.
        """
        x = self._embed(tokens_BT)
        if torch.is_autocast_enabled(x.device.type):  # autocast leaves embeddings wide, and with them the whole stream
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rows = self.equipped(Rows.of(x, None, keep_BS, past=0, documents_BT=documents_BT), memory)
        sights = whole_sights(self.architecture, self.plan, rows, x.dtype)
        kv = Passing(self.plan)
        walk = partial(self._walk, packed=self._packed(x), keep_inner=recompute != "inner")
        if self.plan.routing is not None:
            return self._routed_states(x, rows, sights, kv, at, walk, recompute, causal, openness, trace)
        found: dict[int, Tensor] = {}
        for steps in self._segments(at, recompute):
            x = self._again(walk, recompute)(x, steps, sights, kv)
            last = steps[-1].index
            if last in at or last == self.plan.unrolled_layers - 1:
                found[last] = x
            for own in self.plan.exit_steps((last,)):
                if own.index in at:
                    found[own.index] = self._again(walk, recompute)(x, (own,), sights, kv)
        return found

    def _routed_states(
        self,
        x: Tensor,
        rows: Rows,
        sights: Sights,
        kv: Passing,
        at: Collection[int],
        walk: _Walk,
        recompute: Recompute,
        causal: bool,
        openness: float,
        trace: RoutingTrace | None,
    ) -> dict[int, Tensor]:
        last = self.plan.unrolled_layers - 1
        if set(at) - {last}:
            raise ValueError("a routed model has one output, after its last step")
        routed = self._routed(self._again(walk, recompute))
        x = walk(x, self._part("prelude"), sights, kv)
        if causal or routed.routing.kind == "token":
            x = routed.whole(x, rows, kv, DepthControl(), trace)
        else:
            x = routed.top_k(x, rows, kv, openness, trace)
        return {last: walk(x, self._part("coda"), sights, kv)}

    def equipped(self, rows: Rows, memory: Memory | None = None) -> Rows:
        """The rows of a pass with what this decoder looks at beside its own tokens: its position bias, and the encoder's
        output. Sights that are made from them carry both to every step, also in a walk over a part of the plan."""
        if self.architecture.cross != (memory is not None):
            wants = "needs `memory`, the encoder's output" if self.architecture.cross else "has no place for `memory`"
            raise ValueError(f"a {self.architecture.family} decoder {wants}")
        if memory is not None and memory.states_BSM.shape[0] != rows.positions_BT.shape[0]:
            raise ValueError(f"{rows.positions_BT.shape[0]} rows look at {memory.states_BSM.shape[0]} sources")
        if memory is None and self.relative is None:
            return rows
        return dataclasses.replace(rows, relative=self.relative, memory=memory)

    def logits(self, hidden_BTM: Tensor) -> Tensor:
        """Scores over the vocabulary; the head is the embedding where the two are tied."""
        scale = self.architecture.head_scale
        return F.linear(hidden_BTM if scale == 1.0 else hidden_BTM * scale, self._head_matrix)

    @property
    def head_weight(self) -> Tensor:
        """What hidden states are multiplied with, their scale included (the first T5), for losses that take the product
        themselves."""
        scale = self.architecture.head_scale
        return self._head_matrix if scale == 1.0 else self._head_matrix * scale

    @property
    def _head_matrix(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def exit_delta(self, index: int) -> LoraDelta | None:
        """What the exit after step `index` adds to the head, or None."""
        if str(index) not in self.exit_heads:
            return None
        delta = self.exit_heads[str(index)]
        assert isinstance(delta, LoraDelta)
        return delta

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream in front of the first step."""
        return self._embed(tokens_BT)

    def run_steps(
        self,
        x_BTM: Tensor,
        steps: Sequence[Step],
        sights: Sights,
        cache: Cache,
        packed: Mapping[int, Packed] | None = None,
    ) -> Tensor:
        """The residual stream after some steps of the plan: a part of a pass, for decoding that leaves early. An exit's own
        step makes of it what that exit reads. `packed` are weights from `pack_layers`."""
        return self._walk(x_BTM, steps, sights, cache, packed)

    @torch.no_grad()
    def pack_layers(self, own: Sequence[Step] = ()) -> dict[int, Packed]:
        """Copies of the layers' weights in fewer and larger matrices, by layer, as they are now: a single token is read
        through them faster. Empty where the family or a relaxation has no such form. `own` are steps of exits to pack for
        too."""
        layers = {} if self.deltas else dict(enumerate(self.layers)) | {step.layer: self._layer(step) for step in own}
        dtype = self.embed.weight.dtype
        return {i: layer.pack(dtype) for i, layer in layers.items() if isinstance(layer, Block) and layer.packs}

    def keep_entries(self, x_BTM: Tensor, steps: Sequence[Step], sights: Sights, cache: Cache) -> None:
        """Store what steps would make of the same residual stream as keys and values; nothing else of them runs."""
        for step in steps:
            layer = self._layer(step)
            assert isinstance(layer, Block)
            layer.keep_entries(x_BTM, self._context(step, sights, cache))

    def exit_hidden(self, x_BTM: Tensor, index: int, *, layered: bool = False) -> Tensor:
        """What the head reads after step `index`: the residual stream through that exit's adapter and the final norm.

        Where the exit has a layer of its own, x is what that layer made of the stream (`layered`). It looks at other tokens,
        so it cannot be made up for here: who does not run it is refused."""
        if not layered and str(index) in self.exit_blocks:
            raise UnsupportedModel(
                f"the exit after layer {index + 1} has a layer of its own, over the states of all tokens so far, which this "
                "does not run; fathomlm generate and fathomlm train do"
            )
        if str(index) in self.exit_adapters:
            x_BTM = self.exit_adapters[str(index)](x_BTM)
        hidden_BTM: Tensor = self.norm(x_BTM)
        return hidden_BTM

    def exit_score(self, x_BTM: Tensor, index: int, *, layered: bool = False) -> Tensor:
        """What that exit's classifier says of the residual stream after step `index`, before a sigmoid."""
        score_BT: Tensor = self.exit_classifiers[str(index)](self.exit_hidden(x_BTM, index, layered=layered))
        return score_BT

    def exit_logits(self, x_BTM: Tensor, index: int, *, layered: bool = False) -> Tensor:
        """Scores after step `index`, from the residual stream: adapter, final norm, head, and what the exit adds to it. See
        `exit_hidden` for exits with a layer of their own."""
        hidden_BTM = self.exit_hidden(x_BTM, index, layered=layered)
        logits_BTV, delta = self.logits(hidden_BTM), self.exit_delta(index)
        return logits_BTV if delta is None else logits_BTV + F.linear(F.linear(hidden_BTM, delta.a), delta.b)

    def _segments(self, at: Collection[int], recompute: Recompute) -> Iterator[Sequence[Step]]:
        """The steps in runs that end where a state is asked for, or where recomputation starts anew."""
        run: list[Step] = []
        for step in self.plan:
            run.append(step)
            asked = {step.index, *(own.index for own in self.plan.exit_steps((step.index,)))}
            pause = not asked.isdisjoint(at) or step.index == self.plan.unrolled_layers - 1
            if pause or recompute == "layer" or (recompute == "recursion" and self.plan.is_last_of_recursion(step)):
                yield run
                run = []

    def _part(self, part: str) -> list[Step]:
        return [step for step in self.plan if step.part == part]

    def _routed(self, run: _Walk) -> RoutedWalk:
        assert isinstance(self.routers, Routers)
        return RoutedWalk(self.architecture, self.plan, self.routers, run)

    def _again(self, walk: _Walk, recompute: Recompute) -> _Walk:
        """The walk, keeping activations or computing them again in the backward pass."""
        if recompute in ("none", "inner") or not torch.is_grad_enabled():
            return walk
        self.plan.check_recompute(recompute)

        def run(x: Tensor, steps: Sequence[Step], sights: Sights, kv: Cache | Passing) -> Tensor:
            parts = [[step] for step in steps] if recompute == "layer" else [steps]
            for part in parts:
                x = checkpoint(walk, x, part, sights, kv, use_reentrant=False)
            return x

        return run

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        return self._scale(self.embed(tokens_BT))

    def _scale(self, x: Tensor) -> Tensor:
        if self.architecture.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self.architecture.embedding_scale, dtype=x.dtype, device=x.device)

    def _packed(self, x: Tensor) -> dict[int, Packed]:
        """The weights of layers that a compiled training pass runs more than once, packed for all uses together: that is
        less work and less memory than to pack them at every use, and their gradients are unpacked once."""
        if self._pack is None or self.deltas or not torch.is_grad_enabled() or not keeps_gradients(x):
            return {}
        looped = {step.layer: self.layers[step.layer] for step in self.plan if self.plan.is_shared(step)}
        blocks = {number: layer for number, layer in looped.items() if isinstance(layer, Block) and layer.packs}
        return {number: self._pack(layer, half_dtype(x)) for number, layer in blocks.items()}

    def _walk(
        self,
        x: Tensor,
        steps: Sequence[Step],
        sights: Sights,
        kv: Cache | Passing,
        packed: Mapping[int, Packed] | None = None,
        keep_inner: bool = True,
    ) -> Tensor:
        """Run some steps of the plan, in order."""
        for step in steps:
            x = self._layer(step)(x, self._context(step, sights, kv, packed, keep_inner))
            if self.encodings and self.plan.is_last_of_recursion(step):
                x = (x * self.encodings[step.recursion]).to(x.dtype)
        return x

    def _layer(self, step: Step) -> nn.Module:
        if step.part == "exit":
            return self.exit_blocks[str(self.plan.exits[step.index - self.plan.unrolled_layers])]
        return self.layers[step.layer]

    def _context(
        self,
        step: Step,
        sights: Sights,
        kv: Cache | Passing,
        packed: Mapping[int, Packed] | None = None,
        keep_inner: bool = True,
    ) -> StepContext:
        sight = sights[self.architecture.window(step.origin)]
        return StepContext(
            sight.cos, sight.sin, sight.mask, sight.causal, kv.at(step), kv.reads(step), self.delta(step),
            packed=None if packed is None else packed.get(step.layer),
            memory=None if sight.memory is None else sight.memory.at(step, keeps=not isinstance(kv, Passing)),
            keep_inner=keep_inner,
        )  # fmt: skip


def _pack(layer: Block, dtype: torch.dtype) -> Packed:
    return layer.pack(dtype)


def _check_rotation(architecture: Architecture, plan: DepthPlan) -> None:
    """Shared keys keep the rotation of the step that made them; a step with another rotary base could not read them."""
    if architecture.local_rope is None:
        return
    for step in plan:
        source = plan.steps[plan.kv_sources[step.index]]
        if (architecture.window(step.origin) is None) != (architecture.window(source.origin) is None):
            raise OptionError(
                f"kv mode '{plan.kv}' would let step {step.index + 1} read keys of step {source.index + 1}, which has "
                f"another rotary base ({architecture.family}: layers with a window, and without)"
            )


def reset_module(module: nn.Module, std: float, generator: torch.Generator | None = None) -> None:
    """Fresh weights for one module of ours; containers and modules without weights are left alone."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(
        module, RMSNorm | nn.LayerNorm | LoraDelta | StepDelta | Routers | RelativeBias | ExitAdapter | ExitClassifier
    ):
        module.reset_parameters()
    elif isinstance(module, nn.ParameterDict):  # a step's offsets
        for offset in module.values():
            nn.init.zeros_(offset)
    elif isinstance(module, nn.ParameterList):  # the recursions' encodings
        for encoding in module:
            nn.init.ones_(encoding)


__all__ = ["Cache", "Decoder", "Recompute", "reset_module"]
