"""A plain model, and what a calibration pass finds of it."""

from __future__ import annotations

from typing import Any

import pytest

import fathomlm
from fathomlm.checkpoints.activations import Activations
from lab.analyze.tiny import TEXT, model_of


@pytest.fixture(scope="module")
def base() -> Any:
    return model_of(None, sharing="cycle", recursions=1)


@pytest.fixture(scope="module")
def measured(base: Any) -> Activations:
    return fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024)
