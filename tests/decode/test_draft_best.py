"""Trees of the likeliest drafts: lossless, distributed as the full model's, and which drafts those are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.exit_models import DRAFTS, NEW, PROMPTS, build, exiting, tokens
from decode.test_draft_layer import goes_on
from decode.test_draft_layer import tiny as tiny  # a fixture
from decode.test_exits_drafts import FAR, FILTERS, distance, drawn, exact
from fathomlm.decode.draft_tree import BestShape, DraftTreeDecoding, _DraftNode
from fathomlm.decode.exiting import BEAM, DRAFT_BESTS, DRAFT_STACK, DRAFT_STACKS, Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_nodes_are_numbered_level_by_level() -> None:
    best = BestShape(5, 2)
    assert (best.rows, best.nodes) == (6, 1 + 2 * BEAM)
    assert [list(best.level(depth)) for depth in range(3)] == [[0], list(range(1, 9)), list(range(9, 17))]


@pytest.mark.parametrize("name", DRAFTS)
def test_it_is_full_greedy_decoding(name: str) -> None:
    settings = ((1.5, (5, 3), 0.0), (1.0, (12, 2), 0.0), (1.0, (3, 2), 0.02), (1.0, (8, 1), 1.0))
    for penalty, best, threshold in settings if name == "draft" else settings[:1]:
        options = {"max_new_tokens": NEW, "repetition_penalty": penalty}
        full = tokens(generate(build(name), PROMPTS, **options))
        setting = exiting(name, "speculative", threshold=threshold, draft_best=best)
        got = generate(build(name), PROMPTS, exiting=setting, **options)
        assert tokens(got) == full
        drafted, passes = (sum(getattr(r.exits, what) for r in got) for what in ("drafted", "deep_passes"))
        accepted = sum(r.exits.accepted for r in got if r.exits)
        assert (drafted > 0) == (threshold < 1)
        assert passes + accepted == sum(len(row) for row in full), "a pass settles its drafts and one token more"


@torch.inference_mode()
def test_the_likeliest_paths_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is what the layer says there, and no path that was offered and left out is likelier."""
    model, seen = build("draft"), []
    walk = DraftTreeDecoding._walk
    monkeypatch.setattr(DraftTreeDecoding, "_walk", lambda self, seq, root: (seen.append(root), walk(self, seq, root)))
    generate(model, PROMPTS, max_new_tokens=NEW, exiting=Exiting(mode="speculative", draft_best=(9, 3)))
    assert len(seen) > 10
    deeper = 0
    for root in seen:
        level, verified, offered = [root], list[_DraftNode](), list[float]()
        while level:
            behind: list[float] = []
            for node in level:
                if node.logits_V is not None:
                    logs_V = node.logits_V.float().log_softmax(-1)
                    behind += [node.likely + float(each) for each in logs_V.topk(BEAM).values]
                    for child in node.children:
                        assert child.likely == pytest.approx(node.likely + float(logs_V[child.path[-1]]), abs=1e-5)
            level = [child for node in level for child in node.children]
            verified += level
            offered += sorted(behind, reverse=True)[:BEAM]
        if not verified:  # one token was left
            continue
        assert len(verified) == 9 or max(len(node.path) for node in verified) < 3
        found = sorted((node.likely for node in verified), reverse=True)
        # What is offered behind drafts that were left out is less likely than these are.
        assert found == pytest.approx(sorted(offered, reverse=True)[: len(found)], abs=1e-5)
        deeper += max(len(node.path) for node in verified) > 1
    assert deeper


@pytest.mark.slow
def test_samples_are_distributed_as_the_whole_models(tiny: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exact(tiny, Sampling(**FILTERS))
    results = drawn(tiny, Exiting(mode="speculative", draft_best=(4, 2)), monkeypatch)
    assert distance(results, whole) < FAR
    assert 0 < sum(r.exits.accepted for r in results if r.exits) < sum(r.exits.drafted for r in results if r.exits)


def test_a_session_goes_on_from_what_it_holds() -> None:
    goes_on(Exiting(mode="speculative", draft_best=(6, 2)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_best": (0, 2)}, "draft_best must be >= 1"),
        ({"draft_best": (3,)}, r"draft_best must be two numbers, at most 7 levels and 8 drafts for each, got \(3,\)"),
        ({"draft_best": (9, 1)}, r"draft_best must be two numbers.*got \(9, 1\)"),
        ({"draft_best": (8, 8)}, r"draft_best must be two numbers.*got \(8, 8\)"),
        ({"draft_best": (8, 2), "draft_tree": (2,)}, "draft_best cannot be combined with draft_tree"),
        ({"draft_best": (8, 2), "max_stack": 4}, "draft_best cannot be combined with max_stack"),
        ({"draft_best": (8, 2), "exit_layers": (2,)}, "draft_best cannot be combined with exit_layers"),
    ],
)
def test_trees_that_cannot_be(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        Exiting(mode="speculative", **fields)


def test_one_sequence_on_a_gpu_has_it_by_default() -> None:
    plan, unset = build("draft").plan, Exiting(mode="speculative")
    alone = unset.for_plan(plan, "cuda", 1)
    assert (alone.draft_best, alone.max_stack, alone.threshold) == (DRAFT_BESTS["cuda"], None, 0.0)
    assert alone.for_plan(plan, "cuda", 1) == alone
    for device, sequences in (("cuda", 2), ("cuda", None), ("cpu", 1)):
        others = unset.for_plan(plan, device, sequences)
        assert (others.draft_best, others.max_stack) == (None, DRAFT_STACKS.get(device, DRAFT_STACK))
    for asked in ({"max_stack": 3}, {"draft_tree": (2, 1)}, {"draft_best": (7, 3)}):
        own = Exiting(mode="speculative", **asked).for_plan(plan, "cuda", 1)
        assert {name: getattr(own, name) for name in asked} == asked
        assert own.draft_best == asked.get("draft_best")
    exits = build("vanilla").plan
    assert unset.for_plan(exits, "cuda", 1).draft_best is None


def test_it_requires_a_draft_layer() -> None:
    with pytest.raises(OptionError, match="draft_best requires a model with a draft layer"):
        generate(build("vanilla"), PROMPTS, max_new_tokens=2, exiting=Exiting(mode="speculative", draft_best=(2, 1)))
