"""Trees of drafts in the engine: every token is the full model's, drafts are the slow twin's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import NEW, PROMPTS, build
from engine.test_engine_draft_layer import ROOMY, SMALL, full_models, slow_twins
from engine.test_engine_exits import MANY, asked
from fathomlm.decode.draft_tree import TreeShape
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.draft_tree import DraftTreeProgram, seen_bits
from fathomlm.engine.session import reference_only
from fathomlm.errors import OptionError, UnsupportedModel

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("draft", "draft-lora", "draft-shared-kv", "draft-gemma3")


def speculative(*tree: int, threshold: float | None = None) -> Exiting:
    return Exiting(mode="speculative", draft_tree=tree, threshold=threshold)


def test_a_node_sees_what_is_above_it() -> None:
    tree = TreeShape((2, 2, 1))
    for node, bits in enumerate(seen_bits(tree)):
        above = {node}
        while min(above):
            above.add(tree.parents[min(above)])
        assert -(2**63) <= bits < 2**63
        assert [bool(bits >> back & 1) for back in range(64)] == [back > node or node - back in above for back in range(64)]


@pytest.mark.parametrize("name", NAMES)
def test_every_token_is_the_full_models(name: str) -> None:
    """Drawn ones too."""
    full = Engine(build(name), **SMALL).run(asked())
    ways: Any = (((3, 2), None, {}), ((2, 1, 2), 0.03, {"burst": 2, "lag": 1}), ((4,), 0.0, {"batch_size": 1}))
    for tree, threshold, sizes in ways if name == "draft" else ways[:1]:
        engine = Engine(build(name), exiting=speculative(*tree, threshold=threshold), always_draft=True, **(SMALL | sizes))
        assert isinstance(engine.runner.program, DraftTreeProgram)
        full_models(engine, full)


@pytest.mark.parametrize(("name", "tree", "threshold"), [
    ("draft", (3, 2, 1), 0.0), ("draft", (2, 2, 2), 0.03), ("draft", (1, 1, 1), 0.0), ("draft-lora", (4, 2), 0.0),
    ("draft-shared-kv", (3, 2), 0.0), ("draft-gemma3", (3, 2), 0.0), ("draft-gemma3", (2, 2), 0.03),
])  # fmt: skip
def test_drafts_are_the_slow_twins(name: str, tree: tuple[int, ...], threshold: float) -> None:
    """Which tokens were drafted and kept, and how sure the layer was; prompts come in chunks."""
    fuse = len(tree) == 3  # both ways to run layers, where both can be
    setting = speculative(*tree, threshold=threshold)
    wanted = generate(build(name), MANY, max_new_tokens=NEW, exiting=setting)
    slow_twins(Engine(build(name), exiting=setting, always_draft=True, fuse=fuse, **ROOMY), wanted)


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

    for one, other in zip(entries(speculative(4, 2)), entries(None), strict=True):
        torch.testing.assert_close(one, other)


def test_entries_of_one_byte_move_too() -> None:
    narrow = ROOMY | {"kv_dtype": "fp8"}
    engine = Engine(build("draft"), exiting=speculative(3, 2), always_draft=True, **narrow)
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [
        f.tokens for f in Engine(build("draft"), **narrow).generate(MANY, max_new_tokens=NEW)
    ]
    assert engine.totals.accepted > 0


def test_drafting_may_stop_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = speculative(3, 2)
    engine = Engine(build("draft"), exiting=setting, always_draft=True, **ROOMY)
    launch, turns = engine.runner.launch, iter([True, False, False, True, False] * 20)
    monkeypatch.setattr(engine.runner, "launch", lambda drafts, sequences: launch(next(turns), sequences))
    results = engine.generate(MANY, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [f.tokens for f in generate(build("draft"), MANY, max_new_tokens=NEW)]
    assert engine.totals.accepted > 0


def test_an_exit_vocabulary() -> None:
    made = copy.deepcopy(build("draft"))
    made.limit_exits(torch.arange(0, 96, 2))
    engine = Engine(made, exiting=speculative(3, 2), always_draft=True, **ROOMY)
    results = engine.generate(PROMPTS, max_new_tokens=NEW)
    wanted = generate(made, PROMPTS, max_new_tokens=NEW, exiting=speculative(3, 2))
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    made.limit_exits(torch.arange(0, 4, 2))
    with pytest.raises(OptionError, match="at most the 2 tokens that drafts are chosen among"):
        Engine(made, exiting=speculative(3, 2), **ROOMY)


def test_windows_inside_a_tree_are_for_the_reference() -> None:
    with pytest.raises(UnsupportedModel, match="more positions than a tree of drafts has levels, got 3 for 3"):
        Engine(build("draft-gemma3"), exiting=speculative(2, 1, 1), **ROOMY)
    assert "attention windows" in str(reference_only(build("draft-gemma3"), None, speculative(2, 1, 1)))
    assert reference_only(build("draft-gemma3"), None, speculative(2, 1)) is None
