"""The picture of a threshold: a PNG that shows the samples, and none where there are none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fathomlm.decode.threshold import KEPT, Refit, ThresholdEstimator, ThresholdOptions
from fathomlm.lab.analyze.pictures import DARKER, WRONG, _table, draw_threshold
from fathomlm.lab.drawing import SELECTED, UNSELECTED

pytest.importorskip("matplotlib")


def fed(agree: int, disagree: int, sequences: int = 3, **options: Any) -> ThresholdEstimator:
    generator, estimator = random.Random(0), ThresholdEstimator(ThresholdOptions(**options))
    for _ in range(sequences):
        estimator.observe([generator.betavariate(3, 0.8) for _ in range(agree)], [True] * agree)
        estimator.observe([generator.betavariate(1, 2.5) for _ in range(disagree)], [False] * disagree)
        estimator.end_sequence()
    return estimator


def shown(path: Path, colour: str) -> int:
    """How many pixels of the panels have a colour; the table under them does not count."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    image = imread(path)[..., :3]
    assert image.shape[:2] == (897, 2640)
    return int((np.abs(image[:600] - to_rgb(colour)).max(-1) < 0.02).sum())


@pytest.mark.parametrize(("agree", "disagree"), [(40, 0), (0, 20)])
def test_each_class_that_has_samples_is_drawn(tmp_path: Path, agree: int, disagree: int) -> None:
    path = tmp_path / "threshold.png"
    draw_threshold(fed(agree, disagree), path, "a model $of$ mine")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    assert (shown(path, DARKER[SELECTED]) > 200) == (agree > 0)
    assert (shown(path, DARKER[UNSELECTED]) > 200) == (disagree > 0)
    assert (shown(path, WRONG) > 2000) == (disagree > 0), "wrong tokens by threshold; else only the line of the risk"


def test_an_estimator_without_samples_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "threshold.png"
    draw_threshold(ThresholdEstimator(), path)
    assert path.stat().st_size > 20_000
    assert shown(path, DARKER[SELECTED]) == shown(path, DARKER[UNSELECTED]) == 0


def test_a_history_whose_beginning_is_gone_is_drawn(tmp_path: Path) -> None:
    estimator = fed(40, 20)
    last = estimator.history[-1]
    counts = {"agreements": last.agreements, "disagreements": last.disagreements}
    rest = {"agree": last.agree, "disagree": last.disagree, "threshold": last.threshold}
    estimator.history = [Refit(sequence=KEPT + at, **counts, **rest) for at in range(50)]
    estimator.sequences = KEPT + 50
    draw_threshold(estimator, tmp_path / "threshold.png")
    assert all(shown(tmp_path / "threshold.png", c) > 200 for c in ("black", DARKER[SELECTED], DARKER[UNSELECTED], WRONG))


def test_the_table_has_the_numbers() -> None:
    estimator = fed(40, 20, calibrating_sequences=2)
    header, agrees, disagrees = _table(estimator)
    assert len(header) == len(agrees) == len(disagrees)
    beta = estimator.agree.fit()
    assert agrees[:2] == ["agrees", "80"]
    assert agrees[4:] == [f"{beta.alpha:.4g}", f"{beta.beta:.4g}", "0.4", "1.000", f"{estimator.by('thesis'):.3f}"]
    assert header[-2:] == ["threshold (risk)", "threshold (thesis)"]
    by_thesis = fed(40, 20, rule="thesis")
    assert _table(by_thesis)[0][-2:] == header[:-3:-1]
    assert _table(by_thesis)[1][-2:] == [f"{by_thesis.threshold:.3f}", "1.000"]
    assert disagrees[:3] == ["disagrees", "40", f"{estimator.disagree.mean:.3f}"]
    assert _table(fed(0, 20))[1][:6] == ["agrees", "0", "-", "-", "-", "-"]
