"""Exits in the engine: any number of them, with layers of their own, decided by gates, and as drafts that are verified."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from decode.exit_models import LLAMA, MANY, MEASURED, NEW, PROMPTS, build, exit_layer, exiting, mixing_threshold
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import Generation, generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.engine.device_state import ENTER
from fathomlm.engine.drafting import LEAST, MARGIN, REPEATS, SHARE, TRIAL, DraftControl
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import page_bytes
from fathomlm.engine.programs.base import SamplingVariant
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.request import Request
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from pairwise import cover, in_turn
from random_weights import randomise

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "max_sequences": 6, "prefill_chunk": 5, "max_length": 48}


@cache
def threshold(name: str, layers: tuple[int, ...], confidence: str = "gap") -> float:
    """Well between two confidences of any of the exits, about half of them below it: no rounding moves it."""
    never = [Exiting(mode="parallel", exit_layers=(layer,), threshold=1.0, confidence=confidence) for layer in layers]
    results = [r for one in never for r in generate(model(name), MANY, max_new_tokens=MEASURED, exiting=one)]
    found = sorted(sure for result in results for sure in result.confidences or ())
    middle = found[len(found) // 3 : 2 * len(found) // 3]
    low, high = max(pairwise(middle), key=lambda pair: pair[1] - pair[0])
    return (low + high) / 2


@cache
def model(name: str) -> FathomForCausalLM:
    if name not in ("gate", "classifier", "ouro"):
        return build(name)
    architecture = dataclasses.replace(LLAMA, family="ouro", residual="sandwich") if name == "ouro" else LLAMA
    plan = DepthPlan.build("cycle", 4, 6, "add")
    gated = name != "classifier"
    plan = plan.with_exits(plan.recursion_ends(), gate=gated)
    plan = plan.with_loop_norm() if gated else plan
    made = FathomForCausalLM(FathomConfig.of(architecture, plan, exit_classifier=not gated, dtype=torch.float32)).eval()
    randomise(made, 1, std=0.2)
    return made


@cache
def reference(name: str, setting: Exiting | None = None) -> list[Generation]:
    """What the reference decoder says to `MANY`: computed once, read only."""
    return generate(model(name), MANY, max_new_tokens=NEW, exiting=setting)


def compare(engine: Engine, setting: Exiting, name: str) -> None:
    wanted = reference(name, setting)
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    assert len({depth for result in results for depth in result.depths or ()}) > 2, "tokens exit at several layers"
    for result, right in zip(results, wanted, strict=True):
        assert result.confidences == pytest.approx(right.confidences, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "layers", "shares"),
    [
        ("vanilla", (1, 3, 5), False),
        ("lora", (1, 3), False),
        ("four-loops", (2, 4, 6), True),
        ("four-loops-shared-kv", (2, 4, 6), True),
        ("shared-kv", (1, 3), False),
        ("gemma3", (2, 4), False),
        ("own-gemma3", (2, 3, 5), False),
    ],
)
@pytest.mark.parametrize("mode", ["parallel", "state-copy", "entry-copy"])
def test_several_exits(name: str, layers: tuple[int, ...], shares: bool, mode: str) -> None:
    """Loops of one block share passes; a small stack is emptied on the way."""
    stack = {"max_stack": 2} if mode == "parallel" else {}
    setting = Exiting(mode=mode, exit_layers=layers, threshold=threshold(name, layers), **stack)  # type: ignore[arg-type]
    if mode == "entry-copy" and name != "four-loops":
        with pytest.raises(OptionError, match="entry-copy decoding requires exits at the ends of loops"):
            Engine(model(name), exiting=setting, **SMALL)
        return
    engine = Engine(model(name), exiting=setting, **SMALL)
    assert isinstance(engine.runner.program, ExitProgram)
    assert engine.runner.program.mixed == shares
    compare(engine, setting, name)


@pytest.mark.parametrize("name", ["own-layer", "own-lora", "own-shared-kv"])
def test_an_exit_with_a_layer_of_its_own(name: str) -> None:
    setting = exiting(name, "parallel", threshold=mixing_threshold(name), max_stack=3)
    wanted = reference(name, setting)
    results = Engine(model(name), exiting=setting, burst=2, lag=1, **SMALL).generate(MANY, max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]


@cover(
    mode=["parallel", "state-copy", "speculative"],
    name=["vanilla", "own-layer", "shared-kv"],
    sizes=[{}, {"burst": 4, "lag": 1}],
)
def test_with_one_sequence_the_host_chooses_passes(mode: str, name: str, sizes: dict[str, Any], monkeypatch: Any) -> None:
    """A deep pass runs when a token needs it, or as many wait as may: no more of them than the reference runs."""
    stack = {} if mode == "state-copy" else {"max_stack": 3}
    setting = exiting(name, mode, threshold=mixing_threshold(name), **stack)
    one = SMALL | {"batch_size": 3, "max_sequences": 1} | sizes
    engine = Engine(model(name), exiting=setting, always_draft=True, **one)
    passes: list[tuple[str, int]] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda **given: passes.append(given["only"]) or launch(**given))
    ways: Any = (({}, MANY), ({"temperature": 0.8, "seed": 3}, MANY[:2]))
    for settings, prompts in ways:
        alone = [engine.generate([prompt], max_new_tokens=NEW, **settings)[0] for prompt in prompts]
        if settings:
            many = Engine(model(name), exiting=setting, always_draft=True, **SMALL)
            beside = many.generate(prompts, max_new_tokens=NEW, **settings)
            assert [(r.tokens, r.finish.reason) for r in alone] == [(r.tokens, r.finish.reason) for r in beside]
            assert mode == "speculative" or [r.depths for r in alone] == [r.depths for r in beside]
        else:
            wanted = reference(name, setting)
            assert [(r.tokens, r.finish.reason) for r in alone] == [(w.tokens, w.finish) for w in wanted]
            assert mode == "speculative" or [r.depths for r in alone] == [w.exit_layers for w in wanted]
            deep = sum(kind == "deep" for kind, _ in passes)
            most = sum(w.exits.deep_passes or 0 for w in wanted if w.exits)
            assert 0 < deep <= (most if mode != "state-copy" else sum(len(w.tokens) for w in wanted))
            assert {rows for kind, rows in passes if kind == "shallow"} == {1}


@pytest.mark.parametrize(("name", "layer"), [("vanilla", 3), ("lora", 2), ("four-loops-shared-kv", 4), ("own-gemma3", 3)])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_static_exit_is_a_shallow_model(name: str, layer: int, fuse: bool) -> None:
    """Pages for its layers alone, and none behind the exit run."""
    setting = Exiting(mode="static", exit_layers=(layer,))
    wanted = reference(name, setting)
    engine = Engine(model(name), exiting=setting, fuse=fuse, **SMALL | {"max_sequences": None})
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    totals = engine.totals
    assert (totals.depths, totals.exited) == (layer * totals.tokens, totals.tokens), "what a server's metrics say"
    assert [w.tokens for w in wanted] != [w.tokens for w in reference(name)]
    assert engine.runner.layout.planes[0] <= layer + 1


@pytest.mark.parametrize("mode", ["parallel", "state-copy", "entry-copy"])
@pytest.mark.parametrize("confidence", ["gate", "classifier", "max", "state", "kl"])
def test_exits_that_are_decided_otherwise(confidence: str, mode: str) -> None:
    """A gate adds up over exits, as in released looped models: each token's own way through them is remembered, and so is
    what an exit made of it where the next one's output is compared with that."""
    if confidence == "kl" and mode != "entry-copy":
        return
    name = "classifier" if confidence == "classifier" else "gate"
    at = {"gate": 0.75, "kl": 0.55}.get(confidence) or threshold(name, (2, 4, 6), confidence)
    at = 0.6 if (confidence, mode) == ("state", "entry-copy") else at
    stack = {"max_stack": 2} if mode == "parallel" else {}
    setting = Exiting(mode=mode, threshold=at, confidence=confidence, **stack)  # type: ignore[arg-type]
    compare(Engine(model(name), exiting=setting, **SMALL), setting, name)


@pytest.mark.parametrize("mode", ["full", "parallel", "entry-copy", "state-copy"])
@pytest.mark.parametrize("rows", [1, 4])
def test_norms_behind_each_half_run_in_the_row_kernels(mode: str, rows: int) -> None:
    """Ouro's layers: the kernels' plain twins say what the model's own modules say."""
    setting = Exiting(mode="full") if mode == "full" else Exiting(mode=mode, threshold=0.85, confidence="gate")  # type: ignore[arg-type]
    sizes = SMALL | {"batch_size": rows, "max_sequences": rows}
    engine = Engine(model("ouro"), exiting=setting, fuse=True, **sizes)
    assert engine.runner.layers.fused
    wanted = reference("ouro", setting)
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [w.tokens for w in wanted]
    if mode != "full":
        assert [r.depths for r in results] == [w.exit_layers for w in wanted]
        assert len({depth for result in results for depth in result.depths or ()}) > 2


@pytest.mark.parametrize("mode", ["state-copy", "entry-copy"])
def test_a_sequence_that_is_preempted_is_read_again_as_it_was(mode: str) -> None:
    """Copies are not exact, so each token has to leave where it left before; and nobody shares what it left."""
    layers, new = (2, 4, 6), 20
    setting = Exiting(mode=mode, exit_layers=layers, threshold=threshold("four-loops", layers))  # type: ignore[arg-type]
    made = model("four-loops")
    wanted = generate(made, MANY, max_new_tokens=new, exiting=setting)
    again = [[*prompt, *one.tokens[:6]] for prompt, one in zip(MANY, wanted, strict=True)]
    later = generate(made, again, max_new_tokens=4, exiting=setting)
    engine = Engine(made, exiting=setting, **SMALL, memory=13 * page_bytes(LLAMA, 8, 4, torch.float32))
    results = engine.generate(MANY, max_new_tokens=new)
    assert engine.counters().preemptions > 1
    results += engine.generate(again, max_new_tokens=4)
    for result, right in zip(results, [*wanted, *later], strict=True):
        assert (result.tokens, result.depths) == (right.tokens, right.exit_layers)
        assert result.confidences == pytest.approx(right.confidences, abs=1e-5)


@pytest.mark.parametrize("mode", ["parallel", "state-copy", "entry-copy", "select"])
def test_a_threshold_for_each_exit(mode: str) -> None:
    """An exit whose threshold is 1 is none; the engine does as the reference, also where a request has its own."""
    at, name = threshold("four-loops", (2, 4, 6)), "four-loops"
    said: dict[Any, Any] = {}
    for layers, each in (((4,), at), ((2, 4), (1.0, at)), ((2, 4, 6), (1.0, at, 0.9 * at)), ((2, 4, 6), at)):
        setting = Exiting(mode=mode, exit_layers=layers, threshold=each)  # type: ignore[arg-type]
        said[layers, each] = reference(name, setting)
    one, two, three, same = ([(r.tokens, r.exit_layers) for r in results] for results in said.values())
    assert one == two
    assert three not in (two, same)
    if mode == "select":
        return
    first, last = Exiting(mode=mode, threshold=at, exit_layers=(2, 4, 6)), (1.0, at, 0.9 * at)  # type: ignore[arg-type]
    engine = Engine(model(name), exiting=dataclasses.replace(first, threshold=last), **SMALL)
    assert [(r.tokens, r.depths) for r in engine.generate(MANY, max_new_tokens=NEW)] == three
    sampling, engine = Sampling(max_new_tokens=NEW), Engine(model(name), exiting=first, **SMALL)
    asks = [
        Request(id=i, prompt=tuple(prompt), sampling=sampling, exit_threshold=(last, None)[i % 2])
        for i, prompt in enumerate(MANY)
    ]
    found = [(r.tokens, r.depths) for r in engine.run(asks)]
    assert found == [(three, same)[i % 2][i] for i in range(len(MANY))]
    with pytest.raises(OptionError, match="one for each of 3 exit"):
        engine.submit(Request(id=99, prompt=(1,), sampling=sampling, exit_threshold=(0.5, 0.5)))
    with pytest.raises(OptionError, match="2 given, and 3 exit"):
        Engine(model(name), exiting=dataclasses.replace(first, threshold=(0.5, 0.5)), **SMALL)
    for wrong in ((), (0.5, 2.0), (0.5, "x")):
        with pytest.raises(OptionError, match="threshold"):
            dataclasses.replace(first, threshold=wrong)
        with pytest.raises(OptionError, match="threshold"):
            Request(id=99, prompt=(1,), sampling=sampling, exit_threshold=wrong)  # type: ignore[arg-type]


def test_a_threshold_that_falls_over_the_text() -> None:
    low = threshold("vanilla", (1, 3))
    setting = Exiting(mode="state-copy", exit_layers=(1, 3), threshold=low, decay=4.0)
    compare(Engine(model("vanilla"), exiting=setting, **SMALL), setting, "vanilla")


def test_an_exit_vocabulary_is_what_the_exit_chooses_from() -> None:
    made = copy.deepcopy(model("vanilla"))
    made.decoder.limit_exits(torch.arange(0, 96, 2))
    setting = Exiting(mode="parallel", exit_layers=(3,), threshold=0.0)
    results = Engine(made.eval(), exiting=setting, **SMALL).generate(MANY, max_new_tokens=NEW)
    wanted = generate(made, MANY, max_new_tokens=NEW, exiting=setting)
    assert [result.tokens for result in results] == [right.tokens for right in wanted]
    assert all(token % 2 == 0 for result in results for token in result.tokens)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("parallel", "vanilla"), ("state-copy", "vanilla"), ("entry-copy", "lora"), ("speculative", "vanilla")],
)
def test_prefixes_are_cached_as_far_as_they_are_exact(mode: str, name: str) -> None:
    """A second turn begins with the first one's prompt and answer. What exited at its end has no deeper entries yet."""
    setting = exiting(name, mode, threshold=mixing_threshold(name))
    engine = Engine(build(name), exiting=setting, **SMALL, memory=10**6)
    (first,) = engine.generate([PROMPTS[0]], max_new_tokens=NEW)
    second = [*first.prompt_tokens, *first.tokens, 5, 6]
    hits = engine.counters().prefix_hits
    (found,) = engine.generate([second], max_new_tokens=NEW)
    fresh = Engine(build(name), exiting=setting, **SMALL, prefix_caching=False)
    assert found.tokens == fresh.generate([second], max_new_tokens=NEW)[0].tokens
    reused = engine.counters().prefix_hits - hits
    assert reused >= len(PROMPTS[0]) - 1
    if mode.endswith("copy"):
        assert reused <= len(PROMPTS[0])


DRAFTERS = ["vanilla", "lora", "loop-shared-kv", "gemma3", "own-layer", "own-lora"]
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 4},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3},
)


def asked() -> list[Request]:
    """Every way of choosing in one batch."""
    samplings = [Sampling(max_new_tokens=8, **fields) for fields in SAMPLINGS]
    prompts = [tuple(prompt) for prompt in MANY[:2]]
    return [
        Request(id=i, prompt=prompt, sampling=sampling) for i, (prompt, sampling) in enumerate(product(prompts, samplings))
    ]


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_drafted_and_verified_is_what_the_full_model_says(name: str) -> None:
    """Token by token, drawn ones too: a draft and the full model's choice are drawn with the same random number. The first
    model with both thresholds and sizes, the others with one of them in turn."""
    full = Engine(model(name), batch_size=4, page_size=4, max_length=48).run(asked())
    ways: list[tuple[float, dict[str, int]]] = [(0.0, {}), (mixing_threshold(name), {"burst": 2, "lag": 1, "shallows": 1})]
    turn = DRAFTERS.index(name)
    for at, sizes in ways[turn % 2 :: 2] if turn else ways:
        setting = exiting(name, "speculative", threshold=at, max_stack=3)
        engine = Engine(model(name), exiting=setting, always_draft=True, **(SMALL | sizes))
        results = engine.run(asked())
        assert [(r.tokens, r.finish) for r in results] == [(f.tokens, f.finish) for f in full]
        totals = engine.totals
        kept = sum(depth == exit_layer(name) for r in results for depth in r.depths or ())
        assert (totals.accepted, totals.drafted) == (kept, sum(r.drafted for r in results))
        assert 0 < kept < totals.drafted
        assert [r.drafted for r in results[3::4]] == [0, 0], "penalties are never drafted for"
        assert engine.counters().pages_used == engine.counters().pages_cached


def test_a_draft_ends_a_sequence_only_when_it_is_verified() -> None:
    made = copy.deepcopy(model("vanilla"))
    drafted = exiting("vanilla", "static")
    for end in {result.tokens[3] for result in generate(made.eval(), MANY[:2], max_new_tokens=NEW, exiting=drafted)}:
        made.config.eos_token_id = made.generation_config.eos_token_id = end
        full = Engine(made, batch_size=4, page_size=4, max_length=48).generate(MANY, max_new_tokens=NEW)
        setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=4)
        results = Engine(made, exiting=setting, always_draft=True, **SMALL).generate(MANY, max_new_tokens=NEW)
        assert [(r.tokens, r.finish) for r in results] == [(f.tokens, f.finish) for f in full]


def test_log_probabilities_of_drafts_are_the_full_models() -> None:
    sizes = {"page_size": 4, "batch_size": 4, "max_length": 48}
    (full,) = Engine(model("vanilla"), **sizes).generate([PROMPTS[0]], max_new_tokens=NEW, logprobs=2)
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=4)
    engine = Engine(model("vanilla"), exiting=setting, always_draft=True, **sizes)
    (found,) = engine.generate([PROMPTS[0]], max_new_tokens=NEW, logprobs=2)
    assert found.logprobs is not None
    assert full.logprobs is not None
    for one, right in zip(found.logprobs, full.logprobs, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in right.top]
        assert one.logprob == pytest.approx(right.logprob, abs=1e-5)


def test_each_request_may_have_its_own_threshold_for_drafts() -> None:
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model("vanilla"), exiting=setting, always_draft=True, **SMALL)
    sampling = Sampling(max_new_tokens=NEW)
    thresholds = (None, 1.0)
    drafts, never = engine.run(
        [Request(id=i, prompt=tuple(PROMPTS[0]), sampling=sampling, exit_threshold=at) for i, at in enumerate(thresholds)]
    )
    assert drafts.tokens == never.tokens
    assert (drafts.drafted > 0, never.drafted) == (True, 0)


def test_what_cannot_be_drafted_is_refused() -> None:
    with pytest.raises(OptionError, match="one exit"):
        Engine(model("vanilla"), exiting=Exiting(mode="speculative", exit_layers=(2, 4)))
    with pytest.raises(OptionError, match="forced_exits"):
        Engine(model("vanilla"), exiting=exiting("vanilla", "speculative"), forced_exits=0.5)
    with pytest.raises(OptionError, match="refinement"):
        Engine(model("vanilla"), exiting=exiting("vanilla", "parallel", refine=0.5))
    with pytest.raises(OptionError, match="select"):
        Engine(model("vanilla"), exiting=exiting("vanilla", "select"))


def play(control: DraftControl, running: int, bursts: int, rates: dict[bool, float]) -> list[bool]:
    """What was chosen for each burst, where both ways take a second and give so many tokens."""
    chosen = []
    for _ in range(bursts):
        drafts = control.choose(running)
        chosen.append(drafts)
        control.note(drafts, running, round(rates[drafts]), 1.0, changed=control.changed)
    return chosen


def costly(bursts: int, slower: float, faster: float) -> int:
    """How many of so many bursts may go the slower way: what it took more stays below the share, but for a last trial."""
    return round(SHARE * bursts / (1 - slower / faster)) + LEAST + 1


def test_drafting_is_used_where_it_was_measured_to_pay() -> None:
    control = DraftControl()
    few = play(control, 2, 40 * TRIAL, {False: 100, True: 180})
    assert few[:TRIAL] == [False] * TRIAL, "first what drafts are compared with"
    assert few[TRIAL : 2 * TRIAL] == [True] * TRIAL
    assert few.count(False) <= TRIAL + costly(40 * TRIAL, 100, 180)
    many = play(control, 64, 40 * TRIAL, {False: 180, True: 100})
    assert many[:TRIAL] == [False] * TRIAL, "that it pays for few says nothing"
    assert LEAST <= many.count(True) <= costly(80 * TRIAL, 100, 180), "a trial of what is clearly slower is short"
    long = play(control, 64, 330 * TRIAL, {False: 180, True: 100})
    assert LEAST <= long.count(True) <= costly(410 * TRIAL, 100, 180), "later the slower way is hardly tried"
    more = play(control, 256, REPEATS * TRIAL, {False: 300, True: 100})
    assert not any(more), "what does not pay for fewer is tried later"
    assert play(control, 3, 1, {False: 100, True: 180}) == [True], "as many sequences as before: what is known stays"


def test_drafts_that_are_hardly_faster_are_not_used() -> None:
    """Sequences end one by one with them, which is not in the time of bursts."""
    assert not any(play(DraftControl(), 8, 20 * TRIAL, {False: 100, True: 100 * MARGIN - 2})[3 * TRIAL : 4 * TRIAL])
    assert all(play(DraftControl(), 8, 20 * TRIAL, {False: 100, True: 100 * MARGIN + 2})[3 * TRIAL : 4 * TRIAL])


def test_trials_for_all_numbers_of_sequences_share_what_they_may_cost() -> None:
    """Answers end one after the other, so that each number of sequences runs for a few bursts only."""
    control, drafted, bursts = DraftControl(), 0, 0
    for _ in range(300):
        for running in (32, 16, 8, 4, 2, 1):
            chosen = play(control, running, 3, {False: 150, True: 50})
            drafted, bursts = drafted + sum(chosen), bursts + len(chosen)
    assert LEAST < drafted <= costly(bursts, 50, 150)


def test_a_way_that_becomes_slower_is_left() -> None:
    control = DraftControl()
    play(control, 8, 20 * TRIAL, {False: 100, True: 150})
    later = play(control, 8, 20 * REPEATS * TRIAL, {False: 100, True: 60})
    assert later.count(True) <= TRIAL + costly(20 * REPEATS * TRIAL, 60, 100)


def test_trials_go_on_where_other_numbers_of_sequences_come_between() -> None:
    """Requests of a few bursts, whose number changes before a trial ends."""
    control, chosen = DraftControl(), []
    for _ in range(30 * TRIAL):
        chosen += play(control, 8, 3, {False: 150, True: 100})
        play(control, 5, 1, {False: 150, True: 100})
    assert True in chosen[: 3 * TRIAL]
    assert chosen[3 * TRIAL :].count(True) <= costly(120 * TRIAL, 100, 150)


def test_a_first_trial_that_was_misled_is_made_up_for() -> None:
    control = DraftControl()
    play(control, 8, TRIAL, {False: 10, True: 60})  # something else had the device
    later = play(control, 8, 40 * TRIAL, {False: 100, True: 60})
    assert later.count(True) <= (REPEATS + 2) * TRIAL + costly(40 * TRIAL, 60, 100)
    assert later[-8 * TRIAL :].count(True) <= LEAST + 1


TURNS: tuple[dict[str, Any], ...] = ({}, {"burst": 2, "lag": 1}, {"max_sequences": 1, "batch_size": 3})
"""Bursts in step with the host, ahead of it, and one sequence."""


@pytest.mark.parametrize("sizes", TURNS, ids=["", "ahead", "one"])
def test_bursts_are_timed_without_prompts_captures_and_changes(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, with its own tokens, in the order in which they ran."""
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model("vanilla"), exiting=setting, **(SMALL | {"max_length": 96} | sizes))
    noted: list[tuple[bool, int, int]] = []

    class Watched(InTurns):
        def note(self, drafts: bool, running: int, tokens: int, seconds: float, *, changed: bool = False) -> None:
            assert seconds > 0
            if not changed:
                noted.append((drafts, running, tokens))

    engine._launches.drafting = Watched()
    launch, launched = engine.runner.launch, list[int]()

    def capturing(*args: Any, **named: Any) -> int:
        number = launch(*args, **named)
        launched.append(number)
        engine.runner.captures += number % 7 == 0  # as if some steps were captured first
        return number

    monkeypatch.setattr(engine.runner, "launch", capturing)
    results = engine.generate(MANY[:2], max_new_tokens=40, ignore_eos=True)
    assert {drafts for drafts, *_ in noted} == {False, True}
    assert 0 < sum(tokens for *_, tokens in noted) < sum(len(r.tokens) for r in results) == 80
    assert len(noted) < len(launched)


def test_a_way_is_chosen_only_where_a_burst_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host waits for what is in flight nothing is chosen: else the first burst of a way would not be known as
    such, and be timed."""
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model("vanilla"), exiting=setting, **(SMALL | {"burst": 4, "lag": 2}))
    engine._launches.drafting = control = InTurns()
    launch, launched, empty = engine._launches.launch, list[int](), 0
    monkeypatch.setattr(engine._launches, "launch", lambda burst, drafts: (launched.append(burst), launch(burst, drafts)))
    for prompt in MANY:
        engine.generate([prompt], max_new_tokens=9, ignore_eos=True)
        empty += engine._launches.bursts.count(0)
    assert empty > 0
    assert min(launched) > 0
    assert len(launched) == control.bursts


@pytest.mark.parametrize(("drafts", "pace", "burst"), [(True, 1.0, 4), (True, 2.5, 2), (True, 5.0, 1), (False, 2.5, 4)])
def test_steps_that_add_several_tokens_come_in_shorter_bursts(
    drafts: bool, pace: float, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst is about as many tokens of a sequence: what is in flight when it ends is for nothing."""
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model("vanilla"), exiting=setting, **(SMALL | {"burst": 4, "lag": 1, "max_length": 96}))
    assert engine._launches.drafting is not None
    monkeypatch.setattr(engine._launches.drafting, "choose", lambda running: drafts)
    launched: list[int] = []
    monkeypatch.setattr(engine._launches, "launch", lambda many, _: launched.append(many))
    engine.submit(Request(id=1, prompt=tuple(MANY[0]), sampling=Sampling(max_new_tokens=60)))
    engine._launches.pace = pace
    for _ in range(8):
        engine.step()
        if launched:
            break
    assert launched == [burst]


class Anything:
    """Follows every text."""

    def begin(self) -> Anything:
        return self

    def advance(self, token: int) -> None:
        """Nothing changes."""

    def allowed(self) -> bytes:
        return bytes([1] * model("vanilla").architecture.vocab)


def test_a_pass_started_ahead_may_end_the_only_sequence() -> None:
    """Nobody runs the burst that follows, and nothing is learnt of it."""

    class Always(DraftControl):
        def choose(self, running: int) -> bool:
            super().choose(running)
            self.changed = False
            return True

    setting = exiting("vanilla", "speculative", threshold=1.0, max_stack=3)
    sizes = {"max_sequences": 1, "batch_size": 3, "burst": 1, "lag": 1}
    engine = Engine(model("vanilla"), exiting=setting, **(SMALL | sizes))
    engine._launches.drafting = Always()
    sampling = Sampling(max_new_tokens=1)
    for number in range(3):
        (result,) = engine.run([Request(id=number, prompt=tuple(MANY[0]), sampling=sampling, constraint=Anything())])
        assert result.finish.reason == "length"
    while engine.busy:
        engine.step()


def test_an_engine_that_decides_by_itself_says_the_same() -> None:
    full = Engine(model("vanilla"), batch_size=4, page_size=4, max_length=96).generate(MANY[:2], max_new_tokens=40)
    setting = exiting("vanilla", "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model("vanilla"), exiting=setting, **(SMALL | {"max_length": 96}))
    results = engine.generate(MANY[:2], max_new_tokens=40)
    assert [r.tokens for r in results] == [f.tokens for f in full]
    assert engine.totals.drafted > 0


class InTurns(DraftControl):
    """Two bursts with drafts, two without."""

    bursts = 0

    def choose(self, running: int) -> bool:
        self.bursts += 1
        self.changed = self.bursts % 2 == 0
        return self.bursts % 4 < 2

    def note(self, drafts: bool, running: int, tokens: int, seconds: float, *, changed: bool = False) -> None:
        """Nothing is learnt."""


@pytest.mark.parametrize("name", ["vanilla", "own-layer", "loop-shared-kv"])
def test_an_exit_that_was_not_asked_for_a_while_is_as_sure_as_ever(name: str) -> None:
    """Its own layer has stored entries all the time, though it did not run."""
    setting = exiting(name, "speculative", threshold=0.0, max_stack=3)
    always = Engine(model(name), exiting=setting, always_draft=True, **SMALL).generate(MANY[:2], max_new_tokens=20)
    engine = Engine(model(name), exiting=setting, **SMALL)
    engine._launches.drafting = InTurns()
    results = engine.generate(MANY[:2], max_new_tokens=20)
    assert [r.tokens for r in results] == [a.tokens for a in always]
    drafted = sum(r.drafted for r in results)
    assert 0 < drafted < sum(a.drafted for a in always)
    for found, right in zip(results, always, strict=True):
        pairs = list(zip(found.confidences or (), right.confidences or (), strict=True))
        asked = [pair for pair in pairs if pair[0] != 0.0]
        assert len(asked) > 3
        assert name == "loop-shared-kv" or len(asked) < len(pairs), "where rows share a pass the head runs for all"
        for one, other in asked:
            assert one == pytest.approx(other, abs=1e-5)


class InLongTurns(DraftControl):
    """Some bursts with drafts, some without."""

    bursts = 0

    def choose(self, running: int) -> bool:
        self.bursts += 1
        return self.bursts // 5 % 2 == 0

    def note(self, drafts: bool, running: int, tokens: int, seconds: float, *, changed: bool = False) -> None:
        """Nothing is learnt."""


@pytest.mark.parametrize(
    ("name", "sizes"), [*(("vanilla", sizes) for sizes in TURNS), *in_turn(["own-layer", "gemma3"], TURNS, 1)]
)
def test_where_drafting_is_off_a_step_is_the_plain_models(
    name: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of each sequence through all layers, once what was drafted is verified; the exit is not asked."""
    setting = exiting(name, "speculative", threshold=0.0, max_stack=3)
    engine = Engine(model(name), exiting=setting, **SMALL | {"batch_size": 12, "max_sequences": 4} | sizes)
    engine._launches.drafting = InLongTurns()
    program, scored = engine.runner.program, list[int]()
    assert isinstance(program, DraftProgram)
    assert program.settles
    scores = program._scores
    monkeypatch.setattr(program, "_scores", lambda x, segment, kind: scored.append(kind) or scores(x, segment, kind))
    step, plain = program._settled_step, list[int]()

    def settled_step(variant: SamplingVariant) -> None:
        s, asked = engine.runner.state, len(scored)
        live_S = (s.stage_S == ENTER) & (program.level_S == 0)
        assert torch.equal(program.filled_BS[0][live_S], s.position_S[live_S]), "nothing waits"
        step(variant)
        assert len(scored) == asked
        plain.append(int(live_S.sum()))

    monkeypatch.setattr(program, "_settled_step", settled_step)
    prompts = MANY if "max_sequences" not in sizes else MANY[:3]
    whole = {name: value for name, value in SMALL.items() if name != "max_sequences"}
    full = Engine(model(name), **whole).generate(prompts, max_new_tokens=20)
    if "max_sequences" in sizes:
        results = [result for prompt in prompts for result in engine.generate([prompt], max_new_tokens=20)]
    else:
        results = engine.generate(prompts, max_new_tokens=20)
    assert [(r.tokens, r.finish) for r in results] == [(f.tokens, f.finish) for f in full]
    assert engine.totals.drafted > 0
    assert sum(plain) > 3
    assert engine.counters().pages_used == engine.counters().pages_cached


@pytest.mark.parametrize("name", ["vanilla", "own-layer", "gemma3"])
@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_filled_in_behind_the_end_of_a_text(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every token exits and all of them may wait, no pass runs the layers behind the exit."""
    sizes = SMALL | ({"batch_size": 16, "max_sequences": 1} if alone else {"batch_size": 16})
    engine = Engine(model(name), exiting=exiting(name, "parallel", threshold=0.0, max_stack=16), **sizes)
    deep, ran = [step.index for step in engine.runner.decoder.plan][exit_layer(name) :], list[int]()
    run = engine.runner.layers._run
    monkeypatch.setattr(
        engine.runner.layers, "_run", lambda x, steps, *given: ran.extend(s.index for s in steps) or run(x, steps, *given)
    )
    prefill = engine.runner.program.prefill
    monkeypatch.setattr(engine.runner.program, "prefill", lambda batch: (prefill(batch), ran.clear())[0])
    asked = [[prompt] for prompt in MANY] if alone else [MANY]
    for prompts in asked:
        for result in engine.generate(prompts, max_new_tokens=NEW, ignore_eos=True):
            assert set(result.depths or ()) == {exit_layer(name)}
        assert ran
        assert not set(ran) & set(deep)
        ran.clear()
