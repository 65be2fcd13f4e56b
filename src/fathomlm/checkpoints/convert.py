"""From a plain model to a (relaxed) recursive one (thesis 3.3.2, 3.3.3).

Walks the unique layers of the plan. For each tensor it reads the base layers that the looped layer stands for, ties them,
and initialises what each step adds. Only one tensor's group is held beside the result, so a large checkpoint converts in
little more memory than its result takes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.activations import Activations
from fathomlm.checkpoints.assemble import (
    BaseCheckpoint,
    OnProgress,
    configure,
    empty_model,
    finish,
    put,
    replan,
    telling,
    with_loops,
)
from fathomlm.checkpoints.planned import Start, TyingOptions, check_dropping, lay_out, routed_plan
from fathomlm.checkpoints.reduced import KeptLayers, KeptNeurons, RepeatedLayers
from fathomlm.checkpoints.resolve import describe, open_source, parse_device, parse_dtype, plain_base
from fathomlm.checkpoints.tied import Tying, ranks_within
from fathomlm.checkpoints.tying import starting_layers
from fathomlm.depth import Relaxation, Step
from fathomlm.depth.dropping import kept_layers
from fathomlm.depth.plan import KVMode
from fathomlm.depth.steps import Resize
from fathomlm.errors import OptionError
from fathomlm.model.blocks import build_block
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel
from fathomlm.model.stack import reset_module


def convert(
    model: FathomModel | BaseCheckpoint | str | Path,
    *,
    drop: int | None = None,
    by: str | None = None,
    neurons: int | None = None,
    repeat: int | None = None,
    sharing: str | None = None,
    recursions: int | None = None,
    init: str | None = None,
    norm_init: str | None = None,
    relax: str | None = None,
    rank: int | str | dict[str, int] | None = None,
    relax_init: str | None = None,
    prefix_length: int | None = None,
    linears_only: bool = False,
    resize: bool | Resize | None = None,
    router: str | dict[str, Any] | None = None,
    kv: KVMode | None = None,
    activations: Activations | None = None,
    budget: float | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_layer: OnProgress | None = None,
) -> FathomModel:
    """A recursive model made from a plain one, given as a loaded model or as any source that `load` takes.

    `drop` leaves out so many layers first, `by` influence, greedy, stepwise or last; nothing is tied then unless `sharing`
    or `recursions` say so. `neurons` keeps so many feed-forward neurons of each layer that is left; it requires
    `activations` with moments. `repeat` runs each inner layer that is left so often in place, in smaller steps.
    `activations` are what `measure_activations` found of the same model; inits then default to influence where they would
    to stepwise, and to aware. `budget` gives lora and dora the ranks that restore most where the whole result has at most
    this part of the model's bytes, in the same number format.

    `init` defaults to what the thesis found best: average under lora or dora, stepwise otherwise. `rank` is a number for
    every linear, or pairs such as "q=64,kv=128,ffn=256" (linears not named get none). `linears_only` leaves norms and
    biases tied under lora and dora, as the thesis does; otherwise a step has its own offsets for them too.
    `resize` (True or "add", or "drop") changes the unrolled depth where it does not divide. `router` (expert, token, or
    fields of `RouterOptions` with a kind) lets tokens choose their depth, and `kv` says whose keys and values they see. A
    recursive model may be given too, to which only a router or another `kv` is added, or, where its loops begin with an
    injection, another number of `recursions`. Of an encoder-decoder model the decoder is converted; its encoder is copied.
    """
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed must be an integer from 0 to 2^63-1, got {seed}")
    source = open_source(model) if isinstance(model, str | Path) else model
    looped = _looped(source)
    relooped = looped is not None and looped.plan.injection and recursions is not None
    if looped is not None and (router is not None or kv is not None or relooped):
        tying: dict[str, Any] = {
            "sharing": sharing,
            "resize": resize,
            "drop": drop,
            "by": by,
            "neurons": neurons,
            "repeat": repeat,
        }
        tying |= {} if relooped else {"recursions": recursions}
        tying |= {"activations": activations, "budget": budget}
        tying |= {
            "prefix_length": prefix_length,
            "init": init,
            "norm_init": norm_init,
            "relax": relax,
            "rank": rank,
            "relax_init": relax_init,
        }
        for name in (name for name, value in tying.items() if value is not None):
            raise OptionError(f"{name} says how a plain model is tied; this one is recursive already ({describe(looped)})")
        plan = routed_plan(looped.plan, router, kv)
        looped = copy.deepcopy(looped) if looped is model else looped
        moved: FathomModel = looped.to(device=parse_device(device), dtype=parse_dtype(dtype))
        if relooped:
            assert recursions is not None
            return with_loops(moved, recursions)
        fresh = moved.plan.routing is None
        routed_model = replan(moved, plan, seed=seed, **moved.config.exit_fields)
        return _with_open_routers(routed_model) if fresh else routed_model
    if by is not None and drop is None:
        raise OptionError("by says which layers are dropped; it requires drop")
    asked = TyingOptions(
        repeat=repeat,
        sharing=sharing,
        recursions=recursions,
        init=init,
        norm_init=norm_init,
        relax=relax,
        rank=rank,
        relax_init=relax_init,
        prefix_length=prefix_length,
        linears_only=linears_only,
        resize=resize,
        router=router,
        kv=kv,
        budget=budget,
    )
    times = check_dropping(drop, neurons, asked)
    place = parse_device(device)
    base = plain_base(source)
    whole = base.architecture
    if activations is not None:
        activations.check_of(base)
    if drop is not None:
        found = ((), ()) if activations is None else (activations.influence, activations.order)
        kept = kept_layers(whole.layers, drop, by, *found)
        base, activations = KeptLayers(base, kept), None if activations is None else activations.of(kept)
    dropped = list(base.layers) if isinstance(base, KeptLayers) else None
    if neurons is not None:
        base = _narrower(base, neurons, activations)
    layout = lay_out(base.architecture, asked, times=times, whole=whole, calibrated=activations is not None)
    if repeat is not None:
        base, activations = RepeatedLayers(base, repeat), None
        dropped = [dropped[layer] for layer in base.layers] if dropped is not None else None
    plan, relaxation, start = layout.plan, layout.relaxation, layout.start
    if activations is not None and activations.directory is None:
        _check_without_moments(start, relaxation)
    kind = parse_dtype(dtype) or base.dtype
    starts = starting_layers(plan, start.init, () if activations is None else activations.influence)
    tying_of = Tying.of(base, start.init, start.norm, starts, activations)
    if layout.limit is not None and relaxation is not None:
        aware = start.relax == "aware"
        first, on_layer = _two_stages(on_layer)
        relaxation = ranks_within(tying_of, plan, relaxation, layout.limit, aware=aware, dtype=kind, on_layer=first)
    result = empty_model(configure(base.architecture, plan, relaxation, base.tokens, kind, base.encoder))
    if isinstance(source, FathomForSeq2SeqLM):
        result.encoder = copy.deepcopy(source.encoder).to(device=place, dtype=kind)
    result.config.kept_layers = dropped
    _Conversion(tying_of, result, start, kind, place, torch.Generator().manual_seed(seed)).run(on_layer)
    tied = finish(result, base.tokenizer())
    return _with_open_routers(replan(tied, layout.routed, seed=seed))


def _narrower(base: BaseCheckpoint, neurons: int, activations: Activations | None) -> BaseCheckpoint:
    if activations is None or activations.directory is None:
        raise OptionError("neurons requires calibration text (--calibrate FILE), over which second moments are measured")
    return KeptNeurons(base, neurons, activations)


def _check_without_moments(start: Start, relaxation: Relaxation | None) -> None:
    """Refuse what reads second moments where only the layers' influence was measured."""
    aware = relaxation is not None and bool(relaxation.method.relax_inits) and start.relax == "aware"
    for what in (what for what, given in (("init aligned", start.init == "aligned"), ("relax-init aware", aware)) if given):
        raise OptionError(f"{what} requires second moments: measure the activations with moments=True")


def _with_open_routers(model: FathomModel) -> FathomModel:
    if model.decoder.routers is not None:
        model.decoder.routers.open_all()
    return model


def _looped(source: FathomModel | BaseCheckpoint) -> FathomModel | None:
    """The model, where it is recursive already."""
    if not isinstance(source, FathomForCausalLM | FathomForSeq2SeqLM):
        return None
    return None if source.plan.plain else source


@dataclass(frozen=True, slots=True)
class _Conversion:
    """One conversion under way: tensors are read from the base and put into `result` as they are made."""

    tying: Tying
    result: FathomModel
    start: Start
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def run(self, on_layer: OnProgress | None) -> None:
        outer = ("embed", "relative", "norm", "head")
        for name in [n for n, _ in self.result.decoder.named_parameters() if n.split(".")[0] in outer]:
            self._put(name, self.tying.base.tensor(name))
        for layer in telling(range(self.result.plan.unique_layers), on_layer):
            self._convert_layer(layer)
        for i in range(len(self.result.decoder.encodings)):
            self._put(f"encodings.{i}", torch.ones(self.result.architecture.hidden))

    def _convert_layer(self, layer: int) -> None:
        starts, uses = self.tying.starts[layer], self.result.plan.uses(layer)
        fresh = {} if starts else self._fresh_layer()
        for name in self.result.architecture.layer_shapes():
            tied = (self.tying.tensor(layer, name) if starts else fresh[name]).to(self.dtype)
            self._put(f"layers.{layer}.{name}", tied)
            for step in uses:
                self._relax(step, name, tied)
        for step in uses:
            if (delta := self.result.decoder.delta(step)) is not None:
                self._put_added(step, delta.own_starts(self.generator))

    def _fresh_layer(self) -> dict[str, Tensor]:
        """A new layer's tensors, drawn as every new model's are."""
        with torch.device("meta"):
            layer = build_block(self.result.architecture)
        for module in layer.to_empty(device="cpu").modules():
            reset_module(module, self.result.config.initializer_range, self.generator)
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def _relax(self, step: Step, name: str, tied: Tensor) -> None:
        """What a step adds to one tensor, towards the base layer in its place (svd) or starting as nothing (zero)."""
        if (delta := self.result.decoder.delta(step)) is not None:
            residual = None if self.start.relax == "zero" else partial(self.tying.residual, step, name, tied)
            moment = partial(self.tying.moment, step, name) if self.start.relax == "aware" else lambda: None
            self._put_added(step, delta.starts(name, tied, residual, self.generator, moment))

    def _put_added(self, step: Step, added: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in added:
            self._put(f"deltas.{step.index}.{name}", value)

    def _put(self, name: str, tensor: Tensor) -> None:
        shape = tuple(self.result.decoder.get_parameter(name).shape)
        put(self.result.decoder, name, tensor, self.dtype, self.device, shape, "the base checkpoint")


def _two_stages(on_progress: OnProgress | None) -> tuple[OnProgress | None, OnProgress | None]:
    """Progress of two equally long stages as that of one."""
    if on_progress is None:
        return None, None
    return lambda done, total: on_progress(done, 2 * total), lambda done, total: on_progress(total + done, 2 * total)
