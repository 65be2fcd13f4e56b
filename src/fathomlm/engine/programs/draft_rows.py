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
from fathomlm.decode.draft_tree import TreeShape
from fathomlm.engine.kv_pages import AttentionMetadata
from fathomlm.engine.programs import lone_rows
from fathomlm.engine.programs.base import BAD, CONFIDENCE, DRAFTED, ENDED, INDEX, VALID, ProgramContext, StepOutput
from fathomlm.kernels import draft_rows
from fathomlm.kernels.best_token import best_token
from fathomlm.kernels.norm import RMSNorm
from fathomlm.kernels.row_linear import norm_linear
from fathomlm.kernels.triton_here import early_launch, triton

if triton is not None:
    from fathomlm.kernels.best_token import look_for_few

WARPS = 4


class SlotDrafts(NamedTuple):
    """What a `DraftLayerProgram` keeps of its slots."""

    states_SPM: Tensor
    tokens_SP: Tensor
    count_S: Tensor
    threshold_S: Tensor


class DraftRows:
    @classmethod
    def of(cls, parts: ProgramContext, state: SlotDrafts, tree: TreeShape, bits_J: Tensor | None) -> DraftRows | None:
        """None where what enters the layers is not just an embedding, what the draft layer reads is not two norms and a
        product, or the device has no Triton."""
        layers, a = parts.layers, parts.layers.architecture
        decoder, own = layers.decoder, layers.decoder.exit_draft
        plain = type(decoder.embed) is nn.Embedding and a.embedding_scale == 1.0 and a.positions == "rotary"
        plain = plain and layers.sources is None and own is not None and type(own.mix) is nn.Linear and own.mix.bias is None
        return cls(parts, state, tree, bits_J) if plain and lone_rows.runs_here(parts.state.device) else None

    def __init__(self, parts: ProgramContext, state: SlotDrafts, tree: TreeShape, bits_J: Tensor | None) -> None:
        """`bits_J` says which entries a tree's nodes see; None where drafts are a chain."""
        s, a, own = parts.state, parts.layers.architecture, parts.layers.decoder.exit_draft
        assert own is not None
        assert isinstance(own.norm_token, RMSNorm)
        assert s.numbers_SC.is_contiguous()
        self._parts, self._kept, self._tree, self._own = parts, state, tree, (parts.plan.draft_step,)
        self._mix, self._angles = own.mix, parts.layers.angle_tables()
        self._reads = (parts.layers.decoder.embed.weight, own.norm_token.weight, own.norm_state.weight, own.norm_token.eps)
        self._moves = bits_J is not None
        device = s.device
        self._bits_J = torch.full((tree.nodes,), -1, device=device) if bits_J is None else bits_J
        depths = [depth for depth, level in enumerate(tree.levels) for _ in level]
        inner = tree.levels[-1].start
        kids = [tree.widths[depth] if node < inner else 0 for node, depth in enumerate(depths)]
        firsts = [tree.parents.index(node, 1) if node < inner else 0 for node in range(tree.nodes)]
        self._depths_J, self._kids_J, self._firsts_J = (torch.tensor(each, device=device) for each in (depths, kids, firsts))
        tables, pages = s.tables_STP.shape[1:]
        self._hidden = {"M": a.hidden, "HIDDEN": triton.next_power_of_2(a.hidden)}
        self._numbers = {"COLUMNS": s.numbers_SC.shape[1], "TABLES": tables, "J": tree.nodes}
        self._pages = {"SIZE": parts.page_size, "PAGES": pages}
        wide = self._angles[0].shape[1]
        self._sees: dict[str, Any] = {
            "WIDE_PAGES": triton.next_power_of_2(pages), "COPY": s.slots > 1, "D": wide,
            "WIDE": triton.next_power_of_2(wide), "num_warps": WARPS, **self._hidden, **self._numbers, **self._pages,
        }  # fmt: skip

    def step(self, output: StepOutput) -> None:
        parts, kept, s, layers, tree = self._parts, self._kept, self._parts.state, self._parts.layers, self._tree
        slots, J, places = s.slots, tree.nodes, tree.depth + 1
        there_SJ, asks_N = self._ints(slots, J), self._ints(slots)
        drafts_SJ, room_S, last_S = s.position_S.new_empty(slots, J), s.position_S.new_empty(slots), self._longs(slots)
        sures_SJ = torch.empty(slots, J, device=s.device)
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
        self._verify(there_SJ, drafts_SJ, sures_SJ, output)

    def _draft_layer(self, pairs_NM: Tensor, rows: _Rows, bits: bool) -> Tensor:
        """A draft may be rounded as one row is."""
        read_NM = norm_linear(pairs_NM, self._mix.weight, 0.0, scale=False)
        return self._parts.layers.run(read_NM, self._own, rows.seen(bits), rows.positions_N, spend=True, alone=True)

    def _verify(self, there_SJ: Tensor, drafts_SJ: Tensor, sures_SJ: Tensor, output: StepOutput) -> None:
        parts, kept, s, layers, tree = self._parts, self._kept, self._parts.state, self._parts.layers, self._tree
        (slots, J), places, ends_E = there_SJ.shape, tree.depth + 1, parts.ends_E
        rows, embed_VM = self._rows(slots * J), self._reads[0]
        x_NM = embed_VM.new_empty(slots * J, embed_VM.shape[1])
        draft_rows.nodes_kernel[(slots * J,)](
            s.numbers_SC, drafts_SJ, there_SJ, self._depths_J, self._bits_J, rows.bits_N,
            s.tables_STP, *self._angles, *rows.written, embed_VM, x_NM, **self._sees, **early_launch(slots * J),
        )  # fmt: skip
        x_NM = layers.run(x_NM, parts.plan.steps, rows.seen(self._moves), rows.positions_N, spend=True)
        best = best_token(layers.scores(x_NM))
        source_N, target_N = self._longs(slots * places), self._longs(slots * places)
        assert x_NM.stride(1) == 1
        assert output.ints_NC.is_contiguous()
        assert output.floats_NC.is_contiguous()
        draft_rows.settle_drafts_kernel[(slots,)](
            *best, s.numbers_SC, drafts_SJ, there_SJ, sures_SJ, self._firsts_J, self._kids_J, ends_E,
            x_NM, x_NM.stride(0), kept.count_S, kept.tokens_SP, kept.states_SPM, s.clock, s.tables_STP, source_N, target_N,
            output.ints_NC, output.floats_NC, parts.plan.unrolled_layers,
            PLACES=places, KIDS=triton.next_power_of_2(max(tree.widths)), E=len(ends_E),
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

    def seen(self, bits: bool) -> AttentionMetadata:
        return AttentionMetadata(
            self.slot_mapping_N, self.table_NP, self.lengths_N, angles=(self.cos_ND, self.sin_ND),
            bits_N=self.bits_N if bits else None,
        )  # fmt: skip
