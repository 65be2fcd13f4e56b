from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fathomlm.cli.main import main
from fathomlm.lab.study.commands import open_place
from fathomlm.lab.study.jobs import jobs_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.pictures import draw, size_ticks
from fathomlm.lab.study.report import page, results_of
from fathomlm.lab.study.spec import build_study, read_study, shipped_studies
from lab.study.synthetic import fill, record_of
from lab.study.test_results import LEVELS, SEEDS, noise

Values = Callable[..., dict[str, Any]]
ROOT = Path(__file__).resolve().parents[3]


def test_a_page_has_table_picture_and_verdicts(values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values(seeds=SEEDS)))
    study = build_study(values(seeds=SEEDS), "test")
    fill(study, Ledger(tmp_path / "ledger"), lambda job: LEVELS[job.run.variant.name] + noise(job))
    out = tmp_path / "page" / "results.md"
    words = ["study", "report", str(tmp_path / "small.yaml"), "--ledger", str(tmp_path / "ledger"), "--out", str(out)]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdicts"][0]["verdict"] == "confirmed"
    assert answer["written"] == [str(out), str(out.with_name("results-small.png"))]
    assert out.with_name("results-small.png").read_bytes().startswith(b"\x89PNG")
    text = out.read_text()
    assert "**looping costs** (ours): *confirmed*" in text
    assert "| plain | " in text
    assert "baseline" in text
    assert "| mor | " in text
    assert "![A small study](results-small.png)" in text
    assert "sampling accuracy" in text
    first = text
    assert main(words) == 0
    assert out.read_text() == first


def test_several_budgets_are_fitted_over_sizes(values: Values, tmp_path: Path) -> None:
    widths = {f"w{h}": {"model": {"architecture": {"hidden": h, "intermediate": 2 * h}}} for h in (8, 16, 32)}
    axes = {"width": widths, "kind": {"plain": {}}}
    budgets = {"short": {"flops": "4e8"}, "long": {"flops": "8e8"}}
    study = build_study(values(variants=None, axes=axes, baseline="w16", budgets=budgets, claims=[]), "test")
    level = {"w8": 3.2, "w16": 3.0, "w32": 3.3}
    fill(study, Ledger(tmp_path), lambda job: level[job.run.variant.labels["width"]] + noise(job))
    (found,) = results_of([study], Ledger(tmp_path))
    fits = found.fits()
    assert [fit.architecture for fit in fits] == ["vanilla", "vanilla"]
    assert all(fit.inside for fit in fits)
    assert "Quadratic fits" in page([found], Path("results.md"))
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_sizes_are_named_where_they_are() -> None:
    """A study of small models had ticks at 0.0 and 0.1 million; a router makes a model a little larger."""
    assert size_ticks([0.2403, 0.0381, 0.0665, 0.038, 0.0666]) == [0.038, 0.0665, 0.2403]


def test_budgets_of_tokens_are_not_fitted_over_sizes(values: Values, tmp_path: Path) -> None:
    widths = {f"w{h}": {"model": {"architecture": {"hidden": h, "intermediate": 2 * h}}} for h in (8, 16, 32)}
    budgets = {"short": {"tokens": 5120}, "long": {"tokens": 10240}}
    study = build_study(values(variants=widths, baseline="w16", budgets=budgets, claims=[]), "test")
    fill(study, Ledger(tmp_path), lambda job: 3.0 + noise(job))
    (found,) = results_of([study], Ledger(tmp_path))
    assert found.fits() == []
    assert "Quadratic fits" not in page([found], Path("results.md"))
    draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_without_runs_the_page_says_so(tmp_path: Path) -> None:
    text = page(results_of([read_study("tiny")], Ledger(tmp_path / "none")), Path("results.md"))
    assert "No runs are finished yet." in text
    assert "No runs yet: 12 are planned." in text


def test_a_report_replaces_reports_only_and_none_by_nothing(
    values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values()))
    out = tmp_path / "results.md"
    words = ["study", "report", str(tmp_path / "small.yaml"), "--ledger", str(tmp_path / "ledger"), "--out", str(out)]
    out.write_text("# Results\n\nof years of work\n")
    assert main(words) == 2
    assert "results.md exists and is no page of `fathomlm study report`" in capsys.readouterr().err
    assert out.read_text() == "# Results\n\nof years of work\n"
    out.unlink()
    assert main(words) == 0
    first = out.read_text()
    assert "No runs are finished yet." in first
    assert main(words) == 2
    assert "the ledger has no finished runs to replace it with; is --ledger right?" in capsys.readouterr().err
    assert out.read_text() == first


def test_claims_of_one_text_are_told_apart(values: Values, tmp_path: Path) -> None:
    claim = {"text": "a", "lower": "plain", "higher": "recursive"}
    base = values(claims=[claim | {"metric": "loss"}, claim | {"metric": "next_token", "thesis": "tab_mor:main_results"}])
    study = build_study(base, "test")
    fill(study, Ledger(tmp_path), lambda job: {"plain": 3.0, "recursive": 3.1}.get(job.run.variant.name, 3.2))
    text = page(results_of([study], Ledger(tmp_path)), Path("results.md"))
    assert text.count("**a** (ours)") == text.count("**a** (`tab_mor:main_results`)") == 1


def test_a_note_and_a_missing_claim_are_said(values: Values, tmp_path: Path) -> None:
    study = build_study(values(note="Replaced by\n  another.", claims=[]), "test")
    fill(study, Ledger(tmp_path), lambda job: 3.0)
    text = page(results_of([study], Ledger(tmp_path)), Path("results.md"))
    assert "## small: A small study\n\nReplaced by another.\n\nA question of ours." in text
    assert "No claim is made here, and no verdict drawn from this table." in text
    assert "## Summary" not in text
    (found,) = results_of([build_study(values(), "test")], Ledger(tmp_path))
    assert "No claim is made here" not in page([found], Path("results.md"))


def test_the_page_in_docs_is_the_ledgers() -> None:
    studies = [study for study in map(read_study, shipped_studies()) if not study.example]
    ledger = Ledger(ROOT / "benchmarks/results/study")
    made = page(results_of(studies, ledger), Path("results.md"))
    assert (ROOT / "docs/results.md").read_text() == made, "run `fathomlm study report`"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "tinny", "--corpus", "x"], "unknown study 'tinny' (did you mean 'tiny'?)"),
        (["run", "no/such.yaml", "--corpus", "x"], "there is no study file no/such.yaml"),
        (["run", "tiny", "--corpus", "nowhere"], "there is no prepared corpus at nowhere"),
        (["run", "tiny"], "--corpus"),
        (["run", "tiny", "--corpus", "x", "--minutes", "0"], "--minutes must be > 0"),
        (["show", "rooters"], "unknown study 'rooters' (did you mean 'routers'?)"),
        (["merge", "nowhere.json"], "there is no ledger file nowhere.json"),
        (["repot"], "did you mean 'report'?"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said


def test_a_ledger_that_cannot_be_written_is_refused_before_a_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathomlm.lab.study.commands.work_off", lambda *_, **__: pytest.fail("runs were made"))
    (tmp_path / "file").write_text("")
    words = ["study", "run", "tiny", "--corpus", str(corpus), "--work", str(tmp_path / "work")]
    assert main([*words, "--ledger", str(tmp_path / "file")]) == 2
    assert f"cannot write {tmp_path / 'file'}" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_what_is_refused_leaves_no_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    (tmp_path / "text.txt").write_text("a fathom is six feet " * 200)
    options = {"sources": (str(tmp_path / "text.txt"),), "tokenizer": "bytes", "validation_fraction": 0.0}
    corpus = prepare(PrepareOptions(out=tmp_path / "corpus", **options)).path
    words = ["study", "run", "tiny", "--corpus", str(corpus), "--work", str(tmp_path / "work"), "--device", "cpu"]
    assert main([*words, "--ledger", str(tmp_path / "ledger")]) == 2
    assert "has no validation split" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "text.txt"]


def test_status_of_one_corpus(values: Values, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs on another corpus do not count, and what would take too many passes over this one is not left."""
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump(values(budgets={"short": {"steps": 8}, "huge": {"epochs": 4.5}}, seeds=[0]))
    )
    study, place = str(tmp_path / "small.yaml"), open_place(corpus)
    job = next(job for job in jobs_of(read_study(study), place) if not job.beyond)
    for mark, done in (("another", 0), (place.corpus_checksum, 1)):
        ledger = tmp_path / mark
        Ledger(ledger).add("small", [record_of(job, 1.0, data={"mark": mark})])
        assert main(["study", "status", study, "--json", "--ledger", str(ledger), "--corpus", str(corpus)]) == 0
        (row,) = json.loads(capsys.readouterr().out)["studies"]
        assert row == {"study": "small", "runs": 6, "finished": done, "failed": 0, "left": 3 - done, "beyond": 3}


def test_status_names_the_studies_of_other_corpora(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without names all studies are looked at, also those that read pairs, or have too few tokens for this corpus."""
    where = ["--ledger", str(tmp_path), "--corpus", str(corpus)]
    assert main(["study", "status", "--json", *where]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "holds tokens, and pairs are required here" in record["not_on_this_corpus"]["free-summary"]
    assert "tiny" in [row["study"] for row in record["studies"]]
    assert main(["study", "status", *where]) == 0
    assert "not on this corpus: " in capsys.readouterr().out
    assert main(["study", "status", "free-summary", *where]) == 2


def test_an_unknown_variant_is_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "run", "tiny", "--corpus", str(corpus), "--ledger", str(tmp_path), "--only", "moor"]
    assert main(words) == 2
    assert "--only moor matches no run; variants: plain, recursive, mor" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["show", "tiny"]])
def test_a_ledger_that_was_mistyped_is_not_an_empty_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *words, "--ledger", str(tmp_path / "ledgr")]) == 2
    assert "there is no ledger" in capsys.readouterr().err
