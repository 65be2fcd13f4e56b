"""What a recipe trains, as shapes: known from configurations alone, so that a dry run needs neither weights nor data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fathomlm.checkpoints.planned import Start
from fathomlm.checkpoints.resolve import architecture_of, encoder_of
from fathomlm.checkpoints.tying import CALIBRATED
from fathomlm.depth import Architecture, DepthPlan, ExitParts, Relaxation
from fathomlm.depth.dropping import (
    MEASURED,
    check_repeat,
    kept_layers,
    repeated_layers,
    repeated_plan,
    with_neurons,
    with_vocab,
)
from fathomlm.depth.presets import T5_FAMILIES, with_t5_traits
from fathomlm.depth.relaxation import RELAXATIONS, build_relaxation, check_fits
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.train.losses.exits import exited_plan
from fathomlm.train.reading import read_recipe, yet_to_come
from fathomlm.train.recipe import ModelRecipe, Recipe
from fathomlm.train.schedule import row_length
from fathomlm.train.seq2seq import read_encoder

NO_EXITS = ExitParts()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentSpec:
    """What a recipe trains, as shapes: the base, its plan (with the exits that are trained), what steps add."""

    architecture: Architecture
    plan: DepthPlan
    relaxation: Relaxation | None = field(hash=False)
    exits: ExitParts = NO_EXITS
    exit_vocab: int = 0
    """How many tokens exits learn over; 0 is all."""
    encoder: dict[str, Any] | None = field(default=None, hash=False)
    """The record of the encoder, in a model that has one."""

    @property
    def at_exits(self) -> Architecture:
        """The base with the exit vocabulary only."""
        return dataclasses.replace(self.architecture, vocab=self.exit_vocab) if self.exit_vocab else self.architecture

    @property
    def unrouted_plan(self) -> DepthPlan:
        """The plan as if every token ran every recursion, with entries of its own where routed tokens share some."""
        plan = self.plan.with_kv("cache") if self.plan.kv == "hybrid" else self.plan
        return plan.with_routing(None)

    def build_decoder(self, plan: DepthPlan | None = None) -> Decoder:
        """The decoder, on the default device; another plan than its own only where that has the same layers."""
        exits = self.exits
        return Decoder(
            self.architecture,
            plan or self.plan,
            self.relaxation,
            exit_rank=exits.head_rank,
            exit_adapter=exits.adapter_rank,
            exit_classifier=exits.classifier,
        )


def read_student(recipe: Recipe, *, foresee: bool = False, source: StudentSpec | None = None) -> StudentSpec:
    """The architecture, plan and relaxation that a recipe trains, as its `model` section and its exits say. `foresee` is
    `read_source`'s; `source` is what the model it starts from will be, where that is known and need not be there."""
    model = recipe.model
    if model.source is None:
        architecture = scratch_architecture(model, None)
        plan, relaxation = lay_plan(model, architecture)
    else:
        own_plan: DepthPlan | None
        if source is not None:
            architecture, own_plan, own_relaxation = source.architecture, source.plan.with_exits(()), source.relaxation
        else:
            architecture, own_plan, own_relaxation = read_source(model.source, foresee=foresee)
        check_tying(model, own_plan, own_relaxation)
        if model.calibrate is not None and architecture.cross:
            raise OptionError(
                f"model.calibrate requires a decoder-only model; a {architecture.family} decoder has an encoder"
            )
        architecture = trimmed(model, architecture, own_plan)
        if model.drop is not None:
            architecture, own_plan = dropped(model, architecture), None
        if model.repeat is not None:
            check_repeat(architecture, model.repeat)
            own_plan = repeated_plan(architecture.layers, model.repeat)
            architecture = architecture.with_layers(repeated_layers(architecture.layers, model.repeat))
        if model.recursions == 1:
            own = own_plan or DepthPlan.vanilla(architecture.layers)
            plan, relaxation = route_plan(model, own), fine_tuning(model, architecture) or own_relaxation
        else:
            plan, relaxation = lay_plan(model, architecture)
    check_rows(recipe, architecture)
    check_plan(recipe, plan)
    encoder = read_encoder(model, architecture)
    exits = recipe.loss.exits
    if exits is None:
        return StudentSpec(architecture=architecture, plan=plan.with_exits(()), relaxation=relaxation, encoder=encoder)
    if (exits.layer or exits.draft) and architecture.cross:
        what = "layer" if exits.layer else "draft"
        raise OptionError(f"loss.exits.{what} is for decoder-only models; a {architecture.family} decoder has an encoder")
    if exits.exit_vocab > architecture.vocab:
        raise OptionError(
            f"loss.exits.exit_vocab must be <= the model's vocabulary of {architecture.vocab:,}, got {exits.exit_vocab:,}"
        )
    plan = exited_plan(exits, plan)
    added = ExitParts(
        head_rank=exits.head_rank,
        adapter_rank=exits.adapter_rank,
        layer=exits.layer,
        classifier=exits.classifier,
        draft=bool(exits.draft),
    )
    return StudentSpec(
        architecture=architecture,
        plan=plan,
        relaxation=relaxation,
        exits=added,
        exit_vocab=exits.exit_vocab,
        encoder=encoder,
    )


def read_teacher(recipe: Recipe, *, foresee: bool = False) -> StudentSpec | None:
    """The same of the model that a recipe distils from, if any."""
    if recipe.loss.distill is None:
        return None
    architecture, plan, relaxation = read_source(recipe.loss.distill.source, foresee=foresee)
    architecture = trimmed(recipe.model, architecture, plan)
    encoder = encoder_of(recipe.loss.distill.source) if architecture.cross else None
    plan = plan or DepthPlan.vanilla(architecture.layers)
    return StudentSpec(architecture=architecture, plan=plan, relaxation=relaxation, encoder=encoder)


def trimmed(model: ModelRecipe, architecture: Architecture, plan: DepthPlan | None) -> Architecture:
    """The shape with as many tokens as a recipe keeps."""
    if model.vocab is None:
        return architecture
    if architecture.cross or (plan is not None and not plan.plain):
        raise OptionError("model.vocab requires plain decoder-only models as model.source and as the teacher")
    return with_vocab(architecture, model.vocab, "model.vocab")


def lay_plan(model: ModelRecipe, architecture: Architecture) -> tuple[DepthPlan, Relaxation | None]:
    """The plan and the relaxation that a `model` section asks for."""
    plan, relaxation = model.build_plan(architecture.layers), model.build_relaxation(architecture.linears())
    check_fits(relaxation, plan)
    return route_plan(model, plan), relaxation


def route_plan(model: ModelRecipe, plan: DepthPlan) -> DepthPlan:
    """`plan` with the norm between loops, the router and the sharing of keys and values that a `model` section asks for."""
    if model.loop_norm:
        plan = plan.with_loop_norm()
    if model.router is not None:
        if plan.recursions == 1:
            raise OptionError("model.router requires model.recursions >= 2")
        plan = plan.with_routing(model.router.build(plan.recursions))
    if model.kv is None and model.kv_sharing is None and model.kv_loops == 1:
        return plan
    return plan.with_kv(model.kv or "share", model.kv_sharing, model.kv_loops)


def fine_tuning(model: ModelRecipe, architecture: Architecture) -> Relaxation | None:
    """What a `model` section with one recursion adds to every layer of a plain source, to be trained instead of it."""
    if model.relax is None:
        return None
    return build_relaxation(architecture.linears(), model.relax, model.rank, linears_only=True, everywhere=True)


def dropped(model: ModelRecipe, architecture: Architecture) -> Architecture:
    """The shape without the layers that a recipe drops. Which ones those are by influence is not known before the weights
    are read; only windows depend on it."""
    assert model.drop is not None
    known = (model.by or "stepwise") if model.by not in MEASURED else "stepwise"
    small = architecture.with_layers(kept_layers(architecture.layers, model.drop, known))
    return small if model.neurons is None else with_neurons(small, model.neurons)


def check_tying(model: ModelRecipe, plan: DepthPlan | None, relaxation: Relaxation | None) -> None:
    """Refuse fields that tie a source which is not to be tied, and tying one that is tied already (`plan` and
    `relaxation` are its own)."""
    if model.drop is not None and (relaxation is not None or (plan is not None and plan.recursions > 1)):
        raise OptionError(f"model.drop requires a plain model; {model.source} was converted already")
    if model.calibrate is not None and model.drop is None and model.recursions == 1:
        raise OptionError("model.calibrate requires model.drop or model.recursions >= 2")
    if model.calibrate is None:
        given = {"by": model.by in MEASURED, "init": model.init in CALIBRATED["init"]}
        given["neurons"] = model.neurons is not None
        given["relax_init"] = model.relax_init in CALIBRATED["relax-init"]
        for name in (name for name, wants in given.items() if wants):
            raise OptionError(f"model.{name}: {getattr(model, name)} requires model.calibrate, such as 16384")
    if model.repeat is not None:
        others = {"recursions": model.recursions > 1, "relax": model.relax is not None}
        for name in (name for name, given_ in others.items() if given_):
            raise OptionError(f"model.repeat ties the layers that are left; it cannot be combined with model.{name}")
    if model.neurons is not None and model.recursions > 1:
        raise OptionError("model.neurons cannot be combined with model.recursions: what is tied afterwards was not measured")
    if model.recursions == 1:
        tying = ("sharing", "resize", "init", "norm_init", "relax_init", "prefix_length")
        for name in (name for name in tying if getattr(model, name) is not None):
            raise OptionError(f"model.{name} says how {model.source} is tied; it requires model.recursions >= 2")
        _check_fine_tuning(model, plan, relaxation)
    elif plan is not None and plan.recursions > 1:
        raise OptionError(f"{model.source} is recursive already; leave out model.recursions to train it as it is")
    else:  # before a measurement that they would come to nothing behind
        Start.of(model.init, model.norm_init, model.relax_init, model.relax, model.calibrate is not None)


def _check_fine_tuning(model: ModelRecipe, plan: DepthPlan | None, relaxation: Relaxation | None) -> None:
    if model.relax is None:
        if model.rank is not None:
            raise OptionError("model.rank requires model.relax: lora or dora")
        return
    if model.relax in RELAXATIONS and "everywhere" not in RELAXATIONS[model.relax].options:
        raise OptionError(
            f"model.relax: {model.relax} relaxes a tie, so it requires model.recursions >= 2; with one recursion "
            "lora and dora fine-tune"
        )
    if relaxation is not None:
        raise OptionError(f"{model.source} has its own {relaxation.kind}; leave out model.relax to train it as it is")
    if plan is not None and plan.recursions > 1:
        raise OptionError(f"model.relax fine-tunes a plain model; {model.source} is recursive already")


def check_plan(recipe: Recipe, plan: DepthPlan) -> None:
    """Refuse losses and recomputation that do not go with the plan, which may be a source's own."""
    if plan.routing is not None and recipe.loss.layerwise is not None:
        raise OptionError("loss.layerwise cannot be combined with a router: a routed model has one output")
    if plan.routing is not None and recipe.loss.heal is not None:
        raise OptionError("loss.heal cannot be combined with a router: its tokens run different steps")
    plan.check_recompute(recipe.recompute)


def check_rows(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse rows that are longer than what the model says it can read; relative positions set no limit. A model with an
    encoder reads pairs only."""
    if architecture.cross and not recipe.data.pairs:
        raise OptionError(
            f"a {architecture.family} model requires source-target pairs: give both with data.pairs, such as "
            "[dialogue, summary]"
        )
    if architecture.positions == "relative":
        return
    if (length := row_length(recipe)) > architecture.context:
        field = "data.source_length and data.target_length make" if recipe.data.pairs else "data.context makes"
        raise OptionError(f"{field} rows of {length:,} tokens, but the model's context is {architecture.context:,}")


def read_source(source: str, *, foresee: bool = False) -> tuple[Architecture, DepthPlan | None, Relaxation | None]:
    """What a source's configuration says. With `foresee`, a model that a shipped recipe has yet to make is what that recipe
    says."""
    if foresee and (name := yet_to_come(source)) is not None:
        made = read_student(read_recipe(name), foresee=True)
        return made.architecture, made.plan.with_exits(()), made.relaxation
    return architecture_of(source)


def scratch_architecture(model: ModelRecipe, vocab: int | None) -> Architecture:
    """The shape of a fresh model; the vocabulary is the corpus's where the recipe leaves it out."""
    if model.shape is not None:
        return read_source(model.shape)[0]
    assert model.architecture is not None
    given = {"family": "llama", **model.architecture}
    if "vocab" not in given:
        if vocab is None:
            raise OptionError("model.architecture names no vocab, and without the data it is not known")
        given["vocab"] = vocab
    if "head_dim" not in given and {"hidden", "heads"} <= set(given):
        given["head_dim"] = int(given["hidden"]) // int(given["heads"])
    given.setdefault("kv_heads", given.get("heads"))
    return Architecture.from_dict(with_t5_traits(given) if given["family"] in T5_FAMILIES else given)
