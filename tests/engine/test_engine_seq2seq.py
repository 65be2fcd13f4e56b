"""Encoder-decoder models in the engine: the tokens of a source are the reference decoder's, and a source is encoded once."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from engine.encoders import LINEARS, encoder_model
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import DepthPlan, build_routing
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine.captured_passes import CapturedPasses
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import page_bytes
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.row_positions import RowPositions
from fathomlm.engine.session import EngineSession
from fathomlm.engine.sources import captured_size
from fathomlm.errors import RequestTooLarge
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from pairwise import pairwise as pairs_of
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 6
SOURCES = [[5, 9, 2, 7, 11, 3], [8, 8, 1], [4, 3, 2, 6, 10, 12, 14, 9, 1], [7], [20, 6, 6, 18, 1], [5, 9, 2, 7, 1]]
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "max_length": 20, "max_source": 12}
GATED = {"gated": True, "activation": "gelu_tanh"}
EXITS = {**SMALL, "max_sequences": 5}
PLANS = {
    "vanilla": DepthPlan.vanilla(4),
    "loops": DepthPlan.build("cycle", 3, 6),
    "loops, lora": DepthPlan.build("cycle", 3, 6),
    "loops, shared": DepthPlan.build("cycle", 2, 4).with_kv("share"),
    "middle": DepthPlan.build("middle-cycle", 2, 6),
    "gated": DepthPlan.vanilla(4),
    "gated loops": DepthPlan.build("cycle", 2, 4),
    "gated loops, lora": DepthPlan.build("cycle", 2, 4),
}


@cache
def model(name: str) -> FathomForSeq2SeqLM:
    relaxation = build_relaxation(LINEARS, "lora", 2) if name.endswith("lora") else None
    return encoder_model(PLANS[name], relaxation, **(GATED if name.startswith("gated") else {}))


@cache
def threshold(name: str, layers: tuple[int, ...]) -> float:
    """Well between two confidences of the exits, about half of them below it: no rounding moves it."""
    never = [Exiting(mode="parallel", exit_layers=(layer,), threshold=1.0) for layer in layers]
    results = [r for one in never for r in generate(model(name), SOURCES, max_new_tokens=8, exiting=one, ignore_eos=True)]
    found = sorted(sure for result in results for sure in result.confidences or ())
    low, high = max(pairwise(found[len(found) // 3 : 2 * len(found) // 3]), key=lambda pair: pair[1] - pair[0])
    return (low + high) / 2


@pytest.mark.parametrize("kind", ["t5", "flan-t5", "longt5-tglobal"])
def test_families_at_full_depth(kind: str, tmp_path: Path) -> None:
    write_tiny_t5(kind, tmp_path)
    found = fathomlm.load(tmp_path).eval()
    wanted = generate(found, SOURCES, max_new_tokens=NEW)
    results = Engine(found, **SMALL).generate(SOURCES, max_new_tokens=NEW)
    assert [(r.tokens, r.finish.reason, r.prompt_tokens) for r in results] == [
        (w.tokens, w.finish, w.prompt_tokens) for w in wanted
    ]


@pytest.mark.parametrize("name", PLANS)
def test_plans_at_full_depth(name: str) -> None:
    wanted = [w.tokens for w in generate(model(name), SOURCES, max_new_tokens=NEW, ignore_eos=True)]
    engine = Engine(model(name), **SMALL)
    assert [r.tokens for r in engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)] == wanted
    assert len(set(wanted)) > 2, "what is said depends on the source"
    assert engine.counters().pages_used == (0,)


@pytest.mark.parametrize(
    ("name", "layers", "mode", "shares"),
    [
        ("vanilla", (1, 3), "parallel", False),
        ("vanilla", (1, 3), "state-copy", False),
        ("vanilla", (2,), "speculative", False),
        ("loops, lora", (2, 4), "parallel", True),
        ("loops, lora", (2, 4), "entry-copy", True),
        ("loops, lora", (2,), "speculative", False),
        ("loops, shared", (2,), "parallel", True),
        ("loops, shared", (2,), "speculative", True),
        ("middle", (3,), "state-copy", False),
    ],
)
def test_exits(name: str, layers: tuple[int, ...], mode: Any, shares: bool) -> None:
    """Rows of different loops look at their own steps' keys and values of the source, in one pass."""
    stack = {"max_stack": 2} if mode in ("parallel", "speculative") else {}
    setting = Exiting(mode=mode, exit_layers=layers, threshold=threshold(name, layers), **stack)
    wanted = generate(model(name), SOURCES, max_new_tokens=NEW, exiting=setting, ignore_eos=True)
    engine = Engine(model(name), exiting=setting, always_draft=True, **EXITS)
    assert isinstance(engine.runner.program, ExitProgram)
    assert engine.runner.program.mixed == shares
    results = engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)
    assert [r.tokens for r in results] == [w.tokens for w in wanted]
    assert 0 < engine.totals.exited < engine.totals.tokens
    if mode != "speculative":
        assert [r.depths for r in results] == [w.exit_layers for w in wanted]
    else:
        assert 0 < engine.totals.accepted <= engine.totals.drafted


@pytest.mark.parametrize(
    ("name", "mode", "rows"),
    [
        *pairs_of(("gated", "gated loops"), ("full", "parallel", "state-copy", "speculative"), (1, 3)),
        ("gated loops, lora", "full", 3),
        ("gated loops, lora", "parallel", 1),
        ("gated loops, lora", "parallel", 3),
    ],
)
def test_fused_layers_say_the_same(name: str, mode: Any, rows: int) -> None:
    """The kernels' plain twins: relative positions, attention over the source, other gates than silu."""
    setting = None
    if mode != "full":
        setting = Exiting(mode=mode, exit_layers=(2,), threshold=threshold(name, (2,)))
    wanted = generate(model(name), SOURCES, max_new_tokens=NEW, exiting=setting, ignore_eos=True)
    sizes = SMALL | {"batch_size": rows, "max_sequences": rows}
    engine = Engine(model(name), exiting=setting, always_draft=True, fuse=True, **sizes)
    assert engine.runner.layers.fused
    results = engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)
    assert [r.tokens for r in results] == [w.tokens for w in wanted]


def test_what_kernels_for_rows_do_not_know_runs_in_blocks() -> None:
    assert not Engine(model("vanilla"), fuse=True, **SMALL).runner.layers.fused, "a feed-forward half without a gate"
    routed = encoder_model(DepthPlan.build("middle-cycle", 2, 6).with_routing(build_routing("expert", 2)), **GATED)
    engine = Engine(routed, fuse=True, **(SMALL | {"max_sequences": 5}))
    assert not engine.runner.layers.fused, "entries that are not as many positions back"


@pytest.mark.parametrize("mode", ["full", "parallel", "state-copy", "speculative"])
def test_a_source_is_encoded_once_and_again_after_a_preemption(mode: Any) -> None:
    """Pages for little more than one sequence, sources included."""
    setting = None
    if mode != "full":
        setting = Exiting(mode=mode, exit_layers=(2,), threshold=threshold("vanilla", (2,)))
    made, read = model("vanilla"), []
    hook = made.encoder.register_forward_pre_hook(
        lambda _, __, given: read.append(tuple(given["attention_mask"].shape)), with_kwargs=True
    )
    size = page_bytes(made.architecture, 4, 2, torch.float32)
    room: dict[str, Any] = {"batch_size": 3, "page_size": 2, "max_length": 12, "max_source": 10, "memory": 12 * size}
    wanted = generate(made, SOURCES, max_new_tokens=8, exiting=setting, ignore_eos=True)
    read.clear()
    engine = Engine(made, exiting=setting, always_draft=True, prefill_chunk=7, **room)
    results = engine.generate(SOURCES, max_new_tokens=8, ignore_eos=True)
    hook.remove()
    assert [r.tokens for r in results] == [w.tokens for w in wanted]
    preempted = sum(result.preemptions for result in results)
    assert preempted > 0
    assert sum(rows for rows, _ in read) == len(SOURCES) + preempted
    assert all(rows * longest <= 7 or rows == 1 for rows, longest in read), "as many at once as a chunk has tokens"
    assert engine.runner.sizes.pool_pages == (12,)
    assert engine.counters().pages_used == (0,)


def test_sources_that_arrive_together_are_encoded_together() -> None:
    made, read = model("vanilla"), []
    hook = made.encoder.register_forward_pre_hook(
        lambda _, __, given: read.append(tuple(given["attention_mask"].shape)), with_kwargs=True
    )
    Engine(made, memory=10**6, **SMALL).generate(SOURCES[:3], max_new_tokens=2)
    hook.remove()
    assert read == [(3, 9)]


def test_what_was_said_before_is_penalised_and_the_source_is_not() -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "repetition_penalty": 2.5, "ignore_eos": True}
    wanted = [w.tokens for w in generate(model("vanilla"), SOURCES, **options)]
    assert wanted != [w.tokens for w in generate(model("vanilla"), SOURCES, max_new_tokens=NEW, ignore_eos=True)]
    assert [r.tokens for r in Engine(model("vanilla"), **SMALL).generate(SOURCES, **options)] == wanted


def test_the_same_start_is_no_common_prefix() -> None:
    engine = Engine(model("vanilla"), **SMALL | {"page_size": 1, "batch_size": 1})
    first, second = (engine.generate([source], max_new_tokens=NEW)[0].tokens for source in SOURCES[:2])
    assert first != second
    assert engine.counters().prefix_hits == 0


def test_float8_pages_hold_sources_too() -> None:
    engine = Engine(model("vanilla"), kv_dtype="fp8", **SMALL)
    (result,) = engine.generate(SOURCES[:1], max_new_tokens=NEW, ignore_eos=True)
    assert len(result.tokens) == NEW


def test_what_does_not_fit_is_refused() -> None:
    engine = Engine(model("vanilla"), **SMALL)
    with pytest.raises(RequestTooLarge, match="a source of 13 tokens is too long; it may have 12 here"):
        engine.generate([[5] * 13])
    with pytest.raises(RequestTooLarge, match="a start token and up to 20 new ones for a source of 2 are 21 positions"):
        engine.generate([[5, 6]], max_new_tokens=20)
    size = page_bytes(model("vanilla").architecture, 4, 4, torch.float32)
    tight = Engine(model("vanilla"), memory=4 * size, **SMALL)
    tight.generate([[5] * 8], max_new_tokens=8)
    with pytest.raises(RequestTooLarge, match="may require 5 pages of 4 entries in pool 0, which has 4"):
        tight.generate([[5] * 9], max_new_tokens=8)


ROUTED = [
    ("cache", "expert", "middle-cycle"), ("cache", "token", "cycle"), ("share", "expert", "cycle"),
    ("hybrid", "token", "middle-cycle"),
]  # fmt: skip


def routed(kv: Any, router: str, sharing: str) -> FathomForSeq2SeqLM:
    recursions, layers = (3, 5) if sharing == "middle-cycle" else (2, 4)
    plan = DepthPlan.build(sharing, recursions, layers).with_routing(build_routing(router, recursions)).with_kv(kv)  # type: ignore[arg-type]
    made = encoder_model(plan)
    assert made.decoder.relative is not None
    with torch.no_grad():
        for parameter in made.decoder.relative.parameters():
            parameter.mul_(20)  # where a token is matters
    return made


@pytest.mark.parametrize(("kv", "router", "sharing"), ROUTED)
def test_routers(kv: str, router: str, sharing: str) -> None:
    """What a score gains is by positions, also where only the tokens that ran a recursion have entries; each recursion looks
    at its own keys and values of the source."""
    made = routed(kv, router, sharing)
    wanted = generate(made, SOURCES, max_new_tokens=NEW, ignore_eos=True)
    assert len({depth for one in wanted for depth in one.depths or ()}) > 1
    first = (kv, router, sharing) == ROUTED[0]
    for sizes in ({}, {"page_size": 1, "lag": 1, "burst": 2}, {"page_size": 16, "batch_size": 1})[: 3 if first else 2]:
        engine = Engine(made, **SMALL | sizes)
        found = engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)
        assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.depths) for one in wanted]
        assert not any(engine.counters().pages_used)


def test_distances_of_routed_tokens_are_not_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth."""
    made = routed(*ROUTED[0])
    wanted = generate(made, SOURCES, max_new_tokens=NEW, ignore_eos=True)
    monkeypatch.setattr(RowPositions, "kept", lambda *_: False)
    found = Engine(made, **SMALL).generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)
    assert [one.tokens for one in found] != [one.tokens for one in wanted]


def test_a_session_of_a_routed_model() -> None:
    made = routed(*ROUTED[0])
    session = EngineSession(made, sequences=len(SOURCES))
    for sources, new in ((SOURCES, 4), ([[7, 2] * 40], 70)):
        wanted = generate(made, sources, max_new_tokens=new, ignore_eos=True)
        found = session.generate_all(sources, max_new_tokens=new, ignore_eos=True)
        assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.depths) for one in wanted]
    assert session._engine is not None
    assert session._engine.counters().preemptions == 0


@pytest.mark.parametrize("mode", ["full", "speculative"])
def test_a_session(mode: Any) -> None:
    """Sources and completions that need more room have another engine; nothing limits a source but memory."""
    setting = None
    if mode != "full":
        setting = Exiting(mode=mode, exit_layers=(2,), threshold=threshold("vanilla", (2,)))
    session = EngineSession(model("vanilla"), exiting=setting, sequences=len(SOURCES))
    for sources, new in ((SOURCES, 4), (SOURCES[:2], NEW), ([[7, 2] * 40], 70)):
        wanted = generate(model("vanilla"), sources, max_new_tokens=new, ignore_eos=True)
        found = session.generate_all(sources, max_new_tokens=new, ignore_eos=True)
        assert [(one.tokens, one.prompt_tokens) for one in found] == [(one.tokens, one.prompt_tokens) for one in wanted]
    assert session._engine is not None
    assert session._engine.counters().preemptions == 0


def test_a_session_has_room_for_longer_sources_than_it_was_asked_for() -> None:
    """On a GPU every engine captures its steps anew, and sources of a file come in any order."""
    session, rooms = EngineSession(model("vanilla")), set[int]()
    for source in ([5], [7, 2] * 30, [7, 2] * 32, [7, 2] * 33, [8] * 200, [6]):
        wanted = generate(model("vanilla"), [source], max_new_tokens=NEW, ignore_eos=True)
        assert session.generate(source, max_new_tokens=NEW, ignore_eos=True).tokens == wanted[0].tokens
        assert session._engine is not None
        rooms.add(session._engine.runner.sizes.max_source)
    assert rooms == {64, 128, 256}


def test_a_session_keeps_the_room_that_it_had() -> None:
    """A long source and a long completion in turn: the second engine has room for both."""
    session, engines = EngineSession(model("vanilla")), list[Any]()
    for source, new in (([8] * 70, 2), ([5], NEW), ([8] * 70, 2), ([5], NEW)):
        session.generate(source, max_new_tokens=new, ignore_eos=True)
        engines.append(session._engine)
    assert engines[1] is engines[2] is engines[3]


@pytest.mark.parametrize("name", ["vanilla", "loops, lora", "gated"])
def test_sources_of_a_few_sizes_are_read_as_they_are(name: str) -> None:
    """Rows and tokens that stand for nothing, as in a captured pass on a GPU: also where they end behind the table."""
    work = [*SOURCES, [3] * 12]
    wanted, found = (Engine(model(name), memory=10**6, **SMALL) for _ in range(2))
    reader = found.runner._reader
    assert reader is not None
    assert reader.short is None
    reader.short = CapturedPasses(reader._read_padded, captures=False)
    results = [engine.generate(work, max_new_tokens=NEW, ignore_eos=True) for engine in (wanted, found)]
    assert {(1, 16), (4, 16)} <= reader.short._met, "some alone, and three with a row that stands for nothing"
    assert [r.tokens for r in results[1]] == [r.tokens for r in results[0]]
    assert [r.tokens for r in results[0]] == [
        r.tokens for r in generate(model(name), work, max_new_tokens=NEW, ignore_eos=True)
    ]


def test_long_sources_and_many_are_no_captured_pass() -> None:
    assert captured_size(1, 16) == (1, 16)
    assert captured_size(3, 17) == (4, 32)
    assert captured_size(4, 512) == (4, 512)
    assert captured_size(5, 512) is captured_size(33, 1) is captured_size(1, 513) is None


def test_an_encoder_reads_padded_sources_as_masked_ones() -> None:
    made = model("vanilla")
    tokens = torch.tensor([[5, 9, 2, 7], [8, 8, 0, 0]])
    lengths = torch.tensor([4, 2])
    with torch.inference_mode():
        padded, masked = made.encode_padded(tokens, lengths), made.encode(tokens, torch.arange(4) < lengths[:, None])
    torch.testing.assert_close(padded[0], masked.states_BSM[0])
    torch.testing.assert_close(padded[1, :2], masked.states_BSM[1, :2])
