"""From a recipe to what the loop needs: the corpus, the student, the teacher."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathomlm.checkpoints.activations import ROW, Activations, measure_activations
from fathomlm.checkpoints.assemble import (
    BaseCheckpoint,
    OnProgress,
    TokenIds,
    configure,
    empty_model,
    end_ids,
    finish,
    load_base,
    replan,
)
from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.resolve import architecture_of, describe, load, plain_base
from fathomlm.checkpoints.vocabulary import with_vocab_of
from fathomlm.decode.prompts import end_tokens
from fathomlm.depth import Architecture
from fathomlm.errors import DataError, OptionError
from fathomlm.model.encoder import build_encoder
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel
from fathomlm.sizes import parse_amount
from fathomlm.train.data import PrepareOptions
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.frequent import frequent_in_corpus
from fathomlm.train.data.loader import BatchLoader, Loader
from fathomlm.train.data.pairs import PairLoader
from fathomlm.train.data.prepare import PreparationProgress, prepare
from fathomlm.train.distributed import World
from fathomlm.train.first import check_corpus
from fathomlm.train.losses.exits import exited_plan
from fathomlm.train.recipe import DataRecipe, ExitRecipe, ModelRecipe, Recipe
from fathomlm.train.schedule import rows_per_step
from fathomlm.train.seq2seq import read_encoder, ready_to_train, start_as_t5
from fathomlm.train.student import (
    check_plan,
    check_rows,
    check_tying,
    fine_tuning,
    lay_plan,
    route_plan,
    scratch_architecture,
    trimmed,
)

MOST_WIDTHS = 4
"""That pairs are padded to in a compiled run, of sources and of targets each; every pair of widths is a shape."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The corpus, and its two splits as batches."""

    corpus: Corpus
    train: BatchLoader
    validation: BatchLoader | None


def open_data(recipe: Recipe, world: World, on_prepare: Callable[[PreparationProgress], None] | None = None) -> TrainingData:
    """The prepared corpus of a recipe, made first where it is missing and the recipe says from what."""
    data = recipe.data
    if not check_corpus(data, alone=world.size == 1):
        prepare(_prepare_options(data), on_prepare)
    corpus = Corpus.open(data.path)
    world.on_first(lambda: corpus.check(data.verify))
    validation = make_loader(recipe, corpus, "validation") if corpus.has("validation") else None
    return TrainingData(corpus, make_loader(recipe, corpus, "train"), validation)


def make_loader(recipe: Recipe, corpus: Corpus, split: str) -> BatchLoader:
    data = recipe.data
    shared: dict[str, Any] = {
        "batch": rows_per_step(recipe),
        "seed": recipe.seed,
        "separator": corpus.manifest.separator,
        "shuffle": split == "train",
    }
    if data.pairs:
        shared |= {"source_length": data.source_length, "target_length": data.target_length}
        shared |= {"widths": MOST_WIDTHS if recipe.compile else None}
        return PairLoader(corpus.pairs(split), **shared)
    return Loader(corpus.stream(split), context=data.context, document_ids=data.document_mask, **shared)


def as_the_model_reads(data: TrainingData, student: FathomModel) -> TrainingData:
    """The data with source and target apart, where the model has an encoder."""
    if not isinstance(student, FathomForSeq2SeqLM):
        return data
    assert isinstance(data.train, PairLoader), "check_rows lets no encoder-decoder model pass without pairs"
    first, held_out = student.config.decoder_start_token_id, data.validation
    validation = held_out.seq2seq(first) if isinstance(held_out, PairLoader) else None
    return TrainingData(data.corpus, data.train.seq2seq(first), validation)


def _prepare_options(data: DataRecipe) -> PrepareOptions:
    assert data.tokenizer is not None
    return PrepareOptions(
        sources=tuple(data.sources),
        out=Path(data.path),
        tokenizer=data.tokenizer,
        column=data.column,
        pairs=(data.pairs[0], data.pairs[1]) if data.pairs else None,
        source_prefix=data.source_prefix or "",
        validation_fraction=data.validation_fraction,
        validation_from=tuple(data.validation_from),
        max_tokens=None if data.max_tokens is None else round(parse_amount("data.max_tokens", data.max_tokens)),
        workers=len(os.sched_getaffinity(0)),
    )


def build_student(
    recipe: Recipe, corpus: Corpus, device: torch.device | str = "cpu", on_layer: OnProgress | None = None
) -> FathomModel:
    """The model to train, in float32, on the CPU, with the exits that the recipe trains. A search for layers or neurons
    runs on `device`; `on_layer` is told how far the measurement of a source is."""
    tokenizer = corpus.load_tokenizer()
    model = recipe.model
    if model.source is not None:
        student = _from_source(model, recipe.seed, corpus, device, on_layer)
        if student.tokenizer is not None:
            corpus.check_tokenizer(student.tokenizer)
        check_vocab(corpus, student.architecture)
    else:
        student = _from_scratch(model, recipe.seed, corpus, tokenizer)
    if student.tokenizer is None:
        student.tokenizer = tokenizer
    check_rows(recipe, student.architecture)
    check_plan(recipe, student.plan)
    read_encoder(model, student.architecture)
    if isinstance(student, FathomForSeq2SeqLM):
        student = ready_to_train(student, model, corpus)
    exits = recipe.loss.exits
    if exits is None:  # exits that no loss reads would go stale while the layers under them learn
        return replan(student, student.plan.with_exits(()), seed=recipe.seed)
    student = replan(
        student,
        exited_plan(exits, student.plan),
        exit_rank=exits.head_rank,
        exit_adapter=exits.adapter_rank,
        exit_classifier=exits.classifier,
        seed=recipe.seed,
    )
    student.limit_exits(_exit_vocab(exits, student, corpus))
    return student


def _exit_vocab(exits: ExitRecipe, student: FathomModel, corpus: Corpus) -> Tensor | None:
    """What exits learn to choose among: the recipe says, also where `model.source` had a vocabulary for them."""
    if not exits.exit_vocab:
        return None
    vocab, ends = student.architecture.vocab, end_tokens(student)
    return frequent_in_corpus(
        corpus, student.tokenizer, exits.exit_vocab, vocab=vocab, always=ends, name="loss.exits.exit_vocab"
    )


def build_teacher(recipe: Recipe, corpus: Corpus, student: FathomModel, world: World) -> FathomModel | None:
    """The distillation's teacher, frozen, in the run's working precision."""
    distill = recipe.loss.distill
    if distill is None:
        return None
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    teacher = _load(_with_its_vocab(distill.source, recipe.model, corpus), dtype, world.device)
    if type(teacher) is not type(student):
        raise OptionError(f"the teacher {distill.source} and the student must both have an encoder, or neither")
    if teacher.tokenizer is not None:
        corpus.check_tokenizer(teacher.tokenizer)
    if teacher.architecture.vocab != student.architecture.vocab:
        raise OptionError(
            f"the teacher {distill.source} has a vocabulary of {teacher.architecture.vocab:,}, the student "
            f"{student.architecture.vocab:,}; distillation compares them token by token"
        )
    teacher.requires_grad_(False)
    return teacher


def _from_source(
    model: ModelRecipe, seed: int, corpus: Corpus, device: torch.device | str, on_layer: OnProgress | None
) -> FathomModel:
    assert model.source is not None
    check_tying(model, *architecture_of(model.source)[1:])
    source = _with_its_vocab(model.source, model, corpus)
    measured = _activations(source, model, corpus, device, on_layer)
    dropping: dict[str, Any] = {name: getattr(model, name) for name in ("drop", "by", "neurons", "repeat")}
    dropping |= {"activations": measured}
    if model.recursions == 1:
        if model.drop is None:
            loaded = _load(source, torch.float32, torch.device("cpu"))
        else:
            loaded = convert(source, recursions=1, dtype=torch.float32, **dropping)
        added = fine_tuning(model, loaded.architecture)
        plan = route_plan(model, loaded.plan)
        return replan(loaded, plan, relaxation=added, seed=seed, **loaded.config.exit_fields)
    tying = ("sharing", "recursions", "resize", "init", "norm_init", "relax", "relax_init", "rank", "prefix_length")
    fields = {name: getattr(model, name) for name in (*tying, "linears_only")}
    tied = convert(source, **fields, **dropping, dtype=torch.float32, seed=seed)
    return replan(tied, route_plan(model, tied.plan), seed=seed)


def _with_its_vocab(source: str, model: ModelRecipe, corpus: Corpus) -> str | BaseCheckpoint:
    """A source, or what it is with the corpus' tokens alone."""
    if model.vocab is None:
        return source
    trimmed(model, *architecture_of(source)[:2])
    if model.vocab != corpus.manifest.vocab:
        raise OptionError(
            f"model.vocab must be that of the corpus' tokenizer, {corpus.manifest.vocab:,}, got {model.vocab:,}"
        )
    return with_vocab_of(source, corpus.load_tokenizer())


def _load(source: str | BaseCheckpoint, dtype: torch.dtype, device: torch.device) -> FathomModel:
    return load(source, dtype, device) if isinstance(source, str) else load_base(source, dtype, device, "the model")


def _activations(
    source: str | BaseCheckpoint, model: ModelRecipe, corpus: Corpus, device: torch.device | str, on_layer: OnProgress | None
) -> Activations | None:
    """What the source's layers do to the beginning of the training split, where a recipe asks."""
    if model.calibrate is None:
        return None
    base, stream = plain_base(source), corpus.stream("train")
    tokens = min(round(parse_amount("model.calibrate", model.calibrate)), len(stream))
    if (length := min(ROW, base.architecture.context)) > tokens:
        raise OptionError(f"model.calibrate must be >= {length}, a row of tokens, and the corpus as long; got {tokens:,}")
    rows = torch.from_numpy(stream.read(0, tokens // length * length)).view(-1, length)
    moments = model.relax is not None or model.init == "aligned" or model.neurons is not None
    greedy = (model.drop or 0) if model.by == "greedy" else 0
    # a plain pass is soon done anywhere, and on a CPU any machine picks the same layers; a search or all moments take long
    place = device if greedy or model.neurons is not None else "cpu"
    return measure_activations(base, rows, moments=moments, greedy=greedy, device=place, on_layer=on_layer)


def check_vocab(corpus: Corpus, architecture: Architecture) -> None:
    if corpus.manifest.vocab > architecture.vocab:
        raise DataError(
            f"{corpus.path} has {corpus.manifest.vocab:,} different tokens, the model only {architecture.vocab:,}"
        )


def _from_scratch(model: ModelRecipe, seed: int, corpus: Corpus, tokenizer: Any) -> FathomModel:
    for name in ("init", "norm_init", "relax_init", "drop", "by", "neurons", "repeat", "calibrate", "vocab"):
        if getattr(model, name) is not None:
            raise OptionError(f"model.{name} requires model.source")
    architecture = scratch_architecture(model, corpus.manifest.vocab)
    check_vocab(corpus, architecture)  # before a configuration warns of its special tokens
    plan, relaxation = lay_plan(model, architecture)
    record = read_encoder(model, architecture)
    if record is not None and model.init_std != ModelRecipe().init_std:
        raise OptionError("model.init_std cannot be combined with a T5-style model, which has T5's own initialization")
    bos, pad, separator = tokenizer.bos_token_id, tokenizer.pad_token_id, corpus.manifest.separator
    tokens = TokenIds(bos=bos, eos=end_ids(tokenizer.eos_token_id), pad=pad)
    if record is not None:  # ends as the corpus ends targets, and starts as T5 does, with padding if there is one
        tokens = TokenIds(bos=bos, eos=(separator,), pad=pad, start=separator if pad is None else pad)
    student = empty_model(configure(architecture, plan, relaxation, tokens, torch.float32, record))
    student.decoder.to_empty(device="cpu")
    torch.manual_seed(seed)  # what has no generator of its own (an encoder, a relaxation's start) draws from torch's
    generator = torch.Generator().manual_seed(seed)
    if record is not None:
        student.encoder = build_encoder(record)
    student.decoder.reset_parameters(std=model.init_std, generator=generator)
    if record is not None:
        start_as_t5(student.decoder, generator)
    return finish(student, tokenizer)


def describe_student(student: FathomModel) -> str:
    exits = student.plan.exits
    tokens = student.config.exit_vocab
    among = "" if tokens is None else f" among {len(tokens):,} tokens"
    leaves = f", exits after {', '.join(str(i + 1) for i in exits)}{among}" if exits else ""
    leaves = f", with a draft layer{among}" if student.plan.draft else leaves
    beside = ""
    if isinstance(student, FathomForSeq2SeqLM):
        beside = f"encoder of {student.config.encoder_config['num_layers']} layers, decoder of "
    return f"{beside}{describe(student)}{leaves}"
