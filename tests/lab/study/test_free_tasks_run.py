"""`benchmarks/free_tasks_run.py` from training to times, with models of a few thousand weights on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jsonl import write_jsonl

ROOT = Path(__file__).resolve().parents[3]
STUDY = """
name: small-free
title: Words said backwards
common:
  model:
    architecture: {family: t5, layers: 3, hidden: 32, intermediate: 64, heads: 2, gated: true, tied_embeddings: true}
    encoder: {layers: 1}
  data: {pairs: [source, target], source_length: 16, target_length: 16}
  batch: {sequences: 8, micro: 8}
  optimizer: {lr: 1.0e-3}
  evaluate: {every: 0, rows: 8}
  checkpoint: {every: 1000, keep: 1, best: false}
  log: {every: 2}
variants:
  last: {loss: {exits: {at: [1], weights: weighted}, layerwise: {shallow: 1, mapping: last}}}
  plain: {}
  calm: {model: {architecture: {layers: 5}}, loss: {exits: {at: [3, 4], weights: weighted}}}
  small-1: {model: {architecture: {layers: 1}}}
baseline: plain
budgets:
  4-steps: {steps: 4}
seeds: [0]
passes: 100
"""


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.train.data.prepare import PrepareOptions
    from fathomlm.train.data.prepare import prepare as prepare_corpus

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from free_tasks import make_tokenizer  # type: ignore[import-not-found]

    folder.mkdir(parents=True)
    words = [f"number {i} and {7 * i}" for i in range(64)]
    for split, part in (("train", words[16:]), ("validation", words[8:16]), ("test", words[:8])):
        samples = ({"source": word, "target": word[::-1], "references": [word[::-1]]} for word in part)
        write_jsonl(folder / f"{split}.jsonl", samples)
    prepare_corpus(
        PrepareOptions(
            sources=(str(folder / "train.jsonl"),),
            validation_from=(str(folder / "validation.jsonl"),),
            out=folder / "corpus",
            tokenizer=str(make_tokenizer(folder)),
            pairs=("source", "target"),
        )
    )


@pytest.mark.slow
def test_a_task_is_trained_decoded_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu")
    prepare(tmp_path / "data" / "translation", monkeypatch)
    (tmp_path / "study.yaml").write_text(STUDY)
    command = [sys.executable, str(ROOT / "benchmarks" / "free_tasks_run.py"), "translation", "--minutes", "8"]
    command += ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command += [
        "--study",
        str(tmp_path / "study.yaml"),
        "--only",
        "last/*/0,plain/*/0,calm/*/1",
        "--seeds",
        "0",
        "1",
        "--validation",
        "3",
        "--workers",
        "2",
        "--no-mps",
        "--no-compile",
    ]
    command += ["--texts", "4", "--timed", "2", "--batch", "4", "--timing", "200", "--decoding", "100", "--commit", "c0ffee"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fastest at 99 %:" in done.stdout
    assert "failed" not in done.stdout
    with tarfile.open(tmp_path / "out" / "free-translation.tgz") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    ledger = json.loads((tmp_path / "unpacked" / "ledger" / "small-free.json").read_text())
    runs = {(run["variant"], run["seed"], run["status"]) for run in ledger["runs"]}
    wanted = (("last", 0), ("plain", 0), ("calm", 1))
    assert runs == {(*each, "finished") for each in wanted}
    paths = (tmp_path / "unpacked" / "lines").glob("*.jsonl")
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    labels = {(line["kind"], line["variant"], line["label"]) for line in lines}
    assert {("texts", "last", "static 1"), ("texts", "last", "parallel 0.5"), ("texts", "plain", "full")} <= labels
    assert {("speed", "last", "parallel 0.5"), ("speed", "plain", "full")} <= labels
    assert {("validation", "last", "static 1"), ("validation", "plain", "full")} <= labels
    many = ("full", "static 3", "static 4", "parallel 0.05 at 4", "state-copy 0.3 at 4")
    assert {(kind, "calm-seed1", label) for kind in ("texts", "validation", "speed") for label in many} <= labels
    assert {line["many"] for line in lines if line["kind"] == "speed"} == {1, 2}, "a line for each turn"
    models = {(line["variant"], line["model"]) for line in lines}
    assert len(models) == 3, "every line says which model it is of"


def test_a_study_with_other_seeds_has_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from free_tasks_run import with_seeds  # type: ignore[import-not-found]

    from fathomlm.lab.study.results import planned_jobs
    from fathomlm.lab.study.spec import read_study

    shipped = read_study("free-translation")
    again = read_study(with_seeds("free-translation", [0, 3], tmp_path / "study.yaml"))
    assert (shipped.seeds, again.seeds) == ((0, 1, 2), (0, 3))
    runs = {job.name: job.fingerprint for job in planned_jobs(again)}
    known = {job.name: job.fingerprint for job in planned_jobs(shipped)}
    assert known.items() & runs.items() == {(name, mark) for name, mark in runs.items() if name.endswith("/0")}
    assert len(set(runs.values())) == 2 * len(shipped.variants)


def test_what_was_timed_in_some_turns_alone_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from free_tasks import Lines  # type: ignore[import-not-found]

    calm = SimpleNamespace(name="translation", variant="calm", mark="first")
    line = {"kind": "speed", "task": "translation", "variant": "calm", "model": "first", "label": "static 5"}
    Lines(tmp_path / "lines.jsonl").add(line | {"many": 25})
    lines = Lines(tmp_path / "lines.jsonl")
    assert lines.has("speed", calm, "static 5")
    assert not lines.has("speed", calm, "static 5", many=100)
    lines.add(line | {"many": 100})
    assert lines.has("speed", calm, "static 5", many=100)
    assert not lines.has("texts", calm, "static 5")
    calm.mark = "trained again"
    assert not lines.has("speed", calm, "static 5")
