"""`fathomlm convert` and `export` as a user meets them: results, refusals, interrupts, full disks."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints import activations, resolve
from fathomlm.cli.main import main
from fathomlm.train.reading import find_recipe
from lab.analyze.tiny import model_of, saved, text_file
from parity.families import tiny


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "plain"
    tiny("llama").save_pretrained(directory)
    return directory


def listing(directory):
    return sorted(path.name for path in directory.iterdir())


def test_convert_writes_a_model_and_says_what_it_did(plain, tmp_path, capsys):
    out = tmp_path / "deep" / "looped"
    assert main(["convert", str(plain), str(out), "--recursions", "3", "--relax", "lora", "--rank", "4"]) == 0
    said = capsys.readouterr().out
    assert "2 layers looped 3 times (cycle, lora), from 6 layers" in said
    assert "uptrain" in said
    model = fathomlm.load(out)
    assert model.plan.layout == "2"
    assert listing(tmp_path / "deep") == ["looped"]


def test_convert_json_is_one_object(plain, tmp_path, capsys):
    assert main(["convert", str(plain), str(tmp_path / "m"), "--sharing", "middle-cycle", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["layout"] == "1+2+1"
    model = fathomlm.load(tmp_path / "m")
    weights = sum(p.numel() for p in model.parameters())
    assert record["non_embedding_parameters"] + record["embedding_parameters"] == weights
    assert record["bytes"] > 4 * weights


def test_a_configuration_is_read_once(plain, tmp_path, monkeypatch):
    read = []
    once = resolve.read_config
    monkeypatch.setattr(resolve, "read_config", lambda path: read.append(path) or once(path))
    assert main(["convert", str(plain), str(tmp_path / "looped"), "--recursions", "2"]) == 0
    assert read == [plain]


def test_export_is_read_by_plain_transformers(plain, tmp_path, capsys):
    main(["convert", str(plain), str(tmp_path / "m"), "--relax", "dora", "--rank", "q=2,ffn=3"])
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["class"], record["layers"]) == ("LlamaForCausalLM", 6)
    tokens = torch.arange(3, 30)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    torch.testing.assert_close(theirs, fathomlm.load(tmp_path / "m")(tokens).logits, rtol=0, atol=3e-5)


def test_export_refuses_what_a_plain_checkpoint_cannot_hold(plain, tmp_path, capsys):
    main(["convert", str(plain), str(tmp_path / "m"), "--relax", "prefix", "--prefix-length", "3"])
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "out")]) == 2
    assert "cannot hold a prefix relaxation" in capsys.readouterr().err
    assert listing(tmp_path) == ["m"]


def test_an_existing_target_is_left_alone_without_force(plain, tmp_path, capsys):
    out = tmp_path / "m"
    main(["convert", str(plain), str(out)])
    before = (out / "model.safetensors").read_bytes()
    for verb in ("convert", "export"):
        assert main([verb, str(plain), str(out)]) == 2
    assert capsys.readouterr().err.count("exists; choose another name, or --force to replace it\n") == 2
    assert (out / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    assert main(["convert", str(plain), str(tmp_path / "file")]) == 2
    assert "file exists; choose another name\n" in capsys.readouterr().err, "--force would not replace it"
    (tmp_path / "file").unlink()
    assert main(["convert", str(plain), str(out), "--recursions", "3", "--force"]) == 0
    assert fathomlm.load(out).plan.recursions == 3
    assert listing(tmp_path) == ["m"]


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_model_is_not_written_over_the_one_that_it_is_made_of(plain, tmp_path, capsys, command):
    model = tmp_path / "base"
    shutil.copytree(plain, model)
    (tmp_path / "other").symlink_to(model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for out in (model, tmp_path / "other"):
        assert main([command, str(model), str(out), "--drop", "2", "--force"]) == 2
        assert f"{out} is MODEL itself" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


@pytest.mark.parametrize("config", ['{"port": 80}', "[1, 2]", "// no JSON", '{"model_type": null}'])
def test_force_knows_other_programs_by_their_configuration(plain, tmp_path, capsys, config):
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text(config)
    (project / "thesis.txt").write_text("years of work")
    assert main(["convert", str(plain), str(project), "--force"]) == 2
    assert "does not look like a model directory (no model_type in config.json)" in capsys.readouterr().err
    assert listing(project) == ["config.json", "thesis.txt"]


def test_force_does_not_replace_where_somebody_is(plain, tmp_path, capsys, monkeypatch):
    model = shutil.copytree(plain, tmp_path / "model")
    inner = model / "notes"
    inner.mkdir()
    for place, out, says in ((model, ".", "."), (inner, "..", ".. contains"), (model, str(model), "is the current")):
        monkeypatch.chdir(place)
        assert main(["convert", str(plain), out, "--force"]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "the current directory, which is never replaced; choose another name" in said
    assert sorted([*listing(plain), "notes"]) == listing(model)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["convert", "MODEL", "", "--force"], "OUT"),
        (["convert", "", "out"], "MODEL"),
        (["convert", "MODEL", "out", "--drop", "2", "--calibrate", ""], "--calibrate"),
        (["generate", "MODEL", "--prompt-file", ""], "--prompt-file"),
        (["eval", "ppl", "MODEL", "--data", ""], "--data"),
        (["train", ""], "RECIPE"),
    ],
)
def test_an_unset_variable_is_not_the_current_directory(plain, tmp_path, capsys, monkeypatch, words, names):
    monkeypatch.chdir(tmp_path)
    assert main([str(plain) if word == "MODEL" else word for word in words]) == 2
    assert capsys.readouterr().err == f"fathomlm: {names} must not be empty\n"
    assert listing(tmp_path) == []


def test_a_current_directory_that_is_gone_is_one_line(plain, tmp_path, capsys, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["convert", str(plain), "out"]) == 2
    assert capsys.readouterr().err == "fathomlm: the current directory no longer exists; change to another one\n"


def test_force_never_deletes_what_is_no_model(plain, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    assert main(["convert", str(plain), str(tmp_path / "thesis"), "--force"]) == 2
    assert "does not look like a model directory" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert main(["convert", str(plain), str(tmp_path / "file"), "--force"]) == 2
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recursions", "4"], "4 recursions do not divide 6 layers; these do: 1, 2, 3, 6"),
        (["--recursions", "1", "--init", "stepwise"], "init says how layers are tied, and at 1 recursion none are"),
        (["--recursions", "1", "--resize"], "resize says how layers are tied, and at 1 recursion none are"),
        (["--relax", "lora", "--rank", "none"], "cannot read 'none' as a rank"),
        (["--relax", "lora", "--rank", "-3"], "must be >= 1"),
        (["--sharing", "cylce"], "did you mean 'cycle'"),
        (["--dtype", "float8"], "invalid --dtype 'float8'"),
        (["--device", "tpu9"], "device"),
    ],
)
def test_wrong_options_exit_with_2_and_leave_nothing(plain, tmp_path, capsys, arguments, says):
    try:
        code = main(["convert", str(plain), str(tmp_path / "m"), *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert listing(tmp_path) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(plain, tmp_path, sent, start_python):
    """The process stops itself at the moment the weights are half written."""
    script = (
        "import os, signal, sys, fathomlm.checkpoints.native as s\n"
        "from fathomlm.model.hub import FathomForCausalLM as F\n"
        "save = F.save_pretrained\n"
        "def half(self, d, **k):\n"
        "    save(self, d, **k)\n"
        f"    os.kill(os.getpid(), {int(sent)})\n"
        "    while True:\n        signal.pause()\n"
        "F.save_pretrained = half\n"
        "from fathomlm.cli.main import main\n"
        f"sys.exit(main(['convert', {str(plain)!r}, {str(tmp_path / 'new' / 'm')!r}]))\n"
    )
    converting = start_python(script)
    _, said = converting.communicate()
    assert converting.returncode == 2
    assert said.strip().splitlines()[-1] == "fathomlm: interrupted; nothing was left half-written"
    assert "Traceback" not in said
    assert listing(tmp_path) == []


def test_what_a_killed_run_left_is_swept_by_the_next(plain, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    (tmp_path / f".m.partial-{gone.pid}").mkdir()
    mine = tmp_path / f".m.partial-{os.getppid()}"
    mine.mkdir()
    assert main(["convert", str(plain), str(tmp_path / "m")]) == 0
    assert listing(tmp_path) == [mine.name, "m"], "a living process's work is not touched"


def test_a_full_disk_leaves_nothing(plain, tmp_path, start_python):
    """A limit on file size fails the write just as a full disk does: with an error from the operating system."""
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from fathomlm.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"sys.exit(main([sys.argv[1], {str(plain)!r}, {str(tmp_path / 'm')!r}]))\n"
    )
    for verb in ("convert", "export"):
        writing = start_python(script, verb)
        _, said = writing.communicate()
        assert writing.returncode == 2, said
        assert "cannot write" in said.splitlines()[-1]
        assert "Traceback" not in said
        assert listing(tmp_path) == []


def test_too_small_a_disk_is_refused_before_writing(plain, tmp_path, capsys, monkeypatch):
    usage = os.statvfs(tmp_path)
    assert usage.f_bavail > 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    assert main(["convert", str(plain), str(tmp_path / "m")]) == 2
    assert "MB are free there" in capsys.readouterr().err


def test_an_unwritable_place(plain, tmp_path, capsys, monkeypatch):
    """Said before anything is read or measured."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("fathomlm.checkpoints.resolve.open_source", lambda *_: pytest.fail("read"))
    assert main(["convert", str(plain), str(tmp_path / "file" / "deep" / "m")]) == 2
    assert f"cannot write {tmp_path / 'file' / 'deep' / 'm'}: {tmp_path / 'file'} is not" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["convert", str(plain), str(tmp_path / "m")]) == 2
    assert f"permission denied in {tmp_path}" in capsys.readouterr().err


def test_help_and_typos_answer_without_loading_torch(tmp_path):
    launcher = tmp_path / "fathomlm"
    launcher.write_text(
        "import sys\nfrom fathomlm.cli.main import main\n"
        "try:\n    code = main()\nexcept SystemExit as e:\n    code = e.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, launcher, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout
    done = subprocess.run([sys.executable, launcher, "conver", "a", "b"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean 'convert'" in done.stderr


@pytest.fixture(scope="module")
def readable(tmp_path_factory):
    """A plain model with a tokenizer, and text for it."""
    place = tmp_path_factory.mktemp("readable")
    return str(saved(model_of(None, sharing="cycle", recursions=1), place / "m")), text_file(place)


def test_dropped_layers_are_named_in_the_card_with_losses_and_a_command_that_parses(readable, tmp_path, capsys):
    base, text = readable
    out = tmp_path / "small"
    words = ["convert", base, str(out), "--drop", "3", "--calibrate", text, "--calibrate-tokens", "512"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    influence = record["influence"]
    assert record["kept_layers"] == sorted(sorted(range(8), key=lambda layer: -influence[layer])[:5])
    assert fathomlm.load(out).architecture.layers == 5
    card = (out / "README.md").read_text()
    gone = ", ".join(str(layer) for layer in range(8) if layer not in record["kept_layers"])
    assert f"Dropped layers of the base, counted from 0: {gone}." in card
    assert f"| {record['base_loss']:.3f} | {record['start_loss']:.3f} |" in card
    assert f"({record['flops_share']:.1%})" in card
    command = next(line for line in card.splitlines() if line.startswith("fathomlm train"))
    assert shlex.split(command)[2] == "compress-smollm2-135m", "the settings that were measured for such models"
    assert main([*shlex.split(command)[1:], "--print-config"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    left = {name: value for name, value in recipe["model"].items() if value is not None}
    assert (left["source"], left.get("drop"), left.get("neurons")) == (str(out), None, None)
    size = yaml.safe_load(find_recipe("compress-smollm2-135m").read_text())["data"]["max_tokens"]
    assert recipe["data"]["path"] == f"data/{Path(base).name}-{size}"
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert "5 layers" in capsys.readouterr().out


def test_a_greedy_search_names_its_order(readable, tmp_path, capsys):
    base, text = readable
    words = ["--drop", "2", "--by", "greedy", "--calibrate", text, "--calibrate-tokens", "512"]
    assert main(["convert", base, str(tmp_path / "small"), *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["dropped_in_order"]) == 2
    assert record["kept_layers"] == [layer for layer in range(8) if layer not in record["dropped_in_order"]]
    assert main(["export", base, str(tmp_path / "hf"), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 6
    assert main(["convert", base, str(tmp_path / "other"), *words[:2], *words[4:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped_in_order"] is None


@pytest.mark.parametrize("verb", ["convert", "export"])
def test_calibration_runs_on_the_device_that_is_named(verb, readable, tmp_path, monkeypatch):
    """A number behind cpu, which is allowed, stands for a GPU here."""
    base, text = readable
    devices = []
    measure = activations.measure_activations
    monkeypatch.setattr(
        activations, "measure_activations", lambda *a, device, **k: devices.append(device) or measure(*a, device=device, **k)
    )
    words = ["--drop", "2", "--by", "greedy", "--calibrate", text, "--calibrate-tokens", "512"]
    for name, device in (("a", ()), ("b", ("--device", "cpu:0"))):
        assert main([verb, base, str(tmp_path / name), *words, *device]) == 0
    assert devices == ["cpu", "cpu:0"]


def test_export_measures_on_a_device_only_what_is_calibrated(readable, tmp_path, capsys):
    assert main(["export", readable[0], str(tmp_path / "m"), "--device", "cpu"]) == 2
    assert "--device requires --calibrate" in capsys.readouterr().err


def test_repeated_layers_are_named_in_the_card(readable, tmp_path, capsys):
    base, _ = readable
    words = ["--drop", "2", "--by", "last", "--repeat", "2", "--json"]
    assert main(["convert", base, str(tmp_path / "m"), *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["kept_layers"]) == ("2+3+1", [0, 1, 2, 2, 3, 3, 4, 4, 5])
    assert "| 3 | 3, 3 |" in (tmp_path / "m" / "README.md").read_text()
    assert main(["export", base, str(tmp_path / "hf"), *words]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 9
    capsys.readouterr()
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "m.gguf"), "--json"]) == 0, "unrolled: 2 do not divide 9"
    assert json.loads(capsys.readouterr().out)["layers"] == 9


def test_narrower_layers_are_named_in_the_card(readable, tmp_path, capsys):
    base, text = readable
    words = ["--drop", "0", "--neurons", "16", "--calibrate", text, "--calibrate-tokens", "512"]
    assert main(["convert", base, str(tmp_path / "small"), *words]) == 0
    said, warned = capsys.readouterr()
    assert "over held-out calibration text" in said
    assert "16 of 24 neurons in each layer" in said
    assert "16 neurons are no multiple of 32: quantized GGUF files keep the down projections in 16 bits" in warned
    assert "what is left is a starting point" in said
    card = (tmp_path / "small" / "README.md").read_text()
    assert "Feed-forward neurons of each layer: 16 of the base's 24." in card
    assert main(["export", base, str(tmp_path / "hf"), *words, "--json"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["intermediate_size"] == 16


def test_the_card_of_a_looped_model_says_what_runs_where_and_what_it_costs(plain, tmp_path, capsys):
    out = tmp_path / "m"
    assert main(["convert", str(plain), str(out), "--relax", "lora", "--rank", "64"]) == 0
    said = capsys.readouterr()
    assert "warning: the result is larger than the base: 208%" in said.err
    assert "warning: the result takes more compute than the base: 118%" in said.err
    card = (out / "README.md").read_text()
    assert "| 1 | 1, 4 |" in card
    command = next(line for line in card.splitlines() if line.startswith("fathomlm train"))
    assert shlex.split(command)[2] == "uptrain-smollm2-135m"
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0
    assert "3 layers looped 2 times" in capsys.readouterr().out
    assert "Note: the result is larger than the base" in card
    assert main(["convert", str(plain), str(tmp_path / "n")]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_budget_is_met_and_its_ranks_are_named(readable, tmp_path, capsys):
    base, text = readable
    words = ["convert", base, str(tmp_path / "m"), "--relax", "lora", "--budget", "0.8", "--calibrate", text]
    assert main([*words, "--calibrate-tokens", "512"]) == 0
    said = capsys.readouterr().out
    assert "ranks: " in said
    assert "over held-out calibration text" in said
    share = sum(p.numel() for p in fathomlm.load(tmp_path / "m").parameters())
    assert share <= 0.8 * sum(p.numel() for p in fathomlm.load(base).parameters())


def test_export_drops_layers_on_the_way(readable, tmp_path, capsys):
    base, text = readable
    assert main(["export", base, str(tmp_path / "hf"), "--drop", "2", "--by", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 6
    assert main(["export", base, str(tmp_path / "twice"), "--drop", "2", "--by", "last", "--repeat", "2"]) == 0
    assert "from 6 of 8 layers" in capsys.readouterr().out
    out = str(tmp_path / "m.gguf")
    assert main(["export", base, out, "--drop", "2", "--calibrate", text, "--calibrate-tokens", "128"]) == 0
    said = capsys.readouterr().out
    assert ", 6 layers, " in said
    assert "from 6 of 8 layers" in said
    assert main(["export", base, str(tmp_path / "x"), "--format", "exits", "--drop", "2"]) == 2
    assert "--drop cannot be combined with --format exits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drop", "8"], "drop must be between 0 and 7"),
        (["--drop", "-1"], "--drop must be >= 0"),
        (["--by", "last"], "--by requires --drop"),
        (["--drop", "2", "--by", "influnce"], "did you mean 'influence'"),
        (["--drop", "2", "--by", "influence"], "requires calibration text"),
        (["--drop", "2", "--by", "greedy"], "requires calibration text"),
        (["--drop", "2", "--neurons", "8"], "neurons requires calibration text"),
        (["--neurons", "8"], "--neurons requires --drop, which may be 0"),
        (["--repeat", "2"], "--repeat requires --drop"),
        (["--drop", "0", "--repeat", "2", "--recursions", "2"], "cannot be combined with recursions"),
        (["--drop", "2", "--calibrate", "nowhere.txt"], "nowhere.txt"),
        (["--calibrate-tokens", "5"], "--calibrate-tokens requires --calibrate"),
        (["--budget", "0.5"], "requires a lora or dora relaxation"),
        (["--budget", "1.5", "--relax", "lora"], "--budget must be > 0 and <= 1"),
        (["--init", "aligned"], "init aligned requires calibration text"),
    ],
)
def test_wrong_drops_and_budgets_leave_nothing(readable, tmp_path, capsys, arguments, says):
    try:
        code = main(["convert", readable[0], str(tmp_path / "m"), *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drop", "8", "--by", "greedy"], "drop must be between 0 and 7"),
        (["--drop", "0", "--neurons", "25"], "neurons must be between 1 and the model's 24, got 25"),
        (["--drop", "5", "--by", "greedy", "--repeat", "2"], "requires more than 3, got 3"),
        (["--drop", "0", "--by", "greedy", "--repeat", "500"], "must be <= 1024, got 2503"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_cannot_be_made_is_refused_before_it_is_measured(
    readable, tmp_path, capsys, monkeypatch, command, arguments, says
):
    """A search may take hours."""
    monkeypatch.setattr("fathomlm.checkpoints.activations.measure_activations", lambda *_, **__: pytest.fail("measured"))
    base, text = readable
    assert main([command, base, str(tmp_path / "m"), *arguments, "--calibrate", text]) == 2
    assert says in capsys.readouterr().err
    assert listing(tmp_path) == []


def test_an_export_does_not_ignore_calibration_text(readable, tmp_path, capsys):
    base, text = readable
    assert main(["export", base, str(tmp_path / "m"), "--calibrate", text]) == 2
    assert "--calibrate says which layers or neurons are kept; it requires --drop" in capsys.readouterr().err
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drop", "0", "--neurons", "16", "--recursions", "2"], "cannot be combined with sharing or recursions"),
        (["--drop", "1", "--by", "greedy", "--recursions", "2"], "2 recursions do not divide 7 layers"),
        (["--drop", "1", "--by", "greedy", "--resize"], "resize says how layers are tied, and at 1 recursion none are"),
        (["--drop", "1", "--by", "greedy", "--budget", "0.5"], "budget chooses ranks; it requires a lora or dora"),
        (["--relax", "lora", "--budget", "0.01"], "with the smallest lora the model has"),
        (["--relax", "lora", "--budget", "0.9", "--init", "random"], "cannot be combined with the init random"),
        (["--relax", "lora", "--rank", "q=x"], "cannot read 'q=x' as a rank"),
        (["--relax", "lora", "--rank", "0"], "the rank on q must be >= 1, got 0"),
        (["--relax", "lora", "--prefix-length", "4"], "prefix-length requires a prefix relaxation"),
        (["--relax", "encoding", "--relax-init", "zero"], "relax-init requires a lora or dora relaxation"),
        (["--relax", "encoding", "--sharing", "sequence"], "encoding"),
        (["--drop", "2", "--relax", "lora"], "with one recursion nothing is tied"),
        (["--drop", "2", "--router", "expert"], "a router requires recursions >= 2, got 1"),
        (["--router", "token", "--router-score", "tanh"], "unknown score 'tanh'"),
        (["--kv", "hybrid"], "hybrid"),
        (["--linears-only"], "linears-only requires a lora or dora relaxation"),
        (["--init", "lower", "--norm-init", "zero"], "norm-init requires the init average or aligned"),
    ],
)
def test_what_cannot_be_tied_is_refused_before_it_is_measured(readable, tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.setattr("fathomlm.checkpoints.activations.measure_activations", lambda *_, **__: pytest.fail("measured"))
    base, text = readable
    assert main(["convert", base, str(tmp_path / "m"), *arguments, "--calibrate", text]) == 2
    assert says in capsys.readouterr().err


def test_calibration_text_may_be_too_short_or_no_text(readable, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("six fathoms", encoding="utf-8")
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\x00\x81" * 20)
    for name, says in (("short.txt", "has 11 tokens; at least 64 are required"), ("broken.txt", "broken.txt")):
        words = ["convert", readable[0], str(tmp_path / "m"), "--drop", "1", "--calibrate", str(tmp_path / name)]
        assert main(words) == 2
        assert says in capsys.readouterr().err
