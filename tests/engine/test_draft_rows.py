"""Steps with a draft layer in fewer kernels leave everything as the plain ones do, on a GPU or by Triton's interpreter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, build
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.device_state import ENTER, IDLE
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs import lone_rows
from fathomlm.engine.programs.base import DRAFTED, FLAGS, SLOT, VALID, SamplingVariant
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.draft_rows import BestRows
from with_triton import GPU, WITH_TRITON

pytestmark = WITH_TRITON
SETTINGS = {
    "chain": Exiting(mode="speculative", threshold=0.0, max_stack=3),
    "tree": Exiting(mode="speculative", draft_tree=(2, 1, 2)),
    "wide tree": Exiting(mode="speculative", draft_tree=(5, 2)),
    "best": Exiting(mode="speculative", draft_best=(7, 3)),
    "all of two levels": Exiting(mode="speculative", draft_best=(16, 2)),
}
SIZES: dict[str, Any] = {"page_size": 4, "max_length": 48, "memory": 2**20, "always_draft": True}


def engine_of(name: str, kind: str, slots: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    monkeypatch.setattr(lone_rows, "runs_here", lambda device: True)
    model = copy.deepcopy(build(name)).cuda() if GPU else build(name)
    sizes = SIZES | {"max_sequences": slots, "batch_size": slots}
    engine = Engine(model, exiting=SETTINGS[kind], compile=False, **sizes | options)
    program = engine.runner.program
    assert isinstance(program, DraftLayerProgram)
    assert program._kernels is not None
    return engine


@pytest.mark.parametrize("kind", list(SETTINGS))
@pytest.mark.parametrize("slots", [1, 3])
def test_every_number_is_the_plain_steps(kind: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From random places: pages are short, texts are about to end, drafts are too unsure, nobody is there."""
    engine = engine_of("draft", kind, slots, monkeypatch)
    program, s, pages = engine.runner.program, engine.runner.state, engine.runner.pages
    assert isinstance(program, DraftLayerProgram)
    kernels, random, places = program._kernels, torch.Generator().manual_seed(0), program.drafts + 1
    vocab, P = engine.runner.decoder.architecture.vocab, SIZES["max_length"] // SIZES["page_size"]
    k_pages, v_pages = pages.at(0, 0, engine.runner.layout.planes[0])

    def below(many: int) -> int:
        return int(torch.randint(many, (), generator=random))

    held = [program.states_SJM, program.tokens_SJ, program.count_S, s.numbers_SC, s.clock, k_pages, v_pages]
    seen: set[tuple[int, ...]] = set()
    for _ in range(16):
        for pages_ in (k_pages, v_pages):
            pages_.copy_(torch.randn(pages_.shape, generator=random))
        order = torch.randperm(engine.runner.sizes.pool_pages[0], generator=random)[: P * slots].view(slots, P)
        for slot in range(slots):
            position, made = 6 + below(20), below(3)
            s.tables_STP[slot, 0, :P] = order[slot]
            s.capacity_ST[slot] = position + (below(4) if below(2) else 20)
            limit = made + 1 + (below(4) if below(2) else 20)
            s.numbers_SC[slot] = torch.tensor(
                [below(vocab), position, ENTER if below(6) else IDLE, 5, made, limit, 9, 1, below(2), int(below(4) == 0)]
            )
            program.count_S[slot] = 1 + below(places)
            program.threshold_S[slot] = (0.0, 0.0, 0.02, 0.05, 1.0)[below(5)]
        program.tokens_SJ.copy_(torch.randint(vocab, program.tokens_SJ.shape, generator=random))
        program.states_SJM.copy_(torch.randn(program.states_SJM.shape, generator=random))
        before, found = [tensor.clone() for tensor in held], []
        for way in (None, kernels):
            program._kernels = way
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
            program.output.blank(s.spare)
            with torch.no_grad():
                program.decode_step(SamplingVariant())
            found.append(
                ([tensor.clone() for tensor in held], program.output.ints_NC.clone(), program.output.floats_NC.clone())
            )
        (plain, ints, floats), (fast, fast_ints, fast_floats) = found
        # Where nobody asks for another draft, a CPU leaves out the rest of the rows.
        valid, fast_valid = (each[:, FLAGS] & VALID != 0 for each in (ints, fast_ints))
        assert fast_ints[fast_valid].tolist() == ints[valid].tolist()
        torch.testing.assert_close(fast_floats[fast_valid], floats[valid], rtol=1e-4, atol=1e-5)
        assert fast[2][:-1].tolist() == plain[2][:-1].tolist()
        assert fast[3][:-1].tolist() == plain[3][:-1].tolist()
        for slot in range(slots):
            live, count = bool((ints[valid, SLOT] == slot).any()), int(plain[2][slot])
            position = int(plain[3][slot, 1])
            assert fast[1][slot, :count].tolist() == plain[1][slot, :count].tolist()
            torch.testing.assert_close(fast[0][slot, :count], plain[0][slot, :count], rtol=1e-4, atol=1e-4)
            entries = torch.arange(position)
            at = order[slot][entries // 4] * 4 + entries % 4
            for slow, quick in zip(plain[5:], fast[5:], strict=True):
                planes = engine.runner.layout.planes[0]
                both = [each.view(planes, -1, *each.shape[2:])[:, at.to(each.device)] for each in (quick, slow)]
                torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
            seen.add((live, count if live else 0))
        if valid.any():
            assert int(fast[4]) == int(plain[4]) == int(before[4]) + 1
        seen.add((2, int((ints[:, FLAGS] & DRAFTED != 0).any())))
    assert {(2, 0), (2, 1), (False, 0), (True, 1)} <= seen


def test_no_draft_is_likelier_than_what_stands_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by rounding, where a layer is certain: a draft would be verified without the one above it."""
    engine = engine_of("draft", "best", 3, monkeypatch)
    program, s, layers = engine.runner.program, engine.runner.state, engine.runner.layers
    assert isinstance(program, DraftLayerProgram)
    kernels, random, P = program._kernels, torch.Generator().manual_seed(0), s.tables_STP.shape[2]
    assert isinstance(kernels, BestRows)

    def certain(x_NM: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores_NV = 3 * torch.randn(len(x_NM), layers.architecture.vocab, generator=random)
        scores_NV[:, 5] += 50.0 + 10 * torch.rand(len(x_NM), generator=random)
        return scores_NV.to(x_NM.device), None

    monkeypatch.setattr(layers, "draft_scores", certain)
    compared = 0
    for _ in range(2):
        for slot in range(3):
            s.tables_STP[slot, 0] = slot * P + torch.arange(P)
            s.capacity_ST[slot] = 40
            s.numbers_SC[slot] = torch.tensor([7, 6, ENTER, 5, 0, 30, 9, 1, 0, 0])
            program.count_S[slot] = 1
            program.threshold_S[slot] = 0.0
        with torch.no_grad():
            program.decode_step(SamplingVariant())
        likely_SJ, parents_SJ = kernels._likely_SJ, kernels._parents_SJ.long()
        above_SJ = likely_SJ.gather(1, parents_SJ)
        assert (likely_SJ <= above_SJ).all()
        compared += int((likely_SJ == above_SJ)[:, 1:].sum())
    assert compared > 6


@pytest.mark.parametrize("kind", list(SETTINGS))
@pytest.mark.parametrize("sizes", [{}, {"burst": 3, "lag": 1}])
def test_texts_are_the_references(kind: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that draws has the same drafts, between others that do not."""
    engine = engine_of("draft", kind, 2, monkeypatch, **sizes)
    for number, prompt in enumerate(PROMPTS):
        (wanted,) = generate(build("draft"), [prompt], max_new_tokens=NEW, exiting=SETTINGS[kind])
        (full,) = generate(build("draft"), [prompt], max_new_tokens=NEW)
        (found,) = engine.generate([prompt], max_new_tokens=NEW)
        assert found.tokens == wanted.tokens == full.tokens
        assert found.depths == wanted.exit_layers
        if number == 0:
            how = {"max_new_tokens": NEW, "temperature": 0.9, "seed": 2}
            (drawn,) = engine.generate([prompt], **how)
            plain = Engine(build("draft"), compile=False, fuse=False, **SIZES | {"always_draft": False})
            assert drawn.tokens == plain.generate([prompt], **how)[0].tokens
