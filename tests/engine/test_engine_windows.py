"""Windows count positions, whatever entries there are: routed models with windows, and with layers that do not rotate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from decode.exit_models import GEMMA3
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture
from fathomlm.engine import row_positions
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import pool_page_bytes
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.request import Result
from fathomlm.kernels.cpu_layers import CpuLayers
from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers
from model.route.small import LLAMA, LOOPS, SHAPE, WINDOWS, model_of, routed
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 7
PROMPTS = [[(7 * i + 3 * j * j) % 61 for j in range(length)] for i, length in enumerate((11, 3, 14, 1, 9, 17))]
"""Some longer than every window, some shorter; chunks end inside windows."""
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}
ALIKE = dataclasses.replace(WINDOWS, windows=(4,) * 8)
HALF = dataclasses.replace(WINDOWS, windows=(4, None) * 4)
LOCAL = Architecture(**{**dataclasses.asdict(GEMMA3), **SHAPE, "rope": GEMMA3.rope, "local_rope": GEMMA3.local_rope,
                        "windows": (3, 5, None, 3, 5, 4, None, 3)})  # fmt: skip
STILL = dataclasses.replace(LLAMA, family="smollm3", rotated=(True, False, True, True) * 2)
BOTH = dataclasses.replace(STILL, windows=(4, None, 5, None, 3, None, 4, None))
ARCHITECTURES = {"alike": ALIKE, "half": HALF, "differing": WINDOWS, "local angles": LOCAL, "still": STILL, "both": BOTH}


def said(results: list[Any]) -> list[tuple[Any, ...]]:
    return [(result.tokens, result.depths) for result in results]


def served(model: FathomForCausalLM, **options: Any) -> list[Result]:
    engine = Engine(model, **SMALL | options)
    return engine.generate(PROMPTS, max_new_tokens=NEW)


CASES = [(name, "cache", loop, (False, True)) for name, loop in in_turn(ARCHITECTURES, ("middle", "cycle"), 0)]
CASES += [
    ("alike", "share", "middle", (False,)), ("differing", "hybrid", "middle", (True,)), ("half", "share", "cycle", (True,)),
    ("differing", "share", "cycle", (False,)), ("alike", "hybrid", "cycle", (False,)),
    ("differing", "cache", "cycle", (True,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kv", "loop", "fuses"), CASES)
def test_routed_models(name: str, kv: str, loop: str, fuses: tuple[bool, ...]) -> None:
    """Recursions may have different windows and angles; rows of all of them share passes, and prompts come in chunks. Every
    architecture meets both ways to run layers, and so does every kind of entries."""
    model = model_of(routed("expert", kv, loop), architecture=ARCHITECTURES[name])
    wanted = said(generate(model, PROMPTS, max_new_tokens=NEW))
    assert len({depth for _, depths in wanted for depth in depths}) > 1
    for fuse in fuses:
        assert said(served(model, fuse=fuse)) == wanted


@pytest.mark.parametrize("router", ["token", "expert, random"])
def test_routers_and_sizes(router: str) -> None:
    """A batch says what its requests say alone; also a host that runs behind, pages of one entry, and one page."""
    model = model_of(routed(router, "cache"), architecture=WINDOWS)
    wanted = said(generate(model, PROMPTS, max_new_tokens=NEW))
    for sizes in ({"lag": 2, "burst": 2, "page_size": 1}, {"batch_size": 1, "max_sequences": 1}, {"page_size": 16}):
        assert said(served(model, **sizes)) == wanted
    engine = Engine(model, **SMALL)
    assert said([engine.generate([prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS[:3]]) == wanted[:3]


def test_entries_are_not_positions() -> None:
    """What the tests here are worth: a window of as many entries says something else."""
    model = model_of(routed(), architecture=ALIKE)
    wanted = said(generate(model, PROMPTS, max_new_tokens=NEW))
    engine = Engine(model, **SMALL)
    assert engine.runner.layout.positioned == (1,)
    engine.runner.layers._places.place = lambda steps, attention, *_: attention  # type: ignore[method-assign]
    assert said(engine.generate(PROMPTS, max_new_tokens=NEW)) != wanted


@pytest.mark.parametrize("loop", ["middle", "cycle"])
def test_prefixes_and_preemption(loop: str) -> None:
    """Positions are in pages that sequences share, that are copied when one goes its own way, and that are given away."""
    new = 12
    model = model_of(routed("expert", "cache", loop), architecture=WINDOWS)
    prompts = [PROMPTS[2], [*PROMPTS[2][:13], 5], [*PROMPTS[2], 8, 9], PROMPTS[2], PROMPTS[5], [*PROMPTS[5][:10], 1, 2]]
    wanted = said(generate(model, prompts, max_new_tokens=new))
    roomy = Engine(model, **SMALL)
    for _ in range(2):
        assert said(roomy.generate(prompts, max_new_tokens=new)) == wanted
    assert roomy.counters().prefix_hits > 0
    layout = roomy.runner.layout
    sizes = pool_page_bytes(model.architecture, layout, 4, torch.float32)
    tight = Engine(model, **SMALL, max_sequences=6, memory=sum(22 * size for size in sizes))
    assert said(tight.generate(prompts, max_new_tokens=new)) == wanted
    assert tight.counters().preemptions > 0


@pytest.mark.parametrize(("name", "kv", "mode"), [
    ("differing", "cache", "parallel"), ("both", "cache", "state-copy"), ("local angles", "cache", "entry-copy"),
    ("differing", "share", "speculative"),
])  # fmt: skip
def test_loops_with_exits_share_passes(name: str, kv: Any, mode: Any) -> None:
    """Though their windows and angles differ."""
    model = model_of(LOOPS["cycle"].with_kv(kv), architecture=ARCHITECTURES[name])
    stack = {"max_stack": 3} if mode in ("parallel", "speculative") else {}
    setting = Exiting(mode=mode, exit_layers=(4,), threshold=0.05, **stack)
    wanted = generate(model, PROMPTS, max_new_tokens=NEW, exiting=setting)
    assert {depth for one in wanted for depth in one.exit_layers or ()} == {4, 8}
    for fuse in (False, True):
        engine = Engine(model, exiting=setting, always_draft=True, fuse=fuse, **SMALL)
        assert isinstance(engine.runner.program, ExitProgram)
        assert engine.runner.program.mixed
        found = engine.generate(PROMPTS, max_new_tokens=NEW)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
        if mode != "speculative":
            assert [one.depths for one in found] == [one.exit_layers for one in wanted]


def test_windows_that_no_sequence_reaches_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(routed(), architecture=dataclasses.replace(WINDOWS, windows=(48,) * 8))
    monkeypatch.setattr(row_positions, "write_positions", None)
    monkeypatch.setattr(row_positions, "window_starts", None)
    assert said(served(model)) == said(generate(model, PROMPTS, max_new_tokens=NEW))


@pytest.mark.parametrize("name", ["differing", "still", "both"])
def test_integer_weights(name: str, cpu_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all layers gives what their modules do. Where recursions differ in how they turn, modules run them."""
    model = model_of(routed(), architecture=dataclasses.replace(ARCHITECTURES[name], hidden=32, head_dim=8, intermediate=64))
    quantize_layers(model.decoder, "int8", cpu_library)
    wanted = said(served(model, fuse=False))
    calls, run = list[Any](), CpuLayers.run
    monkeypatch.setattr(CpuLayers, "run", lambda *given: (calls.append(given[-1]), run(*given))[1])
    assert said(served(model)) == wanted
    assert any(starts is not None for starts in calls) == (name == "differing")


def test_what_positions_take_is_counted() -> None:
    model = model_of(routed(), architecture=WINDOWS)
    engine = Engine(model, **SMALL)
    sizes = pool_page_bytes(model.architecture, engine.runner.layout, 4, torch.float32)
    pools = engine.runner.sizes.pool_pages
    assert engine.runner.pages.bytes == sum(size * pages for size, pages in zip(sizes, pools, strict=True))
