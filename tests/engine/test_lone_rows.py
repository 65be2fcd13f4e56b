"""Passes of one sequence in fewer kernels leave everything as the plain ones do, on a GPU or by Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, build, exiting, mixing_threshold
from engine.test_engine_seq2seq import SOURCES
from engine.test_engine_seq2seq import model as translator
from engine.test_engine_seq2seq import threshold as sure_enough
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.device_state import ENTER, IDLE
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs import lone_rows
from fathomlm.engine.programs.base import CONFIDENCE, DEPTH, EPOCH, FLAGS, SLOT, VALID, SamplingVariant
from fathomlm.engine.programs.exits import ExitProgram
from with_triton import GPU, WITH_TRITON

pytestmark = WITH_TRITON
STACK = 3
SIZES: dict[str, Any] = {"max_sequences": 1, "batch_size": 3, "page_size": 4, "max_length": 48}


def engine_of(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    monkeypatch.setattr(lone_rows, "runs_here", lambda device: True)
    model = build(name)
    setting = exiting(name, "parallel", threshold=mixing_threshold(name), max_stack=STACK)
    return Engine(copy.deepcopy(model).cuda() if GPU else model, exiting=setting, compile=False, **SIZES | options)


def program_of(engine: Engine) -> ExitProgram:
    program = engine.runner.program
    assert isinstance(program, ExitProgram)
    assert program._lone is not None
    return program


@pytest.mark.parametrize("name", ["vanilla", "own-layer"])
@pytest.mark.parametrize("kind", ["shallow", "deep"])
def test_every_number_is_the_plain_passes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From random places: tokens wait or do not, pages are short, texts are about to end, nobody is there."""
    engine = engine_of(name, monkeypatch)
    program, s, pages = program_of(engine), engine.runner.state, engine.runner.pages
    lone, variant = program._lone, SamplingVariant(only=kind, rows=1 if kind == "shallow" else STACK)
    random = torch.Generator().manual_seed(0)
    seen: set[tuple[bool, int]] = set()

    def below(many: int) -> int:
        return int(torch.randint(many, (), generator=random))

    held = [program.ring_BSKM, program.choice_SK, program.confidence_SK, program.level_S, program.filled_BS, s.numbers_SC]
    held += [*pages.at(0, 0, engine.runner.layout.planes[0]), s.clock]
    for number in range(24):
        position, pending = 4 + below(30), below(STACK + 1)
        level = int(kind == "deep" and below(3) > 0)
        s.tables_STP[0, 0] = torch.randperm(s.tables_STP.shape[2], generator=random)
        s.capacity_ST[0] = position + below(3)
        s.numbers_SC[0] = torch.tensor(
            [below(60), position, ENTER if below(6) else IDLE, 5, 3 + below(2), 5, 9, 1, below(2), below(2)]
        )
        program.level_S[0], program.filled_BS[0, 0] = level, position + level - max(level, pending)
        program.ring_BSKM.copy_(torch.randn(program.ring_BSKM.shape, generator=random))
        program.choice_SK.copy_(torch.randint(60, program.choice_SK.shape, generator=random))
        program.confidence_SK.copy_(torch.rand(program.confidence_SK.shape, generator=random))
        program.threshold_SB[0] = (0.0, 0.05, 0.3, 1.0)[number % 4]
        before, found = [tensor.clone() for tensor in held], []
        for way in (None, lone):
            program._lone = way
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
            program.output.blank(s.spare)
            with torch.no_grad():
                program.decode_step(variant)
            output = program.output.part(0, variant.rows or 0)
            found.append(([tensor.clone() for tensor in held], output.ints_NC.clone(), output.floats_NC.clone()))
        (plain, ints, floats), (fast, fast_ints, fast_floats) = found
        here = ints[:, SLOT] != s.spare
        assert (fast_ints[:, SLOT] == ints[:, SLOT]).all()
        columns = [SLOT, EPOCH, DEPTH, FLAGS]  # of what is not chosen, a CPU tells no token
        assert fast_ints[here][:, columns].tolist() == ints[here][:, columns].tolist()
        torch.testing.assert_close(fast_floats[here, CONFIDENCE], floats[here, CONFIDENCE], rtol=1e-5, atol=1e-5)
        chosen = ints[:, FLAGS] & VALID != 0
        assert fast_ints[chosen].tolist() == ints[chosen].tolist()
        torch.testing.assert_close(fast_floats[chosen], floats[chosen], rtol=1e-5, atol=1e-5)
        for slow, quick in zip(plain[:5], fast[:5], strict=True):
            slots = 1 if slow.ndim > 1 and slow.shape[0] == 1 else 0
            torch.testing.assert_close(quick.select(slots, 0), slow.select(slots, 0), rtol=1e-5, atol=1e-5)
        assert fast[5][0].tolist() == plain[5][0].tolist()
        if here.any():
            assert int(fast[-1]) == int(plain[-1]) == int(before[-1]) + 1
        for slow, quick in zip(plain[6:8], fast[6:8], strict=True):
            torch.testing.assert_close(quick[:-1], slow[:-1], rtol=1e-5, atol=1e-5)
        seen.add((bool(chosen.any()), int(here.sum())))
    assert {False, True} == {chose for chose, _ in seen}
    assert len({rows for _, rows in seen}) > 1


@pytest.mark.parametrize("name", ["vanilla", "own-layer"])
@pytest.mark.parametrize("sizes", [{}, {"burst": 4, "lag": 1}])
def test_texts_are_the_references(name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that draws has the plain passes, between others that do not."""
    engine = engine_of(name, monkeypatch, **sizes)
    program_of(engine)
    setting = exiting(name, "parallel", threshold=mixing_threshold(name), max_stack=STACK)
    for number, prompt in enumerate(PROMPTS):
        (wanted,) = generate(build(name), [prompt], max_new_tokens=NEW, exiting=setting)
        (found,) = engine.generate([prompt], max_new_tokens=NEW)
        assert (found.tokens, found.depths) == (wanted.tokens, wanted.exit_layers)
        assert found.confidences == pytest.approx(wanted.confidences, abs=1e-5)
        if number == 0:
            engine.generate([prompt], max_new_tokens=NEW, temperature=0.9, seed=2)


def test_a_source_is_looked_at_as_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T5 decoder: relative positions, and an encoder's output beside each row."""
    monkeypatch.setattr(lone_rows, "runs_here", lambda device: True)
    made = translator("gated")
    setting = Exiting(mode="parallel", exit_layers=(2,), threshold=sure_enough("gated", (2,)), max_stack=STACK)
    on_device = copy.deepcopy(made).cuda() if GPU else made
    engine = Engine(on_device, exiting=setting, compile=False, **SIZES, max_source=12)
    program_of(engine)
    for source in SOURCES:
        (wanted,) = generate(made, [source], max_new_tokens=NEW, exiting=setting, ignore_eos=True)
        (found,) = engine.generate([source], max_new_tokens=NEW, ignore_eos=True)
        assert (found.tokens, found.depths) == (wanted.tokens, wanted.exit_layers)
        assert found.confidences == pytest.approx(wanted.confidences, abs=1e-5)
    assert 0 < engine.totals.exited < engine.totals.tokens
