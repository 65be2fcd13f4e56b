"""`fathomlm plan`: tables or a record, and one line for every mistake."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from lab.analyze.test_scaling import write_run


@pytest.fixture
def mistake(mistake_of: Any) -> Any:
    return partial(mistake_of, "plan")


def test_tokens_under_a_budget(capsys: Any) -> None:
    models = "smollm-135m,smollm-360m,smollm-730m,smollm-1.7b"
    words = ["plan", "--budget", "16.5e18", "--models", models, "--recursions", "3"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["isoflop"]
    ratios = {(row["base"], row["kind"]): row["relative_tokens"] for row in rows}
    assert ratios["smollm-360m", "mor"] == pytest.approx(29.7 / 19.8, rel=0.02)
    assert ratios["smollm-135m", "recursive"] == pytest.approx(50.0 / 53.3, rel=0.02)
    assert main([*words, "--wide-kv"]) == 0
    printed = capsys.readouterr().out
    for shown in ("53.3B", "76.2B", "29.7B", "14.9B", "1+10+1", "106M"):
        assert shown in printed


def test_memory_and_sizes_together(tmp_path: Path, capsys: Any) -> None:
    for hidden, loss in ((16, 3.2), (32, 3.0), (64, 3.1)):
        write_run(tmp_path / "runs" / str(hidden), hidden, loss)
    out = tmp_path / "fits.png"
    words = ["--gpu-memory", "24GB", "--models", "smollm-135m", "--ranks", "0,8", "--runs", str(tmp_path / "runs")]
    assert main(["plan", *words, "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["memory"]["bytes"] == 24 * 10**9
    assert [(row["recursions"], row["rank"]) for row in record["memory"]["rows"]] == [
        (1, 0), (2, 0), (2, 8), (2, 0), (3, 0), (3, 8), (3, 0),
    ]  # fmt: skip
    (fit,) = record["fits"]
    assert fit["inside"] is True
    assert fit["sizes"][0] < fit["best_parameters"] < fit["sizes"][-1]
    assert out.stat().st_size > 1_000
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "what fits 24 GB" in printed.replace("\n", " ")
    assert "vanilla" in printed


def test_mistakes_are_one_line(tmp_path: Path, mistake: Any) -> None:
    assert "nothing to plan: give --budget FLOPS, --runs DIR or --gpu-memory SIZE" in mistake()
    assert "--budget and --gpu-memory require --models" in mistake("--budget", "1e18")
    assert "--models requires --budget or --gpu-memory" in mistake("--runs", "x", "--models", "smollm-135m")
    assert "--out requires --runs" in mistake("--budget", "1e18", "--models", "smollm-135m", "--out", "x.png")
    models = ("--models", "smollm-135m")
    assert "--ranks requires --gpu-memory" in mistake("--budget", "1e18", *models, "--ranks", "8")
    assert "cannot read --budget 'much'" in mistake("--budget", "much", *models)
    assert ">= 2, got 1" in mistake("--budget", "1e18", *models, "--recursions", "1")
    assert "--recursions must be an integer >= 1, got 'two'" in mistake("--budget", "1e18", *models, "--recursions", "two")
    assert "takes a size such as 512MB" in mistake("--gpu-memory", "lots", *models)
    assert "unknown model 'smollm-136m' (did you mean" in mistake("--budget", "1e18", "--models", "smollm-136m")
    assert "encoder-decoder" in mistake("--budget", "1e18", "--models", "t5-small")
    assert "there is no run at" in mistake("--runs", str(tmp_path / "nowhere"))
    assert "--ranks must be >= 0, got -1" in mistake("--gpu-memory", "80GB", *models, "--ranks", "-1")
    assert "invalid --recompute 'some'" in mistake("--gpu-memory", "80GB", *models, "--recompute", "some")
