"""`fathomlm demo` on a plain model: tied, compared with the original, written once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints import convert as converting
from fathomlm.checkpoints import locate, resolve
from fathomlm.checkpoints.native import save
from fathomlm.cli.main import build_parser, main
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "smollm2-135m"


@pytest.fixture(scope="module")
def plain_dir(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model of three layers: an odd number, which two recursions do not divide."""

    shape = {"layers": 3, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "context": 256}
    architecture = Architecture(family="llama", vocab=len(tiny_tokenizer), tied_embeddings=True, **shape)
    torch.manual_seed(0)
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(3), dtype=torch.float32))
    model.tokenizer = tiny_tokenizer
    return save(model.eval(), tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def small_preset(plain_dir: Path, nothing_packaged: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """SmolLM2-135M, if it were tiny and here, in an empty working directory."""
    real = locate.fetch
    monkeypatch.setattr(locate, "fetch", lambda name: plain_dir if name == NAME else real(name))
    monkeypatch.chdir(tmp_path)
    return plain_dir


def test_where_nothing_is_packaged_smollm2_is_made_recursive(small_preset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "5", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert set(record) == {"model", "out", "seconds", "columns"}
    assert (record["model"], record["out"]) == (NAME, f"demo/{NAME}-cycle2-lora64")
    original, recursive = record["columns"]
    assert (original["layers"], recursive["layers"]) == ("3 layers", "2 layers looped 2 times (cycle, lora)")
    assert original["tokens"] == recursive["tokens"] == 5
    base = resolve.load(small_preset)
    prompt = "<|im_start|>user\nExplain in two sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n"
    assert original["text"] == generate(base, prompt, max_new_tokens=5, ignore_eos=True)[0].text.strip()
    assert [line[:3] for line in captured.err.splitlines() if line[0] != " "] == ["1/3", "2/3", "3/3"]
    assert "tying 3 layers into 2 that run twice" in captured.err


def test_the_table_and_what_to_try_next(small_preset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["demo", "--tokens", "2", "--out", "kept"]) == 0
    captured = capsys.readouterr()
    assert f"{NAME}, original and recursive" in captured.out
    assert f"  fathomlm chat {NAME}\n" in captured.out
    assert f"fathomlm export kept/{NAME}-cycle2-lora64 plain-model" in captured.out
    assert "is there already" in captured.err, "the second time it is not converted again"
    assert [path.name for path in Path("kept").iterdir()] == [f"{NAME}-cycle2-lora64"]


def test_a_model_of_the_same_name_is_not_compared_with_what_another_one_became(
    tmp_path: Path, plain_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("a", "b"):
        shutil.copytree(plain_dir, tmp_path / place / "tiny")
    other = resolve.load(plain_dir)
    with torch.no_grad():
        other.decoder.embed.weight.mul_(-1.0)
    save(other, tmp_path / "b" / "tiny", force=True)
    words = ["--tokens", "2", "--out", str(tmp_path / "kept")]
    assert main(["demo", str(tmp_path / "a" / "tiny"), *words]) == 0
    capsys.readouterr()
    assert main(["demo", str(tmp_path / "b" / "tiny"), *words]) == 2
    assert "was made from another model" in capsys.readouterr().err


def test_where_a_model_is_packaged_smollm2_is_still_compared_when_named(
    small_preset: Path, packaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", NAME, "--tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"]


def test_any_plain_model_is_compared_also_one_without_a_chat_format(
    plain_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = resolve.load(plain_dir)
    model.tokenizer.chat_template = None
    place = save(model, tmp_path / "mine")
    assert main(["demo", str(place), "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "fathomlm chat" not in out
    assert (tmp_path / "demo" / "mine-cycle2-lora64" / "config.json").is_file()


def test_ctrl_c_leaves_no_half_model(
    small_preset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "convert", interrupted)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.endswith("fathomlm: interrupted; nothing was left half-written\n")
    assert not list(Path.cwd().iterdir())


def test_a_looped_model_is_refused(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tiny_model_dir), "--out", str(tmp_path / "out")]) == 2
    assert "was converted already" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_default_is_what_is_packaged(packaged: str) -> None:
    assert build_parser().parse_args(["demo"]).model == packaged


def test_mistakes(nothing_packaged: None, mistake_of: Callable[..., str]) -> None:
    assert "--tokens must be >= 1, got -3" in mistake_of("demo", "--tokens", "-3")
