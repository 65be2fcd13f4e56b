"""Passes of one sequence with one exit, around whose layers are two kernels and the look for the likeliest token.

The fast path of `ExitProgram`, whose own passes are the meaning: for greedy requests, exits decided by the gap between the
two likeliest tokens, and exact fill. Both change the same numbers in the same way, so passes of either kind may follow each
other.

Shapes: N rows, M hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.engine.kv_pages import AttentionMetadata
from fathomlm.engine.programs.base import (
    AGREED,
    BAD,
    CONFIDENCE,
    ENDED,
    INDEX,
    JUDGED,
    NEXT,
    VALID,
    WAITING,
    ProgramContext,
    StepOutput,
)
from fathomlm.kernels import lone_rows
from fathomlm.kernels.best_token import CHUNK
from fathomlm.kernels.triton_here import early_launch, triton

if triton is not None:
    from fathomlm.kernels.best_token import look_through

WARPS = 4


class EnteredRows(NamedTuple):
    """Rows in front of their layers."""

    slots_N: Tensor
    positions_N: Tensor
    marks_N: Tensor
    before: Tensor
    x_NM: Tensor
    attention: AttentionMetadata


class SlotExits(NamedTuple):
    """What an `ExitProgram` keeps of its slots, and how far its segments go."""

    ring_BSKM: Tensor
    level_S: Tensor
    filled_BS: Tensor
    threshold_SB: Tensor
    choice_SK: Tensor
    confidence_SK: Tensor
    cuts: list[int]
    """How many layers a token has run behind each segment."""


class LoneRows:
    @classmethod
    def of(cls, parts: ProgramContext, state: SlotExits) -> LoneRows | None:
        """None where there are several slots or exits, what enters the layers is not just an embedding, or the device has no
        Triton."""
        plain = parts.layers.embeds_only and parts.layers.architecture.positions in ("rotary", "relative")
        one = parts.state.slots == 1 and len(state.ring_BSKM) == 1
        return cls(parts, state) if plain and one and runs_here(parts.state.device) else None

    def __init__(self, parts: ProgramContext, state: SlotExits) -> None:
        self._parts, self._kept, a = parts, state, parts.layers.architecture
        self._angles = parts.layers.angle_tables()
        self._wide = self._angles[0].shape[1]
        stack = state.ring_BSKM.shape[2]
        self._hidden = {"M": a.hidden, "HIDDEN": triton.next_power_of_2(a.hidden), "K": stack, "num_warps": WARPS}
        assert parts.state.numbers_SC.is_contiguous()

    def begin(self, kind: int, many: int) -> EnteredRows:
        kept, parts, s = self._kept, self._parts, self._parts.state
        embed_VM, P, D = parts.layers.decoder.embed.weight, s.tables_STP.shape[2], self._wide
        slots_N, positions_N, mapping_N = (torch.empty(many, dtype=torch.int64, device=s.device) for _ in range(3))
        marks_N, lengths_N = (torch.empty(many, dtype=torch.int32, device=s.device) for _ in range(2))
        before = torch.empty(lone_rows.BEFORE, dtype=torch.int64, device=s.device)
        cos_ND, sin_ND = (table_PD.new_empty(many, D) for table_PD in self._angles)
        x_NM = embed_VM.new_empty(many, embed_VM.shape[1])
        lone_rows.enter_lone_kernel[(many,)](
            s.token_S, s.position_S, s.stage_S, s.generated_S, kept.level_S, kept.filled_BS, s.capacity_ST, s.clock,
            s.tables_STP, embed_VM, kept.ring_BSKM, *self._angles,
            slots_N, positions_N, marks_N, before, mapping_N, lengths_N, x_NM, cos_ND, sin_ND, many,
            DEEP=kind > 0, P=P, PAGE=parts.page_size, D=D, WIDE=triton.next_power_of_2(D),
            EARLY=early_launch(many)["EARLY"], **self._hidden,
        )  # fmt: skip
        table_NP = s.tables_STP[:1, 0].expand(many, P)
        seen = AttentionMetadata(mapping_N, table_NP, lengths_N, angles=(cos_ND, sin_ND), slots_N=slots_N)
        return EnteredRows(slots_N, positions_N, marks_N, before, x_NM, seen)

    def settle(self, kind: int, rows: EnteredRows, x_NM: Tensor, scores_NV: Tensor, output: StepOutput) -> None:
        """`x_NM` is what waits at the exit."""
        kept, parts, s = self._kept, self._parts, self._parts.state
        (N, V), ends_E = scores_NV.shape, parts.ends_E
        chunks = look_through(scores_NV)
        assert x_NM.stride(1) == 1
        assert output.ints_NC.is_contiguous()
        assert output.floats_NC.is_contiguous()
        lone_rows.settle_kernel[(N,)](
            *chunks, V, rows.slots_N, rows.positions_N, rows.marks_N, rows.before, x_NM, x_NM.stride(0), ends_E,
            s.token_S, s.position_S, s.stage_S, s.since_S, s.generated_S, s.limit_S, s.epoch_S, s.ignores_S, s.held_S,
            kept.level_S, kept.filled_BS, s.clock, kept.threshold_SB, kept.choice_SK, kept.confidence_SK,
            kept.ring_BSKM, output.ints_NC, output.floats_NC, kept.cuts[kind],
            DEEP=kind > 0, C=s.numbers_SC.stride(0), E=len(ends_E), ENDS=triton.next_power_of_2(max(1, len(ends_E))),
            COLUMNS=INDEX + 1, FLOATS=CONFIDENCE + 1, CHUNKS=chunks[0].shape[1],
            PARTS=triton.next_power_of_2(chunks[0].shape[1]), CHUNK=CHUNK, VALID=VALID, BAD=BAD, ENDED=ENDED, JUDGED=JUDGED,
            AGREED=AGREED, NEXT=NEXT, WAITING=WAITING, **self._hidden, **early_launch(N),
        )  # fmt: skip


def runs_here(device: torch.device) -> bool:
    """Whether there is Triton for a device."""
    return triton is not None and device.type == "cuda"
