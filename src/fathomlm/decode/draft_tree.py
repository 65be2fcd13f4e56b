"""Drafts of a draft layer as a tree: several tokens at each position, of which the full model follows one (SpecInfer, Miao
et al. 2024; EAGLE, Li et al. 2024).

A tree is how many drafts follow each token, place by place: 4,2,1 are four first drafts, two behind each of them and one
behind each of those, 20 in all. What one forward pass over the tree would do is done here path by path, each behind what is
settled alone, and the path that is kept once more: slow and plain. `engine.programs.draft_tree` is the fast twin.

Greedily, drafts are the layer's likeliest tokens, and the one that the full model would choose is followed. Drawn drafts of
a place are drawn one after the other, none twice, and tried in turn: each is kept with probability min(1, p / q), and where
it is not, what p has more than q is what the next one is held against. So tokens are distributed as the full model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fathomlm.cache import Span
from fathomlm.decode.draft_layer import DEPTH, DraftLayerDecoding
from fathomlm.decode.exit_forward import ExitPolicy, PartialForward
from fathomlm.decode.exiting import BEAM
from fathomlm.decode.generation import ExitingSequence, TokenExit, WaitingToken
from fathomlm.decode.parallel_decoding import residual


@dataclass(frozen=True)
class TreeShape:
    """A tree's nodes by number, level by level: the last settled token is 0, and what follows a node stands together."""

    widths: tuple[int, ...]

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, from 0."""
        found, first, many = [range(1)], 1, 1
        for width in self.widths:
            many *= width
            found.append(range(first, first + many))
            first += many
        return tuple(found)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Of each node; the first is its own."""
        pairs = zip(self.levels, self.levels[1:], self.widths, strict=False)
        return (0, *(above[0] + place // width for above, nodes, width in pairs for place in range(len(nodes))))

    @property
    def nodes(self) -> int:
        """Tokens of a forward pass that verifies."""
        return self.levels[-1][-1] + 1

    @property
    def depth(self) -> int:
        return len(self.widths)


@dataclass(frozen=True)
class BestShape:
    """A tree of the likeliest drafts (EAGLE-2, Li et al. 2024): each level has the `BEAM` likeliest ones behind those of the
    level above, and of all levels the `drafts` likeliest are verified. How likely a draft is, is the product of what the
    draft layer says along its path, so what stands above a draft is never less likely."""

    drafts: int
    depth: int

    @property
    def nodes(self) -> int:
        """What the draft layer looks at, and the last settled token."""
        return 1 + BEAM * self.depth

    @property
    def rows(self) -> int:
        """Tokens of a forward pass that verifies."""
        return 1 + self.drafts

    def level(self, depth: int) -> range:
        """The nodes of a depth, from 0."""
        return range(1) if depth == 0 else range(1 + BEAM * (depth - 1), 1 + BEAM * depth)


@dataclass(slots=True)
class _DraftNode:
    """The last settled token, or a draft."""

    path: tuple[int, ...] = ()
    """The drafts from the settled tokens to this one."""
    above: tuple[_DraftNode, ...] = ()
    state_M: Tensor | None = None
    """The draft layer's output here, where it has run."""
    logits_V: Tensor | None = None
    sure: float = 0.0
    proposed: list[Tensor] = field(default_factory=list)
    """What each draft behind this one was drawn from."""
    children: list[_DraftNode] = field(default_factory=list)
    likely: float = 0.0
    """Log probability of its path, as the draft layer sees it, where the likeliest are looked for."""
    full_V: Tensor | None = None
    """The full model's scores."""

    def leaves(self) -> Iterator[_DraftNode]:
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


class DraftTreeDecoding(DraftLayerDecoding):
    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        super().__init__(forward, policy)
        self._widths = policy.exiting.draft_tree or ()
        self._instead: dict[tuple[int, int], int] = {}
        """By sequence and position, what was drawn in the place of drafts."""
        self._verify = lambda seq, waiting, logits_V: self._instead.pop((seq.index, waiting.position), None)

    def step(self, sequences: Sequence[ExitingSequence]) -> None:
        forward = self._forward
        for seq in sequences:
            settled, known_NM = list(seq.token_ids), self._states[seq.index]
            root, run = _DraftNode(), forward.layers_run[seq.index]
            drafting = self._grow(seq, root, settled, known_NM)
            nodes = self._judge(seq, root, settled)
            self._states[seq.index], seq.token_ids = known_NM, settled
            self._walk(seq, root)
            # A pass over the tree runs every node once; the path that is kept runs when it is settled.
            forward.layers_run[seq.index] = run + drafting + (nodes - len(seq.stack)) * len(self.prompt_steps)
        self._catch_up(sequences)

    def _grow(self, seq: ExitingSequence, root: _DraftNode, settled: list[int], known_NM: Tensor) -> int:
        """Drafts behind each node, level by level; returns how many tokens the draft layer has run over."""
        level, ran = [root], 0
        for width in self._widths:
            for node in level:
                left = seq.state.max_new_tokens - len(seq.state.tokens) - len(node.path)
                if left < 2 or (node.path[-1:] and node.path[-1] in seq.state.end_tokens):
                    continue
                ran += self._ask(seq, node, settled, known_NM)
                if self._policy.is_confident(node.sure, seq):
                    propose(seq, node, width)
            level = [child for node in level for child in node.children]
        return ran

    def _ask(self, seq: ExitingSequence, node: _DraftNode, settled: list[int], known_NM: Tensor) -> int:
        """What the draft layer says behind a node; returns how many tokens it has run over."""
        seq.token_ids = [*settled, *node.path]
        above = [one.state_M[None] for one in node.above if one.state_M is not None]
        self._states[seq.index] = torch.cat((known_NM, *above))
        self._forward.cache.truncate(len(settled) - len(known_NM), seq.index, (self._own,))
        (node.state_M,), (node.logits_V,), (node.sure,) = self._run_draft([seq])
        return 1 if node.path else len(known_NM)

    def _judge(self, seq: ExitingSequence, root: _DraftNode, settled: list[int]) -> int:
        """The full model over every path; returns how many nodes there are."""
        forward, first, nodes = self._forward, len(settled) - 1, set()
        for leaf in root.leaves():
            path = (*leaf.above, leaf)
            nodes |= {id(node) for node in path}
            tokens = [*settled[-1:], *leaf.path]
            gathered = forward.gather([Span(seq.index, first, len(tokens))])
            x_1NM = forward.run(forward.enter([tokens]), self.prompt_steps, gathered)
            for node, logits_V in zip(path, forward.logits(x_1NM, self._policy.last)[0], strict=True):
                node.full_V = logits_V
            forward.cache.truncate(first, seq.index, self.prompt_steps)
        return len(nodes)

    def _walk(self, seq: ExitingSequence, root: _DraftNode) -> None:
        """Along the drafts that are kept: these wait to be settled, the last one with what stands in the place of others."""
        node: _DraftNode | None = root
        while node is not None:
            here, asked = node, node.logits_V is not None
            nothing_M = self._states[seq.index][-1]
            waiting = WaitingToken(
                position=seq.position,
                state_M=nothing_M if here.state_M is None else here.state_M,
                logits_V=nothing_M if here.logits_V is None else here.logits_V,
                likeliest=-1 if here.logits_V is None else seq.likeliest(here.logits_V),
                token_exit=TokenExit(DEPTH, here.sure) if asked else TokenExit(self._policy.last + 1),
            )
            seq.stack.append(waiting)
            node = None
            if here.children:
                assert here.full_V is not None
                drafts = [child.path[-1] for child in here.children]
                token = followed(seq, drafts, here.proposed, here.full_V)
                waiting.chosen = token if token in drafts else drafts[0]
                if token in drafts:
                    node = here.children[drafts.index(token)]
                    seq.token_ids.append(token)
                else:
                    self._instead[seq.index, waiting.position] = token


class DraftBestDecoding(DraftTreeDecoding):
    """A tree of the likeliest drafts (`BestShape`). They are never drawn, so of a full model's token that is drawn nothing
    depends on them."""

    def __init__(self, forward: PartialForward, policy: ExitPolicy) -> None:
        super().__init__(forward, policy)
        assert policy.exiting.draft_best is not None
        self._best = BestShape(*policy.exiting.draft_best)

    def _grow(self, seq: ExitingSequence, root: _DraftNode, settled: list[int], known_NM: Tensor) -> int:
        level, found, ran = [root], list[_DraftNode](), 0
        for depth in range(self._best.depth):
            if seq.state.max_new_tokens - len(seq.state.tokens) - depth < 2:
                break
            offered = list[_DraftNode]()
            for node in level:
                ran += self._ask(seq, node, settled, known_NM)
                assert node.logits_V is not None
                if self._policy.is_confident(node.sure, seq):
                    logs_V = node.logits_V.float().log_softmax(-1)
                    for token in logs_V.argsort(descending=True, stable=True)[:BEAM].tolist():
                        likely = node.likely + float(logs_V[token])
                        offered.append(_DraftNode((*node.path, token), (*node.above, node), likely=likely))
            level = sorted(offered, key=lambda node: -node.likely)[:BEAM]
            found += level
        for node in sorted(found, key=lambda node: -node.likely)[: self._best.drafts]:
            node.above[-1].children.append(node)
        return ran


def propose(seq: ExitingSequence, node: _DraftNode, width: int) -> None:
    """`width` different tokens, or as many as there are."""
    assert node.logits_V is not None
    logits_V = node.logits_V.clone()
    q_V = None if seq.sampling.greedy else seq.probabilities(logits_V)
    for _ in range(width):
        if q_V is None:
            token = seq.likeliest(logits_V)
            logits_V[token] = -torch.inf
        elif not bool(q_V.any()):
            return
        else:
            token = seq.draw(q_V)
            node.proposed.append(q_V)
            q_V = q_V.clone()
            q_V[token] = 0
            q_V = q_V / q_V.sum().clamp_min(torch.finfo(q_V.dtype).tiny)
        node.children.append(_DraftNode((*node.path, token), (*node.above, node)))


def followed(seq: ExitingSequence, drafts: Sequence[int], proposed: Sequence[Tensor], logits_V: Tensor) -> int:
    """The full model's token behind the last of a sequence: one of the drafts where one is kept. A token that is drawn in
    their place and happens to be a draft that was not kept has no probability left, so none is. Where drafts were not drawn,
    nothing is `proposed`, and a token of the full model's own is followed where it is a draft."""
    if seq.sampling.greedy:
        return seq.likeliest(logits_V)
    p_V = seq.probabilities(logits_V)
    if not proposed:
        return seq.draw(p_V)
    for token, q_V in zip(drafts, proposed, strict=True):
        if seq.uniform() * float(q_V[token]) < float(p_V[token]):
            return token
        p_V = residual(p_V, q_V)
        p_V = p_V / p_V.sum()
    return seq.draw(p_V)
