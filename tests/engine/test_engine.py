"""The engine's tokens are the reference decoder's, request by request, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from decode.exit_models import MODELS, PROMPTS, build, exit_layer, exiting, mixing_threshold
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.engine import core_passes
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.base import SamplingVariant
from fathomlm.engine.request import Request, TokenLogprobs
from fathomlm.engine.runner import Runner
from fathomlm.engine.sizing import followed_passes
from fathomlm.errors import FathomError, OptionError, RequestTooLarge
from fathomlm.lab.bench.models import random_model
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from model.route.small import FEW, LLAMA, ROUTERS, model_of, routed
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 6
MANY = [*PROMPTS, [8, 1, 1, 70], [44, 12], [5, 9, 33, 7, 81, 2, 64, 13, 50, 20, 6], [91]]
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}


def many(model: FathomForCausalLM) -> list[list[int]]:
    return [[token % model.architecture.vocab for token in prompt] for prompt in MANY]


@cache
def expected(model: FathomForCausalLM, **options: Any) -> list[tuple[Any, ...]]:
    """Of one batch, of which tests/decode shows that each row is what it would be alone. Computed once, read only."""
    results = generate(model, many(model), max_new_tokens=NEW, **options)
    return [(result.tokens, result.depths, result.finish) for result in results]


@cache
def routed_model() -> FathomForCausalLM:
    """Shared by the tests here: do not change it."""
    return model_of(routed())


def tokens_of(model: FathomForCausalLM, **options: Any) -> list[tuple[int, ...]]:
    return [tokens for tokens, _, _ in expected(model, **options)]


def found(model: FathomForCausalLM, engine: Engine) -> list[tuple[Any, ...]]:
    results = engine.generate(many(model), max_new_tokens=NEW)
    return [(result.tokens, result.depths, result.finish.reason) for result in results]


@pytest.mark.parametrize("name", MODELS)
def test_every_family_and_plan_at_full_depth(name: str) -> None:
    model = build(name)
    wanted = expected(model)
    for fuse in (False, True):
        engine = Engine(model, fuse=fuse, **SMALL)
        assert found(model, engine) == wanted
        _nothing_is_left(engine)


ROUTED = [
    (router, kv, "middle", 1 + 2 * (i // 2 % 2)) for i, (router, kv) in enumerate(in_turn(ROUTERS, ("cache", "share"), 0))
]
ROUTED += [(router, kv, "middle", 1 + 2 * (i % 2)) for i, (router, kv) in enumerate(in_turn(FEW, ("share", "cache"), 0))]
ROUTED += [("expert", "cache", "cycle", 3), ("expert, random", "share", "cycle", 1), ("token", "cache", "cycle", 3)]
ROUTED += [("expert", "hybrid", "middle", 3), ("expert", "hybrid", "cycle", 1), ("token", "hybrid", "cycle", 3)]


@pytest.mark.parametrize(("router", "kv", "loop", "cores"), ROUTED)
def test_routed_models_with_rows_of_different_recursions(router: str, kv: str, loop: str, cores: int) -> None:
    model = model_of(routed(router, kv, loop))
    engine = Engine(model, cores=cores, **SMALL)
    assert found(model, engine) == expected(model)
    _nothing_is_left(engine)


def test_neurons_that_kernels_cannot_load_in_whole_vectors() -> None:
    """Packed weights have more of them, which put out nothing."""
    architecture = dataclasses.replace(build("vanilla").architecture, intermediate=41)
    plan = DepthPlan.vanilla(architecture.layers)
    model = random_model(architecture, plan, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(model, fuse=True, **SMALL)
    packed = engine.runner.layers.packed.values()
    assert {(len(rows.both_2IM), rows.down_MI.shape[1]) for rows in packed} == {(2 * 48, 48)}
    assert found(model, engine) == expected(model)


def test_fewer_slots_than_rows_and_one_row() -> None:
    model = routed_model()
    wanted = expected(model)
    for sizes in (
        {"batch_size": 8, "max_sequences": 3},
        {"batch_size": 1, "max_sequences": 4},
        {"batch_size": 1, "max_sequences": 1},
    ):
        assert found(model, Engine(model, **(SMALL | sizes))) == wanted


@pytest.mark.parametrize("mode", ["plain", "static", "gemma3"])
def test_more_sequences_than_rows_where_every_token_runs_every_layer(mode: str) -> None:
    """Those that came first run; the next takes the row of one that ends, before the host hears of it."""
    model = build("gemma3" if mode == "gemma3" else "vanilla")
    leaves = exiting("vanilla", "static") if mode == "static" else None
    work = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=new, ignore_eos=True), logprobs=2)
        for i, (prompt, new) in enumerate(zip(2 * many(model), 5 * (2, 6, 3, 5, 1, 7), strict=False))
    ]
    alone = [generate(model, [list(request.prompt)], request.sampling, exiting=leaves)[0].tokens for request in work]
    steps, first = [], list[TokenLogprobs]()
    for sequences in (2, 3, 5):
        sizes = SMALL | {"batch_size": 2, "max_sequences": sequences, "burst": 4, "lag": 1, "prefill_chunk": 64}
        engine = Engine(model, exiting=leaves, **sizes)
        results = engine.run(work)
        assert [result.tokens for result in results] == alone
        told = [one for result in results for one in result.logprobs or ()]
        first = told if sequences == 2 else first
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in first], abs=1e-4)
        assert [[token for token, _ in one.top] for one in told] == [[token for token, _ in one.top] for one in first]
        _nothing_is_left(engine)
        steps.append(engine.totals.decode_steps)
    assert steps[0] > steps[1] >= steps[2], "rows are not empty for as long"
    with pytest.raises(OptionError, match="max_sequences must be at least batch_size"):
        Engine(model, exiting=leaves, **SMALL, max_sequences=2)


@pytest.mark.parametrize("kind", ["whole", "routed"])
def test_a_host_that_runs_behind(kind: str) -> None:
    """Ticks are started before earlier ones were heard: texts end, stop and are put aside late, and come out the same."""
    model = build("vanilla") if kind == "whole" else routed_model()
    wanted = expected(model)
    for sizes in ({"burst": 1, "lag": 3}, {"burst": 4, "lag": 0}, {"burst": 3, "lag": 2}):
        engine = Engine(model, **(SMALL | sizes))
        assert found(model, engine) == wanted
        _nothing_is_left(engine)


def test_depth_controls_of_a_routed_model() -> None:
    model = routed_model()
    for bias in (-2.0, 2.0):
        engine = Engine(model, depth_bias=bias, **SMALL)
        assert found(model, engine) == expected(model, control=DepthControl(bias=bias))
    for kind in ("expert", "token"):
        model = model_of(routed(kind))
        engine = Engine(model, **SMALL)
        depths = list(range(1, model.plan.recursions + 1))
        requests = [
            Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=NEW), max_depth=depths[i % len(depths)])
            for i, prompt in enumerate(many(model))
        ]
        wanted = {depth: expected(model, control=DepthControl(max_depth=depth)) for depth in depths}
        for i, (request, result) in enumerate(zip(requests, engine.run(requests), strict=True)):
            assert (result.tokens, result.depths) == wanted[request.max_depth][i][:2]


LEAVING = [name for name in MODELS if name != "gemma3"]
SIZES: tuple[dict[str, int], ...] = ({}, {"batch_size": 16}, {"shallows": 3}, {"burst": 3, "lag": 1})


@pytest.mark.parametrize(("name", "mode"), in_turn(LEAVING, ("parallel", "state-copy"), 0))
def test_tokens_that_leave_early(name: str, mode: str) -> None:
    """Every model, every mode with every size. test_several_exits has both modes of most of them."""
    model = build(name)
    setting = exiting(name, mode, threshold=mixing_threshold(name))
    wanted = generate(model, many(model), max_new_tokens=NEW, exiting=setting)
    assert len({layer for result in wanted for layer in result.exit_layers or ()}) > 1
    # Text that is put aside is read again exactly, which is not what state copying left: here it needs all its memory.
    enough = {} if mode == "parallel" else {"memory": 10**6}
    sizes = SIZES[LEAVING.index(name) // 2 % len(SIZES)]
    engine = Engine(model, exiting=setting, **(SMALL | sizes | enough))
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    _nothing_is_left(engine)


def test_a_full_stack_is_flushed() -> None:
    model = build("vanilla")
    for stack in (1, 2, 5):
        setting = exiting("vanilla", "parallel", threshold=0.0, max_stack=stack)
        wanted = tokens_of(model, exiting=setting)
        engine = Engine(model, exiting=setting, **(SMALL | {"batch_size": 5}))
        assert [result.tokens for result in engine.generate(many(model), max_new_tokens=NEW)] == wanted


def test_thresholds_0_and_1_are_the_shallow_and_the_whole_model() -> None:
    model = build("vanilla")
    engine = Engine(model, exiting=exiting("vanilla", "parallel", threshold=1.0), **SMALL)
    whole = [result.tokens for result in engine.generate(many(model), max_new_tokens=NEW)]
    assert whole == [tokens for tokens, _, _ in expected(model)]
    engine = Engine(model, exiting=exiting("vanilla", "parallel", threshold=0.0), **SMALL)
    shallow = engine.generate(many(model), max_new_tokens=NEW)
    assert [result.tokens for result in shallow] == tokens_of(model, exiting=exiting("vanilla", "static"))
    assert {layer for result in shallow for layer in result.depths or ()} == {exit_layer("vanilla")}


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_a_pool_so_small_that_texts_are_put_aside(kind: str) -> None:
    if kind == "routed":
        model, setting = routed_model(), None
    else:
        model = build("vanilla")
        setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla")) if kind == "exits" else None
    small = SMALL | {"max_length": 24}
    needed = Engine(model, exiting=setting, **small).runner.pages.bytes
    engine = Engine(model, exiting=setting, memory=int(needed * 0.8), **small)
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert [result.tokens for result in results] == tokens_of(model, exiting=setting)
    assert engine.counters().preemptions > 0
    assert sum(result.preemptions for result in results) == engine.counters().preemptions
    _nothing_is_left(engine)


@pytest.mark.parametrize("kind", ["whole", "routed"])
def test_a_prefix_that_is_known_is_not_read_again(kind: str) -> None:
    model = build("vanilla") if kind == "whole" else routed_model()
    vocab = model.architecture.vocab
    shared = [(7 * i + 3) % vocab for i in range(13)]
    prompts = [[*shared, 5], [*shared, 9, 9], [*shared[:8], 1], [*shared, 5]]
    wanted = [result.tokens for result in generate(model, prompts, max_new_tokens=NEW)]
    for caching in (True, False):
        engine = Engine(model, prefix_caching=caching, **SMALL)
        tokens = [engine.generate([prompt], max_new_tokens=NEW)[0].tokens for prompt in prompts]
        assert tokens == wanted
        assert (engine.counters().prefix_hits > 0) == caching


@pytest.mark.parametrize("kind", ["whole", "exits", "routed"])
def test_prompts_that_come_together_are_read_in_one_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = routed_model() if kind == "routed" else build("vanilla")
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla")) if kind == "exits" else None
    options = {} if setting is None else {"exiting": setting}
    wanted = tokens_of(model, **options)
    sizes = SMALL | {"batch_size": len(MANY), "memory": 10**6, "prefix_caching": False}
    for chunk in (5, 1000):
        engine = Engine(model, **options, **(sizes | {"prefill_chunk": chunk}))
        passes: list[Any] = []
        told = _telling(engine.runner.program.prefill, passes)
        monkeypatch.setattr(engine.runner.program, "prefill", told)
        assert [result.tokens for result in engine.generate(many(model), max_new_tokens=NEW)] == wanted
        assert sum(len(rows.slots_N) for rows in passes) == sum(len(prompt) - 1 for prompt in MANY)
        assert all(len(rows.slots_N) <= chunk for rows in passes)
        assert (len(passes) == 1) == (chunk == 1000)


@pytest.mark.parametrize(
    ("sharing", "layer_tokens", "exits"), [("cycle", 2, False), ("middle-cycle", 6, False), ("cycle", 2, True)]
)
def test_a_prompt_runs_no_step_behind_the_last_that_stores_entries(
    sharing: str, layer_tokens: int, exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops that share the first one's keys and values, with and without a layer of its own behind them."""
    plan = DepthPlan.build(sharing, 2, 4 if sharing == "cycle" else 6).with_kv("share")
    architecture = build("vanilla").architecture.with_layers(tuple(range(plan.base_layers)))
    model = random_model(architecture, plan, dtype=torch.float32, device=torch.device("cpu"))
    prompt = list(range(1, 12))
    wanted = generate(model, [prompt], max_new_tokens=NEW)[0].tokens
    setting = Exiting(mode="parallel", exit_layers=(plan.recursion_ends()[0] + 1,), threshold=1.0) if exits else None
    engine, ran = Engine(model, exiting=setting, **(SMALL | {"prefill_chunk": 64})), []
    run = engine.runner.layers.run

    def told(x_NM: torch.Tensor, steps: Any, *rest: Any, **more: Any) -> torch.Tensor:
        ran.append((len(x_NM), len(steps)))
        return run(x_NM, steps, *rest, **more)

    monkeypatch.setattr(engine.runner.layers, "run", told)
    assert engine.generate([prompt], max_new_tokens=NEW)[0].tokens == wanted
    prompt_steps = [steps for rows, steps in ran if rows == len(prompt) - 1]
    assert sum(prompt_steps) == layer_tokens


@pytest.mark.parametrize("kind", ["whole", "routed"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_burst_is_one_piece_of_work(kind: str, lag: int) -> None:
    """What its steps leave is what they leave when each is started alone, in numbers of rows and bursts of all sizes."""
    model = build("vanilla") if kind == "whole" else model_of(routed())
    work = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=1 + 3 * i % 8, ignore_eos=True), logprobs=i % 3)
        for i, prompt in enumerate(many(model))
    ]
    told, pieces = [], list[int]()
    for at_once in ((1,), (1, 3)):
        engine = Engine(model, **(SMALL | {"batch_size": 4, "burst": 3, "lag": lag}))
        runner = engine.runner
        assert runner._at_once == (1, 3)
        runner._at_once = at_once
        runner.row_counts = (2,)
        started = Mock(wraps=runner._work)
        runner._work = started  # type: ignore[method-assign]
        own, sequences = runner.program.output, [engine.submit(request) for request in work]
        for _ in range(2):
            engine.step()
        assert engine.cancel(work[2].id)
        _nothing_is_left(engine)
        assert runner.program.output is own
        told.append([(one.result.tokens, one.result.logprobs, one.result.depths) for one in sequences if one.result])
        pieces.append(started.call_count)
        assert engine.totals.decode_steps > started.call_count or at_once == (1,)
    assert told[0] == told[1]
    assert len(told[0]) == len(work)
    assert pieces[1] < pieces[0]


def test_steps_and_bursts_are_captured_together() -> None:
    """With every number of rows: nobody should wait for a capture later. Replayed by running what was captured."""
    model = build("vanilla")
    engine = Engine(model, **(SMALL | {"batch_size": 4, "max_sequences": 6, "burst": 3, "lag": 1}))
    runner, captured = engine.runner, list[tuple[int | None, int]]()

    def capture(variant: SamplingVariant) -> None:
        captured.append((variant.rows, variant.steps))
        runner._graphs[variant] = Mock(replay=lambda: runner._decode_step(variant))

    runner._captures, runner.row_counts, runner._capture = True, (1, 2), capture  # type: ignore[method-assign]
    assert found(model, engine) == expected(model)
    assert captured == [(rows, steps) for rows in (None, 1, 2) for steps in (1, 3)]
    _nothing_is_left(engine)


@pytest.mark.parametrize("recursions", [2, 4])
def test_routed_steps_are_captured_with_every_number_of_passes_and_rows(
    recursions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kind of sampling once, when it is first asked for; both take two turns to a step."""
    monkeypatch.setattr(core_passes, "PRIOR", 4)
    monkeypatch.setattr(core_passes, "WINDOW", 16)
    plan = DepthPlan.build("middle-cycle", recursions, 6).with_routing(build_routing("expert", recursions)).with_kv("cache")
    model = model_of(plan, architecture=dataclasses.replace(LLAMA, layers=6))
    work = [
        Request(
            id=id, prompt=(1 + id, 2, 3 + id), logprobs=id % 3, sampling=Sampling(
                max_new_tokens=1 + 5 * id % 17, ignore_eos=True, temperature=0.8 * (id % 4 == 0), seed=id
            ),
        )
        for id in range(14)
    ]  # fmt: skip
    told = []
    for rows in ((), (1, 2, 3)):
        engine = Engine(model, **(SMALL | {"batch_size": 4, "max_sequences": 8, "max_length": 48, "burst": 3, "lag": 1}))
        runner, captured = engine.runner, list[SamplingVariant]()

        def capture(variant: SamplingVariant, runner: Runner = runner, captured: list[SamplingVariant] = captured) -> None:
            captured.append(variant)
            runner._graphs[variant] = Mock(replay=lambda: runner._decode_step(variant))

        if rows:
            runner._captures, runner.row_counts, runner._capture = True, rows, capture  # type: ignore[method-assign]
            runner.core_passes = followed_passes(plan, engine.options)
        done = engine.run(work) + engine.run([dataclasses.replace(work[9], id=14)])  # of another kind than all of them
        told.append([(one.tokens, one.depths, one.logprobs) for one in done])
        _nothing_is_left(engine)
        kinds = {(each.mode, each.alternatives) for each in captured}
        passes = {each.passes for each in captured}
        wanted = itertools.product(kinds, (None, *rows), (1, 3), passes)
        seen = [((each.mode, each.alternatives), each.rows, each.steps, each.passes) for each in captured]
        assert not rows or (sorted(map(repr, seen)) == sorted(map(repr, wanted)) and len(kinds) > 1 and len(passes) > 1)
    assert [each[:2] for each in told[0]] == [each[:2] for each in told[1]]


def test_no_more_steps_are_started_than_any_sequence_lacks_tokens() -> None:
    model = build("vanilla")
    engine = Engine(model, **(SMALL | {"batch_size": 6, "burst": 4, "lag": 1}))
    results = engine.generate(many(model)[:3], max_new_tokens=1)
    assert [result.tokens for result in results] == [tokens[:1] for tokens in tokens_of(model)[:3]]
    few = engine.totals.decode_steps
    assert few <= 6, "one for each burst, of which there are as many as prefill has chunks, and one more"
    engine.generate(many(model)[:3], max_new_tokens=NEW)
    assert (engine.totals.decode_steps - few) % 4 == 2, "the last burst has what is left of six"
    _nothing_is_left(engine)


@pytest.mark.parametrize("kind", ["whole", "routed"])
def test_few_sequences_run_in_few_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever slots they are in; and log probabilities of steps of different sizes stay with their tokens."""
    model = build("vanilla") if kind == "whole" else model_of(routed())
    lengths = [1, 9, 2, 7, 3, 1]
    work = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=new, ignore_eos=True), logprobs=2)
        for i, (prompt, new) in enumerate(zip(many(model), lengths, strict=False))
    ]
    sizes = SMALL | {"batch_size": 6, "burst": 2, "lag": 1}
    wanted = Engine(model, **sizes).run(work)
    engine, ran = Engine(model, **sizes), []
    engine.runner.row_counts = (1, 2, 4) if kind == "whole" else (1, 2)  # routed ones have two sequences for each row
    step = engine.runner.program.decode_step

    def told(variant: SamplingVariant) -> None:
        ran.append(variant.rows)
        step(variant)

    monkeypatch.setattr(engine.runner.program, "decode_step", told)
    found = engine.run(work)
    assert [result.tokens for result in found] == [result.tokens for result in wanted]
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)
    assert {None, *engine.runner.row_counts[1:]} <= set(ran)
    assert ran[::-1].index(2) < ran[::-1].index(None), "the last ones run in few"


@pytest.mark.parametrize(("cores", "sequences"), [(1, 3), (1, 7), (2, 3), (2, 7)])
def test_bursts_of_a_routed_model_are_no_longer_than_its_deepest_tokens_need(cores: int, sequences: int) -> None:
    """Prompts that wait are read behind the steps under way: completions of one token are not to bring whole bursts."""
    model = routed_model()
    engine = Engine(model, **(SMALL | {"batch_size": 3, "max_sequences": sequences, "burst": 16, "lag": 1, "cores": cores}))
    prompts = many(model)
    work = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=1, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    found, wanted = engine.run(work), generate(model, prompts, max_new_tokens=1, ignore_eos=True)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    steps = -(-model.plan.recursions // cores) * -(-sequences // 3)  # with rows for three
    assert engine.totals.decode_steps <= steps * len(prompts), "at worst each prompt is read on its own"
    _nothing_is_left(engine)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 4])
def test_the_deepest_completion_needs_one_burst(cores: int, new: int) -> None:
    """With the turn in which its sequence enters: else the device waits until the host has seen that it lacks a token."""
    engine = Engine(
        routed_model(),
        **(SMALL | {"batch_size": 2, "max_sequences": 2, "burst": 16, "lag": 1, "cores": cores, "depth_bias": 1e6}),
    )
    (result,) = engine.run([Request(id=1, prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=new, ignore_eos=True))])
    deepest = engine.model.plan.recursions
    assert result.depths == (deepest,) * new
    assert engine.totals.decode_steps == 1 + new * -(-deepest // cores)


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = routed_model()
    settings = [
        Sampling(max_new_tokens=NEW, temperature=0.9, seed=i, top_k=(0, 20)[i % 2], repetition_penalty=(1.0, 1.3)[i % 2])
        for i in range(len(MANY))
    ]
    engine = Engine(model, **SMALL)
    together = engine.run([Request(id=i, prompt=tuple(p), sampling=settings[i]) for i, p in enumerate(many(model))])
    for i, prompt in enumerate(many(model)):
        alone = Engine(model, **(SMALL | {"batch_size": 1, "max_sequences": 1})).generate([prompt], settings[i])[0]
        assert alone.tokens == together[i].tokens
    assert len({result.tokens for result in together}) > 1


def test_log_probabilities_are_the_models_own() -> None:
    model = build("vanilla")
    result = Engine(model, **SMALL).generate([MANY[0]], max_new_tokens=4, logprobs=3)[0]
    with torch.inference_mode():
        hidden = model.decoder(torch.tensor([[*MANY[0], *result.tokens]]))
        scores = model.decoder.logits(hidden)[0, len(MANY[0]) - 1 : -1].log_softmax(-1)
    assert result.logprobs is not None
    for row, token, told in zip(scores, result.tokens, result.logprobs, strict=True):
        assert told.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(3)
        assert [t for t, _ in told.top] == best.indices.tolist()
        assert [p for _, p in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(build("vanilla"), **SMALL)
    with pytest.raises(RequestTooLarge, match="48"):
        engine.generate([MANY[0]], max_new_tokens=100)
    assert not engine.busy


def test_a_cancelled_request_leaves_nothing_behind_and_the_others_go_on() -> None:
    model = build("vanilla")
    wanted = expected(model)
    engine = Engine(model, **SMALL)
    heard: dict[int, list[Any]] = {i: [] for i in range(len(MANY))}
    for i, prompt in enumerate(many(model)):
        engine.submit(Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=NEW)), heard[i].extend)
    while engine.busy:
        if len(heard[1]) == 3:
            assert engine.cancel(1)
            assert engine.cancel(5)
        engine.step()
    for i, events in heard.items():
        tokens = tuple(event.token for event in events[:-1])
        if i in (1, 5):
            assert events[-1].reason == "cancelled"
            assert tokens == wanted[i][0][: len(tokens)]
        else:
            assert (tokens, events[-1].reason) == (wanted[i][0], wanted[i][2])
    assert not engine.cancel(1)
    _nothing_is_left(engine)


def test_scores_that_are_no_numbers_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("vanilla")
    wanted = expected(model)
    engine = Engine(model, **SMALL)
    layers = engine.runner.layers
    whole = layers.scores

    def spoil(x: torch.Tensor, exit_index: int | None = None) -> torch.Tensor:
        scores = whole(x, exit_index)
        sick = engine.runner.state.epoch_S[: len(scores)] == 2
        return torch.where(sick[:, None], float("nan"), scores)

    monkeypatch.setattr(layers, "scores", spoil)
    results = engine.generate(many(model), max_new_tokens=NEW)
    assert results[1].finish.reason == "error"
    assert [r.tokens for i, r in enumerate(results) if i != 1] == [w[0] for i, w in enumerate(wanted) if i != 1]
    _nothing_is_left(engine)


def test_stop_strings_and_text(tiny_model: Any) -> None:
    free = generate(tiny_model, ["the fox"], max_new_tokens=30)[0]
    stop = free.text[8:11]
    wanted = generate(tiny_model, ["the fox", "a fathom"], max_new_tokens=30, stop=(stop,))
    engine = Engine(tiny_model, batch_size=2, page_size=4)
    results = engine.generate(["the fox", "a fathom"], max_new_tokens=30, stop=(stop,))
    assert [(r.text, r.finish.reason) for r in results] == [(w.text, w.finish) for w in wanted]


def test_what_the_engine_cannot_serve_is_said() -> None:
    with pytest.raises(OptionError, match="oracle"):
        Engine(build("vanilla"), exiting=exiting("vanilla", "oracle"))
    with pytest.raises(OptionError, match="page_size"):
        Engine(build("vanilla"), page_size=3)
    with pytest.raises(FathomError, match="bytes"):
        Engine(build("vanilla"), memory=10)
    assert isinstance(exiting("vanilla", "parallel"), Exiting)


def _telling(function: Any, calls: list[Any]) -> Any:
    def told(argument: Any) -> Any:
        calls.append(argument)
        return function(argument)

    return told


def _nothing_is_left(engine: Engine) -> None:
    while engine.busy:
        engine.step()
    counters = engine.counters()
    assert (counters.queued, counters.prefilling, counters.running) == (0, 0, 0)
    assert counters.pages_used == counters.pages_cached


def test_each_request_may_have_its_own_threshold_and_confidences_are_the_exits() -> None:
    model = build("vanilla")
    usual = mixing_threshold("vanilla")
    thresholds = [None, 0.0, 1.0, usual, 0.0, None, 1.0]
    engine = Engine(model, exiting=exiting("vanilla", "parallel", threshold=usual), **SMALL)
    requests = [
        Request(id=i, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=NEW), exit_threshold=thresholds[i])
        for i, prompt in enumerate(many(model))
    ]
    for request, result in zip(requests, engine.run(requests), strict=True):
        own = usual if request.exit_threshold is None else request.exit_threshold
        setting = exiting("vanilla", "parallel", threshold=own)
        wanted = generate(model, [list(request.prompt)], max_new_tokens=NEW, exiting=setting)[0]
        assert (result.tokens, result.depths) == (wanted.tokens, wanted.exit_layers)
        assert result.confidences == pytest.approx(wanted.confidences, abs=1e-5)
    with pytest.raises(OptionError, match="exit_threshold"):
        Engine(model, **SMALL).run([Request(id=1, prompt=(1,), exit_threshold=0.5)])


def test_an_adaptive_threshold_hears_what_the_reference_decoder_tells_it() -> None:
    model = build("vanilla")

    class Notes:
        threshold = mixing_threshold("vanilla")

        def __init__(self) -> None:
            self.heard: list[tuple[float, bool]] = []
            self.texts: list[list[tuple[float, bool]]] = []

        def observe(self, confidences: Any, agreements: Any) -> None:
            self.heard += zip((round(c, 4) for c in confidences), agreements, strict=True)

        def end_sequence(self) -> None:
            self.texts.append(self.heard)
            self.heard = []

    ours, theirs = Notes(), Notes()
    # What waits when a sequence is preempted is not judged: here none is.
    engine = Engine(model, exiting=exiting("vanilla", "parallel", threshold=ours), memory=10**6, **SMALL)
    engine.generate(many(model), max_new_tokens=NEW)
    for prompt in many(model):
        generate(model, [prompt], max_new_tokens=NEW, exiting=exiting("vanilla", "parallel", threshold=theirs))
    assert len(ours.texts) == len(theirs.texts) == len(MANY)
    assert not ours.heard
    # Text by text, though they run side by side. What still waits when one ends is not run any more here.
    wholes = [next(whole for whole in theirs.texts if text == whole[: len(text)]) for text in ours.texts]
    assert sum(map(len, ours.texts)) >= 0.6 * sum(map(len, theirs.texts))
    assert len({id(whole) for whole in wholes}) == len(MANY)
    assert {agreed for text in ours.texts for _, agreed in text} == {True, False}
    copied = Notes()
    Engine(model, exiting=exiting("vanilla", "state-copy", threshold=copied), **SMALL).generate(
        many(model), max_new_tokens=NEW
    )
    assert copied.texts == [[]] * len(MANY), "what left is never judged there, and the rest says nothing of it"
