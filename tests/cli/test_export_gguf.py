"""`fathomlm export OUT.gguf`: the command, and the mistakes that can be made with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fathomlm.cli.main import main


def test_the_command(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake_of: Callable[..., str]
) -> None:
    out = tmp_path / "m.gguf"
    assert main(["export", str(tiny_model_dir), str(out), "--quantize", "q8_0"]) == 0
    assert re.search(r"m\.gguf: \w+, \d+ layers.*q8_0", capsys.readouterr().out)
    before = out.read_bytes()
    assert "exists; choose another name, or --force" in mistake_of("export", str(tiny_model_dir), str(out))
    assert out.read_bytes() == before
    assert "--quantize q8_0 requires --format gguf" in mistake_of(
        "export", str(tiny_model_dir), str(tmp_path / "x"), "--quantize", "q8_0"
    )
    assert "--unroll requires --format gguf" in mistake_of("export", str(tiny_model_dir), str(tmp_path / "x"), "--unroll")
    assert main(["export", str(tiny_model_dir), str(out), "--force", "--json"]) == 0
    assert main(["generate", str(out), "-p", "the depth", "--max-new-tokens", "2"]) == 0
