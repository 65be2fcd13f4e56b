"""Runs on a disk that fails or loses power at every single call: they go on from a whole checkpoint, at most one interval
old, and end with the weights of a run that nothing happened to."""

from __future__ import annotations

import dataclasses
import os
import shutil
from functools import cache

import pytest
import torch

from fathomlm.checkpoints import writing
from fathomlm.checkpoints.native import save
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import FathomError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.train import checkpoint as checkpoint_module
from fathomlm.train import directory as directory_module
from fathomlm.train import report as report_module
from fathomlm.train.checkpoint import load_checkpoint, save_checkpoint
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.directory import RunDirectory, newest_whole
from fathomlm.train.distributed import World
from fathomlm.train.reading import build_recipe
from fathomlm.train.report import Reporter, SilentWatcher, read_records
from fathomlm.train.run import train
from fathomlm.train.state import RunFacts, TrainingProgress, saved_steps, verify
from faults.disk import KINDS, Disk, lay_out

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = World(0, 1, torch.device("cpu"))
STEPS = 2
WEIGHTS = ("model.safetensors", "training/optimizer-00000-of-00001.safetensors", "training/random.safetensors")


def model_of(seed):
    shape = Architecture(
        family="llama", layers=1, hidden=8, intermediate=8, heads=1, kv_heads=1, head_dim=8, vocab=16, context=8
    )
    model = FathomForCausalLM(FathomConfig.of(shape, DepthPlan.vanilla(1), dtype=torch.float32))
    model.decoder.reset_parameters(std=0.2, generator=torch.Generator().manual_seed(seed))
    return model


@cache
def plain_recipe():
    return build_recipe({**values_of("corpus", "run"), "checkpoint": {"keep": 1, "best": False}})


def run_once(out, done=None):
    """The writing of a run, without its arithmetic: two steps that each move all weights, write a record and save; the
    latest is kept. `done` is told each step that is saved. Goes on where an earlier one stopped."""
    recipe = dataclasses.replace(plain_recipe(), out=str(out))
    place, model, progress = RunDirectory(out, recipe), model_of(0), TrainingProgress()
    module = model.decoder
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(0)
    start = newest_whole(place.saved()) if place.saved() else None
    if start is not None:
        progress = load_checkpoint(start.path, start.state, module, optimizer, CPU)
    place.settle(None, () if start is None else start.damaged)
    reporter = Reporter(out, recipe, after_step=progress.step)
    try:
        while progress.step < STEPS:
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
            progress.step += 1
            reporter.write({"kind": "train", "step": progress.step, "tokens": 0})
            reporter.sync()
            progress.extra = RunFacts(steps=STEPS, warmup=0, exits={}, data="")
            save_checkpoint(place.at(progress.step), model, module, optimizer, progress, dataclasses.asdict(recipe), CPU)
            if done is not None:
                done.append(progress.step)
            place.tidy(None)
    finally:
        reporter.close()
    return start


def weights_at(out, step):
    return {name: (out / f"checkpoints/step-{step:08d}" / name).read_bytes() for name in WEIGHTS}


def ended_alike(out, whole):
    assert weights_at(out, STEPS) == weights_at(whole, STEPS)
    assert [record["step"] for record in read_records(out / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [f"step-{STEPS:08d}"]
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole))
    return True


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_once(out)
    return out


def cuts(root, work):
    """What a power cut in front of every call of `work` leaves, each once, with what `work` had done by then."""
    done, seen, found = [], set(), []

    def look(number):
        for kind in KINDS:
            left = disk.after_a_cut(kind)
            key = (len(done), repr(sorted(left.items())))
            if key not in seen:
                seen.add(key)
                found.append((f"{kind} {number}: {disk.calls[-1]}", left, list(done)))

    disk = Disk(root, before=look)
    with disk.interposed():
        work(done)
    assert len(disk.calls) > 20
    return found


def check_cut(left, done, place):
    """What stands after a cut: the newest checkpoint verifies, and is the last that was saved or the one after it."""
    out = lay_out(left, place) / "run"
    saved = saved_steps(out / "checkpoints")
    if not saved:
        assert not done
        return None
    start = newest_whole(saved)
    assert not start.damaged
    assert start.state.progress.step >= max(done, default=0)
    steps = [record["step"] for record in read_records(out / "metrics.jsonl")]
    assert steps[: start.state.progress.step] == list(range(1, start.state.progress.step + 1))
    return start.state.progress.step


def test_a_power_cut_at_every_call(whole, tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    found = cuts(root, lambda done: run_once(root / "run", done))
    resumed = 0
    for number, (what, left, done) in enumerate(found):
        place = tmp_path / str(number)
        step = check_cut(left, done, place)
        assert step is None or step - max(done, default=0) in (0, 1), what
        if number % 4 == 0:  # the others differ in what is left half-written
            run_once(place / "run")
            assert ended_alike(place / "run", whole), what
            resumed += 1
        shutil.rmtree(place)
    assert len(found) > 50
    assert resumed > 12


def test_a_power_cut_would_be_seen_if_nothing_were_synced(tmp_path, monkeypatch):
    """The proof of the test above: with the syncs taken out, cuts leave checkpoints that are zeros, or none."""
    for module in (writing, checkpoint_module, directory_module, report_module):
        for name in ("sync_file", "sync_directory", "sync_tree"):
            monkeypatch.setattr(module, name, lambda path: None, raising=False)
    root = tmp_path / "disk"
    root.mkdir()
    lost = 0
    for number, (_, left, done) in enumerate(cuts(root, lambda done: run_once(root / "run", done))):
        try:
            check_cut(left, done, tmp_path / str(number))
        except (FathomError, AssertionError):
            lost += 1
    assert lost > 10


def count_calls(tmp_path):
    root = tmp_path / "counted"
    root.mkdir()
    disk = Disk(root)
    with disk.interposed():
        run_once(root / "run")
    return len(disk.calls)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fails_at_every_call(half, whole, tmp_path):
    """For want of room once, and for good, in turns: one error that says so, and a later run goes on. Both steps make the
    same calls; every other pair of them is left to the slow tests."""
    refused = 0
    for number in (number for number in range(count_calls(tmp_path)) if number // 2 % 2 == half):
        root = tmp_path / str(number)
        root.mkdir()
        done = []
        disk = Disk(root, fails_at=number, dead=number % 2 == 1)
        with disk.interposed():
            try:
                run_once(root / "run", done)
            except FathomError as error:
                refused += 1
                said = str(error)
                assert "the disk is full" in said
                assert "\n" not in said
        start = run_once(root / "run")
        assert (0 if start is None else start.state.progress.step) >= max(done, default=0), disk.calls[number]
        assert ended_alike(root / "run", whole), disk.calls[number]
        shutil.rmtree(root)
    assert refused > 20


# --- the real thing ---


def values_of(corpus, out):
    shape = {"layers": 2, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "context": 64}
    return {
        "out": str(out),
        "model": {"architecture": shape, "recursions": 2},
        "data": {"path": str(corpus), "context": 32},
        "budget": {"steps": 4},
        "batch": {"sequences": 2, "micro": 2},
        "evaluate": {"every": 0, "rows": 2},
        "checkpoint": {"every": 2, "keep": 1},
        "log": {"every": 1, "tensorboard": False},
        "device": "cpu",
    }


class Saved(SilentWatcher):
    """Steps behind which a checkpoint is complete: a step is told after what was due in it."""

    def __init__(self, done):
        self._done = done

    def step(self, step, total, live):
        if step % 2 == 0:
            self._done.append(step)


@pytest.fixture
def small_corpus(tmp_path):
    (tmp_path / "text.txt").write_text("the line is twelve fathoms long, and so on. " * 20)
    options = {"sources": (str(tmp_path / "text.txt"),), "tokenizer": "bytes", "validation_fraction": 0}
    return prepare(PrepareOptions(out=tmp_path / "corpus", **options)).path


def test_a_real_run_goes_on_after_power_cuts(small_corpus, tmp_path):
    """Some of the cuts of a real run, spread over all of it; the lock of the run that was cut off lies there too."""
    root = tmp_path / "disk"
    root.mkdir()
    undisturbed = build_recipe(values_of(small_corpus, root / "run"))
    found = cuts(root, lambda done: train(undisturbed, watcher=Saved(done)))
    kept = [cut for cut in found if any(name.startswith("run/checkpoints/") for name in cut[1])]
    for what, left, done in kept[:: len(kept) // 5]:
        place = tmp_path / "cut"
        out = lay_out(left, place) / "run"
        steps = saved_steps(out / "checkpoints")
        assert (max(steps) if steps else 0) >= max(done, default=0), what
        summary = train(build_recipe(values_of(small_corpus, out)), resume=True)
        assert summary.finished
        for name in WEIGHTS:
            assert (out / "last" / name).read_bytes() == (root / "run/last" / name).read_bytes(), what
        losses = [[(r["step"], r["loss"]) for r in read_records(each / "metrics.jsonl")] for each in (out, root / "run")]
        assert losses[0] == losses[1]
        verify(out / "last")
        shutil.rmtree(place)


def test_models_and_corpora_are_whole_or_absent_after_a_cut(tmp_path, monkeypatch):
    """A saved model replaced by another, and a corpus prepared: under its name each is always whole, old or new."""
    root = tmp_path / "disk"
    root.mkdir()
    (tmp_path / "text.txt").write_text("the line is twelve fathoms long")
    save(model_of(1), root / "model")
    weights = [(root / "model/model.safetensors").read_bytes()]

    def work(done):
        save(model_of(2), root / "model", force=True)
        done.append("model")
        options = {"sources": (str(tmp_path / "text.txt"),), "tokenizer": "bytes", "validation_fraction": 0}
        prepare(PrepareOptions(out=root / "corpus", **options))
        done.append("corpus")

    found = cuts(root, work)
    weights.append((root / "model/model.safetensors").read_bytes())
    monkeypatch.setattr(writing, "is_alive", lambda process: False)  # no process outlasts a power cut
    for number, (what, left, done) in enumerate(found):
        place = lay_out(left, tmp_path / str(number))
        writing._recover(place / "model")  # what the next command that writes there does first
        seen = (place / "model/model.safetensors").read_bytes()
        assert seen == weights[1] if done else seen in weights, what
        if (place / "corpus").exists():
            Corpus.open(place / "corpus", verify="full", unfinished=True)
        shutil.rmtree(place)
