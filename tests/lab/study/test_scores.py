"""Tasks and texts that finished models are scored on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.study.jobs import Place, jobs_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.pictures import draw, only_exit
from fathomlm.lab.study.report import exit_table, results_of, score_table
from fathomlm.lab.study.results import metric_of
from fathomlm.lab.study.scores import read_wanted
from fathomlm.lab.study.spec import build_study
from jsonl import write_jsonl

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
        write_jsonl(folder / f"{name}.jsonl", rows)
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


def test_exits_start_from_a_kept_run_and_are_scored_where_tokens_leave(
    values: Values, corpus: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Two strategies from the model that another study's run left; a frozen one leaves the last output as it was."""
    monkeypatch.chdir(tmp_path)
    looped = {"model": {"recursions": 2}}
    Path("small.yaml").write_text(json.dumps(values(seeds=[0], variants={"looped": looped}, baseline="looped", claims=[])))
    common = values()["common"]
    common["model"] = {"source": "study:small.yaml/looped/short/0"}
    common |= {
        "evaluate": {"every": 0, "rows": 4},
        "checkpoint": {"every": 100, "keep": 1, "best": False},
    }  # at the end alone
    variants = {
        "looked-at": {"loss": {"exits": {"coefficient": 0.0}}},
        "frozen": {"train": "exits", "loss": {"exits": {"head_rank": 2, "coefficient": 1.0}}},
    }
    claims = [{"text": "a head helps", "lower": "frozen", "higher": "looked-at", "metric": "exit_2"}]
    exits = values(
        name="leaving", common=common, variants=variants, baseline="looked-at", seeds=[0], claims=claims,
        scores={"lambada_openai": None, "wikitext2": None},
    )  # fmt: skip
    Path("leaving.yaml").write_text(json.dumps(exits))
    where = ["--corpus", str(corpus), "--ledger", "ledger", "--work", "work", "--device", "cpu"]
    assert main(["study", "run", "leaving.yaml", *where, "--tasks", str(tasks)]) == 2
    message = "there is no work/small/looped-short-seed0/last, from which the runs start; make it with"
    told = capsys.readouterr().err
    assert message in told
    assert "--corpus DIR --only looped/short/0 --keep --work work`, and another --ledger if the ledger has" in told
    assert not Path("work").exists()
    assert main(["study", "run", "small.yaml", *where, "--keep"]) == 0
    assert main(["study", "run", "leaving.yaml", *where, "--tasks", str(tasks), "--keep"]) == 0
    (base,), found = Ledger(Path("ledger")).read("small"), Ledger(Path("ledger")).read("leaving")
    frozen = next(record for record in found if record["variant"] == "frozen")
    assert frozen["loss"] == pytest.approx(base["loss"], abs=1e-6)
    assert frozen["settings"]["model"]["source"] == common["model"]["source"]
    assert all(set(record["exit_scores"]) == {"exit_2"} for record in found)
    capsys.readouterr()
    model = "work/leaving/frozen-short-seed0/last"
    assert (
        main(["eval", model, "--tasks", "lambada_openai", "--exit", "2", "--data", str(tasks), "--device", "cpu", "--json"])
        == 0
    )
    early, full = (output["tasks"]["lambada_openai"] for output in json.loads(capsys.readouterr().out)["outputs"])
    assert frozen["exit_scores"]["exit_2"]["lambada_openai"] == pytest.approx(early)
    assert frozen["scores"]["lambada_openai"] == pytest.approx(full)
    text = frozen["exit_scores"]["exit_2"]["wikitext2"]["nats_per_token"]
    assert metric_of(frozen, "exit_2.wikitext2") == text
    results = results_of([build_study(exits, "test")], Ledger(Path("ledger")))[0]
    table = exit_table(results)
    assert table is not None
    assert table[0][1:3] == ["loss, layer 2", "loss, full"]
    assert table[2] == [
        "frozen", f"{frozen['final']['exit_2']:.4f}", f"{frozen['loss']:.4f}", f"{100 * early['acc']:.1f}",
        f"{100 * full['acc']:.1f}", f"{text:.4f}", f"{frozen['scores']['wikitext2']['nats_per_token']:.4f}",
    ]  # fmt: skip
    assert results.judged[0].found is not None
    assert [len(record["validation"]) for record in found] == [1, 1]
    assert only_exit(results) == "exit_2"
    draw(results, tmp_path / "leaving.png")
    assert only_exit(results_of([build_study(values(seeds=[0]), "test")], Ledger(Path("nothing")))[0]) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("study:tiny", "must be study:STUDY/VARIANT/BUDGET/SEED"),
        ("study:tinny/plain/short/0", "unknown study 'tinny'"),
        ("study:uptrain/15x3/10M/0", "unknown variant '15x3'"),
        ("study:uptrain/15x2/2M/0", "unknown budget '2M'"),
    ],
)
def test_a_run_to_start_from_must_be_one(values: Values, source: str, message: str) -> None:
    common = values()["common"] | {"model": {"source": source}}
    study = build_study(values(common=common, variants={"plain": {}}, claims=[]), "test")
    with pytest.raises(OptionError, match=message):
        jobs_of(study, Place(None, Path()))


def test_a_study_does_not_start_from_itself(values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common = values()["common"] | {"model": {"source": "study:own.yaml/plain/short/0"}}
    own = values(name="own", common=common, variants={"plain": {}}, claims=[])
    Path("own.yaml").write_text(json.dumps(own))
    with pytest.raises(OptionError, match=r"study own: .* must be a run of another study"):
        jobs_of(build_study(own, "test"), Place(None, Path()))


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
