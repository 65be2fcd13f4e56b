"""The weight-read floor counts what a tick reads, and kernels are timed against what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.exit_models import LLAMA, LORA, NEOX, build, exit_layer, exiting
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.engine import Engine
from fathomlm.errors import UnsupportedModel
from fathomlm.lab.bench import kernels
from fathomlm.lab.bench.floor import decode_step_bytes, reading_speed
from fathomlm.lab.bench.models import random_model
from model.route.small import LLAMA as ROUTED
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 4, "max_length": 32}
CPU = torch.device("cpu")
FLOAT = 4


def head(a: Architecture) -> int:
    """With the final norm."""
    return (a.vocab + 1) * a.hidden


def layer(a: Architecture) -> int:
    return a.layer_parameters


def test_a_plain_model_reads_all_its_weights_but_the_embedding() -> None:
    model = build("vanilla")
    own = sum(p.numel() for name, p in model.decoder.named_parameters() if not name.startswith(("embed", "exit")))
    assert decode_step_bytes(Engine(model, **SMALL).runner) == FLOAT * own == FLOAT * (6 * layer(LLAMA) + head(LLAMA))


def test_a_tied_head_is_read() -> None:
    a = replace(LLAMA, tied_embeddings=True)
    model = random_model(a, DepthPlan.vanilla(6), dtype=torch.bfloat16, device=CPU)
    assert decode_step_bytes(Engine(model, **SMALL).runner) == 2 * sum(p.numel() for p in model.parameters())


def test_looped_layers_are_read_each_time_with_what_each_step_adds() -> None:
    plan = DepthPlan.build("cycle", 2, 6)
    model = random_model(LLAMA, plan, LORA, dtype=torch.float32, device=CPU)
    added = sum(p.numel() for p in model.decoder.deltas.parameters())
    assert added > 0
    assert decode_step_bytes(Engine(model, **SMALL).runner) == FLOAT * (6 * layer(LLAMA) + added + head(LLAMA))


@pytest.mark.parametrize("cores", [1, 3])
def test_a_routed_tick(cores: int) -> None:
    engine = Engine(model_of(routed()), cores=cores, **SMALL)
    router = sum(p.numel() for p in engine.model.decoder.routers.parameters())  # type: ignore[union-attr]
    core = 2 * layer(ROUTED) + router
    assert decode_step_bytes(engine.runner) == FLOAT * (cores * core + 2 * layer(ROUTED) + head(ROUTED))


def test_a_routed_tick_of_several_turns() -> None:
    engine = Engine(model_of(routed()), forced_depths=(1.0, 0.3, 0.2), **SMALL)
    router = sum(p.numel() for p in engine.model.decoder.routers.parameters())  # type: ignore[union-attr]
    program: Any = engine.runner.program
    turns = len(program.cores)
    expected = sum(program.cores) * (2 * layer(ROUTED) + router) + turns * (2 * layer(ROUTED) + head(ROUTED))
    assert turns > 1
    assert decode_step_bytes(engine.runner) == FLOAT * expected


def test_ticks_in_front_of_an_exit_and_behind_it() -> None:
    entries = 2 * LLAMA.hidden * LLAMA.kv_heads * LLAMA.head_dim
    cases = {("parallel", 1): 0, ("parallel", 2): 3 * layer(LLAMA) + head(LLAMA), ("state-copy", 1): 3 * entries}
    for (mode, shallows), more in cases.items():
        engine = Engine(build("vanilla"), exiting=exiting("vanilla", mode), shallows=shallows, **SMALL)
        assert decode_step_bytes(engine.runner) == FLOAT * (6 * layer(LLAMA) + 2 * head(LLAMA) + more)


def test_a_pass_of_two_loops_reads_the_block_once_and_both_heads() -> None:
    model = build("lora")  # its exit has a low-rank head of its own
    engine = Engine(model, exiting=exiting("lora", "parallel"), **SMALL)
    added = sum(p.numel() for p in model.decoder.deltas.parameters())
    own = sum(p.numel() for p in model.decoder.exit_heads.parameters())
    assert own > 0
    assert decode_step_bytes(engine.runner) == FLOAT * (3 * layer(LLAMA) + added + 2 * head(LLAMA) + own)


def test_a_static_exit_reads_no_deeper_layer() -> None:
    for name in ("vanilla", "lora", "own-layer"):
        model = build(name)
        engine = Engine(model, exiting=exiting(name, "static"), **SMALL)
        at, decoder = str(exit_layer(name) - 1), model.decoder
        parts = (decoder.exit_adapters, decoder.exit_heads, decoder.exit_blocks)
        own = sum(p.numel() for part in parts if at in part for p in part[at].parameters())
        added = sum(p.numel() for step in model.plan.steps[:3] for p in getattr(decoder.delta(step), "parameters", list)())
        assert (own > 0, added > 0) == (name != "vanilla", name == "lora")
        assert decode_step_bytes(engine.runner) == FLOAT * (3 * layer(LLAMA) + added + own + head(LLAMA))


def test_steps_that_read_anothers_entries_read_no_weights_for_them() -> None:
    model = build("shared-kv")
    entries = 2 * LLAMA.hidden * LLAMA.kv_heads * LLAMA.head_dim
    shared = sum(model.plan.reads_kv(step) for step in model.plan)
    assert shared == 2
    assert decode_step_bytes(Engine(model, **SMALL).runner) == FLOAT * (6 * layer(LLAMA) - shared * entries + head(LLAMA))


def test_reading_speed_is_that_of_a_memory() -> None:
    assert 1e8 < reading_speed(CPU, 2**22) < 1e13


# Kernels.


OPTIONS = kernels.KernelOptions(rows=5, context=20, rank=3, recursions=2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLD_BYTES", 1e5)
    monkeypatch.setattr(kernels, "SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
def test_every_kernel_of_a_layer_is_timed() -> None:
    told: list[tuple[int, int]] = []
    found, complete = kernels.time_kernels(
        LLAMA, OPTIONS, dtype=torch.float32, device=CPU, speed=1e9, on_done=lambda *done: told.append(done)
    )
    assert complete
    assert told == [(number, kernels.KERNELS) for number in range(1, kernels.KERNELS + 1)]
    assert sum(one.layer_share or 0.0 for one in found) == pytest.approx(1)
    assert sum(one.layer_share is not None for one in found) == kernels.IN_LAYER
    # On a CPU nobody claims microseconds.
    assert all(one.twin and one.us is None and one.floor_us is None and one.floor_share > 0 for one in found)
    weights = [one.reads_bytes for one in found if one.layer_share is not None and one.kernel != "paged_attention"]
    assert sum(weights) == FLOAT * (layer(LLAMA) - 2 * LLAMA.hidden)  # all but the two norms, which are folded in
    by_name = {one.kernel: one.reads_bytes for one in found}
    assert by_name["norm_linear"] == FLOAT * LLAMA.vocab * LLAMA.hidden
    assert by_name["paged_attention"] == FLOAT * 2 * 5 * 20 * LLAMA.kv_heads * LLAMA.head_dim
    assert by_name["add_grouped_lora"] == FLOAT * 2 * 3 * (LLAMA.hidden + LLAMA.intermediate)


@pytest.mark.usefixtures("quick")
def test_every_case_computes_something_on_each_of_its_copies() -> None:
    for case in kernels.build_cases(LLAMA, OPTIONS, torch.float32, CPU):
        assert case.copies > 1
        for n in range(case.copies):
            out = case.call(n)
            assert isinstance(out, Tensor)
            assert out.isfinite().all()
            assert out.abs().max() > 0


@pytest.mark.usefixtures("quick")
def test_ctrl_c_leaves_the_kernels_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time_case(case: kernels.Case, device: torch.device) -> float:
        if len(timed) == 2:
            raise KeyboardInterrupt
        timed.append(case.kernel)
        return 1.0

    monkeypatch.setattr(kernels, "time_case", time_case)
    found, complete = kernels.time_kernels(LLAMA, OPTIONS, dtype=torch.float32, device=CPU, speed=1e9)
    assert not complete
    assert [one.kernel for one in found] == timed == ["norm_qkv_rope_write", "paged_attention"]
    assert [one.layer_share for one in found] == [None, None]
    assert found[0].floor_share == found[0].reads_bytes / 1e9


def test_layers_without_kernels_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="neox"):
        kernels.check(NEOX)
