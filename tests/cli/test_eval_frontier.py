"""`fathomlm eval frontier`: a picture, a table or a record, and one line for every mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from lab.analyze.tiny import model_of, saved, text_file

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["--prompts", "2", "--prompt-tokens", "4", "--max-new-tokens", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(None), tmp_path_factory.mktemp("models") / "looped"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(None, sharing="cycle", recursions=1), tmp_path_factory.mktemp("models") / "plain"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return text_file(tmp_path, "six fathoms deep the line is long. " * 3)


@pytest.fixture
def mistake(mistake_of: Any) -> Any:
    return partial(mistake_of, "eval", "frontier")


@pytest.mark.usefixtures("coarse_figures")
def test_thresholds_of_two_models(looped: str, plain: str, data: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    sweep = ["--sweep", "threshold", "--exit-layer", "3", "--thresholds", "0,1"]
    assert main(["eval", "frontier", looped, plain, "--data", data, *sweep, *SHORT, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [curve["model"] for curve in record["curves"]] == ["looped", "plain"]
    for curve in record["curves"]:
        points = {(point["kind"], point["value"]) for point in curve["points"][:3]}
        assert points == {("sweep", 0.0), ("sweep", 1.0), ("full", None)}
        adaptive = curve["points"][3]
        assert (adaptive["kind"], 0 <= adaptive["value"] <= 1) == ("adaptive", True)
        never, full = curve["points"][1], curve["points"][2]
        assert never["quality"] == full["quality"] == 1.0
        assert curve["points"][0]["exit_rate"] == 1.0
    reference = record["curves"][0]["points"][2]
    assert reference["relative_latency"] == reference["relative_flops"] == 1.0
    assert json.loads((out / "frontier.json").read_text())["curves"] == record["curves"]
    assert (out / "frontier.png").stat().st_size > 1_000


def test_calm_is_swept_to_the_smallest_threshold_that_keeps_the_quality(
    looped: str, data: str, tmp_path: Path, capsys: Any, mistake: Any
) -> None:
    calm = ["--sweep", "threshold", "--decode", "state-copy", "--min-exit-layer", "3", "--decay", "4"]
    words = [
        "eval",
        "frontier",
        looped,
        "--data",
        data,
        *calm,
        "--thresholds",
        "0,0.5,1",
        *SHORT,
        "--out",
        str(tmp_path / "a"),
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    (curve,) = json.loads((tmp_path / "a" / "frontier.json").read_text())["curves"]
    assert [point["kind"] for point in curve["points"]] == ["sweep", "sweep", "sweep", "full"], "no adaptive threshold"
    kept = [point["name"] for point in curve["points"][:3] if point["score"] >= 0.99]
    assert curve["keeps_99"] == (kept[0] if kept else None)
    assert (f"looped: {curve['keeps_99']} keeps 99% of the full model's score" in printed) == bool(kept)
    assert "--decay requires --sweep threshold" in mistake(looped, "--data", data, "--sweep", "depth", "--decay", "4")
    both = ("--sweep", "threshold", "--min-exit-layer", "3")
    assert "min_exit_layer cannot be combined with parallel decoding" in mistake(looped, "--data", data, *both)


def test_layers_and_depths_by_perplexity_as_a_table(looped: str, data: str, tmp_path: Path, capsys: Any) -> None:
    for sweep, shown in (("exit-layer", "recursion 1"), ("depth", "max. depth 1")):
        out = tmp_path / sweep
        words = ["--sweep", sweep, "--quality", "ppl", *SHORT, "--out", str(out)]
        assert main(["eval", "frontier", looped, "--data", data, *words]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert shown in printed.out.replace("\n", " ") or "max. depth" in printed.out
        assert "latency area" in printed.out
    record = json.loads((tmp_path / "depth" / "frontier.json").read_text())
    flops = [point["relative_flops"] for point in record["curves"][0]["points"]]
    assert flops == pytest.approx([4 / 8, 6 / 8, 1.0])


def test_a_metric_of_texts(plain: str, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "rows.jsonl"
    row = {"context": "A fathom is six feet.", "question": "How long?", "answers": ["six feet"]}
    data.write_text(json.dumps(row) + "\n")
    words = ["--sweep", "exit-layer", "--exit-layer", "4", "--quality", "squad", *SHORT, "--json", "--out"]
    assert main(["eval", "frontier", plain, "--data", str(data), *words, str(tmp_path / "out")]) == 0
    (curve,) = json.loads(capsys.readouterr().out)["curves"]
    assert [point["value"] for point in curve["points"]] == [4, None]
    assert all(0 <= point["quality"] <= 100 for point in curve["points"])
    data.write_text(json.dumps({"ask": row["context"], "say": row["answers"]}) + "\n")
    for prompt in ("--source=ask", "--prompt={ask}\\nHow long?"):
        given = [*words, str(tmp_path / prompt[2:8]), prompt, "--references", "say"]
        assert main(["eval", "frontier", plain, "--data", str(data), *given]) == 0
        assert json.loads(capsys.readouterr().out)["curves"][0]["points"][0]["value"] == 4


def test_mistakes_are_one_line(looped: str, plain: str, data: str, tmp_path: Path, mistake: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    threshold = ("--data", data, "--sweep", "threshold")
    assert "invalid --sweep 'breadth'" in mistake(plain, "--data", data, "--sweep", "breadth")
    assert "invalid --quality 'taste'" in mistake(plain, *threshold, "--quality", "taste")
    assert "duplicate MODEL" in mistake(plain, plain, *threshold)
    assert "has no exits of its own" in mistake(plain, *threshold)
    assert "takes one layer" in mistake(plain, *threshold, "--exit-layer", "2,3")
    assert "between 0 and 1" in mistake(plain, *threshold, "--exit-layer", "2", "--thresholds", "1,2")
    assert "--decode requires --sweep threshold" in mistake(
        looped, "--data", data, "--sweep", "depth", "--decode", "parallel"
    )
    assert "requires a looped model" in mistake(plain, "--data", data, "--sweep", "depth")
    assert "requires --sweep exit-layer" in mistake(looped, "--data", data, "--sweep", "depth", "--exit-layer", "2")
    assert "does not exist" in mistake(plain, "--data", "nowhere.txt", "--sweep", "exit-layer")
    assert "--references requires a --quality of completions" in mistake(plain, *threshold, "--references", "say")
    assert ">= 2, got 1" in mistake(plain, *threshold, "--max-new-tokens", "1")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("")
    assert "work exists" in mistake(plain, *threshold, "--exit-layer", "2", "--out", "work")
    assert not (tmp_path / "analysis").exists()
