"""A trained prefix is in front of what every row sees, each step's its own: beside windows, routers, shared entries and an
encoder, with pages of any size."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from decode.exit_models import GEMMA3
from engine.encoders import encoder_model
from engine.test_engine_windows import PROMPTS as MANY
from engine.test_engine_windows import SMALL, said
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.engine.captured_prefill import CapturedPrefill
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import pool_page_bytes
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.session import reference_only
from fathomlm.model.seq2seq import FathomModel
from model.route.small import KV, LLAMA, LOOPS, VOCAB, WINDOWS, model_of, routed
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 7
PROMPTS = MANY[:4]
PREFIX = Relaxation(kind="prefix", prefix_length=3)
"""No size of pages but one divides it."""
ARCHITECTURES = {"llama": LLAMA, "windows": WINDOWS, "gemma3": GEMMA3}
PLANS: dict[str, tuple[str, DepthPlan]] = {
    "plain, windows": ("windows", DepthPlan.vanilla(8)),
    "loops, windows": ("windows", LOOPS["cycle"]),
    "loops, shared": ("llama", LOOPS["cycle"].with_kv("share")),
    "loops, shared, windows": ("windows", LOOPS["cycle"].with_kv("share")),
    "middle, shared, windows": ("windows", LOOPS["middle"].with_kv("share")),
    "three loops, windows": ("gemma3", DepthPlan.build("cycle", 3, 6)),
    "draft layer, windows": ("windows", DepthPlan.vanilla(8).with_exits((), draft=True)),
}


@cache
def model(name: str) -> FathomModel:
    if name == "encoder":
        return encoder_model(DepthPlan.build("cycle", 3, 6), PREFIX, vocab=VOCAB)
    if name == "encoder, shared":
        return encoder_model(DepthPlan.build("cycle", 2, 4).with_kv("share"), PREFIX, vocab=VOCAB)
    architecture, plan = PLANS[name]
    return model_of(plan, PREFIX, ARCHITECTURES[architecture])


def served(name: str, exiting: Exiting | None = None, **options: Any) -> list[Any]:
    sizes = SMALL | ({"always_draft": True} if exiting is not None else {}) | options
    return Engine(model(name), exiting=exiting, **sizes).generate(PROMPTS, max_new_tokens=NEW)


@cache
def without(name: str) -> list[Any]:
    """What the model says when nothing is in front: what the tests here are worth."""
    architecture, plan = PLANS[name]
    plain = model_of(plan, architecture=ARCHITECTURES[architecture])
    plain.load_state_dict(model(name).state_dict(), strict=False)
    return [one.tokens for one in generate(plain, PROMPTS, max_new_tokens=NEW)]


SIZES: tuple[dict[str, int], ...] = ({"page_size": 1}, {}, {"page_size": 16, "batch_size": 1})


@pytest.mark.parametrize(("name", "turn"), in_turn(PLANS, (0, 1, 2), 0))
def test_every_token_at_full_depth(name: str, turn: int) -> None:
    """A prefix may begin inside a page, and end with the first of many. Each plan with two of the sizes."""
    wanted = [one.tokens for one in generate(model(name), PROMPTS, max_new_tokens=NEW)]
    assert wanted != without(name)
    for sizes in (SIZES[turn], SIZES[turn - 1]):
        assert [one.tokens for one in served(name, **sizes)] == wanted
    assert reference_only(model(name), None, None) is None


CASES = [("llama", *case) for case in in_turn(KV, tuple(LOOPS), 0)] + [
    ("windows", *case) for case in in_turn(KV, tuple(LOOPS), 1)
]


@pytest.mark.parametrize(("architecture", "kv", "loop"), CASES)
def test_routed_models(architecture: str, kv: str, loop: str) -> None:
    """Rows of all recursions share passes; each sees its own recursion's prefix, whosever entries come behind it."""
    made = model_of(routed("expert", kv, loop), PREFIX, ARCHITECTURES[architecture])
    wanted = said(generate(made, PROMPTS, max_new_tokens=NEW))
    assert len({depth for _, depths in wanted for depth in depths}) > 1
    for page_size in (2, 16):
        engine = Engine(made, **SMALL | {"page_size": page_size})
        assert said(engine.generate(PROMPTS, max_new_tokens=NEW)) == wanted


@cache
def threshold(name: str, layers: tuple[int, ...]) -> float:
    """Well between two confidences of the exits, about half of them below it: no rounding moves it."""
    never = [Exiting(mode="parallel", exit_layers=(layer,), threshold=1.0) for layer in layers]
    results = [r for one in never for r in generate(model(name), PROMPTS, max_new_tokens=9, exiting=one)]
    found = sorted(sure for result in results for sure in result.confidences or ())
    low, high = max(pairwise(found[len(found) // 3 : 2 * len(found) // 3]), key=lambda pair: pair[1] - pair[0])
    return (low + high) / 2


@pytest.mark.parametrize(
    ("name", "layers", "mode", "mixed"),
    [
        ("plain, windows", (2, 5), "parallel", False),
        ("plain, windows", (2, 5), "state-copy", False),
        ("plain, windows", (3,), "speculative", False),
        ("plain, windows", (3,), "static", False),
        ("loops, windows", (4,), "parallel", True),
        ("loops, shared", (4,), "parallel", True),
        ("loops, shared, windows", (4,), "parallel", True),
        ("loops, shared, windows", (4,), "speculative", True),
        ("middle, shared, windows", (3,), "parallel", False),
        ("three loops, windows", (2, 4), "parallel", True),
        ("three loops, windows", (2, 4), "entry-copy", True),
        ("encoder", (2, 4), "parallel", True),
        ("encoder", (2, 4), "entry-copy", True),
        ("encoder", (2,), "speculative", False),
        ("encoder, shared", (2,), "parallel", True),
        ("encoder, shared", (2,), "speculative", True),
    ],
)
def test_exits(name: str, layers: tuple[int, ...], mode: Any, mixed: bool) -> None:
    stack = {"max_stack": 3} if mode in ("parallel", "speculative") else {}
    sure = {} if mode == "static" else {"threshold": threshold(name, layers)}
    setting = Exiting(mode=mode, exit_layers=layers, **sure, **stack)
    wanted = generate(model(name), PROMPTS, max_new_tokens=NEW, exiting=setting)
    engine = Engine(model(name), exiting=setting, always_draft=True, **SMALL)
    found = engine.generate(PROMPTS, max_new_tokens=NEW)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    if mode == "speculative":
        full = generate(model(name), PROMPTS, max_new_tokens=NEW)
        assert [one.tokens for one in found] == [one.tokens for one in full]
    if mode == "static":
        return
    assert isinstance(engine.runner.program, ExitProgram)
    assert engine.runner.program.mixed == mixed
    if mode != "speculative":
        assert [one.depths for one in found] == [one.exit_layers for one in wanted]
        assert len({depth for one in found for depth in one.depths or ()}) > 1


@pytest.mark.parametrize("drafts", [{"max_stack": 4}, {"draft_tree": (3, 2)}])
def test_a_draft_layer(drafts: dict[str, Any]) -> None:
    """It has no prefix of its own; what verifies its drafts has."""
    wanted = [one.tokens for one in generate(model("draft layer, windows"), PROMPTS, max_new_tokens=NEW)]
    setting = Exiting(mode="speculative", threshold=0.0, **drafts)
    assert [one.tokens for one in served("draft layer, windows", setting)] == wanted


@pytest.mark.parametrize("name", ["encoder", "encoder, shared"])
def test_encoders_at_full_depth(name: str) -> None:
    """What a score gains by distance is not a prefix's."""
    wanted = [one.tokens for one in generate(model(name), PROMPTS, max_new_tokens=NEW, ignore_eos=True)]
    for sizes in ({}, {"page_size": 16}):
        found = Engine(model(name), **SMALL | sizes).generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)
        assert [one.tokens for one in found] == wanted
    plain = encoder_model(model(name).plan, vocab=VOCAB)
    plain.load_state_dict(model(name).state_dict(), strict=False)
    assert [one.tokens for one in generate(plain, PROMPTS, max_new_tokens=NEW, ignore_eos=True)] != wanted


def test_common_beginnings_and_preemption() -> None:
    """Pages of prefixes are nobody's: sequences share, copy and give away the others."""
    made = model_of(routed(), PREFIX, WINDOWS)
    prompts = [PROMPTS[2], [*PROMPTS[2][:13], 5], [*PROMPTS[2], 8, 9], PROMPTS[2], MANY[-1], [*MANY[-1][:10], 1, 2]]
    wanted = said(generate(made, prompts, max_new_tokens=NEW))
    roomy = Engine(made, **SMALL)
    for _ in range(2):
        assert said(roomy.generate(prompts, max_new_tokens=NEW)) == wanted
    assert roomy.counters().prefix_hits > 0
    sizes = pool_page_bytes(made.architecture, roomy.runner.layout, 4, torch.float32)
    tight = Engine(made, **SMALL, max_sequences=6, memory=sum(22 * size for size in sizes))
    assert said(tight.generate(prompts, max_new_tokens=NEW)) == wanted
    assert tight.counters().preemptions > 0


def test_entries_in_float8() -> None:
    engine = Engine(model("plain, windows"), kv_dtype="fp8", **SMALL)
    (result,) = engine.generate(PROMPTS[:1], max_new_tokens=NEW, ignore_eos=True)
    assert len(result.tokens) == NEW


def test_steps_that_look_at_one_plane_have_prefixes_of_their_own() -> None:
    layout = Engine(model("loops, shared"), **SMALL).runner.layout
    assert [number for _, number in sorted(layout.prefix_numbers().items())] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_rows_that_stand_for_nothing_beside_a_prompt_change_nothing() -> None:
    """Short prompts come in a few sizes on a GPU."""
    wanted = generate(model("plain, windows"), PROMPTS, max_new_tokens=NEW)
    engine = Engine(model("plain, windows"), **SMALL)
    engine.runner.short_prefill = CapturedPrefill(engine.runner.program.prefill, (4, 16), captures=False)
    found = engine.generate(PROMPTS, max_new_tokens=NEW)
    assert engine.runner.short_prefill._met
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
