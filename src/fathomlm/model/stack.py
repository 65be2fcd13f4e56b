"""A stack of layers under a depth plan: what it is made of, the walk over its steps, the head, and what exits have.

Shapes: B batch, T new tokens, M hidden width, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.cache import Cache, NoCache
from fathomlm.depth import Architecture, DepthPlan, Relaxation, Step
from fathomlm.errors import OptionError, UnsupportedModel
from fathomlm.kernels.cpu_layers import CpuLayers
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.recompiling import allow_recompiling
from fathomlm.kernels.row_linear import RowWeight
from fathomlm.model.attention_mask import AttentionMasks, RelativeBias, TokenBatch
from fathomlm.model.blocks import Block, Packed, StepContext, build_block
from fathomlm.model.blocks.attention import QuantizedLinear, build_linear, build_norm
from fathomlm.model.blocks.feed_forward import ExpertLinear
from fathomlm.model.blocks.step_context import PackedRows
from fathomlm.model.cached_rows import run_cached_rows
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.exits import DraftLayer, ExitAdapter, ExitClassifier, ExitVocab
from fathomlm.model.relax import StepDelta, build_deltas, build_encodings
from fathomlm.model.relax.lora import LoraDelta
from fathomlm.model.route import Routers, build_routers

MOST_SHAPES = 64
"""Of one layer in a run: recursions times the stairs of a capacity's warm-up, with gradients and without."""


class LayerStack(nn.Module):
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
        if (plan.exit_layer or plan.draft) and architecture.cross:
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
        self.inject = build_linear(architecture.pair_linear("inject")) if plan.injection else None
        """What begins a recursion, from its input and the prelude's output side by side."""
        self.relative = RelativeBias(architecture) if architecture.positions == "relative" else None
        self.head = None if architecture.tied_embeddings else build_linear(architecture.head)
        self.exit_heads = nn.ModuleDict(
            {str(index): LoraDelta(architecture.head, exit_rank) for index in plan.exits if exit_rank}
        )
        self.exit_blocks = nn.ModuleDict({str(index): build_block(architecture) for index in plan.exits if plan.exit_layer})
        """What `plan.exit_steps` run, by the index of the step that an exit follows."""
        self.exit_adapters = nn.ModuleDict(
            {str(index): ExitAdapter(architecture, exit_adapter) for index in plan.exits if exit_adapter}
        )
        self.exit_classifiers = nn.ModuleDict(
            {str(index): ExitClassifier(architecture) for index in plan.exits if exit_classifier}
        )
        """By the index of a step, as exit heads are: from `exit_hidden` to one score, high where leaving is safe."""
        self.exit_gate = ExitClassifier(architecture) if plan.exit_gate else None
        """From what the head reads at any exit to one logit: of exiting there, where the token has not before."""
        self.exit_draft = DraftLayer(architecture, build_block(architecture)) if plan.draft else None
        """What `plan.draft_step` runs, and what stands in front of it."""
        self.exit_vocab: ExitVocab | None = None
        """The tokens that early exits choose among; None is all of them."""
        self.quantized: str | None = None
        """What the layers' weights are, where they are integers (`model.quantize`)."""
        self.tied_head: nn.Linear | None = None
        """The head in integers, where the embedding is the head otherwise."""
        self.cpu_layers: CpuLayers | None = None

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile each layer for the shapes it is given: a run has few, one for each capacity of a router or batch size,
        and each is worth its own code; a compiler that guesses at shapes to come makes slower code for all."""
        allow_recompiling(MOST_SHAPES)
        drafts = () if self.exit_draft is None else (self.exit_draft, self.exit_draft.block)
        for layer in (*self.layers, self.norm, *self.exit_blocks.values(), *self.exit_adapters.values(), *drafts):
            layer.compile(dynamic=False, backend=backend)

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
        """Fresh weights: Gaussian linears and embeddings, neutral norms, deltas that add nothing. Routers draw last, so that
        all other weights of a routed model are those of the recursive one with the same seed."""
        routers = set() if self.routers is None else set(self.routers.modules())
        for module in (
            *(m for m in self.modules() if m not in routers),
            *(() if self.routers is None else self.routers.modules()),
        ):
            reset_module(module, std, generator)
        self.match_weights()

    def match_weights(self) -> None:
        """Set what deltas take from the shared weights (DoRA's row lengths), so that new ones add nothing."""
        for step in self.plan:
            if (delta := self.delta(step)) is not None:
                delta.match_weights(self.layers[step.layer])

    def equipped(self, rows: TokenBatch, memory: EncoderMemory | None = None) -> TokenBatch:
        """A batch with what this decoder attends to beside its own tokens: its position bias, and the encoder's
        output. Masks that are made from them carry both to every step, also in a walk over a part of the plan."""
        if self.architecture.cross != (memory is not None):
            wants = "requires `memory`, the encoder's output" if self.architecture.cross else "does not take `memory`"
            raise ValueError(f"a {self.architecture.family} decoder {wants}")
        if memory is not None and memory.states_BSM.shape[0] != rows.positions_BT.shape[0]:
            sizes = rows.positions_BT.shape[0], memory.states_BSM.shape[0]
            raise ValueError(f"a batch of {sizes[0]} rows requires as many sources, `memory` holds {sizes[1]}")
        if memory is None and self.relative is None:
            return rows
        return dataclasses.replace(rows, relative=self.relative, memory=memory)

    def logits(self, hidden_BTM: Tensor) -> Tensor:
        """Scores over the vocabulary; the head is the embedding where the two are tied."""
        scale = self.architecture.head_scale
        hidden_BTM = hidden_BTM if scale == 1.0 else hidden_BTM * scale
        head = self.tied_head if self.head is None else self.head
        if head is None:
            return F.linear(hidden_BTM, self.embed.weight)
        logits_BTV: Tensor = head(hidden_BTM)
        return logits_BTV

    @property
    def head_weight(self) -> Tensor:
        """What hidden states are multiplied with, their scale included (the first T5), for losses that take the product
        themselves."""
        scale = self.architecture.head_scale
        return self._head_matrix if scale == 1.0 else self._head_matrix * scale

    @property
    def _head_matrix(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def head_rows(self) -> RowWeight:
        """`head_weight` as the kernels of decoding rows take it, in integers where it is."""
        head = self.tied_head if self.head is None else self.head
        if isinstance(head, QuantizedLinear) and self.architecture.head_scale == 1.0:
            return head.quantized
        return self.head_weight

    def resize_vocab(self, vocab: int) -> None:
        """Follow the embedding (and head), which have been given another number of rows. What an exit adds to the logits of
        new tokens is nothing."""
        self.architecture = dataclasses.replace(self.architecture, vocab=vocab)
        for delta in self.exit_heads.values():
            assert isinstance(delta, LoraDelta)
            old_VR = delta.b
            new_VR = old_VR.new_zeros(vocab, old_VR.shape[1])
            rows = min(vocab, old_VR.shape[0])
            new_VR[:rows] = old_VR.detach()[:rows]
            delta.b = nn.Parameter(new_VR, requires_grad=old_VR.requires_grad)

    def limit_exits(self, vocab_W: Tensor | None) -> None:
        """Limit early exits to a vocabulary of their own, or (None) to all tokens. Call it after the weights are there, and
        again when they change."""
        self.exit_vocab = None if vocab_W is None else ExitVocab(vocab_W, self.head_weight)

    def exit_delta(self, index: int) -> LoraDelta | None:
        """What the exit after step `index` adds to the head, or None."""
        if str(index) not in self.exit_heads:
            return None
        delta = self.exit_heads[str(index)]
        assert isinstance(delta, LoraDelta)
        return delta

    def enter_draft(self, tokens_BT: Tensor, before_BTM: Tensor) -> Tensor:
        """What the draft layer reads of tokens, given the last layer's states of the tokens before them (zeros at position
        0), or in their place its own output for drafts."""
        assert self.exit_draft is not None
        x_BTM: Tensor = self.exit_draft(self.enter(tokens_BT), before_BTM)
        return x_BTM

    def enter(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream in front of the first step."""
        return scaled(self.embed(tokens_BT), self.architecture.embedding_scale)

    @torch.no_grad()
    def pack_rows(self, own: Sequence[Step] = (), *, merge: bool = False) -> dict[int, PackedRows]:
        """Copies of the layers' weights in fewer and larger matrices, by step, as they are now: what the kernels of decoding
        rows read. Of layers in integers, what they are packed in already. `own` are steps of exits to pack for too. With
        `merge`, what a step adds to its layer is merged into weights of its own. Empty where a step has no form."""
        packed: dict[int, PackedRows] = {}
        shared: dict[int, PackedRows] = {}
        for step in (*self.plan, *own):
            layer, delta = self.layer_of(step), self.delta(step)
            if not isinstance(layer, Block) or (layer.rows is None and not layer.packs_rows):
                return {}
            if delta is not None:
                exports = self.relaxation is not None and self.relaxation.method.exports
                if not merge or not exports or self.quantized is not None:
                    return {}
                layer = copy.deepcopy(layer).float()
                for name, parameter in layer.named_parameters():
                    parameter.copy_(delta.merged(name, parameter))
                packed[step.index] = layer.pack_rows(self.embed.weight.dtype)
                continue
            if step.layer not in shared:
                shared[step.layer] = layer.rows or layer.pack_rows(self.embed.weight.dtype)
            packed[step.index] = shared[step.layer]
        return packed if len({isinstance(rows.o_MW, Tensor) for rows in packed.values()}) == 1 else {}

    def keep_entries(self, x_BTM: Tensor, steps: Sequence[Step], masks: AttentionMasks, cache: Cache) -> None:
        """Store what steps would make of the same residual stream as keys and values; nothing else of them runs."""
        entered = False
        for step in steps:
            if not entered and self.plan.norms_before(step):
                x_BTM, entered = self.norm(x_BTM), True
            layer = self.layer_of(step)
            assert isinstance(layer, Block)
            layer.keep_entries(x_BTM, self._context(step, masks, cache))

    def exit_hidden(self, x_BTM: Tensor, index: int, *, layered: bool = False) -> Tensor:
        """What the head reads after step `index`: the residual stream through that exit's adapter and the final norm.

        Where the exit has a layer of its own, x is what that layer made of the stream (`layered`). It attends to other
        tokens, so it cannot be made up for here: who does not run it is refused."""
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
        if self.exit_vocab is not None and index != self.plan.unrolled_layers - 1:
            return self.exit_vocab.logits(hidden_BTM, self.exit_delta(index))
        logits_BTV, delta = self.logits(hidden_BTM), self.exit_delta(index)
        return logits_BTV if delta is None else logits_BTV + F.linear(F.linear(hidden_BTM, delta.a), delta.b)

    def has_exit_head(self, index: int) -> bool:
        """Whether scores after step `index` are made otherwise than those after the last."""
        own = (self.exit_adapters, self.exit_heads, self.exit_blocks)
        return self.exit_vocab is not None or any(str(index) in one for one in own)

    def run_steps(
        self,
        x: Tensor,
        steps: Sequence[Step],
        masks: AttentionMasks,
        kv: Cache | NoCache,
        packed: Mapping[int, Packed] | None = None,
        keep_inner: bool = True,
        kept_SB: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after some steps of the plan, in order, or after an exit's own step, which makes of it what
        that exit reads. Rows that `kept_SB` names as False for a step come out as they went in."""
        if self.cpu_layers is not None and self.inject is None and x.shape[1] == 1 and self.cpu_layers.takes(x):
            done = run_cached_rows(self.cpu_layers, self.norm, self.architecture, self.plan, x, steps, masks, kv)
            if done is not None:
                return done
        x, beside = self.parted(x)
        for step in steps:
            x, beside = self.entering(x, beside, step)
            out = self.layer_of(step)(x, self._context(step, masks, kv, packed, keep_inner))
            x = out if kept_SB is None or step.part == "exit" else torch.where(kept_SB[step.index, :, None, None], out, x)
            if self.encodings and self.plan.is_last_of_recursion(step):
                x = (x * self.encodings[step.recursion]).to(x.dtype)
        return x if beside is None else torch.cat((x, beside), dim=-1)

    def parted(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream, and what it carries beside it where recursions begin with an injection: in the prelude the start
        state, in the core the prelude's output. So a walk may stop anywhere and go on with any of its tokens."""
        M = self.architecture.hidden
        return (x, None) if x.shape[-1] == M else (x[..., :M], x[..., M:])

    def entering(self, x: Tensor, beside: Tensor | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """The stream as a step reads it, and what it carries on: through the norm and the injection that stand in front."""
        if self.plan.norms_before(step):
            x = self.norm(x)
        if self.inject is None or step.part == "prelude":
            return x, beside
        if step.part == "coda":
            return x, None
        if self.plan.begins_recursion(step):
            if step.recursion == 0:
                x, beside = torch.zeros_like(x) if beside is None else beside, x
            assert beside is not None
            x = self.inject(torch.cat((x, beside), dim=-1))
        return x, beside if step.index < self.plan.unrolled_layers - 1 else None

    def start_state(self, like_BTM: Tensor, scale: float, positions_BT: Tensor | None = None, seed: int = 0) -> Tensor:
        """The stream with the state beside it that the first injection begins from: normal noise, cut off at three standard
        deviations of sqrt(2/5) times the spread of an embedding (Huginn). With `positions_BT` a position always has the
        same noise, in any batch and behind any cache; without, torch's generator draws."""
        std = scale * math.sqrt(0.4 / self.architecture.hidden) * self.architecture.embedding_scale
        if positions_BT is None:
            noise = nn.init.trunc_normal_(torch.empty_like(like_BTM), std=1.0, a=-3.0, b=3.0)
        else:
            found, at_BT = torch.unique(positions_BT, return_inverse=True)
            drawn = torch.empty(len(found), like_BTM.shape[-1])
            for row_M, position in zip(drawn, found.tolist(), strict=True):
                generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
                nn.init.trunc_normal_(row_M, std=1.0, a=-3.0, b=3.0, generator=generator)
            noise = drawn.to(like_BTM)[at_BT]
        return torch.cat((like_BTM, noise.expand_as(like_BTM) * std), dim=-1)

    def layer_of(self, step: Step) -> nn.Module:
        """The layer that a step runs, of the plan or of an exit."""
        if step.part == "exit":
            if self.exit_draft is not None:
                return self.exit_draft.block
            return self.exit_blocks[str(self.plan.exits[step.index - self.plan.unrolled_layers])]
        return self.layers[step.layer]

    def _context(
        self,
        step: Step,
        masks: AttentionMasks,
        kv: Cache | NoCache,
        packed: Mapping[int, Packed] | None = None,
        keep_inner: bool = True,
    ) -> StepContext:
        attention = masks[self.architecture.window(step.origin)]
        cos, sin = attention.cos, attention.sin
        if not self.architecture.rotates(step.origin):
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return StepContext(
            cos, sin, attention.mask, attention.causal, kv.at(step), kv.reads(step), self.delta(step),
            packed=None if packed is None else packed.get(step.layer),
            memory=None if attention.memory is None else attention.memory.at(step, keeps=not isinstance(kv, NoCache)),
            keep_inner=keep_inner,
        )  # fmt: skip


def scaled(embeddings: Tensor, scale: float) -> Tensor:
    """Embeddings as the stream wants them; the scale is rounded to their dtype first, as the families that have one do."""
    return embeddings if scale == 1.0 else embeddings * embeddings.new_full((), scale)


def _check_rotation(architecture: Architecture, plan: DepthPlan) -> None:
    """Shared keys keep the rotation of the step that made them; a step with another one could not read them."""
    for step in plan:
        source = plan.steps[plan.kv_sources[step.index]]
        if architecture.rotates(step.origin) != architecture.rotates(source.origin):
            raise OptionError(
                f"kv mode '{plan.kv}' would let step {step.index + 1} read keys of step {source.index + 1}, and only one of "
                f"them is rotated ({architecture.family}: layers with rotary positions, and without)"
            )
        if architecture.local_rope is None:
            continue
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
    elif isinstance(module, ExpertLinear):
        module.reset_parameters(std, generator)
    elif isinstance(module, nn.ParameterDict):  # a step's offsets
        for offset in module.values():
            nn.init.zeros_(offset)
    elif isinstance(module, nn.ParameterList):  # the recursions' encodings
        for encoding in module:
            nn.init.ones_(encoding)
