"""`fathomlm simulate`: a table or a record, "forced" and "oracle" wherever depths were, and one line for every mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.lab.simulate import thesis

pytestmark = pytest.mark.usefixtures("one_thread")
PRESET = ("--preset", "40gb/gemma-2b/2")
DEPTHS = ("--depths", "1,0.2", "--requests", "50")
OUTCOME = {
    "tokens", "seconds", "tokens_per_s", "decode_steps", "batch_size", "max_sequences",
    "batch_filled", "batch_filled_by_pass", "stages",
    "preemptions",
}  # fmt: skip
"""The form that scripts rely on: what is here may grow, and nothing may go."""


@pytest.fixture
def mistake(mistake_of: Any) -> Any:
    return partial(mistake_of, "simulate")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and the depth of the water is the measure. " * 20)
    return path


def record(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("coarse_figures")
def test_a_preset_with_drawn_depths(capsys: Any, tmp_path: Path) -> None:
    found = record(capsys, *PRESET, *DEPTHS)
    assert all(set(found[way]) >= OUTCOME for way in ("vanilla", "sequence", "depth"))
    assert found["sequences"]["source"] == "forced"
    assert found["sequences"]["label"].startswith("forced")
    assert found["sequences"]["mean_depth"] == pytest.approx(1.2, abs=0.02)
    assert (found["vanilla"]["batch_size"], found["depth"]["batch_size"], found["fill"]) == (43, 43, "free")
    assert found["delta_v"] > found["delta_seq"] > 1
    assert found == record(capsys, "throughput", *PRESET, *DEPTHS)  # the kind that nobody has to type
    assert main(["simulate", *PRESET, *DEPTHS, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for shown in ("forced", "tab_rrt:measured_generation_time_a100", "Delta_Seq", "depth-wise", "linear"):
        assert shown in printed
    written = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert written["delta_seq"] == found["delta_seq"]
    assert (tmp_path / "out" / "simulation.png").stat().st_size > 1_000


def test_policies_change_the_figures(capsys: Any) -> None:
    plain = record(capsys, *PRESET, *DEPTHS)
    exact = record(capsys, *PRESET, *DEPTHS, "--fill", "exact")
    assert exact["depth"]["tokens_per_s"] < plain["depth"]["tokens_per_s"]
    ends = record(capsys, *PRESET, *DEPTHS, "--ends")
    assert ends["sequence"]["tokens_per_s"] < plain["sequence"]["tokens_per_s"]
    assert {"core", "turn"} == set(ends["depth"]["stages"])
    padded = record(capsys, *PRESET, *DEPTHS, "--waiting", "pad")
    assert padded["vanilla"]["tokens_per_s"] < plain["vanilla"]["tokens_per_s"]
    few = record(capsys, *PRESET, *DEPTHS, "--batch-size", "8", "--plain-batch-size", "4")
    assert (few["depth"]["batch_size"], few["vanilla"]["batch_size"]) == (8, 4)


def test_a_memory_limits_rows(capsys: Any) -> None:
    found = record(capsys, *PRESET, *DEPTHS, "--gpu-memory", "5.2GB")
    assert found["vanilla"]["batch_size"] < found["depth"]["batch_size"] <= 43  # fewer unique layers leave more room
    assert found["memory"] == 5.2e9
    assert "40gb" in found["preset"]


def test_a_table_and_a_file_of_depths(capsys: Any, tmp_path: Path) -> None:
    times, depths = tmp_path / "times.json", tmp_path / "depths.jsonl"
    times.write_text(json.dumps({"name": "mine", "block": {"1": 1.0}, "plain": {"1": 3.0}}))
    depths.write_text('{"prompt": 3, "depths": [1, 1, 2, 1]}\n{"depths": [2, 1]}\n')
    found = record(capsys, "--costs", str(times), "--trajectories", str(depths), "--batch-size", "2")
    assert (found["costs"], found["sequences"]["sequences"], found["sequences"]["deepest"]) == ("mine", 2, 2)
    assert found["vanilla"]["seconds"] == pytest.approx(4 * 3e-3)
    assert found["depth"]["seconds"] == pytest.approx(5 * 1e-3)
    assert found["between_batch_sizes"] == "linear interpolation"


@pytest.mark.parametrize("how", ["oracle", "confidence"])
def test_text_through_a_model(how: str, capsys: Any, tmp_path: Path, tiny_model_dir: Path, text: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    words = (
        str(tiny_model_dir),
        "--data",
        str(text),
        "--sequences",
        "3",
        "--tokens",
        "24",
        "--depth",
        how,
        "--threshold",
        "0.2",
    )
    found = record(capsys, *words, *PRESET, "--save", str(saved))
    assert (found["sequences"]["source"], found["sequences"]["sequences"], found["sequences"]["tokens"]) == (how, 3, 72)
    assert found["sequences"]["label"].startswith(how)
    assert any("oracle" in note for note in found["notes"]) == (how == "oracle")
    again = record(capsys, "--trajectories", str(saved), *PRESET)
    assert again["sequences"] == found["sequences"]
    assert again["depth"] == found["depth"]


def test_times_measured_here(capsys: Any, tiny_model_dir: Path) -> None:
    words = (str(tiny_model_dir), "--measure", "--depths", "1,0.5", "--requests", "6", "--workload", "64-256")
    found = record(capsys, *words, "--batch-size", "2", "--context", "8")
    assert found["costs"] == "measured here (cpu)"
    assert found["depth"]["max_sequences"] == 4
    assert {"core", "turn"} <= set(found["depth"]["stages"])
    assert found["depth"]["tokens"] == 6 * 256


def test_the_thesis_tables(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_rows = thesis.all_printed("40gb")
    few = [row for row in all_rows if row.model == "gemma-2b" and (row.blocks == 1 or row.name.endswith("/2"))]
    monkeypatch.setattr(thesis, "all_printed", lambda table: few)
    out = tmp_path / "thesis.json"
    words = ["simulate", "thesis", "--table", "40gb"]
    assert main([*words, "--sequences", "300", "--json", "--out", str(out)]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["rows"][0]["printed_delta_v"] == 2.66
    assert table["rows"][0]["delta_seq"] == pytest.approx(1.88, rel=0.05)
    assert json.loads(out.read_text())["tables"] == [table]
    assert main([*words, "--sequences", "20"]) == 0
    printed = capsys.readouterr().out
    assert "gemma-2b/2" in printed
    assert "mean difference from the printed columns" in printed


def test_predicted_against_measured(capsys: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.lab.bench import workload

    old = workload.WORKLOADS["64-256"]
    short = type(old)(prompt=5, new=12, deviation=3.0, requests=8)
    monkeypatch.setitem(workload.WORKLOADS, "64-256", short)
    few = ("validate", str(tiny_model_dir), "--workload", "64-256", "--batch-size", "3", "--rounds", "1", "--requests")
    found = record(capsys, *few, "10", "--exit-rate", "0.5", "--exit-layer", "2")
    assert found["predicted_decode_steps"] == pytest.approx(found["measured_decode_steps"], rel=0.15)
    assert found["depth"].startswith("forced")
    assert (found["program"], found["batch_size"], found["max_sequences"]) == ("exits", 3, 6)
    assert found["ratio"] > 0
    # On a clock as coarse as this machine's moods, any two figures are this close, and none as close as that.
    assert main(["simulate", *few, "3", "--within", "100"]) == 0
    assert "predicted / measured" in capsys.readouterr().out
    assert main(["simulate", *few, "3", "--within", "0.0000001"]) == 1


def test_mistakes_are_one_line(tmp_path: Path, mistake: Any, tiny_model_dir: Path, text: Path) -> None:
    assert "give the times of passes with one of --preset NAME" in mistake(*DEPTHS)
    assert "give the times of passes with one of --preset NAME" in mistake(*PRESET, *DEPTHS, "--measure")
    assert "give the depths of tokens with one of --trajectories FILE" in mistake(*PRESET)
    assert "give the depths of tokens with one of --trajectories FILE" in mistake(*PRESET, *DEPTHS, "--trajectories", "x")
    assert "unknown preset '40gb/gema-2b/2' (did you mean" in mistake("--preset", "40gb/gema-2b/2", *DEPTHS)
    assert "loops its block 2 times" in mistake(*PRESET, "--depths", "1,0.5,0.2")
    assert "begin with 1, fall" in mistake(*PRESET, "--depths", "0.5,0.2")
    assert "--depths must be a number, got 'many'" in mistake(*PRESET, "--depths", "many")
    assert "--measure requires a MODEL" in mistake("--measure", *DEPTHS)
    assert "--data requires a MODEL" in mistake(*PRESET, "--data", str(text))
    assert "--ends requires --preset" in mistake("--costs", "x", *DEPTHS, "--ends")
    assert "--gpu-memory requires a MODEL or a --preset" in mistake("--costs", "x", *DEPTHS, "--gpu-memory", "1GB")
    assert "takes a size such as" in mistake(*PRESET, *DEPTHS, "--gpu-memory", "lots")
    assert "holds no sequence" in mistake(*PRESET, *DEPTHS, "--gpu-memory", "1GB")
    assert "--batch-size must be >= 1" in mistake(*PRESET, *DEPTHS, "--batch-size", "0")
    assert "cannot read times" in mistake("--costs", str(tmp_path / "none.json"), *DEPTHS)
    assert "--requests requires --depths" in mistake(*PRESET, "--trajectories", "x", "--requests", "3")
    assert "one exit between two loops" in mistake("--preset", "40gb/gemma-2b/3", "--depths", "1,1,1", "--fill", "exact")
    assert "the model has no router" in mistake(str(tiny_model_dir), *PRESET, "--data", str(text), "--depth", "router")
    assert "--depths has 3 parts, but the model has 2 recursions" in mistake(
        str(tiny_model_dir), "--measure", "--depths", "1,1,1"
    )
    assert "MODEL requires --data, --measure or --gpu-memory" in mistake(str(tiny_model_dir), *PRESET, *DEPTHS)
    assert "--sequences must be >= 1" in mistake("thesis", "--sequences", "0")
    assert "a validation forces depths" in mistake("validate", str(tiny_model_dir), "--depth", "confidence")
    assert "--within must be > 0" in mistake("validate", str(tiny_model_dir), "--within", "0")
    assert "--rounds must be >= 1" in mistake("validate", str(tiny_model_dir), "--rounds", "0")
