"""Trees of the likeliest drafts in the engine: every token is the full model's, drafts are the slow twin's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, build
from engine.test_engine_draft_layer import ROOMY, SMALL, full_models, slow_twins
from engine.test_engine_exits import MANY, asked
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.draft_best import DraftBestProgram
from fathomlm.errors import OptionError, UnsupportedModel

pytestmark = pytest.mark.usefixtures("one_thread")


def speculative(*best: int, threshold: float | None = None) -> Exiting:
    return Exiting(mode="speculative", draft_best=best, threshold=threshold)


@pytest.mark.parametrize("name", ["draft", "draft-lora", "draft-shared-kv", "draft-gemma3"])
def test_every_token_is_the_full_models(name: str) -> None:
    """Drawn ones too."""
    full = Engine(build(name), **SMALL).run(asked())
    ways: Any = (((6, 2), None, {}), ((5, 3), 0.03, {"burst": 2, "lag": 1}), ((2, 1), 0.0, {"batch_size": 1}))
    for best, threshold, sizes in ways if name == "draft" else ways[:1]:
        engine = Engine(build(name), exiting=speculative(*best, threshold=threshold), always_draft=True, **(SMALL | sizes))
        assert isinstance(engine.runner.program, DraftBestProgram)
        full_models(engine, full)


@pytest.mark.parametrize(("name", "best", "threshold"), [
    ("draft", (9, 3), 0.0), ("draft", (5, 3), 0.03), ("draft", (16, 2), 0.0), ("draft-lora", (7, 2), 0.0),
    ("draft-gemma3", (6, 2), 0.0),
])  # fmt: skip
def test_drafts_are_the_slow_twins(name: str, best: tuple[int, ...], threshold: float) -> None:
    """Which tokens were drafted and kept, and how sure the layer was; prompts come in chunks."""
    setting = speculative(*best, threshold=threshold)
    wanted = generate(build(name), MANY, max_new_tokens=NEW, exiting=setting)
    slow_twins(Engine(build(name), exiting=setting, always_draft=True, fuse=best[1] == 3, **ROOMY), wanted)


def test_entries_are_those_of_a_chain() -> None:
    """Behind what is settled, whichever path it took: what a path leaves moves to its place."""

    def entries(exiting: Exiting | None) -> list[torch.Tensor]:
        engine = Engine(build("draft"), exiting=exiting, always_draft=True, **ROOMY | {"batch_size": 1})
        found = []
        for prompt in PROMPTS:
            engine.generate([prompt], max_new_tokens=NEW, ignore_eos=True)
            table = engine.runner.state.tables_STP[0, 0].tolist()
            at = [(table[i // 4], i % 4) for i in range(len(prompt) + NEW - 1)]
            found += [torch.stack([pages[:6, page, i] for page, i in at]) for pages in engine.runner.pages._pools[0]]
        return found

    for one, other in zip(entries(speculative(8, 3)), entries(None), strict=True):
        torch.testing.assert_close(one, other)


def test_drafting_may_stop_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build("draft"), exiting=speculative(6, 2), always_draft=True, **ROOMY)
    launch, turns = engine.runner.launch, iter([True, False, False, True, False] * 20)
    monkeypatch.setattr(engine.runner, "launch", lambda drafts, sequences: launch(next(turns), sequences))
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [f.tokens for f in generate(build("draft"), MANY, max_new_tokens=NEW)]
    assert engine.totals.accepted > 0


def test_an_exit_vocabulary() -> None:
    made = copy.deepcopy(build("draft"))
    made.limit_exits(torch.arange(0, 96, 2))
    engine = Engine(made, exiting=speculative(7, 2), always_draft=True, **ROOMY)
    results = engine.generate(PROMPTS, max_new_tokens=NEW)
    wanted = generate(made, PROMPTS, max_new_tokens=NEW, exiting=speculative(7, 2))
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    made.limit_exits(torch.arange(0, 4, 2))
    with pytest.raises(OptionError, match="requires 8 tokens that drafts are chosen among, got 2"):
        Engine(made, exiting=speculative(3, 2), **ROOMY)


def test_windows_inside_a_tree_are_for_the_reference() -> None:
    with pytest.raises(UnsupportedModel, match="more positions than a tree of drafts has levels, got 3 for 3"):
        Engine(build("draft-gemma3"), exiting=speculative(4, 3), **ROOMY)
