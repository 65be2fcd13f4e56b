"""Recipes that keep the tokens of a source, and of its teacher, which the corpus' tokenizer has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import FathomError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.distributed import World
from fathomlm.train.run import train
from fathomlm.train.setup import build_student, build_teacher
from fathomlm.train.student import read_student, read_teacher
from jsonl import write_jsonl
from random_weights import randomise
from train.conftest import ARCHITECTURE

pytestmark = pytest.mark.usefixtures("one_thread")
MANY = 285
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def source(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture = Architecture(family="llama", vocab=len(tiny_tokenizer), head_dim=8, **ARCHITECTURE)
    ends = {"eos_token_id": tiny_tokenizer.eos_token_id}
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(4), dtype=torch.float32, **ends))
    randomise(model, std=0.1)
    model.tokenizer = tiny_tokenizer
    directory = tmp_path_factory.mktemp("models") / "source"
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def small(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fathomlm.save(
        fathomlm.trim_vocab(source, "the depth of the water " * 9, MANY), tmp_path_factory.mktemp("m") / "small"
    )


@pytest.fixture(scope="module")
def corpus(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    place = tmp_path_factory.mktemp("corpus")
    texts = (f"{n}: the depth of the water is {n * 7919 % 1000} fathoms, and the fox jumps" for n in range(120))
    write_jsonl(place / "text.jsonl", ({"text": text} for text in texts))
    options = {"sources": (str(place / "text.jsonl"),), "tokenizer": str(small), "validation_fraction": 0.1}
    return prepare(PrepareOptions(out=place / "corpus", **options))


def of(recipe: Make, source: Path, corpus: Corpus, teacher: Path | None = None, **model: Any) -> Any:
    plain = {"architecture": None, "sharing": None, "recursions": 1, "source": str(source)}
    distill = {"distill": {"source": str(source if teacher is None else teacher)}}
    data = {"path": str(corpus.path), "context": 32}
    return recipe(model={**plain, **model}, data=data, budget={"steps": 2}, loss={"exits": None, **distill})


def test_a_source_with_the_corpus_tokens(recipe: Make, source: Path, small: Path, corpus: Corpus) -> None:
    made = of(recipe, source, corpus, vocab=MANY)
    student, trimmed = build_student(made, corpus), fathomlm.load(small)
    assert student.architecture == trimmed.architecture == read_student(made).architecture
    for name, weight in trimmed.named_parameters():
        assert torch.equal(student.get_parameter(name), weight), name
    assert student.config.eos_token_id == trimmed.config.eos_token_id
    spec = read_teacher(made)
    assert spec is not None
    assert spec.architecture.vocab == MANY
    teacher = build_teacher(made, corpus, student, World(0, 1, torch.device("cpu")))
    assert teacher is not None
    tokens = torch.arange(MANY)[None, :32]
    torch.testing.assert_close(teacher(tokens).logits, trimmed(tokens).logits, rtol=0.05, atol=0.05)


def test_it_is_measured_narrowed_and_taught(recipe: Make, source: Path, small: Path, corpus: Corpus) -> None:
    made = of(recipe, source, corpus, vocab=MANY, drop=1, by="greedy", neurons=16, calibrate=512)
    train(made)
    trained = fathomlm.load(Path(made.directory) / "last")
    assert trained.architecture == read_student(made).architecture
    shape = trained.architecture
    assert (shape.layers, shape.intermediate, shape.vocab, len(trained.tokenizer)) == (3, 16, MANY, MANY)
    rows = torch.from_numpy(corpus.stream("train").read(0, 512)).view(-1, 64)
    found = fathomlm.measure_activations(str(small), rows, moments=False, greedy=1)
    assert trained.config.kept_layers == [layer for layer in range(4) if layer not in found.order]


def test_a_kept_teacher_is_known_by_its_tokens(
    recipe: Make, source: Path, small: Path, corpus: Corpus, tmp_path: Path
) -> None:
    kept = {"distill": {"source": str(source), "top_k": 4, "cache": str(tmp_path / "cache")}}
    made = of(recipe, source, corpus, vocab=MANY)
    train(replace(made, loss=recipe(loss=kept).loss))
    whole = of(recipe, small, corpus)
    with pytest.raises(FathomError, match=f"vocab is {MANY} there and None here"):
        train(replace(whole, out=str(tmp_path / "whole"), loss=recipe(loss=kept).loss))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"vocab": MANY + 1}, rf"model\.vocab must be that of the corpus' tokenizer, {MANY}, got {MANY + 1}"),
        ({"vocab": 9999}, r"model\.vocab must be <= the model's vocabulary of"),
        ({}, "tokenizer"),
    ],
)
def test_what_does_not_fit(recipe: Make, source: Path, corpus: Corpus, model: dict[str, Any], why: str) -> None:
    made = of(recipe, source, corpus, **model)
    with pytest.raises(FathomError, match=why):
        train(made)


def test_a_fresh_model_has_the_corpus_tokens_anyway(recipe: Make) -> None:
    with pytest.raises(FathomError, match=r"model\.vocab requires model\.source"):
        train(recipe(model={"vocab": 257}))


def test_a_model_of_other_tokens_is_refused(recipe: Make, source: Path, small: Path, token_corpus: Path) -> None:
    bytes_corpus = Corpus.open(token_corpus)
    with pytest.raises(FathomError, match="not the model's with fewer tokens"):
        train(of(recipe, source, bytes_corpus, vocab=257))


def test_loops_and_encoders_are_refused(recipe: Make, source: Path, corpus: Corpus, tmp_path: Path) -> None:
    looped = fathomlm.save(fathomlm.convert(source, recursions=2), tmp_path / "looped")
    for model, teacher in ((looped, None), (source, looped)):
        with pytest.raises(FathomError, match=r"model\.vocab requires plain decoder-only models"):
            train(of(recipe, model, corpus, teacher, vocab=MANY))
