"""`fathomlm export --format fathom`: a model as it is, small on disk and in files of a size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.checkpoints import writing
from fathomlm.checkpoints.native import directory_bytes
from fathomlm.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_int8_in_files_of_a_size(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    words = ["export", str(tiny_model_dir), str(out), "--format", "fathom", "--quantize", "int8", "--json"]
    assert main([*words, "--max-shard-size", "30KB"]) == 0
    record = json.loads(capsys.readouterr().out)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) <= 30_000
    assert (record["weights"], record["bytes"]) == ("int8", directory_bytes(out))
    before, after = fathomlm.load(tiny_model_dir), fathomlm.load(out)
    assert after.plan == before.plan
    assert after.tokenizer is not None
    for name, weight in before.state_dict().items():
        step = weight.abs().amax(dim=-1, keepdim=True) / 127
        moved = (after.state_dict()[name] - weight).abs()
        assert (moved <= 0.5001 * step).all(), name
    assert (after.decoder.embed.weight != before.decoder.embed.weight).any()


def test_without_quantize_it_is_the_same_model(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tiny_model_dir), str(tmp_path / "m"), "--format", "fathom"]) == 0
    assert "float32" in capsys.readouterr().out
    before, after = (fathomlm.load(path).state_dict() for path in (tiny_model_dir, tmp_path / "m"))
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_plain_checkpoint_holds_no_int8(tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    said = mistake_of("export", str(tiny_model_dir), str(tmp_path / "m"), "--quantize", "int8")
    assert "--quantize int8 requires --format fathom" in said
    assert "takes a size such as 512MB" in mistake_of(
        "export", str(tiny_model_dir), str(tmp_path / "m"), "--max-shard-size", "12MX"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "words", "last"),
    [
        ("deep/m", ("--format", "hf"), "sync_tree"),
        ("m", ("--format", "fathom"), "sync_tree"),
        ("m", ("--format", "fathom", "--quantize", "int8"), "_swap"),
        ("m.gguf", ("--unroll",), "sync_file"),
    ],
)
def test_ctrl_c_leaves_nothing(
    out: str, words: tuple[str, ...], last: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Not even when all is written but its name."""
    left: list[str] = []

    def interrupted(path: Path, *rest: Any) -> None:
        left.extend(file.name for file in (path, *path.rglob("*")) if file.is_file())
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, last, interrupted)
    assert main(["export", str(tiny_model_dir), str(tmp_path / out), *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fathomlm: interrupted; nothing was left half-written\n")
    assert left
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_model_is_replaced_leaves_the_old_one(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Also between the two renames, when nothing has the name."""
    words, rename = ["export", str(tiny_model_dir), str(tmp_path / "m"), "--format", "fathom"], Path.rename
    assert main(words) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            assert not (tmp_path / "m").exists()
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    assert main([*words, "--force", "--quantize", "int8"]) == 2
    assert capsys.readouterr().err == "fathomlm: interrupted; nothing was left half-written\n"
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
