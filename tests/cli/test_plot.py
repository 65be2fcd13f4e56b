"""`fathomlm plot`: a picture, a table or a record, and one line for every mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from fathomlm.cli.main import main


@pytest.fixture
def mistake(mistake_of):
    return partial(mistake_of, "plot")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "tiny"
    directory.mkdir(parents=True)
    train = {"kind": "train", "step": 10, "tokens": 40_960, "seconds": 12.3, "loss": 5.1, "tokens_per_s": 4000.0}
    validation = {"kind": "validation", "step": 10, "tokens": 40_960, "seconds": 13.0, "loss": 4.9, "exits": {"15": 5.3}}
    (directory / "metrics.jsonl").write_text(f"{json.dumps(train)}\n{json.dumps(validation)}\n")
    return directory


def test_a_table_is_printed_beside_the_picture(run_dir, tmp_path, capsys):
    out = tmp_path / "curves.png"
    assert main(["plot", str(run_dir), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for shown in ("tiny", "40.96K", "5.1000", "4.9000", "exit after 15", "5.3000", f"wrote {out}"):
        assert shown in printed.replace("\n", "") or shown in printed
    assert out.stat().st_size > 1_000


def test_the_record_has_the_same_numbers(run_dir, tmp_path, capsys):
    out = tmp_path / "curves.svg"
    assert main(["plot", str(run_dir.parent), "--out", str(out), "--metric", "validation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "out": str(out),
        "runs": [
            {
                "run": "tiny",
                "step": 10,
                "tokens": 40_960,
                "tokens_per_s": 4000.0,
                "loss": 5.1,
                "validation": 4.9,
                "best": 4.9,
                "exits": {"15": 5.3},
            }
        ],
    }


def test_mistakes_are_one_line(run_dir, tmp_path, mistake):
    assert "required: RUN" in mistake()
    assert "there is no run at" in mistake(str(tmp_path / "nowhere"))
    assert "did you mean 'loss'" in mistake(str(run_dir), "--metric", "los")
    assert "invalid --x 'epochs'" in mistake(str(run_dir), "--x", "epochs")
    assert "--smooth must be between 0 and 0.99" in mistake(str(run_dir), "--smooth", "2")
    assert ".png, .svg or .pdf" in mistake(str(run_dir), "--out", "curves.bmp")
    assert "recorded mfu" in mistake(str(run_dir), "--metric", "mfu", "--out", str(tmp_path / "curves.png"))
