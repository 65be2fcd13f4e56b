"""Drafts of a draft layer as a tree, verified in one pass across a batch. `decode.draft_tree` is the slow twin.

A slot's last settled token and its drafts are nodes, numbered level by level. Node j has its entry j places behind the last
settled token's, in every layer and in the draft layer; it stands at the position of its depth, and sees what is settled and
the nodes above it (`AttentionMetadata.bits_N`). The draft layer runs level by level over all nodes that have drafts behind
them, then all layers over all nodes. What the full model chooses at a node, with the random number of its place, leads on to
the draft that is this token, if there is one: so tokens are those that the full model chooses, whatever was drafted. Along
that path the rest is a chain of drafts; its entries move up to where a chain's would be.

Shapes: S slots, J nodes of a tree, N rows, n nodes of a level, C those of the next, K drafts behind a node, P places of a
path, R rows of a slot in the pass that verifies (here its nodes), M hidden width, W tokens that drafts are chosen among.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.decode.draft_tree import BestShape, TreeShape
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.whole import metadata_of
from fathomlm.engine.sampler import Sampled
from fathomlm.errors import OptionError
from fathomlm.kernels.best_token import best_and_gap, best_few
from fathomlm.kernels.row_attention import BITS


class TreeRows(NamedTuple):
    """What all layers verify, in the order of its levels; a slot's first row is its last settled token."""

    there_SR: Tensor
    tokens_SR: Tensor
    parents_SR: Tensor
    """The row in front of each."""
    depths_SR: Tensor
    sures_SR: Tensor
    """How sure the draft layer was behind each."""
    places_SR: Tensor
    """Where the rows' entries would be; -1 where there is no page."""


class TreeProgram(DraftLayerProgram):
    """What trees of any shape share: the pass that verifies them, and the path along which the full model follows."""

    def __init__(
        self, parts: ProgramContext, tree: TreeShape | BestShape, *, rows: int, depths: Sequence[int], confidence: str
    ) -> None:
        """`rows` of a slot are verified; `depths` are those of the tree's nodes."""
        super().__init__(parts, drafts=tree.depth, confidence=confidence)
        limited, device = parts.layers.decoder.exit_vocab, parts.state.device
        self.among = parts.layers.architecture.vocab if limited is None else len(limited.vocab_W)
        """How many tokens drafts are chosen among."""
        self._nodes_J = torch.arange(tree.nodes, device=device)
        self._rows_R = torch.arange(rows, device=device)
        self._depths_J = torch.tensor(depths, device=device)
        self._follow = parts.small(self._follow_plain)

    def _take(
        self, live_S: Tensor, there_SJ: Tensor, drafts: list[Tensor], sures: list[Tensor]
    ) -> tuple[TreeRows, Tensor, Tensor, list[Tensor]]:
        """Of what `_draft` gave: the rows, which token of its sequence each chooses, their positions, and what
        `tree_metadata` takes."""
        raise NotImplementedError

    def _judge(
        self, live_S: Tensor, many_S: Tensor, drafts: list[Tensor], sures: list[Tensor], variant: SamplingVariant
    ) -> None:
        if not drafts:
            super()._judge(live_S, many_S, drafts, sures, variant)
            return
        layers = self.parts.layers
        rows, index_N, positions_N, seen = self._take(live_S, many_S, drafts, sures)
        x_NM = layers.enter(rows.tokens_SR.flatten())
        x_NM = layers.run(x_NM, self.parts.plan.steps, tree_metadata(seen), positions_N, spend=True)
        slots_N = self._slots_S.repeat_interleave(len(self._rows_R))
        sampled = self._choose.sampled(layers.scores(x_NM), slots_N, index_N, rows.there_SR.flatten(), variant)
        many_S, source_N, target_N, path_N, drafts_SP, sures_SP, valid_N, index_N = self._follow(
            live_S, rows, sampled.tokens_N, sampled.bad_N
        )
        layers.pages.move(0, source_N, target_N)
        along = Sampled(**{name: getattr(sampled, name).index_select(0, path_N) for name in sampled.__slots__})
        x_NM = x_NM.index_select(0, path_N)
        self._settle(live_S, many_S, drafts_SP, sures_SP, valid_N, index_N, self._slots_N, along, x_NM, self.output, variant)

    def _places(self, live_S: Tensor) -> Tensor:
        s, size = self.parts.state, self.parts.page_size
        ranks_SR = s.position_S[:-1, None] + self._rows_R
        inside_SR = live_S[:, None] & (ranks_SR < s.capacity_ST[:-1, :1])
        slots_N, ranks_N = self._slots_S.repeat_interleave(len(self._rows_R)), torch.where(inside_SR, ranks_SR, 0).flatten()
        seen = attention_for(s.tables_STP, slots_N, torch.zeros_like(slots_N), ranks_N, inside_SR.flatten(), size)
        return seen.slot_mapping_N.view_as(ranks_SR)

    def _follow_plain(self, live_S: Tensor, rows: TreeRows, chosen_N: Tensor, bad_N: Tensor) -> tuple[Tensor, ...]:
        """The path of drafts that the full model chose, as the chain that it is: how many drafts were judged along it, which
        entries move where, its rows, and its tokens, -1 behind its end."""
        there_SR, tokens_SR, parents_SR, depths_SR, sures_SR, places_SR = rows
        place_P, last = self._places_J, len(self._rows_R) - 1
        drafts_SR = there_SR & (self._rows_R > 0)
        chosen_SR, bad_SR = chosen_N.view_as(tokens_SR), bad_N.view_as(tokens_SR)
        right_SR = drafts_SR & (tokens_SR == chosen_SR.gather(1, parents_SR)) & ~bad_SR.gather(1, parents_SR)
        kept_SR = live_S[:, None] & (self._rows_R == 0)
        for _ in range(self.drafts):
            kept_SR = kept_SR | (right_SR & kept_SR.gather(1, parents_SR))
        on_SPR = kept_SR[:, None] & (depths_SR[:, None] == place_P[:, None])
        path_SP, length_S = on_SPR.long().argmax(2), kept_SR[:, 1:].sum(1)
        valid_SP = live_S[:, None] & (place_P <= length_S[:, None])
        end_S1 = path_SP.gather(1, length_S[:, None])
        followed_S = (drafts_SR & (parents_SR == end_S1)).any(1)
        moves_SP = valid_SP & (place_P > 0)
        source_SP = torch.where(moves_SP, places_SR.gather(1, path_SP), -1)
        target_SP = torch.where(moves_SP, places_SR.gather(1, place_P.clamp_max(last).expand_as(path_SP)), -1)
        path_N = (self._slots_S[:, None] * len(self._rows_R) + path_SP).flatten()
        index_SP = self.parts.state.generated_S[:-1, None] + place_P
        return (
            length_S + followed_S, source_SP.flatten(), target_SP.flatten(), path_N,
            torch.where(valid_SP, tokens_SR.gather(1, path_SP), -1), sures_SR.gather(1, path_SP), valid_SP.flatten(),
            index_SP.flatten(),
        )  # fmt: skip


class DraftTreeProgram(TreeProgram):
    def __init__(self, parts: ProgramContext, tree: TreeShape, *, confidence: str = "gap") -> None:
        depths = [depth for depth, level in enumerate(tree.levels) for _ in level]
        super().__init__(parts, tree, rows=tree.nodes, depths=depths, confidence=confidence)
        if max(tree.widths) > self.among:
            raise OptionError(
                f"draft_tree must be at most the {self.among} tokens that drafts are chosen among, got {tree.widths}"
            )
        self.tree, device = tree, parts.state.device
        self._parents_J = torch.tensor(tree.parents, device=device)
        self._bits_J = torch.tensor(seen_bits(tree), device=device)
        self._grow = parts.small(self._grow_plain)
        self._nodes = parts.small(self._nodes_plain)
        self._kernels = self._kernels_for(tree, self._bits_J)

    def _draft(
        self, x_SM: Tensor, live_S: Tensor, asks_S: Tensor, room_S: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Which nodes there are, (S, J), their tokens and how sure the layer was behind them."""
        parts, slots, tree = self.parts, len(live_S), self.tree
        x_NM, asks_Sn = x_SM, asks_S[:, None]
        there, drafts, sures = [live_S[:, None]], list[Tensor](), list[Tensor]()
        found: list[Tensor] = []
        for level, width in enumerate(tree.widths):
            many = len(tree.levels[level])
            if level and not parts.idle(asks_Sn):
                positions_N, *seen = found
                x_NM = x_NM.repeat_interleave(tree.widths[level - 1], 0)
                read_NM = self._enter(drafts[-1].flatten(), x_NM)
                x_NM = parts.layers.run(read_NM, self._own, tree_metadata(seen), positions_N, spend=True, alone=True)
            elif level:
                x_NM = x_SM.new_zeros(slots * many, x_SM.shape[1])
            scores = parts.layers.draft_scores(x_NM)
            tokens_SC, sure_Sn, there_SC, asks_Sn, *found = self._grow(*scores, x_NM, asks_Sn, room_S, level, width)
            drafts.append(tokens_SC)
            sures.append(sure_Sn)
            there.append(there_SC)
        tokens_SJ = torch.cat((parts.state.token_S[:-1, None], *drafts), 1)
        sures_SJ = torch.cat((*sures, torch.zeros_like(drafts[-1], dtype=torch.float32)), 1)
        return torch.cat(there, 1), [tokens_SJ], [sures_SJ]

    def _grow_plain(
        self, scores_NW: Tensor, vocab_W: Tensor | None, x_NM: Tensor, asks_Sn: Tensor, room_S: Tensor, level: int,
        width: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The drafts behind a level's nodes, which of them there are, and what those that are followed by others see."""
        s, slots = self.parts.state, len(room_S)
        if width == 1:
            tokens_N, sure_N = best_and_gap(scores_NW)
            tokens_NK = tokens_N[:, None]
        else:
            tokens_NK, sure_N = best_few(scores_NW, width)
        if vocab_W is not None:
            tokens_NK = vocab_W[tokens_NK]
        sure_Sn, drafts_Sn = self._sure_enough(sure_N, scores_NW, x_NM, asks_Sn)
        next_ = self.tree.levels[level + 1]
        nodes_C = self._nodes_J[next_.start : next_.stop]
        position_S1 = s.position_S[:-1, None]
        there_SC = drafts_Sn.repeat_interleave(width, 1) & (position_S1 + nodes_C < s.capacity_ST[:-1, :1])
        asks_SC = there_SC & (room_S > level + 1)[:, None]
        positions_N, *seen = self._tree_seen(nodes_C, self._depths_J[nodes_C], self._bits_J[nodes_C], asks_SC)
        return tokens_NK.view(slots, -1), sure_Sn, there_SC, asks_SC, positions_N, *seen

    def _take(
        self, live_S: Tensor, there_SJ: Tensor, drafts: list[Tensor], sures: list[Tensor]
    ) -> tuple[TreeRows, Tensor, Tensor, list[Tensor]]:
        places_SJ, index_N, positions_N, *seen = self._nodes(live_S, there_SJ)
        parents_SJ, depths_SJ = self._parents_J.expand_as(there_SJ), self._depths_J.expand_as(there_SJ)
        return TreeRows(there_SJ, drafts[0], parents_SJ, depths_SJ, sures[0], places_SJ), index_N, positions_N, seen

    def _nodes_plain(self, live_S: Tensor, there_SJ: Tensor) -> tuple[Tensor, ...]:
        index_N = (self.parts.state.generated_S[:-1, None] + self._depths_J).flatten()
        seen = self._tree_seen(self._nodes_J, self._depths_J, self._bits_J, there_SJ)
        return self._places(live_S), index_N, *seen


def seen_bits(tree: TreeShape) -> list[int]:
    """For each node, which of the entries up to its own it sees: those above it and, before the tree, all."""
    found = []
    for node in range(tree.nodes):
        bits, above = -1 << (node + 1), node
        while True:
            bits |= 1 << (node - above)
            if above == 0:
                break
            above = tree.parents[above]
        found.append((bits + 2 ** (BITS - 1)) % 2**BITS - 2 ** (BITS - 1))
    return found


def tree_metadata(found: list[Tensor]) -> AttentionMetadata:
    bits_N, *seen = found
    return replace(metadata_of(seen), bits_N=bits_N)
