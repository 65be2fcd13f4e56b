"""The commands of docs/paths.md run as they stand, with a tiny model for the one that is downloaded. Like that one it has
more tokens than there are bytes, so that a corpus of its tokens does not fit a model that reads bytes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fathomlm.cli.main import main, read_command
from lab.analyze.tiny import model_of, saved

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "paths.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## (.+?)\n[^`#]*```\n(.+?)```$", PAGE, re.MULTILINE | re.DOTALL)
PATHS = {title: block.replace("\\\n", "") for title, block in BLOCKS}
CHAIN = "The whole chain"
SHORT = [
    "--budget.tokens", "null", "--budget.steps", "2", "--schedule.warmup", "1", "--batch.sequences", "2",
    "--batch.micro", "2", "--evaluate.rows", "2", "--data.context", "32", "--compile", "false", "--precision", "float32",
]  # fmt: skip
SMALLER = {
    "train compress-smollm2-135m": [*SHORT, "--model.drop", "1", "--model.neurons", "8", "--model.calibrate", "1024"],
    "train tiny-mor": SHORT,
    "bench throughput": ["--batch-size", "2", "--requests", "2", "--threads", "1"],
    "analyze routing": ["--rows", "4"],
    "study run": ["--only", "*/0"],
    "generate": ["--max-new-tokens", "3"],
    "calibrate": ["--max-new-tokens", "3"],
}
"""What the test adds, so that a command is over soon; the page's own words stay."""


def test_there_are_four_paths_of_five_commands_and_a_chain() -> None:
    assert [len(block.splitlines()) for block in PATHS.values()] == [5] * 4 + [6]
    verbs = [line.split()[1] for line in PATHS[CHAIN].splitlines()]
    assert verbs == ["convert", "data", "train", "train", "calibrate", "serve"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In place of the model that the page downloads."""
    model = model_of(None, sharing="cycle", recursions=1, traits={"context": 512, "vocab": 258})
    assert model.tokenizer is not None
    model.tokenizer.add_tokens(["fathom"])
    return str(saved(model, tmp_path_factory.mktemp("plain") / "model"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("one_thread", "short")
def test_a_path_leads_where_it_says(
    path: str, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "held-out.txt"):
        (tmp_path / name).write_text("Six fathoms deep, the old sea keeps its own counsel.\n\n" * 60, encoding="utf-8")
    named = {
        "train compress-smollm2-135m": ["--model.source", plain, "--loss.distill.source", plain, "--data.tokenizer", plain],
        "train uptrain-smollm2-135m": ["--loss.distill.source", plain, "--data.tokenizer", plain],
        "train exits-post-training": ["--data.tokenizer", plain],
    }
    for line in PATHS[path].splitlines():
        program, *words = [plain if word == "smollm2-135m" else word for word in shlex.split(line)]
        assert program == "fathomlm"
        for begins, more in SMALLER.items():
            words += more if line.startswith(f"fathomlm {begins}") else []
        for begins, names in named.items():
            words += names if line.startswith(f"fathomlm {begins}") else []
        if words[0] == "serve":
            read_command(words)  # tests/serve and the slow tests of the wheel start servers
        else:
            assert main(words) == 0, (line, capsys.readouterr().err)
