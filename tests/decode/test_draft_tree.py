"""Trees of drafts, of one shape or of the likeliest drafts: lossless, distributed as the full model's, and what the draft
layer says at every node."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.exit_models import DRAFTS, NEW, PROMPTS, build, exiting, tokens, told
from decode.test_draft_layer import goes_on
from decode.test_draft_layer import tiny as tiny  # a fixture
from decode.test_exits_drafts import FAR, FILTERS, distance, drawn, exact, full_run
from fathomlm.decode import draft_tree
from fathomlm.decode.draft_tree import BestShape, DraftTreeDecoding, TreeShape, _DraftNode, propose
from fathomlm.decode.exiting import BEAM, DRAFT_BESTS, DRAFT_STACK, DRAFT_STACKS, Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import OptionError
from fathomlm.model.hub import FathomForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_nodes_are_numbered_level_by_level() -> None:
    tree = TreeShape((2, 3, 1))
    assert [list(level) for level in tree.levels] == [[0], [1, 2], list(range(3, 9)), list(range(9, 15))]
    assert tree.parents == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)
    assert (tree.nodes, tree.depth) == (15, 3)
    best = BestShape(5, 2)
    assert (best.rows, best.nodes) == (6, 1 + 2 * BEAM)
    assert [list(best.level(depth)) for depth in range(3)] == [[0], list(range(1, 9)), list(range(9, 17))]


def ways(kind: str, shapes: list[tuple[int, ...]]) -> list[tuple[str, str, tuple[int, ...], float, float]]:
    """One model with shapes, penalties and thresholds, the others with the first."""
    settings = list(zip((1.5, 1.0, 1.0, 1.0), shapes, (0.0, 0.0, 0.02, 1.0), strict=True))
    return [
        (name, kind, shape, penalty, threshold)
        for name in DRAFTS
        for penalty, shape, threshold in (settings if name == "draft" else settings[:1])
    ]


@pytest.mark.parametrize(
    ("name", "kind", "shape", "penalty", "threshold"),
    [*ways("draft_tree", [(3, 2), (2, 1, 1), (3,), (2, 2)]), *ways("draft_best", [(5, 3), (12, 2), (3, 2), (8, 1)])],
)
def test_it_is_full_greedy_decoding(name: str, kind: str, shape: tuple[int, ...], penalty: float, threshold: float) -> None:
    options = {"max_new_tokens": NEW, "repetition_penalty": penalty}
    full = full_run(name, penalty)
    setting = exiting(name, "speculative", threshold=threshold, **{kind: shape})
    got = generate(build(name), PROMPTS, exiting=setting, **options)
    assert tokens(got) == full
    drafted, passes = (sum(getattr(r.exits, what) for r in got) for what in ("drafted", "deep_passes"))
    accepted = sum(r.exits.accepted for r in got if r.exits)
    assert (drafted > 0) == (threshold < 1)
    assert passes + accepted == sum(len(row) for row in full), "a pass settles its drafts and one token more"
    if (name, kind, threshold) == ("draft", "draft_tree", 0.0):
        chain = exiting(name, "speculative", threshold=0.0, max_stack=1 + len(shape))
        single = generate(build(name), PROMPTS, exiting=chain, **options)
        assert accepted >= sum(r.exits.accepted for r in single if r.exits)


def test_one_draft_behind_another_is_the_chain() -> None:
    for threshold in (0.0, 0.02):
        chain, tree = (
            generate(build("draft"), PROMPTS, max_new_tokens=NEW, exiting=exiting("draft", "speculative", **how))
            for how in ({"threshold": threshold, "max_stack": 4}, {"threshold": threshold, "draft_tree": (1, 1, 1)})
        )
        assert told(tree) == told(chain)
        assert [r.exits for r in tree] == [r.exits for r in chain]


@torch.inference_mode()
def test_every_draft_is_what_the_layer_says_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was drafted and dropped before, and whatever other paths there are."""
    model, seen = build("draft"), []
    walk = DraftTreeDecoding._walk
    monkeypatch.setattr(
        DraftTreeDecoding, "_walk", lambda self, seq, root: (seen.append((list(seq.token_ids), root)), walk(self, seq, root))
    )
    generate(model, PROMPTS, max_new_tokens=NEW, exiting=Exiting(mode="speculative", draft_tree=(3, 2, 1)))
    decoder, plan, looked_at = model.decoder, model.plan, 0
    for text, root in seen:
        known = decoder.states(torch.tensor([text]))[plan.unrolled_layers - 1]
        level = [root]
        while level:
            for node in level:
                if node.logits_V is None:
                    continue
                rolled = [one.state_M[None, None] for one in node.above]
                last = torch.cat((known[:, :-1], *rolled, known[:, -1:]), dim=1)  # the last is read by nobody
                state = next(decoder.draft_states(torch.tensor([[*text, *node.path]]), last, 1))[0, -1]
                torch.testing.assert_close(node.state_M, state, rtol=1e-4, atol=1e-5)
                best = decoder.exit_logits(state, plan.draft_step.index, layered=True).topk(len(node.children)).indices
                assert [child.path[-1] for child in node.children] == best.tolist()
                full = decoder.states(torch.tensor([[*text, *node.path]]))[plan.unrolled_layers - 1][0, -1]
                right = decoder.exit_logits(full, plan.unrolled_layers - 1)
                torch.testing.assert_close(node.full_V, right, rtol=1e-4, atol=1e-4)
                looked_at += 1
            level = [child for node in level for child in node.children]
    assert looked_at > 50


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


class Branches:
    """All ways that chance may take, one after the other, and how likely each is."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.chance = 1.0

    def choose(self, chances: list[float]) -> int:
        possible = [number for number, chance in enumerate(chances) if chance > 0]
        at = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((at, len(possible)))
        self.chance *= chances[possible[at]]
        return possible[at]

    def next(self) -> bool:
        """Whether there is another way."""
        while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
            self.taken.pop()
        if not self.taken:
            return False
        *before, (at, _) = self.taken
        self.script, self.taken, self.chance = [*(taken for taken, _ in before), at + 1], [], 1.0
        return True


class Die:
    """A random number that is compared as `uniform() * q < p`: true with probability min(1, p / q)."""

    def __init__(self, branches: Branches, q: float = 1.0) -> None:
        self.branches, self.q = branches, q

    def __mul__(self, q: float) -> Die:
        return Die(self.branches, q)

    def __lt__(self, p: float) -> bool:
        accepts = min(1.0, p / self.q)
        return self.branches.choose([1.0 - accepts, accepts]) == 1


class Chances:
    """A sequence whose model is a table: scores are the tokens so far, and they stand for a distribution."""

    def __init__(self, branches: Branches, full: dict[Any, Tensor], draft: dict[Any, Tensor]) -> None:
        self.branches, self.tables, self.token_ids = branches, {0: draft, 1: full}, []
        self.sampling, self.index, self.stack = SimpleNamespace(greedy=False), 0, []
        self.position = 0

    def probabilities(self, logits_V: Tensor, position: int | None = None) -> Tensor:
        return self.tables[int(logits_V[0])][tuple(self.token_ids)]

    def likeliest(self, logits_V: Tensor) -> int:
        return 0

    def draw(self, weights_V: Tensor) -> int:
        return self.branches.choose((weights_V / weights_V.sum()).tolist())

    def uniform(self) -> Die:
        return Die(self.branches)


def joint(widths: tuple[int, int], full: dict[Any, Tensor], draft: dict[Any, Tensor]) -> dict[tuple[int, int], float]:
    """The exact probability of every two tokens, over everything that chance decides."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    branches = Branches()
    while True:
        seq: Any = Chances(branches, full, draft)
        stub: Any = SimpleNamespace(_states={0: torch.zeros(1, 1)}, _policy=SimpleNamespace(last=3), _instead={})
        root = _DraftNode()
        for width, level in ((widths[0], [root]), (widths[1], None)):
            for node in level or root.children:
                seq.token_ids = list(node.path)
                node.logits_V, node.full_V = torch.zeros(3), torch.ones(3)
                propose(seq, node, width)
        for node in (leaf for child in root.children for leaf in child.children):
            node.full_V = torch.ones(3)
        seq.token_ids = []
        DraftTreeDecoding._walk(stub, seq, root)
        text = [*seq.token_ids, *stub._instead.values()]
        while len(text) < 2:  # the next pass
            seq.token_ids = text
            text = [*text, seq.draw(full[tuple(text)])]
        found[text[0], text[1]] += branches.chance
        if not branches.next():
            return found


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_two_tokens_have_the_full_models_exact_joint_distribution(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    texts = [(), *((a,) for a in range(3)), *((a, b) for a in range(3) for b in range(3))]

    def table() -> dict[Any, Tensor]:
        made = {text: torch.rand(3, dtype=torch.float64, generator=generator) for text in texts}
        return {text: p / p.sum() for text, p in made.items()}

    full, draft = table(), table()
    draft[0,] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)  # fewer words than drafts
    right = {(a, b): float(full[()][a] * full[a,][b]) for a in range(3) for b in range(3)}
    assert joint(widths, full, draft) == pytest.approx(right, abs=1e-12)
    monkeypatch.setattr(draft_tree, "residual", lambda p_V, q_V: p_V)
    assert joint(widths, full, draft) != pytest.approx(right, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"draft_tree": (2, 1)}, {"draft_best": (4, 2)}])
def test_samples_are_distributed_as_the_whole_models(
    shape: dict[str, Any], tiny: FathomForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exact(tiny, Sampling(**FILTERS))
    results = drawn(tiny, Exiting(mode="speculative", **shape), monkeypatch)
    assert distance(results, whole) < FAR
    assert 0 < sum(r.exits.accepted for r in results if r.exits) < sum(r.exits.drafted for r in results if r.exits)


@pytest.mark.parametrize("shape", [{"draft_tree": (3, 2)}, {"draft_best": (6, 2)}])
def test_a_session_goes_on_from_what_it_holds(shape: dict[str, Any]) -> None:
    goes_on(Exiting(mode="speculative", **shape))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"draft_tree": (2, 0)}, "draft_tree must be >= 1"),
        ({"draft_tree": ()}, r"draft_tree must make 1 to 63 drafts, got 0 of \(\)"),
        ({"draft_tree": (8, 8)}, r"draft_tree must make 1 to 63 drafts, got 72 of \(8, 8\)"),
        ({"draft_best": (0, 2)}, "draft_best must be >= 1"),
        ({"draft_best": (3,)}, r"draft_best must be two numbers, at most 7 levels and 8 drafts for each, got \(3,\)"),
        ({"draft_best": (9, 1)}, r"draft_best must be two numbers.*got \(9, 1\)"),
        ({"draft_best": (8, 8)}, r"draft_best must be two numbers.*got \(8, 8\)"),
        ({"draft_best": (8, 2), "draft_tree": (2,)}, "draft_best cannot be combined with draft_tree"),
        *(
            ({kind: (8, 2)} | other, f"{kind} cannot be combined with {next(iter(other))}")
            for kind in ("draft_tree", "draft_best")
            for other in ({"max_stack": 4}, {"exit_layers": (2,)})
        ),
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


@pytest.mark.parametrize("shape", [{"draft_tree": (2,)}, {"draft_best": (2, 1)}])
def test_it_requires_a_draft_layer(shape: dict[str, Any]) -> None:
    (name,) = shape
    with pytest.raises(OptionError, match=f"{name} requires a model with a draft layer"):
        generate(build("vanilla"), PROMPTS, max_new_tokens=2, exiting=Exiting(mode="speculative", **shape))
    with pytest.raises(OptionError, match=f"{name} cannot be combined with parallel decoding"):
        Exiting(mode="parallel", **shape)
