"""What is asked of a judge, what its words say, and what they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.judge_client import Reply
from fathomlm.lab.evaluate.judge_prompts import (
    DIMENSIONS,
    JudgedOutputs,
    JudgedRow,
    Templates,
    read_outputs,
    read_scores,
    read_verdict,
)
from fathomlm.lab.evaluate.judge_questions import Answers, JudgeQuestion, questions
from fathomlm.lab.evaluate.judge_results import likert, pairwise
from jsonl import write_jsonl

TWO = ("relevance", "fluency")


@pytest.mark.parametrize(
    "answer",
    [
        "Relevance: 4\nFluency: 2",
        "relevance: 4, fluency: 2",
        "**Relevance**: 4/5\n**Fluency:** 2 / 5",
        '{"relevance": 4, "fluency": 2}',
        "- Relevance = 4 out of 5 (good)\n- Fluency = 2. It stumbles.",
        "Relevance: 4\nFluency: 2\n\nIn all: Relevance: 4",
    ],
)
def test_scores_that_can_be_read(answer: str) -> None:
    assert read_scores(answer, TWO) == {"relevance": 4, "fluency": 2}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Relevance: 4",
        "4, 2",
        "Relevance: 4\nFluency: 0",
        "Relevance: 4\nFluency: 6",
        "Relevance: 4\nFluency: 45",
        "Relevance: 4\nFluency: 2.5",
        "Relevance: 4\nFluency: 2-3",
        "Relevance: 4\nFluency: 2 to 3",
        "Relevance: 4\nFluency: 4/10",
        "Relevance: 4\nFluency: 4 out of 10",
        "Relevance: 4\nFluency: 2\nFluency: 3",
        "Relevance: 4\nFluency: 2\nFluency: 9",
        "Irrelevance: 4\nFluency: 2",
        "Relevance: good\nFluency: 2",
    ],
)
def test_scores_that_are_not_guessed(answer: str) -> None:
    assert read_scores(answer, TWO) is None


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Summary 0", "first"),
        ('"Summary 1".', "second"),
        ("**Summary 1**\nIt says more than Summary 0.", "second"),
        ("\n\nThe better summary is Summary 0.", "first"),
        ("Answer: 1", "second"),
        ("0", "first"),
        ("Summary 1 is better than Summary 0 since it is shorter.", "second"),
        ("It's a tie.", "tie"),
        ("Tie", "tie"),
        ("", None),
        ("Summary 0 or Summary 1", None),
        ("Summary 0 is worse.", None),
        ("Summary 2", None),
        ("Summary 01", None),
        ("Not 0", None),
        ("I prefer the one that has 1 mistake", None),
        ("Both are good: Summary 0, Summary 1", None),
    ],
)
def test_verdicts(answer: str, verdict: str | None) -> None:
    assert read_verdict(answer) == verdict


def test_the_thesis_templates() -> None:
    templates = Templates()
    asked = templates.scores("An {article}.", "A {text}.")
    assert asked.startswith(
        "Evaluate the quality of summaries written for a news article. Rate each summary on four dimensions: relevance, "
        "informativeness, fluency, and coherence. You should rate on a scale from 1 (worst) to 5 (best).\n\n"
        "Article: An {article}.\nSummary: A {text}.\n"
    )
    assert read_scores(asked, DIMENSIONS) is None, "a judge that repeats the question has not answered it"
    assert templates.better("S", "{text_1}", "B") == (
        'Given a new article, which summary is better? Answer "Summary 0" or "Summary 1". You do not need to explain the '
        "reason.\n\nArticle: S\nSummary 0: {text_1}\nSummary 1: B"
    )
    assert read_verdict(templates.better("S", "A", "B")) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"likert": "{source}"}, "the Likert template is missing {text}"),
        ({"pairwise": "{source} {text_0} {text_1} {text_2}"}, "has {text_2}, which nothing fills"),
        ({"dimensions": ("a", "A")}, "--dimensions must be different names"),
        ({"dimensions": ()}, "--dimensions must be different names, got none"),
    ],
)
def test_templates_that_cannot_work(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("{", r"\{").replace("}", r"\}")):
        Templates(**given)


def test_files_with_one_and_two_systems(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{n}", "text": f"a{n}", "references": []} for n in range(9)])
    two = write_jsonl(tmp_path / "b.jsonl", [{"prompt": f"p{n}", "text": f"b{n}"} for n in range(9)])
    both = write_jsonl(
        tmp_path / "c.jsonl", [{"source": "s", "prompt": "p", "output_a": "x", "output_b": "y", "third": "z"}]
    )
    assert read_outputs([one], limit=2) == JudgedOutputs(
        systems=("a",), rows=tuple(JudgedRow(number=n, source=f"p{n}", texts=(f"a{n}",)) for n in range(2))
    )
    found = read_outputs([one, two])
    assert (found.systems, found.rows[3]) == (("a", "b"), JudgedRow(number=3, source="p3", texts=("a3", "b3")))
    assert read_outputs([both]) == JudgedOutputs(
        systems=("output_a", "output_b"), rows=(JudgedRow(number=0, source="s", texts=("x", "y")),)
    )
    named = read_outputs([both], source="prompt", outputs=["third", "output_a"], names=["new", "old"])
    assert named == JudgedOutputs(systems=("new", "old"), rows=(JudgedRow(number=0, source="p", texts=("z", "x")),))
    drawn = read_outputs([one, two], draw=4, seed=1)
    assert [row.number for row in drawn.rows] == sorted({row.number for row in drawn.rows})
    assert len(drawn.rows) == 4
    assert drawn == read_outputs([one, two], draw=4, seed=1) != read_outputs([one, two], draw=4, seed=3)


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "a.jsonl", [{"source": "s", "text": "t"}, {"source": "u", "text": "t"}])
    with pytest.raises(DataError, match=r"2 rows and .* 1; both must answer"):
        read_outputs([one, write_jsonl(tmp_path / "b.jsonl", [{"source": "s", "text": "t"}])])
    with pytest.raises(DataError, match=r"row 2 of .* have different sources"):
        read_outputs([one, write_jsonl(tmp_path / "b.jsonl", [{"source": "s", "text": "t"}, {"source": "v", "text": "t"}])])
    with pytest.raises(OptionError, match="has the fields a, b; set --source and --output"):
        read_outputs([write_jsonl(tmp_path / "b.jsonl", [{"a": "s", "b": "t"}])])
    with pytest.raises(DataError, match="'source' is empty"):
        read_outputs([write_jsonl(tmp_path / "b.jsonl", [{"source": " ", "text": "t"}])])
    with pytest.raises(OptionError, match="--names must give 2 different names"):
        read_outputs([one, one], names=["a", "a"])
    with pytest.raises(OptionError, match="one or two files"):
        read_outputs([one, one, one])
    with pytest.raises(OptionError, match="one field of each"):
        read_outputs([one, one], outputs=["text", "source"])


def asked_of(pairs: list[tuple[str, str]], failed: int = 0) -> Answers:
    """Rows with an answer for each order; the last `failed` rows got none for the second."""
    rows = tuple(JudgedRow(number=n, source=f"s{n}", texts=(f"a{n}", f"b{n}")) for n in range(len(pairs)))
    all_of = questions(JudgedOutputs(systems=("a", "b"), rows=rows), Templates(), ("pairwise",))
    said = [answer for pair in pairs for answer in pair]
    bad = set(all_of[len(all_of) - 2 * failed + 1 :: 2]) if failed else set()
    replies = {q: Reply(text, "stop") for q, text in zip(all_of, said, strict=True) if q not in bad}
    return Answers(replies=replies, failed=dict.fromkeys(bad, "gone"), kept=0)


def test_a_win_needs_both_orders() -> None:
    zero, one = "Summary 0", "Summary 1"
    found = pairwise(
        asked_of(
            [(zero, one), (zero, one), (one, zero), (zero, zero), (one, one), ("Tie", one), (zero, "?"), (zero, one)], 1
        ),
        ("a", "b"),
    )
    assert (found["wins"], found["ties"]) == ({"a": 2, "b": 1}, 3)
    assert (found["rows"], found["rows_counted"]) == (8, 6)
    assert found["win_rate"] == {"a": 3.5 / 6, "b": 2.5 / 6}
    assert found["votes"] == {"a": 9, "b": 4}
    assert (found["position"]["always_first"], found["position"]["always_second"]) == (1, 1)
    assert found["position"]["orders_agree"] == 3 / 6
    assert found["position"]["first_chosen"] == 7 / 13
    assert {name: found[name] for name in ("questions", "read", "unreadable", "failed")} == {
        "questions": 16, "read": 14, "unreadable": 1, "failed": 1
    }  # fmt: skip


def test_a_judge_that_looks_at_places_only_names_no_winner() -> None:
    found = pairwise(asked_of([("Summary 0", "Summary 0")] * 5), ("a", "b"))
    assert (found["wins"], found["ties"], found["votes"]) == ({"a": 0, "b": 0}, 5, {"a": 5, "b": 5})
    assert found["position"] == {"first_chosen": 1.0, "always_first": 5, "always_second": 0, "orders_agree": 0.0}
    nothing = pairwise(asked_of([("?", "?")]), ("a", "b"))
    assert (nothing["win_rate"], nothing["position"]["first_chosen"]) == ({"a": None, "b": None}, None)


def test_means_and_errors_of_scores() -> None:
    def question(row: int, system: int) -> JudgeQuestion:
        return JudgeQuestion(kind="likert", row=row, systems=(system,), prompt=f"{row} {system}")

    replies = {
        question(0, 0): Reply("relevance: 4 fluency: 1", "stop"),
        question(1, 0): Reply("relevance: 2 fluency: 1", "stop"),
        question(2, 0): Reply("relevance: 2", "length"),
        question(0, 1): Reply("?", "stop"),
    }
    found = likert(Answers(replies=replies, failed={question(1, 1): "gone"}, kept=0), ("a", "b"), TWO)["systems"]
    assert found["a"]["scores"]["relevance"] == {
        "mean": 3.0, "stderr": 1.0, "counts": {"1": 0, "2": 1, "3": 0, "4": 1, "5": 0}
    }  # fmt: skip
    assert found["a"]["scores"]["fluency"]["stderr"] == 0.0
    assert (found["a"]["read"], found["a"]["unreadable"], found["a"]["cut"]) == (2, 1, 1)
    assert (found["b"]["questions"], found["b"]["unreadable"], found["b"]["cut"], found["b"]["failed"]) == (2, 1, 0, 1)
    assert found["b"]["scores"]["relevance"]["mean"] is None
