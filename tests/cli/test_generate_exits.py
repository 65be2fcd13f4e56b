"""`fathomlm generate` and `chat` with tokens that leave early: what is said of it, and one line for every mistake."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.calibration import Calibration
from fathomlm.decode.exiting import SERVED_MODES, Exiting
from fathomlm.decode.full import Session, generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.model.hub import FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, NEW = "the depth of the water", 12
MODES: list[tuple[str, ...]] = [
    ("static",),
    ("state-copy", "--threshold", "0.05"),
    ("parallel", "--threshold", "0.05"),
    ("parallel", "--threshold", "0.02", "--refine", "0.5", "--max-stack", "4"),
    ("speculative", "--threshold", "0.02", "--confidence", "max"),
    ("oracle",),
]


def setting(words: tuple[str, ...]) -> Exiting:
    """The same from Python."""
    pairs = {name[2:].replace("-", "_"): value for name, value in zip(words[1::2], words[2::2], strict=True)}
    kinds: dict[str, Any] = {"threshold": float, "refine": float, "max_stack": int, "confidence": str}
    options = {name: kinds[name](value) for name, value in pairs.items()}
    return Exiting(mode=words[0], exit_layers=(2,), **options)  # type: ignore[arg-type]


@pytest.fixture
def run(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def call(*words: str, place: Path = tiny_model_dir) -> tuple[str, str]:
        assert main(["generate", str(place), "-p", PROMPT, "--max-new-tokens", str(NEW), *words]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.mark.parametrize("words", MODES, ids=lambda words: "-".join(words[::2]))
def test_the_record_says_where_each_token_was_chosen(
    run: Callable[..., tuple[str, str]], tiny_model: FathomForCausalLM, words: tuple[str, ...]
) -> None:
    out, err = run("-p", "a fathom", "--decode", *words, "--exit-layer", "2", "--json", "--reference")
    record = json.loads(out)
    expected = generate(tiny_model, [PROMPT, "a fathom"], max_new_tokens=NEW, exiting=setting(words))
    assert err == ""
    for row, result in zip(record["results"], expected, strict=True):
        assert row["tokens"] == list(result.tokens)
        assert row["exit_layers"] == list(result.exit_layers or ())
        assert row["confidences"] == (None if result.confidences is None else pytest.approx(list(result.confidences)))
        assert row["agreements"] == (None if result.agreements is None else list(result.agreements))
        assert row["oracle"] == (words[0] == "oracle")
        assert row["exits"]["deep_passes"] == (result.exits.deep_passes if result.exits else None)
    exits = record["exits"]
    layers = [layer for row in record["results"] for layer in row["exit_layers"]]
    assert (exits["mode"], exits["oracle"], exits["exit_layers"], exits["layers"]) == (
        words[0],
        words[0] == "oracle",
        [2],
        4,
    )
    assert exits["exit_rate"] == layers.count(2) / len(layers)
    assert exits["mean_exit_layer"] == sum(layers) / len(layers)
    assert exits["threshold"] == (float(words[2]) if "--threshold" in words else None)


def test_full_decoding_is_what_there_is_without(run: Callable[..., tuple[str, str]]) -> None:
    plain, full = (json.loads(run("--json", *words)[0]) for words in ((), ("--decode", "full")))
    assert plain["results"][0]["tokens"] == full["results"][0]["tokens"]
    assert plain["exits"] is full["exits"] is None
    assert full["results"][0]["exit_layers"] is None


def test_the_statistic_shows_the_exit_rate(run: Callable[..., tuple[str, str]]) -> None:
    for words in MODES:
        record = json.loads(run("--decode", *words, "--exit-layer", "2", "--json")[0])
        rate, mean = record["exits"]["exit_rate"], record["exits"]["mean_exit_layer"]
        _, err = run("--decode", *words, "--exit-layer", "2")
        assert f": {rate:.0%} exited early, mean exit layer {mean:.2f} of 4" in err
        assert err.count("\n") == 1
        threshold = record["exits"]["threshold"]
        assert ("threshold" in err) == (threshold is not None)
        assert threshold is None or f"threshold {threshold:.2f}" in err
        assert ("drafts accepted" in err) == ("--refine" in words or words[0] == "speculative")
        assert ("oracle (it knows the last layer's choice): " in err) == (words[0] == "oracle")


def test_streamed_text_is_the_same(run: Callable[..., tuple[str, str]]) -> None:
    for words in MODES:
        exits = ("--decode", *words, "--exit-layer", "2")
        assert run(*exits, "--stream")[0] == run(*exits)[0]


@pytest.mark.parametrize("words", [("full",), *MODES])
def test_the_engine_says_what_the_reference_says(words: tuple[str, ...], run: Callable[..., tuple[str, str]]) -> None:
    words = ("--decode", *words, *(() if words == ("full",) else ("--exit-layer", "2")))
    plain = run(*words, "--reference")[0]
    assert run(*words)[0] == plain
    assert run(*words, "--stream")[0] == plain
    found, wanted = (json.loads(run(*words, "--json", *more)[0]) for more in ((), ("--reference",)))
    served = words[1] in ("full", *SERVED_MODES) and "--refine" not in words
    assert (found["decoder"], wanted["decoder"]) == ("engine" if served else "reference", "reference")
    if words[1] != "speculative":  # which tokens are drafts there depends on when they are verified
        assert found["results"][0]["exit_layers"] == wanted["results"][0]["exit_layers"]


def test_several_exits_in_one_option_or_more(run: Callable[..., tuple[str, str]]) -> None:
    ways = [("--exit-layer", "1,3"), ("--exit-layer", "1", "--exit-layer", "3"), ("--exit-layer", " 3, 1")]
    records = [json.loads(run("--decode", "state-copy", "--threshold", "0.05", *way, "--json")[0]) for way in ways]
    assert {tuple(record["exits"]["exit_layers"]) for record in records} == {(1, 3)}
    assert len({tuple(record["results"][0]["exit_layers"]) for record in records}) == 1
    (least,) = [json.loads(run("--decode", "oracle", "--min-exit-layer", "2", "--json")[0])]
    assert least["exits"]["exit_layers"] == [2, 3]


def test_an_adaptive_threshold_starts_from_what_is_beside_the_model(
    run: Callable[..., tuple[str, str]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    words = ("--decode", "parallel", "--exit-layer", "2", "--threshold", "adaptive")
    fresh = json.loads(run(*words, "--json")[0])["exits"]
    assert (fresh["threshold"], fresh["adaptive"]) == (1.0, True), "nothing exits that nothing was learnt of"
    place = tmp_path / "calibrated"
    shutil.copytree(tiny_model_dir, place)
    learnt = ThresholdEstimator(ThresholdOptions(initial=0.05))
    Calibration(exit_layer=2, confidence="gap", estimator=learnt).save(place / "threshold.json")
    calibrated = json.loads(run(*words, "--json", place=place)[0])["exits"]
    assert calibrated["threshold"] == 0.05
    assert calibrated["exit_rate"] > fresh["exit_rate"]
    said = run(*words, place=place)[1]
    assert "threshold 0.05" in said
    assert "no token exits" not in said
    learnt = ThresholdEstimator(ThresholdOptions(calibrating_sequences=1), sequences=1)
    Calibration(exit_layer=2, confidence="gap", estimator=learnt).save(place / "threshold.json")
    assert f"no token exits: the threshold in {place / 'threshold.json'} is 1" in run(*words, place=place)[1]


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--threshold", "0.5"), "--threshold requires --decode, such as --decode parallel"),
    (("--exit-layer", "2"), "--exit-layer requires --decode, such as --decode parallel"),
    (("--max-stack", "2"), "--max-stack requires --decode, such as --decode parallel"),
    (("--refine", "0"), "--refine requires --decode, such as --decode parallel"),
    (("--draft-tree", "2,2"), "--draft-tree requires --decode, such as --decode speculative"),
    (("--decay", "1"), "--decay requires --decode, such as --decode state-copy"),
    (("--decode", "paralel"), "invalid --decode 'paralel' (did you mean 'parallel'?)"),
    (("--decode", "full", "--threshold", "0.5"), "threshold cannot be combined with full decoding, only with state-copy"),
    (("--decode", "parallel"), "has no exits of its own; give an exit layer: 2, where its recursions end"),
    (("--decode", "parallel", "--exit-layer", "two"), "--exit-layer must be an integer >= 1, got 'two'"),
    (("--decode", "parallel", "--exit-layer", "-1"), "--exit-layer must be >= 1, got -1"),
    (("--decode", "parallel", "--exit-layer", "0"), "--exit-layer must be >= 1, got 0"),
    (("--decode", "parallel", "--exit-layer", "4"), "exit layers must be between 1 and 3 for this model's 4 layers, got 4"),
    (
        ("--decode", "speculative", "--exit-layer", "1,3"),
        "speculative decoding has one exit, and here are 2, after layers",
    ),
    (
        ("--decode", "parallel", "--exit-layer", "2", "--threshold", "high"),
        "--threshold must be between 0 and 1, or adaptive, got 'high'",
    ),
    (
        ("--decode", "parallel", "--exit-layer", "2", "--threshold", "2"),
        "--threshold must be between 0 and 1, or adaptive, got '2'",
    ),
    (("--decode", "parallel", "--exit-layer", "2", "--threshold", "nan"), "threshold must be between 0"),
    (("--decode", "parallel", "--exit-layer", "2", "--refine", "-1"), "refine must be >= 0, got -1.0"),
    (("--decode", "parallel", "--exit-layer", "2", "--confidence", "vibes"), "invalid --confidence 'vibes'"),
    (("--decode", "parallel", "--exit-layer", "2", "--confidence", "classifier"), "this model has none. gap, max and state"),
    (("--decode", "parallel", "--exit-layer", "2", "--max-depth", "1"), "--max-depth cannot be combined with --decode"),
    (("--decode", "state-copy", "--exit-layer", "2", "--refine", "1"), "refine cannot be combined with state-copy decoding"),
]


@pytest.mark.parametrize("verb", ["generate", "chat"])
@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, verb: str, tiny_model_dir: Path, mistake_of: Callable[..., str]
) -> None:
    prompt = ("-p", PROMPT) if verb == "generate" else ()
    assert message in mistake_of(verb, str(tiny_model_dir), *prompt, *words)


def test_a_model_with_a_router_is_refused(tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    save(convert(tiny_model_dir, router="expert"), tmp_path / "routed")
    said = mistake_of("generate", str(tmp_path / "routed"), "-p", PROMPT, "--decode", "parallel", "--exit-layer", "2")
    assert "parallel decoding cannot be combined with a router, which already chooses each token's depth" in said


def test_a_damaged_calibration_is_said(tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    for name in ("threshold.json", "config.json"):
        (tmp_path / name).write_text("{")
    words = ("--decode", "parallel", "--exit-layer", "2", "--threshold", "adaptive")
    assert "threshold.json is not valid JSON" in mistake_of("generate", str(tmp_path), "-p", "a", *words)


def test_chat_leaves_early_too(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    model = load(tiny_model_dir)
    session = Session(model, exiting=setting(MODES[2]))
    first = session.generate(chat_prompt(model, messages), max_new_tokens=8)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and the fox?"}]
    second = session.generate(chat_prompt(model, messages), max_new_tokens=8)
    assert len({*(first.exit_layers or ()), *(second.exit_layers or ())}) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nand the fox?\n"))
    words = ("--max-new-tokens", "8", "--decode", *MODES[2], "--exit-layer", "2")
    assert main(["chat", str(tiny_model_dir), *words]) == 0
    assert capsys.readouterr().out == f"{first.text}\n{second.text}\n"
