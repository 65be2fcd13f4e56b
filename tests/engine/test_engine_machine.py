"""Any history of arrivals, lengths, shared beginnings, cancels and want of memory, on engines of any size: what a request
says is what the reference decoder says, and in the end no page is in use.

The scheduler alone is held against a model of the device in test_scheduler_machine.py; here everything is real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.encoders import encoder_model
from engine.test_captured_prefill import padded
from fathomlm.decode.exiting import Exiting, Threshold
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, Relaxation, build_routing
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine import core_passes
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import page_bytes
from fathomlm.engine.request import Event, Finished, Request, Result, TokenEvent
from fathomlm.engine.sequence import Sequence
from fathomlm.engine.sizing import followed_passes
from fathomlm.errors import QueueFull, RequestTooLarge
from fathomlm.model.seq2seq import FathomModel
from model.route.small import model_of

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 24
Listens = Literal["at once", "slowly", "not"]
SLOW = 3
"""Steps after which a slow listener looks at what has come."""


@pytest.fixture(autouse=True, scope="module")
def _passes_that_follow() -> Iterator[None]:
    """How deep tokens go is heeded after a few of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_passes, "PRIOR", 4)
        patch.setattr(core_passes, "WINDOW", 16)
        yield


LONGEST_PROMPT, MOST_NEW = 13, 12
AMPLE = 1 << 20
"""Bytes of a KV cache that is never full."""
LONGEST = LONGEST_PROMPT + MOST_NEW
SHORT = 17
PLANS = {
    "whole": DepthPlan.vanilla(2),
    "routed": DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3)).with_kv("cache"),
    "routed, shared": DepthPlan.build("cycle", 2, 2).with_routing(build_routing("token", 2)).with_kv("share"),
    "exits": DepthPlan.vanilla(2),
    "exits, looped": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "drafts": DepthPlan.vanilla(2).with_exits([0], layer=True),
    "drafts, looped": DepthPlan.build("cycle", 2, 2),
    "exits, states copied": DepthPlan.vanilla(3).with_exits([0, 1]),
    "exits, entries copied": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "routed, hybrid": DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3)).with_kv("hybrid"),
    "drafts, a layer behind": DepthPlan.vanilla(2).with_exits((), draft=True),
    "whole, encoder": DepthPlan.vanilla(2),
    "exits, looped, encoder": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "drafts, encoder": DepthPlan.vanilla(2),
    "drafts, a tree": DepthPlan.vanilla(2).with_exits((), draft=True),
    "routed, windows": DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3)).with_kv("cache"),
    "routed, shared, windows": DepthPlan.build("cycle", 2, 2).with_routing(build_routing("token", 2)).with_kv("share"),
    "drafts, a tree, windows": DepthPlan.vanilla(2).with_exits((), draft=True),
    "exits, static": DepthPlan.vanilla(3),
    "exits, shared": DepthPlan.build("cycle", 3, 3).with_kv("share").with_exits([0, 1]),
    "exits, own layers": DepthPlan.vanilla(3).with_exits([0, 1], layer=True),
    "exits, looped, lora": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "exits, looped, prefix, windows": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "exits, entries copied, kl": DepthPlan.build("cycle", 3, 3).with_exits([0, 1]),
    "exits, states copied, encoder": DepthPlan.vanilla(3).with_exits([0, 1]),
    "routed, prefix, windows": DepthPlan.build("middle-cycle", 3, 5)
    .with_routing(build_routing("expert", 3))
    .with_kv("cache"),
    "exits, entries copied, injected": DepthPlan.build("middle-cycle", 3, 5).with_injection(norm=True),
    "routed, hybrid, encoder": DepthPlan.build("middle-cycle", 3, 5)
    .with_routing(build_routing("expert", 3))
    .with_kv("hybrid"),
    "whole, injected": DepthPlan.build("middle-cycle", 3, 5).with_injection(norm=True),
    "drafts, the best": DepthPlan.vanilla(2).with_exits((), draft=True),
    "drafts, the best, windows": DepthPlan.vanilla(2).with_exits((), draft=True),
}
"""The kinds of program; new ones at the end, since their order decides what `test_crowds` plays. The routed ones have four
tables, or one; in the looped ones rows in front of the exits and behind them share passes. With an encoder the prompt is its
source. What is drafted and verified is what the whole model says, drawn tokens too."""
TOGETHER = (
    "drafts, a layer behind", "drafts, a tree", "drafts, a tree, windows", "drafts, the best", "drafts, the best, windows",
)  # fmt: skip
"""Kinds in which a slot has its rows in every pass."""
WHOLE = ("whole", "whole, encoder", "whole, injected", "exits, static")
"""Kinds with at least as many slots as rows."""
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3}


def encodes(kind: str) -> bool:
    return kind.endswith("encoder")


@cache
def model(kind: str) -> FathomModel:
    if encodes(kind):
        encoder = encoder_model(PLANS[kind])
        stems = [list(stem[:4]) for stem in STEMS]
        said = Counter(
            token for one in generate(encoder, stems, max_new_tokens=8, ignore_eos=True) for token in one.tokens[2:]
        )
        often = 1 if "copied" in kind else 0  # exits that are not exact say other tokens
        encoder.config.eos_token_id = sorted(said, key=lambda token: (said[token], token))[often]  # some end by it, not all
        return encoder
    shape: dict[str, Any] = {"hidden": 16, "intermediate": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab": VOCAB}
    layers = PLANS[kind].unrolled_layers
    windows = (3, 4, 7, 5, None)[:layers] if kind.endswith("windows") else ()
    architecture = Architecture(family="llama", layers=layers, context=64, tied_embeddings=False, windows=windows, **shape)
    relaxation = None
    if "prefix" in kind:
        relaxation = Relaxation(kind="prefix", prefix_length=3)
    elif "lora" in kind:
        relaxation = build_relaxation(architecture.linears(), "lora", 2)
    made = model_of(PLANS[kind], relaxation, architecture, seed=5)
    made.config.eos_token_id = 3
    return made


@cache
def leaving(kind: str, threshold: Threshold | None = None) -> Exiting | None:
    """By default with a threshold that half of the tokens are above."""
    if not kind.startswith(("exits", "drafts")):
        return None
    if kind == "exits, static":
        return Exiting(mode="static", exit_layers=(2,))
    copies = "states copied" in kind or "entries copied" in kind
    mode: Any = "parallel" if kind.startswith("exits") else "speculative"
    if copies:
        mode = "state-copy" if "states copied" in kind else "entry-copy"
    layers = (2, 3) if "injected" in kind else (1, 2) if kind.startswith("exits,") else (1,)
    sure = {"confidence": "kl"} if kind.endswith("kl") else {}
    if PLANS[kind].draft:
        drafts: dict[str, Any] = {"draft_tree": (3, 2)} if "a tree" in kind else {"max_stack": 4}
        drafts = {"draft_best": (4, 2)} if "the best" in kind else drafts
        return Exiting(mode=mode, threshold=0.05 if threshold is None else threshold, **drafts)
    if threshold is not None:
        stack = {} if copies else {"max_stack": 3}
        return Exiting(mode=mode, exit_layers=layers, threshold=threshold, **stack, **sure)
    found = []
    for layer in layers:
        never = Exiting(
            mode=mode if sure or PLANS[kind].injection else "parallel", exit_layers=(layer,), threshold=1.0, **sure
        )
        stems = [list(stem) for stem in STEMS]
        results = generate(model(kind), stems, max_new_tokens=MOST_NEW, exiting=never, ignore_eos=True)
        found += [sure for result in results for sure in result.confidences or ()]
    found.sort()
    middle = range(len(found) // 3, 2 * len(found) // 3)
    at = max(middle, key=lambda i: found[i + 1] - found[i])  # no rounding moves it
    return leaving(kind, (found[at] + found[at + 1]) / 2)


@dataclass(frozen=True)
class Right:
    tokens: tuple[int, ...]
    finish: str
    depths: tuple[int, ...] | None
    confidences: tuple[float, ...] | None


def drawn(kind: str, seed: int | None) -> dict[str, Any]:
    """How a request draws. One with penalties is not drafted for, which test_engine_exits.py tests."""
    if seed is None:
        return {}
    return {"seed": seed, **SAMPLED} | ({"repetition_penalty": 1.0} if kind.startswith("drafts") else {})


@dataclass(frozen=True)
class Ask:
    after: int
    """Steps since the one before."""
    prompt: tuple[int, ...]
    new: int
    seed: int | None
    patience: int | None
    """Tokens of which its listener has heard after which it is cancelled; without a listener, four times as many steps. At
    0, when it has just been handed in."""
    threshold: Threshold | None = None
    """Its own, where tokens may leave; one for all exits, or one for each."""
    listens: Listens = "at once"


def references(kind: str, asks: list[Ask]) -> list[Right]:
    """What each request says when it may say as much as any here; a shorter one says the beginning of it. Prompts are read
    together: that a batch is what its rows are alone is tested in tests/decode and test_engine.py."""
    drafts = kind.startswith("drafts")
    groups: dict[tuple[bool, Threshold | None], list[Ask]] = {}
    for ask in asks:
        groups.setdefault((drafts or ask.seed is not None, None if drafts else ask.threshold), []).append(ask)
    found: dict[Ask, Right] = {}
    for (draws, threshold), those in groups.items():
        setting = None if drafts else leaving(kind, threshold)
        found |= zip(those, (drawn_at_leisure if draws else greedy)(kind, those, setting), strict=True)
    return [found[ask] for ask in asks]


def greedy(kind: str, asks: list[Ask], setting: Exiting | None) -> list[Right]:
    results = generate(model(kind), [list(ask.prompt) for ask in asks], max_new_tokens=MOST_NEW, exiting=setting)
    return [Right(right.tokens, right.finish, right.depths or right.exit_layers, right.confidences) for right in results]


def drawn_at_leisure(kind: str, asks: list[Ask], setting: Exiting | None) -> list[Right]:
    """The reference decoder draws otherwise; that tokens are drawn rightly is tested in test_sampler.py. Here: all at once,
    in pages that nobody else wants. What is drafted and verified is what the whole model says."""
    drafts = kind.startswith("drafts")
    sizes = {"batch_size": len(asks), "max_sequences": len(asks), "memory": 10**7, "prefix_caching": False}
    engine = Engine(model(kind), exiting=setting, **sizes)
    samplings = [Sampling(max_new_tokens=ask.new, **drawn(kind, ask.seed)) for ask in asks]
    results = engine.run([Request(id=i, prompt=ask.prompt, sampling=samplings[i]) for i, ask in enumerate(asks)])
    assert engine.counters().preemptions == 0
    return [
        Right(one.tokens, one.finish.reason, *((None, None) if drafts else (one.depths, one.confidences))) for one in results
    ]


@dataclass
class Heard:
    ask: Ask
    bursts: list[list[Event]] = field(default_factory=list)
    """As the engine handed them out: the lists themselves, which a slow listener has not looked at."""
    read: int = 0
    """Of these the ones that the listener has looked at."""
    steps: int = 0
    """That the engine has made since."""
    sequence: Sequence | None = None
    """The engine's, once it is taken."""

    @property
    def result(self) -> Result | None:
        return None if self.sequence is None else self.sequence.result

    @property
    def events(self) -> list[Event]:
        return [event for burst in self.bursts for event in burst]

    def look(self) -> None:
        """After every step; a slow listener now and then."""
        self.steps += 1
        if self.ask.listens == "at once" or self.steps % SLOW == 0:
            self.read = len(self.bursts)

    def leaves(self) -> bool:
        """Whether it cancels. A slow listener may not have heard that there is nothing left to cancel."""
        if self.ask.patience is None:
            return False
        if self.ask.listens == "not":
            return self.result is None and self.steps >= 4 * self.ask.patience
        heard = [event for burst in self.bursts[: self.read] for event in burst]
        over = bool(heard) and isinstance(heard[-1], Finished)
        return not over and sum(isinstance(event, TokenEvent) for event in heard) >= self.ask.patience


STEMS = ((5, 9, 13, 7, 21, 2, 14, 13, 10), (5, 9, 13, 7, 1), (8, 8, 8, 8, 8, 8), (20,))
token = st.integers(0, VOCAB - 1)
prompts = st.builds(lambda stem, more: (*stem, *more), st.sampled_from(STEMS), st.lists(token, max_size=4).map(tuple))


def thresholds(kind: str) -> list[Threshold | None]:
    """Those of requests."""
    setting = leaving(kind)
    if setting is None or setting.threshold is None:
        return [None]
    two = setting.exit_layers is not None and len(setting.exit_layers) == 2
    return [None, None, 0.0, 1.0, *([(1.0, 0.0), (0.0, 1.0)] if two else [])]


def asks(kind: str) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask,
        after=st.sampled_from([0, 0, 0, 1, 3]),
        prompt=prompts,
        new=st.integers(1, MOST_NEW),
        seed=st.sampled_from([None, None, 11]),
        patience=st.sampled_from([None, None, None, None, 0, 1, 3]),
        threshold=st.sampled_from(thresholds(kind)),
        listens=st.sampled_from(["at once", "at once", "not", "slowly"]),
    )


@st.composite
def sizes(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """With few slots, pages are there for little more than one text of `max_length`."""
    rows = draw(st.integers(1, 4))
    chosen: dict[str, Any] = {
        "batch_size": rows,
        "max_sequences": rows if kind in TOGETHER else draw(st.integers(rows if kind in WHOLE else 1, 6)),
        "page_size": draw(st.sampled_from([1, 2, 4, 8])),
        "prefill_chunk": draw(st.sampled_from([1, 3, 8, 64])),
        "max_length": draw(st.sampled_from([SHORT, SHORT, LONGEST, 2 * LONGEST])),
        "max_queue": draw(st.sampled_from([2, 100])),
        "lag": draw(st.integers(0, 2)),
        "burst": draw(st.sampled_from([1, 1, 3])),
        "prefix_caching": draw(st.booleans()),
        "stream_interval": draw(st.sampled_from([1, 1, 3])),
    }
    if kind.startswith("routed"):
        chosen["cores"] = draw(st.sampled_from([None, None, 1, 2, 3]))
        if draw(st.booleans()):
            chosen["memory"] = AMPLE  # a pass over prompts may be confirmed behind the next one
    if encodes(kind):
        chosen["max_source"] = draw(st.sampled_from([LONGEST_PROMPT - 1, LONGEST_PROMPT]))
    if kind in ("exits", "exits, own layers", "drafts", "drafts, encoder"):
        chosen["shallows"] = draw(st.integers(1, 2))
    if kind.startswith("drafts"):
        chosen["always_draft"] = draw(st.booleans())
    return chosen


def play(kind: str, engine: Engine, history: list[Ask]) -> list[Heard]:
    """The history, and steps until everybody has ended. Requests that are refused are left out."""
    heard: list[Heard] = []
    waiting = list(history)
    ahead = (engine.runner.sizes.lag + 1) * engine.runner.sizes.burst
    steps = 100 + (4 + ahead) * sum(2 * len(ask.prompt) + 4 * ask.new + ask.after for ask in history)
    idle = 0
    while waiting or engine.busy:
        while waiting and waiting[0].after <= idle:
            _submit(kind, engine, waiting.pop(0), heard)
            idle = 0
        for id, one in enumerate(heard):
            if one.leaves():
                running = one.result is None
                assert engine.cancel(id) == running
        engine.step()
        for one in heard:
            one.look()
        idle += 1
        steps -= 1
        assert steps, "somebody waits for ever"
    return heard


def _submit(kind: str, engine: Engine, ask: Ask, heard: list[Heard]) -> None:
    sampling = Sampling(max_new_tokens=ask.new, **drawn(kind, ask.seed))
    one = Heard(ask)
    try:
        request = Request(id=len(heard), prompt=ask.prompt, sampling=sampling, exit_threshold=ask.threshold)
        one.sequence = engine.submit(request, None if ask.listens == "not" else one.bursts.append)
    except QueueFull:
        assert len(engine.scheduler.waiting) >= engine.options.max_queue
    except RequestTooLarge:
        assert not _fits(kind, engine, ask)
    else:
        assert _fits(kind, engine, ask)
        heard.append(one)


def _fits(kind: str, engine: Engine, ask: Ask) -> bool:
    sizes, prompt = engine.runner.sizes, len(ask.prompt)
    if encodes(kind):
        return prompt <= sizes.max_source and 1 + ask.new <= sizes.max_length
    return prompt + ask.new <= sizes.max_length


def check(kind: str, engine: Engine, heard: list[Heard]) -> None:
    for one, right in zip(heard, references(kind, [one.ask for one in heard]), strict=True):
        ask, result = one.ask, one.result
        assert result is not None
        many, reason = len(result.tokens), result.finish.reason
        if reason == "cancelled":
            assert ask.patience is not None
            assert result.tokens == right.tokens[:many]
        else:
            assert result.tokens == right.tokens[: ask.new]
            assert reason == ("length" if len(right.tokens) > ask.new else right.finish)
        if not kind.startswith("drafts"):  # there a depth says what was drafted, which may be anything
            assert result.depths == (None if right.depths is None else right.depths[:many])
        if right.confidences is not None:
            assert list(result.confidences or ()) == pytest.approx(right.confidences[:many], abs=1e-4)
        if ask.listens != "not":
            events_are_those_of(result, one.bursts, engine.options.stream_interval)
    assert engine.totals.finished == len(heard)
    nothing_is_left(engine)


def events_are_those_of(result: Result, bursts: list[list[Event]], interval: int) -> None:
    """The first token comes at once, then there are as many as asked for at a time, but for the last."""
    *said, last = [event for burst in bursts for event in burst]
    assert last == result.finish
    assert [event.index for event in said] == list(range(len(said)))
    assert tuple(event.token for event in said) == result.tokens
    assert tuple(event.depth for event in said) == (result.depths or (None,) * len(said))
    if result.confidences is not None:
        assert tuple(event.confidence for event in said) == result.confidences
    told = [len(burst) for burst in bursts if isinstance(burst[0], TokenEvent)]
    assert all(many >= interval for many in told[1:-1])


def nothing_is_left(engine: Engine) -> None:
    assert not engine.busy
    counters = engine.counters()
    assert (counters.queued, counters.prefilling, counters.running) == (0, 0, 0)
    assert counters.pages_used == counters.pages_cached
    assert (engine._sequences, set(engine._in_slot), list(engine._launches.in_flight)) == ({}, {None}, [])
    memory = engine.scheduler.page_manager
    memory.prefixes.clear()
    assert [pool.free for pool in memory.pools] == list(engine.runner.sizes.pool_pages)


def live(kind: str, sizes: dict[str, Any], history: list[Ask]) -> Counter[str]:
    """One engine's life, checked; returns what happened in it."""
    engine = Engine(model(kind), exiting=leaving(kind), **sizes)
    if kind.startswith(("whole", "routed")) and sizes["lag"]:  # decode steps of fewer rows, as on a GPU
        engine.runner.row_counts = tuple(range(1, engine.options.batch_size))
    if kind.startswith("routed"):  # steps whose passes follow, as on a GPU, unless their number is given
        engine.runner.core_passes = followed_passes(PLANS[kind], engine.options)
    if kind.startswith("routed") and sizes["lag"]:  # short prompts as there: nobody is asked who goes on
        padded(engine, 2, 5, 16)
    heard = play(kind, engine, history)
    counters = engine.counters()
    check(kind, engine, heard)
    happened = Counter(one.result.finish.reason for one in heard if one.result is not None)
    happened.update(preempted=counters.preemptions, prefixes=counters.prefix_hits)
    return happened


VARIANTS = (
    "routed, windows", "routed, shared, windows", "drafts, a tree, windows", "exits, shared", "exits, looped, lora",
    "exits, looped, prefix, windows", "exits, entries copied, kl", "exits, states copied, encoder",
    "routed, prefix, windows", "routed, hybrid, encoder",
)  # fmt: skip
"""Other models in a program that another kind has too: `test_crowds` plays them, with everything that can happen."""


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        *((kind, 3) for kind in PLANS if kind not in VARIANTS),
        *(pytest.param(kind, 30, marks=pytest.mark.slow) for kind in PLANS),
    ],
)
def test_any_history(kind: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(sizes=sizes(kind), history=st.lists(asks(kind), min_size=3, max_size=9))
    def histories(sizes: dict[str, Any], history: list[Ask]) -> None:
        live(kind, sizes, history)

    histories()


@pytest.mark.parametrize("lives", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PLANS)
def test_crowds(kind: str, lives: int) -> None:
    """Hypothesis seeks short histories and shrinks them; here memory is short all the time, and everything happens, in the
    first life of most kinds."""
    happened: Counter[str] = Counter()
    everything = {"eos", "length", "cancelled", "preempted", *(() if encodes(kind) else ("prefixes",))}
    first = list(PLANS).index(kind)
    for life in range(3):
        if life >= lives and everything <= set(happened):
            break
        lag = (first + life) % 3
        random, listening = Random(lag), Random(lag)
        sizes: dict[str, Any] = {
            "batch_size": 4, "max_sequences": 4 if kind in TOGETHER else 6, "page_size": random.choice((1, 2)),
            "max_length": SHORT,
            "prefill_chunk": random.choice((2, 8)), "lag": lag, "burst": random.choice((1, 2)),
            "stream_interval": 1 + first % 2,
        }  # fmt: skip
        if encodes(kind):
            page = page_bytes(model(kind).architecture, PLANS[kind].unrolled_layers, sizes["page_size"], torch.float32)
            sizes |= {"max_source": 5, "memory": page * sum(-(-many // sizes["page_size"]) for many in (5, MOST_NEW))}
        history = [
            Ask(
                after=random.choice((0, 1)),
                prompt=(*random.choice(STEMS)[:4], *random.choices(range(VOCAB), k=random.randint(0, 1))),
                new=random.randint(8, MOST_NEW),
                seed=random.choice((None, 11)),
                patience=random.choice((None, None, None, 4)),
                threshold=random.choice(([*thresholds(kind), None, None])[:3]),
                listens=listening.choice(("at once", "at once", "not", "slowly")),
            )
            for _ in range(8)
        ]
        happened += live(kind, sizes, history)
    assert everything <= set(happened)


@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind.startswith(("exits", "drafts"))])
def test_rows_that_stand_for_nothing_write_nothing(kind: str) -> None:
    """A pass of one row has no hole, so what it leaves in the spare slot stays there. Its slot must not come to life by that
    and write into a page, which hardly ever shows in a token."""

    def entries(before: list[int]) -> torch.Tensor:
        engine = Engine(
            model(kind), exiting=leaving(kind, 0.0), batch_size=1, max_sequences=1, page_size=4, max_length=LONGEST,
            prefix_caching=not PLANS[kind].draft,  # behind a cached prefix a draft layer has not seen the state before
        )  # fmt: skip
        for new in before:
            engine.generate([list(STEMS[0])], max_new_tokens=new)
        engine.generate([list(STEMS[1])], max_new_tokens=6, ignore_eos=True)
        table = engine.runner.state.tables_STP[0, 0].tolist()
        keys, _ = engine.runner.pages._pools[0]
        return torch.stack([keys[:, table[i // 4], i % 4] for i in range((1 if encodes(kind) else len(STEMS[1])) + 4)])

    undisturbed = entries([])
    for before in ([1], [2], [1, 1]):
        torch.testing.assert_close(entries(before), undisturbed)
