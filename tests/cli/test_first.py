"""Mistakes that names, paths, ports, devices and sizes show are answered before a tensor library is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fathomlm.checkpoints.locate import check_source
from fathomlm.cli.first import check_device
from fathomlm.errors import FathomError, OptionError

HEAVY = ("torch", "transformers")
SCRIPT = """
import contextlib, io, json, sys
from fathomlm.cli.main import main
for words in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = main(words)
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([code, printed.getvalue(), loaded]))
"""
TYPO = "unknown model 'smollm2-135n' (did you mean 'smollm2-135m'?)"


def _mistakes(text: Path, taken: Path, port: int) -> dict[str, tuple[list[str], str]]:
    """By name: what is typed, and what the answer has in it."""
    data = ["--data", str(text)]
    typo = [
        *(["demo"], ["inspect"], ["chat"], ["serve"], ["generate", "-p", "x"], ["convert", "OUT"], ["export", "OUT"]),
        *(["calibrate", *data], ["eval", "ppl", *data], ["eval", "tasks", "--tasks", "piqa"], ["analyze", "weights"]),
        *(["eval", "frontier", "--sweep", "depth", *data], ["eval", "generate", "--metric", "squad", *data]),
        *(["analyze", "routing", *data], ["analyze", "kv", *data], ["analyze", "exits", *data], ["bench", "latency"]),
        *(["bench", "throughput"], ["bench", "kernels"], ["plan", "--budget", "1e18", "--models"]),
        *(["simulate", "--measure", "--depths", "1,0.5"], ["get"]),
    ]
    cases = {f"model of {' '.join(words[:2])}": (_with_model(words, "smollm2-135n"), TYPO) for words in typo}
    train = ["train", "tiny", "--out", str(taken)]
    new = ["--out", str(taken / "new")]
    simulated = ["--preset", "40gb/gemma-2b/2", "--depths", "1,0.5"]
    empty, rows, wrong = (text.with_name(name) for name in ("empty.txt", "rows.jsonl", "wrong.yaml"))
    empty.write_text("\n")
    rows.write_text('{"txt": "some text"}\n')
    wrong.write_text("name: x\nmodle: 3\n")
    return cases | {
        "hub id": (["generate", "nobody/nothing", "-p", "x"], "nobody/nothing: the hub cannot be reached"),
        "no model directory": (["generate", str(taken), "-p", "x"], "has no config.json"),
        "no GGUF": (["inspect", str(text)], "not a GGUF file"),
        "no weights": (["generate", "smollm-730m", "-p", "x"], "a shape without weights"),
        "device": (["generate", "smollm2-135m", "-p", "x", "--device", "gpu"], "unknown device 'gpu'"),
        "threads": (["generate", "smollm2-135m", "-p", "x", "--threads", "9999"], "--threads must be <="),
        "exits": (
            ["generate", "smollm2-135m", "-p", "x", "--decode", "parallel", "--exits", str(taken)],
            "has no exits.json",
        ),
        "prompt file": (["generate", "smollm2-135m", "--prompt-file", "none.txt"], "cannot read none.txt"),
        "convert into": (["convert", "smollm2-135m", str(taken)], "exists; choose another name"),
        "export into": (["export", "smollm2-135m", str(taken)], "exists; choose another name"),
        "export exits into": (["export", "smollm2-135m", str(taken), "--format", "exits"], "exists; choose another name"),
        "export a file": (["export", "smollm2-135m", str(text), "--format", "gguf"], "exists; choose another name"),
        "analyze into": (["analyze", "weights", "smollm2-135m", "--out", str(taken)], "exists; choose another name"),
        "no text": (["eval", "ppl", "smollm2-135m", "--data", str(text.with_suffix(".txd"))], "does not exist"),
        "empty text": (["eval", "ppl", "smollm2-135m", "--data", str(empty)], "empty.txt has no text"),
        "empty text to analyze": (["analyze", "kv", "smollm2-135m", "--data", str(empty), *new], "empty.txt has no text"),
        "no column": (["calibrate", "smollm2-135m", "--data", str(rows)], "no column 'text' (did you mean 'txt'?)"),
        "no samples": (["eval", "generate", "smollm2-135m", "--metric", "squad", "--data", "none.jsonl"], "does not exist"),
        "results": (["eval", "tasks", "smollm2-135m", "--tasks", "piqa", "--out", str(text)], "exists; choose another name"),
        "simulated tables": (["simulate", "thesis", "--out", str(taken)], "it is a directory; name a file in it"),
        "simulation": (["simulate", *simulated, "--out", str(text / "new")], f"{text} is not a directory"),
        "simulated depths": (["simulate", *simulated, "--save", "none/x"], "cannot write none/x: none is not a directory"),
        "threshold": (["calibrate", "smollm2-135m", *data, "--out", str(text / "new")], f"{text} is not a directory"),
        "no source": (["data", "prepare", "nope.txt", "out", "--tokenizer", "bytes"], "the source nope.txt does not exist"),
        "two models of one name": (["serve", "smollm2-135m", "--model", "smollm2-135m"], "two models are named"),
        "port": (["serve", "--port", str(port)], "Address already in use; choose another --host or --port"),
        "port number": (["serve", "--port", "70000"], "port must be between 0 and 65535"),
        "memory": (["serve", "--memory", "800TB"], "--memory is 800,000.0 GB, but cpu has"),
        "memory of a benchmark": (["bench", "throughput", "smollm2-135m", "--memory", "800TB"], "but cpu has"),
        "keys": (["serve", "--api-key-file", str(text.with_name("none"))], "cannot read the keys"),
        "no GGUF file": (["generate", "models/none.gguf", "-p", "x"], "models/none.gguf does not exist"),
        "update of a router": (
            ["convert", "smollm2-135m", "OUT", "--router", "expert", "--router-update", "subtract"],
            "invalid --router-update 'subtract'; choose from add, interpolate",
        ),
        "study": (["study", "show", "tinny"], "unknown study 'tinny' (did you mean 'tiny'?)"),
        "studies": (["study", "status", "tiny", "none.yaml"], "there is no study file none.yaml"),
        "study to run": (["study", "run", "tinny", "--corpus", "none"], "unknown study 'tinny'"),
        "device of a study": (["study", "run", "tiny", "--corpus", "x", "--device", "gpu"], "unknown device 'gpu'"),
        "nothing to plan": (["plan"], "nothing to plan: give --budget FLOPS, --runs DIR or --gpu-memory SIZE"),
        "recipe": (["train", "tinny"], "unknown recipe 'tinny' (did you mean 'tiny'?)"),
        "field of a file": (["train", str(wrong), "--name", "y"], f"{wrong}: unknown field 'modle' (did you mean 'model'?)"),
        "field": ([*train, "--optimizer.lrr", "1"], "unknown field in optimizer 'lrr'"),
        "run": (train, "holds a run at step 100; --resume continues it"),
        "device of a run": (["train", "tiny", *new, "--device", "gpu"], "unknown device 'gpu'"),
        "corpus": (
            ["train", "tiny", *new, "--data.path", "none", "--data.sources", "[]"],
            "there is no prepared corpus at none",
        ),
        "sources": (
            ["train", "tiny", *new, "--data.path", "none", "--data.sources", "[a.md]", "--data.validation_from", "[]"],
            "the source a.md does not exist",
        ),
        "teacher": (["train", "uptrain-smollm2-135m", *new, "--model.source", "smollm2-135n"], TYPO),
    }


def _with_model(words: list[str], model: str) -> list[str]:
    """The model where it is typed: behind the command and its kind, or behind a flag that takes it."""
    if words[-1].startswith("--models"):
        return [*words, model]
    many = 2 if words[0] in ("eval", "analyze", "bench") else 1
    return [*words[:many], model, *words[many:]]


def test_mistakes_are_answered_without_a_tensor_library(tmp_path: Path) -> None:
    text, taken = tmp_path / "text.txt", tmp_path / "taken"
    text.write_text("some text")
    (taken / "checkpoints" / "step-00000100").mkdir(parents=True)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        cases = _mistakes(text, taken, busy.getsockname()[1])
        words = json.dumps([typed for typed, _ in cases.values()])
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, words, json.dumps(HEAVY)],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True,
        )  # fmt: skip
    found = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, (_, answer) in cases.items():
        code, printed, loaded = found[name]
        assert answer in printed, (name, printed)
        assert (code, printed.count("\n"), loaded) == (2, 1, []), (name, found[name])


def test_cuda_is_refused_where_torch_or_the_driver_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.cli import first

    monkeypatch.setattr(first.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(OptionError, match=r"requires CUDA, but torch 2.13.0\+cpu finds no such device here"):
        check_device("cuda:0")
    monkeypatch.setattr(first.importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(first, "_has_driver", lambda: False)
    with pytest.raises(OptionError, match="requires CUDA"):
        check_device("cuda")
    monkeypatch.setattr(first, "_has_driver", lambda: True)
    for device in ("cpu", "cuda", "cuda:3"):
        check_device(device)


@pytest.mark.parametrize("source", ["smollm-730m", "smollm2-135n", "some/where/else", "none.gguf", "~/none/at/all"])
def test_what_is_refused_first_is_what_loading_refuses(source: str) -> None:
    from fathomlm.checkpoints.resolve import load

    with pytest.raises(FathomError) as first:
        check_source(source)
    with pytest.raises(type(first.value)) as later:
        load(source)
    assert str(first.value) == str(later.value)


def test_a_shape_needs_no_weights() -> None:
    check_source("smollm-730m", shape=True)
    with pytest.raises(FathomError, match="unknown model"):
        check_source("smollm-731m", shape=True)


@pytest.mark.parametrize("words", [["study", "list"], ["study", "show", "tiny"], ["study", "run", "tiny", "--corpus", "x"]])
def test_a_package_that_is_not_installed_is_named(words: list[str], tmp_path: Path) -> None:
    script = "import sys; sys.modules['yaml'] = None; from fathomlm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr == "fathomlm: this command requires the package yaml: pip install 'fathomlm[all]'\n"
