"""Drafts of a draft layer as a tree, verified in one pass across a batch. `decode.draft_tree` is the slow twin.

A slot's last settled token and its drafts are nodes, numbered level by level. Node j has its entry j places behind the last
settled token's, in every layer and in the draft layer; it stands at the position of its depth, and sees what is settled and
the nodes above it (`AttentionMetadata.bits_N`). The draft layer runs level by level over all nodes that have drafts behind
them, then all layers over all nodes. What the full model chooses at a node, with the random number of its place, leads on to
the draft that is this token, if there is one: so tokens are those that the full model chooses, whatever was drafted. Along
that path the rest is a chain of drafts; its entries move up to where a chain's would be.

Shapes: S slots, J nodes of a tree, N rows, n nodes of a level, C those of the next, K drafts behind a node, P places of a
path, M hidden width, W tokens that drafts are chosen among.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fathomlm.decode.confidence import MEASURES, AtExit
from fathomlm.decode.draft_tree import TreeShape
from fathomlm.engine.kv_pages import AttentionMetadata, attention_for
from fathomlm.engine.programs.base import ProgramContext, SamplingVariant
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.whole import metadata_of
from fathomlm.engine.sampler import Sampled
from fathomlm.errors import OptionError
from fathomlm.kernels.best_token import best_and_gap, best_few
from fathomlm.kernels.row_attention import BITS


class DraftTreeProgram(DraftLayerProgram):
    def __init__(self, parts: ProgramContext, tree: TreeShape, *, confidence: str = "gap") -> None:
        super().__init__(parts, drafts=tree.depth, confidence=confidence)
        limited = parts.layers.decoder.exit_vocab
        among = parts.layers.architecture.vocab if limited is None else len(limited.vocab_W)
        if max(tree.widths) > among:
            raise OptionError(
                f"draft_tree must be at most the {among} tokens that drafts are chosen among, got {tree.widths}"
            )
        self.tree, device = tree, parts.state.device
        self._nodes_J = torch.arange(tree.nodes, device=device)
        self._parents_J = torch.tensor(tree.parents, device=device)
        depths = [depth for depth, level in enumerate(tree.levels) for _ in level]
        self._depths_J = torch.tensor(depths, device=device)
        self._bits_J = torch.tensor(seen_bits(tree), device=device)
        inner = tree.levels[-1].start
        self._firsts_I = torch.tensor([tree.parents.index(node, 1) for node in range(inner)], device=device)
        """The first draft behind each node that has any."""
        self._grow = parts.small(self._grow_plain)
        self._nodes = parts.small(self._nodes_plain)
        self._follow = parts.small(self._follow_plain)
        self._kernels = self._kernels_for(tree, self._bits_J)

    def _draft(
        self, x_SM: Tensor, live_S: Tensor, asks_S: Tensor, room_S: Tensor, variant: SamplingVariant
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Which nodes there are, (S, J), their tokens and how sure the layer was behind them, level by level."""
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
        return torch.cat(there, 1), drafts, sures

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
        if self._measure != "gap":
            sure_N = MEASURES[self._measure](AtExit(x_NM, x_NM, scores_NW))
        sure_Sn = sure_N.view(slots, -1)
        threshold_S1 = self.threshold_S[:-1, None]
        drafts_Sn = asks_Sn & ((threshold_S1 == 0) | (sure_Sn > threshold_S1))
        next_ = self.tree.levels[level + 1]
        nodes_C = self._nodes_J[next_.start : next_.stop]
        position_S1 = s.position_S[:-1, None]
        there_SC = drafts_Sn.repeat_interleave(width, 1) & (position_S1 + nodes_C < s.capacity_ST[:-1, :1])
        asks_SC = there_SC & (room_S > level + 1)[:, None]
        positions_N, *seen = self._tree_seen(nodes_C, self._depths_J[nodes_C], self._bits_J[nodes_C], asks_SC)
        sure_Sn = torch.where(asks_Sn, sure_Sn, 0.0).float()
        return tokens_NK.view(slots, -1), sure_Sn, there_SC, asks_SC, positions_N, *seen

    def _judge(
        self, live_S: Tensor, many_S: Tensor, drafts: list[Tensor], sures: list[Tensor], variant: SamplingVariant
    ) -> None:
        if not drafts:
            super()._judge(live_S, many_S, drafts, sures, variant)
            return
        s, layers, there_SJ = self.parts.state, self.parts.layers, many_S
        tokens_SJ = torch.cat((s.token_S[:-1, None], *drafts), 1)
        sures_SJ = torch.cat((*sures, torch.zeros_like(drafts[-1], dtype=torch.float32)), 1)
        places_SJ, index_N, positions_N, *seen = self._nodes(live_S, there_SJ)
        x_NM = layers.enter(tokens_SJ.flatten())
        x_NM = layers.run(x_NM, self.parts.plan.steps, tree_metadata(seen), positions_N, spend=True)
        slots_N = self._slots_S.repeat_interleave(self.tree.nodes)
        sampled = self._choose.sampled(layers.scores(x_NM), slots_N, index_N, there_SJ.flatten(), variant)
        many_S, source_N, target_N, path_N, drafts_SP, sures_SP, valid_N, index_N = self._follow(
            live_S, there_SJ, tokens_SJ, sures_SJ, sampled.tokens_N, sampled.bad_N, places_SJ
        )
        self.parts.layers.pages.move(0, source_N, target_N)
        along = Sampled(**{name: getattr(sampled, name).index_select(0, path_N) for name in sampled.__slots__})
        x_NM = x_NM.index_select(0, path_N)
        self._settle(live_S, many_S, drafts_SP, sures_SP, valid_N, index_N, self._slots_N, along, x_NM, self.output, variant)

    def _nodes_plain(self, live_S: Tensor, there_SJ: Tensor) -> tuple[Tensor, ...]:
        """Where every node's entry would be, -1 where there is no page; and what the nodes that there are see."""
        s = self.parts.state
        ranks_SJ = s.position_S[:-1, None] + self._nodes_J
        inside_SJ = live_S[:, None] & (ranks_SJ < s.capacity_ST[:-1, :1])
        slots_N = self._slots_S.repeat_interleave(len(self._nodes_J))
        ranks_N = torch.where(inside_SJ, ranks_SJ, 0).flatten()
        table_N, size = torch.zeros_like(slots_N), self.parts.page_size
        places_N = attention_for(s.tables_STP, slots_N, table_N, ranks_N, inside_SJ.flatten(), size).slot_mapping_N
        index_N = (s.generated_S[:-1, None] + self._depths_J).flatten()
        return places_N.view_as(there_SJ), index_N, *self._tree_seen(self._nodes_J, self._depths_J, self._bits_J, there_SJ)

    def _follow_plain(
        self, live_S: Tensor, there_SJ: Tensor, tokens_SJ: Tensor, sures_SJ: Tensor, chosen_N: Tensor, bad_N: Tensor,
        places_SJ: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The path of drafts that the full model chose, as the chain that it is: how many drafts were judged along it, which
        entries move where, its rows, and its tokens, -1 behind its end."""
        s, tree = self.parts.state, self.tree
        chosen_SJ, bad_SJ = chosen_N.view_as(tokens_SJ), bad_N.view_as(tokens_SJ)
        above_J = self._parents_J
        right_SJ = there_SJ & (tokens_SJ == chosen_SJ[:, above_J]) & ~bad_SJ[:, above_J]
        kept, path = [live_S[:, None]], [torch.zeros_like(chosen_SJ[:, 0])]
        for width, level in zip(tree.widths, tree.levels[1:], strict=True):
            kept.append(right_SJ[:, level.start : level.stop] & kept[-1].repeat_interleave(width, 1))
            path.append(level.start + kept[-1].long().argmax(1))
        path_SP = torch.stack(path, 1)
        length_S = torch.stack([each.any(1) for each in kept[1:]], 1).sum(1)
        place_P = self._places_J
        valid_SP = live_S[:, None] & (place_P <= length_S[:, None])
        leaves_SC = torch.zeros_like(there_SJ[:, tree.levels[-1].start :])
        followed_SJ = torch.cat((there_SJ.index_select(1, self._firsts_I), leaves_SC), 1)
        end_S1 = path_SP.gather(1, length_S[:, None])
        many_S = length_S + followed_SJ.gather(1, end_S1)[:, 0]
        moves_SP = valid_SP & (place_P > 0)
        source_SP = torch.where(moves_SP, places_SJ.gather(1, path_SP), -1)
        target_SP = torch.where(moves_SP, places_SJ[:, : len(place_P)], -1)
        drafts_SP = torch.where(valid_SP, tokens_SJ.gather(1, path_SP), -1)
        path_N = (self._slots_S[:, None] * tree.nodes + path_SP).flatten()
        index_SP = s.generated_S[:-1, None] + place_P
        return (
            many_S, source_SP.flatten(), target_SP.flatten(), path_N, drafts_SP, sures_SJ.gather(1, path_SP),
            valid_SP.flatten(), index_SP.flatten(),
        )  # fmt: skip


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
