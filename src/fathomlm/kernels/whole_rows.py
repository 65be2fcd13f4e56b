"""What lies around the layers of a decode step in which every row runs every layer, a kernel in front and one behind.

Beside the layers such a step has some thirty small operations, each a launch of its own: a tenth of a small model's time
with one row. Their meaning is the plain torch of `engine.programs.whole` and of `take`, for greedy requests, which the tests
hold these kernels against.

Shapes: N rows, S slots and the spare one, C columns of a slot's numbers, T tables of a slot, P pages of a table, M hidden
width, D head width, V vocabulary.
"""

from __future__ import annotations

from fathomlm.kernels.routed_rows import ENTER, IDLE
from fathomlm.kernels.triton_here import tl, triton

if triton is not None:
    from fathomlm.kernels.best_token import best_of_chunks
    from fathomlm.kernels.routed_rows import see_table
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    # A kernel sees constants only as such.
    _IDLE, _ENTER = tl.constexpr(IDLE), tl.constexpr(ENTER)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def is_over(  # type: ignore[no-untyped-def]
        token, bad, made, at, ends_ptr, ignores_ptr, limit_ptr, E: tl.constexpr, ENDS: tl.constexpr
    ):  # fmt: skip
        """Whether a token is its sequence's last, which had `made` before it; `at` is where the slot's numbers are."""
        end = tl.arange(0, ENDS)
        met = tl.max((tl.load(ends_ptr + end, mask=end < E, other=-1) == token).to(tl.int32), 0) > 0
        return (met & (tl.load(ignores_ptr + at) == 0)) | (made + 1 >= tl.load(limit_ptr + at)) | bad

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def tell_row(  # type: ignore[no-untyped-def]
        row, slot, token, depth, flags, made, logprob, sure, epoch_ptr, ints_ptr, floats_ptr,
        C: tl.constexpr, COLUMNS: tl.constexpr, FLOATS: tl.constexpr,
    ):  # fmt: skip
        """What the host hears of a row (`StepOutput`)."""
        ints_ptr += row * COLUMNS
        tl.store(ints_ptr, slot)
        tl.store(ints_ptr + 1, tl.load(epoch_ptr + slot * C))
        tl.store(ints_ptr + 2, token)
        tl.store(ints_ptr + 3, tl.zeros((), tl.int64) + depth)
        tl.store(ints_ptr + 4, flags)
        tl.store(ints_ptr + 5, made)
        tl.store(floats_ptr + row * FLOATS, logprob)
        tl.store(floats_ptr + row * FLOATS + 1, sure)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def enter_rows_kernel(  # type: ignore[no-untyped-def]
        rows_ptr, token_ptr, position_ptr, stage_ptr, entries_ptr, capacity_ptr, tables_ptr, embed_ptr, cos_ptr, sin_ptr,
        live_ptr, positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr, x_ptr,
        C: tl.constexpr, T: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, M: tl.constexpr,
        HIDDEN: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One row: whether it runs, where its entry goes, what it sees and what it enters the layers with."""
        let_next_start(EARLY)
        row = tl.program_id(0)
        slot = tl.load(rows_ptr + row)
        rank = tl.load(entries_ptr + slot * T)
        live = (tl.load(stage_ptr + slot * C) == _ENTER) & (rank < tl.load(capacity_ptr + slot * T))
        tl.store(entries_ptr + slot * T, rank + live.to(tl.int64))  # rows of the spare slot all store the same
        tl.store(live_ptr + row, live)
        position = tl.load(position_ptr + slot * C)
        see_table(
            row, slot, 0, rank, position, live, live, tables_ptr, cos_ptr, sin_ptr,
            positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr, T, P, D, PAGE, PAGES, WIDE,
        )  # fmt: skip
        hidden = tl.arange(0, HIDDEN)
        here = hidden < M
        x = tl.load(embed_ptr + tl.load(token_ptr + slot * C) * M + hidden, mask=here)
        tl.store(x_ptr + row * M + hidden, x, mask=here)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def settle_rows_kernel(  # type: ignore[no-untyped-def]
        most_ptr, sum_ptr, at_ptr, vocab, rows_ptr, live_ptr, ends_ptr,
        token_ptr, position_ptr, stage_ptr, generated_ptr, limit_ptr, epoch_ptr, ignores_ptr, held_ptr,
        ints_ptr, floats_ptr, depth,
        C: tl.constexpr, E: tl.constexpr, ENDS: tl.constexpr, COLUMNS: tl.constexpr, FLOATS: tl.constexpr,
        CHUNKS: tl.constexpr, WIDE: tl.constexpr, VALID: tl.constexpr, BAD: tl.constexpr, ENDED: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """What becomes of one row: its token, whether its sequence is over, and what the host is told."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        token, logprob, bad = best_of_chunks(most_ptr, sum_ptr, at_ptr, row, vocab, CHUNKS, WIDE)
        slot, live = tl.load(rows_ptr + row), tl.load(live_ptr + row) != 0
        at = slot * C
        made = tl.load(generated_ptr + at)
        over = is_over(token, bad, made, at, ends_ptr, ignores_ptr, limit_ptr, E, ENDS)
        flags = tl.zeros((), tl.int64)
        if live:
            goes_on = (over == 0) & (tl.load(held_ptr + at) == 0)
            tl.store(token_ptr + at, token)
            tl.store(position_ptr + at, tl.load(position_ptr + at) + 1)
            tl.store(generated_ptr + at, made + 1)
            if goes_on == 0:
                tl.store(stage_ptr + at, tl.zeros((), tl.int64) + _IDLE)
            flags += VALID + BAD * bad.to(tl.int64) + ENDED * over.to(tl.int64)
        tell_row(row, slot, token, depth, flags, made, logprob, 0.0, epoch_ptr, ints_ptr, floats_ptr, C, COLUMNS, FLOATS)
