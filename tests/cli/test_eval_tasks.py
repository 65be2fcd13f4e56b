"""`fathomlm eval MODEL --tasks ...`: a table or a record, what is missing, and one line for every mistake."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.lab.evaluate.outputs import FULL, Output
from fathomlm.lab.evaluate.scoring import Scorer, TextEncoder
from jsonl import write_jsonl
from lab.analyze.tiny import model_of, saved

pytestmark = pytest.mark.usefixtures("one_thread")
Record = dict[str, Any]
WORDS = [{"context": f"the quick brown {n}", "target": "fox"} for n in range(5)]
CHOICES = [{"context": f"line {n} is", "choices": ["deep", "six feet long", "é"], "gold": n % 3} for n in range(6)]
QUESTIONS = [{"question": f"Is {n} deep?", "choices": ["yes", "not at all"], "gold": n % 2} for n in range(4)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with three of the thesis' tasks."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_jsonl(folder / "lambada_openai_test.jsonl", WORDS)
    write_jsonl(folder / "hellaswag_val.jsonl", CHOICES)
    write_jsonl(folder / "arc_easy.jsonl", QUESTIONS)
    return folder


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(model_of(), tmp_path_factory.mktemp("models") / "routed"))


@pytest.fixture
def run(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def call(*words: str, model: str | Path = tiny_model_dir) -> tuple[str, str]:
        assert main(["eval", str(model), *words]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture
def mistake(mistake_of: Any, tiny_model_dir: Path) -> Callable[..., str]:
    return partial(mistake_of, "eval", str(tiny_model_dir))


def test_a_record_is_all_that_is_printed(run: Any, data: Path, tiny_model_dir: Path) -> None:
    out, err = run("--tasks", "lambada_openai,hellaswag", "--tasks", "arc_easy", "--data", str(data), "--json")
    assert err == ""
    record = json.loads(out)
    assert (record["kind"], record["model"], record["plan"]) == (
        "tasks",
        str(tiny_model_dir),
        "2 layers looped 2 times (cycle)",
    )
    assert record["tasks"]["hellaswag"] == {"from": "file", "file": str(data / "hellaswag_val.jsonl"), "examples": 6}
    (output,) = record["outputs"]
    assert output["output"] == "full"
    assert list(output["tasks"]) == ["lambada_openai", "hellaswag", "arc_easy"]
    model = load(tiny_model_dir)
    pairs = TextEncoder(model).pairs([(row["context"], f" {row['target']}") for row in WORDS])
    (scores,) = Scorer(model, batch=1).score(pairs)
    words = output["tasks"]["lambada_openai"]
    assert words["perplexity"] == pytest.approx(math.exp(-sum(s.log_likelihood for s in scores) / 5), rel=1e-4)
    assert words["acc"] == sum(s.greedy for s in scores) / 5
    assert set(output["tasks"]["arc_easy"]) == {"examples", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}


def test_a_table_for_people(run: Any, data: Path) -> None:
    record = json.loads(run("--tasks", "hellaswag", "--data", str(data), "--json")[0])
    out, err = run("--tasks", "hellaswag", "--data", str(data))
    assert err == ""
    metrics = record["outputs"][0]["tasks"]["hellaswag"]
    assert f"{metrics['acc']:.4f} ± {metrics['acc_stderr']:.4f}" in out
    assert f"{metrics['acc_norm']:.4f}" in out
    assert "perplexity" not in out


def test_the_kind_may_be_said_and_the_model_may_come_last(run: Any, data: Path, tiny_model_dir: Path, capsys: Any) -> None:
    words = ["--tasks", "hellaswag", "--data", str(data), "--limit", "2", "--json"]
    short = json.loads(run(*words)[0])
    for spelling in (["eval", "tasks", str(tiny_model_dir), *words], ["eval", *words, str(tiny_model_dir)]):
        assert main(spelling) == 0
        assert json.loads(capsys.readouterr().out)["outputs"] == short["outputs"]


def test_every_exit_of_a_looped_model(run: Any, data: Path, tiny_model_dir: Path) -> None:
    words = ("--tasks", "lambada_openai", "--data", str(data))
    record = json.loads(run(*words, "--exit", "all", "--json", "--batch-size", "2")[0])
    assert [(o["output"], o["layer"], o["recursion"]) for o in record["outputs"]] == [
        ("layer 1", 1, None),
        ("layer 2 (recursion 1)", 2, 1),
        ("layer 3", 3, None),
        ("full", None, None),
    ]
    model = load(tiny_model_dir)
    pairs = TextEncoder(model).pairs([(row["context"], f" {row['target']}") for row in WORDS])
    for found, output in zip(record["outputs"], (Output(layer=1), Output(layer=2), Output(layer=3), FULL), strict=True):
        (scores,) = Scorer(model, (output,)).score(pairs)
        expected = math.exp(-sum(score.log_likelihood for score in scores) / 5)
        assert found["tasks"]["lambada_openai"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    out, _ = run(*words, "--exit", "recursion")
    assert "layer 2 (recursion 1)" in out
    assert "layer 3" not in out


def test_every_maximum_depth_of_a_routed_model(run: Any, data: Path, routed: str) -> None:
    words = ("--tasks", "hellaswag", "--data", str(data), "--json")
    record = json.loads(run(*words, "--max-depth", "all", model=routed)[0])
    assert [output["max_depth"] for output in record["outputs"]] == [1, 2, 3]
    full = json.loads(run(*words, model=routed)[0])["outputs"][0]
    assert record["outputs"][2]["tasks"] == full["tasks"]
    one = json.loads(run(*words, "--max-depth", "1", model=routed)[0])["outputs"]
    assert one == record["outputs"][:1]


def test_a_group_says_what_is_missing(run: Any, data: Path) -> None:
    words = ("--tasks", "thesis-mor", "--data", str(data))
    out, err = run(*words, "--json")
    lacking = ["piqa", "winogrande", "arc_challenge", "mmlu_continuation"]
    record = json.loads(out)
    assert record["missing"] == lacking
    assert err == f"fathomlm: {data} has no file for {', '.join(lacking)}\n"
    group = record["outputs"][0]["groups"]["thesis-mor"]
    assert (group["average"], group["missing"]) == (None, lacking)
    tasks = record["outputs"][0]["tasks"]
    assert group["columns"]["HellaSwag"] == tasks["hellaswag"]["acc_norm"]
    assert group["columns"]["LAMBADA"] == tasks["lambada_openai"]["acc"]
    assert group["columns"]["ARC"] is None
    assert "thesis-mor has no average without piqa, winogrande" in run(*words)[0]
    for name in lacking:
        write_jsonl(data / f"{name}.jsonl", QUESTIONS)
    out, err = run(*words, "--json")
    whole = json.loads(out)["outputs"][0]["groups"]["thesis-mor"]
    assert err == ""
    assert whole["average"] == pytest.approx(sum(whole["columns"].values()) / 6)


def test_examples_go_to_a_file(run: Any, data: Path, tmp_path: Path, mistake: Any) -> None:
    out = tmp_path / "examples.jsonl"
    words = ("--tasks", "hellaswag", "--data", str(data), "--exit", "2")
    run(*words, "--out", str(out), "--json")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["layer"], line["example"]) for line in lines] == [(layer, n) for layer in (2, None) for n in range(6)]
    assert lines[1]["choices"][1]["continuation"] == " six feet long"
    assert "exists; choose another name" in mistake(*words, "--out", str(out))
    assert "is not a directory" in mistake(*words, "--out", str(tmp_path / "no" / "where"))


def test_worked_examples_change_what_is_asked(run: Any, data: Path, tmp_path: Path) -> None:
    words = ("--tasks", "hellaswag", "--data", str(data), "--shots", "2", "--json")
    run(*words, "--out", str(tmp_path / "shots.jsonl"))
    first = json.loads((tmp_path / "shots.jsonl").read_text().splitlines()[0])
    context = first["choices"][0]["context"]
    assert context.count("\n\n") == 2
    assert context.endswith("\n\nline 0 is")


def test_mistakes_are_one_line(mistake: Any, mistake_of: Any, data: Path, tmp_path: Path, routed: str) -> None:
    here = ("--data", str(data))
    assert "required: --tasks" in mistake()
    assert "--tasks names no task" in mistake("--tasks", " , ")
    assert "unknown task 'helaswag' (did you mean 'hellaswag'?)" in mistake("--tasks", "helaswag", *here)
    assert "unknown task 'thesis-mro' (did you mean 'thesis-mor'?)" in mistake("--tasks", "thesis-mro", *here)
    assert "has no file for piqa; --tasks without --data asks the hub" in mistake("--tasks", "piqa", *here)
    assert "nowhere does not exist" in mistake("--tasks", "piqa", "--data", str(tmp_path / "nowhere"))
    file = str(data / "arc_easy.jsonl")
    assert "a file itself goes to --tasks" in mistake("--tasks", "piqa", "--data", file)
    assert "arc_eesy.jsonl does not exist (did you mean" in mistake("--tasks", file.replace("easy", "eesy"))
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    assert "empty.jsonl has no rows" in mistake("--tasks", str(empty))
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(QUESTIONS[0]) + "\n\n{'question': 1}\n")
    assert "bad.jsonl line 3 is not valid JSON (" in mistake("--tasks", str(bad))
    bad.write_text(json.dumps(QUESTIONS[0]) + "\n[1]\n")
    assert "bad.jsonl line 2 holds a list, not a JSON object" in mistake("--tasks", str(bad))
    bad.write_bytes(b'{"question": "\xff"}\n')
    assert "bad.jsonl line 1 is not UTF-8 text" in mistake("--tasks", str(bad))
    write_jsonl(bad, [QUESTIONS[0], {**QUESTIONS[1], "gold": 7}])
    assert "bad.jsonl line 2: gold must be an integer from 0 to 1" in mistake("--tasks", str(bad))
    write_jsonl(bad, [{"dialogue": "a", "summaries": ["b"]}])
    assert "for `fathomlm eval generate`" in mistake("--tasks", str(bad))
    write_jsonl(bad, [{"context": "a", "choices": ["b" * 400, "c"], "gold": 0}])
    assert "does not fit the context of 256" in mistake("--tasks", str(bad))
    assert "--limit must be >= 1, got 0" in mistake("--tasks", file, "--limit", "0")
    assert "--batch-size must be >= 1, got -2" in mistake("--tasks", file, "--batch-size", "-2")
    assert "--shots must be >= 0, got -1" in mistake("--tasks", file, "--shots", "-1")
    assert "unknown exit 'layers' (did you mean 'layer'?)" in mistake("--tasks", file, "--exit", "layers")
    assert "cannot be combined" in mistake("--tasks", file, "--exit", "layer", "--max-depth", "1")
    assert "from 1 to the model's 2 recursions, got 3" in mistake("--tasks", file, "--max-depth", "3")
    assert "unknown option '--taks' (did you mean '--tasks'?)" in mistake("--tasks", file, "--taks", file)
    assert "its router already chooses" in mistake_of("eval", routed, "--tasks", file, "--exit", "layer")
    assert "unknown model 'nowhere'" in mistake_of("eval", "nowhere", "--tasks", file)
    assert "unknown kind 'genrate' (did you mean 'generate'?)" in mistake_of("eval", "genrate", routed, "--data", file)
    assert "required: KIND" in mistake_of("eval")


def test_without_lm_eval_local_tasks_still_work(run: Any, mistake: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "lm_eval":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert json.loads(run("--tasks", "thesis-rrt", "--data", str(data), "--json")[0])["outputs"]
    said = "Tasks from the hub need lm-eval (pip install 'fathomlm[eval]'); --data DIR reads them from files without it"
    assert mistake("--tasks", "hellaswag") == f"fathomlm: {said}"
    assert "unknown task 'helaswag' (did you mean 'hellaswag'?)" in mistake("--tasks", "helaswag")


def test_an_interrupt_is_one_line_and_leaves_nothing(
    data: Path, tmp_path: Path, tiny_model_dir: Path, monkeypatch: Any, capsys: Any
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scorer, "_score_batch", interrupted)
    words = ["eval", str(tiny_model_dir), "--tasks", "hellaswag", "--data", str(data), "--out", str(tmp_path / "x.jsonl")]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "fathomlm: interrupted; nothing was left half-written\n")
    assert not list(tmp_path.glob("*x.jsonl*"))


def test_help_names_the_kinds_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "--help"])
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in ("tasks", "ppl", "generate"))
    with pytest.raises(SystemExit, match="0"):
        main(["eval", "some-model", "--help"])
    assert "--tasks NAME" in capsys.readouterr().out
    code = (
        "import sys; sys.argv = ['fathomlm']; from fathomlm.cli.main import build_parser; build_parser(); "
        "from fathomlm.lab.evaluate import options; "
        "heavy = ('torch.', 'lm_eval.', 'fathomlm.lab.evaluate.'); "
        "print([n for n in sys.modules if f'{n}.'.startswith(heavy) and n != 'fathomlm.lab.evaluate'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    allowed = [f"fathomlm.lab.evaluate.{name}" for name in ("judge_client", "options")]  # a judge has options of its own
    assert done.stdout.strip() == str(allowed)


def test_files_of_one_name_are_refused(data: Path, tmp_path: Path, mistake: Callable[..., str]) -> None:
    """Not the last one of them scored without a word."""
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "arc_easy.jsonl", QUESTIONS)
    both = f"{data / 'arc_easy.jsonl'},{tmp_path / 'other' / 'arc_easy.jsonl'}"
    assert "are both called 'arc_easy'" in mistake("--tasks", both)
