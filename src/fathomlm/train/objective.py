"""The objective: one forward pass of a batch and the sum of all its losses, as one module.

It is one module because FSDP and DDP hook into a module's forward: the walk over the plan, the exits and the head all
happen inside, so a shared block is gathered once for all of its uses. Sums are returned, not means; the loop divides by
the tokens of the whole step, so nothing depends on how the batch was split.

Shapes: B rows, T tokens, M hidden width, N = B x T, V vocabulary, W the exit vocabulary, K = M and a delta's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder, Recompute
from fathomlm.model.exits import ExitVocab
from fathomlm.model.route import RoutingTrace, TopKOptions
from fathomlm.model.route.trace import RoutingMeter
from fathomlm.train.data.loader import IGNORE, Batch
from fathomlm.train.losses.exits import (
    agreement_loss,
    exit_entropy,
    exit_log_probabilities,
    expected_exit,
    kept_steps,
)
from fathomlm.train.losses.head import (
    AnyTeacher,
    HeadParts,
    LikeliestTokens,
    Teacher,
    head_loss,
    likeliest_tokens,
)
from fathomlm.train.losses.layerwise import candidates, healing_loss, layerwise_loss, taught_layers, teacher_steps
from fathomlm.train.losses.outputs import LossOutput, loss_outputs
from fathomlm.train.losses.routing import openness, routing_names, routing_parts, smooth_openness
from fathomlm.train.recipe import LossRecipe, RoutingLossRecipe
from fathomlm.train.seq2seq import encode

GATE_NAMES = ("gate_entropy", "gate_depth")
"""How undecided a gate is, and the output that it lets tokens exit at, on average, from 1."""


class Objective(nn.Module):
    """A student and all that is asked of it.

    Early exits with a vocabulary of their own (`limit_exits`) learn over it alone, and so does what they learn from the
    last output. A token whose target is another one asks nothing of them, except of their classifiers.
    """

    places_V: Tensor | None

    def __init__(
        self,
        decoder: Decoder,
        recipe: LossRecipe,
        *,
        teacher: Decoder | None = None,
        recompute: Recompute = "none",
        encoder: nn.Module | None = None,
        teacher_encoder: nn.Module | None = None,
        kept_layers: Sequence[int] | None = None,
    ) -> None:
        """`encoder` is that of an encoder-decoder model; its teacher has one too. `kept_layers` are the teacher's that a
        dropped student has, for healing."""
        super().__init__()
        self.decoder = decoder
        self.encoder = encoder
        self.recipe = recipe
        self.recompute = recompute
        self._teacher = (teacher, teacher_encoder)
        """In a tuple, so that its weights are not among this module's."""
        if recipe.layer_dropout and decoder.plan.routing is not None:
            raise OptionError("loss.layer_dropout cannot be combined with a router")
        self._head_parts = HeadParts()
        self._routing_parts = routing_parts
        self._outputs = loss_outputs(recipe, decoder.plan)
        self._shallow, self._deep = _layerwise_states(recipe, decoder)
        self._healed: tuple[int, ...] = ()
        """For each step the teacher's that it is compared with."""
        if recipe.heal is not None and teacher is not None:
            self._healed = teacher_steps(decoder.plan, teacher.plan, kept_layers)
        self._step = 0
        """The optimizer's, by which exits take turns and layers are dropped."""
        self._drafts = 0 if recipe.exits is None else recipe.exits.draft
        """How many tokens ahead a draft layer learns; its outputs count on from the last step."""
        self._classifies = recipe.exits is not None and recipe.exits.classifier
        self._gated = recipe.exits is not None and recipe.exits.weights == "gate"
        self._teaches = recipe.routing or RoutingLossRecipe()
        self.openness = 0.0
        """What is left of the capacity's warm-up; the loop sets it, and only training heeds it."""
        self._exact: Tensor | None = None
        """The same to the step, where the warm-up is smooth. One tensor for all steps: a recorded pass reads it in place."""
        self.meter: RoutingMeter | None = None
        """Told of every routed pass, where there is one."""
        exit_vocab = decoder.exit_vocab
        self.register_buffer("places_V", None if exit_vocab is None else _places(exit_vocab), persistent=False)

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile what of the losses is many small operations, or slow ones."""
        self._head_parts = HeadParts.compiled(backend)
        self._routing_parts = torch.compile(routing_parts, dynamic=False, backend=backend)

    @property
    def names(self) -> tuple[str, ...]:
        """What the parts that `forward` returns are called: next_token first, which is the last output's cross entropy."""
        parts: list[str] = []
        for output in self._outputs:
            parts += output.parts
            parts += [output.classifier] if self._classifies and output is not self._outputs[-1] else []
        names = tuple(sorted(parts, key=lambda name: name != "next_token")) + (("layerwise",) if self._shallow else ())
        names += ("heal",) if self._healed else ()
        names += GATE_NAMES if self._gated else ()
        routing = self.decoder.plan.routing
        return names if routing is None else names + routing_names(routing)

    def warm_up(self, step: int, device: torch.device) -> None:
        """Set what depends on the number of an optimizer step (from 0): capacities, and what of LayerSkip counts."""
        self._step = step
        self.openness = openness(self._teaches, step)
        if self._teaches.capacity_warmup_shape == "smooth" and self.openness:
            self._exact = torch.zeros((), dtype=torch.float64, device=device) if self._exact is None else self._exact
            self._exact.fill_(smooth_openness(self._teaches, step))

    @property
    def _now(self) -> tuple[LossOutput, ...]:
        """The outputs that count: all, or in training those whose turn it is; weights that add up to 1 still do."""
        exits = self.recipe.exits
        if exits is None or not exits.rotate or not self.training:
            return self._outputs
        *early, last = self._outputs
        turn = [*(output for number, output in enumerate(early) if (number - self._step) % exits.rotate == 0), last]
        total = 1.0 if exits.weights == "aggressive" else sum(output.terms.weight for output in turn)
        return tuple(replace(output, terms=output.terms.scaled(1 / total)) for output in turn)

    @property
    def resting(self) -> frozenset[str]:
        """The parts that a training step leaves out: zeros stand for them."""
        counted = {name for output in self._now for name in output.parts}
        return frozenset(name for output in self._outputs for name in output.parts if name not in counted)

    @property
    def exits(self) -> tuple[int, ...]:
        """Steps that the early exits follow."""
        return tuple(output.index for output in self._outputs[:-1] if output.index < self.decoder.plan.unrolled_layers)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        keep_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        causal: bool = False,
        source_BS: Tensor | None = None,
        source_keep_BS: Tensor | None = None,
        likeliest_BTK: Tensor | None = None,
        likeliest_logs_BTK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum of all losses over the batch's tokens, and its parts in the order of `names`, each unweighted. With
        `causal` a routed model decides as at inference. `source_BS` is what an encoder reads. `likeliest_BTK` are a
        teacher's tokens with their log-probabilities, where it is not here itself."""
        plan = self.decoder.plan
        outputs, last = self._now, plan.unrolled_layers - 1
        own = {o.index: step.index for o in outputs if o.index < last for step in plan.exit_steps((o.index,))}
        at = {own.get(output.index, output.index) for output in outputs if output.index <= last}
        at |= {*self._shallow, *self._deep}
        trace = None if plan.routing is None else RoutingTrace()
        left = self.openness if self.training else 0.0
        memory = None
        if self.encoder is not None:
            assert source_BS is not None
            assert source_keep_BS is not None
            memory = encode(self.encoder, self.decoder, source_BS, source_keep_BS)
            keep_BT = None if trace is None else targets_BT != IGNORE  # padding lies behind; only a router would see it
        states = self.decoder.states(
            tokens_BT,
            at=at | set(range(len(self._healed))),
            keep_BS=keep_BT,
            documents_BT=documents_BT,
            memory=memory,
            recompute=self.recompute,
            causal=causal,
            top_k=TopKOptions(left, self._exact if left else None, self._teaches.capacity_per_document),
            trace=trace,
            kept_SB=self._kept(tokens_BT),
        )
        taught = None
        if self._teacher[0] is not None:
            taught = self._teacher_states(tokens_BT, keep_BT, documents_BT, source_BS, source_keep_BS)
        healed = [states[index] for index in range(len(self._healed))]
        if self.recipe.heal is not None and self.recipe.heal.alone and self.training:
            assert taught is not None
            error = self._heal_error(healed, taught, targets_BT)
            nothing = torch.zeros_like(error)
            only = [error.detach() if name == "heal" else nothing for name in self.names]
            return self.recipe.heal.weight * error, torch.stack(only)
        behind = {index: states.pop(step) for index, step in own.items()}
        read = {index: state for index, state in states.items() if index in at} | behind
        normed = {index: self.decoder.exit_hidden(state, index, layered=True) for index, state in read.items()}
        targets_N = targets_BT.flatten()
        few_N = None if self.places_V is None else _placed(targets_N, self.places_V)
        if self._drafts:
            rolled = self.decoder.draft_states(
                tokens_BT, states[last].detach(), self._drafts, keep_BS=keep_BT, documents_BT=documents_BT
            )
            normed |= {last + n: self.decoder.norm(state) for n, state in enumerate(rolled, start=1)}
        parts: dict[str, Tensor] = {}
        choices: dict[int, Tensor] = {}
        total = torch.zeros((), device=targets_BT.device)
        weights_NO = None
        if self._gated:
            total, weights_NO = self._gate(total, parts, normed, targets_N)
        for number, output in enumerate(outputs):
            exit_vocab = self._exit_vocab(output.index)
            teacher: AnyTeacher | None = None
            if output.terms.divergence is not None:
                if output.index != last:
                    teacher = self._self_teacher(normed[last], exit_vocab)
                elif likeliest_BTK is not None and likeliest_logs_BTK is not None:
                    teacher = LikeliestTokens(likeliest_BTK.flatten(0, 1), likeliest_logs_BTK.flatten(0, 1))
                else:
                    teacher = self._last_of(taught)
            if self._classifies:
                choices[output.index] = torch.empty(targets_N.shape, dtype=torch.long, device=targets_N.device)
            hidden_NK, weight_VK = self._head(output.index, normed[output.index].flatten(0, 1), exit_vocab)
            loss, *sums = head_loss(
                hidden_NK,
                weight_VK,
                targets_N if exit_vocab is None or few_N is None else few_N,
                output.terms,
                teacher=teacher,
                chunk=self.recipe.chunk,
                parts=self._head_parts,
                choices_N=choices.get(output.index),
                weights_N=None if weights_NO is None else weights_NO[:, number],
            )
            if exit_vocab is not None and self._classifies:
                choices[output.index] = exit_vocab.vocab_W[choices[output.index]]
            total = total + loss
            parts |= dict(zip(output.parts, sums, strict=False))
        if self._classifies:
            total = self._add_classifiers(total, parts, normed, choices, targets_N)
        if self._shallow:
            adapted = {int(name) for name in (*self.decoder.exit_adapters, *self.decoder.exit_blocks)} & states.keys()
            plain = {index: self.decoder.norm(states[index]) for index in adapted}
            total, parts["layerwise"] = self._add_layerwise(total, normed | plain, targets_BT)
        if self.recipe.heal is not None and self._healed:
            assert taught is not None
            parts["heal"] = self._heal_error(healed, taught, targets_BT)
            total = total + self.recipe.heal.weight * parts["heal"]
        if trace is not None:
            total = self._add_routing(total, parts, trace, targets_BT)
        nothing = torch.zeros_like(total)
        return total, torch.stack([parts.get(name, nothing).detach() for name in self.names])

    def _kept(self, tokens_BT: Tensor) -> Tensor | None:
        """Which rows run each step; None where all run every one."""
        most = self.recipe.layer_dropout if self.training else 0.0
        return kept_steps(tokens_BT, self._step, self.decoder.plan.unrolled_layers, most) if most else None

    def _gate(
        self, total: Tensor, parts: dict[str, Tensor], normed: dict[int, Tensor], targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What its entropy counts is taken off; and how likely each token exits at each output."""
        gate, recipe = self.decoder.exit_gate, self.recipe.exits
        assert gate is not None
        assert recipe is not None
        scores_NE = torch.stack([gate(normed[index]).flatten() for index in self.exits], dim=1)
        log_p_NO = exit_log_probabilities(scores_NE.float())
        counted_N = targets_N != IGNORE
        entropy = torch.where(counted_N, exit_entropy(log_p_NO), 0.0).sum()
        depth = torch.where(counted_N, expected_exit(log_p_NO), 0.0).sum()
        parts |= dict(zip(GATE_NAMES, (entropy, depth), strict=True))
        return total - recipe.entropy * entropy, log_p_NO.exp()

    def _add_classifiers(
        self,
        total: Tensor,
        parts: dict[str, Tensor],
        normed: dict[int, Tensor],
        choices: dict[int, Tensor],
        targets_N: Tensor,
    ) -> Tensor:
        """A classifier judges an exit and does not change what it judges: what it reads is detached."""
        *early, last = self._outputs
        for output in early:
            classifier = self.decoder.exit_classifiers[str(output.index)]
            scores_N = classifier(normed[output.index].detach()).flatten()
            loss = agreement_loss(scores_N, choices[output.index], choices[last.index], targets_N)
            parts[output.classifier] = loss
            total = total + loss
        return total

    def _add_routing(self, total: Tensor, parts: dict[str, Tensor], trace: RoutingTrace, targets_BT: Tensor) -> Tensor:
        routing = self.decoder.plan.routing
        assert routing is not None
        counted_B = (targets_BT != IGNORE).sum(1).float()
        found = self._routing_parts(trace, routing, counted_B)
        parts |= found
        if self.meter is not None:
            self.meter.add(trace, counted_B > 0)
        weights = {"router": self._teaches.weight(routing), "router_z": self._teaches.z_weight(routing)}
        routers = self.decoder.routers
        beside = routers is not None and len(routers.aux) > 0  # learns from this loss only, and DDP waits for its gradient
        return total + sum(w * found[name] for name, w in weights.items() if w or (beside and name == "router"))

    def _exit_vocab(self, index: int) -> ExitVocab | None:
        """The tokens that the output after a step chooses among; None is every token."""
        return None if index == self._outputs[-1].index else self.decoder.exit_vocab

    def _head(self, index: int, hidden_NM: Tensor, exit_vocab: ExitVocab | None) -> tuple[Tensor, Tensor]:
        """Hidden states and head of an output. An exit's low-rank delta joins both as extra columns: W h + B (A h). Of
        an exit vocabulary there are its rows only."""
        weight = self.decoder.head_weight if exit_vocab is None else exit_vocab.rows_WM
        delta = self.decoder.exit_delta(index)
        if delta is None:
            return hidden_NM, weight
        inner = torch.nn.functional.linear(hidden_NM, delta.a)
        outer = delta.b if exit_vocab is None else delta.b.index_select(0, exit_vocab.vocab_W)
        return torch.cat((hidden_NM, inner.to(hidden_NM.dtype)), dim=1), torch.cat((weight, outer), dim=1)

    def _self_teacher(self, normed_BTM: Tensor, exit_vocab: ExitVocab | None) -> Teacher:
        weight = self.decoder.head_weight.detach() if exit_vocab is None else exit_vocab.rows_WM
        return Teacher(normed_BTM.detach().flatten(0, 1), weight)

    def _teacher_states(
        self,
        tokens_BT: Tensor,
        keep_BT: Tensor | None,
        documents_BT: Tensor | None,
        source_BS: Tensor | None,
        source_keep_BS: Tensor | None,
    ) -> dict[int, Tensor]:
        """The teacher's residual stream after its last step, and where healing looks."""
        teacher, encoder = self._teacher
        assert teacher is not None
        with torch.no_grad():
            memory = None
            if encoder is not None and source_BS is not None and source_keep_BS is not None:
                memory = encode(encoder, teacher, source_BS, source_keep_BS)
            at = set(self._healed)
            return teacher.states(tokens_BT, at=at, keep_BS=keep_BT, documents_BT=documents_BT, memory=memory)

    def _last_of(self, states: dict[int, Tensor] | None) -> AnyTeacher:
        teacher = self._teacher[0]
        assert teacher is not None
        assert states is not None
        with torch.no_grad():
            last_BTM = teacher.norm(states[teacher.plan.unrolled_layers - 1])
            whole = Teacher(last_BTM.flatten(0, 1), teacher.head_weight)
        distill = self.recipe.distill
        if distill is None or not distill.top_k:
            return whole
        kind = last_BTM.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else last_BTM.dtype
        return likeliest_tokens(whole, distill.top_k, dtype, self.recipe.chunk)

    def likeliest(self, batch: Batch) -> LikeliestTokens:
        """What a cache keeps of the teacher, for the rows of a batch: what `forward` would compare with."""
        found = self._last_of(self._teacher_states(batch.tokens_BT, batch.keep_BT, batch.documents_BT, None, None))
        assert isinstance(found, LikeliestTokens)
        return found

    def _heal_error(self, healed: list[Tensor], taught: dict[int, Tensor], targets_BT: Tensor) -> Tensor:
        teacher = self._teacher[0]
        assert teacher is not None
        wanted = [taught[index] for index in self._healed]
        with torch.no_grad():
            wanted[-1] = teacher.norm(wanted[-1])
        own = [*healed[:-1], self.decoder.norm(healed[-1])]
        return healing_loss(own, wanted, (targets_BT != IGNORE).float())

    def _add_layerwise(self, total: Tensor, normed: dict[int, Tensor], targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        recipe = self.recipe.layerwise
        assert recipe is not None
        shallow, deep = ([normed[i] for i in indices] for indices in (self._shallow, self._deep))
        error = layerwise_loss(shallow, deep, (targets_BT != IGNORE).float(), recipe.mapping)
        return total + recipe.weight * error, error


def _places(exit_vocab: ExitVocab) -> Tensor:
    """Where each token of the vocabulary stands in the exit vocabulary; IGNORE is nowhere."""
    places_V = torch.full((exit_vocab.vocab,), IGNORE, dtype=torch.long, device=exit_vocab.vocab_W.device)
    places_V[exit_vocab.vocab_W] = torch.arange(len(exit_vocab.vocab_W), device=places_V.device)
    return places_V


def _placed(targets_N: Tensor, places_V: Tensor) -> Tensor:
    """Targets as places in the exit vocabulary. Those that are none stay none: as an index IGNORE would be a token."""
    return torch.where(targets_N == IGNORE, IGNORE, places_V[targets_N.clamp_min(0)])


def _layerwise_states(recipe: LossRecipe, decoder: Decoder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the steps whose states the layerwise loss compares."""
    if recipe.layerwise is None:
        return (), ()
    layers = decoder.plan.unrolled_layers
    mapping, shallow = recipe.layerwise.mapping, recipe.layerwise.shallow
    deep = candidates(mapping, shallow, layers)
    return tuple(layer - 1 for layer in taught_layers(mapping, shallow)), tuple(layer - 1 for layer in deep)
