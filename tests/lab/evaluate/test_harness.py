"""The model for lm-evaluation-harness says what the harness' own Hugging Face model says, and is found by name."""

from __future__ import annotations

import importlib.metadata
import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.evaluate.evaluate_models import model_of

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from lm_eval.tasks import TaskManager

from fathomlm.checkpoints.export import export
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.harness import HarnessModel, read_batch, read_sampling
from fathomlm.lab.evaluate.likelihood import answer, read_task
from fathomlm.lab.evaluate.outputs import FULL, Output, exit_outputs
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder
from fathomlm.lab.evaluate.tasks import HarnessTasks
from jsonl import write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", ";", "deep", "water", "é", "line\n", "six"]


def words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]  # type: ignore[arg-type]


def random_pairs(many: int) -> list[tuple[str, str]]:
    draw = random.Random(5)
    pairs = [(words(draw, 40), " " + words(draw, 6)) for _ in range(many - 10)]
    pairs += [("", words(draw, 4)) for _ in range(2)] + [(words(draw, 4) + " ", words(draw, 2)) for _ in range(2)]
    pairs += [(words(draw, 400), " " + words(draw, 3)) for _ in range(2)]  # longer than the context
    context = words(draw, 10)
    return pairs + [(context, f" {word}") for word in ("a", "b", "fathom", "the")]


@pytest.fixture(scope="module")
def theirs(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness' own model over what we export of `tiny_model`."""
    from lm_eval.models.huggingface import HFLM

    directory = export(tiny_model, tmp_path_factory.mktemp("models") / "plain")
    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture
def ours(tiny_model: Any) -> HarnessModel:
    return HarnessModel(tiny_model, batch_size=4)


def test_likelihoods_are_those_of_the_harness(ours: HarnessModel, theirs: Any) -> None:
    pairs = random_pairs(50)
    greedy = [("the quick", text) for text in theirs.generate_until(
        requests("generate_until", [("the quick", {"until": [], "max_gen_toks": n}) for n in (1, 2, 5)]), disable_tqdm=True
    ) if text]  # fmt: skip
    asked = requests("loglikelihood", [*pairs, *greedy])
    mine, other = ours.loglikelihood(asked, disable_tqdm=True), theirs.loglikelihood(asked, disable_tqdm=True)
    assert len(mine) >= 50
    assert [likely for likely, _ in mine] == pytest.approx([likely for likely, _ in other], abs=1e-4)
    assert [flag for _, flag in mine] == [flag for _, flag in other]
    assert {flag for _, flag in mine} == {True, False}


def test_rolling_likelihoods_are_those_of_the_harness(ours: HarnessModel, theirs: Any) -> None:
    draw = random.Random(2)
    asked = requests("loglikelihood_rolling", [(words(draw, most),) for most in (1, 20, 300, 700)])
    mine = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert mine == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-5)


def test_texts_are_those_of_the_harness(ours: HarnessModel, theirs: Any) -> None:
    draw = random.Random(3)
    ends: list[dict[str, Any]] = [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": ["e", "a"], "max_gen_toks": 20, "do_sample": False},
        {"until": [], "max_gen_toks": 3, "temperature": 0.0, "do_sample": False},
    ]
    prompts = [words(draw, most) for most in (3, 20, 8, 400, 1, 12)]
    asked = requests("generate_until", [(prompt, ends[i % 3]) for i, prompt in enumerate(prompts)])
    mine = ours.generate_until(asked, disable_tqdm=True)
    assert mine == theirs.generate_until(asked, disable_tqdm=True)
    assert len(set(mine)) > 3


def test_one_pass_answers_for_all_outputs(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = exit_outputs(tiny_model.plan, "all")
    several = HarnessModel(tiny_model, batch_size=4, outputs=outputs)
    asked = requests("loglikelihood", random_pairs(12))
    texts = requests("loglikelihood_rolling", [("the quick brown fox",), ("a",)])
    passes = []
    score = several.scorer.score
    monkeypatch.setattr(several.scorer, "score", lambda *args: passes.append(1) or score(*args))
    for number, output in enumerate(outputs):
        several.at = number
        alone = HarnessModel(tiny_model, exit_layer=output.layer)
        mine, other = several.loglikelihood(asked, disable_tqdm=True), alone.loglikelihood(asked, disable_tqdm=True)
        assert [likely for likely, _ in mine] == pytest.approx([likely for likely, _ in other], abs=1e-4)
        rolled = several.loglikelihood_rolling(texts, disable_tqdm=True)
        assert rolled == pytest.approx(alone.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-5)
        until = requests("generate_until", [("the quick", {"max_gen_toks": 6})])
        assert several.generate_until(until, disable_tqdm=True) == alone.generate_until(until, disable_tqdm=True)
    assert len(passes) == 2


def test_generation_at_an_exit_and_a_depth_is_that_of_decoding(tiny_model: Any) -> None:
    from fathomlm.decode.full import generate

    asked = requests("generate_until", [("the quick brown", {"until": [], "max_gen_toks": 8})])
    for arguments, output in (({"exit_layer": 2}, Output(layer=2)), ({"max_depth": 1}, Output(max_depth=1)), ({}, FULL)):
        (text,) = HarnessModel(tiny_model, **arguments).generate_until(asked, disable_tqdm=True)
        how = {"exiting": output.exiting, "control": output.control}
        assert text == generate(tiny_model, "the quick brown", max_new_tokens=8, **how)[0].text  # type: ignore[arg-type]


def test_it_is_found_by_name_and_by_entry_point(tiny_model_dir: Path) -> None:
    assert get_model("fathomlm") is HarnessModel
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = project["entry-points"]["lm_eval.models"]["fathomlm"]
    point = importlib.metadata.EntryPoint("fathomlm", target, "lm_eval.models")
    registry: Any = Registry("model")
    registry.register("fathomlm", target=point)
    assert registry.get("fathomlm") is HarnessModel
    made = get_model("fathomlm").create_from_arg_string(
        f"pretrained={tiny_model_dir},dtype=float32,exit_layer=2", {"batch_size": "auto", "device": "cuda:0"}
    )
    assert made.scorer.outputs == (Output(layer=2, recursion=1),)
    assert (made.batch_size, made.max_length) == (16, 256)
    assert made.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert made.get_model_info()["model_output"] == "layer 2 (recursion 1)"


def test_settings_of_tasks_in_our_words() -> None:
    assert read_sampling({"until": "\n", "do_sample": False, "temperature": 0.7}) == Sampling(
        max_new_tokens=256, stop=("\n",)
    )
    assert read_sampling({"until": ["", "x"], "max_new_tokens": 9, "num_beams": 1}).stop == ("x",)
    assert read_sampling({"max_gen_toks": 3, "max_tokens": 9}).max_new_tokens == 3
    drawn = read_sampling({"do_sample": True, "top_p": 0.5, "seed": 3})
    assert (drawn.temperature, drawn.top_p, drawn.seed) == (1.0, 0.5, 3)
    assert read_sampling({"temperature": 0.5}).temperature == 0.5
    with pytest.raises(OptionError, match="unknown option 'num_beams'"):
        read_sampling({"num_beams": 4})
    assert (read_batch("auto:4", None), read_batch(None, 4), read_batch("7", None)) == (16, 4, 7)
    with pytest.raises(OptionError, match="an integer or auto, got 'many'"):
        read_batch("many", None)
    with pytest.raises(OptionError, match="cannot be combined"):
        HarnessModel(model_of("looped"), exit_layer=2, max_depth=1)
    with pytest.raises(OptionError, match="leave no room for a prompt"):
        HarnessModel(model_of("plain")).generate_until(requests("generate_until", [("a", {})]))


def test_chats_are_written_in_the_model_s_own_format(ours: HarnessModel) -> None:
    history = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(history) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ours.apply_chat_template(history, add_generation_prompt=False) == "<|im_start|>user\nhi"
    assert ours.chat_template(True) == ours.tokenizer.chat_template
    assert ours.chat_template(False) is None


def yaml_tasks(place: Path) -> None:
    """Two tasks of the harness over local files: last words and choices, and a group of both."""
    words_rows = [{"context": f"the quick {word}", "target": "fox"} for word in WORDS if word.isalpha()]
    choice_rows = [
        {"context": f"the {word} is", "choices": ["deep water", "a fox jumps", "é line"], "gold": i % 3}
        for i, word in enumerate(WORDS)
    ]
    common = (
        f"dataset_path: json\ntest_split: test\nmetadata: {{version: 1}}\ndataset_kwargs: {{cache_dir: {place / 'cache'}, "
    )
    for name, rows in (("tiny_words", words_rows), ("tiny_choices", choice_rows)):
        file = place / f"{name}.jsonl"
        write_jsonl(file, rows)
        kind = (
            "output_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: '{{\" \" + target}}'\n"
            "metric_list: [{metric: perplexity}, {metric: acc}]\n"
            if name == "tiny_words"
            else "output_type: multiple_choice\ndoc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
            "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_bytes}]\n"
        )
        text = f"task: {name}\n{common}data_files: {{test: {file}}}}}\n{kind}"
        (place / f"{name}.yaml").write_text(text, encoding="utf-8")
    (place / "both.yaml").write_text(
        "group: tiny_both\ntask: [tiny_words, tiny_choices]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n",
        encoding="utf-8",
    )


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness without its own thousands of tasks, which take seconds to list."""

    def manager(include_path: str | None = None) -> TaskManager:
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)


@pytest.mark.usefixtures("few_tasks")
def test_tasks_of_the_harness_are_what_local_files_are(tiny_model: Any, tmp_path: Path) -> None:
    yaml_tasks(tmp_path)
    outputs = (Output(layer=2), FULL)
    told: list[tuple[int, int]] = []
    names = ("tiny_words", "tiny_choices")
    tasks = HarnessTasks(names, include=tmp_path)
    found = tasks.run(tiny_model, outputs, batch=4, limit=9, on_done=lambda *now: told.append(now))
    encoder, scorer = TextEncoder(tiny_model), Scorer(tiny_model, outputs)
    for name in names:
        local = answer(read_task(tmp_path / f"{name}.jsonl", name=name, limit=9), scorer, encoder)
        for theirs, mine in zip(found, local, strict=True):
            metrics = dict(mine.metrics)
            if name == "tiny_choices":
                metrics["acc_bytes"] = metrics.pop("acc_norm")
                del metrics["acc_norm_stderr"]
            assert theirs[name] == pytest.approx(metrics, rel=1e-4)
    both = HarnessTasks(["tiny_both"], include=tmp_path).run(tiny_model, (FULL,), batch=4, limit=9)[0]["tiny_both"]
    assert both["examples"] == 18
    assert both["acc"] == pytest.approx((found[1]["tiny_words"]["acc"] + found[1]["tiny_choices"]["acc"]) / 2)
    assert told
    assert found[0] != found[1]


@pytest.mark.usefixtures("few_tasks")
def test_what_the_harness_cannot_load_is_one_line(tiny_model: Any, tmp_path: Path) -> None:
    yaml_tasks(tmp_path)
    (tmp_path / "tiny_words.jsonl").unlink()
    with pytest.raises(DataError, match=r"tiny_words could not be loaded: .*; --data DIR reads from files"):
        HarnessTasks(["tiny_words"], include=tmp_path).run(tiny_model, (FULL,), batch=2)
    with pytest.raises(OptionError, match=r"unknown task 'tiny_wrods' .did you mean 'tiny_words'"):
        HarnessTasks(["tiny_wrods"], include=tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        HarnessTasks(["tiny_words"], include=tmp_path / "nowhere")


@pytest.mark.slow
def test_the_harness_own_command_knows_the_model_by_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    """As docs/evaluate.md has it, in a process of its own, over tasks of local files."""
    yaml_tasks(tmp_path)
    model = ["--model", "fathomlm", "--model_args", f"pretrained={tiny_model_dir},exit_layer=2", "--batch_size", "4"]
    tasks = [
        "--tasks",
        "tiny_choices",
        "--include_path",
        str(tmp_path),
        "--limit",
        "6",
        "--output_path",
        str(tmp_path / "out"),
    ]
    subprocess.run([sys.executable, "-m", "fathomlm.lab.evaluate", *model, *tasks], check=True, cwd=tmp_path)
    (found,) = (tmp_path / "out").rglob("results_*.json")
    mine = HarnessTasks(["tiny_choices"], include=tmp_path).run(load(tiny_model_dir), (Output(layer=2),), batch=4, limit=6)[
        0
    ]["tiny_choices"]
    theirs = json.loads(found.read_text())["results"]["tiny_choices"]
    assert theirs["acc,none"] == pytest.approx(mine["acc"])
