"""Exits that come with FathomLM for a model that is named: when they are used, when they are not, and what is said of it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.exit_pack import write_pack
from fathomlm.cli.main import main
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "tiny"
PROMPT = ("-p", "the depth of the water", "--max-new-tokens", "10")
NOTE = f"fathomlm: using the exits that ship with FathomLM for {NAME} (--exits none: without)\n"


@pytest.fixture(scope="module")
def made(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack for the tiny model, with a few words. Shared: read it, do not write to it."""
    exited = replan(tiny_model, tiny_model.plan.with_exits([1], layer=True))
    return write_pack(exited, tmp_path_factory.mktemp("made") / "pack", exit_vocab=torch.arange(0, 320, 2))


@pytest.fixture
def shipped(made: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation that came with the tiny model and with exits for it; gives the pack."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / NAME).symlink_to(tiny_model_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("fathomlm.packaged.models_directory", lambda: tmp_path / "models")
    monkeypatch.setattr("fathomlm.packaged.exits_directory", lambda: tmp_path / "exits")
    return Path(shutil.copytree(made, tmp_path / "exits" / NAME))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """The record of a command that must succeed, and what it said on standard error."""

    def run(*words: str | Path) -> tuple[Any, str]:
        assert main([*(str(word) for word in words), "--json"]) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return run


def learnt(place: Path, threshold: float = 0.04, confidence: str = "gap") -> None:
    estimator = ThresholdEstimator(ThresholdOptions(initial=threshold))
    Calibration(exit_layer=2, confidence=confidence, estimator=estimator).save(place / FILE)


@pytest.mark.parametrize("mode", ["parallel", "speculative", "static", "state-copy", "oracle"])
def test_a_mode_that_needs_an_exit_finds_it(
    mode: str, shipped: Path, tiny_model_dir: Path, told: Callable[..., tuple[Any, str]]
) -> None:
    found, said = told("generate", NAME, *PROMPT, "--decode", mode, "--quantize", "none")
    asked, silent = told("generate", tiny_model_dir, *PROMPT, "--decode", mode, "--exits", shipped)
    assert (said, silent) == (NOTE, "")
    assert (found["exit_pack"], found["exits"]["exit_layers"]) == (str(shipped), [2])
    assert found["exits"] == asked["exits"]
    for name in ("tokens", "exit_layers", "confidences"):
        assert found["results"][0][name] == asked["results"][0][name]


def test_the_threshold_that_was_calibrated_for_them_holds(shipped: Path, told: Callable[..., tuple[Any, str]]) -> None:
    generate = ("generate", NAME, *PROMPT, "--decode")
    assert told(*generate, "speculative")[0]["exits"]["threshold"] == 0.9
    learnt(shipped)
    full = told("generate", NAME, *PROMPT)[0]["results"][0]["tokens"]
    for mode in ("speculative", "parallel", "state-copy"):
        found = told(*generate, mode)[0]
        exits = found["exits"]
        assert (exits["threshold"], exits["exit_layers"], exits["adaptive"]) == (0.04, [2], False)
        assert exits["exit_rate"] > 0
        assert (found["results"][0]["tokens"] == full) == (mode == "speculative")
    assert told(*generate, "static")[0]["exits"]["threshold"] is None
    assert told(*generate, "oracle")[0]["exits"]["threshold"] is None
    assert told(*generate, "parallel", "--threshold", "0.3")[0]["exits"]["threshold"] == 0.3
    assert told(*generate, "parallel", "--confidence", "max")[0]["exits"]["threshold"] == 0.9, "learnt for another"
    exits = told(*generate, "parallel", "--threshold", "adaptive")[0]["exits"]
    assert (exits["threshold"], exits["adaptive"]) == (0.04, True)
    learnt(shipped, 0.2, "max")
    exits = told(*generate, "parallel")[0]["exits"]
    assert (exits["threshold"], exits["confidence"]) == (0.2, "max")


def test_a_threshold_of_a_pack_that_was_asked_for_is_not_taken_unasked(
    shipped: Path, told: Callable[..., tuple[Any, str]]
) -> None:
    learnt(shipped)
    found, said = told("generate", NAME, *PROMPT, "--decode", "parallel", "--exits", shipped)
    assert (found["exits"]["threshold"], said) == (0.9, "")


def test_what_says_otherwise_is_heard(shipped: Path, told: Callable[..., tuple[Any, str]]) -> None:
    generate = ("generate", NAME, *PROMPT)
    layer = told(*generate, "--decode", "parallel", "--exit-layer", "2", "--threshold", "0.04")
    none = told(*generate, "--decode", "parallel", "--exit-layer", "2", "--exits", "none", "--threshold", "0.04")
    pack = told(*generate, "--decode", "parallel", "--threshold", "0.04")
    for found, said in (layer, none):
        assert (found["exit_pack"], said) == (None, "")
        assert found["results"][0]["confidences"] == layer[0]["results"][0]["confidences"]
    assert pack[0]["results"][0]["confidences"] != layer[0]["results"][0]["confidences"]
    first = told(*generate, "--decode", "state-copy", "--min-exit-layer", "2")
    assert (first[0]["exit_pack"], first[0]["exits"]["exit_layers"], first[1]) == (None, [2, 3], "")
    for words in ((), ("--decode", "full")):
        found, said = told(*generate, *words)
        assert (found["exit_pack"], said) == (None, "")


def test_only_a_name_has_them(shipped: Path, tiny_model_dir: Path, mistake_of: Callable[..., str]) -> None:
    speculative = (*PROMPT, "--decode", "speculative")
    assert "has no exits of its own" in mistake_of("generate", str(tiny_model_dir), *speculative)
    assert "has no exits of its own" in mistake_of("generate", NAME, *speculative, "--exits", "none")
    assert f"{shipped / NAME} does not exist" in mistake_of("generate", str(shipped / NAME), *speculative)
    assert "did you mean 'tiny'" in mistake_of("generate", "tyny", *speculative)
    Path(NAME).symlink_to(tiny_model_dir)
    assert "has no exits of its own" in mistake_of("generate", NAME, *speculative), "a path that exists wins"
    Path(NAME).unlink()
    (shipped / "exits.json").unlink()
    assert "has no exits of its own" in mistake_of("generate", NAME, *speculative), "half a pack is none"


def test_slips_beside_them_are_one_line(shipped: Path, mistake_of: Callable[..., str]) -> None:
    generate = ("generate", NAME, *PROMPT)
    assert "non does not exist; a pack of exits is what" in mistake_of(*generate, "--decode", "parallel", "--exits", "non")
    shutil.copytree(shipped, "none")
    assert "--exits requires --decode, such as --decode parallel" in mistake_of(*generate, "--exits", "none")
    assert "--any-base requires --exits" in mistake_of(*generate, "--decode", "parallel", "--any-base")
    none = ("--decode", "parallel", "--exits", "none", "--any-base")
    assert "--any-base requires --exits" in mistake_of(*generate, *none)
    assert "invalid --decode 'paralell' (did you mean 'parallel'?)" in mistake_of(*generate, "--decode", "paralell")
    (shipped / FILE).write_text("{")
    assert "threshold.json is not valid JSON" in mistake_of(*generate, "--decode", "parallel")


def test_a_directory_called_none_is_a_path(shipped: Path, told: Callable[..., tuple[Any, str]]) -> None:
    shutil.copytree(shipped, "none")
    found, said = told("generate", NAME, *PROMPT, "--decode", "parallel", "--exits", "./none")
    assert (found["exit_pack"], said) == ("none", "")


def test_chat_says_what_full_decoding_says(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt(shipped)
    said = []
    for words in ((), ("--decode", "speculative")):
        monkeypatch.setattr("sys.stdin", io.StringIO("the depth\nand the fox?\n"))
        assert main(["chat", NAME, "--max-new-tokens", "8", *words]) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out != ""
    assert (said[0].err, said[1].err) == ("", NOTE)


def test_eval_takes_them_too(shipped: Path, tmp_path: Path, told: Callable[..., tuple[Any, str]]) -> None:
    learnt(shipped)
    asked, text = tmp_path / "asked.jsonl", tmp_path / "text.txt"
    asked.write_text(json.dumps({"context": "a fox.", "question": "who?", "answers": ["a fox"]}) + "\n")
    text.write_text("the depth of the water is the measure of the fathom line. " * 4)
    words = ("eval", "generate", NAME, "--data", asked, "--max-new-tokens", "4", "--decode", "speculative")
    found, said = told(*words)
    assert (found["exit_pack"], found["exits"]["last_threshold"], said) == (str(shipped), 0.04, NOTE)
    sweep = ("--thresholds", "0,1", "--prompts", "1", "--max-new-tokens", "4", "--repeats", "1", "--force")
    frontier = ("eval", "frontier", NAME, "--data", text, "--out", tmp_path / "out", *sweep, "--sweep", "threshold")
    found, said = told(*frontier)
    adaptive = [point["value"] for point in found["curves"][0]["points"] if point["kind"] == "adaptive"]
    assert (found["exit_pack"], adaptive, said) == (str(shipped), [0.04], NOTE)
    for option in (("--exit-layer", "2"), ("--exit-layer", "2", "--exits", "none")):
        found, said = told(*frontier, *option)
        assert (found["exit_pack"], said) == (None, "")
