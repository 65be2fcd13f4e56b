"""Tasks and texts that finished models are scored on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.report import results_of, score_table
from fathomlm.lab.study.results import metric_of
from fathomlm.lab.study.scores import read_wanted
from fathomlm.lab.study.spec import build_study

Values = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("one_thread")
SCORES = {"lambada_openai": 3, "hellaswag": None, "wikitext2": None}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = [{"id": str(n), "text": f"line {n} is so", "context": f"line {n} is", "target": "so"} for n in range(5)]
    choices = ["fathoms", "feet", "ells"]
    chosen = [{"id": str(n), "context": f"a line of {n}", "choices": choices, "gold": n % 3} for n in range(4)]
    texts = [{"text": "so many"}, {"text": "fathoms"}]
    for name, rows in {"lambada_openai_test": words, "hellaswag_val": chosen, "wikitext2_valid": texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_is_scored_as_eval_would(
    values: Values, corpus: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = values(scores=SCORES, seeds=[0], variants={"plain": {}}, claims=[])
    (tmp_path / "small.yaml").write_text(json.dumps(base))
    where = ["--corpus", str(corpus), "--ledger", str(tmp_path / "ledger"), "--work", str(tmp_path / "work")]
    run = ["study", "run", str(tmp_path / "small.yaml"), *where, "--tasks", str(tasks), "--keep", "--device", "cpu"]
    assert main(run) == 0
    (record,) = Ledger(tmp_path / "ledger").read("small")
    scores = record["scores"]
    assert [scores[name].get("examples") for name in SCORES] == [3, 4, None]
    model = str(tmp_path / "work" / "small" / "plain-short-seed0" / "last")
    capsys.readouterr()
    assert main(["eval", model, "--tasks", "hellaswag", "--data", str(tasks), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["outputs"][0]["tasks"]["hellaswag"]
    assert scores["hellaswag"] == pytest.approx(told)
    text = str(tasks / "wikitext2_valid.jsonl")
    assert main(["eval", "ppl", model, "--data", text, "--join", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["outputs"][0]
    assert scores["wikitext2"]["nats_per_token"] == pytest.approx(told["nats_per_token"])
    assert metric_of(record, "hellaswag") == scores["hellaswag"]["acc_norm"]
    table = score_table(results_of([build_study(base, "test")], Ledger(tmp_path / "ledger"))[0])
    assert table is not None
    assert table[0] == ["variant", *SCORES]
    assert table[1][0] == "plain"
    assert "±" in table[1][1]
    assert table[1][3] == f"{scores['wikitext2']['nats_per_token']:.4f}"


def test_what_is_to_be_scored_is_checked_first(values: Values, tasks: Path) -> None:
    study = build_study(values(scores=SCORES), "test")
    with pytest.raises(OptionError, match="--tasks"):
        read_wanted(study, None)
    with pytest.raises(DataError, match="piqa"):
        read_wanted(build_study(values(scores={"piqa": 5}), "test"), tasks)
    assert read_wanted(build_study(values(), "test"), None) == {}
    for wrong in (["hellaswag"], {"hellaswag": 0}, {"hellaswag": "all"}):
        with pytest.raises(OptionError, match="scores must name tasks"):
            build_study(values(scores=wrong), "test")
