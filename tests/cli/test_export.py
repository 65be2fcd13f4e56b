"""`fathomlm export --format fathom`: a model as it is, small on disk and in files of a size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fathomlm
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
