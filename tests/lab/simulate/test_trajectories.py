"""Depths of many texts: what a file says, what is drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.lab.simulate.trajectories import (
    Trajectories,
    Trajectory,
    draw,
    read_trajectories,
    write_trajectories,
)


def test_numbers_of_some_texts() -> None:
    found = Trajectories((Trajectory(3, (1, 2, 3)), Trajectory(1, (1,))), 3, "file", "some")
    assert (found.tokens, found.mean_depth, found.longest) == (4, 7 / 4, 6)
    assert found.ran == (1.0, 0.5, 0.25)
    assert found.record()["prompt_tokens"] == 4


def test_drawn_depths_have_the_parts_that_were_asked_for_and_say_forced() -> None:
    found = draw([(5, 400)] * 20, (1.0, 0.5, 0.2))
    assert found.ran == pytest.approx((1.0, 0.5, 0.2), abs=0.02)
    assert (found.source, found.deepest) == ("forced", 3)
    assert found.label.startswith("forced")
    assert draw([(5, 400)] * 20, (1.0, 0.5, 0.2)) == found
    assert draw([(5, 400)] * 20, (1.0, 0.5, 0.2), seed=1) != found
    for wrong in ((), (0.5,), (1.0, 0.0), (1.0, 0.3, 0.4)):
        with pytest.raises(OptionError, match="begin with 1, fall"):
            draw([(1, 1)], wrong)


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    found = draw([(2, 5), (1, 3)], (1.0, 0.5))
    write_trajectories(path, found)
    assert read_trajectories(path) == found
    path.write_text('\n{"prompt": 2, "depths": [1, 3]}\n\n{"depths": [2]}\n')
    plain = read_trajectories(path)
    assert plain.sequences == (Trajectory(2, (1, 3)), Trajectory(1, (2,)))
    assert (plain.deepest, plain.source, plain.label) == (3, "file", "depths from t.jsonl")
    assert read_trajectories(path, deepest=4).deepest == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no sequence"),
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 holds a list, not a JSON object"),
        ('{"depths": [1]}\n{"prompt": 0, "depths": [1]}', "line 2: prompt must be"),
        ('{"depths": []}', "depths must be integers >= 1"),
        ('{"depths": [1, 0]}', "depths must be a list of integers from 1"),
        ('{"depths": [true]}', "depths must be a list of integers from 1"),
        ('{"depth": [1]}', "no depths, and \\['depth'\\] instead"),
        ('{"source": "guess"}', "unknown source 'guess'"),
        ('{"depths": [5]}', "a token of depth 5, but the model's tokens are at most 2 deep"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_trajectories(path, deepest=2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none\.jsonl"):
        read_trajectories(tmp_path / "none.jsonl")


def test_an_oracle_stays_an_oracle_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"source": "oracle", "label": "exits of my model"}\n{"depths": [1, 2]}\n')
    assert read_trajectories(path).label == "oracle: exits of my model"
