"""`fathomlm analyze`: directories that appear whole, a table or a record, and one line for every mistake."""

from __future__ import annotations

import builtins
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.display import model_name
from fathomlm.cli.main import main
from fathomlm.lab.analyze import kv_report, routing_report
from lab.analyze.tiny import model_of, saved, text_file

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(), tmp_path_factory.mktemp("models") / "routed"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(None), tmp_path_factory.mktemp("models") / "plain"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return text_file(tmp_path)


@pytest.fixture
def mistake(mistake_of: Any) -> Any:
    return partial(mistake_of, "analyze")


def test_routing_as_a_table(routed: str, data: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "routing", routed, "--data", data, "--rows", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for shown in ("sampling accuracy", "dead token ratio", "tokens at depth 3", "max. depth", "unrouted"):
        assert shown in printed.out
    place = tmp_path / "analysis" / "routing-routed"
    assert printed.out.splitlines()[-1].startswith("report: analysis/routing-routed/index.html")
    record = json.loads((place / "routing.json").read_text())
    assert (record["kind"], record["rows"], record["context"]) == ("routing", 3, 64)
    assert len(record["scaling"][0]["log_likelihood"]) == 64
    assert f"{record['causal_loss']:.4f}" in printed.out
    assert sorted(path.name for path in place.iterdir()) == [
        "index.html",
        "routing.json",
        "scaling.png",
        "scores.png",
        "text.png",
    ]


def test_routing_as_a_record(routed: str, data: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    options = ["--context", "32", "--rows", "2", "--samples", "1", "--dtype", "bfloat16", "--out", str(out), "--json"]
    assert main(["analyze", "routing", routed, "--data", data, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["dtype"], record["data"]) == (routed, "bfloat16", [data])
    assert record["plan"].startswith("1+2+1 layers looped 3 times")
    assert (record["rows"], record["context"]) == (2, 32)
    assert record["files"] == [str(out / name) for name in sorted(path.name for path in out.iterdir())]
    whole = json.loads((out / "routing.json").read_text())
    assert {name: whole[name] for name in ("top_k", "causal", "flops")} == {
        name: record[name] for name in ("top_k", "causal", "flops")
    }
    assert len(whole["samples"]) == 1


def test_kv_of_data_and_of_a_text(routed: str, plain: str, data: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "kv"
    assert main(["analyze", "kv", routed, "--data", data, "--tokens", "100", "--out", str(out)]) == 0
    assert "cosine tied" in capsys.readouterr().out
    record = json.loads((out / "kv.json").read_text())
    assert (record["rows"], record["context"], len(record["hidden"]["cosine"])) == (1, 64, 9)
    monkeypatch.setattr(kv_report, "draw_kv", lambda numbers, name, out: out.write_bytes(b"picture"))
    assert main(["analyze", "kv", plain, "--text", "six feet", "--out", str(out), "--force", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rows"], record["context"], record["steps"], record["data"]) == (1, 8, 8, ["--text"])
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "kv.json", "kv.png"]


def test_mistakes_are_one_line_and_leave_nothing(
    routed: str, plain: str, data: str, tmp_path: Path, mistake: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "work").mkdir()
    routing = partial(mistake, "routing")
    assert "required: KIND" in mistake()
    assert "did you mean 'routing'" in mistake("rooting", routed)
    assert "required: --data" in routing(routed)
    assert f"{plain} has no router" in routing(plain, "--data", data)
    assert "source nowhere.txt does not exist" in routing(routed, "--data", "nowhere.txt")
    assert "unknown model 'nowhere'" in routing("nowhere", "--data", data)
    assert "must be >= 1, got 0" in routing(routed, "--data", data, "--rows", "0")
    assert "must be >= 1, got -1" in routing(routed, "--data", data, "--samples", "-1")
    assert "from 2 to the model's 64 tokens, got 65" in routing(routed, "--data", data, "--context", "65")
    (tmp_path / "work" / "short.txt").write_text("six feet")
    assert "a context of 64 requires 65" in routing(routed, "--data", "work/short.txt")
    (tmp_path / "work" / "empty.jsonl").write_text("")
    assert "empty.jsonl has no text" in routing(routed, "--data", "work/empty.jsonl")
    assert "work exists; choose another name" in routing(routed, "--data", data, "--out", "work")
    assert "does not look like a routing analysis" in routing(routed, "--data", data, "--out", "work", "--force")
    kv = partial(mistake, "kv")
    assert "either --data FILE or --text TEXT" in kv(plain)
    assert "either --data FILE or --text TEXT" in kv(plain, "--data", data, "--text", "x")
    assert ">= 2, got 1" in kv(plain, "--text", "x", "--tokens", "1")
    assert "--text is empty" in kv(plain, "--text", "")
    assert "text.txt is not a directory" in kv(plain, "--text", "x", "--out", data, "--force")
    after = {path.name for path in tmp_path.rglob("*")} - {path.name for path in before}
    assert after == {"work", "short.txt", "empty.jsonl"}


def test_without_matplotlib_the_extra_is_named(plain: str, mistake: Any, monkeypatch: Any) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'fathomlm[plot]'" in mistake("kv", plain, "--text", "x")


def test_an_interrupt_leaves_nothing(routed: str, data: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(numbers: Any, name: str, out: Path) -> None:
        out.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(routing_report, "draw_scores", interrupted)
    out = tmp_path / "made" / "out"
    assert main(["analyze", "routing", routed, "--data", data, "--rows", "1", "--out", str(out)]) == 2
    assert "nothing was left half-written" in capsys.readouterr().err
    assert not out.parent.exists()


def test_models_have_short_names(tmp_path: Path) -> None:
    for path in ("runs/tiny/last", "runs/tiny/checkpoints/step-00000500", "models/small"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "model.q8.gguf").write_text("")
    assert model_name(str(tmp_path / "runs" / "tiny" / "last")) == "tiny-last"
    assert model_name(str(tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000500")) == "tiny-step-00000500"
    assert model_name(str(tmp_path / "models" / "small")) == "small"
    assert model_name(str(tmp_path / "model.q8.gguf")) == "model.q8"
    assert model_name("owner/name") == "owner-name"
    assert model_name(str(tmp_path / "models" / "small" / "..")) == "models"


def test_help_loads_no_analysis() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.argv = ['fathomlm']; from fathomlm.cli.main import build_parser; build_parser(); "
        "from fathomlm.lab.analyze import options; "
        "mine = [n for n in sys.modules if n.startswith('fathomlm.lab.analyze.')]; print(mine, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fathomlm.lab.analyze.options'] False"
