"""`fathomlm calibrate`: what it writes, what `generate` makes of it, and one line for every mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fathomlm.cli.main import main
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator
from fathomlm.lab.analyze.calibrate import _rule

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    write(path, 5)
    return path


def write(path: Path, many: int) -> None:
    lines = [{"text": f"the depth of the water is {n} fathoms and the line is marked"} for n in range(many)]
    path.write_text("\n".join(json.dumps(line) for line in lines))


def test_it_writes_what_generate_reads(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(texts), "--exit-layer", "2", "--max-new-tokens", "8", "--prompt-tokens", "4"]
    assert main(["calibrate", str(model), *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["texts"] == 5
    assert record["agreements"] + record["disagreements"] == 5 * 8
    assert len(record["history"]) == 5
    assert (model / "threshold.json").is_file()
    assert (model / "threshold.png").stat().st_size > 1_000
    few = ["-p", "the", "--max-new-tokens", "4", "--threshold", "adaptive", "--json"]
    assert main(["generate", str(model), "--decode", "parallel", *few]) == 0
    exits = json.loads(capsys.readouterr().out)["exits"]
    assert (exits["exit_layers"], exits["threshold"]) == ([2], record["threshold"])
    assert main(["calibrate", str(model), *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"threshold {record['threshold']:.3f}: confidence 'gap' after layer 2")
    assert "Beta(" in said
    assert "rule risk    1.000: 0.0% exit, 0.00% of all wrong" in said, "40 tokens promise nothing"
    assert "that takes 30 prompts or more" in said
    write(texts, 30)
    assert main(["calibrate", str(model), *words]) == 0
    assert "that takes more prompts, or a higher --risk" in capsys.readouterr().out, "nor do 240"


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes longer to draw than all else; tests/lab/analyze/test_threshold_picture.py looks at it."""
    monkeypatch.setattr("fathomlm.lab.analyze.calibrate.draw_threshold", lambda *given, **more: None)


@pytest.mark.usefixtures("no_picture")
def test_each_rule_is_what_its_name_says(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the same samples, by all rules at once in the record, and in force by the one asked for."""
    write(texts, 30)
    words = ["--data", str(texts), "--exit-layer", "2", "--max-new-tokens", "16", "--prompt-tokens", "4", "--json"]
    found = {}
    for rule, asked in (("risk", ["--risk", "0.9", "--level", "0.6"]), ("thesis", ["--priors", "measured"]), ("public", [])):
        assert main(["calibrate", str(model), *words, "--rule", rule, *asked]) == 0
        found[rule] = json.loads(capsys.readouterr().out)
        assert (found[rule]["rule"], found[rule]["threshold"]) == (rule, found[rule]["rules"][rule]["threshold"])
        assert list(found[rule]["rules"]) == ["risk", "thesis", "public"]
    assert (found["risk"]["risk"], found["risk"]["texts"]) == (0.9, 30)
    assert found["risk"]["threshold"] < 1
    assert found["thesis"]["priors"] == "measured"
    everywhere = found["public"]["rules"]["thesis"]
    assert everywhere["wrong"] <= everywhere["exiting"] <= 1


def test_drafts_go_by_the_thesis_rule(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimator = ThresholdEstimator()
    for at in range(20):
        estimator.observe([0.9, 0.8, 0.7, 0.1, 0.2 + at / 100], [True, True, True, False, False])
        estimator.end_sequence()
    assert estimator.by("thesis") < 0.7 < estimator.threshold == 1.0
    Calibration(exit_layer=2, confidence="gap", estimator=estimator).save(model / FILE)
    for mode, threshold in (("parallel", 1.0), ("speculative", estimator.by("thesis"))):
        few = ["-p", "the", "--max-new-tokens", "4", "--threshold", "adaptive", "--json"]
        assert main(["generate", str(model), "--decode", mode, *few]) == 0
        assert json.loads(capsys.readouterr().out)["exits"]["threshold"] == threshold


@pytest.mark.usefixtures("no_picture")
def test_messages_go_through_the_chat_template(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str], mistake_of: Callable[..., str]
) -> None:
    """They give what documents give that are written in the template already."""
    words = ["--exit-layer", "2", "--max-new-tokens", "4", "--json"]
    written = texts.with_name("written.jsonl")
    messages = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    whole = [f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n" for message in messages]
    written.write_text("\n".join(json.dumps({"text": text}) for text in whole))
    found = []
    for data, asked in ((texts, ["--chat"]), (written, ["--prompt-tokens", "200"]), (texts, [])):
        assert main(["calibrate", str(model), "--data", str(data), *asked, *words]) == 0
        record = json.loads(capsys.readouterr().out)
        found.append([record[name] for name in ("agreements", "agree", "disagree")])
    assert found[0] == found[1] != found[2]
    both = ("--chat", "--prompt-tokens", "5")
    assert "--chat cannot be combined with --prompt-tokens" in mistake_of(
        "calibrate", str(model), "--data", str(texts), *both
    )


@pytest.mark.usefixtures("no_picture")
def test_another_exit_than_the_calibrated_one_is_refused(
    model: Path, texts: Path, mistake_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(model), "--data", str(texts), "--exit-layer", "2", "--max-new-tokens", "3"]) == 0
    capsys.readouterr()
    words = ("generate", str(model), "-p", "the", "--decode", "parallel", "--threshold", "adaptive", "--exit-layer", "1")
    assert "calibrated for an exit after layer 2, not 1" in mistake_of(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--exit-layer", "1,2"), "--exit-layer takes one layer here, got 2"),
        (("--exit-layer", "40"), "must be between 1 and"),
        (("--prompts", "0"), "--prompts must be >= 1"),
        (("--prompt-tokens", "0"), "--prompt-tokens must be >= 1"),
        (("--condition", "2"), "condition must be"),
        (("--condition", "0.5"), "--condition requires --rule thesis or public, got risk"),
        (("--rule", "thesis", "--risk", "0.1"), "--risk requires --rule risk, got thesis"),
        (("--rule", "thesys"), "did you mean 'thesis'"),
        (("--risk", "0"), "--risk must be > 0 and < 1, got 0"),
        (("--risk", "1%"), "--risk must be"),
        (("--level", "1"), "--level must be > 0 and < 1"),
        (("--priors", "even"), "priors"),
        (("--column", "txt", "--exit-layer", "2"), "txt"),
        (("--confidence", "gapp", "--exit-layer", "2"), "did you mean 'gap'"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, texts: Path, mistake_of: Callable[..., str], words: tuple[str, ...], message: str
) -> None:
    assert message in mistake_of("calibrate", str(model), "--data", str(texts), *words)
    assert not (model / "threshold.json").exists()


def test_a_preset_needs_a_place(texts: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    assert "is not a directory to write a threshold into; give --out DIR" in mistake_of(
        "calibrate", "smollm2-135m", "--data", str(texts)
    )
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert "has no text" in mistake_of("calibrate", "smollm2-135m", "--data", str(empty), "--out", str(tmp_path))


def test_a_rule_is_counted_at_its_own_threshold() -> None:
    """0.57 * 200 is less than 114 in floating point, so that rounding down would count from 0.565 on."""
    estimator = ThresholdEstimator()
    for _ in range(100):
        estimator.observe([0.569, 0.571, 0.2, 0.3], [False, True, False, False])
        estimator.end_sequence()
    assert estimator.threshold == 0.57
    assert _rule(estimator, "risk") == {"threshold": 0.57, "exiting": 0.25, "wrong": 0.0}
