"""A draft layer in the engine: every token is the full model's, drafts are the slow twin's."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from decode.exit_models import DRAFTS, MANY, NEW, PROMPTS, build, exiting
from engine.test_engine_exits import asked, reference
from fathomlm.decode.full import generate
from fathomlm.decode.generation import Generation
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.device_state import ENTER
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.base import SamplingVariant
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.request import Request, Result
from fathomlm.errors import OptionError
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "prefill_chunk": 5, "max_length": 48}
ROOMY = SMALL | {"memory": 10**6, "prefix_caching": False}
OTHERS = [name for name in DRAFTS if name != "draft"]


@cache
def full(name: str) -> list[Result]:
    """What an engine without drafts says to `asked()`: computed once, read only."""
    return Engine(build(name), **SMALL).run(asked())


def full_models(engine: Engine, name: str) -> None:
    """Every token is, and what was drafted is counted."""
    results = engine.run(asked())
    assert [(r.tokens, r.finish) for r in results] == [(f.tokens, f.finish) for f in full(name)]
    kept = sum(depth == 1 for r in results for depth in r.depths or ())
    assert (engine.totals.accepted, engine.totals.drafted) == (kept, sum(r.drafted for r in results))
    assert 0 < kept < engine.totals.drafted
    assert [r.drafted for r in results[3::4]] == [0, 0], "penalties are never drafted for"
    assert engine.counters().pages_used == engine.counters().pages_cached


def slow_twins(engine: Engine, wanted: list[Generation]) -> None:
    """Which tokens were drafted and kept, and how sure the layer was."""
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    assert engine.totals.accepted == sum(w.exits.accepted for w in wanted if w.exits)
    assert engine.totals.drafted == sum(w.exits.drafted for w in wanted if w.exits)
    for result, right in zip(results, wanted, strict=True):
        sure = [one for one in result.confidences or () if one]
        assert sure == pytest.approx([one for one in right.confidences or () if one], abs=1e-5)


WAYS: tuple[tuple[float, int, dict[str, int]], ...] = (
    (0.0, 4, {}), (0.03, 5, {"burst": 2, "lag": 1}), (0.0, 2, {"batch_size": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "ways"), [("draft", WAYS), *((name, (way,)) for name, way in in_turn(OTHERS, WAYS, 0))])
def test_every_token_is_the_full_models(name: str, ways: tuple[Any, ...]) -> None:
    """Drawn ones too: a draft and the full model's choice are drawn with the same random number."""
    for threshold, stack, sizes in ways:
        setting = exiting(name, "speculative", threshold=threshold, max_stack=stack)
        engine = Engine(build(name), exiting=setting, always_draft=True, **(SMALL | sizes))
        assert isinstance(engine.runner.program, DraftLayerProgram)
        full_models(engine, name)


@pytest.mark.parametrize(("name", "threshold"), [("draft", 0.0), *in_turn(DRAFTS, (0.03, 0.0), 0)])
def test_drafts_are_the_slow_twins(name: str, threshold: float) -> None:
    """Which tokens were drafted and kept, and how sure the layer was; prompts come in chunks."""
    setting = exiting(name, "speculative", threshold=threshold, max_stack=4)
    slow_twins(Engine(build(name), exiting=setting, always_draft=True, **ROOMY), reference(name, setting))


def test_drafting_may_stop_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts leave the layer what it needs: behind them it drafts what it always would."""
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    engine = Engine(build("draft"), exiting=setting, always_draft=True, **ROOMY)
    launch, turns = engine.runner.launch, iter([True, False, False, False, True, False] * 20)
    monkeypatch.setattr(engine.runner, "launch", lambda drafts, sequences: launch(next(turns), sequences))
    seen = []
    program = engine.runner.program
    assert isinstance(program, DraftLayerProgram)
    judge = program._judge

    def spy(live_S: Any, many_S: Any, drafts: Any, sures: Any, variant: Any) -> None:
        for slot in live_S.nonzero()[:, 0].tolist():
            many = int(many_S[slot])
            seen.append((int(program.parts.state.position_S[slot]), slot, [int(d[slot]) for d in drafts[:many]]))
        judge(live_S, many_S, drafts, sures, variant)

    monkeypatch.setattr(program, "_judge", spy)
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [f.tokens for f in reference("draft")]
    from decode.test_draft_layer import naive_drafts

    texts = [[*r.prompt_tokens, *r.tokens] for r in results]
    drafted = [(position, slot, drafts) for position, slot, drafts in seen if drafts]
    assert 0 < len(drafted) < len(seen)
    with torch.inference_mode():
        for position, slot, drafts in drafted:
            assert drafts == naive_drafts(build("draft"), texts[slot][: position + 1], len(drafts))


SHAPES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"max_stack": 4}, 1), ({"draft_tree": (3, 2)}, 4), ({"draft_best": (5, 2)}, 1), ({"max_stack": 4}, 4),
)  # fmt: skip
"""A chain, a tree, the best drafts, each for one sequence or several."""


@pytest.mark.parametrize(
    ("name", "shape", "sequences"),
    [(name, *way) for name, way in [*product(["draft"], SHAPES), *in_turn(OTHERS, SHAPES, 1)]],
)
def test_where_drafting_is_off_a_step_is_the_plain_models(
    name: str, shape: dict[str, Any], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row a sequence; where drafts come again the layer knows all that it would have known."""
    setting = exiting(name, "speculative", threshold=0.0, **shape)
    sizes = ROOMY | {"batch_size": sequences}
    always = Engine(build(name), exiting=setting, always_draft=True, **sizes)
    engine = Engine(build(name), exiting=setting, always_draft=True, **sizes)
    launch, turns = engine.runner.launch, iter([True, False, False, False, True, True] * 40)
    monkeypatch.setattr(engine.runner, "launch", lambda drafts, sequences: launch(next(turns), sequences))
    program, settled = engine.runner.program, list[int]()
    assert isinstance(program, DraftLayerProgram)
    step = program._settled_step

    def watched(variant: SamplingVariant) -> None:
        s = engine.runner.state
        live_S = s.stage_S[:-1] == ENTER
        assert (program.count_S[:-1][live_S] == 1).all(), "nothing else waits for the layer"
        assert torch.equal(program.tokens_SJ[:-1, 0][live_S], s.token_S[:-1][live_S])
        step(variant)
        settled.append(int(live_S.sum()))

    monkeypatch.setattr(program, "_settled_step", watched)
    ways = {"max_new_tokens": NEW}, {"max_new_tokens": NEW, "temperature": 0.8, "seed": 3}
    for way in ways:
        results, wanted = engine.generate(MANY, **way), always.generate(MANY, **way)
        assert [(r.tokens, r.finish) for r in results] == [(w.tokens, w.finish) for w in wanted]
    assert sum(settled) > 10
    assert 0 < engine.totals.accepted < always.totals.accepted
    share, right = (each.totals.accepted / each.totals.drafted for each in (engine, always))
    assert share > 0.6 * right, "drafts are as good as ever"


def test_a_slot_without_a_page_when_drafting_stops_goes_on_behind_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of its tokens wait for the layer when it may run again; what drafts read then are the last ones."""
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    engine = Engine(build("draft"), exiting=setting, always_draft=True, **ROOMY)
    program, s = engine.runner.program, engine.runner.state
    assert isinstance(program, DraftLayerProgram)
    launch, turns, waited = engine.runner.launch, iter([True, True, False, False, False, True, False] * 20), list[int]()

    def scarce(drafts: bool, sequences: int) -> int:
        drafts, unsettled = next(turns), engine.runner._unsettled
        had_ST = s.capacity_ST.clone()
        if unsettled and not drafts:
            waited.append(int(program.count_S[:-1].max()))
            s.capacity_ST.copy_(s.position_S[:, None])
        number = launch(drafts, sequences)
        s.capacity_ST.copy_(had_ST)
        if not (unsettled or drafts):
            live_S = s.stage_S[:-1] == ENTER
            assert (program.count_S[:-1][live_S] == 1).all()
            assert torch.equal(program.tokens_SJ[:-1, 0][live_S], s.token_S[:-1][live_S])
        return number

    monkeypatch.setattr(engine.runner, "launch", scarce)
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [f.tokens for f in reference("draft")]
    assert max(waited) > 1


def test_prefixes_are_cached_and_scarce_pages_change_nothing() -> None:
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    engine = Engine(build("draft"), exiting=setting, always_draft=True, **SMALL, memory=10**6)
    (first,) = engine.generate([PROMPTS[0]], max_new_tokens=NEW)
    second = [*first.prompt_tokens, *first.tokens, 5, 6]
    (found,) = engine.generate([second], max_new_tokens=NEW)
    assert engine.counters().prefix_hits > 0
    assert found.tokens == generate(build("draft"), [second], max_new_tokens=NEW)[0].tokens


def test_a_draft_ends_a_sequence_only_when_it_is_verified() -> None:
    made = copy.deepcopy(build("draft"))
    for end in {result.tokens[3] for result in reference("draft")}:
        made.config.eos_token_id = made.generation_config.eos_token_id = end
        plain = Engine(made, **SMALL).generate(MANY, max_new_tokens=NEW)
        setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
        results = Engine(made, exiting=setting, always_draft=True, **SMALL).generate(MANY, max_new_tokens=NEW)
        assert [(r.tokens, r.finish) for r in results] == [(f.tokens, f.finish) for f in plain]


@pytest.mark.parametrize("fuse", [False, True])
def test_an_exit_vocabulary_and_a_threshold_of_a_request(fuse: bool) -> None:
    made = copy.deepcopy(build("draft"))
    made.limit_exits(torch.arange(0, 96, 2))
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    engine = Engine(made, exiting=setting, always_draft=True, fuse=fuse, **ROOMY)
    assert engine.runner.layers.fused == fuse
    sampling = Sampling(max_new_tokens=NEW)
    drafts, never = engine.run(
        [Request(id=i, prompt=tuple(PROMPTS[0]), sampling=sampling, exit_threshold=at) for i, at in enumerate((None, 1.0))]
    )
    (right,) = generate(made, [PROMPTS[0]], max_new_tokens=NEW, exiting=setting)
    assert (drafts.tokens, drafts.depths) == (right.tokens, right.exit_layers)
    assert never.tokens == right.tokens
    assert (drafts.drafted > 0, never.drafted) == (True, 0)


def test_the_engine_decides_whether_to_draft_and_says_what_it_cannot_do() -> None:
    setting = exiting("draft", "speculative", threshold=0.0, max_stack=4)
    results = Engine(build("draft"), exiting=setting, **SMALL).generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [f.tokens for f in reference("draft")]
    with pytest.raises(OptionError, match="max_sequences must be batch_size"):
        Engine(build("draft"), exiting=setting, **SMALL, max_sequences=6)
