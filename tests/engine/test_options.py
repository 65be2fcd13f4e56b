"""Depths that are forced must be depths that there are, and the message says what would be right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from decode.exit_models import build, exiting
from engine.test_engine import SMALL, many
from fathomlm.decode.exiting import Exiting
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "parts",
    [
        (), (0.5, 0.2), (1.0, 0.5, 0.6), (1.0, 0.5, 0.0), (1.0, -0.5), (1.0, 1.5), (1.0, float("nan")), ("1", "0.5"),
        "1,0.5", (1.0, None), (True, 0.5), 1.0, {1.0, 0.5},
    ],
)  # fmt: skip
def test_what_is_no_falling_list_of_parts_is_refused(parts: Any) -> None:
    with pytest.raises(OptionError, match="forced_depths must be parts of all tokens that begin with 1"):
        EngineOptions(forced_depths=parts)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), "0.5", True, (0.5,)])
def test_what_is_no_part_is_refused(rate: Any) -> None:
    with pytest.raises(OptionError, match=r"forced_exits must be (a number )?between 0 and 1, got"):
        EngineOptions(forced_exits=rate)


@pytest.mark.parametrize("parts", [(1,), (1.0, 1.0, 1.0), [1.0, 0.5], (1.0, 1e-9)])
def test_parts_may_stay_as_they_are_and_be_few(parts: Any) -> None:
    assert EngineOptions(forced_depths=parts).forced_depths == parts


def test_parts_must_be_those_of_the_models_recursions() -> None:
    with pytest.raises(OptionError, match="names 2 parts, but the model has 3 recursions"):
        Engine(model_of(routed()), forced_depths=(1.0, 0.5), **SMALL)
    with pytest.raises(OptionError, match="expert-choice"):
        Engine(model_of(routed("token")), forced_depths=(1.0, 0.5, 0.2), **SMALL)


def test_depths_are_forced_where_there_are_any() -> None:
    with pytest.raises(OptionError, match="forced_depths requires a model with a router"):
        Engine(build("vanilla"), forced_depths=(1.0,), **SMALL)
    for model in (build("vanilla"), model_of(routed())):
        with pytest.raises(OptionError, match="forced_exits requires an engine with exits"):
            Engine(model, forced_exits=0.5, **SMALL)


@pytest.mark.parametrize("rate", [0, 0.0, 1, 1.0])
def test_all_or_no_tokens_may_leave(rate: float) -> None:
    model = build("vanilla")
    engine = Engine(model, exiting=exiting("vanilla", "parallel"), forced_exits=rate, **SMALL)
    depths = {depth for result in engine.generate(many(model), max_new_tokens=4) for depth in result.depths or ()}
    assert depths == ({3} if rate else {6})


def test_at_each_of_several_exits_a_part_of_those_that_reach_it_leaves() -> None:
    """Half, then half of the rest, then half of that."""
    model = build("four-loops")
    setting = Exiting(mode="parallel", exit_layers=(2, 4, 6), threshold=0.5, max_stack=2)
    engine = Engine(model, exiting=setting, forced_exits=0.5, **SMALL)
    results = engine.generate([many(model)[0]] * 8, max_new_tokens=16, ignore_eos=True)
    depths = Counter(depth for result in results for depth in result.depths or ())
    total = depths.total()
    for depth, part in ((2, 1 / 2), (4, 1 / 4), (6, 1 / 8), (8, 1 / 8)):
        assert depths[depth] / total == pytest.approx(part, abs=4 * (part * (1 - part) / total) ** 0.5)
