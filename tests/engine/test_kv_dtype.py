"""Keys and values in float8: a byte a number, in every program, with the tokens of an engine that rounds its entries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.exit_models import build, exiting, mixing_threshold
from engine.test_engine import MANY, NEW, SMALL, many
from fathomlm.decode.exiting import Exiting
from fathomlm.engine import kv_pages
from fathomlm.engine.engine import Engine
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.sizing import ample_memory
from fathomlm.errors import OptionError
from fathomlm.kernels import row_qkv
from fathomlm.kernels.gathered_attention import GatheredPages
from fathomlm.kernels.paged_write import FLOAT8, LARGEST_FLOAT8
from fathomlm.lab.bench.measure import measure
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.bench.workload import Workload, WorkloadRequest
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")

Made = tuple[FathomForCausalLM, Exiting | None]
CASES: dict[str, Callable[[], Made]] = {
    "whole": lambda: (build("vanilla"), None),
    "whole, lora": lambda: (build("lora"), None),
    "whole, windows": lambda: (build("gemma3"), None),
    "routed": lambda: (model_of(routed()), None),
    "routed, shared": lambda: (model_of(routed("expert", "share")), None),
    "token": lambda: (model_of(routed("token")), None),
    "exits": lambda: (build("vanilla"), exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"))),
    "exits, copies": lambda: (build("vanilla"), exiting("vanilla", "state-copy", threshold=mixing_threshold("vanilla"))),
}
TOLERANCE = 0.5
"""What float8 may move a log probability by, in models whose random weights are far larger than trained ones."""


def round_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines round keys and values to float8 before they write them into whatever pages they have."""

    def rounded(numbers: Tensor) -> Tensor:
        return numbers.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8).to(numbers.dtype)

    def rounding(write: Callable[..., None]) -> Callable[..., None]:
        return lambda k, v, *others: write(rounded(k), rounded(v), *others)

    monkeypatch.setattr(kv_pages, "write_entries", rounding(kv_pages.write_entries))
    stored = GatheredPages.store
    monkeypatch.setattr(GatheredPages, "store", lambda seen, *given: rounding(partial(stored, seen))(*given))
    monkeypatch.setattr(row_qkv, "plain_write_entries", rounding(row_qkv.plain_write_entries))


def told(engine: Engine) -> list[Any]:
    results = engine.generate(many(engine.model)[:4], max_new_tokens=NEW)  # one more than there are rows
    assert {result.finish.reason for result in results} <= {"length", "eos"}
    return [(result.tokens, result.depths) for result in results]


@pytest.mark.parametrize(
    ("name", "fuse"), [*((name, False) for name in CASES), *((name, True) for name in ("whole", "routed", "exits"))]
)
def test_tokens_are_those_of_an_engine_that_rounds_its_entries(
    name: str, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, leaving = CASES[name]()
    enough = {"memory": 10**6}  # state copies are read again exactly, so nobody may be put aside
    narrow = Engine(model, exiting=leaving, fuse=fuse, kv_dtype="fp8", **SMALL, **enough)
    found = told(narrow)
    assert narrow.runner.pages.at(0, 0)[0].dtype == FLOAT8
    assert narrow.runner.pages.at(0, 0)[0].view(torch.uint8).any()
    round_entries(monkeypatch)
    assert found == told(Engine(model, exiting=leaving, fuse=fuse, **SMALL, **enough))


@pytest.mark.parametrize("fuse", [False, True])
def test_the_first_tokens_are_near_those_without_rounding(fuse: bool) -> None:
    model = build("vanilla")
    exact, narrow = (
        Engine(model, fuse=fuse, kv_dtype=kind, **SMALL).generate(many(model), max_new_tokens=NEW, logprobs=5)
        for kind in ("auto", "fp8")
    )
    moved = []
    for one, other in zip(exact, narrow, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        wanted, got = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        moved += [abs(wanted[token] - got[token]) for token in wanted.keys() & got.keys()]
    assert 0 < max(moved) < TOLERANCE
    assert len(moved) > 4 * len(MANY)
    pairs = [pair for one, other in zip(exact, narrow, strict=True) for pair in zip(one.tokens, other.tokens, strict=True)]
    assert sum(mine == theirs for mine, theirs in pairs) > 0.8 * len(pairs)


@pytest.mark.parametrize("kind", ["whole", "routed", "exits"])
def test_the_same_memory_holds_twice_the_pages(kind: str) -> None:
    model, leaving = CASES[kind]()
    half = copy.deepcopy(model).to(torch.bfloat16)
    memory = 200_000
    engines = {
        name: Engine(half, exiting=leaving, kv_dtype=name, memory=memory, **SMALL) for name in ("auto", "fp8")
    }  # fmt: skip
    pages = {name: engine.runner.sizes.pool_pages for name, engine in engines.items()}
    for few, more in zip(pages["auto"], pages["fp8"], strict=True):
        assert more in (2 * few, 2 * few + 1)
    for name, engine in engines.items():
        assert 0.9 * memory < engine.runner.pages.bytes <= memory
        assert [pool.total for pool in engine.scheduler.page_manager.pools] == list(pages[name])
    told(engines["fp8"])


def test_without_a_limit_the_same_pages_take_half_the_memory() -> None:
    half = copy.deepcopy(build("vanilla")).to(torch.bfloat16)
    auto, narrow = (Engine(half, kv_dtype=kind, **SMALL).runner for kind in ("auto", "fp8"))
    assert auto.sizes == narrow.sizes
    assert auto.pages.bytes == 2 * narrow.pages.bytes
    options = [EngineOptions(kv_dtype=kind, **SMALL) for kind in ("auto", "fp8")]  # type: ignore[arg-type]
    wide, thin = (ample_memory(half.decoder, one, 48) for one in options)
    assert wide == 2 * thin


def test_a_measurement_counts_what_is_held() -> None:
    model = build("vanilla")
    asked = tuple(WorkloadRequest(tuple(prompt), 4) for prompt in many(model))
    found = {}
    for kind in ("auto", "fp8"):
        engine = TimedEngine(model, kv_dtype=kind, prefix_caching=False, **SMALL)
        found[kind] = measure(engine, Workload("few", 0, "together", None, asked), speed=1e9).memory
    assert (found["auto"].kv_dtype, found["fp8"].kv_dtype) == ("float32", "float8_e4m3fn")
    assert found["auto"].kv == 4 * found["fp8"].kv
    assert found["auto"].kv_most == 4 * found["fp8"].kv_most > 0


@pytest.mark.parametrize("kind", ["whole", "routed"])
def test_shared_beginnings_copied_pages_and_texts_put_aside_change_nothing(kind: str) -> None:
    """Entries are rounded once, when they are made, so a text does not depend on where they came from."""
    model, _ = CASES[kind]()
    shared = [(7 * i + 3) % model.architecture.vocab for i in range(13)]
    prompts = [[*shared, 5], [*shared, 9, 9], [*shared[:8], 1], [*shared, 5]]
    new = NEW + 2  # enough that memory runs out below
    small = SMALL | {"max_length": 28, "kv_dtype": "fp8"}
    plain = Engine(model, prefix_caching=False, **small)
    wanted = [plain.generate([prompt], max_new_tokens=new)[0].tokens for prompt in prompts]
    caching = Engine(model, **small)
    assert [caching.generate([prompt], max_new_tokens=new)[0].tokens for prompt in prompts] == wanted
    assert caching.counters().prefix_hits > 0
    tight = Engine(model, prefix_caching=False, memory=int(plain.runner.pages.bytes * 0.85), **small)
    assert [result.tokens for result in tight.generate(prompts, max_new_tokens=new)] == wanted
    assert tight.counters().preemptions > 0


@pytest.mark.parametrize("fuse", [False, True])
def test_numbers_that_float8_does_not_hold_are_cut_off(fuse: bool) -> None:
    """e4m3 has no infinity, and one NaN would spoil the text."""
    model = copy.deepcopy(build("vanilla"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attn.k.weight", "attn.v.weight")):
                weight *= 1e4
    engine = Engine(model, fuse=fuse, kv_dtype="fp8", **SMALL)
    told(engine)
    most = max(pages.float().abs().max().item() for pages in engine.runner.pages.at(0, 0))
    assert most == LARGEST_FLOAT8


@pytest.mark.parametrize("kind", ["fp16", "FP8", "", None, 8])
def test_other_types_are_refused(kind: Any) -> None:
    with pytest.raises(OptionError, match=f"invalid kv_dtype '{kind}'; choose from auto, fp8"):
        EngineOptions(kv_dtype=kind)


def test_a_gpu_that_does_not_know_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.engine.sizing import check_entries

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    cuda = torch.device("cuda")
    with pytest.raises(OptionError, match=r"8\.9 or later; an older GPU has 8\.6"):
        check_entries(EngineOptions(kv_dtype="fp8"), cuda)
    check_entries(EngineOptions(), cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_entries(EngineOptions(kv_dtype="fp8"), cuda)
