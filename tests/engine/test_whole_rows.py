"""Greedy decode steps in fewer kernels leave everything as the plain ones do, on a GPU or by Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, build
from engine.test_engine_seq2seq import SOURCES
from engine.test_engine_seq2seq import model as translator
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.device_state import ENTER, IDLE
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs import whole_rows
from fathomlm.engine.programs.base import EPOCH, FLAGS, LOGPROB, SLOT, VALID, SamplingVariant
from fathomlm.engine.programs.whole import WholeProgram
from fathomlm.model.seq2seq import FathomModel
from with_triton import GPU, WITH_TRITON

pytestmark = WITH_TRITON
ROWS = 4
SIZES: dict[str, Any] = {"batch_size": ROWS, "page_size": 4, "max_length": 48, "compile": False}


@pytest.fixture(autouse=True)
def _few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_rows, "runs_here", lambda device: True)


def engine_of(model: FathomModel, **options: Any) -> Engine:
    engine = Engine(copy.deepcopy(model).cuda() if GPU else model, **SIZES | options)
    program = engine.runner.program
    assert isinstance(program, WholeProgram)
    assert program._few is not None
    return engine


@pytest.mark.parametrize("slots", [ROWS, ROWS + 3])
def test_every_number_is_the_plain_steps(slots: int) -> None:
    """From random places: slots that are empty, wait for pages, or are about to end, and more slots than rows."""
    engine = engine_of(build("vanilla"), max_sequences=slots)
    program, s, pages = engine.runner.program, engine.runner.state, engine.runner.pages
    assert isinstance(program, WholeProgram)
    few, variant, random = program._few, SamplingVariant(), torch.Generator().manual_seed(0)
    program.parts.sampler.place_all([])

    def below(many: int) -> int:
        return int(torch.randint(many, (), generator=random))

    held = [s.entries_ST, s.numbers_SC, *pages.at(0, 0, engine.runner.layout.planes[0])]
    told = set[tuple[bool, bool]]()
    for _ in range(16):
        for slot in range(slots):
            position, made = 4 + below(7), below(6)
            s.tables_STP[slot, 0, :3] = 3 * slot + torch.randperm(3, generator=random)
            s.entries_ST[slot, 0], s.capacity_ST[slot, 0] = position, position + below(3)
            stage = ENTER if below(4) else IDLE
            numbers = [below(60), position, stage, below(9), made, made + 1 + below(3), slot + 9, 1, below(2), below(4) // 3]
            s.numbers_SC[slot] = torch.tensor(numbers)
        before, found = [tensor.clone() for tensor in held], []
        for way in (None, few):
            program._few = way
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
            program.output.blank(s.spare)
            with torch.no_grad():
                program.decode_step(variant)
            output = program.output
            found.append(([tensor.clone() for tensor in held], output.ints_NC.clone(), output.floats_NC.clone()))
        (plain, ints, floats), (fast, fast_ints, fast_floats) = found
        columns = [SLOT, EPOCH, FLAGS]
        assert fast_ints[:, columns].tolist() == ints[:, columns].tolist()
        chosen = ints[:, FLAGS] & VALID != 0
        assert fast_ints[chosen].tolist() == ints[chosen].tolist()
        torch.testing.assert_close(fast_floats[chosen, LOGPROB], floats[chosen, LOGPROB], rtol=1e-5, atol=1e-5)
        assert fast[0][:-1].tolist() == plain[0][:-1].tolist()
        assert fast[1][:-1].tolist() == plain[1][:-1].tolist()
        for slow, quick in zip(plain[2:], fast[2:], strict=True):
            torch.testing.assert_close(quick, slow, rtol=1e-5, atol=1e-5)
        told |= {(bool(flags & VALID), bool(flags & ~VALID)) for flags in ints[:, FLAGS].tolist()}
    assert {(True, True), (True, False), (False, False)} <= told


@pytest.mark.parametrize("name", ["vanilla", "own-layer"])
@pytest.mark.parametrize("sizes", [{}, {"max_sequences": 1, "batch_size": 1}, {"max_sequences": 6, "burst": 4, "lag": 1}])
def test_texts_are_the_references(name: str, sizes: dict[str, int]) -> None:
    """A request that draws has the plain steps, and so have those beside it."""
    engine = engine_of(build(name), **sizes)
    wanted = generate(build(name), PROMPTS, max_new_tokens=NEW)
    assert [r.tokens for r in engine.generate(PROMPTS, max_new_tokens=NEW)] == [w.tokens for w in wanted]
    engine.generate(PROMPTS[:1], max_new_tokens=NEW, temperature=0.9, seed=2)
    assert [r.tokens for r in engine.generate(PROMPTS, max_new_tokens=NEW)] == [w.tokens for w in wanted]


def test_a_static_exit_is_the_references() -> None:
    setting = Exiting(mode="static", exit_layers=(2,))
    wanted = generate(build("vanilla"), PROMPTS, max_new_tokens=NEW, exiting=setting)
    found = engine_of(build("vanilla"), exiting=setting).generate(PROMPTS, max_new_tokens=NEW)
    assert [(r.tokens, r.depths) for r in found] == [(w.tokens, w.exit_layers) for w in wanted]


@pytest.mark.parametrize("name", ["gated", "loops"])
def test_a_decoder_over_sources_is_the_references(name: str) -> None:
    made = translator(name)
    wanted = [w.tokens for w in generate(made, SOURCES, max_new_tokens=NEW, ignore_eos=True)]
    engine = engine_of(made, max_source=12)
    assert [r.tokens for r in engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)] == wanted
