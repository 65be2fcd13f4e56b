"""The Python of README.md and of the pages runs as it stands, with a tiny model of the same depth for the one that is
downloaded. serve.md, engine.md and extending.md have tests of their own."""

from __future__ import annotations

import doctest
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, T5Config, T5ForConditionalGeneration

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"docs/serve.md", "docs/engine.md", "docs/extending.md"}
LEFT_OUT = {
    "docs/design-decisions.md": "a sketch of the decoder's loop",
    "docs/bench.md": "minutes on a CPU",
}
SHORTER = {
    "docs/conversion.md": ("32768", "290"),
    "docs/training.md": (
        '"--budget.steps", "50"',
        '"--budget.steps", "2", "--schedule.warmup", "1", "--evaluate.rows", "2"',
    ),
}
DOWNLOADS = "google/mt5-large"


def blocks_of(page: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in found if DOWNLOADS not in block]


RUN = [page for page in PAGES if page not in ELSEWHERE | LEFT_OUT.keys() and blocks_of(page)]


@pytest.fixture(scope="module")
def deep(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty layers, as SmolLM2-135M has."""
    directory = tmp_path_factory.mktemp("docs") / "deep"
    sizes = {"hidden_size": 72, "intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    ends = {"bos_token_id": tiny_model.config.bos_token_id, "eos_token_id": tiny_model.config.eos_token_id}
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, **ends, num_hidden_layers=30, vocab_size=tiny_model.architecture.vocab, max_position_embeddings=512
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tiny_model.tokenizer.save_pretrained(directory)
    return directory


def lay_out(place: Path) -> None:
    """What the examples read."""
    shutil.copy(ROOT / "README.md", place / "README.md")
    (place / "train.jsonl").write_text(json.dumps({"de": "sechs Faden tief", "en": "six fathoms deep"}) + "\n")
    shape = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(**shape, vocab_size=64, decoder_start_token_id=0)).save_pretrained(place / "tiny-t5")


@pytest.mark.parametrize("page", RUN)
@pytest.mark.usefixtures("one_thread")
def test_the_examples_of_a_page_run(
    page: str, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path)
    if page == "docs/checkpoints.md":
        import fathomlm

        fathomlm.convert(deep, recursions=2).save_pretrained("looped")
    names: dict[str, Any] = {}
    before, after = SHORTER.get(page, ("", ""))
    assert before in "".join(blocks_of(page))
    for block in blocks_of(page):
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, {}, page, page, 0)
            assert doctest.DocTestRunner().run(test).failed == 0
            continue
        code = block.replace(before, after) if before else block
        exec(compile(code.replace('"smollm2-135m"', repr(str(deep))), page, "exec"), names)
    said = capsys.readouterr().out
    for stated in re.findall(r"^print\(.*\)  # ([\d. ]+)(?::.*)?$", "".join(blocks_of(page)), re.MULTILINE):
        assert stated in said, "what the page says is printed"


def test_most_pages_are_run() -> None:
    assert len(RUN) >= 9
    assert set(PAGES) >= ELSEWHERE | LEFT_OUT.keys()
