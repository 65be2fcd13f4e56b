"""Trees of drafts in the engine, of one shape or of the likeliest drafts: every token is the full model's, drafts are the
slow twin's. Steps without drafts between others are in test_engine_draft_layer.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decode.exit_models import MANY, NEW, PROMPTS, build
from engine.test_engine_draft_layer import ROOMY, SMALL, full_models, slow_twins
from engine.test_engine_exits import reference
from fathomlm.decode.draft_tree import TreeShape
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.draft_best import DraftBestProgram
from fathomlm.engine.programs.draft_tree import DraftTreeProgram, seen_bits
from fathomlm.engine.session import reference_only
from fathomlm.errors import OptionError, UnsupportedModel

pytestmark = pytest.mark.usefixtures("one_thread")
TREE, BEST = "draft_tree", "draft_best"
PROGRAMS = {TREE: DraftTreeProgram, BEST: DraftBestProgram}


def speculative(kind: str, shape: tuple[int, ...], threshold: float | None = None) -> Exiting:
    return Exiting(mode="speculative", threshold=threshold, **{kind: shape})  # type: ignore[arg-type]


def test_a_node_sees_what_is_above_it() -> None:
    tree = TreeShape((2, 2, 1))
    for node, bits in enumerate(seen_bits(tree)):
        above = {node}
        while min(above):
            above.add(tree.parents[min(above)])
        assert -(2**63) <= bits < 2**63
        assert [bool(bits >> back & 1) for back in range(64)] == [back > node or node - back in above for back in range(64)]


AHEAD, ONE = {"burst": 2, "lag": 1}, {"batch_size": 1}
WAYS: tuple[tuple[str, str, tuple[int, ...], float | None, dict[str, int]], ...] = (
    ("draft", TREE, (3, 2), None, {}), ("draft", TREE, (2, 1, 2), 0.03, AHEAD), ("draft", TREE, (4,), 0.0, ONE),
    ("draft", BEST, (6, 2), None, {}), ("draft", BEST, (5, 3), 0.03, AHEAD), ("draft", BEST, (2, 1), 0.0, ONE),
    *((name, TREE, (3, 2), None, {}) for name in ("draft-lora", "draft-shared-kv", "draft-gemma3")),
    *((name, BEST, (6, 2), None, {}) for name in ("draft-lora", "draft-shared-kv", "draft-gemma3")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "shape", "threshold", "sizes"), WAYS)
def test_every_token_is_the_full_models(name: str, kind: str, shape: Any, threshold: float, sizes: dict[str, int]) -> None:
    """Drawn ones too."""
    engine = Engine(build(name), exiting=speculative(kind, shape, threshold), always_draft=True, **(SMALL | sizes))
    assert isinstance(engine.runner.program, PROGRAMS[kind])
    full_models(engine, name)


@pytest.mark.parametrize(("name", "kind", "shape", "threshold"), [
    ("draft", TREE, (3, 2, 1), 0.0), ("draft", TREE, (2, 2, 2), 0.03), ("draft", TREE, (1, 1, 1), 0.0),
    ("draft-lora", TREE, (4, 2), 0.0), ("draft-shared-kv", TREE, (3, 2), 0.0), ("draft-gemma3", TREE, (2, 2), 0.03),
    ("draft", BEST, (9, 3), 0.0), ("draft", BEST, (5, 3), 0.03), ("draft", BEST, (16, 2), 0.0),
    ("draft-lora", BEST, (7, 2), 0.0), ("draft-gemma3", BEST, (6, 2), 0.0),
])  # fmt: skip
def test_drafts_are_the_slow_twins(name: str, kind: str, shape: tuple[int, ...], threshold: float) -> None:
    """Which tokens were drafted and kept, and how sure the layer was; prompts come in chunks."""
    levels = len(shape) if kind == TREE else shape[1]
    setting = speculative(kind, shape, threshold)
    # Both ways to run layers, where both can be.
    engine = Engine(build(name), exiting=setting, always_draft=True, fuse=levels == 3, **ROOMY)
    slow_twins(engine, reference(name, setting))


def entries(exiting: Exiting | None) -> list[torch.Tensor]:
    """What every layer keeps of each prompt and its tokens but the last."""
    engine = Engine(build("draft"), exiting=exiting, always_draft=True, **ROOMY | {"batch_size": 1})
    found = []
    for prompt in PROMPTS:
        engine.generate([prompt], max_new_tokens=NEW, ignore_eos=True)
        table = engine.runner.state.tables_STP[0, 0].tolist()
        at = [(table[i // 4], i % 4) for i in range(len(prompt) + NEW - 1)]
        found += [torch.stack([pages[:6, page, i] for page, i in at]) for pages in engine.runner.pages._pools[0]]
    return found


def test_entries_are_those_without_drafts() -> None:
    """Behind what is settled, whichever path it took: what a path leaves moves to its place."""
    plain = entries(None)
    for setting in (speculative(TREE, (4, 2)), speculative(BEST, (8, 3))):
        for one, other in zip(entries(setting), plain, strict=True):
            torch.testing.assert_close(one, other)


def test_entries_of_one_byte_move_too() -> None:
    narrow = ROOMY | {"kv_dtype": "fp8"}
    plain = Engine(build("draft"), **narrow).generate(MANY, max_new_tokens=NEW)
    for setting in (speculative(TREE, (3, 2)), speculative(BEST, (6, 2))):
        engine = Engine(build("draft"), exiting=setting, always_draft=True, **narrow)
        assert [r.tokens for r in engine.generate(MANY, max_new_tokens=NEW)] == [f.tokens for f in plain]
        assert engine.totals.accepted > 0


@pytest.mark.parametrize(
    ("kind", "shape", "few"),
    [
        (TREE, (3, 2), "at most the 2 tokens that drafts are chosen among"),
        (BEST, (7, 2), "requires 8 tokens that drafts are chosen among, got 2"),
    ],
)
def test_an_exit_vocabulary(kind: str, shape: tuple[int, ...], few: str) -> None:
    made, setting = copy.deepcopy(build("draft")), speculative(kind, shape)
    made.limit_exits(torch.arange(0, 96, 2))
    results = Engine(made, exiting=setting, always_draft=True, **ROOMY).generate(PROMPTS, max_new_tokens=NEW)
    wanted = generate(made, PROMPTS, max_new_tokens=NEW, exiting=setting)
    assert [(r.tokens, r.depths) for r in results] == [(w.tokens, w.exit_layers) for w in wanted]
    made.limit_exits(torch.arange(0, 4, 2))
    with pytest.raises(OptionError, match=few):
        Engine(made, exiting=setting, **ROOMY)


def test_windows_inside_a_tree_are_for_the_reference() -> None:
    for setting in (speculative(TREE, (2, 1, 1)), speculative(BEST, (4, 3))):
        with pytest.raises(UnsupportedModel, match="more positions than a tree of drafts has levels, got 3 for 3"):
            Engine(build("draft-gemma3"), exiting=setting, **ROOMY)
        assert "attention windows" in str(reference_only(build("draft-gemma3"), None, setting))
    for setting in (speculative(TREE, (2, 1)), speculative(BEST, (4, 2))):
        assert reference_only(build("draft-gemma3"), None, setting) is None
