"""Early exits, the identities that must hold in float32: against full decoding, against a computation without any cache,
against one pass over the finished text, alone and in a batch."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from decode.exit_models import (
    MAIN,
    NEW,
    OTHERS,
    PROMPTS,
    SAMPLED,
    build,
    check_interrupted,
    every_step,
    exit_layer,
    exiting,
    full_entries,
    mixed,
    mixing_threshold,
    naive,
    tokens,
    told,
)
from fathomlm.cache import SlotCache
from fathomlm.decode import early_exit
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Generation, Session, generate
from fathomlm.decode.generation import SequenceState
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Step
from pairwise import in_turn, pairwise

pytestmark = pytest.mark.usefixtures("one_thread")
TURN = (*MAIN, "own-layer")
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "penalty": {"repetition_penalty": 1.5}}


def some_models(modes: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Every mode on some models with every way to sample, and on the others, which the cacheless twin below also judges in
    every mode, one after the other."""
    return [*pairwise(MAIN, modes, SAMPLINGS), *((*pair, "greedy") for pair in in_turn(OTHERS, modes, turn=1))]


SHARED_BEHIND = ("plain-shared-kv", "loop-shared-kv", "four-loops-shared-kv")
"""Models whose steps behind the exit make no entries, or none that differ."""


@cache
def full_run(name: str, how: str) -> list[Generation]:
    """Full decoding, which several tests compare with."""
    return generate(build(name), PROMPTS, max_new_tokens=NEW, **SAMPLINGS[how])


@cache
def run_with(name: str, setting: Exiting, how: str) -> list[Generation]:
    """What several tests ask for: computed once, read only."""
    return generate(build(name), PROMPTS, exiting=setting, max_new_tokens=NEW, **SAMPLINGS[how])


def run_of(name: str, mode: str, options: dict[str, Any] | None = None, how: str = "greedy") -> list[Generation]:
    return run_with(name, exiting(name, mode, **options or {}), how)


@pytest.mark.parametrize(
    ("name", "mode", "how"), some_models(("full", "parallel", "state-copy", "speculative", "select", "oracle"))
)
def test_who_never_leaves_gives_what_full_decoding_gives(name: str, how: str, mode: str) -> None:
    full = full_run(name, how)
    options = {} if mode in ("full", "oracle") else {"threshold": 1.0}
    got = run_of(name, mode, options, how)
    assert tokens(got) == tokens(full)
    assert [result.finish for result in got] == [result.finish for result in full]
    if mode != "oracle":
        assert {result.exit_layers for result in got} == {(build(name).plan.unrolled_layers,) * NEW}


@pytest.mark.parametrize(("name", "mode", "how"), some_models(("parallel",)))
def test_parallel_decoding_gives_what_selecting_over_full_entries_gives(name: str, how: str, mode: str) -> None:
    """Tokens that wait get their exact entries, so it is as if every layer had run for all."""
    options = {"threshold": mixing_threshold(name)}
    meant = run_of(name, "select", options, how)
    got = run_of(name, mode, options, how)
    assert tokens(got) == tokens(meant)
    assert [result.exit_layers for result in got] == [result.exit_layers for result in meant]
    assert [result.agreements for result in got] == [result.agreements for result in meant]
    assert mixed(meant)


@pytest.mark.parametrize(("name", "mode", "how"), some_models(("parallel", "state-copy", "select")))
def test_who_always_leaves_gives_what_the_shallow_model_gives(name: str, how: str, mode: str) -> None:
    shallow = run_of(name, "static", how=how)
    got = run_of(name, mode, {"threshold": 0.0}, how)
    assert tokens(got) == tokens(shallow) != tokens(full_run(name, how))
    assert {result.exit_layers for result in [*got, *shallow]} == {(exit_layer(name),) * NEW}


@pytest.mark.parametrize(
    ("name", "mode", "confidence"),
    [
        *((name, "static", "gap") for name in MAIN),
        *((name, mode, "gap") for name in (*MAIN, *OTHERS) for mode in ("parallel", "state-copy")),
        *((name, mode, "state") for name in MAIN for mode in ("parallel", "state-copy")),
    ],
)
def test_without_any_cache_it_is_the_same(name: str, mode: str, confidence: str) -> None:
    options: dict[str, Any] = {} if mode == "static" else {"threshold": mixing_threshold(name, 0.5, confidence)}
    options |= {} if confidence == "gap" else {"confidence": confidence}
    got = run_of(name, mode, options)
    for prompt, result in zip(PROMPTS, got, strict=True):
        expected, layers = naive(build(name), prompt, exiting(name, mode, **options))
        assert (list(result.tokens), list(result.exit_layers or ())) == (expected, layers)
    assert mode == "static" or mixed(got)


@pytest.mark.parametrize("name", MAIN)
def test_state_copy_takes_the_first_exit_that_is_sure(name: str) -> None:
    threshold = mixing_threshold(name, 0.8)
    layers: set[int] = set()
    for where in ({"min_exit_layer": 2}, {"exit_layers": (1, 2, 4)}):
        setting = Exiting(mode="state-copy", threshold=threshold, **where)  # type: ignore[arg-type]
        got = generate(build(name), PROMPTS, max_new_tokens=12, exiting=setting)
        for prompt, result in zip(PROMPTS, got, strict=True):
            assert (list(result.tokens), list(result.exit_layers or ())) == naive(build(name), prompt, setting, 12)
            layers.update(result.exit_layers or ())
    assert len(layers) > 3, "several exits are used"


@pytest.mark.parametrize("name", [*MAIN, "own-layer"])
def test_an_oracle_with_copied_states_is_the_same_without_any_cache(name: str) -> None:
    """It leaves where the last layer's choice is reached, by the entries that copying made; and its text is another one."""
    copied, exact = (
        generate(build(name), PROMPTS, max_new_tokens=2 * NEW, exiting=exiting(name, mode))
        for mode in ("oracle-copy", "oracle")
    )
    for prompt, result in zip(PROMPTS, copied, strict=True):
        found = naive(build(name), prompt, exiting(name, "oracle-copy"), 2 * NEW)
        assert (list(result.tokens), list(result.exit_layers or ())) == found
    assert mixed(copied)
    assert all(result.oracle for result in copied)
    assert (tokens(copied) != tokens(exact)) == (name not in SHARED_BEHIND)


@pytest.mark.parametrize("name", MAIN)
def test_a_decaying_threshold_is_the_formula_without_any_cache(name: str) -> None:
    """CALM's: 0.9 T + 0.1 exp(-tau i / N)."""
    threshold = mixing_threshold(name, 0.7)
    falling = [Exiting(mode="state-copy", threshold=threshold, min_exit_layer=2, decay=decay) for decay in (0.5, 20.0)]
    left = []
    for setting in falling:
        got = generate(build(name), PROMPTS, max_new_tokens=NEW, exiting=setting)
        for prompt, result in zip(PROMPTS, got, strict=True):
            assert (list(result.tokens), list(result.exit_layers or ())) == naive(build(name), prompt, setting)
        left.append([result.exit_layers for result in got])
    assert left[0] != left[1]


def batch_of(name: str, setting: Exiting, **options: Any) -> tuple[SlotCache, list[Generation]]:
    """A batch, and the cache that it leaves behind."""
    model, sampling = build(name), Sampling(**{"max_new_tokens": NEW} | options)
    rows = [SequenceState(model, list(prompt), sampling, None) for prompt in PROMPTS]
    cache = early_exit.exit_cache(model.plan, setting, len(rows), reserve=4)
    return cache, early_exit.run(model.decoder, rows, sampling, cache, setting)


def furthest(name: str, cache: SlotCache, results: list[Generation], steps: tuple[Step, ...]) -> float:
    """How far the cache is from one pass over each text."""
    most = 0.0
    for row, result in enumerate(results):
        text = [*result.prompt_tokens, *result.tokens[:-1]]
        whole = full_entries(build(name), text)
        for step in steps:
            if step.index in whole:
                for got, expected in zip(cache.entries(step, row), whole[step.index], strict=True):
                    assert got.shape == expected[0].shape
                    most = max(most, float((got - expected[0]).abs().max()))
    return most


@pytest.mark.parametrize(
    ("name", "max_stack", "part"),
    [
        *pairwise(MAIN, (1, 3, 16), (0.2, 0.5, 0.8)),
        *((name, 3, 0.4) for name in OTHERS),
    ],
)
def test_parallel_leaves_exact_entries_at_every_step(name: str, max_stack: int, part: float) -> None:
    setting = exiting(name, "parallel", threshold=mixing_threshold(name, part), max_stack=max_stack)
    cache, results = batch_of(name, setting)
    assert mixed(results)
    assert furthest(name, cache, results, every_step(name)) < 1e-5
    assert cache.bytes() == sum(k.numel() * 2 * 4 for k in held_keys(name, cache))


def held_keys(name: str, cache: SlotCache) -> list[torch.Tensor]:
    plan = build(name).plan
    steps = [step for step in every_step(name) if not plan.reads_kv(step)]
    return [cache.entries(step, row)[0] for step in steps for row in range(len(PROMPTS))]


@pytest.mark.parametrize("name", MAIN)
def test_the_stack_changes_nothing_but_the_passes(name: str) -> None:
    threshold = mixing_threshold(name)
    runs = [batch_of(name, exiting(name, "parallel", threshold=threshold, max_stack=stack))[1] for stack in (1, 3, 16)]
    assert tokens(runs[0]) == tokens(runs[1]) == tokens(runs[2])
    passes = [sum(result.exits.deep_passes for result in results if result.exits) for results in runs]
    assert passes[0] == NEW * len(PROMPTS), "nobody waits"
    assert passes[0] > passes[1] > passes[2] or passes[1] == passes[2] < passes[0]
    for results in runs:
        assert all(result.agreements is not None and None not in result.agreements for result in results)
        assert {result.exits.layers_run for result in results if result.exits} == {6 * NEW}, "every layer runs in the end"


@pytest.mark.parametrize(
    ("name", "mode"), [*product(MAIN, ("speculative", "refine")), *in_turn(OTHERS, ("speculative", "refine"), 0)]
)
def test_drafts_leave_exact_entries_too(name: str, mode: str) -> None:
    options: dict[str, Any] = {"threshold": mixing_threshold(name, 0.3), "max_stack": 5}
    kind, more = ("parallel", {"refine": 1.0}) if mode == "refine" else (mode, {})
    cache, results = batch_of(name, exiting(name, kind, **options, **more))
    assert any(result.exits and result.exits.accepted < result.exits.drafted for result in results), "some are discarded"
    assert furthest(name, cache, results, every_step(name)) < 1e-5


@pytest.mark.parametrize("name", [name for name in (*MAIN, *OTHERS) if name not in SHARED_BEHIND])
def test_copied_entries_are_not_exact(name: str) -> None:
    """The premise of parallel decoding (thesis 2.4.1). They are exact up to the layer right behind the exit, which would
    have seen the same state."""
    plan, exit = build(name).plan, exit_layer(name)
    cache, results = batch_of(name, exiting(name, "state-copy", threshold=mixing_threshold(name)))
    assert mixed(results)
    assert furthest(name, cache, results, plan.steps[: exit + 1]) < 1e-5
    off = furthest(name, cache, results, plan.steps[exit + 1 :])
    print(f"{name}: copied keys and values are up to {off:.2f} off")
    assert off > 0.2


@pytest.mark.parametrize("name", SHARED_BEHIND)
def test_copying_is_exact_where_deeper_layers_make_no_entries(name: str) -> None:
    """Later loops read what the first one made."""
    cache, results = batch_of(name, exiting(name, "state-copy", threshold=mixing_threshold(name)))
    assert mixed(results)
    assert furthest(name, cache, results, every_step(name)) < 1e-5


EVERY: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("static", {}),
    ("state-copy", {"threshold": True}),
    ("parallel", {"threshold": True}),
    ("parallel", {"threshold": True, "max_stack": 3}),
    ("parallel", {"threshold": True, "refine": 0.5}),
    ("speculative", {"threshold": True}),
    ("speculative", {"threshold": True, "max_stack": 2, "confidence": "max"}),
    ("select", {"threshold": True}),
    ("oracle", {}),
    ("oracle-copy", {}),
]


def every(name: str, mode: str, options: dict[str, Any]) -> Exiting:
    mixing = {"threshold": mixing_threshold(name, 0.5, options.get("confidence", "gap"))} if "threshold" in options else {}
    return exiting(name, mode, **options | mixing)


def over_models(pairs: list[tuple[Any, str]]) -> list[Any]:
    """Modes and ways to sample, on the models in turn."""
    return [pytest.param(TURN[i % 4], *case, how, id=f"{case[0]}-{i}-{how}") for i, (case, how) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("name", "mode", "options", "how"),
    over_models([pair for turn in (0, 1) for pair in in_turn(EVERY, tuple(SAMPLINGS), turn)]),
)
def test_a_batch_equals_singles(name: str, mode: str, options: dict[str, Any], how: str) -> None:
    setting, sampling = every(name, mode, options), SAMPLINGS[how]
    together = run_with(name, setting, how)
    alone = [generate(build(name), [p], max_new_tokens=NEW, exiting=setting, **sampling)[0] for p in PROMPTS]
    assert told(together) == told(alone)
    assert mode in ("full", "static") or mixed(together)
    for one, other in zip(together, alone, strict=True):
        assert one.confidences == pytest.approx(other.confidences, abs=1e-5)


def test_a_seed_repeats_and_another_differs() -> None:
    for mode, options in EVERY[1:]:
        setting = every("vanilla", mode, options)
        first = told(generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=setting, **SAMPLED))
        assert first == told(generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=setting, **SAMPLED))
        other = generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=setting, **{**SAMPLED, "seed": 8})
        assert first != told(other)


@pytest.mark.parametrize(("name", "mode", "options", "how"), over_models(in_turn(EVERY, ("greedy", "sampled"), 0)))
def test_a_session_equals_fresh_generation(name: str, mode: str, options: dict[str, Any], how: str) -> None:
    model, setting, sampling = build(name), every(name, mode, options), SAMPLINGS[how]
    session = Session(model, exiting=setting)
    first = session.generate(PROMPTS[0], max_new_tokens=5, **sampling)
    longer = [*PROMPTS[0], *first.tokens, 30, 31, 32]
    edited = [*PROMPTS[0], 77, *first.tokens[1:], 30]
    for prompt in (longer, edited, longer[:6], [90, *longer], [90]):
        got = session.generate(prompt, max_new_tokens=5, **sampling)
        assert told([got]) == told(generate(model, [prompt], max_new_tokens=5, exiting=setting, **sampling))
        held = prompt[:-1] if mode in ("state-copy", "oracle-copy") else [*prompt, *got.tokens[:-1]]
        assert session.held == tuple(held)
    session.reset()
    assert session.held == ()
    assert session.generate(PROMPTS[0], max_new_tokens=5, **sampling).tokens == first.tokens


@pytest.mark.parametrize(("stop_at", "mode"), in_turn(range(1, 48, 5), ("state-copy", "parallel", "speculative"), turn=0))
def test_an_interrupted_session_is_still_right(mode: str, stop_at: int) -> None:
    check_interrupted("vanilla", mode, stop_at)
