"""Exits between loops that begin with an injection (Huginn), in the engine."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from engine.test_engine_windows import PROMPTS as MANY
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan
from fathomlm.engine.captured_prefill import CapturedPrefill
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import page_bytes
from fathomlm.engine.programs.injected_exits import InjectedExitProgram
from fathomlm.engine.session import EngineSession, reference_only
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import LLAMA, WINDOWS, model_of

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 7
PROMPTS = MANY[:5]
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}
FOUR = DepthPlan.build("middle-cycle", 4, 8, ends=(2, 2))
PLANS = {
    "norm": FOUR.with_injection(norm=True),
    "windows": FOUR.with_injection(),
    "loops alone": DepthPlan.build("cycle", 4, 8).with_injection(),
    "loop norm": FOUR.with_injection().with_loop_norm(),
}


@cache
def model(name: str) -> FathomForCausalLM:
    architecture = WINDOWS if name == "windows" else LLAMA
    return model_of(PLANS[name], architecture=dataclasses.replace(architecture, layers=PLANS[name].unrolled_layers))


def setting(name: str, loops: tuple[int, ...] | None, confidence: str) -> Exiting:
    layers = None if loops is None else tuple(PLANS[name].recursion_ends()[loop - 1] + 1 for loop in loops)
    thresholds = {"gap": 0.05, "kl": 0.4, "state": 0.3}
    return Exiting(mode="entry-copy", exit_layers=layers, confidence=confidence, threshold=thresholds[confidence])


WIDE, ALONE, AHEAD = {}, {"batch_size": 1, "max_sequences": 1}, {"lag": 1, "burst": 2, "page_size": 16}


@pytest.mark.parametrize(
    ("name", "loops", "confidence", "mixed", "ways"),
    [
        ("norm", None, "kl", True, (WIDE, ALONE, AHEAD)),
        ("norm", (2,), "gap", True, (WIDE,)),
        ("norm", (1, 3), "kl", False, (WIDE, ALONE)),
        ("windows", None, "gap", True, (AHEAD,)),
        ("windows", (1, 3), "state", False, (WIDE, AHEAD)),
        ("loops alone", None, "gap", True, (WIDE, ALONE)),
        ("loop norm", None, "gap", True, (AHEAD,)),
    ],
)
def test_tokens_leave_where_the_reference_says(
    name: str, loops: tuple[int, ...] | None, confidence: str, mixed: bool, ways: tuple[dict[str, int], ...]
) -> None:
    """The coda runs over the state that a token leaves with; rows of all loops share a pass where exits are equally far
    apart."""
    how = setting(name, loops, confidence)
    wanted = generate(model(name), PROMPTS, max_new_tokens=NEW, exiting=how)
    assert len({depth for one in wanted for depth in one.exit_layers or ()}) > 1
    assert reference_only(model(name), None, how) is None
    for sizes in ways:
        engine = Engine(model(name), exiting=how, **SMALL | sizes)
        assert isinstance(engine.runner.program, InjectedExitProgram)
        assert engine.runner.program.mixed == mixed
        found = engine.generate(PROMPTS, max_new_tokens=NEW)
        assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.exit_layers) for one in wanted]
        for one, right in zip(found, wanted, strict=True):
            assert one.confidences == pytest.approx(right.confidences, abs=1e-4)


@pytest.mark.parametrize("loops", [None, (1, 3)])
def test_a_session_counts_the_codas(loops: tuple[int, ...] | None) -> None:
    how = setting("norm", loops, "gap")
    wanted = generate(model("norm"), PROMPTS, max_new_tokens=NEW, exiting=how)
    found = EngineSession(model("norm"), exiting=how, sequences=5).generate_all(PROMPTS, max_new_tokens=NEW)
    assert [one.exits and one.exits.layers_run for one in found] == [one.exits and one.exits.layers_run for one in wanted]


def test_a_sequence_that_is_preempted_is_read_again_as_it_was() -> None:
    """Each token leaves where it left before, and the coda sees the states that it saw."""
    how = setting("norm", None, "gap")
    wanted = generate(model("norm"), PROMPTS, max_new_tokens=NEW, exiting=how)
    page = page_bytes(LLAMA, PLANS["norm"].unrolled_layers, 1, torch.float32)
    tight = Engine(model("norm"), exiting=how, **SMALL | {"memory": 32 * page, "page_size": 1, "max_sequences": 5})
    found = tight.generate(PROMPTS, max_new_tokens=NEW)
    assert tight.counters().preemptions > 0
    assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.exit_layers) for one in wanted]


def test_rows_that_stand_for_nothing_beside_a_prompt_change_nothing() -> None:
    """Short prompts come in a few sizes on a GPU."""
    how = setting("norm", None, "gap")
    wanted = generate(model("norm"), PROMPTS, max_new_tokens=NEW, exiting=how)
    engine = Engine(model("norm"), exiting=how, **SMALL)
    engine.runner.short_prefill = CapturedPrefill(engine.runner.program.prefill, (4, 16), captures=False)
    found = engine.generate(PROMPTS, max_new_tokens=NEW)
    assert engine.runner.short_prefill._met == {4, 16}
    assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.exit_layers) for one in wanted]
