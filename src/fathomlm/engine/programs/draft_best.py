"""Drafts of a draft layer as a tree of the likeliest ones, verified in one pass across a batch. `decode.draft_tree` is the
slow twin, and `draft_tree` has trees of a fixed shape.

Each level has the `BEAM` likeliest drafts behind those of the level above, and of all levels the likeliest are verified
(`BestShape`). Nodes are numbered level by level, and have their entries in the draft layer as those of a fixed tree have.
Those that are verified are rows of the pass in the same order, and row r has its entry r places behind the last settled
token's.
Drafts are never drawn: what the full model chooses, greedily or with the random number of its place, leads on to the draft
that is this token, so tokens are those that the full model chooses one by one.

Shapes: S slots, J nodes, R rows of a slot in the pass that verifies, N rows, B nodes of a level, n those of the level above,
K tokens that each of these offers, P places of a path, M hidden width, W tokens that drafts are chosen among.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathomlm.decode.draft_tree import BestShape
from fathomlm.decode.exiting import BEAM
from fathomlm.engine.programs.base import ProgramContext
from fathomlm.engine.programs.draft_tree import TreeProgram, TreeRows, tree_metadata
from fathomlm.errors import OptionError
from fathomlm.kernels.best_token import best_few


class DraftBestProgram(TreeProgram):
    def __init__(self, parts: ProgramContext, tree: BestShape, *, confidence: str = "gap") -> None:
        depths = [depth for depth in range(tree.depth + 1) for _ in tree.level(depth)]
        super().__init__(parts, tree, rows=tree.rows, depths=depths, confidence=confidence)
        if self.among < BEAM:
            raise OptionError(f"draft_best requires {BEAM} tokens that drafts are chosen among, got {self.among}")
        self.tree = tree
        self._grow = parts.small(self._grow_plain)
        self._likeliest = parts.small(self._likeliest_plain)
        self._kernels = self._kernels_for(tree, None)

    def _draft(
        self, x_SM: Tensor, live_S: Tensor, asks_S: Tensor, room_S: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Which nodes there are, (S, J), their tokens, parents and logarithms of how likely they are, and how sure the layer
        was behind them."""
        parts, layers, slots, tree = self.parts, self.parts.layers, len(live_S), self.tree
        x_NM, asks_Sn = x_SM, asks_S[:, None]
        likely_Sn, bits_Sn = torch.zeros_like(asks_Sn, dtype=torch.float32), torch.full_like(room_S[:, None], -1)
        there, tokens, parents = [live_S[:, None]], [parts.state.token_S[:-1, None]], [torch.zeros_like(room_S[:, None])]
        likely, sures = [likely_Sn], list[Tensor]()
        found: list[Tensor] = []
        for level in range(tree.depth):
            if level and not parts.idle(asks_Sn):
                positions_N, *seen = found
                before_NM = x_NM.view(slots, -1, x_NM.shape[1])
                at_SB1 = (parents[-1] - tree.level(level - 1).start)[..., None].expand(-1, -1, x_NM.shape[1])
                read_NM = self._enter(tokens[-1].flatten(), before_NM.gather(1, at_SB1).flatten(0, 1))
                x_NM = layers.run(read_NM, self._own, tree_metadata(seen), positions_N, spend=True, alone=True)
            elif level:
                x_NM = x_SM.new_zeros(slots * BEAM, x_SM.shape[1])
            scores = layers.draft_scores(x_NM)
            sure_Sn, there_SB, tokens_SB, parents_SB, likely_Sn, asks_Sn, bits_Sn, *found = self._grow(
                *scores, x_NM, asks_Sn, likely_Sn, bits_Sn, room_S, level
            )
            sures.append(sure_Sn)
            there.append(there_SB)
            tokens.append(tokens_SB)
            parents.append(parents_SB)
            likely.append(likely_Sn)
        sures.append(torch.zeros_like(likely_Sn))
        drafts = [torch.cat(each, 1) for each in (tokens, parents, likely)]
        return torch.cat(there, 1), drafts, [torch.cat(sures, 1)]

    def _grow_plain(
        self, scores_NW: Tensor, vocab_W: Tensor | None, x_NM: Tensor, asks_Sn: Tensor, likely_Sn: Tensor, bits_Sn: Tensor,
        room_S: Tensor, level: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The likeliest drafts behind a level's nodes, and what those that are followed by others see."""
        s, slots, above, here = self.parts.state, len(room_S), self.tree.level(level), self.tree.level(level + 1)
        tokens_NK, sure_N = best_few(scores_NW, BEAM)
        sure_Sn, drafts_Sn = self._sure_enough(sure_N, scores_NW, x_NM, asks_Sn)
        logs_NK = scores_NW.gather(1, tokens_NK) - scores_NW.logsumexp(1, keepdim=True)
        offered_SnK = likely_Sn[..., None] + logs_NK.view(slots, -1, BEAM)
        offered_SC = offered_SnK.masked_fill(~drafts_Sn[..., None], -torch.inf).flatten(1)
        at_SB, _ = best_few(offered_SC, BEAM)
        likely_SB, tokens_SB = offered_SC.gather(1, at_SB), tokens_NK.view(slots, -1).gather(1, at_SB)
        tokens_SB = tokens_SB if vocab_W is None else vocab_W[tokens_SB]
        nodes_B = self._nodes_J[here.start : here.stop]
        inside_SB = s.position_S[:-1, None] + nodes_B < s.capacity_ST[:-1, :1]
        there_SB = likely_SB.isfinite() & inside_SB
        likely_SB = likely_SB.masked_fill(~there_SB, -torch.inf)
        asks_SB = there_SB & (room_S > level + 1)[:, None]
        parents_SB = above.start + at_SB // BEAM
        bits_SB = (bits_Sn.gather(1, at_SB // BEAM) << (nodes_B - parents_SB)) | 1
        seen = self._tree_seen(nodes_B.expand_as(at_SB), self._depths_J[nodes_B].expand_as(at_SB), bits_SB, asks_SB)
        return sure_Sn, there_SB, tokens_SB, parents_SB, likely_SB, asks_SB, bits_SB, *seen

    def _take(
        self, live_S: Tensor, there_SJ: Tensor, drafts: list[Tensor], sures: list[Tensor]
    ) -> tuple[TreeRows, Tensor, Tensor, list[Tensor]]:
        found = self._likeliest(live_S, there_SJ, *drafts, *sures)
        return TreeRows(*found[:6]), found[6], found[7], list(found[8:])

    def _likeliest_plain(
        self, live_S: Tensor, there_SJ: Tensor, tokens_SJ: Tensor, parents_SJ: Tensor, likely_SJ: Tensor, sures_SJ: Tensor
    ) -> tuple[Tensor, ...]:
        """The likeliest nodes as rows, behind the last settled token; where their entries would be, and what they see."""
        s, rows_R, node_J = self.parts.state, self._rows_R, self._nodes_J
        drafts_SJ = there_SJ & (node_J > 0)
        more_SJJ = likely_SJ[:, None] > likely_SJ[..., None]
        more_SJJ = more_SJJ | ((likely_SJ[:, None] == likely_SJ[..., None]) & (node_J < node_J[:, None]))
        taken_SJ = drafts_SJ & ((more_SJJ & drafts_SJ[:, None]).sum(2) < self.tree.drafts)
        numbers_SJ = torch.where(taken_SJ, taken_SJ.long().cumsum(1), 0)
        is_SRJ = (numbers_SJ[:, None] == rows_R[:, None]) & (taken_SJ | (node_J == 0))[:, None]
        there_SR = is_SRJ.any(2) & live_S[:, None]
        at_SR = is_SRJ.long().argmax(2)
        parents_SR = numbers_SJ.gather(1, parents_SJ).gather(1, at_SR)
        bits_SR, above_SR = torch.full_like(at_SR, -1) << (rows_R + 1), rows_R.expand_as(at_SR)
        for _ in range(self.tree.depth + 1):
            bits_SR = bits_SR | (1 << (rows_R - above_SR))
            above_SR = parents_SR.gather(1, above_SR)
        depths_SR = self._depths_J[at_SR]
        index_N = (s.generated_S[:-1, None] + depths_SR).flatten()
        seen = self._tree_seen(rows_R.expand_as(at_SR), depths_SR, bits_SR, there_SR)
        return (
            there_SR, tokens_SJ.gather(1, at_SR), parents_SR, depths_SR, sures_SJ.gather(1, at_SR), self._places(live_S),
            index_N, *seen,
        )  # fmt: skip
