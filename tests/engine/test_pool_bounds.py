"""No row is led out of the pages: planes follow from the layout, and page numbers are looked at where that costs nothing."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from decode.exit_models import LLAMA, LOOP, MODELS, build, exiting, mixing_threshold
from fathomlm.depth import DepthPlan
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.engine import sizing
from fathomlm.engine.engine import Engine
from fathomlm.engine.kv_pages import AttentionMetadata, KVPages
from fathomlm.engine.layout import Layout, build_layout
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.schedule import PageCopy, PageGrant, SchedulerOutput
from fathomlm.errors import PlanError
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48}
PLANES, PAGES, SIZE = 3, 5, 4


def some_plans() -> list[DepthPlan]:
    plans = []
    for sharing, recursions in itertools.product(STRATEGIES, (1, 2, 3, 4)):
        plan = DepthPlan.build(sharing, recursions, 10, "add")
        plans += [plan, plan.with_kv("share", "cycle", 2) if recursions == 1 else plan.with_kv("share")]
    return plans


def test_every_plane_that_rows_are_led_to_is_their_own_steps() -> None:
    """With one exit anywhere, and with one after every recursion."""
    shared = set()
    for plan in some_plans():
        cuts = [(layer,) for layer in range(1, plan.unrolled_layers)]
        if plan.whole_passes and plan.recursions > 1:
            cuts.append(tuple(index + 1 for index in plan.recursion_ends()))
        for layers in cuts:
            layout = build_layout(LLAMA, plan, None, [layer - 1 for layer in layers])
            assert all(0 <= plane < layout.planes[pool] for pool, plane in layout.homes.values())
            segments = [plan.steps[a:b] for a, b in itertools.pairwise((0, *layers, plan.unrolled_layers))]
            if (on := layout.stride(plan, segments)) is None:
                continue
            shared.add((plan.recursions, plan.kv, len(layers)))
            for k, steps in enumerate(segments):
                for step, twin in zip(segments[0], steps, strict=True):
                    assert (step.layer, step.recursion + k * on.recursions) == (twin.layer, twin.recursion)
                    pool, plane = layout.home(step)
                    assert layout.home(twin) == (pool, plane + k * on.planes)
                    assert plane + k * on.planes < layout.planes[pool]
                    assert k == 0 or plan.reads_kv(twin) == (on.planes == 0)
    assert shared == {(n, kv, e) for kv in ("cache", "share") for n, e in ((2, 1), (3, 2), (4, 1), (4, 3))}


def test_hybrid_entries_have_no_exits() -> None:
    with pytest.raises(PlanError, match="requires a router"):
        LOOP.with_kv("hybrid")


def pool_of_pages() -> KVPages:
    layout = Layout("whole", (0,), (PLANES,), {})
    return KVPages(LLAMA, layout, (PAGES,), SIZE, torch.device("cpu"), torch.float32)


def rows(table: list[list[int]], lengths: list[int], slots: list[int], planes: int = 1) -> AttentionMetadata:
    return AttentionMetadata(torch.tensor(slots), torch.tensor(table).int(), torch.tensor(lengths).int(), planes=planes)


def test_rows_inside_the_pool_pass() -> None:
    pages = pool_of_pages()
    pages.check(0, rows([[0, 4], [3, 10**6]], [8, 4], [19, -1]))
    pages.check(0, rows([[0, 4], [6 + 3, 6 + 4]], [8, 5], [19, 24 + 16], planes=2))
    pages.check(0, rows([[10**6, -5]], [0], [-1]))


@pytest.mark.parametrize(
    ("table", "lengths", "slots", "planes", "says"),
    [
        ([[0, 6]], [5], [-1], 1, "sees page 6"),  # the next plane's first page
        ([[0, 5]], [5], [-1], 1, "sees page 5"),  # the page that is handed out to nobody
        ([[-1, 0]], [1], [-1], 1, "sees page -1"),
        ([[0, 12]], [5], [-1], 2, "sees page 12"),
        ([[0, 1]], [9], [-1], 1, "9 entries"),
        ([[0, 1]], [5], [20], 1, "writes page 5"),
        ([[0, 1]], [5], [-2], 1, "writes page -1"),
    ],
)
def test_rows_outside_the_pool_are_found(
    table: list[list[int]], lengths: list[int], slots: list[int], planes: int, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        pool_of_pages().check(0, rows(table, lengths, slots, planes))


def test_planes_and_copies_outside_the_pool_are_found() -> None:
    pages = pool_of_pages()
    assert len(pages.at(0, 1, 2)[0]) == 2 * (PAGES + 1)
    for plane, planes in ((3, 1), (2, 2), (-1, 1), (0, 0)):
        with pytest.raises(AssertionError, match="planes"):
            pages.at(0, plane, planes)
    for source, target in ((5, 0), (0, 5), (-1, 0)):
        with pytest.raises(AssertionError, match="is copied"):
            pages.copy(PageCopy(0, source, target))


@pytest.mark.parametrize(
    "order",
    [
        {"grants": [PageGrant(2, 0, 0, (0,))]},
        {"grants": [PageGrant(0, 0, 2, (0, 1))]},
        {"grants": [PageGrant(0, 0, 0, (4, 5))]},
        {"grants": [PageGrant(0, 1, 0, (7, 6))]},
        {"capacity": {(0, 0): 13}},
        {"capacity": {(2, 0): 4}},
    ],
)
def test_a_plan_that_leads_out_of_memory_is_found(order: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"tables": (0, 1), "pool_pages": (5, 7), "max_sequences": 2, "pages": 3, "size": 4}
    fine = SchedulerOutput(grants=[PageGrant(1, 0, 1, (0, 4)), PageGrant(1, 1, 2, (6,))], capacity={(1, 0): 12})
    fine.check(**sizes)
    with pytest.raises(AssertionError, match=r"PageGrant|slot 2|13 entries"):
        dataclasses.replace(fine, **order).check(**sizes)


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
@pytest.mark.parametrize("wrong", ["next plane", "spare", "negative"])
def test_a_table_with_a_wrong_page_stops_the_engine(kind: str, wrong: str) -> None:
    model = model_of(routed()) if kind == "routed" else build("lora")
    setting = exiting("lora", "parallel", threshold=mixing_threshold("lora")) if kind == "exits" else None
    engine = Engine(model, exiting=setting, **SMALL)
    stride = engine.runner.pages.stride(0)
    told = engine.runner.state.apply

    def spoilt(*given: Any) -> None:
        told(*given)
        engine.runner.state.tables_STP.fill_({"next plane": stride, "spare": stride - 1, "negative": -1}[wrong])

    engine.runner.state.apply = spoilt  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"a row (sees|writes) page"):
        engine.generate([[5, 9, 33]], max_new_tokens=4)


@pytest.mark.parametrize("name", [name for name in MODELS if "loop" in name or name in ("lora", "encoding")])
def test_an_exit_program_that_counts_planes_wrongly_is_found(name: str) -> None:
    setting = exiting(name, "state-copy", threshold=mixing_threshold(name))
    engine = Engine(build(name), exiting=setting, **SMALL)
    program = engine.runner.program
    assert isinstance(program, ExitProgram)
    assert program.stride is not None
    program.stride = program.stride._replace(planes=engine.runner.layout.planes[0])
    with pytest.raises(AssertionError, match="planes"):
        engine.generate([[5, 9, 33]], max_new_tokens=8)


@pytest.mark.parametrize(("room", "part"), [(1 << 30, 1.0), (0, 0.25)])
def test_there_is_room_for_every_sequence_unless_it_is_too_much(
    room: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "CPU_ROOM", room)
    engine = Engine(build("vanilla"), page_size=4, batch_size=8, max_length=48, prefix_caching=False)
    assert engine.runner.sizes.pool_pages == (8 * 12 * part,)
    results = engine.generate([[3, 5, 7]] * 8, max_new_tokens=40, ignore_eos=True)
    assert len({result.tokens for result in results}) == 1
    assert any(result.preemptions for result in results) == (part < 1)


def test_what_an_unloaded_model_had_is_free_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what it has freed, and the device counts it as taken until torch lets go of it."""
    free, kept = [100], [60]

    def empty_cache() -> None:
        free[0], kept[0] = free[0] + kept[0], 0

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 200))
    assert sizing.room(torch.device("cuda", 0)) == 80
