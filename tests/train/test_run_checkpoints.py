"""Checkpoints of whole runs: resumed bit for bit, branched, kept and removed, and whole when the disk is full."""

from __future__ import annotations

import errno
import math
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

import fathomlm
from fathomlm.errors import CheckpointError, OptionError, OutputError, TrainingError
from fathomlm.train import checkpoint as checkpoint_module
from fathomlm.train import report as report_module
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import train
from fathomlm.train.state import read_state

pytestmark = pytest.mark.usefixtures("one_thread")


def curve(directory, kind="train"):
    return [(r["step"], r["loss"], r["parts"]) for r in read_records(directory / "metrics.jsonl") if r["kind"] == kind]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def same_end(one, other):
    for name in ("model.safetensors", "training/optimizer-00000-of-00001.safetensors", "training/random.safetensors"):
        assert (one / "last" / name).read_bytes() == (other / "last" / name).read_bytes()
    return True


class Falls(SilentWatcher):
    """An error of our own making in the third step."""

    def step(self, step, total, live):
        if step == 3:
            raise ZeroDivisionError


class StopAt(SilentWatcher):
    """Sends this process a signal once a step is done, as a scheduler or a user would."""

    def __init__(self, step, number=signal.SIGTERM):
        self._at, self._number = step, number

    def step(self, step, total, live):
        if step == self._at:
            os.kill(os.getpid(), self._number)


SETTINGS = {
    "plain": {},
    "adafactor": {"optimizer": {"kind": "adafactor", "lr": 1e-3}},
    "muon": {"optimizer": {"kind": "muon", "lr": 1e-3}},
    "lora": {"model": {"relax": "lora", "rank": 2}, "train": "relaxation"},
    "exits": {"loss": {"exits": {"head_rank": 2, "distill": "forward_kl"}, "layerwise": {"shallow": 2}}},
    "bf16": {"precision": "bf16"},
    "masked": {"data": {"document_mask": True}},
}


@pytest.mark.parametrize(("name", "number"), [("plain", signal.SIGINT), *((name, signal.SIGTERM) for name in SETTINGS)])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(name, number, recipe, tmp_path):
    changes = {**SETTINGS[name], "budget": {"steps": 8}}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(recipe(**changes, out=str(whole)))
    before = signal.getsignal(number)
    summary = train(recipe(**changes, out=str(parted)), watcher=StopAt(3, number))
    assert signal.getsignal(number) is before
    assert not summary.finished
    assert 3 <= summary.step <= 4
    assert (parted / "last").resolve().name == f"step-0000000{summary.step}"
    assert curve(parted) == curve(whole)[: summary.step]
    summary = train(recipe(**changes, out=str(parted)), resume=True)
    assert (summary.finished, summary.step) == (True, 8)
    assert curve(parted) == curve(whole)
    assert same_end(whole, parted)


class Impatient(StopAt):
    def step(self, step, total, live):
        super().step(step, total, live)
        super().step(step, total, live)


def test_interrupts_that_come_together_are_one(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("fathomlm.train.loop.TOGETHER", math.inf)
    assert not train(recipe(), watcher=Impatient(3, signal.SIGINT)).finished
    assert (tmp_path / "run/last").resolve().name in ("step-00000003", "step-00000004")


def test_a_second_interrupt_breaks_off_at_once(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("fathomlm.train.loop.TOGETHER", -1.0)
    changes = {"checkpoint": {"every": 2}}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(**changes), watcher=Impatient(3, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is before
    assert names(tmp_path / "run/checkpoints") == ["step-00000002"]
    assert train(recipe(**changes), resume=True).finished


def test_records_of_a_future_that_is_lived_again_are_dropped(recipe, tmp_path):
    changes = {"checkpoint": {"every": 2}, "evaluate": {"every": 1}}
    train(recipe(**changes))
    out = tmp_path / "run"
    wanted = curve(out), curve(out, "validation")
    shutil.rmtree(out / "checkpoints/step-00000006")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 7, "lo')
    train(recipe(**changes), resume=True)
    assert (curve(out), curve(out, "validation")) == wanted
    assert all(line.endswith("}") for line in (out / "metrics.jsonl").read_text().splitlines())


def test_a_finished_run_is_resumed_at_once(recipe, tmp_path):
    first = train(recipe())
    again = train(recipe(), resume=True)
    assert (again.step, again.validation, again.finished) == (first.step, first.validation, True)
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_resume_without_a_run_starts_one(recipe):
    assert train(recipe(), resume=True).finished


def test_a_run_is_not_overwritten(recipe, tmp_path):
    train(recipe())
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(TrainingError, match=r"holds a run at step 6; --resume continues it, --out names another"):
        train(recipe())
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"lr": 1e-4}}, r"optimizer.lr \(was 0.003, is 0.0001\). --resume goes on with the same recipe"),
        ({"seed": 1}, r"seed \(was 0, is 1\)"),
        ({"budget": {"steps": 9}}, r"budget.steps \(was 6, is 9\)"),
        ({"loss": {"exits": {}}}, r"loss.exits \(was None, is"),
        ({"batch": {"sequences": 8}}, r"batch.sequences \(was 4, is 8\)"),
    ],
)
def test_another_recipe_does_not_resume(changes, message, recipe):
    train(recipe())
    with pytest.raises(TrainingError, match=message):
        train(recipe(**changes), resume=True)


def test_how_a_run_is_run_may_change(recipe, tmp_path):
    train(recipe(), watcher=StopAt(2))
    changes = {"batch": {"micro": 4}, "log": {"every": 2}, "recompute": "layer", "loss": {"chunk": 5}}
    assert train(recipe(**changes, checkpoint={"every": 2}, name="other"), resume=True).finished


def test_the_data_may_move_but_not_change(recipe, token_corpus, tmp_path):
    train(recipe(), watcher=StopAt(2))
    moved = tmp_path / "moved"
    shutil.copytree(token_corpus, moved)
    train(recipe(data={"path": str(moved)}), watcher=StopAt(4), resume=True)
    (tmp_path / "text.txt").write_text("other words")
    prepare(PrepareOptions(sources=(str(tmp_path / "text.txt"),), out=moved, tokenizer="bytes", force=True))
    with pytest.raises(TrainingError, match=r"was trained on other data than .*moved holds now"):
        train(recipe(data={"path": str(moved)}), resume=True)
    assert train(recipe(), resume=True).finished


# --- branches of a trapezoid ---


def trapezoid(steps, **schedule):
    return {"budget": {"steps": steps}, "schedule": {"kind": "trapezoid", "warmup": 3, "cooldown": 0.25, **schedule}}


@pytest.fixture
def long_run(recipe, tmp_path):
    """Forty steps, flat from 3 to 30."""
    out = tmp_path / "long"
    train(recipe(**trapezoid(40), out=str(out), checkpoint={"every": 1000, "keep": 1, "milestones": [12, 15, 35]}))
    assert names(out / "checkpoints") == [f"step-000000{n}" for n in (12, 15, 35, 40)]
    return out / "checkpoints"


def test_a_plateau_checkpoint_is_cooled_down_for_a_smaller_budget(long_run, recipe, tmp_path):
    direct, branch = tmp_path / "direct", tmp_path / "branch"
    train(recipe(**trapezoid(20), out=str(direct)))
    start = long_run / "step-00000012"
    source = {path: path.read_bytes() for path in start.rglob("*") if path.is_file()}
    summary = train(recipe(**trapezoid(20), out=str(branch), branch_from=str(start)))
    assert (summary.step, summary.finished) == (20, True)
    assert curve(branch) == curve(direct)[12:]
    assert same_end(direct, branch)
    assert {path: path.read_bytes() for path in source} == source
    other = tmp_path / "other"  # from the very end of the plateau, stopped and resumed on the way
    stopped = train(recipe(**trapezoid(20), out=str(other), branch_from=str(long_run / "step-00000015")), watcher=StopAt(17))
    assert not stopped.finished
    train(recipe(**trapezoid(20), out=str(other), branch_from=str(long_run / "step-00000015")), resume=True)
    assert curve(other) == curve(direct)[15:]
    assert same_end(direct, other)


def test_branches_that_would_not_be_direct_runs_are_refused(long_run, recipe, tmp_path):
    cases = {
        "is at step 15, past the plateau: its own run cools down from step 30, this budget from step 12": (
            15,
            trapezoid(16),
        ),
        "is at step 35, past the plateau: its own run cools down from step 30, this budget from step 75": (
            35,
            trapezoid(100),
        ),
        "warmed up over 3 steps, this recipe over 2": (12, trapezoid(20, warmup=2)),
        "another recipe: optimizer.lr (was 0.003, is 0.001). a branch changes only": (
            12,
            {**trapezoid(20), "optimizer": {"lr": 1e-3}},
        ),
        "branch_from requires schedule.kind: trapezoid in both runs, got cosine and trapezoid": (
            12,
            {**trapezoid(20), "schedule": {"kind": "cosine", "warmup": 3}},
        ),
        "is not a training checkpoint (missing training/state.json)": (99, trapezoid(20)),
    }
    for message, (step, changes) in cases.items():
        with pytest.raises((TrainingError, CheckpointError)) as caught:
            train(recipe(**changes, out=str(tmp_path / "x"), branch_from=str(long_run / f"step-000000{step}")))
        assert message in str(caught.value)
        assert not (tmp_path / "x").exists()


# --- what is kept ---


def fixed_validation(monkeypatch, values):
    from fathomlm.train.loop import Stepper

    found = iter(values)
    monkeypatch.setattr(Stepper, "validate", lambda self, loader, rows: ({"next_token": next(found)}, 1))


def test_the_last_the_best_and_milestones_are_kept(recipe, monkeypatch, tmp_path):
    fixed_validation(monkeypatch, [5, 2, 4, 3, 6, 7, 8, 9])
    train(recipe(budget={"steps": 8}, checkpoint={"every": 1, "keep": 2, "milestones": [1, 5]}))
    out = tmp_path / "run"
    assert names(out / "checkpoints") == [f"step-0000000{n}" for n in (1, 2, 5, 7, 8)]
    assert os.readlink(out / "last") == "checkpoints/step-00000008"
    assert os.readlink(out / "best") == "checkpoints/step-00000002"
    assert names(out) == ["best", "checkpoints", "last", "metrics.jsonl", "recipe.yaml"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({"keep": 1, "best": False}, [6]), ({"keep": 0}, [1, 2, 3, 4, 5, 6]), ({"keep": 9}, [1, 2, 3, 4, 5, 6])],
)
def test_how_many_are_kept(fields, kept, recipe, monkeypatch, tmp_path):
    fixed_validation(monkeypatch, [1, 2, 3, 4, 5, 6])
    train(recipe(checkpoint={"every": 1, **fields}))
    assert names(tmp_path / "run/checkpoints") == [f"step-0000000{n}" for n in kept]
    assert (tmp_path / "run/best").exists() == fields.get("best", True)


def test_a_milestone_between_two_checkpoints_is_made_too(recipe, tmp_path):
    train(recipe(checkpoint={"every": 4, "milestones": [3]}))
    assert names(tmp_path / "run/checkpoints") == [f"step-0000000{n}" for n in (3, 4, 6)]


def test_the_best_is_remembered_over_a_resume(recipe, monkeypatch, tmp_path):
    fixed_validation(monkeypatch, [4, 1, 3, 2, 2, 2, 2])
    changes = {"checkpoint": {"every": 1, "keep": 1}}
    train(recipe(**changes), watcher=StopAt(3))
    summary = train(recipe(**changes), resume=True)
    assert summary.best == 1
    assert (tmp_path / "run/best").resolve().name == "step-00000002"


def test_what_a_killed_run_left_is_put_right(recipe, tmp_path):
    """Killed between writing a checkpoint and pointing at it, and with temporary files about."""
    train(recipe(checkpoint={"every": 3}))
    out = tmp_path / "run"
    (out / "last").unlink()
    (out / "best").unlink()
    (out / ".last.fresh-99999999").symlink_to("checkpoints")
    (out / ".recipe.yaml.partial-99999999").write_text("half")
    (out / "checkpoints/.step-00000009.partial-99999999").mkdir()
    (out / "checkpoints/.step-00000009.partial-99999999/model.safetensors").write_text("half")
    train(recipe(checkpoint={"every": 3}), resume=True)
    assert names(out) == ["best", "checkpoints", "last", "metrics.jsonl", "recipe.yaml"]
    assert names(out / "checkpoints") == ["step-00000003", "step-00000006"]
    assert (out / "last").resolve().name == (out / "best").resolve().name == "step-00000006"


@pytest.mark.parametrize(
    "changes", [{}, {"loss": {"exits": {"head_rank": 2}}}, {"model": {"relax": "lora", "rank": 2}}, {"precision": "bf16"}]
)
def test_a_checkpoint_is_a_model(changes, recipe, tmp_path):
    train(recipe(**changes))
    model = fathomlm.load(tmp_path / "run/last")
    words = model.tokenizer("the line is", return_tensors="pt").input_ids
    assert model.generate(words, max_new_tokens=5, do_sample=False).shape[1] <= words.shape[1] + 5
    record = read_state(tmp_path / "run/last")
    assert (record.progress.step, record.progress.rows) == (6, 24)
    assert record.recipe["budget"]["steps"] == 6


def test_a_checkpoint_is_where_training_goes_on_as_a_source(recipe, tmp_path):
    train(recipe())
    model = {"architecture": None, "source": str(tmp_path / "run/last"), "recursions": 1}
    summary = train(recipe(model=model, out=str(tmp_path / "more"), loss={"exits": {}}, budget={"steps": 2}))
    assert summary.exits.keys() == {"2"}
    with pytest.raises(OptionError, match=r"is recursive already; leave out model\.recursions"):
        train(recipe(model={**model, "recursions": 2}, out=str(tmp_path / "x")))


def test_exit_heads_of_another_rank_start_afresh(recipe, tmp_path):
    train(recipe(loss={"exits": {"head_rank": 2}}))
    model = {"architecture": None, "source": str(tmp_path / "run/last"), "recursions": 1}
    exits = {"exits": {"head_rank": 3}}
    summary = train(recipe(model=model, out=str(tmp_path / "more"), loss=exits, budget={"steps": 2}))
    assert summary.exits.keys() == {"2"}


# --- the disk is full ---


def full_from_start(monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))


def full_midway(monkeypatch):
    whole = checkpoint_module.save_file

    def save(tensors, path):
        if path.name == "random.safetensors":  # the last tensors of a checkpoint: all others are written
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", save)


@pytest.mark.parametrize(
    ("fill", "message"),
    [(full_from_start, "MB are free there"), (full_midway, "No space left on device; nothing was left behind")],
)
def test_a_full_disk_leaves_earlier_checkpoints_to_go_on_from(fill, message, recipe, monkeypatch, tmp_path):
    changes = {"checkpoint": {"every": 2}}
    train(recipe(**changes, out=str(tmp_path / "whole")))
    out = tmp_path / "run"
    train(recipe(**changes), watcher=StopAt(1))
    saved = names(out / "checkpoints")
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(OutputError, match=message):
            train(recipe(**changes), resume=True)
    assert names(out / "checkpoints") == saved
    assert names(out) == ["best", "checkpoints", "last", "metrics.jsonl", "recipe.yaml"]
    train(recipe(**changes), resume=True)
    assert curve(out) == curve(tmp_path / "whole")
    assert same_end(tmp_path / "whole", out)


def test_a_full_disk_where_records_go_is_said_in_words(recipe, monkeypatch, tmp_path):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        close = flush = lambda self: self.write("")

    start = report_module.Reporter.__init__

    def init(self, *args, **more):
        start(self, *args, **more)
        self._file = Full()

    monkeypatch.setattr(report_module.Reporter, "__init__", init)
    with pytest.raises(OutputError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        train(recipe())


def test_a_directory_that_cannot_be_is_said_in_words(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file/run"):
        train(recipe(out=str(tmp_path / "file/run")))


# --- other places that records go to ---


def test_tensorboard_is_written_by_default(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe(log={"tensorboard": True}, loss={"exits": {}}))
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    assert {"train/loss", "train/parts/exit_2", "train/lr", "validation/loss", "validation/exits/2"} <= set(
        board.Tags()["scalars"]
    )
    found = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert found == [(step, pytest.approx(loss)) for step, loss, _ in curve(tmp_path / "run")]


def test_tensorboard_forgets_what_a_run_without_a_checkpoint_said(recipe, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(ZeroDivisionError):
        train(recipe(log={"tensorboard": True}), watcher=Falls())
    train(recipe(log={"tensorboard": True}))
    board = EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_goes_on_with_its_run_at_wandb(recipe, monkeypatch, tmp_path):
    """Against the calls that are made; the package itself is not among those that tests need."""
    begun, told = [], []

    def init(**how):
        begun.append(how)
        return SimpleNamespace(log=lambda numbers, step: told.append((step, numbers)), finish=lambda: told.append("finish"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    stopped = recipe(log={"wandb": "soundings"}, checkpoint={"every": 2})

    with pytest.raises(ZeroDivisionError):
        train(stopped, watcher=Falls())
    train(stopped, resume=True)
    train(recipe(log={"wandb": "soundings"}, out=str(tmp_path / "other")))
    assert all(how["project"] == "soundings" and how["name"] == "test" and how["resume"] == "allow" for how in begun)
    first, again, other = (how["id"] for how in begun)
    assert first == again != other
    assert told.count("finish") == 3
    told = [each for each in told if each != "finish"]
    assert {step for step, _ in told} == {1, 2, 3, 4, 5, 6}
    assert {"train/loss", "train/lr"} <= told[0][1].keys()


def test_wandb_that_is_not_installed_is_said_before_training(recipe, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(OptionError, match=r"log\.wandb is set, but the wandb package is not installed"):
        train(recipe(log={"wandb": "project"}))
    assert not (tmp_path / "run/last").exists()


def test_the_weights_do_not_depend_on_who_watches(recipe, tmp_path, weights_of):
    """Results read at once, or a step behind; validated often, or at the end."""
    for name, fields in {
        "often": {"log": {"every": 1}, "evaluate": {"every": 1}},
        "rarely": {"log": {"every": 100}},
    }.items():
        train(recipe(**fields, out=str(tmp_path / name)))
    often, rarely = (weights_of(tmp_path / name / "last") for name in ("often", "rarely"))
    assert all(torch.equal(often[key], rarely[key]) for key in often)
