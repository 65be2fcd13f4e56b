"""What a plan costs: parameters, forward FLOPs, KV bytes. Counted by walking the plan, never by a formula per model.

The rules are the thesis' own (appendix "FLOPs approximated calculation of Transformers"): forward pass only, two per
parameter of every linear, embedding and head left out, attention 4 x d x T/2 per layer and token (the causal half).
Recursion r of N_r handles (N_r - r) / N_r of the tokens under a router (r from 0). With recursion-wise caching those
tokens attend to each other only, so attention shrinks with the square; with sharing they attend to all keys of the
first recursion, so it shrinks linearly and the later k and v projections fall away.

The thesis' printed budgets take k and v to be as wide as q, also in models where they are narrower (SmolLM 135M, 360M,
730M). Here they have their true width, so absolute FLOPs are up to a tenth lower. With recursion-wise caching the
ratios between plans move by less than 1%.

Of an encoder-decoder model the decoder is counted: its encoder is the same under every plan, and `encoder_flops` counts it
apart. Cross-attention sees all of the source, whose keys and values are made once for a sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fathomlm.depth.architecture import Architecture, LinearSpec
from fathomlm.depth.dropping import kept_layers, with_neurons
from fathomlm.depth.plan import KV_MODES, DepthPlan, KVMode
from fathomlm.depth.relaxation import Relaxation, build_relaxation, check_fits
from fathomlm.depth.routing import ROUTERS, build_routing
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.depth.steps import Step
from fathomlm.errors import OptionError, choices

OF_THE_SOURCE = ("cross_k", "cross_v")
"""Linears that run once for each token of an encoder's output, however many tokens the decoder makes of it."""
NEURON_TILE = 64
"""Feed-forward neurons of narrower models, in wide ones."""
BLOCK = 32
"""Numbers of a row that the quantized formats of GGUF pack together; other rows stay in 16 bits."""
MOST_LOOPS = 6
"""Of the plans that `candidates` looks at."""
REFERENCE_BATCH = 32
"""The thesis' fixed batch, which `relative_max_batch` scales (thesis 4.4.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What `fathomlm inspect --json` prints."""

    layout: str
    """Unique layers, "15" or "1+10+1"."""
    unique_layers: int
    unrolled_layers: int
    non_embedding_parameters: int
    embedding_parameters: int
    relaxation_parameters: int
    """The part of the non-embedding parameters that the relaxation adds."""
    router_parameters: int
    forward_flops_per_token: int
    relative_flops: float
    """Forward FLOPs against the untied base at the same context."""
    kv_bytes_per_token: int
    """For a token that the model makes; what cross-attention keeps grows with the source instead, and is left out."""
    relative_kv: float
    """KV bytes of the full model against the untied base."""
    relative_max_batch: int
    """How many sequences fit where 32 of the unrolled model did, by the shared block's KV alone; 0 where it stores none."""
    context: int
    tokens: int | None
    training_flops: float | None
    """Forward FLOPs x tokens, as the thesis states its budgets; a backward pass costs about twice as much again."""

    @property
    def parameters(self) -> int:
        """All of them, embeddings too: what a model's bytes are counted by, in any one number format."""
        return self.non_embedding_parameters + self.embedding_parameters

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def count(
    architecture: Architecture,
    plan: DepthPlan,
    *,
    relaxation: Relaxation | None = None,
    router: str | None = None,
    kv: KVMode | None = None,
    capacity: Sequence[float] | None = None,
    tokens: int | None = None,
    context: int = 2048,
    source: int | None = None,
    kv_element_bytes: int = 2,
) -> Cost:
    """The cost of `plan` laid over `architecture`.

    `router` and `kv` count the plan with a default router of that kind, or with keys and values shared so, in place of
    its own. `capacity` is the part of the tokens that each recursion runs, where it was measured. Of an encoder-decoder
    model this is the decoder's part; `source` is how many tokens its encoder read, as many as `context` unless given.
    """
    if router is not None and router not in ROUTERS:
        raise OptionError(choices("router", router, ROUTERS))
    if kv is not None and kv not in KV_MODES:
        raise OptionError(choices("kv mode", kv, KV_MODES))
    if router is not None and not plan.loops:
        raise OptionError(f"a router requires a looped core (cycle or middle-cycle), not {plan.sharing}")
    if capacity is not None and len(capacity) != plan.recursions:
        raise OptionError(
            f"capacity must have one entry per recursion: got {len(capacity)} for {plan.recursions} recursions"
        )
    if router is not None and plan.recursions > 1:
        plan = plan.with_routing(build_routing(router, plan.recursions))
    if kv is not None and kv != plan.kv and plan.recursions > 1:
        plan = plan.with_kv(kv)
    if context < 1 or (tokens is not None and tokens < 1):
        raise OptionError(f"context and tokens must be >= 1, got {context} and {tokens}")
    if source is not None and (source < 1 or not architecture.cross):
        raise OptionError(f"source requires an encoder-decoder model and must be >= 1, got {source}")
    source = context if source is None else source
    rules = _Rules(architecture, plan, relaxation, context, source, running_parts(plan, capacity))
    base_plan = DepthPlan.vanilla(plan.base_layers)
    base = _Rules(architecture, base_plan, None, context, source, (Fraction(1),))

    flops = sum(rules.flops(step) for step in plan)
    kv_share = sum(rules.kv_share(step) for step in plan)
    core = [step for step in plan if step.part == "core"]
    core_share = sum(rules.kv_share(step) for step in core) / Fraction(len(core))
    relaxed = relaxation_parameters(architecture, plan, relaxation)
    routed = 0 if plan.routing is None else plan.routing.parameters(architecture.hidden)
    outside = sum(math.prod(shape) for shape in outer_shapes(architecture, plan).values())
    tied = plan.unique_layers * architecture.layer_parameters + outside
    return Cost(
        layout=plan.layout,
        unique_layers=plan.unique_layers,
        unrolled_layers=plan.unrolled_layers,
        non_embedding_parameters=tied + relaxed + routed,
        embedding_parameters=architecture.embedding_parameters,
        relaxation_parameters=relaxed,
        router_parameters=routed,
        forward_flops_per_token=round(flops),
        relative_flops=float(flops / sum(base.flops(step) for step in base_plan)),
        kv_bytes_per_token=round(kv_share * architecture.kv_bytes(kv_element_bytes)),
        relative_kv=float(kv_share / base_plan.unrolled_layers),
        relative_max_batch=int(REFERENCE_BATCH / core_share) if core_share else 0,
        context=context,
        tokens=tokens,
        training_flops=None if tokens is None else float(flops * tokens),
    )


def parameter_shapes(architecture: Architecture, plan: DepthPlan | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this architecture stores, by name; `plan` is that of a format with loops."""
    plan = DepthPlan.vanilla(architecture.layers) if plan is None else plan
    layers = {
        f"layers.{i}.{name}": shape for i in range(plan.unique_layers) for name, shape in architecture.layer_shapes().items()
    }
    shapes = {"embed.weight": architecture.head.shape, **layers, **outer_shapes(architecture, plan)}
    return shapes if architecture.tied_embeddings else {**shapes, "head.weight": architecture.head.shape}


def outer_shapes(architecture: Architecture, plan: DepthPlan) -> dict[str, tuple[int, ...]]:
    """The tensors of a model outside its layers, embedding and head."""
    shapes: dict[str, tuple[int, ...]] = {}
    if architecture.positions == "relative":
        shapes["relative.weight"] = (architecture.relative_buckets, architecture.heads)
    for end in ("weight", "bias") if architecture.norm == "layer" else ("weight",):
        shapes[f"norm.{end}"] = (architecture.hidden,)
    if plan.injection:
        shapes["inject.weight"] = architecture.pair_linear("inject").shape
    if plan.exit_gate:
        shapes |= {"exit_gate.weight": (1, architecture.hidden), "exit_gate.bias": (1,)}
    return shapes


def linear_weights(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> tuple[int, int]:
    """Weights of all linears over the unrolled depth, by the part of the tokens that a router lets through: what a token
    meets, and what one of an encoder's output does."""
    rules = _Rules(architecture, plan, relaxation, 1, 1, running_parts(plan))
    met = [(rules.tokens(step), *rules.weights(step)) for step in plan]
    return round(sum(part * own for part, own, _ in met)), sum(source for *_, source in met)


def relaxation_parameters(architecture: Architecture, plan: DepthPlan, relaxation: Relaxation | None) -> int:
    """What all steps together add of their own."""
    if relaxation is None:
        return 0
    if relaxation.method.per_recursion:
        check_fits(relaxation, plan)
    return sum(math.prod(shape) for shape in relaxation.tensors(architecture, plan))


def encoder_flops(record: Mapping[str, Any], weights: int, source: int) -> int:
    """Forward FLOPs of an encoder for each token of its source; `record` is its configuration, `weights` are those of all
    its linears. It looks both ways, so no half of its scores is left out."""
    layers, width = int(record["num_layers"]), int(record["num_heads"] * record["d_kv"])
    return 2 * weights + 4 * layers * width * _encoder_keys(record, source)


def _encoder_keys(record: Mapping[str, Any], source: int) -> int:
    """Keys that a token's scores are computed for: all of the source, but LongT5 attends to whole blocks, its own and one to
    each side, and with transient globals at one key for each global block."""
    radius = record.get("local_radius")
    if radius is None:
        return source
    globals_ = record.get("encoder_attention_type") == "transient-global"
    beside: int = source // record["global_block_size"] if globals_ else 0
    return min(source, 3 * (int(radius) + 1)) + beside


def running_parts(plan: DepthPlan, measured: Sequence[float] | None = None) -> tuple[Fraction, ...]:
    """The part of the tokens that runs each recursion."""
    if measured is not None:
        return tuple(Fraction(part) for part in measured)
    if plan.routing is None:
        return (Fraction(1),) * plan.recursions
    return plan.routing.method.parts(plan.routing)


@dataclass(frozen=True, slots=True)
class _Rules:
    """The counting rules at one step, in exact fractions."""

    architecture: Architecture
    plan: DepthPlan
    relaxation: Relaxation | None
    context: int
    source: int
    parts: tuple[Fraction, ...]

    def tokens(self, step: Step) -> Fraction:
        """The part of the tokens that runs this step."""
        return self.parts[step.recursion] if step.part == "core" else Fraction(1)

    def kv_share(self, step: Step) -> Fraction:
        """KV entries that this step stores for each token of the sequence."""
        return Fraction(0) if self.plan.reads_kv(step) else self.tokens(step)

    def flops(self, step: Step) -> Fraction:
        """Forward FLOPs of this step for each token of the sequence."""
        part = self.tokens(step)
        own, source = self.weights(step)
        keys_seen = part if self.plan.kv == "cache" else Fraction(1)
        extra = 0 if self.relaxation is None else self.relaxation.method.extra_keys(self.relaxation)
        keys = self._mean_keys(step) * keys_seen + extra + (self.source if self.architecture.cross else 0)
        once = Fraction(2 * source * self.source, self.context)
        return part * (2 * own + 4 * self.architecture.query_width * keys) + once

    def weights(self, step: Step) -> tuple[int, int]:
        """Of the linears that this step runs, with what it adds to them: for each of its tokens, and for each of the
        source's."""
        skipped = ("k", "v") if self.plan.reads_kv(step) else ()
        each = {
            spec.name: spec.weights + self._added(step, spec)
            for spec in self.architecture.linears()
            if spec.name not in skipped
        }
        source = sum(each.pop(name, 0) for name in OF_THE_SOURCE)
        injects = self.plan.injection and self.plan.begins_recursion(step)
        injected = self.architecture.pair_linear("inject").weights if injects else 0
        return sum(each.values()) + self.architecture.expert_weights + injected, source

    def _added(self, step: Step, spec: LinearSpec) -> int:
        if self.relaxation is None or not self.relaxation.sits_on(self.plan, step):
            return 0
        return self.relaxation.method.linear_weights(self.relaxation, spec)

    def _mean_keys(self, step: Step) -> Fraction:
        """Keys that a token sees on average: T/2, less where the layer has a window."""
        window = self.architecture.window(step.origin)
        if window is None or window >= self.context:
            return Fraction(self.context, 2)
        return window - Fraction(window * window, 2 * self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan of a model that fits a byte budget, for comparison: dropped layers, loops, or loops with LoRA."""

    options: str
    """What `fathomlm convert` is given for it."""
    cost: Cost

    def share(self, base: Cost) -> float:
        """Its part of the base's bytes, in the same number format."""
        return self.cost.parameters / base.parameters


def candidates(
    architecture: Architecture,
    budget: float,
    sharing: str = "cycle",
    context: int = 2048,
    *,
    whole: Architecture | None = None,
) -> list[Candidate]:
    """The fewest layers to drop, each number of loops that fits, and with it the highest rank that does. `whole` is the
    model that the budget is a part of, where that has more tokens."""
    whole = whole or architecture
    limit = budget * count(whole, DepthPlan.vanilla(whole.layers)).parameters
    found = [*_dropped(architecture, limit, context), *_looped(architecture, limit, sharing, context)]
    if not found:
        raise OptionError(
            f"no plan has {budget:.0%} of the bytes: the embeddings alone are "
            f"{architecture.embedding_parameters / (limit / budget):.0%}; fewer tokens make them smaller (--vocab)"
        )
    return found


def _dropped(architecture: Architecture, limit: float, context: int) -> Iterator[Candidate]:
    for drop in range(architecture.layers):
        small = architecture.with_layers(kept_layers(architecture.layers, drop, "stepwise"))
        cost = count(small, DepthPlan.vanilla(small.layers), context=context)
        if cost.parameters <= limit:
            yield Candidate(options=f"--drop {drop}", cost=cost)
            yield from _narrower(architecture, drop, limit, context)
            return


def _narrower(architecture: Architecture, drop: int, limit: float, context: int) -> Iterator[Candidate]:
    """Half as many layers dropped, and none, each with the most neurons that fit: in whole tiles of a GPU's products, which
    are also whole blocks of a GGUF's quantized weights."""
    tile = NEURON_TILE if architecture.intermediate >= 8 * NEURON_TILE else 8
    for fewer in sorted({drop // 2, 0}, reverse=True) if drop and not (architecture.experts or architecture.cross) else ():
        small = architecture.with_layers(kept_layers(architecture.layers, fewer, "stepwise"))
        plan = DepthPlan.vanilla(small.layers)
        one, two = (count(with_neurons(small, many), plan).parameters for many in (1, 2))
        neurons = int((limit - one) / (two - one) + 1) // tile * tile
        if neurons > 0:
            cost = count(with_neurons(small, neurons), plan, context=context)
            yield Candidate(options=f"--drop {fewer} --neurons {neurons}", cost=cost)


def _looped(architecture: Architecture, limit: float, sharing: str, context: int) -> Iterator[Candidate]:
    core = architecture.layers - 2 * STRATEGIES[sharing].kept_apart
    for loops in (loops for loops in range(2, MOST_LOOPS + 1) if core > 0 and core % loops == 0):
        plan = DepthPlan.build(sharing, loops, architecture.layers)
        tied = count(architecture, plan, context=context)
        options = f"--recursions {loops}" if sharing == "cycle" else f"--sharing {sharing} --recursions {loops}"
        if tied.parameters > limit:
            continue
        yield Candidate(options=options, cost=tied)
        widest = max(min(linear.inputs, linear.outputs) for linear in architecture.linears())
        low, high = 0, widest
        while low < high:  # the highest rank that fits
            middle = (low + high + 1) // 2
            fits = count(architecture, plan, relaxation=_lora(architecture, middle)).parameters <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        if low:
            cost = count(architecture, plan, relaxation=_lora(architecture, low), context=context)
            yield Candidate(options=f"{options} --relax lora --rank {low}", cost=cost)


def _lora(architecture: Architecture, rank: int) -> Relaxation | None:
    return build_relaxation(architecture.linears(), "lora", rank)
