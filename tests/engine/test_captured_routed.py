"""Prompts of routed models are read without asking how many tokens go on, as where a GPU captures the pass; rows that stand
for nothing are then in every recursion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.test_captured_prefill import padded
from engine.test_engine_windows import BOTH, PROMPTS
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, Relaxation
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import pool_page_bytes
from fathomlm.engine.programs.routed import _going_on
from fathomlm.engine.request import Request
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from model.route.small import KV, LLAMA, ROUTERS, WINDOWS, model_of, routed
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "prefill_chunk": 11, "max_length": 48}
SIZES = (8, 16)
"""Some chunks fill the first as it is."""
NEW = 6
PREFIX = Relaxation(kind="prefix", prefix_length=3)
LORA = build_relaxation(LLAMA.linears(), "lora", 2)
CASES: dict[str, tuple[str, str, str, Architecture, Relaxation | None]] = {
    f"{router}, {kv}": (router, kv, "middle", LLAMA, None) for router, kv in in_turn(ROUTERS, KV, 0)
}
CASES |= {f"{kv}, no ends": ("expert", kv, "cycle", LLAMA, None) for kv in KV}
CASES |= {f"token, {kv}, no ends": ("token", kv, "cycle", LLAMA, None) for kv in KV}
CASES |= {
    "windows": ("expert", "cache", "middle", WINDOWS, None),
    "windows, shared": ("token", "share", "cycle", WINDOWS, None),
    "windows, hybrid": ("expert", "hybrid", "middle", WINDOWS, None),
    "windows, some layers still": ("token", "cache", "cycle", BOTH, None),
    "prefix, windows": ("expert", "cache", "middle", WINDOWS, PREFIX),
    "lora": ("token", "cache", "middle", LLAMA, LORA),
}


@cache
def model(name: str) -> FathomForCausalLM:
    """Shared by the tests here: do not change it."""
    router, kv, loop, architecture, relaxation = CASES[name]
    return model_of(routed(router, kv, loop), relaxation, architecture)


def said(results: list[Any]) -> list[tuple[Any, ...]]:
    return [(result.tokens, result.depths) for result in results]


@cache
def wanted(name: str, new: int = NEW, **control: Any) -> list[tuple[Any, ...]]:
    control = {"control": DepthControl(**control)} if control else {}
    return said(generate(model(name), PROMPTS, max_new_tokens=new, ignore_eos=True, **control))


def asking(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pass over prompts asked, from now on."""
    asked: list[bool] = []
    read = engine.runner.program.prefill
    monkeypatch.setattr(engine.runner.program, "prefill", lambda batch: (asked.append(batch.asks), read(batch))[1])
    return asked


@pytest.mark.parametrize(("name", "fuse"), in_turn(CASES, (False, True), 0))
def test_what_is_not_asked_changes_nothing(name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine = (Engine(model(name), fuse=fuse, **SMALL) for _ in range(2))
    asked, not_asked = asking(plain, monkeypatch), asking(engine, monkeypatch)
    short = padded(engine, *SIZES)
    first, found = (said(one.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) for one in (plain, engine))
    assert found == first == wanted(name)
    assert short._met == set(SIZES), "chunks of both sizes were read"
    assert (set(asked), set(not_asked)) == ({True}, {False})
    assert torch.equal(engine.runner.state.entries_ST, plain.runner.state.entries_ST)


FUSED = ("expert, cache", "token, hybrid", "expert, aux router, share", "hybrid, no ends", "windows", "windows, shared")


@pytest.mark.parametrize("name", FUSED)
def test_rows_that_stand_for_nothing_run_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU leaves them out of the layers. Here they run as they do there, and what comes out of them is not heeded."""
    engine, dead = Engine(model(name), fuse=True, **SMALL), list[int]()
    padded(engine, *SIZES)
    layers = engine.runner.layers

    def run(
        x_NM: torch.Tensor, steps: Any, attention: Any, positions_N: torch.Tensor, recursion_N: Any = None, *,
        spend: bool = False, alone: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        layers._check(steps, attention)
        nothing_N = attention.lengths_N == 0
        dead.append(int(nothing_N.sum()))
        out_NM = layers._run(x_NM, steps, attention, positions_N, recursion_N, spend, alone)
        return out_NM.masked_fill(nothing_N[:, None], float("nan")) if attention.sequence_N is not None else out_NM

    monkeypatch.setattr(layers, "run", run)
    assert said(engine.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) == wanted(name)
    assert any(dead)


def test_prompts_that_are_longer_than_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model("expert, cache"), **SMALL)
    asked = asking(engine, monkeypatch)
    padded(engine, 8)
    assert said(engine.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) == wanted("expert, cache")
    assert set(asked) == {False, True}


@pytest.mark.parametrize("name", ["expert, cache", "token, hybrid", "windows, shared", "prefix, windows", "cache, no ends"])
def test_prefixes_and_preemption(name: str) -> None:
    """A prompt goes on behind entries of each recursion that were there; a text that was put aside is read again."""
    new = 12
    roomy = Engine(model(name), **SMALL)
    padded(roomy, *SIZES)
    for _ in range(2):
        assert said(roomy.generate(PROMPTS, max_new_tokens=new, ignore_eos=True)) == wanted(name, new)
    assert roomy.counters().prefix_hits > 0
    sizes = pool_page_bytes(model(name).architecture, roomy.runner.layout, 4, torch.float32)
    tight = Engine(model(name), **SMALL, max_sequences=6, memory=sum(24 * size for size in sizes))
    padded(tight, *SIZES)
    assert said(tight.generate(PROMPTS, max_new_tokens=new, ignore_eos=True)) == wanted(name, new)
    assert tight.counters().preemptions > 0


@pytest.mark.parametrize("name", ["expert, cache", "token, cache, no ends"])
def test_depths_that_are_limited_or_biased(name: str) -> None:
    """Requests of one pass have limits of their own, so that some recursions have no row that goes on."""
    engine = Engine(model(name), depth_bias=0.5, **SMALL)
    padded(engine, *SIZES)
    depths = [1 + number % model(name).plan.recursions for number in range(len(PROMPTS))]
    found = engine.run(
        Request(id=number, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=NEW, ignore_eos=True), max_depth=depth)
        for number, (prompt, depth) in enumerate(zip(PROMPTS, depths, strict=True))
    )
    assert said(found) == [wanted(name, bias=0.5, max_depth=depth)[number] for number, depth in enumerate(depths)]
    shallow = [
        Request(id=number, prompt=tuple(prompt), sampling=Sampling(max_new_tokens=NEW, ignore_eos=True), max_depth=1)
        for number, prompt in enumerate(PROMPTS)
    ]
    assert said(engine.run(shallow)) == wanted(name, bias=0.5, max_depth=1)


def test_depths_that_are_forced() -> None:
    plain, engine = (Engine(model("expert, cache"), forced_depths=(1.0, 0.6, 0.3), **SMALL) for _ in range(2))
    padded(engine, *SIZES)
    first, found = (said(one.generate(PROMPTS, max_new_tokens=NEW, ignore_eos=True)) for one in (plain, engine))
    assert found == first
    assert first != wanted("expert, cache")
    assert torch.equal(engine.runner.state.entries_ST, plain.runner.state.entries_ST)


def test_rows_that_go_on_stand_in_front() -> None:
    on_N = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.4
    asked_K, valid_K = _going_on(on_N, asks=True)
    at_N, valid_N = _going_on(on_N, asks=False)
    assert bool(valid_K.all())
    assert torch.equal(at_N[valid_N], asked_K)
    assert torch.equal(valid_N, torch.arange(len(on_N)) < len(asked_K))
    assert torch.equal(at_N.sort().values, torch.arange(len(on_N)))


ASKS = ("nonzero", "masked_select", "_local_scalar_dense", "lift_fresh")
"""What waits for a GPU, and the last what copies to it from where the host may write meanwhile: a capture forbids both."""


class Questions(TorchDispatchMode):
    """Operations that could not be captured; those of layers are left out, which look at lengths on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.heeds = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.heeds and name in ASKS:
            self.found[name] += 1
        if self.heeds and name in ("index", "index_put", "index_put_"):
            assert not any(at is not None and at.dtype == torch.bool for at in args[1]), "a mask asks how many it has"
        return func(*args, **(kwargs or {}))

    def but(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def unheeded(*given: Any, **named: Any) -> torch.Tensor:
            self.heeds = False
            try:
                return run(*given, **named)
            finally:
                self.heeds = True

        return unheeded


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And otherwise once for each recursion behind the first, which every token runs."""
    for sizes in ((), SIZES):
        engine, questions = Engine(model(name), **SMALL), Questions()
        padded(engine, *sizes)
        runner = engine.runner
        monkeypatch.setattr(runner.layers, "run", questions.but(runner.layers.run))
        read = runner.short_prefill._run

        passes: list[int] = []

        def watched(
            given: torch.Tensor, read: Any = read, questions: Questions = questions, passes: list[int] = passes
        ) -> None:
            passes.append(given.shape[1])
            with questions:
                read(given)

        monkeypatch.setattr(runner.short_prefill, "_run", watched)
        engine.generate(PROMPTS[:3], max_new_tokens=1)
        plan = engine.model.plan
        first = plan.kv == "share" and all(step.part == "core" for step in plan)  # nothing behind it stores entries
        later = 0 if sizes or first else plan.recursions - 1
        assert set(questions.found) <= {"nonzero"}
        assert min(1, later) <= questions.found["nonzero"] <= later * len(passes)
