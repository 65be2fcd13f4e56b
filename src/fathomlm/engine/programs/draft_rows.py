"""Steps that draft with a draft layer and verify, around whose layers are a few kernels made for it.

The fast path of `DraftLayerProgram` and `DraftTreeProgram`, whose own steps are the meaning: for greedy requests, and drafts
judged by the gap between the two likeliest tokens. Both change the same numbers in the same way, so steps of either kind may
follow each other. Here a chain of drafts is a tree with one draft behind each node.

Shapes: S slots, J nodes of a tree, N rows, P places of a path, M hidden width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fathomlm.decode.draft_layer import DEPTH as DRAFT_DEPTH
from fathomlm.decode.draft_tree import BestShape, TreeShape
from fathomlm.decode.exiting import BEAM
from fathomlm.engine.kv_pages import AttentionMetadata
from fathomlm.engine.programs import lone_rows
from fathomlm.engine.programs.base import (
    BAD,
    CONFIDENCE,
    DRAFTED,
    ENDED,
    INDEX,
    VALID,
    ProgramContext,
    SamplingVariant,
    StepOutput,
    TokenChooser,
)
from fathomlm.kernels import draft_rows
from fathomlm.kernels.best_token import best_token
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.row_linear import norm_linear
from fathomlm.kernels.triton_here import FEW_DRAFTS, early_launch, triton

if triton is not None:
    from fathomlm.kernels.best_token import look_for_few

WARPS = 4


class SlotDrafts(NamedTuple):
    """What a `DraftLayerProgram` keeps of its slots."""

    states_SPM: Tensor
    tokens_SP: Tensor
    count_S: Tensor
    threshold_S: Tensor


class Drafted(NamedTuple):
    """What all layers verify: rows of every slot, the first of which is its last settled token."""

    tokens_SJ: Tensor
    there_SJ: Tensor
    sures_SJ: Tensor
    parents: Tensor
    """The row in front of each, (J) or (S, J)."""
    depths_N: Tensor | None
    rows: _Rows
    x_NM: Tensor


class DraftRows:
    @classmethod
    def of(
        cls, parts: ProgramContext, state: SlotDrafts, tree: TreeShape | BestShape, bits_J: Tensor | None
    ) -> DraftRows | None:
        """None where what enters the layers is not just an embedding, what the draft layer reads is not two norms and a
        product, or the device has no Triton."""
        layers, a = parts.layers, parts.layers.architecture
        own = layers.decoder.exit_draft
        plain = layers.embeds_only and a.positions == "rotary"
        plain = plain and layers.sources is None and own is not None and type(own.mix) is nn.Linear and own.mix.bias is None
        if not plain or not lone_rows.runs_here(parts.state.device):
            return None
        return BestRows(parts, state, tree) if isinstance(tree, BestShape) else cls(parts, state, tree, bits_J)

    def __init__(self, parts: ProgramContext, state: SlotDrafts, tree: TreeShape | BestShape, bits_J: Tensor | None) -> None:
        """`bits_J` says which entries a tree's nodes see; None where drafts are a chain."""
        s, a, own = parts.state, parts.layers.architecture, parts.layers.decoder.exit_draft
        assert own is not None
        assert isinstance(own.norm_token, RMSNorm)
        assert s.numbers_SC.is_contiguous()
        self._parts, self._kept, self._depth, self._own = parts, state, tree.depth, (parts.plan.draft_step,)
        self._nodes, self._choose = tree.nodes, TokenChooser(parts)
        self._mix, self._angles = own.mix, parts.layers.angle_tables()
        self._reads = (parts.layers.decoder.embed.weight, own.norm_token.weight, own.norm_state.weight, own.norm_token.eps)
        self._moves = bits_J is not None
        tables, pages = s.tables_STP.shape[1:]
        self._hidden = {"M": a.hidden, "HIDDEN": triton.next_power_of_2(a.hidden)}
        self._numbers = {"COLUMNS": s.numbers_SC.shape[1], "TABLES": tables}
        self._pages = {"SIZE": parts.page_size, "PAGES": pages}
        wide = self._angles[0].shape[1]
        self._sees: dict[str, Any] = {
            "WIDE_PAGES": triton.next_power_of_2(pages), "COPY": s.slots > 1, "D": wide, "J": tree.nodes,
            "WIDE": triton.next_power_of_2(wide), "num_warps": WARPS, **self._hidden, **self._numbers, **self._pages,
        }  # fmt: skip
        self._slots_S = torch.arange(s.slots, device=s.device)
        if isinstance(tree, TreeShape):
            self._tree = tree
            self._bits_J = torch.full((tree.nodes,), -1, device=s.device) if bits_J is None else bits_J
            depths = [depth for depth, level in enumerate(tree.levels) for _ in level]
            self._depths_J = torch.tensor(depths, device=s.device)
            self._parents_J = torch.tensor(tree.parents, dtype=torch.int32, device=s.device)

    def step(self, variant: SamplingVariant, output: StepOutput) -> None:
        parts, kept, s = self._parts, self._kept, self._parts.state
        slots, J, places = s.slots, self._nodes, self._depth + 1
        there_SJ, asks_N = self._ints(slots, J), self._ints(slots)
        room_S, last_S = s.position_S.new_empty(slots), self._longs(slots)
        rows, pairs_NM = self._rows(slots * places), self._pairs(slots * places)
        draft_rows.catch_up_kernel[(slots * places,)](
            s.numbers_SC, s.capacity_ST, kept.count_S, kept.tokens_SP, kept.states_SPM, there_SJ, asks_N, room_S, last_S,
            s.tables_STP, *self._angles, *rows.written, *self._reads, pairs_NM,
            PLACES=places, EARLY=early_launch(slots * places)["EARLY"], **self._sees,
        )  # fmt: skip
        if parts.idle(there_SJ[:, 0] != 0):
            output.blank(s.spare)
            return
        x_NM = self._draft_layer(pairs_NM, rows, bits=False).index_select(0, last_S)
        self._verify(self._draft(x_NM, there_SJ, asks_N, room_S), variant, output)

    def _draft(self, x_NM: Tensor, there_SJ: Tensor, asks_N: Tensor, room_S: Tensor) -> Drafted:
        """Drafts behind the last settled tokens, level by level."""
        kept, s, layers, tree, slots = self._kept, self._parts.state, self._parts.layers, self._tree, len(there_SJ)
        drafts_SJ, sures_SJ = s.position_S.new_empty(there_SJ.shape), torch.empty(there_SJ.shape, device=s.device)
        rows, pairs_NM = self._rows(1), self._pairs(1)
        for level, width in enumerate(tree.widths):
            above, here = tree.levels[level], tree.levels[level + 1]
            if level:
                x_NM = self._draft_layer(pairs_NM, rows, bits=self._moves)
            scores_NW, names_W = layers.draft_scores(x_NM)
            few, sizes = look_for_few(scores_NW, width)
            many, followed = slots * len(here), level + 1 < tree.depth
            then_N, rows = self._ints(many), self._rows(many if followed else 1)
            pairs_NM = self._pairs(many if followed else 1)
            assert x_NM.stride(1) == 1
            draft_rows.grow_kernel[(many,)](
                *few, scores_NW.shape[1], room_S if names_W is None else names_W, x_NM, x_NM.stride(0), s.numbers_SC,
                s.capacity_ST, kept.threshold_S, room_S, asks_N, drafts_SJ, there_SJ, sures_SJ, then_N, self._bits_J,
                rows.bits_N, s.tables_STP, *self._angles, *rows.written, *self._reads, pairs_NM,
                NAMED=names_W is not None, LEVEL=level, ABOVE=above.start, FIRST=here.start, MANY=len(here), WIDTH=width,
                FOLLOWED=followed, CHUNKS=sizes["CHUNKS"], FEW=sizes["FEW"], WIDEST=sizes["WIDE"], PARTS=sizes["PARTS"],
                **self._sees, **early_launch(many),
            )  # fmt: skip
            asks_N = then_N
        J = tree.nodes
        rows, embed_VM = self._rows(slots * J), self._reads[0]
        x_NM = embed_VM.new_empty(slots * J, embed_VM.shape[1])
        draft_rows.nodes_kernel[(slots * J,)](
            s.numbers_SC, drafts_SJ, there_SJ, self._depths_J, self._bits_J, rows.bits_N,
            s.tables_STP, *self._angles, *rows.written, embed_VM, x_NM, **self._sees, **early_launch(slots * J),
        )  # fmt: skip
        return Drafted(drafts_SJ, there_SJ, sures_SJ, self._parents_J, None, rows, x_NM)

    def _draft_layer(self, pairs_NM: Tensor, rows: _Rows, bits: bool) -> Tensor:
        """A draft may be rounded as one row is."""
        read_NM = norm_linear(pairs_NM, self._mix.weight, 0.0, scale=False)
        seen = rows.seen(bits, self._parts.state.slots, self._nodes)
        return self._parts.layers.run(read_NM, self._own, seen, rows.positions_N, spend=True, alone=True)

    def _verify(self, drafted: Drafted, variant: SamplingVariant, output: StepOutput) -> None:
        parts, kept, s, layers, rows = self._parts, self._kept, self._parts.state, self._parts.layers, drafted.rows
        (slots, J), places, ends_E = drafted.there_SJ.shape, self._depth + 1, parts.ends_E
        seen = rows.seen(self._moves, slots, J)
        x_NM = layers.run(drafted.x_NM, parts.plan.steps, seen, rows.positions_N, spend=True)
        chosen = self._chosen(layers.scores(x_NM), drafted, variant)
        source_N, target_N = self._longs(slots * places), self._longs(slots * places)
        assert x_NM.stride(1) == 1
        assert output.ints_NC.is_contiguous()
        assert output.floats_NC.is_contiguous()
        draft_rows.settle_drafts_kernel[(slots,)](
            *chosen, s.numbers_SC, drafted.tokens_SJ, drafted.there_SJ, drafted.sures_SJ, drafted.parents,
            J if drafted.parents.ndim == 2 else 0, ends_E, x_NM, x_NM.stride(0), kept.count_S, kept.tokens_SP,
            kept.states_SPM, s.clock, s.tables_STP, source_N, target_N, output.ints_NC, output.floats_NC,
            parts.plan.unrolled_layers,
            J=J, NODES=triton.next_power_of_2(J), PLACES=places, E=len(ends_E),
            ENDS=triton.next_power_of_2(max(1, len(ends_E))), INTS=INDEX + 1, FLOATS=CONFIDENCE + 1, VALID=VALID, BAD=BAD,
            ENDED=ENDED, DRAFTED=DRAFTED, DRAFT_DEPTH=DRAFT_DEPTH, num_warps=WARPS, **self._hidden, **self._numbers,
            **self._pages, **early_launch(slots),
        )  # fmt: skip
        if self._moves:
            planes, (k_pages, v_pages) = layers.pages.planes(0)
            entries, width = k_pages.shape[0] * k_pages.shape[1] // planes, k_pages[0, 0].numel()
            draft_rows.move_entries_kernel[(slots, planes)](
                k_pages, v_pages, source_N, target_N, entries, PLACES=places, WIDTH=width,
                WIDE=triton.next_power_of_2(width), num_warps=2,
            )  # fmt: skip

    def _chosen(self, scores_NV: Tensor, drafted: Drafted, variant: SamplingVariant) -> tuple[Tensor, Tensor, Tensor]:
        """What the full model chooses for every row, its log probability, and where there is no choice."""
        if variant.greedy:
            return best_token(scores_NV)
        (slots, J), depths = drafted.there_SJ.shape, drafted.depths_N
        depths_SJ = self._depths_J.expand(slots, J) if depths is None else depths.view(slots, J)
        index_N = (self._parts.state.generated_S[:-1, None] + depths_SJ).flatten()
        slots_N = self._slots_S.repeat_interleave(J)
        found = self._choose.sampled(scores_NV, slots_N, index_N, drafted.there_SJ.flatten() != 0, variant)
        return found.tokens_N, found.logprobs_N, found.bad_N

    def _ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._parts.state.device)

    def _longs(self, many: int) -> Tensor:
        return torch.empty(many, dtype=torch.int64, device=self._parts.state.device)

    def _pairs(self, many: int) -> Tensor:
        embed_VM = self._reads[0]
        return embed_VM.new_empty(many, 2 * embed_VM.shape[1])

    def _rows(self, many: int) -> _Rows:
        s, (cos_PD, sin_PD) = self._parts.state, self._angles
        pages = s.tables_STP.shape[2]
        table_NP = s.tables_STP[:1, 0].expand(many, pages) if s.slots == 1 else self._ints(many, pages)
        angles = cos_PD.new_empty(many, cos_PD.shape[1]), sin_PD.new_empty(many, sin_PD.shape[1])
        return _Rows(self._longs(many), self._longs(many), self._ints(many), table_NP, *angles, self._longs(many))


class BestRows(DraftRows):
    """The same for a tree of the likeliest drafts."""

    def __init__(self, parts: ProgramContext, state: SlotDrafts, tree: BestShape) -> None:
        super().__init__(parts, state, tree, None)
        self._moves, self._shape, slots, device = True, tree, parts.state.slots, parts.state.device
        # Of the last settled tokens this is always so; drafts are written over in every step.
        self._likely_SJ = torch.zeros(slots, tree.nodes, device=device)
        self._bits_SJ = torch.full((slots, tree.nodes), -1, device=device)
        self._parents_SJ = torch.zeros(slots, tree.nodes, dtype=torch.int32, device=device)

    def _draft(self, x_NM: Tensor, there_SJ: Tensor, asks_N: Tensor, room_S: Tensor) -> Drafted:
        kept, s, layers, tree, slots = self._kept, self._parts.state, self._parts.layers, self._shape, len(there_SJ)
        drafts_SJ, sures_SJ = s.position_S.new_empty(there_SJ.shape), torch.empty(there_SJ.shape, device=s.device)
        rows, pairs_NM = self._rows(1), self._pairs(1)
        for level in range(tree.depth):
            above, here = tree.level(level), tree.level(level + 1)
            if level:
                x_NM = self._draft_layer(pairs_NM, rows, bits=True)
            scores_NW, names_W = layers.draft_scores(x_NM)
            few, sizes = look_for_few(scores_NW, BEAM)
            many, followed = slots * BEAM, level + 1 < tree.depth
            then_N, rows = self._ints(many), self._rows(many if followed else 1)
            pairs_NM = self._pairs(many if followed else 1)
            assert x_NM.stride(1) == 1
            draft_rows.grow_best_kernel[(many,)](
                *few, scores_NW.shape[1], room_S if names_W is None else names_W, x_NM, x_NM.stride(0), s.numbers_SC,
                s.capacity_ST, kept.threshold_S, room_S, asks_N, drafts_SJ, there_SJ, sures_SJ, self._likely_SJ,
                self._parents_SJ, self._bits_SJ, then_N, rows.bits_N, s.tables_STP, *self._angles, *rows.written,
                *self._reads, pairs_NM, level, above.start, here.start,
                NAMED=names_W is not None, WIDTH=len(above), BEAM=BEAM, FOLLOWED=followed, CHUNKS=sizes["CHUNKS"],
                FEW=sizes["FEW"], WIDEST=sizes["WIDE"], PARTS=sizes["PARTS"],
                **self._sees, **early_launch(many),
            )  # fmt: skip
            asks_N = then_N
        N, embed_VM = slots * tree.rows, self._reads[0]
        rows, x_NM = self._rows(N), embed_VM.new_empty(N, embed_VM.shape[1])
        tokens_SR, depths_N = s.position_S.new_empty(slots, tree.rows), self._longs(N)
        there_SR, parents_SR = self._ints(slots, tree.rows), self._ints(slots, tree.rows)
        sures_SR = torch.empty(slots, tree.rows, device=s.device)
        draft_rows.best_nodes_kernel[(N,)](
            s.numbers_SC, drafts_SJ, there_SJ, sures_SJ, self._likely_SJ, self._parents_SJ, rows.bits_N, tokens_SR,
            there_SR, sures_SR, parents_SR, depths_N, s.tables_STP, *self._angles, *rows.written, embed_VM, x_NM,
            ROWS=tree.rows, NODES=triton.next_power_of_2(tree.nodes), DEPTH=tree.depth, BEAM=BEAM,
            **self._sees, **early_launch(N),
        )  # fmt: skip
        return Drafted(tokens_SR, there_SR, sures_SR, parents_SR, depths_N, rows, x_NM)


class _Rows(NamedTuple):
    """What rows look at, where a kernel writes it."""

    positions_N: Tensor
    slot_mapping_N: Tensor
    lengths_N: Tensor
    table_NP: Tensor
    cos_ND: Tensor
    sin_ND: Tensor
    bits_N: Tensor

    @property
    def written(self) -> tuple[Tensor, ...]:
        return self[:6]

    def seen(self, bits: bool, slots: int, nodes: int) -> AttentionMetadata:
        return AttentionMetadata(
            self.slot_mapping_N, self.table_NP, self.lengths_N, angles=(self.cos_ND, self.sin_ND),
            bits_N=self.bits_N if bits else None, together=(len(self.positions_N) // slots, nodes) if FEW_DRAFTS else None,
        )  # fmt: skip
