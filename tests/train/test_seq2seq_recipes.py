"""Recipes of encoder-decoder models: what they say, what they cost before anything is read, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from fathomlm.checkpoints.resolve import encoder_of
from fathomlm.cli.main import main
from fathomlm.depth.cost import encoder_flops
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import DataError, OptionError, OutputError
from fathomlm.model.encoder import encoder_parameters
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.estimate import estimate, format_estimate
from fathomlm.train.first import prepare_command
from fathomlm.train.reading import build_recipe, read_recipe
from fathomlm.train.run import train
from fathomlm.train.setup import build_student
from fathomlm.train.student import read_student
from jsonl import write_jsonl

TEXTS = [("Ein Hund läuft im Garten", "A dog runs in the garden"), ("Zwei Männer sitzen", "Two men are sitting")] * 8
# Dataset: model, batch, epochs, longest input and output (the thesis' table of training settings).
THESIS = {
    "free-samsum": ("t5-large", 8, 20, 512, 128),
    "free-cnn-dailymail": ("t5-large", 16, 3, 512, 128),
    "free-multi-news": ("long-t5-tglobal-base", 4, 3, 2048, 512),
    "free-bigpatent": ("long-t5-tglobal-base", 4, 3, 2048, 512),
    "free-squad": ("t5-large", 8, 10, 512, 30),
    "free-iwslt-de-en": ("mt5-large", 16, 2, 1024, 128),
}
FRESH = {"architecture": {"family": "t5", "layers": 3, "hidden": 32, "intermediate": 48, "heads": 4, "vocab": 257}}
LOOPED = {"architecture": {**FRESH["architecture"], "layers": 4}, "recursions": 2}
PAIRS = {"pairs": ["de", "en"], "source_length": 16, "target_length": 8}


def made(**changes):
    base = {"model": FRESH, "data": PAIRS, "budget": {"steps": 4}, "batch": {"sequences": 4}}
    return build_recipe({**base, **changes})


@pytest.mark.parametrize("name", THESIS)
def test_the_thesis_settings(name):
    recipe, (model, batch, epochs, source, target) = read_recipe(name), THESIS[name]
    assert (recipe.model.source, recipe.batch.sequences, recipe.budget.epochs) == (model, batch, epochs)
    assert (recipe.data.source_length, recipe.data.target_length) == (source, target)
    assert (recipe.optimizer.kind, recipe.optimizer.lr) == ("adafactor", 1e-4)
    assert recipe.loss.layerwise is not None
    assert (recipe.loss.exits.at, recipe.loss.layerwise.shallow, recipe.loss.layerwise.mapping) == ([6], 6, "dyna")
    if model in [THESIS[other][0] for other in THESIS][: list(THESIS).index(name)]:
        return  # the same model; that every recipe can be dry run is tested in test_estimate.py
    found = estimate(recipe, rows_in_epoch=1000)
    assert found.total_parameters == {"t5-large": 737_668_096, "mt5-large": 1_229_581_312}.get(model, 247_587_456)
    assert found.trainable_parameters == found.total_parameters
    assert found.encoder_parameters == encoder_parameters(encoder_of(model))
    assert found.steps == math.ceil(epochs * 1000 / batch)
    assert "encoder" in format_estimate(found)


def test_the_count_is_the_models(tmp_path):
    """Parameters by the dry run and of the real thing; FLOPs of a small case by hand."""
    write_jsonl(tmp_path / "a.jsonl", ({"de": a, "en": b} for a, b in TEXTS))
    options = {"tokenizer": "bytes", "pairs": ("de", "en"), "validation_fraction": 0.0}
    corpus = prepare(PrepareOptions(sources=(str(tmp_path / "a.jsonl"),), out=tmp_path / "c", **options))
    recipe = made(model={**FRESH, "encoder": {"layers": 2}})
    student = build_student(recipe, corpus)
    found = estimate(recipe)
    assert found.total_parameters == sum(p.numel() for p in student.parameters())
    assert found.encoder_parameters == sum(p.numel() for p in student.encoder.parameters())
    # A source token: 2 layers of 4 matrices and 2 of the feed-forward part, attention over 16 keys. A target token: 3
    # layers of q, k, v, o, cross q and o and the feed-forward part, attention over 4 keys of its own and 16 of the source.
    source = 2 * (2 * (4 * 32 * 32 + 2 * 32 * 48) + 4 * 32 * 16) + 3 * 2 * 2 * 32 * 32
    target = 3 * (2 * (6 * 32 * 32 + 2 * 32 * 48) + 4 * 32 * (4 + 16))
    assert found.forward_flops_per_token == pytest.approx((16 * source + 8 * target) / 24, abs=1)
    weights = 16 * (2 * (4 * 32 * 32 + 2 * 32 * 48) + 3 * 2 * 32 * 32) + 8 * (3 * (6 * 32 * 32 + 2 * 32 * 48) + 257 * 32)
    assert found.flops_per_token_6n == pytest.approx(6 * weights / 24, abs=1)
    assert estimate(made(budget={"flops": 100 * 4 * 24 * estimate(made()).forward_flops_per_token})).steps == 100


def test_memory_goes_down_with_recomputation_and_with_a_frozen_encoder():
    plain = estimate(read_recipe("free-samsum"), rows_in_epoch=1000).memory
    again = estimate(read_recipe("free-samsum", ["--recompute", "layer"]), rows_in_epoch=1000).memory
    assert again.encoder < plain.encoder / 4
    assert again.activations < plain.activations
    words = ["--train", "exits", "--loss.exits.head_rank", "8"]
    frozen = estimate(read_recipe("free-samsum", words), rows_in_epoch=1000).memory
    assert frozen.encoder < plain.encoder / 10


def test_longt5_looks_at_its_block_those_beside_it_and_one_key_for_each_global_block():
    record = encoder_of("long-t5-tglobal-base")
    of_a_key = 4 * record["num_layers"] * record["num_heads"] * record["d_kv"]
    assert encoder_flops(record, weights=7, source=2048) == 2 * 7 + of_a_key * (3 * 128 + 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"context": 64}}, "a t5 model requires source-target pairs: give both with data.pairs"),
        ({"model": {"source": "t5-large"}, "data": {}}, "give both with data.pairs"),
        ({"model": {**FRESH, "router": {"kind": "expert"}}}, "requires model.recursions >= 2"),
        (
            {"model": {**LOOPED, "kv": "share"}, "recompute": "layer"},
            "recompute: layer cannot be combined with kv mode 'share'",
        ),
        (
            {"model": {**LOOPED, "router": {"kind": "expert"}}, "loss": {"exits": {"at": [1]}}},
            "a routed model has one output",
        ),
        ({"model": {**FRESH, "encoder": {"layers": 0}}}, "model.encoder.layers must be >= 1, got 0"),
        ({"model": {**FRESH, "encoder": {"dropout": 1.0}}}, "model.encoder.dropout must be >= 0 and < 1"),
        ({"model": {"source": "t5-large", "encoder": {"layers": 2}}}, "model.encoder.layers requires model.architecture"),
        ({"model": {"source": "smollm2-135m", "encoder": {"layers": 2}}}, "requires a t5, mt5 or longt5 model, got llama"),
        ({"model": {"architecture": {**FRESH["architecture"], "gated": True, "activation": "gelu"}}}, "not gelu"),
    ],
)
def test_what_does_not_apply_is_refused(changes, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        _read(changes)


def _read(changes):
    return read_student(made(**changes))


def test_a_prefix_without_pairs_is_refused():
    with pytest.raises(OptionError, match=r"data\.source_prefix requires data\.pairs"):
        build_recipe({**SMOL, "data": {"source_prefix": "a: "}})
    with pytest.raises(OptionError, match=r"^source_prefix requires pairs$"):
        PrepareOptions(sources=("a.jsonl",), out=Path("c"), tokenizer="bytes", source_prefix="a: ")


SMOL = {"model": {"source": "smollm2-135m"}, "budget": {"steps": 1}, "batch": {"sequences": 1}}


def test_fresh_shapes_have_their_familys_traits():
    """The preset's, field by field, from a recipe that names the sizes only."""
    for name, words in (("t5-base", {}), ("mt5-large", {"family": "mt5"}), ("long-t5-tglobal-base", {"family": "longt5"})):
        a = PRESETS[name].architecture
        sizes = {"layers": a.layers, "hidden": a.hidden, "intermediate": a.intermediate, "heads": a.heads, "vocab": a.vocab}
        asked = {"family": "t5", **sizes, "head_dim": a.head_dim, "context": a.context, **words}
        assert read_student(made(model={"architecture": asked})).architecture == a
    shaped = read_student(made(model={"shape": "t5-small"}))
    assert shaped.encoder == encoder_of("t5-small")
    assert shaped.encoder["num_layers"] == 6


def write_pairs(place: Path) -> Path:
    write_jsonl(place / "a.jsonl", ({"de": a, "en": b} for a, b in TEXTS))
    return place / "a.jsonl"


def unigram(directory: Path) -> None:
    """What T5's tokenizer is: a unigram model over words with a mark in front, <pad> 0, </s> 1."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    backend.train_from_iterator(["translate: ", *(text for pair in TEXTS for text in pair)] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)


def byte_level(directory: Path) -> None:
    """As recipes/translate-tiny.yaml makes its own."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator((text for pair in TEXTS for text in pair), vocab_size=320, special_tokens=["<pad>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(directory)


@pytest.mark.parametrize("make", [unigram, byte_level])
def test_a_tokenizer_of_ones_own(make, tmp_path, capsys):
    """Prepared on the command line with a prefix, and a fresh model that ends and starts with the right tokens."""
    make(tmp_path / "tokenizer")
    capsys.readouterr()
    words = [
        str(write_pairs(tmp_path)),
        str(tmp_path / "c"),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
        "--pairs",
        "de",
        "en",
    ]
    words += ["--source-prefix", "translate: ", "--validation-fraction", "0", "--workers", "1"]
    assert main(["data", "prepare", *words]) == 0
    corpus = Corpus.open(tmp_path / "c")
    tokenizer = corpus.load_tokenizer()
    source, target = corpus.pairs("train").pair(0)
    assert tokenizer.decode(source.tolist()).strip() == "translate: Ein Hund läuft im Garten"
    assert source.tolist() == tokenizer.encode("translate: Ein Hund läuft im Garten", add_special_tokens=False)
    assert tokenizer.decode(target[:-1].tolist()).strip() == "A dog runs in the garden"
    assert (corpus.manifest.separator, int(target[-1]), corpus.manifest.source_prefix) == (1, 1, "translate: ")
    shape = {**FRESH["architecture"], "vocab": corpus.manifest.vocab}
    student = build_student(made(model={"architecture": shape}), corpus)
    config = student.config
    assert (config.eos_token_id, config.pad_token_id, config.decoder_start_token_id) == (1, 0, 0)
    with pytest.raises(OutputError, match="was prepared with source prefix translate: , not"):
        prepare(
            PrepareOptions(
                sources=(str(tmp_path / "a.jsonl"),),
                out=tmp_path / "c",
                tokenizer=str(tmp_path / "tokenizer"),
                pairs=("de", "en"),
                validation_fraction=0,
            )
        )


def test_the_prefix_does_not_move_pairs_between_splits(tmp_path):
    records = ({"s": f"source {n}", "t": f"target {n}"} for n in range(200))
    write_jsonl(tmp_path / "a.jsonl", records)
    options = {
        "sources": (str(tmp_path / "a.jsonl"),),
        "tokenizer": "bytes",
        "pairs": ("s", "t"),
        "validation_fraction": 0.2,
    }
    plain = prepare(PrepareOptions(out=tmp_path / "plain", **options))
    fixed = prepare(PrepareOptions(out=tmp_path / "fixed", source_prefix="ask: ", **options))
    held = [[bytes(c.pairs("validation").pair(n)[0].tolist()) for n in range(20)] for c in (plain, fixed)]
    assert held[1] == [b"ask: " + text for text in held[0]]


def test_a_corpus_that_ends_otherwise_than_the_model_is_refused(tmp_path):
    options = {"tokenizer": "bytes", "pairs": ("de", "en"), "validation_fraction": 0.0}
    corpus = prepare(PrepareOptions(sources=(str(write_pairs(tmp_path)),), out=tmp_path / "c", **options))
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 257}
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**sizes, eos_token_id=1, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    with pytest.raises(DataError, match="ends targets with token 256, but the model stops at 1"):
        build_student(made(model={"source": str(tmp_path / "t5")}), corpus)


def test_the_command_that_would_prepare_names_the_prefix():
    command = prepare_command(read_recipe("free-iwslt-de-en").data)
    assert "--pairs de en --source-prefix 'translate German to English: '" in command


def test_the_small_recipe_runs(tmp_path, monkeypatch):
    """`tiny-seq2seq`, shortened: it prepares its own corpus on first use."""
    monkeypatch.chdir(tmp_path)
    records = ({"source": f"abc{n}", "target": f"{n}cba"} for n in range(60))
    write_jsonl(Path("pairs.jsonl"), records)
    words = ["--budget.steps", "4", "--schedule.warmup", "1", "--batch.sequences", "8", "--log.tensorboard", "false"]
    words += ["--data.validation_fraction", "0.1"]
    summary = train(read_recipe("tiny-seq2seq", words))
    assert summary.finished
    assert summary.exits.keys() == {"1"}
