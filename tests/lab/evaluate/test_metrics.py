"""Scores of texts against references, by hand and by their own packages."""

from __future__ import annotations

import sys

import pytest

from fathomlm.errors import OptionError
from fathomlm.lab.evaluate.samples import METRICS, find_metric, last_number, normalise, number, squad, word_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre and another", "theatre and another"),
        ("U.S.", "us"),
        ("the-man", "theman"),
        ("\n ", ""),
    ],
)
def test_squad_normalises_as_its_script(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_squad_by_hand() -> None:
    assert word_f1("the cat sat sat", "a cat sat") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert word_f1("dog", "cat") == 0
    assert word_f1("", "cat") == 0
    assert word_f1("the", "") == 1
    found = squad(["The cat.", "a red dog", "bird"], [["cat"], ["dog", "red cat dog"], ["fish"]])
    assert found == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(100 * (1 + 0.8 + 0) / 3)}


def test_rouge_by_hand_takes_the_best_reference() -> None:
    pytest.importorskip("rouge_score")
    found = METRICS["rouge"](["the cat sat on the mat"], [["dogs bark", "the cat lay on the mat"]])
    assert found == {
        "rouge1": pytest.approx(100 * 5 / 6),
        "rouge2": pytest.approx(100 * 3 / 5),
        "rougeL": pytest.approx(100 * 5 / 6),
    }
    stemmed = METRICS["rouge"](["running", "no"], [["runs"], ["yes"]])
    assert stemmed["rouge1"] == 50.0


def test_bleu_is_sacrebleus_with_any_number_of_references() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    texts = ["the cat sat on the mat", "there is a dog in the garden"]
    one = [["the cat sat on a mat"], ["there is a dog in the yard"]]
    whole = float(sacrebleu.corpus_bleu(texts, [[each[0] for each in one]]).score)
    assert METRICS["bleu"](texts, one) == {"bleu": pytest.approx(whole)}
    more = METRICS["bleu"](texts, [one[0], [*one[1], "there is a dog in the garden"]])["bleu"]
    assert more > whole
    assert METRICS["bleu"](texts, [[text] for text in texts])["bleu"] == pytest.approx(100)


def test_numbers_behind_the_mark_or_last() -> None:
    assert last_number("so 3 and 4 make 7") == 7
    assert last_number("7 x 2 = 14\n#### 1,400.50 and 3") == 1400.5
    assert last_number("it is -5.") == -5
    assert last_number("#### none, but 12") == 12
    assert last_number("nothing") is None
    found = number(["the answer is 1,000", "3", "none"], [["#### 1000"], ["#### 4"], ["#### 5"]])
    assert found == {"exact_match": pytest.approx(100 / 3)}


def test_names_and_packages_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"unknown metric 'rogue' .did you mean 'rouge'"):
        find_metric("rogue")
    for name, package in (("rouge", "rouge_score"), ("bleu", "sacrebleu")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(OptionError, match=rf"requires the package {package}: pip install 'fathomlm\[eval\]'"):
            find_metric(name)
    assert find_metric("squad") is squad
