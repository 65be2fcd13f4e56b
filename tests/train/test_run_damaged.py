"""Checkpoints and records that are not what was written: found before anything is loaded, never trained on."""

from __future__ import annotations

import json
import shutil

import pytest

from fathomlm.checkpoints.writing import seal
from fathomlm.cli.main import main
from fathomlm.errors import CheckpointError
from fathomlm.lab.analyze.runs import exit_depths, read_runs, summarise
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import train
from fathomlm.train.state import STATE, UnknownFormat, file_names, read_state, verify

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = {"checkpoint": {"every": 2, "keep": 2}}
FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "training/optimizer-00000-of-00001.safetensors",
    "training/random.safetensors",
    STATE,
]


class Notes(SilentWatcher):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def finished(token_corpus, tmp_path_factory):
    """A run of six steps with checkpoints at 4 and 6. Read it, copy it, do not write to it."""
    from fathomlm.train.reading import build_recipe
    from train.exit_runs import values_for

    out = tmp_path_factory.mktemp("finished") / "run"
    values = values_for(token_corpus) | {"out": str(out), "budget": {"steps": 6}, **CHANGES}
    shape = {"layers": 2, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "context": 64}
    values |= {"model": {"architecture": shape, "recursions": 2}, "batch": {"sequences": 2, "micro": 2}}
    train(build_recipe(values))
    return values, out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, and its recipe."""
    from fathomlm.train.reading import build_recipe

    values, out = finished
    shutil.copytree(out, tmp_path / "run", symlinks=True)
    return build_recipe({**values, "out": str(tmp_path / "run")}), tmp_path / "run", out


def flip(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def same_end(out, whole):
    for name in ("model.safetensors", "training/optimizer-00000-of-00001.safetensors", "training/random.safetensors"):
        assert (out / "last" / name).read_bytes() == (whole / "last" / name).read_bytes()
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert kept == sorted(path.name for path in (whole / "checkpoints").glob("step-*"))
    losses = [[(r["kind"], r["step"], r["loss"]) for r in read_records(place / "metrics.jsonl")] for place in (out, whole)]
    assert losses[0] == losses[1]
    return True


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_flipped_bit_is_found(name, part, run):
    """Before there were checksums, a flip in weights, optimizer or random state was trained on."""
    _, out, _ = run
    checkpoint = (out / "last").resolve()
    verify(checkpoint)
    file = checkpoint / name
    flip(file, int(file.stat().st_size * part))
    with pytest.raises(CheckpointError, match=r"wrong checksum|not valid JSON|not UTF-8|has format"):
        verify(checkpoint)


def test_every_file_is_in_the_record(run):
    _, out, _ = run
    assert set(FILES) - {STATE} <= set(file_names(out / "last")) == set(read_state(out / "last").files)


def test_what_another_rank_is_still_writing_is_not_listed(run):
    """safetensors writes under a hidden name and renames it: once a rank listed it, and it was gone when it was read."""
    _, out, _ = run
    before = file_names(out / "last")
    (out / "last" / "training" / ".tmpHDdASu").write_bytes(b"half")
    assert file_names(out / "last") == before


def damage(checkpoint, how):
    file = checkpoint / "model.safetensors"
    match how:
        case "flipped":
            flip(file, 3000)
        case "cut":
            file.write_bytes(file.read_bytes()[:3000])
        case "missing":
            file.unlink()
        case "zeros":
            for each in (file for file in checkpoint.rglob("*") if file.is_file()):
                each.write_bytes(bytes(each.stat().st_size))
        case "no state":
            (checkpoint / STATE).unlink()
        case "empty":
            shutil.rmtree(checkpoint)
            checkpoint.mkdir()


REASONS = {
    "flipped": "model.safetensors was altered since it was written (wrong checksum)",
    "cut": "model.safetensors has 3,000 bytes in place of",
    "missing": "model.safetensors is missing",
    "zeros": "state.json is not valid JSON",
    "no state": "is not a training checkpoint (missing training/state.json)",
    "empty": "is not a training checkpoint (missing training/state.json)",
}


@pytest.mark.parametrize("how", REASONS)
def test_resume_falls_back_to_the_newest_that_verifies_and_says_so(how, run):
    recipe, out, whole = run
    damage(out / "checkpoints/step-00000006", how)
    watcher = Notes()
    assert train(recipe, resume=True, watcher=watcher).finished
    (said,) = [text for text in watcher.said if "is damaged" in text]
    assert said.startswith(f"{out}/checkpoints/step-00000006 is damaged and is left out, as damaged-step-00000006: ")
    assert REASONS[how] in said
    assert "\n" not in said
    assert f"going on from {out}/checkpoints/step-00000004 (step 4)" in watcher.said
    assert same_end(out, whole)
    assert (out / "checkpoints/damaged-step-00000006").is_dir()


def test_damaged_ones_do_not_push_whole_ones_out(run):
    """With two damaged ones newer than the whole one, and two kept, the whole one must not go."""
    recipe, out, whole = run
    for step in (6, 7):
        shutil.copytree(out / "checkpoints/step-00000004", out / f"checkpoints/step-0000000{step}", dirs_exist_ok=True)
        flip(out / f"checkpoints/step-0000000{step}/model.safetensors", 3000)
    train(recipe, resume=True)
    assert same_end(out, whole)


def test_where_nothing_is_whole_one_line_says_so(run, capsys):
    _, out, _ = run
    for step in (4, 6):
        flip(out / f"checkpoints/step-0000000{step}/model.safetensors", 3000)
    before = sorted(out.rglob("*"))
    assert main(["train", str(out / "recipe.yaml"), "--out", str(out), "--resume"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"fathomlm: {out}/checkpoints has no complete checkpoint to resume from: ")
    assert said.endswith(
        "step-00000006/model.safetensors was altered since it was written (wrong checksum) (nor are the 1 before it whole)"
    )
    assert sorted(out.rglob("*")) == before


def test_a_branch_of_a_damaged_checkpoint_is_refused(run, tmp_path):
    from dataclasses import replace

    recipe, out, _ = run
    flip(out / "checkpoints/step-00000006/training/random.safetensors", 3000)
    branch = replace(recipe, out=str(tmp_path / "branch"), branch_from=str(out / "checkpoints/step-00000006"))
    with pytest.raises(CheckpointError, match=r"random\.safetensors was altered since it was written"):
        train(branch)
    assert not (tmp_path / "branch").exists()


# --- checkpoints of an earlier version ---


def make_old(checkpoint):
    """As version 0.1 wrote it: no checksums."""
    record = json.loads((checkpoint / STATE).read_text())
    del record["checksum"], record["files"]
    (checkpoint / STATE).write_text(json.dumps({**record, "format": 1}, indent=1))


@pytest.mark.parametrize("how", [None, "cut", "missing", "zeros"])
def test_a_checkpoint_without_checksums_still_resumes_with_a_warning(how, run):
    recipe, out, whole = run
    for step in (4, 6):
        make_old(out / f"checkpoints/step-0000000{step}")
    damage(out / "checkpoints/step-00000006", how)
    watcher = Notes()
    train(recipe, resume=True, watcher=watcher)
    used = out / f"checkpoints/step-0000000{4 if how else 6}"
    assert f"{used} was written by an earlier version, without checksums: it is not verified" in watcher.said
    assert same_end(out, whole)


def test_a_checkpoint_of_a_later_version_is_refused_and_left_alone(run):
    recipe, out, _ = run
    path = out / "checkpoints/step-00000006" / STATE
    record = json.loads(path.read_text())
    del record["checksum"]
    path.write_text(json.dumps(seal({**record, "format": 99})))
    with pytest.raises(UnknownFormat, match="has format 99; this version reads 1 and 2"):
        train(recipe, resume=True)
    assert path.exists()


# --- what state.json may hold ---


DAMAGES = {
    "binary": b"\x80\x81\xff" * 50,
    "a list": b"[]",
    "a number": b"5",
    "deep": b"[" * 100_000,
    "nothing": b"",
    "digits": b'{"format": ' + b"9" * 5000 + b"}",
    "other": b'{"format": 1}',
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_state_that_is_not_one(name, run):
    recipe, out, whole = run
    (out / "checkpoints/step-00000006" / STATE).write_bytes(DAMAGES[name])
    watcher = Notes()
    train(recipe, resume=True, watcher=watcher)
    assert any("is damaged" in text for text in watcher.said)
    assert same_end(out, whole)


def paths(value, prefix=()):
    for key, inner in value.items():
        yield (*prefix, key)
        if isinstance(inner, dict):
            yield from paths(inner, (*prefix, key))


@pytest.mark.parametrize("wrong", [None, "x", [], {}, -1, 1.5, True], ids=repr)
@pytest.mark.parametrize("old", [False, True])
def test_any_field_of_any_type_is_read_or_refused(wrong, old, run):
    """With its checksum made to fit, and without one: a reader that believed the record would fall with a traceback."""
    _, out, _ = run
    checkpoint = out / "checkpoints/step-00000006"
    if old:
        make_old(checkpoint)
    whole = json.loads((checkpoint / STATE).read_text())
    whole.pop("checksum", None)
    said = []
    for path in (*paths({key: value for key, value in whole.items() if key != "recipe"}), ("recipe",)):
        record = json.loads(json.dumps(whole))
        inner = record
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        (checkpoint / STATE).write_text(json.dumps(record if old else seal(record)))
        try:
            verify(checkpoint)
        except CheckpointError as error:
            said.append(str(error))
    assert len(said) > 5
    assert not any("\n" in text for text in said)


def test_a_file_outside_the_checkpoint_is_not_looked_at(run):
    _, out, _ = run
    checkpoint = out / "checkpoints/step-00000006"
    record = json.loads((checkpoint / STATE).read_text())
    del record["checksum"]
    for name in ("../step-00000004/config.json", "/etc/passwd"):
        record["files"] = {name: {"bytes": 1, "blake2b": "0"}}
        (checkpoint / STATE).write_text(json.dumps(seal(record)))
        with pytest.raises(CheckpointError, match="is not a file within the checkpoint"):
            read_state(checkpoint)


# --- records ---


@pytest.mark.parametrize(
    "spoilt",
    [b"\x00" * 300 + b"\n", b"\xff\xfe\n\x80\n", b"5\n[]\n", b'{"step": "x", "kind": "train"}\n', b"[" * 99999 + b"\n"],
)
def test_a_run_keeps_what_can_be_read_of_its_records(spoilt, run):
    recipe, out, whole = run
    path = out / "metrics.jsonl"
    before = path.read_bytes()
    shutil.rmtree(out / "checkpoints/step-00000006")
    path.write_bytes(spoilt + before)
    watcher = Notes()
    train(recipe, resume=True, watcher=watcher)
    assert same_end(out, whole)
    assert sum("are no records and were dropped; metrics.jsonl.damaged has them" in text for text in watcher.said) == 1
    assert (out / "metrics.jsonl.damaged").read_bytes() == spoilt + before


@pytest.mark.parametrize("raw", [b"\x80\x81\xff" * 50, b"\x00" * 4096, b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}\n"])
def test_plot_of_a_binary_file_is_one_line(raw, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_bytes(raw)
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fathomlm: ")
    assert said.count("\n") == 1
    assert "metrics.jsonl holds no record of training" in said


GOOD = {"kind": "validation", "step": 3, "tokens": 5, "loss": 1.0, "exits": {"2": 1.0}, "parts": {"next_token": 1.0}}


@pytest.mark.parametrize("wrong", [None, "x", [], ["y"], {"z": "w"}, -1, 1.5, True], ids=repr)
def test_records_with_wrong_types_are_passed_over(wrong, tmp_path):
    for name in GOOD:
        for kind in ("train", "validation"):
            record = {**GOOD, "kind": kind, name: wrong}
            (tmp_path / "metrics.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(record) + "\n")
            runs = read_runs([tmp_path])
            assert summarise(runs[0]).step == 3
            assert exit_depths(runs) in ([], ["2"])
