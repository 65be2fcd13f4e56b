"""The executor on tiny models: what runs have in common, stopping and going on, budgets on one plateau."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.cli.main import main
from fathomlm.errors import DataError, OutputError
from fathomlm.lab.study import guard as guards
from fathomlm.lab.study import training
from fathomlm.lab.study.guard import Guard
from fathomlm.lab.study.jobs import Place, jobs_of, recipe_of
from fathomlm.lab.study.ledger import Ledger
from fathomlm.lab.study.queue import RESERVE, Outcome, Pace, Visit, work_off
from fathomlm.lab.study.results import beside_others
from fathomlm.lab.study.spec import Study, build_study, read_study
from fathomlm.lab.study.training import TrainingExecutor
from fathomlm.train import directory as directories
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.report import SilentWatcher
from fathomlm.train.setup import build_student, make_loader
from interrupting import interrupted_everywhere

Values = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("one_thread")


def make(study: Study, corpus: Path, where: Path, visit: Visit | None = None, **options: Any) -> Outcome:
    place, ledger = Place(Corpus.open(corpus), where / "work", "cpu"), Ledger(where / "ledger")
    executor = TrainingExecutor([study], place, commit="c0ffee", **options.pop("executor", {}))
    pace = Pace([], "another device")  # so that nothing here depends on how fast this one is
    return work_off(jobs_of(study, place), ledger, executor, visit or Visit(), pace, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_variants_of_a_seed_start_alike_and_read_the_same_batches(
    values: Values, corpus: Path, tmp_path: Path, tied: bool
) -> None:
    base = values()
    base["common"]["model"]["architecture"]["tied_embeddings"] = tied
    base["variants"]["token"] = {"model": {"sharing": "middle-cycle", "recursions": 2, "router": {"kind": "token"}}}
    study, opened = build_study(base, "test"), Corpus.open(corpus)
    place = Place(opened, tmp_path, "cpu")
    weights, batches = {}, {}
    for run in study.runs():
        recipe = recipe_of(run, place)
        student = build_student(recipe, opened)
        weights[run.variant.name, run.seed] = student.decoder.state_dict()
        batches[run.variant.name, run.seed] = make_loader(recipe, opened, "train").batch_at(0, 12).tokens_BT
    looped = weights["recursive", 0]
    for name in ("mor", "token"):
        routed = weights[name, 0]
        assert set(looped) < set(routed)
        assert all(torch.equal(looped[key], routed[key]) for key in looped)
        assert any("router" in key for key in routed)
    plain = weights["plain", 0]
    assert torch.equal(plain["embed.weight"], looped["embed.weight"])
    assert not torch.equal(looped["embed.weight"], weights["recursive", 1]["embed.weight"])
    for seed in (0, 1):
        assert all(torch.equal(batches["plain", seed], batches[name, seed]) for name in ("recursive", "mor", "token"))
    assert not torch.equal(batches["plain", 0], batches["plain", 1])


def finals(where: Path, study: str = "small") -> dict[str, float]:
    return {f"{r['variant']}/{r['budget']}/{r['seed']}": r["loss"] for r in Ledger(where / "ledger").read(study)}


class Counting(SilentWatcher):
    """How many steps were trained."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        self.steps += 1


def test_a_run_whose_record_could_not_be_kept_is_not_trained_again(
    values: Values, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, watcher = build_study(values(variants={"plain": {}}, seeds=[0], claims=[]), "test"), Counting()
    again: dict[str, Any] = {"executor": {"watch": lambda job: watcher}}
    with monkeypatch.context() as full:
        full.setattr(Ledger, "add", lambda *_: (_ for _ in ()).throw(OutputError("the disk is full")))
        with pytest.raises(OutputError, match="the disk is full"):
            make(study, corpus, tmp_path, **again)
    assert watcher.steps == 8
    again = {"executor": {"watch": lambda job: watcher}}
    assert make(study, corpus, tmp_path, **again).finished == ["small/plain/short/0"]
    assert watcher.steps == 8
    make(study, corpus, tmp_path / "beside")
    assert finals(tmp_path) == finals(tmp_path / "beside")
    assert not list((tmp_path / "work").rglob("step-*"))


def test_an_interrupt_before_any_line_leaves_checkpoints_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lay_out() -> None:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        for step in (1, 2):
            (place := tmp_path / f"checkpoints/step-{step:08d}/training").mkdir(parents=True)
            (place / "state.json").touch()
            (place.parent / "model.safetensors").touch()

    def check() -> int:
        left = sorted((tmp_path / "checkpoints").glob("step-*"))
        assert all(len([path for path in each.rglob("*") if path.is_file()]) == 2 for each in left)
        lay_out()
        return len(left)

    def half(path: Path, **how: Any) -> None:
        (path / "model.safetensors").unlink()
        raise KeyboardInterrupt

    work, seen = partial(training._remove, tmp_path, spare=None), set()
    for module in (training, directories):
        lay_out()
        seen |= {check() for _ in interrupted_everywhere(work, module)}
    assert seen == {0, 1, 2}
    lay_out()
    with monkeypatch.context() as interrupted:
        interrupted.setattr("fathomlm.train.directory.shutil.rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert check() == 1


class FallingClock:
    """Time that passes only when it is looked at."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_stopped_run_goes_on_and_ends_like_one_that_was_not(values: Values, corpus: Path, tmp_path: Path) -> None:
    variants = {name: values()["variants"][name] for name in ("plain", "mor")}
    study = build_study(values(seeds=[0], variants=variants, claims=[]), "test")
    assert len(make(study, corpus, tmp_path / "whole").finished) == 2
    stopped = 0
    for _ in range(20):
        outcome = make(study, corpus, tmp_path / "parts", Visit(RESERVE + 50, FallingClock(4.0)), split=True)
        stopped += len(outcome.stopped)
        if len(finals(tmp_path / "parts")) == 2:
            break
    assert stopped >= 2
    assert finals(tmp_path / "parts") == finals(tmp_path / "whole")


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    values: Values, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    class Killer(SilentWatcher):
        def step(self, step: int, total: int, live: dict[str, Any]) -> None:
            if step == 6:
                raise Killed

    study = build_study(values(seeds=[0], variants={"plain": {}}, claims=[]), "test")
    with pytest.raises(Killed):
        make(study, corpus, tmp_path / "parts", executor={"watch": lambda job: Killer()})
    assert finals(tmp_path / "parts") == {}
    notes: list[str] = []
    monkeypatch.setattr(SilentWatcher, "note", lambda self, text: notes.append(text))
    make(study, corpus, tmp_path / "parts")
    assert any("going on from" in note for note in notes)
    make(study, corpus, tmp_path / "whole")
    assert finals(tmp_path / "parts") == finals(tmp_path / "whole")


def test_a_larger_budget_branches_from_the_plateau_and_equals_a_direct_run(
    values: Values, corpus: Path, tmp_path: Path
) -> None:
    budgets = {"short": {"steps": 8}, "long": {"steps": 16}}
    shared = {"seeds": [0], "budgets": budgets, "variants": {"plain": values()["variants"]["mor"]}, "claims": []}
    make(build_study(values(**shared, chain=True), "test"), corpus, tmp_path / "chain")
    direct = build_study(values(**shared), "test")
    make(direct, corpus, tmp_path / "direct")
    assert finals(tmp_path / "chain") == finals(tmp_path / "direct")
    assert not list((tmp_path / "chain").rglob("step-*")), "checkpoints that nobody needs are removed"
    assert beside_others(Ledger(tmp_path / "chain" / "ledger").read("small")) == set(), "a branch is no other run"
    for record in Ledger(tmp_path / "chain" / "ledger").read("small"):
        assert record["validation"][0]["step"] == 4, "a branch tells the plateau's curve too"
        assert record["steps"] == budgets[record["budget"]]["steps"]


def test_records_say_all_that_a_report_needs(values: Values, corpus: Path, tmp_path: Path) -> None:
    make(build_study(values(seeds=[0]), "test"), corpus, tmp_path)
    records = {record["variant"]: record for record in Ledger(tmp_path / "ledger").read("small")}
    mor = records["mor"]
    assert mor["loss"] == mor["final"]["causal"]
    assert {"sampling_accuracy", "dead_tokens", "next_token"} <= set(mor["final"])
    assert records["plain"]["loss"] == records["plain"]["final"]["next_token"]
    assert (mor["layout"], mor["recursions"], mor["router"], mor["unrolled_layers"]) == ("1+1+1", 2, "expert", 4)
    assert mor["commit"] == "c0ffee"
    assert mor["tokens"] == 8 * 4 * 16
    assert mor["flops"] == pytest.approx(mor["flops_per_token"] * mor["tokens"])
    assert mor["flops_per_token"] < records["recursive"]["flops_per_token"]
    assert mor["settings"]["model"]["router"] == {}
    assert mor["tokens_per_s"] > 0
    assert mor["overhead_seconds"] >= 0
    assert set(mor["validation"][0]) == {"step", "tokens", "seconds", "loss"}
    assert {"device", "torch", "code"} <= set(mor["environment"])


def test_a_loss_that_is_not_finite_is_a_failed_run(values: Values, corpus: Path, tmp_path: Path) -> None:
    changes = {"optimizer": {"lr": 1e30, "clip": 0.0}}
    study = build_study(values(seeds=[0], variants={"wild": changes, "plain": {}}, claims=[]), "test")
    outcome = make(study, corpus, tmp_path)
    assert outcome.failed == ["small/wild/short/0"]
    assert outcome.finished == ["small/plain/short/0"]
    failed = next(r for r in Ledger(tmp_path / "ledger").read("small") if r["status"] == "failed")
    assert "not finite" in failed["reason"]


def test_the_command_says_that_a_run_failed_and_refuses_a_corpus_with_more_tokens_than_the_model(
    values: Values, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**changes: Any) -> int:
        study = tmp_path / "small.yaml"
        study.write_text(json.dumps(values(seeds=[0], claims=[], **changes)))
        where = ["--corpus", str(corpus), "--work", str(tmp_path / "work"), "--ledger", str(tmp_path / "ledger")]
        return main(["study", "run", str(study), *where, "--device", "cpu"])

    few = {"model": {"architecture": {"vocab": 100}}}
    assert run(variants={"plain": {}, "few": few}) == 2
    assert "has 257 different tokens, the model only 100" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
    assert run(variants={"plain": {"optimizer": {"lr": 1e30, "clip": 0.0}}}) == 1
    assert "1 failed: small/plain/short/0" in capsys.readouterr().out


def test_the_guard_stops_a_run_that_its_first_steps_show_to_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(guards.signal, "raise_signal", raised.append)
    first = guards.SETTLED + guards.LEAST_WINDOWS * guards.WINDOW
    for split, wanted in ((False, first), (True, None)):
        now, raised[:] = [0.0], []
        visit = Visit(RESERVE + 1000.0, lambda: now[0])  # noqa: B023
        guard = Guard(SilentWatcher(), visit, tokens_per_step=10, split=split)
        stopped = None
        for step in range(1, 500):
            now[0] += 1.0
            guard.step(step, 5000, {})
            if raised and stopped is None:
                stopped = step
        assert stopped == wanted
        assert guard.rate == pytest.approx(10.0)


def stop_of(seconds: Callable[[int], float], steps: int, minutes: float, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The step at which a guard ends a run whose steps take so long, if it does."""
    raised: list[int] = []
    monkeypatch.setattr(guards.signal, "raise_signal", raised.append)
    now = [0.0]
    guard = Guard(SilentWatcher(), Visit(RESERVE + 60 * minutes, lambda: now[0]), tokens_per_step=10, split=False)
    for step in range(1, steps + 1):
        now[0] += seconds(step)
        guard.step(step, steps, {})
        if raised:
            return step
    return None


def test_the_guard_is_not_misled_by_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a translator that shared a GPU with seven others: 32 s for its first step, and another shape at step 40."""

    def seconds(step: int) -> float:
        return {1: 32.0, 40: 6.5}.get(step, 0.08)

    assert stop_of(seconds, 1800, 200 / 60, monkeypatch) is None


def test_the_guard_lets_a_slow_beginning_and_a_slow_minute_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 steps like the slow ones would not fit, all of them as they are do."""
    assert stop_of(lambda step: 0.3 if step < 55 else 0.1, 1000, 3, monkeypatch) is None
    assert stop_of(lambda step: 1.0 if 600 < step < 660 else 0.1, 1000, 3, monkeypatch) is None


def test_the_guard_sees_a_run_that_became_slow_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = stop_of(lambda step: 0.1 if step < 100 else 1.0, 1000, 5, monkeypatch)
    assert stopped is not None
    assert stopped < 250, "long before the time is over, at step 390"


def test_a_corpus_without_validation_is_refused(values: Values, tmp_path: Path) -> None:
    from fathomlm.train.data.prepare import PrepareOptions, prepare

    (tmp_path / "text.txt").write_text("a fathom is six feet " * 200)
    options = {"sources": (str(tmp_path / "text.txt"),), "tokenizer": "bytes", "validation_fraction": 0.0}
    place = prepare(PrepareOptions(out=tmp_path / "corpus", **options)).path
    with pytest.raises(DataError, match="has no validation split"):
        make(build_study(values(), "test"), place, tmp_path)


def test_the_tiny_study_from_the_command_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--ledger", str(tmp_path / "ledger")]
    words = ["study", "run", "tiny", "--corpus", str(corpus), "--work", str(tmp_path / "work"), "--device", "cpu", "--json"]
    assert main([*words, *where, "--only", "*mor/*/0"]) == 0
    assert len(json.loads(capsys.readouterr().out)["finished"]) == 2
    assert main(["study", "status", "tiny", "--json", *where]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["studies"] == [{"study": "tiny", "runs": 12, "finished": 2, "failed": 0, "left": 10}]
    assert main(["study", "merge", str(tmp_path / "ledger" / "tiny.json"), "--ledger", str(tmp_path / "home")]) == 0
    assert main(["study", "merge", str(tmp_path / "ledger" / "tiny.json"), "--ledger", str(tmp_path / "home")]) == 0
    assert capsys.readouterr().out.splitlines() == ["tiny: 2 new or better records", "tiny: 0 new or better records"]
    assert main(["study", "show", "tiny", "--json", "--corpus", str(corpus), *where]) == 0
    shown = json.loads(capsys.readouterr().out)["runs"]
    assert sorted(row["state"] for row in shown) == ["finished"] * 2 + ["left"] * 10
    assert len(read_study("tiny").runs()) == len(shown)
