"""`fathomlm train`: from a recipe to a model, stopped and gone on with; one line and exit code 2 for every mistake."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import time
from functools import partial

import pytest
import yaml

from fathomlm.cli.main import main
from fathomlm.train.reading import read_recipe, shipped_recipes

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPE = {
    "name": "tale",
    "model": {
        "architecture": {"layers": 4, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "context": 64},
        "recursions": 2,
    },
    "data": {"context": 32},
    "budget": {"steps": 6},
    "batch": {"sequences": 4},
    "loss": {"exits": {}},
    "evaluate": {"every": 3, "rows": 4},
    "checkpoint": {"every": 3},
    "log": {"tensorboard": False},
    "device": "cpu",
}


@pytest.fixture
def mistake(mistake_of):
    return partial(mistake_of, "train")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    records = (json.dumps({"text": f"document {n} tells of {n * 7919 % 1000} fathoms"}) + "\n" for n in range(90))
    (place / "text.jsonl").write_text("".join(records))
    arguments = ["data", "prepare", str(place / "text.jsonl"), str(place / "out"), "--tokenizer", "bytes", "--workers", "1"]
    assert main([*arguments, "--validation-fraction", "0.1"]) == 0
    return place / "out"


@pytest.fixture
def recipe(corpus, tmp_path, monkeypatch):
    """A recipe's file in a directory of its own, which is where the test runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tale.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "data": {**RECIPE["data"], "path": str(corpus)}}))
    return str(path)


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in ("RECIPE", "--resume", "--print-config", "--dry-run", "--list", "--json", "--optimizer.lr 1e-4", "torchrun"):
        assert word in text


def test_a_run_from_recipe_to_text(recipe, tmp_path, capsys):
    assert main(["train", recipe]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("runs/tale: 6 steps, 768 tokens, validation loss ")
    assert ", after 2 steps " in captured.out
    hint = captured.out.splitlines()[1].removeprefix("  try it: fathomlm ")
    assert "2 layers looped 2 times (cycle), exits after 2; " in captured.err
    assert "step 1: loss " in captured.err
    assert "step 6: validation loss " in captured.err
    assert main([*shlex.split(hint), "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out
    assert read_recipe(tmp_path / "runs/tale/recipe.yaml") == read_recipe(recipe)


def test_json_is_one_object(recipe, capsys):
    assert main(["train", recipe, "--json", "--budget.steps", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["finished"], found["tokens"], found["skipped"]) == (4, True, 512, 0)
    assert found["checkpoint"] == "runs/tale/checkpoints/step-00000004"
    assert found["exits"].keys() == {"2"}
    assert main(["train", recipe, "--json", "--budget.steps", "4", "--resume"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "loss": found["loss"]} == found


def test_the_list(capsys):
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert all(len(line.split()) > 4 and line.endswith(".") for line in lines)
    assert main(["train", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == shipped_recipes().keys()


def test_the_printed_recipe_is_the_recipe(recipe, capsys, tmp_path):
    words = [
        recipe,
        "--optimizer.lr",
        "1e-4",
        "--loss.exits.at",
        "[1, 3]",
        "--budget.steps",
        "null",
        "--budget.tokens",
        "2M",
    ]
    assert main(["train", *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    assert read_recipe(tmp_path / "printed.yaml") == read_recipe(recipe, words[1:])
    assert main(["train", *words, "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == yaml.safe_load(printed)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_trains_nothing(recipe, capsys, mistake, tmp_path):
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out
    said = mistake(recipe, "--dry-run", "--data.path", "gone")
    assert "model.architecture names no vocab, and without the data it is not known" in said
    assert main(["train", recipe, "--dry-run", "--json", "--budget.steps", "null", "--budget.epochs", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] > 10
    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_is_not_there_is_told_before_it_is_made(recipe, corpus, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the line is long\n" * 200)
    words = ["--data.path", "mistyped", "--data.tokenizer", "bytes", "--data.sources", "[text.txt]"]
    words += ["--data.max_tokens", "2000", "--model.architecture.vocab", "257"]
    told = "mistyped does not exist; it is prepared first, from text.txt, 2000 tokens\n"
    assert main(["train", recipe, *words, "--dry-run"]) == 0
    assert f"data          {told}" in capsys.readouterr().out
    assert main(["train", recipe, *words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_missing"] is True
    assert not (tmp_path / "mistyped").exists()
    assert main(["train", recipe, *words]) == 0
    assert told in capsys.readouterr().err
    assert main(["train", recipe, *words, "--dry-run"]) == 0
    assert "does not exist" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no recipe: give a YAML file or a name (see: fathomlm train --list)"),
        (["tinny"], "unknown recipe 'tinny' (did you mean 'tiny'?); or give a YAML file"),
        (["gone.yaml"], "there is no recipe file gone.yaml"),
        (["RECIPE", "--optimiser.lr", "1"], "unknown option or field '--optimiser' (did you mean '--optimizer'?)"),
        (["RECIPE", "--optimizer.lrr", "1"], "unknown field in optimizer 'lrr' (did you mean 'lr'?)"),
        (["RECIPE", "--dryrun"], "unknown option '--dryrun' (did you mean '--dry-run'?)"),
        (["RECIPE", "--print-confg"], "unknown option '--print-confg' (did you mean '--print-config'?)"),
        (["RECIPE", "--resum"], "unknown option '--resum' (did you mean '--resume'?)"),
        (["RECIPE", "--optimizer.lr", "fast"], "recipe: optimizer.lr must be a number, got 'fast'"),
        (
            ["RECIPE", "--budget.tokens", "2M"],
            "budget requires one of tokens, steps, epochs and flops, got tokens",
        ),
        (["RECIPE", "more"], "cannot read 'more'; fields of the recipe are changed with --section.field value"),
        (
            ["RECIPE", "--data.path", "gone"],
            "there is no prepared corpus at gone; make it with: fathomlm data prepare SOURCES",
        ),
        (["RECIPE", "--data.path", "gone", "--data.sources", "[a.txt]"], "data.sources requires data.tokenizer"),
        (["RECIPE", "--data.pairs", "[a, b]"], "holds tokens, and pairs are required here"),
        (["RECIPE", "--model.recursions", "3"], "3 recursions do not divide 4 layers"),
        (["RECIPE", "--model.architecture.hiden", "3"], "the architecture: unknown field 'hiden' (did you mean 'hidden'?)"),
        (["RECIPE", "--model.architecture.vocab", "100"], "has 257 different tokens, the model only 100"),
        (["RECIPE", "--model.init", "average"], "model.init requires model.source"),
        (["RECIPE", "--loss.exits.at", "[9]"], "an exit goes after one of the steps 1 to 3 of 4, got 9"),
        (["RECIPE", "--loss.layerwise.shallow", "4"], "the shallow model must have 1 to 3 of the 4 layers, got 4"),
        (["RECIPE", "--train", "relaxation"], "train: relaxation requires model.relax"),
        (["RECIPE", "--schedule.warmup", "9"], "a warm-up of 9 steps does not fit into a run of 6: lower schedule.warmup"),
        (["RECIPE", "--branch_from", "gone"], "is not a training checkpoint"),
        (["RECIPE", "--device", "tpu"], "tpu"),
    ],
)
def test_mistakes(words, message, mistake, recipe, tmp_path):
    assert message in mistake(*(recipe if word == "RECIPE" else word for word in words))
    assert [path.name for path in tmp_path.iterdir()] == ["tale.yaml"]


def test_a_model_with_another_tokenizer(mistake, recipe, tiny_model_dir, tmp_path):
    words = ["--model.architecture", "null", "--model.recursions", "1", "--model.source", str(tiny_model_dir)]
    assert "was made with the tokenizer bytes" in mistake(recipe, *words)
    assert "prepare the text again with the model's" in mistake(recipe, "--loss.distill.source", str(tiny_model_dir))
    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_was_altered(mistake, recipe, corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = copy / "train-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert "train-00000.bin has" in mistake(recipe, "--data.path", str(copy))
    shard.write_bytes(b"\1" + whole[1:])
    for how in ([], ["--data.verify", "full"], ["--data.verify", "true"]):
        said = mistake(recipe, "--data.path", str(copy), *how)
        assert "train-00000.bin was altered since it was written (wrong checksum)" in said
    assert "data.verify" in mistake(recipe, "--data.verify", "some")
    assert not (tmp_path / "runs").exists()


def test_a_corpus_that_is_not_verified(recipe, corpus, capsys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = copy / "train-00000.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    assert main(["train", recipe, "--data.path", str(copy), "--data.verify", "off"]) == 0


def test_a_run_that_is_there(mistake, recipe, capsys):
    assert main(["train", recipe]) == 0
    capsys.readouterr()
    said = mistake(recipe)
    assert said == "fathomlm: runs/tale holds a run at step 6; --resume continues it, --out names another"
    said = mistake(recipe, "--resume", "--optimizer.lr", "1e-4")
    assert said.startswith("fathomlm: runs/tale was trained with another recipe: optimizer.lr (was 0.0003, is 0.0001)")


def test_a_full_disk_is_one_line_and_code_2(recipe, capsys, monkeypatch, tmp_path):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert main(["train", recipe]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("fathomlm: runs/tale/checkpoints/step-00000003 requires ")
    assert list((tmp_path / "runs/tale/checkpoints").iterdir()) == []


def test_data_that_is_missing_is_prepared_first(recipe, capsys, tmp_path):
    (tmp_path / "tale.txt").write_text("once upon a time " * 40)
    words = ["--data.path", "made", "--data.sources", "[tale.txt]", "--data.tokenizer", "bytes", "--budget.steps", "2"]
    assert main(["train", recipe, *words]) == 0
    assert "no validation data" in capsys.readouterr().out
    assert (tmp_path / "made/corpus.json").exists()


def losses(directory):
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(r["kind"], r["step"], r["loss"], r["parts"]) for r in records]


LONG = ["--budget.steps", "24", "--checkpoint.every", "4", "--log.every", "1", "--evaluate.every", "0"]


STANDS_STILL = (
    "import os, sys, time\n"
    "from fathomlm.cli.main import main\n"
    "from fathomlm.cli.display import TrainingBar\n"
    "step = TrainingBar.step\n"
    "def held(self, number, *more):\n"
    "    step(self, number, *more)\n"
    "    while number == 10 and not os.path.exists('goes-on'):\n"
    "        time.sleep(0.01)\n"
    "TrainingBar.step = held\n"
    "sys.exit(main(sys.argv[1:]))\n"
)
"""The command, which stands still after 10 of 24 steps until it is told to go on: it cannot end before a signal comes."""


@pytest.fixture(scope="module")
def uninterrupted():
    return {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_command_is_stopped_and_goes_on(number, recipe, capsys, tmp_path, uninterrupted, start_python):
    """Exit code 2 and a word on how to go on, unless killed outright; then the same losses and weights, bit for bit."""
    started = start_python(STANDS_STILL, "train", recipe, *LONG)
    out = tmp_path / "runs/tale"
    while started.poll() is None and not (out / "checkpoints/step-00000008").exists():
        time.sleep(0.01)
    started.send_signal(number)
    (tmp_path / "goes-on").touch()
    printed, said = started.communicate()
    assert printed == ""
    assert started.returncode == (-9 if number == signal.SIGKILL else 2)
    if number != signal.SIGKILL:
        at = int((out / "last").resolve().name.removeprefix("step-"))
        assert said.splitlines()[-1] == f"fathomlm: stopped at step {at} of 24, saved; --resume goes on"
        assert losses(out)[-1][1] == at
    if not uninterrupted:
        assert main(["train", recipe, *LONG, "--out", "whole"]) == 0
        weights = (tmp_path / "whole/last/model.safetensors").read_bytes()
        uninterrupted.update(losses=losses(tmp_path / "whole"), weights=weights)
    assert main(["train", recipe, *LONG, "--resume"]) == 0
    assert "going on from runs/tale/checkpoints/step-" in capsys.readouterr().err
    train_losses = [entry for entry in losses(out) if entry[0] == "train"]
    assert train_losses == [entry for entry in uninterrupted["losses"] if entry[0] == "train"]
    assert (out / "last/model.safetensors").read_bytes() == uninterrupted["weights"]
    assert [path.name for path in (out / "checkpoints").glob(".*")] == []


def test_a_resumed_run_shows_its_steps_before_their_results_are_in(recipe, capsys):
    """Results are read a step behind, so the first step after a resume has none to show yet."""
    seldom = ["--log.every", "50", "--evaluate.every", "0", "--checkpoint.every", "4", "--budget.steps", "8"]
    assert main(["train", recipe, *seldom]) == 0
    shutil.rmtree("runs/tale/checkpoints/step-00000008")
    assert main(["train", recipe, *seldom, "--resume"]) == 0
    assert "going on from" in capsys.readouterr().err
