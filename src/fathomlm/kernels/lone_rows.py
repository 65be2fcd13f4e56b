"""What lies around the layers of a pass with one sequence and one exit, a kernel in front and one behind.

A shallow pass is so short that the thirty small operations beside its layers, each a launch of its own, count. Their meaning
is the plain torch of `engine.programs.exits` and `exit_decisions`, for one slot, which the tests hold these kernels against.
The first kernel leaves what the slot's numbers were, so that programs of the second do not read what another has changed.

Shapes: N rows, S the slot and a spare one, C columns of a slot's numbers, P pages of a table, M hidden width, D head width,
K places of the ring, V vocabulary.
"""

from __future__ import annotations

from fathomlm.kernels.routed_rows import ENTER, IDLE
from fathomlm.kernels.triton_here import tl, triton

BEFORE = 5
"""Numbers that the first kernel leaves for the second: position, filled, level, tokens so far, and the clock."""

if triton is not None:
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last
    from fathomlm.kernels.whole_rows import is_over, tell_row

    # A kernel sees constants only as such.
    _IDLE, _ENTER = tl.constexpr(IDLE), tl.constexpr(ENTER)
    _HERE, _CURRENT, _LAST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def enter_lone_kernel(  # type: ignore[no-untyped-def]
        token_ptr, position_ptr, stage_ptr, generated_ptr, level_ptr, filled_ptr, capacity_ptr, clock_ptr, table_ptr,
        embed_ptr, ring_ptr, cos_ptr, sin_ptr,
        slots_ptr, positions_ptr, marks_ptr, before_ptr, mapping_ptr, lengths_ptr, x_ptr, row_cos_ptr, row_sin_ptr, rows,
        DEEP: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr,
        D: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One row of the pass: which position it is, what it sees and what it enters its layers with."""
        let_next_start(EARLY)
        row = tl.program_id(0)
        position, level = tl.load(position_ptr), tl.load(level_ptr)
        filled, clock = tl.load(filled_ptr), tl.load(clock_ptr)
        pending = position + (level > 0).to(tl.int64) - filled
        deep = (level > 0) | (pending + 1 > K)
        waits = tl.load(stage_ptr) == _ENTER
        if DEEP:
            here = waits & deep & (pending <= rows) & (row < pending)
            mine = filled + row
            last = here & (row == pending - 1)
        else:
            here = waits & (deep == 0) & (position < tl.load(capacity_ptr)) & (row == 0)
            mine, last = position, here
        current = here & (mine == position)
        mine = tl.where(here, mine, 0)
        tl.store(slots_ptr + row, tl.where(here, 0, 1).to(tl.int64))
        tl.store(positions_ptr + row, mine)
        marks = here.to(tl.int32) * _HERE + current.to(tl.int32) * _CURRENT + last.to(tl.int32) * _LAST
        tl.store(marks_ptr + row, marks)
        if row == 0:
            tl.store(before_ptr, position)
            tl.store(before_ptr + 1, filled)
            tl.store(before_ptr + 2, level)
            tl.store(before_ptr + 3, tl.load(generated_ptr))
            tl.store(before_ptr + 4, clock)
        page = tl.load(table_ptr + tl.minimum(mine // PAGE, P - 1)).to(tl.int64)
        tl.store(mapping_ptr + row, tl.where(here, page * PAGE + mine % PAGE, -1))
        tl.store(lengths_ptr + row, tl.where(here, mine + 1, 0).to(tl.int32))
        column = tl.arange(0, WIDE)
        tl.store(row_cos_ptr + row * D + column, tl.load(cos_ptr + mine * D + column, mask=column < D), mask=column < D)
        tl.store(row_sin_ptr + row * D + column, tl.load(sin_ptr + mine * D + column, mask=column < D), mask=column < D)
        hidden = tl.arange(0, HIDDEN)
        if DEEP:
            embed_ptr = ring_ptr + mine % K * M
        else:
            embed_ptr += tl.load(token_ptr) * M
        x = tl.load(embed_ptr + hidden, mask=here & (hidden < M), other=0.0)
        tl.store(x_ptr + row * M + hidden, x, mask=hidden < M)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _best(  # type: ignore[no-untyped-def]
        most_ptr, next_ptr, sum_ptr, at_ptr, row, vocab, CHUNKS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr
    ):  # fmt: skip
        """The likeliest token, its log probability, whether there is no choice, and by how much it is likelier than the
        next, of what `best_token`'s chunks say. Where there is no choice the token is any."""
        chunk = tl.arange(0, PARTS)
        at, there = row * CHUNKS + chunk, chunk < CHUNKS
        most = tl.load(most_ptr + at, mask=there, other=float("-inf"))
        best = tl.max(most, 0)
        wrong = tl.max((most != most).to(tl.int32), 0)
        bad = (wrong > 0) | (best == float("inf")) | (best == float("-inf"))
        level = tl.where(bad, 0.0, best)
        total = tl.sum(tl.load(sum_ptr + at, mask=there, other=0.0) * tl.exp(most - level), 0)
        place = tl.load(at_ptr + at, mask=there, other=0)
        first = tl.minimum(tl.min(tl.where((most == best) & there, place, vocab), 0), vocab - 1)
        inside = first // CHUNK == chunk  # the chunk that the best is in offers its second
        second = tl.max(tl.where(inside, tl.load(next_ptr + at, mask=there, other=float("-inf")), most), 0)
        gap = (1.0 - tl.exp(second - best)) / total
        return first.to(tl.int64), tl.where(bad, 0.0, -tl.log(total)), bad, gap

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def settle_kernel(  # type: ignore[no-untyped-def]
        most_ptr, next_ptr, sum_ptr, at_ptr, vocab,
        slots_ptr, positions_ptr, marks_ptr, before_ptr, x_ptr, x_stride, ends_ptr,
        token_ptr, position_ptr, stage_ptr, since_ptr, generated_ptr, limit_ptr, epoch_ptr, ignores_ptr, held_ptr,
        level_ptr, filled_ptr, clock_ptr, threshold_ptr, choice_ptr, confidence_ptr, ring_ptr, ints_ptr, floats_ptr, depth,
        DEEP: tl.constexpr, K: tl.constexpr, C: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr, E: tl.constexpr,
        ENDS: tl.constexpr, COLUMNS: tl.constexpr, FLOATS: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
        CHUNK: tl.constexpr, VALID: tl.constexpr, BAD: tl.constexpr, ENDED: tl.constexpr, JUDGED: tl.constexpr,
        AGREED: tl.constexpr, NEXT: tl.constexpr, WAITING: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """What becomes of one row: whether it exits, what is chosen and told, and what waits from here on."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0)
        choice, logprob, bad, gap = _best(most_ptr, next_ptr, sum_ptr, at_ptr, row, vocab, CHUNKS, PARTS, CHUNK)
        token = tl.where(bad, 0, choice)
        slot, mine, marks = tl.load(slots_ptr + row), tl.load(positions_ptr + row), tl.load(marks_ptr + row)
        here, current, last = (marks & _HERE) != 0, (marks & _CURRENT) != 0, (marks & _LAST) != 0
        position, filled = tl.load(before_ptr), tl.load(before_ptr + 1)
        made, clock = tl.load(before_ptr + 3), tl.load(before_ptr + 4)
        at = slot * K + mine % K
        flags = tl.zeros((), tl.int64)
        if DEEP:
            sure = tl.load(confidence_ptr + at)
            agrees = choice == tl.load(choice_ptr + at)
            flags += here.to(tl.int64) * (JUDGED + AGREED * agrees.to(tl.int64))
            chosen = current
            segment, size = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + 1
        else:
            threshold = tl.load(threshold_ptr)
            sure = tl.where(gap < 0.0, 0.0, tl.where(gap > 1.0, 1.0, gap))
            chosen = current & ((threshold == 0.0) | (sure > threshold))
            waiting = position + 1 - filled
            goes_deep = (chosen == 0) | (waiting + 1 > K)
            segment = goes_deep.to(tl.int64)
            size = tl.where(goes_deep, waiting, 1)
        over = is_over(token, bad, made, 0, ends_ptr, ignores_ptr, limit_ptr, E, ENDS)
        if chosen:
            goes_on = (over == 0) & (tl.load(held_ptr) == 0)
            tl.store(token_ptr, token)
            tl.store(position_ptr, position + 1)
            tl.store(generated_ptr, made + 1)
            tl.store(stage_ptr, tl.where(goes_on, tl.load(stage_ptr), _IDLE))
            flags += VALID + BAD * bad.to(tl.int64) + ENDED * over.to(tl.int64)
        if current:
            tl.store(level_ptr, tl.where(chosen, 0, 1).to(tl.int64))
        if last:
            tl.store(since_ptr, clock)
            if DEEP:
                tl.store(filled_ptr, mine + 1)
        if here:
            flags += (segment << NEXT) + (size << WAITING)
            if DEEP == 0:
                tl.store(choice_ptr + at, choice)
                tl.store(confidence_ptr + at, sure)
        if row == 0:
            tl.store(clock_ptr, clock + 1)
        tell_row(row, slot, token, depth, flags, made, logprob, sure, epoch_ptr, ints_ptr, floats_ptr, C, COLUMNS, FLOATS)
        if DEEP == 0:
            hidden = tl.arange(0, HIDDEN)
            x = tl.load(x_ptr + row * x_stride + hidden, mask=hidden < M, other=0.0)
            tl.store(ring_ptr + mine % K * M + hidden, x, mask=here & (hidden < M))
