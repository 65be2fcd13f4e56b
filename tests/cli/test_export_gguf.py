"""`fathomlm export OUT.gguf`: the command, and the mistakes that can be made with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
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


def test_force_replaces_gguf_files_only(tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("years of work")
    words = ("export", str(tiny_model_dir), str(notes), "--format", "gguf", "--force")
    assert "notes.txt is not a GGUF file; --force will not delete it" in mistake_of(*words)
    assert notes.read_text() == "years of work"
    notes.write_bytes(b"")
    assert main(list(words)) == 0, "an empty file has nothing to lose"
    assert main(list(words)) == 0


@pytest.mark.parametrize(
    ("words", "kind"), [([], "f16"), (["--dtype", "float32"], "f32"), (["--dtype", "bfloat16"], "bf16")]
)
def test_matrices_are_stored_as_the_data_type_says(
    words: list[str], kind: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.gguf"
    assert main(["export", str(tiny_model_dir), str(out), "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == kind
    stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors if len(tensor.shape) == 2}
    assert stored == {kind.upper()}


def test_rows_that_fill_no_block_are_named(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """48 neurons are no multiple of 32, so what reads them stays in 16 bits; llama.cpp has no other way."""
    for kind, in_16_bits in (("q4_0", ["ffn_down.weight"]), ("f16", [])):
        out = tmp_path / f"{kind}.gguf"
        assert main(["export", str(tiny_model_dir), str(out), "--quantize", kind, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["in_16_bits"] == in_16_bits
        assert main(["export", str(tiny_model_dir), str(out), "--quantize", kind, "--force"]) == 0
        said = "  in f16, not q4_0: ffn_down.weight; rows of 48 do not divide into blocks of 32\n"
        assert capsys.readouterr().err == (said if in_16_bits else "")


def test_the_room_that_is_asked_for_is_what_the_tensors_take(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of them are not packed."""
    asked: list[int] = []
    monkeypatch.setattr("fathomlm.checkpoints.gguf.writer.check_room", lambda out, needed: asked.append(needed))
    out = tmp_path / "m.gguf"
    assert main(["export", str(tiny_model_dir), str(out), "--quantize", "q4_0"]) == 0
    assert asked == [sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(out).tensors)]
