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

from fathomlm.decode.confidence import MEASURES, AtExit
from fathomlm.decode.draft_tree import BestShape
from fathomlm.decode.exiting import BEAM
from fathomlm.engine.kv_pages import attention_for
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.draft_tree import tree_metadata
from fathomlm.engine.sampler import Sampled
from fathomlm.errors import OptionError
from fathomlm.kernels.best_token import best_few


class DraftBestProgram(DraftLayerProgram):
    def __init__(self, parts: ProgramContext, tree: BestShape, *, confidence: str = "gap") -> None:
        super().__init__(parts, drafts=tree.depth, confidence=confidence)
        limited = parts.layers.decoder.exit_vocab
        among = parts.layers.architecture.vocab if limited is None else len(limited.vocab_W)
        if among < BEAM:
            raise OptionError(f"draft_best requires {BEAM} tokens that drafts are chosen among, got {among}")
        self.tree, device = tree, parts.state.device
        self._nodes_J = torch.arange(tree.nodes, device=device)
        self._rows_R = torch.arange(tree.rows, device=device)
        depths = [depth for depth in range(tree.depth + 1) for _ in tree.level(depth)]
        self._depths_J = torch.tensor(depths, device=device)
        self._grow = parts.small(self._grow_plain)
        self._take = parts.small(self._take_plain)
        self._follow = parts.small(self._follow_plain)
        self._kernels = self._kernels_for(tree, None)

    def _draft(
        self, x_SM: Tensor, live_S: Tensor, asks_S: Tensor, room_S: Tensor, variant: SamplingVariant
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
        if self._measure != "gap":
            sure_N = MEASURES[self._measure](AtExit(x_NM, x_NM, scores_NW))
        sure_Sn, threshold_S1 = sure_N.view(slots, -1), self.threshold_S[:-1, None]
        drafts_Sn = asks_Sn & ((threshold_S1 == 0) | (sure_Sn > threshold_S1))
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
        sure_Sn = torch.where(asks_Sn, sure_Sn, 0.0).float()
        return sure_Sn, there_SB, tokens_SB, parents_SB, likely_SB, asks_SB, bits_SB, *seen

    def _judge(
        self, live_S: Tensor, many_S: Tensor, drafts: list[Tensor], sures: list[Tensor], variant: SamplingVariant
    ) -> None:
        if not drafts:
            super()._judge(live_S, many_S, drafts, sures, variant)
            return
        layers, rows = self.parts.layers, self.tree.rows
        there_SR, tokens_SR, parents_SR, depths_SR, sures_SR, places_SR, index_N, positions_N, *seen = self._take(
            live_S, many_S, *drafts, *sures
        )
        x_NM = layers.enter(tokens_SR.flatten())
        x_NM = layers.run(x_NM, self.parts.plan.steps, tree_metadata(seen), positions_N, spend=True)
        slots_N = self._slots_S.repeat_interleave(rows)
        sampled = self._choose.sampled(layers.scores(x_NM), slots_N, index_N, there_SR.flatten(), variant)
        many_S, source_N, target_N, path_N, drafts_SP, sures_SP, valid_N, index_N = self._follow(
            live_S, there_SR, tokens_SR, parents_SR, depths_SR, sures_SR, sampled.tokens_N, sampled.bad_N, places_SR
        )
        layers.pages.move(0, source_N, target_N)
        along = Sampled(**{name: getattr(sampled, name).index_select(0, path_N) for name in sampled.__slots__})
        x_NM = x_NM.index_select(0, path_N)
        self._settle(live_S, many_S, drafts_SP, sures_SP, valid_N, index_N, self._slots_N, along, x_NM, self.output, variant)

    def _take_plain(
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
        ranks_SR = s.position_S[:-1, None] + rows_R
        inside_SR = live_S[:, None] & (ranks_SR < s.capacity_ST[:-1, :1])
        slots_N, ranks_N = self._slots_S.repeat_interleave(len(rows_R)), torch.where(inside_SR, ranks_SR, 0).flatten()
        table_N, size = torch.zeros_like(slots_N), self.parts.page_size
        places_N = attention_for(s.tables_STP, slots_N, table_N, ranks_N, inside_SR.flatten(), size).slot_mapping_N
        index_N = (s.generated_S[:-1, None] + depths_SR).flatten()
        seen = self._tree_seen(rows_R.expand_as(at_SR), depths_SR, bits_SR, there_SR)
        return (
            there_SR, tokens_SJ.gather(1, at_SR), parents_SR, depths_SR, sures_SJ.gather(1, at_SR),
            places_N.view_as(at_SR), index_N, *seen,
        )  # fmt: skip

    def _follow_plain(
        self, live_S: Tensor, there_SR: Tensor, tokens_SR: Tensor, parents_SR: Tensor, depths_SR: Tensor, sures_SR: Tensor,
        chosen_N: Tensor, bad_N: Tensor, places_SR: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The path of drafts that the full model chose, as the chain that it is: as in `draft_tree`."""
        s, place_P = self.parts.state, self._places_J
        chosen_SR, bad_SR = chosen_N.view_as(tokens_SR), bad_N.view_as(tokens_SR)
        right_SR = there_SR & (self._rows_R > 0)
        right_SR = right_SR & (tokens_SR == chosen_SR.gather(1, parents_SR)) & ~bad_SR.gather(1, parents_SR)
        kept_SR = live_S[:, None] & (self._rows_R == 0)
        for _ in range(self.tree.depth):
            kept_SR = kept_SR | (right_SR & kept_SR.gather(1, parents_SR))
        on_SPR = kept_SR[:, None] & (depths_SR[:, None] == place_P[:, None])
        path_SP, length_S = on_SPR.long().argmax(2), kept_SR[:, 1:].sum(1)
        valid_SP = live_S[:, None] & (place_P <= length_S[:, None])
        end_S1 = path_SP.gather(1, length_S[:, None])
        followed_S = (there_SR & (self._rows_R > 0) & (parents_SR == end_S1)).any(1)
        moves_SP = valid_SP & (place_P > 0)
        source_SP = torch.where(moves_SP, places_SR.gather(1, path_SP), -1)
        target_SP = torch.where(moves_SP, places_SR.gather(1, place_P.clamp_max(self.tree.drafts).expand_as(path_SP)), -1)
        drafts_SP = torch.where(valid_SP, tokens_SR.gather(1, path_SP), -1)
        path_N = (self._slots_S[:, None] * self.tree.rows + path_SP).flatten()
        index_SP = s.generated_S[:-1, None] + place_P
        return (
            length_S + followed_S, source_SP.flatten(), target_SP.flatten(), path_N, drafts_SP,
            sures_SR.gather(1, path_SP), valid_SP.flatten(), index_SP.flatten(),
        )  # fmt: skip
