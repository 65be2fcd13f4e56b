"""`fathomlm export --format exits --exit-vocab N --exit-vocab-from FILE`: exits that choose among frequent tokens only."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.exit_pack import read_pack
from fathomlm.checkpoints.native import save
from fathomlm.cli.main import main
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator
from fathomlm.train.data.frequent import frequent_tokens
from jsonl import write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "the depth of the water is the measure of the fathom line\n"
PROMPT = ("-p", "the depth of the water", "--max-new-tokens", "10")
KIND = ("--format", "exits")


@pytest.fixture(scope="module")
def exited(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an exit. Shared: read it, do not write to it."""
    model = replan(tiny_model, tiny_model.plan.with_exits([1]), exit_adapter=4)
    with torch.no_grad():
        model.decoder.exit_adapters["1"].b.normal_(std=0.2, generator=torch.Generator().manual_seed(2))  # type: ignore[union-attr,operator]
    return save(model, tmp_path_factory.mktemp("exited") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def vocab_in(pack: Path) -> list[int]:
    words = read_pack(pack).exit_vocab
    assert words is not None
    return words.tolist()


def test_the_most_frequent_in_corpus_of_the_files(
    exited: Path, text: Path, tiny_tokenizer: Any, tmp_path: Path, told: Callable[..., Any]
) -> None:
    rows = tmp_path / "rows.jsonl"
    write_jsonl(rows, ({"body": "zzzzzzzz"} for _ in range(9)))
    counted = ("--exit-vocab", "12", "--exit-vocab-from")
    assert told("export", exited, tmp_path / "pack", *KIND, *counted, text)["exit_vocab"] == 12
    assert vocab_in(tmp_path / "pack") == frequent_tokens([TEXT], tiny_tokenizer, 12, vocab=320).tolist()
    (zed,) = tiny_tokenizer("z")["input_ids"]
    assert zed not in vocab_in(tmp_path / "pack")
    assert {0, 2} <= set(vocab_in(tmp_path / "pack")), "what a text begins and ends with"
    told("export", exited, tmp_path / "more", *KIND, "--dtype", "bfloat16", *counted, text, rows, "--column", "body")
    assert vocab_in(tmp_path / "more") == frequent_tokens([TEXT, *["z" * 8] * 9], tiny_tokenizer, 12, vocab=320).tolist()
    assert zed in vocab_in(tmp_path / "more")


def test_what_ends_this_models_texts_is_among_them(
    exited: Path, text: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    model = shutil.copytree(exited, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 299]}))
    told("export", model, tmp_path / "pack", *KIND, "--exit-vocab", "4", "--exit-vocab-from", text)
    assert {0, 2, 299} < set(vocab_in(tmp_path / "pack")), "the tokenizer itself knows nothing of 299"


def test_drafts_among_words_give_full_decodings_text(
    exited: Path, text: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any], capsys: Any
) -> None:
    pack = tmp_path / "pack"
    assert main(["export", str(exited), str(pack), *KIND, "--exit-vocab", "12", "--exit-vocab-from", str(text)]) == 0
    assert "the exits after 2 with their adapters, among 12 tokens, float32" in capsys.readouterr().out
    full = told("generate", tiny_model_dir, *PROMPT)["results"][0]["tokens"]
    decode = ("generate", tiny_model_dir, *PROMPT, "--exits", pack, "--decode")
    for threshold in ("0", "0.05"):
        assert told(*decode, "speculative", "--threshold", threshold)["results"][0]["tokens"] == full
    few = told(*decode, "static")["results"][0]["tokens"]
    assert set(few) <= set(vocab_in(pack))
    assert not set(told("generate", exited, *PROMPT, "--decode", "static")["results"][0]["tokens"]) <= set(vocab_in(pack))


def test_text_is_scored_over_every_word(
    exited: Path, text: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    told("export", exited, tmp_path / "few", *KIND, "--exit-vocab", "4", "--exit-vocab-from", text)
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"context": "six fathoms", "target": "deep"}) + "\n")
    for verb in (("eval", "ppl", "--data", text, "--exit", "2"), ("eval", "tasks", "--tasks", task, "--exit", "2")):
        few = told(*verb[:2], tiny_model_dir, *verb[2:], "--exits", tmp_path / "few")
        assert few["outputs"] == told(*verb[:2], exited, *verb[2:])["outputs"]
    words = ("--data", text, "--tokens", "8", "--prompts", "0", "--force", "--out", tmp_path / "analysis")
    few = told("analyze", "exits", tiny_model_dir, "--exits", tmp_path / "few", *words)
    assert few["exits"] == told("analyze", "exits", exited, *words)["exits"]
    sweep = ("--quality", "ppl", "--sweep", "threshold", "--thresholds", "0", "--prompts", "1", "--max-new-tokens", "4")
    frontier = ("eval", "frontier", tiny_model_dir, "--data", text, "--repeats", "1", "--out", tmp_path / "frontier", *sweep)
    found = told(*frontier, "--exits", tmp_path / "few")
    assert all(math.isfinite(point["quality"]) for point in found["curves"][0]["points"])


def test_a_pack_gets_words_later(
    exited: Path, text: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any], capsys: Any
) -> None:
    pack = tmp_path / "pack"
    told("export", exited, pack, *KIND, "--dtype", "bfloat16")
    Calibration(exit_layer=2, confidence="gap", estimator=ThresholdEstimator()).save(pack / FILE)
    before = load_file(pack / "exits.safetensors")
    again = ("export", str(tiny_model_dir), str(pack), *KIND, "--force", "--exits", str(pack))
    assert main([*again, "--exit-vocab", "12", "--exit-vocab-from", str(text)]) == 0
    said = capsys.readouterr()
    assert "adapters, among 12 tokens, and their threshold, bfloat16" in said.out
    assert "the threshold was learnt without this exit vocabulary; `fathomlm calibrate` learns it anew" in said.err
    after = load_file(pack / "exits.safetensors")
    words = after.pop("exit_vocab")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "as they were stored, not as MODEL is"
    assert (pack / FILE).is_file()
    record = told(*again)
    assert (record["exit_vocab"], record["weights"], record["threshold"]) == (12, "bfloat16", True)
    assert vocab_in(pack) == words.tolist(), "words stay where no others are asked for"
    half = told("export", tiny_model_dir, tmp_path / "half", *KIND, "--exits", pack, "--dtype", "float16")
    assert (half["weights"], half["exit_vocab"]) == ("float16", 12)


def test_slips_are_one_line(exited: Path, text: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    out = str(tmp_path / "out")
    export, source = ("export", str(exited), out), ("--exit-vocab-from", str(text))
    assert "--exit-vocab requires --exit-vocab-from" in mistake_of(*export, *KIND, "--exit-vocab", "12")
    assert "--exit-vocab-from requires --exit-vocab" in mistake_of(*export, *KIND, *source)
    assert "--column requires --exit-vocab" in mistake_of(*export, *KIND, "--column", "text")
    assert "--exit-vocab must be >= 1, got 0" in mistake_of(*export, *KIND, "--exit-vocab", "0", *source)
    assert "exit_vocab must be from 2 (the special tokens) to 320 (all), got 1" in mistake_of(
        *export, *KIND, "--exit-vocab", "1", *source
    )
    assert "to 320 (all), got 321" in mistake_of(*export, *KIND, "--exit-vocab", "321", *source)
    (tmp_path / "exits.json").write_text("{}")
    for option in (("--exit-vocab", "12"), source, ("--column", "text"), ("--exits", str(tmp_path))):
        for kind in ((), ("--format", "fathom")):
            assert f"{option[0]} requires --format exits" in mistake_of(*export, *kind, *option)
    assert "--any-base requires --exits" in mistake_of(*export, "--any-base")
    assert "--any-base requires --exits" in mistake_of(*export, *KIND, "--any-base")
    typo = str(text.with_name("texts.txt"))
    assert "did you mean" in mistake_of(*export, *KIND, "--exit-vocab", "12", "--exit-vocab-from", typo)
    assert "pack does not exist" in mistake_of(*export, *KIND, "--exits", str(tmp_path / "pack"))
    (tmp_path / "empty.txt").write_text("")
    nothing = ("--exit-vocab", "12", "--exit-vocab-from", str(tmp_path / "empty.txt"))
    assert "no text to find frequent tokens in" in mistake_of(*export, *KIND, *nothing)
    mute = shutil.copytree(exited, tmp_path / "mute")
    for file in mute.glob("*token*"):
        file.unlink()
    assert "has no tokenizer" in mistake_of("export", str(mute), out, *KIND, "--exit-vocab", "12", *source)
    assert not Path(out).exists()


def test_damaged_words_are_one_line(
    exited: Path, text: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any], mistake_of: Callable[..., str]
) -> None:
    pack = tmp_path / "pack"
    told("export", exited, pack, *KIND, "--exit-vocab", "12", "--exit-vocab-from", text)
    tensors = load_file(pack / "exits.safetensors")
    save_file(tensors | {"exit_vocab": tensors["exit_vocab"].flip(0).contiguous()}, pack / "exits.safetensors")
    decode = ("generate", str(tiny_model_dir), *PROMPT, "--decode", "parallel", "--exits", str(pack))
    assert "its checksum is not the one in exits.json" in mistake_of(*decode)
