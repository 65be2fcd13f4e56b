"""Our adapter, `fathomlm eval --data` and lm-evaluation-harness' own Hugging Face model agree on every single example.

`benchmarks/lm_eval_parity.py` does the comparing. A tiny random model and made-up rows are tried always. The real SmolLM2 on
200 real rows of each task needs files that are not ours to ship: FATHOMLM_TASK_DATA names the folder that has them
(docs/evaluate.md).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

import fathomlm
from fathomlm.checkpoints.export import export
from fathomlm.errors import FathomError

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = "FATHOMLM_TASK_DATA"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "deep", "water", "six", "fathoms", "é"]


@pytest.fixture(scope="module")
def parity() -> Iterator[Any]:
    """The script as a module; it imports what lies beside it."""
    place = Path(__file__).parents[3] / "benchmarks"
    sys.path.append(str(place))
    spec = importlib.util.spec_from_file_location("lm_eval_parity", place / "lm_eval_parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(place))
    del sys.modules[spec.name]


def hflm(directory: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=4)


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty rows of each form, some of them longer than the model reads."""
    draw, place = random.Random(4), tmp_path_factory.mktemp("tasks")
    last = [{"context": words(draw, 30), "target": draw.choice(WORDS)} for _ in range(20)]
    last[7]["context"] = " ".join(WORDS * 20)
    many = [{"context": words(draw, 20), "choices": [words(draw, 9) for _ in range(4)], "gold": n % 4} for n in range(20)]
    for name, rows in (("lambada_openai_test", last), ("hellaswag_val", many)):
        text = "".join(json.dumps({"id": str(n), **row}) + "\n" for n, row in enumerate(rows))
        (place / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return place


def test_made_up_rows_example_by_example(parity: Any, tiny_model: Any, folder: Path, tmp_path: Path) -> None:
    """The tiny model as transformers reads our export of it: a round trip, so weights and tokenizer are the same."""
    theirs = hflm(export(tiny_model, tmp_path / "plain"))
    found = parity.compare(tiny_model, theirs, folder, ("lambada", "hellaswag"), None)
    for name, requests in (("lambada", 20), ("hellaswag", 80)):
        task = found[name]
        assert (task["examples"], task["requests"]) == (20, requests)
        assert task["equal"], task["against_hflm"]
        assert task["files"].items() <= task["hflm"].items()
        assert task["adapter"] == task["hflm"]
    assert 0 < found["hellaswag"]["hflm"]["acc"] < 1


def test_another_model_is_told_apart(parity: Any, tiny_model: Any, folder: Path, tmp_path: Path) -> None:
    """One weight off by a little, and a limit: the comparison can fail, and says where."""
    directory = export(tiny_model, tmp_path / "plain")
    other = fathomlm.load(directory, dtype="float32")
    with torch.no_grad():
        other.decoder.embed.weight[:, 0] += 0.5
    found = parity.compare(other, hflm(directory), folder, ("hellaswag",), 12)["hellaswag"]
    assert found["examples"] == 12
    assert not found["equal"]
    assert found["against_hflm"]["adapter"]["largest_gap"] > parity.TOLERANCE
    assert found["against_hflm"]["files"]["examples_that_differ"]["asked"] == []


def test_a_difference_in_a_single_decision_counts(parity: Any) -> None:
    one = parity.Example(asked=(("a", " b"),), scores=((-1.0, True),), right={"acc": True})
    for change in (
        {"asked": (("a", "b"),)},
        {"scores": ((-1.0, False),)},
        {"scores": ((-1.1, True),)},
        {"right": {"acc": False}},
    ):
        assert not parity._against([one, one], [one, dataclasses.replace(one, **change)])["equal"]
    near = dataclasses.replace(one, scores=((-1.00001, True),))
    assert parity._against([one], [near])["equal"]


def test_a_folder_without_the_files_is_one_line(parity: Any, tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(FathomError, match="has no file for lambada, hellaswag"):
        parity.compare(tiny_model, None, tmp_path, ("lambada", "hellaswag"), None)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_real_model_on_real_rows(parity: Any, smollm2_path: Path) -> None:
    """Eight minutes on one core. The weights are read by transformers' GGUF reader on one side and by ours on the other."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} names no folder with LAMBADA and HellaSwag")
    where = {"pretrained_model_name_or_path": smollm2_path.parent, "gguf_file": smollm2_path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(**where), batch_size=16)
    ours = fathomlm.load(smollm2_path, dtype="float32")
    found = parity.compare(ours, theirs, Path(os.environ[FOLDER]), ("lambada", "hellaswag"), 200)
    for task in found.values():
        assert task["examples"] == 200
        assert task["equal"], task["against_hflm"]
