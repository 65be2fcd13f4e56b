"""What autograd keeps of a student for its backward pass, measured on fake tensors: no weight and no token is there.

A step of each kind runs once, and hooks add up what is saved. A compiler keeps less, by a recorded table (`COMPILED`).

Shapes: B rows, S tokens of the source, T of the target or of the whole row, M hidden width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fathomlm.cache import NoCache
from fathomlm.depth import DepthPlan, Step
from fathomlm.depth.cost import running_parts
from fathomlm.model.attention_mask import AttentionMasks, TokenBatch, full_masks
from fathomlm.model.blocks import Block
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder import build_encoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.train.losses.exits import early_outputs
from fathomlm.train.optim import EXITS
from fathomlm.train.recipe import Recipe
from fathomlm.train.seq2seq import run_encoder
from fathomlm.train.student import StudentSpec

COMPILED = {
    "bf16": {"fused": (0.18, 0.75), "fused, inner": (0.18, 0.5), "relaxed": (0.56, 0.75), "other": (0.36, 0.5)},
    "float32": {"fused": (0.33, 0.75), "fused, inner": (0.33, 0.5), "relaxed": (0.67, 0.75), "other": (0.67, 0.5)},
}
"""What a compiler keeps of the residual stream with its norms, and of the feed-forward part's inner activations, as parts
of what autograd does; of all else it keeps as much. `fused` are layers whose backward pass is written out
(`kernels/half.py`), also where `recompute: inner` makes their inner activations again. The bfloat16 rows of
`fused` agree with what was measured on an H200 for SmolLM-360M's shape (`benchmarks/train_step.py`); the others are
calculated and have not been measured."""
LENGTHS = (32, 64)
"""Tokens of the two passes whose difference is measured: what does not grow with them are copies of weights."""

Run = Callable[[Tensor, AttentionMasks, NoCache], Tensor]


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Of one token, by what a compiler makes of them."""

    stream: int
    inner: int
    rest: int
    form: str
    """The row of `COMPILED`."""

    def total(self, recipe: Recipe) -> int:
        if not recipe.compile:
            return self.stream + self.inner + self.rest
        again = self.form == "fused" and recipe.recompute == "inner"
        stream, inner = COMPILED[recipe.precision][f"{self.form}, inner" if again else self.form]
        return round(stream * self.stream + inner * self.inner) + self.rest


def activation_bytes(recipe: Recipe, spec: StudentSpec) -> int:
    """Bytes that the layers keep of each token, by what is computed again (`recompute`)."""
    plan, routing = spec.plan, spec.plan.routing
    # Token-choice trains on whole rows: every recursion is computed for every token.
    runs = running_parts(plan) if routing is not None and routing.method.picks_tokens else None
    found = _measured(spec, recipe.precision, recipe.exits_only)
    steps = [
        int(kept.total(recipe) * (runs[step.recursion] if runs is not None and step.part == "core" else 1))
        for step, kept in zip(plan, found.steps, strict=True)
    ]
    exits = 0 if found.exit is None else early_outputs(recipe.loss.exits, plan) * found.exit.total(recipe)
    if recipe.exits_only:  # the layers are frozen: nothing is kept but what one of them works on
        return max(steps) + exits
    if recipe.recompute in ("none", "inner"):
        return sum(steps) + exits
    segments, run = [], 0
    for step, needed in zip(plan, steps, strict=True):
        run += needed
        last = step.index == plan.unrolled_layers - 1 or step.index in plan.exits
        if last or recipe.recompute == "layer" or plan.is_last_of_recursion(step):
            segments.append(run)
            run = 0
    return max(segments) + working_bytes(recipe) * spec.architecture.hidden * len(segments) + exits


def working_bytes(recipe: Recipe) -> int:
    """Bytes of a number that products are computed with."""
    return 2 if recipe.precision == "bf16" else 4


@dataclass(frozen=True, slots=True)
class _Measured:
    steps: list[KeptBytes]
    """Of each step, where all weights learn."""
    exit: KeptBytes | None
    """Of one exit's layer and adapter, and of the final norm behind them; None where exits have neither."""


@lru_cache(maxsize=8)
def _measured(spec: StudentSpec, precision: str, frozen: bool) -> _Measured:
    """Over layers that are `frozen` only what exits add learns."""
    plan = spec.unrouted_plan
    kinds: dict[tuple[Any, ...], KeptBytes] = {}
    steps = []
    with torch.device("meta"):
        decoder = spec.build_decoder(plan)
    probe = _Probe(decoder, torch.bfloat16 if precision == "bf16" else torch.float32)
    for step in plan:
        kind = _kind(spec, plan, step)
        if kind not in kinds:
            kinds[kind] = probe.step(step)
        steps.append(kinds[kind])
    own = spec.exits.layer or spec.exits.adapter_rank or spec.exits.draft
    index = plan.draft_step.index if spec.exits.draft else next(iter(plan.exits), 0)
    return _Measured(steps, probe.exit(index, frozen) if own else None)


def _kind(spec: StudentSpec, plan: DepthPlan, step: Step) -> tuple[Any, ...]:
    """Steps of one kind keep the same."""
    relaxed = spec.relaxation is not None and spec.relaxation.sits_on(plan, step)
    ends = spec.relaxation is not None and spec.relaxation.method.per_recursion and plan.is_last_of_recursion(step)
    return relaxed, ends, plan.reads_kv(step), spec.architecture.window(step.origin)


class _Probe:
    """Runs parts of a decoder and counts what autograd keeps. Only the weights that run are made, as fake tensors."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._dtype = dtype
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._make(decoder.norm, decoder.encodings)
        if decoder.relative is not None:
            decoder.relative.to_empty(device="cpu")

    def step(self, step: Step) -> KeptBytes:
        decoder, plan = self._decoder, self._decoder.plan
        source = plan.steps[plan.kv_sources[step.index]]
        for each in {step, source}:
            self._make(decoder.layers[each.layer], decoder.delta(each))

        def run(x: Tensor, masks: AttentionMasks, kv: NoCache) -> Tensor:
            if source != step:
                with torch.no_grad():
                    decoder.run_steps(x, (source,), masks, kv)
            return decoder.run_steps(x, (step,), masks, kv)

        form = "other" if decoder.delta(step) is None else "relaxed"
        layer = decoder.layers[step.layer]
        fused = form == "other" and isinstance(layer, Block) and layer.packs
        return self._measure(run, (step, source), "fused" if fused else form)

    def exit(self, index: int, frozen: bool) -> KeptBytes:
        decoder, draft = self._decoder, self._decoder.exit_draft
        own = decoder.plan.exit_steps((index,)) if draft is None else (decoder.plan.draft_step,)
        for modules in (decoder.exit_blocks, decoder.exit_adapters):
            self._make(*(module for name, module in modules.items() if name == str(index)))
        self._make(draft)
        for name, weight in decoder.named_parameters():
            weight.requires_grad_(not frozen or name.startswith(EXITS))

        def run(x: Tensor, masks: AttentionMasks, kv: NoCache) -> Tensor:
            x = x if draft is None else draft(x, x)
            return decoder.exit_hidden(decoder.run_steps(x, own, masks, kv), index, layered=True)

        blocks = decoder.exit_blocks.values() if draft is None else (draft.block,)
        layers = [block for block in blocks if isinstance(block, Block)]
        form = "fused" if layers and layers[0].packs else "other"
        # Where layers learn, the step behind the exit keeps the stream.
        return self._measure(run, own or (decoder.plan.steps[index],), form, learns=not frozen, counts_x=False)

    def _make(self, *modules: nn.Module | None) -> None:
        with self._fake:
            for module in modules:
                if module is not None:
                    module.to_empty(device="cpu")

    def _measure(
        self, run: Run, steps: Iterable[Step], form: str, *, learns: bool = True, counts_x: bool = True
    ) -> KeptBytes:
        few, many = (self._pass(run, steps, length, learns, counts_x) for length in LENGTHS)
        each = {name: (many[name] - few[name]) // (LENGTHS[1] - LENGTHS[0]) for name in ("stream", "inner", "rest")}
        return KeptBytes(**each, form=form)

    def _pass(self, run: Run, steps: Iterable[Step], length: int, learns: bool, counts_x: bool) -> Counter[str]:
        """Bytes of the tensors that one pass keeps. Positions and masks are the same for all steps, and not counted; they
        are real tensors, for their tables are cached."""
        a = self._decoder.architecture
        memory = None
        if a.cross:
            states_BSM = torch.zeros(1, 8, a.hidden, dtype=self._dtype, requires_grad=learns)
            memory = EncoderMemory(states_BSM, torch.ones(1, 8, dtype=torch.bool), look=False)
        batch = self._decoder.equipped(TokenBatch.of(torch.zeros(1, length, 0), None, None, past=0), memory)
        masks = full_masks(a, steps, batch, self._dtype)
        outside = [tensor for mask in masks.values() for tensor in (mask.cos, mask.sin, mask.mask) if tensor is not None]
        with self._fake, _FusedAttention():
            x_BTM = torch.empty(1, length, a.hidden, dtype=self._dtype, requires_grad=learns)
            kept = _saved(lambda: run(x_BTM, masks, NoCache(self._decoder.plan)), self._dtype)
        for tensor in (*outside, *(() if counts_x else (x_BTM,))):
            kept.pop(tensor.untyped_storage()._cdata, None)
        found: Counter[str] = Counter()
        for tensor in kept.values():
            width = 0 if tensor.dim() == 4 else tensor.shape[-1]  # attention's have a dimension of heads
            name = {a.intermediate: "inner", a.hidden: "stream"}.get(width, "rest")
            found[name] += tensor.untyped_storage().nbytes()
        return found


def _saved(run: Callable[[], Any], dtype: torch.dtype) -> dict[int, Tensor]:
    """The tensors that autograd keeps of a forward pass, each memory once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        run()
    return kept


class _FusedAttention(TorchFunctionMode):
    """Attention as a GPU's fused kernels keep it: a CPU writes all scores down where their bias learns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention and isinstance(kwargs.get("attn_mask"), Tensor):
            kwargs["attn_mask"] = kwargs["attn_mask"].detach()
        return func(*args, **kwargs)


def encoder_bytes(recipe: Recipe, spec: StudentSpec) -> int:
    """Bytes that an encoder keeps of one row's source, and every step of the source's keys and values."""
    if spec.encoder is None:
        return 0
    S, a = recipe.data.source_length, spec.architecture
    entries = 0 if recipe.exits_only else spec.plan.unrolled_layers * a.kv_bytes(working_bytes(recipe))
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    record = spec.encoder | {"dropout_rate": 0.0 if recipe.model.encoder is None else recipe.model.encoder.dropout}
    with FakeTensorMode(allow_non_fake_inputs=True), _FusedAttention():
        one, two = (_encoder_row(record | {"num_layers": layers}, a.hidden, S, dtype) for layers in (1, 2))
    layer, layers = two - one, int(spec.encoder["num_layers"])
    if recipe.train != "all":
        return S * entries + layer
    kept = layer + layers * 4 * S * a.hidden if recipe.recompute == "layer" else one + (layers - 1) * layer
    return S * entries + kept


def _encoder_row(record: dict[str, Any], hidden: int, source: int, dtype: torch.dtype) -> int:
    """What one row more makes an encoder keep."""
    encoder = build_encoder(record).train()

    def kept(rows: int) -> int:
        x_BSM = torch.empty(rows, source, hidden, requires_grad=True)
        keep_BS = torch.ones(rows, source, dtype=torch.bool)
        saved = _saved(lambda: run_encoder(encoder, x_BSM, keep_BS), dtype)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    return kept(2) - kept(1)
