"""A learnt threshold is kept with the exit and the confidence that it was learnt for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.calibration import Calibration, calibrate
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import ThresholdEstimator
from fathomlm.errors import CheckpointError, OptionError

PROMPTS = [[5, 6, 7], [9, 3], [20, 21, 22, 23], [4]]


def test_every_text_teaches_as_decoding_with_the_estimator_does(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    found = calibrate(model, PROMPTS, Sampling(max_new_tokens=12), exit_layer=2)
    by_hand = ThresholdEstimator(found.estimator.options)
    exiting = Exiting(mode="parallel", exit_layers=(2,), threshold=by_hand)
    texts = [generate(model, [prompt], max_new_tokens=12, exiting=exiting)[0] for prompt in PROMPTS]
    assert found.estimator == by_hand
    assert found.estimator.sequences == len(PROMPTS)
    assert not found.estimator.calibrating
    assert found.estimator.agree.count + found.estimator.disagree.count == sum(len(text.tokens) for text in texts)
    assert (found.exit_layer, found.confidence) == (2, "gap")


def test_a_saved_calibration_comes_back_whole(tiny_model_dir: Path, tmp_path: Path) -> None:
    found = calibrate(load(tiny_model_dir), PROMPTS, Sampling(max_new_tokens=6), exit_layer=1, confidence="max")
    found.save(tmp_path / "threshold.json")
    assert Calibration.load(tmp_path / "threshold.json") == found


def test_another_exit_or_confidence_is_refused() -> None:
    found = Calibration(exit_layer=2, confidence="gap", estimator=ThresholdEstimator())
    found.check([1], "gap", "here")
    with pytest.raises(OptionError, match="after layer 2, not 4"):
        found.check([3], "gap", "here")
    with pytest.raises(OptionError, match="'gap', not 'max'"):
        found.check([1], "max", "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be >= 1, got 0"),
        ({"exit_layer": True}, "exit_layer must be an integer, got true"),
        ({"confidence": 3}, "confidence must be a string, got 3"),
        ({"estimator": {}}, "estimator"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "threshold.json"
    Calibration(exit_layer=2, confidence="gap", estimator=ThresholdEstimator()).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        Calibration.load(path)


def test_without_prompts_nothing_is_learnt(tiny_model_dir: Path) -> None:
    with pytest.raises(OptionError, match="no prompt"):
        calibrate(load(tiny_model_dir), [], Sampling())
