"""Local tasks: their prompts, their files, their numbers."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.fields import Fields
from fathomlm.lab.evaluate.likelihood import FORMS, Question, answer, count, read_task, recognise, samples
from fathomlm.lab.evaluate.outputs import FULL, Output
from fathomlm.lab.evaluate.scoring import Score, Scorer, TextEncoder
from fathomlm.lab.evaluate.tasks import GROUPS, TASKS, check_folder, find_file, gather, members, shots_file
from lab.evaluate.evaluate_models import model_of, slow_score

pytestmark = pytest.mark.usefixtures("one_thread")
Record = dict[str, Any]
ROWS: dict[str, Record] = {
    "word": {"id": 0, "text": "a b c", "context": "a b", "target": "c"},
    "continuation": {"id": 0, "context": "A man sits. he", "choices": ["stands.", "falls."], "gold": 1},
    "question": {"id": 0, "question": "What?", "choices": ["this", "that"], "gold": 0},
    "passage": {"id": 0, "passage": "It rains. ", "question": "Does it?", "choices": ["no", "yes"], "gold": 1},
    "subject": {"id": 0, "subject": "abstract_algebra", "question": " Why?", "choices": ["x", "y"], "gold": 0},
    "context options": {"id": 0, "context_options": ["Ann met", "Bob met"], "continuation": "them.", "gold": 1},
}
PROMPTS: dict[str, tuple[tuple[str, str], ...]] = {
    "word": (("a b", " c"),),
    "continuation": (("A man sits. he", " stands."), ("A man sits. he", " falls.")),
    "question": (("Question: What?\nAnswer:", " this"), ("Question: What?\nAnswer:", " that")),
    "passage": (
        ("It rains.\nQuestion: Does it?\nAnswer:", " no"),
        ("It rains.\nQuestion: Does it?\nAnswer:", " yes"),
    ),
    "subject": (
        ("The following are questions (with answers) about abstract algebra.\n\nQuestion: Why?\nAnswer:", " x"),
        ("The following are questions (with answers) about abstract algebra.\n\nQuestion: Why?\nAnswer:", " y"),
    ),
    "context options": (("Ann met", " them."), ("Bob met", " them.")),
}


def item_of(record: Record, *, bare: bool = False) -> Question:
    row = Fields(record, "here line 1", error=DataError)
    return recognise(row).build(row, bare)


def write(path: Path, rows: list[Record]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def questions(many: int, first: int = 0) -> list[Record]:
    return [
        {"question": f"How deep is line {n}?", "choices": [f"{n} feet", f"{n * 7} fathoms", "dry"], "gold": n % 3}
        for n in range(first, first + many)
    ]


@pytest.mark.parametrize("name", FORMS)
def test_each_form_asks_as_the_harness_does(name: str) -> None:
    assert recognise(Fields(ROWS[name], "here", error=DataError)) is FORMS[name]
    item = item_of(ROWS[name])
    assert item.behind("") == PROMPTS[name]
    assert item.gold == ROWS[name].get("gold", 0)
    assert item.behind("EX\n\n")[0][0] == item.preamble + "EX\n\n" + PROMPTS[name][0][0].removeprefix(item.preamble)


def test_a_bare_question_stands_alone() -> None:
    assert item_of(ROWS["question"], bare=True).requests == (("What?", " this"), ("What?", " that"))
    assert {name for name, task in TASKS.items() if task.bare} == {"openbookqa"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("question", {"gold": 2}, "gold must be an integer from 0 to 1, got 2"),
        ("question", {"gold": -1}, "from 0 to 1"),
        ("question", {"gold": True}, "from 0 to 1"),
        ("question", {"gold": "0"}, "got '0'"),
        ("question", {"choices": ["one"]}, "at least two choices, got 1"),
        ("question", {"choices": "one"}, "at least two choices, got 1"),
        ("question", {"choices": ["one", ""]}, "a choice in 'choices' is empty"),
        ("question", {"choices": ["one", 2]}, "choices must be a list of strings, and holds 2"),
        ("question", {"question": None}, "question must be a string, got null"),
        ("question", {"question": "\ud800"}, "question must be a string, got"),
        ("word", {"target": 5}, "target must be a string, got 5"),
    ],
)
def test_rows_that_cannot_be_asked_say_where(name: str, change: Record, message: str) -> None:
    with pytest.raises(DataError, match=f"^here line 1: .*{message}"):
        item_of(ROWS[name] | change)


def test_unknown_forms_say_what_is_known() -> None:
    with pytest.raises(DataError, match=r"no task has the fields text; known forms: .*`fathomlm eval ppl`"):
        recognise(Fields({"text": "a"}, "here", error=DataError))


def test_accuracy_and_perplexity_by_hand() -> None:
    word = FORMS["word"]
    items = [item_of(ROWS["word"])] * 4
    found = count(word, items, [[Score(-1.0, True)], [Score(-3.0, False)], [Score(-2.0, True)], [Score(-2.0, True)]])
    assert found == {
        "examples": 4,
        "acc": 0.75,
        "acc_stderr": pytest.approx(math.sqrt(0.75 * 0.25 / 3)),
        "perplexity": pytest.approx(math.exp(2)),
    }
    options = count(FORMS["context options"], [item_of(ROWS["context options"])], [[Score(-2, False), Score(-1, False)]])
    assert options == {"examples": 1, "acc": 1.0, "acc_stderr": 0.0}


def test_normalising_divides_by_bytes_and_not_by_characters() -> None:
    item = item_of({"question": "q", "choices": ["äöüßéèàç", "abcdefghijk"], "gold": 0})
    scores = [[Score(-12.0, False), Score(-10.0, False)]]
    assert item.lengths == (16, 11)
    found = count(FORMS["question"], [item], scores)
    assert (found["acc"], found["acc_norm"]) == (0.0, 1.0)
    assert -12 / 16 > -10 / 11 > -12 / 8  # by characters the second would win
    tie = [[Score(-16.0, False), Score(-11.0, False)]]
    assert count(FORMS["question"], [item], tie)["acc_norm"] == 1.0


@pytest.mark.parametrize("name", FORMS)
def test_a_task_is_its_rows_scored_one_by_one(name: str, tmp_path: Path) -> None:
    model = model_of("looped")
    outputs = (Output(layer=2), FULL)
    encoder = TextEncoder(model)
    row = ROWS[name]
    rows = [row | {"context": "another"} if "context" in row else row, row, row | {"gold": 0}]
    task = read_task(write(tmp_path / "task.jsonl.gz", rows), name="task")
    found = answer(task, Scorer(model, outputs, batch=2), encoder)
    for output, answered in zip(outputs, found, strict=True):
        slow = [
            [slow_score(model, output, pair) for pair in encoder.pairs(item.behind(""))]
            for item in (FORMS[name].build(Fields(each, "", error=DataError), False) for each in rows)
        ]
        for mine, theirs in zip(answered.scores, slow, strict=True):
            assert [s.log_likelihood for s in mine] == pytest.approx([s.log_likelihood for s in theirs], abs=1e-4)
        assert answered.metrics == pytest.approx(count(FORMS[name], task.items, slow), rel=1e-4)
    first = samples(task, found[1])[1]
    assert (first["example"], first["gold"]) == (1, row.get("gold", 0))
    assert first["choices"][0]["continuation"] == PROMPTS[name][0][1]
    assert first["choices"][0]["log_likelihood"] == found[1].scores[1][0].log_likelihood


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "task.jsonl", questions(5))
    assert read_task(path, name="t", limit=2).items == read_task(path, name="t").items[:2]
    with pytest.raises(OptionError, match="--limit must be >= 1, got 0"):
        read_task(path, name="t", limit=0)


def test_worked_examples_come_from_another_part_and_never_from_the_question_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "task_test.jsonl", questions(6))
    own = read_task(path, name="t", shots=5)
    for item, text in zip(own.items, own.examples, strict=True):
        assert item.example not in text
        assert all(other.example + "\n\n" in text for other in own.items if other is not item)
    some = read_task(path, name="t", shots=2)
    assert some.examples == read_task(path, name="t", shots=2).examples
    assert len(set(some.examples)) > 1
    assert read_task(path, name="t", shots=2, limit=3).examples == some.examples[:3]
    write(tmp_path / "task_dev.jsonl", questions(3, first=50))
    write(tmp_path / "task_train.jsonl", questions(3, first=100))
    other = read_task(path, name="t", shots=3)
    assert all("line 100?" in text and "line 50?" not in text for text in other.examples)
    assert other.items[0].behind(other.examples[0])[0][0].endswith("\n\nQuestion: How deep is line 0?\nAnswer:")
    with pytest.raises(DataError, match="4 worked examples requested, but there are only 3 to take"):
        read_task(path, name="t", shots=4)


def test_worked_examples_are_of_the_same_subject(tmp_path: Path) -> None:
    rows = [
        {**ROWS["subject"], "subject": subject, "question": f"{subject} {n}?"}
        for n in range(3)
        for subject in ("sea", "sky")
    ]
    task = read_task(write(tmp_path / "mmlu.jsonl", rows), name="mmlu", shots=2)
    for item, text in zip(task.items, task.examples, strict=True):
        assert text.count(f"Question: {item.subject} ") == 2
        assert text.count("Question:") == 2
    with pytest.raises(DataError, match="3 worked examples requested, but there are only 2 about sea"):
        read_task(tmp_path / "mmlu.jsonl", name="mmlu", shots=3)


def test_files_are_found_by_name_and_part(tmp_path: Path) -> None:
    for name in (
        "lambada_openai_test.jsonl.gz", "hellaswag_val.jsonl.gz", "hellaswag_test.jsonl", "arc_easy-test.jsonl",
        "arc_easy_train.jsonl", "mmlu_test.jsonl", "mine.jsonl", "piqa_train.jsonl", "winogrande.txt",
    ):  # fmt: skip
        (tmp_path / name).write_text("")
    (tmp_path / "openbookqa.jsonl").mkdir()
    found = {name: find_file(tmp_path, name) for name in (*TASKS, "mine", "hellaswag_test")}
    assert {name: None if path is None else path.name for name, path in found.items()} == {
        "lambada_openai": "lambada_openai_test.jsonl.gz",
        "hellaswag": "hellaswag_val.jsonl.gz",  # the part that is the standard
        "piqa": None,  # what is trained on is not evaluated
        "winogrande": None,
        "arc_easy": "arc_easy-test.jsonl",
        "arc_challenge": None,
        "openbookqa": None,
        "mmlu_continuation": "mmlu_test.jsonl",
        "mine": "mine.jsonl",
        "hellaswag_test": "hellaswag_test.jsonl",
    }
    with pytest.raises(DataError, match=r"unknown task 'helaswag' \(did you mean 'hellaswag"):
        find_file(tmp_path, "helaswag")
    assert shots_file(tmp_path / "arc_easy-test.jsonl") == tmp_path / "arc_easy_train.jsonl"
    assert shots_file(tmp_path / "hellaswag_test.jsonl") == tmp_path / "hellaswag_val.jsonl.gz"
    assert shots_file(tmp_path / "mine.jsonl") is None
    with pytest.raises(DataError, match="is a file; --data takes a folder"):
        check_folder(tmp_path / "mine.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        check_folder(tmp_path / "nowhere")


def test_openbookqa_is_bare_by_its_file_name(tmp_path: Path) -> None:
    path = write(tmp_path / "openbookqa_test.jsonl", questions(1))
    assert read_task(path, name="any").items[0].requests[0][0] == "How deep is line 0?"


def test_the_thesis_groups_average_as_its_tables() -> None:
    names = {"lambada_openai": 0.5, "hellaswag": 0.1, "piqa": 0.2, "winogrande": 0.6, "arc_easy": 0.3, "arc_challenge": 0.5}
    results: dict[str, Any] = {name: {"acc": value, "acc_norm": value + 0.1} for name, value in names.items()}
    del results["lambada_openai"]["acc_norm"], results["winogrande"]["acc_norm"]
    results["mmlu_continuation"] = {"acc": 0.25, "acc_norm": 0.9}
    mor = gather("thesis-mor", results)
    assert mor.columns == pytest.approx(
        {"LAMBADA": 0.5, "HellaSwag": 0.2, "PIQA": 0.3, "WinoGrande": 0.6, "ARC": 0.5, "MMLU": 0.25}
    )
    assert mor.average == pytest.approx((0.5 + 0.2 + 0.3 + 0.6 + 0.5 + 0.25) / 6)
    assert mor.missing == ()
    rrt = gather("thesis-rrt", results)
    assert (rrt.columns["OpenBookQA"], rrt.average, rrt.missing) == (None, None, ("openbookqa",))
    assert list(rrt.columns) == ["LAMBADA", "HellaSwag", "PIQA", "WinoGrande", "ARC-e", "ARC-c", "OpenBookQA"]
    half = {name: result for name, result in results.items() if name != "arc_easy"}
    assert gather("thesis-mor", half).columns["ARC"] is None
    assert members("thesis-mor")[-3:] == ("arc_easy", "arc_challenge", "mmlu_continuation")
    assert all(task in TASKS for group in GROUPS for task in members(group))
