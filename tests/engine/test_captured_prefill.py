"""Rows that stand for nothing beside short prompts change nothing; no decode steps are started that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from decode.exit_models import PROMPTS, build, exiting, mixing_threshold
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.engine.captured_prefill import LONG_SIZES, SIZES, CapturedPrefill, sizes_for
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request
from fathomlm.lab.bench.models import random_model
from fathomlm.model.quantize import quantize_layers

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "prefill_chunk": 11, "max_length": 64}
TOKENS = 12
WAYS = {
    "full": ("vanilla", None),
    "static": ("vanilla", "static"),
    "state-copy": ("vanilla", "state-copy"),
    "parallel": ("vanilla", "parallel"),
    "speculative": ("vanilla", "speculative"),
    "draft layer": ("draft", "speculative"),
}


def setting(way: str) -> Any:
    name, mode = WAYS[way]
    if mode is None or mode == "static":
        return None if mode is None else exiting(name, mode)
    threshold = 0.0 if name == "draft" else mixing_threshold(name)
    return exiting(name, mode, threshold=threshold, **({} if mode == "state-copy" else {"max_stack": 4}))


def padded(engine: Engine, *sizes: int) -> CapturedPrefill:
    """The engine's prompts have rows that stand for nothing from now on, as on a GPU; nothing is captured."""
    found = CapturedPrefill(engine.runner.program.prefill, sizes, captures=False)
    engine.runner.short_prefill = found
    return found


@pytest.mark.parametrize("way", list(WAYS))
def test_rows_that_stand_for_nothing_change_nothing(way: str) -> None:
    model, how = build(WAYS[way][0]), setting(way)
    plain, engine = (Engine(model, exiting=how, always_draft=True, **SMALL) for _ in range(2))
    short = padded(engine, 6, 16)
    work = [tuple(prompt) for prompt in PROMPTS] * 2
    wanted, found = (one.generate(work, max_new_tokens=TOKENS, ignore_eos=True) for one in (plain, engine))
    assert short._met == {6, 16}, "chunks of both sizes were read"
    assert [(r.tokens, r.depths) for r in found] == [(r.tokens, r.depths) for r in wanted]
    assert torch.equal(engine.runner.state.entries_ST, plain.runner.state.entries_ST)


def test_wide_layers_and_long_chunks_are_read_as_they_are() -> None:
    shape = {"hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocab": 64}
    narrow = random_model(
        Architecture(family="llama", layers=1, **shape),
        DepthPlan.vanilla(1),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert sizes_for(narrow.decoder) == SIZES
    wide = random_model(
        Architecture(family="llama", layers=1, **shape | {"intermediate": 2**19}),
        DepthPlan.vanilla(1),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert sizes_for(wide.decoder) == tuple(size for size in SIZES if size <= 256)
    short = CapturedPrefill(lambda batch: None, sizes_for(wide.decoder), captures=False)
    assert [short.size(tokens) for tokens in (1, 64, 65, 256, 257)] == [64, 64, 128, 256, None]


@pytest.mark.parametrize(
    ("intermediate", "sizes"),
    [(64, (*SIZES, *LONG_SIZES)), (2**20, SIZES[:8])],
    ids=["narrow", "wide"],
)
def test_long_passes_of_narrow_routed_models_are_captured(intermediate: int, sizes: tuple[int, ...]) -> None:
    """There nobody is asked how many tokens go on, for which the host would wait; wide layers make that too dear."""
    shape = {"hidden": 64, "intermediate": intermediate, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocab": 64}
    plan = DepthPlan.build("cycle", 2, 4).with_routing(build_routing("expert", 2)).with_kv("cache")
    model = random_model(
        Architecture(family="llama", layers=4, **shape), plan, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert sizes_for(model.decoder) == sizes


def test_layers_in_integers_are_as_wide_as_before() -> None:
    """Their weights are no parameters; a pass over them takes the device no less time."""
    shape = {"hidden": 64, "intermediate": 2**17, "heads": 2, "kv_heads": 2, "head_dim": 32, "vocab": 64}
    model = random_model(
        Architecture(family="llama", layers=1, **shape),
        DepthPlan.vanilla(1),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    before = sizes_for(model.decoder)
    assert before != SIZES
    quantize_layers(model.decoder, "int8", None)
    assert sizes_for(model.decoder) == before


def test_other_threads_may_use_the_device_while_one_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of other models have threads of their own: a capture that forbids what they do would break, or break them."""
    modes: list[str] = []

    class Graph:
        def pool(self) -> int:
            return 1

        def replay(self) -> None: ...

    @contextmanager
    def capture(graph: Graph, pool: int | None = None, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    short = CapturedPrefill(lambda batch: None, (2,), captures=True)
    for _ in range(3):
        short(torch.zeros(4, 2, dtype=torch.int64), 2)
    assert modes == ["thread_local"], "the second pass of a size is captured, once"


@pytest.mark.parametrize("tokens", [1, 4, 5, 11])
def test_no_decode_step_is_started_that_nobody_needs(tokens: int) -> None:
    engine = Engine(build("vanilla"), burst=4, lag=1, **SMALL)
    request = Request(
        id=engine.new_id(), prompt=tuple(PROMPTS[0]), sampling=Sampling(max_new_tokens=tokens, ignore_eos=True)
    )
    (found,) = engine.run([request])
    assert len(found.tokens) == tokens
    assert engine.totals.decode_steps == tokens


def test_with_drafts_fewer_steps_are_started_than_there_are_tokens() -> None:
    """A step of drafts brings several tokens: what is in flight counts for as many as steps brought of late."""
    model, how = build("draft"), setting("draft layer")
    engine = Engine(model, exiting=how, always_draft=True, burst=4, lag=1, **SMALL)
    (wanted,) = generate(model, [PROMPTS[0]], max_new_tokens=40, ignore_eos=True, exiting=how)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    for _ in range(2):
        before = engine.totals.decode_steps
        (found,) = engine.run([Request(id=engine.new_id(), prompt=tuple(PROMPTS[0]), sampling=sampling)])
        assert found.tokens == wanted.tokens
    assert wanted.exits is not None
    passes = 40 - wanted.exits.accepted
    assert passes <= engine.totals.decode_steps - before <= passes + 4
