"""What lies between passes of routed rows, a kernel each: who runs next and what they see, and where they go from there.

A pass of the shared block is a few layers, and the many small operations between two passes, each a launch of its own, would
cost a third of them. Each kernel here is one launch. Their meaning is the plain torch of `engine.programs.routed_queue`,
which the tests hold them against. A slot's numbers are columns of one table; the kernels take pointers to columns, C apart.

Shapes: S slots, the last of which is spare, N rows, T tables of a slot, P pages of a table, M hidden width, D head width,
R recursions.
"""

from __future__ import annotations

from fathomlm.kernels.triton_here import tl, triton

IDLE, ENTER, CORE = -1, 0, 1
"""Stages of a slot: nothing to do; its token is to be run from the start; it waits for its first recursion, for its second
with one more, and so on; behind the last one it is through."""
NEVER = 2**62
"""Since when a slot waits that does not."""

if triton is not None:
    # A kernel sees constants only as such.
    _IDLE, _ENTER, _CORE, _NEVER = tl.constexpr(IDLE), tl.constexpr(ENTER), tl.constexpr(CORE), tl.constexpr(NEVER)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def see_table(  # type: ignore[no-untyped-def]
        row, slot, table, rank, position, live, writes,
        tables_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr,
        T: tl.constexpr, P: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    ):  # fmt: skip
        """A row's table of pages, the place of its entry, how many it sees, and its angles (`rows.reach`)."""
        tables_ptr += (slot * T + table) * P
        page = tl.load(tables_ptr + tl.minimum(rank // PAGE, P - 1)).to(tl.int64)
        tl.store(slots_ptr + row, tl.where(live & writes, page * PAGE + rank % PAGE, -1))
        tl.store(lengths_ptr + row, tl.where(live, rank + 1, 0).to(tl.int32))
        number = tl.arange(0, PAGES)
        tl.store(seen_ptr + row * P + number, tl.load(tables_ptr + number, mask=number < P, other=0), mask=number < P)
        position = tl.where(live, position, 0)
        tl.store(positions_ptr + row, position)
        column = tl.arange(0, WIDE)
        here = column < D
        tl.store(row_cos_ptr + row * D + column, tl.load(cos_ptr + position * D + column, mask=here), mask=here)
        tl.store(row_sin_ptr + row * D + column, tl.load(sin_ptr + position * D + column, mask=here), mask=here)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _take(  # type: ignore[no-untyped-def]
        row, slot, taken, stage_ptr, position_ptr, entries_ptr, recursion_tables_ptr, x_ptr, depth_ptr,
        rows_ptr, recursion_ptr, live_ptr, row_x_ptr, row_depth_ptr,
        tables_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr,
        R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, P: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
        PAGE: tl.constexpr, PAGES: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr,
        OWN: tl.constexpr, TURN: tl.constexpr, CODA: tl.constexpr,
    ):  # fmt: skip
        """One slot becomes one row, or the spare slot a row that stands for nothing."""
        stage = tl.load(stage_ptr + slot * C)
        recursion = tl.minimum(tl.maximum(stage - _CORE, 0), R - 1)
        position = tl.load(position_ptr + slot * C)
        if TURN:
            table, live, writes = recursion * 0, taken & (stage == _CORE + R), taken
            tl.store(row_depth_ptr + row, tl.load(depth_ptr + slot))
        else:
            table, live = tl.load(recursion_tables_ptr + recursion), taken
            writes = taken if OWN else taken & (recursion == 0)
            tl.store(recursion_ptr + row, recursion)
        rank = tl.load(entries_ptr + slot * T + table) if OWN else position
        if TURN and not CODA:
            rank = rank * 0
        tl.store(rows_ptr + row, slot)
        tl.store(live_ptr + row, live)
        see_table(
            row, slot, table, rank, position, live, writes, tables_ptr, cos_ptr, sin_ptr,
            positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr, T, P, D, PAGE, PAGES, WIDE,
        )  # fmt: skip
        column = tl.arange(0, HIDDEN)
        here = column < M
        tl.store(row_x_ptr + row * M + column, tl.load(x_ptr + slot * M + column, mask=here), mask=here)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _waiting_since(  # type: ignore[no-untyped-def]
        slot, there, stage_ptr, since_ptr, position_ptr, entries_ptr, room_ptr, recursion_tables_ptr,
        R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, OWN: tl.constexpr, TURN: tl.constexpr,
    ):  # fmt: skip
        """Since when some slots wait for this pass."""
        stage = tl.load(stage_ptr + slot * C, mask=there, other=_IDLE)
        since = tl.load(since_ptr + slot * C, mask=there, other=0)
        table = slot * 0
        if not TURN:
            table = tl.load(recursion_tables_ptr + tl.minimum(tl.maximum(stage - _CORE, 0), R - 1))
        if OWN:
            rank = tl.load(entries_ptr + slot * T + table, mask=there, other=0)
        else:
            rank = tl.load(position_ptr + slot * C, mask=there, other=0)
        fits = rank < tl.load(room_ptr + slot * T + table, mask=there, other=0)
        if TURN:
            waits = there & ((stage == _CORE + R) | ((stage == _ENTER) & fits))
        else:
            waits = there & (stage >= _CORE) & (stage < _CORE + R) & fits
        return tl.where(waits, since, tl.full((), _NEVER, tl.int64))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def waiting_kernel(  # type: ignore[no-untyped-def]
        stage_ptr, since_ptr, position_ptr, entries_ptr, room_ptr, recursion_tables_ptr, waiting_ptr, spare,
        BLOCK: tl.constexpr, R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, OWN: tl.constexpr, TURN: tl.constexpr,
    ):  # fmt: skip
        """`_waiting_since` of every slot, side by side, for a `pick_kernel` of many: each of its programs looks at all of
        them, and the numbers of a slot take a hundred bytes."""
        slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = slot < spare
        found = _waiting_since(
            slot, there, stage_ptr, since_ptr, position_ptr, entries_ptr, room_ptr, recursion_tables_ptr, R, C, T, OWN, TURN
        )
        tl.store(waiting_ptr + slot, found, mask=there)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def pick_kernel(  # type: ignore[no-untyped-def]
        stage_ptr, since_ptr, position_ptr, entries_ptr, room_ptr, clock_ptr, recursion_tables_ptr, x_ptr, depth_ptr,
        rows_ptr, recursion_ptr, live_ptr, row_x_ptr, row_depth_ptr,
        tables_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr,
        waiting_ptr, spare, rows,
        SLOTS: tl.constexpr, AHEAD: tl.constexpr,
        R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, P: tl.constexpr, M: tl.constexpr,
        D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr,
        OWN: tl.constexpr, TURN: tl.constexpr, CODA: tl.constexpr,
    ):  # fmt: skip
        """The slots that have waited longest, and their rows. A program for each slot counts who comes before it; if few
        enough do, it fills its own row. One for each row that nobody fills fills that with nothing. AHEAD: `waiting_kernel`
        has run."""
        me = tl.program_id(0).to(tl.int64)
        if me == 0:
            tl.store(clock_ptr, tl.load(clock_ptr) + 1)
        slot = tl.arange(0, SLOTS)
        there = slot < spare
        if AHEAD:
            since = tl.load(waiting_ptr + slot, mask=there, other=_NEVER)
        else:
            since = _waiting_since(
                slot, there, stage_ptr, since_ptr, position_ptr, entries_ptr, room_ptr, recursion_tables_ptr, R, C, T, OWN,
                TURN,
            )  # fmt: skip
        waits = since < _NEVER
        many = tl.sum(waits.to(tl.int32), 0)
        since_me = tl.sum(tl.where(slot == me, since, 0), 0)
        waits_me = tl.sum((waits & (slot == me)).to(tl.int32), 0) > 0
        earlier = waits & ((since < since_me) | ((since == since_me) & (slot < me)))
        place = tl.sum(earlier.to(tl.int32), 0)
        if waits_me & (place < rows):
            _take(
                place, me, me >= 0, stage_ptr, position_ptr, entries_ptr, recursion_tables_ptr, x_ptr, depth_ptr,
                rows_ptr, recursion_ptr, live_ptr, row_x_ptr, row_depth_ptr, tables_ptr, cos_ptr, sin_ptr,
                positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr,
                R, C, T, P, M, D, PAGE, PAGES, HIDDEN, WIDE, OWN, TURN, CODA,
            )  # fmt: skip
        if (me >= many) & (me < rows):
            _take(
                me, me * 0 + spare, me < 0, stage_ptr, position_ptr, entries_ptr, recursion_tables_ptr, x_ptr, depth_ptr,
                rows_ptr, recursion_ptr, live_ptr, row_x_ptr, row_depth_ptr, tables_ptr, cos_ptr, sin_ptr,
                positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr,
                R, C, T, P, M, D, PAGE, PAGES, HIDDEN, WIDE, OWN, TURN, CODA,
            )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def enter_kernel(  # type: ignore[no-untyped-def]
        token_ptr, stage_ptr, position_ptr, entries_ptr, room_ptr, rows_ptr, live_ptr, tokens_ptr, enters_ptr,
        tables_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr, spare,
        C: tl.constexpr, T: tl.constexpr, P: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
        WIDE: tl.constexpr, OWN: tl.constexpr, CODA: tl.constexpr,
    ):  # fmt: skip
        """After the choice: the next token of each row, if there is one and it has room. `live` were through."""
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(rows_ptr + row)
        stage = tl.load(stage_ptr + slot * C)
        position = tl.load(position_ptr + slot * C)
        if OWN:
            rank = tl.load(entries_ptr + slot * T)
            if CODA:
                rank += tl.load(live_ptr + row).to(tl.int64)
                if slot != spare:
                    tl.store(entries_ptr + slot * T, rank)
        else:
            rank = position
        goes = (slot != spare) & (stage != _IDLE)
        enters = goes & (rank < tl.load(room_ptr + slot * T))
        if slot != spare:
            tl.store(stage_ptr + slot * C, tl.where(goes, tl.where(enters, _CORE, _ENTER), _IDLE).to(tl.int64))
        tl.store(tokens_ptr + row, tl.load(token_ptr + slot * C))
        tl.store(enters_ptr + row, enters)
        see_table(
            row, slot, slot * 0, rank, position, enters, enters, tables_ptr, cos_ptr, sin_ptr,
            positions_ptr, slots_ptr, lengths_ptr, seen_ptr, row_cos_ptr, row_sin_ptr, T, P, D, PAGE, PAGES, WIDE,
        )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _drawn(number, recursion):  # type: ignore[no-untyped-def]
        """`routers.draw`: its arithmetic modulo 2^32 is that of 32-bit numbers."""
        mixed = (number * 2654435761 + (recursion + 1) * 40503 + 12345).to(tl.uint32)
        mixed = (mixed ^ (mixed >> 15)) * tl.full((), 2246822519, tl.uint32)
        mixed = (mixed ^ (mixed >> 13)) * tl.full((), 3266489917, tl.uint32)
        return (mixed ^ (mixed >> 16)).to(tl.float64) / 4294967296.0

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def move_kernel(  # type: ignore[no-untyped-def]
        rows_ptr, recursion_ptr, live_ptr, positions_ptr, out_ptr, main_ptr, judge_ptr, selective_ptr, least_ptr,
        x_ptr, logits_ptr, depth_ptr, entries_ptr, recursion_tables_ptr, stage_ptr, since_ptr, token_ptr, epoch_ptr,
        deepest_ptr, clock_ptr, alpha, bias,
        R: tl.constexpr, C: tl.constexpr, T: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr, LOGITS: tl.constexpr,
        OWN: tl.constexpr, ARRIVES: tl.constexpr, SCORE: tl.constexpr, CHANGE: tl.constexpr, CHOICE: tl.constexpr,
    ):  # fmt: skip
        """Rows behind a pass, or (ARRIVES) in front of the first one: the stream as routers weigh it goes back to its slot,
        and the next router says whether it goes on. CHANGE: x + g (f(x) - x) in place of x + g f(x). CHOICE: by the router,
        by a draw of token and position ("random"), or of position and sequence ("forced")."""
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(rows_ptr + row)
        if tl.load(live_ptr + row):
            column = tl.arange(0, HIDDEN)
            here = column < M
            new = tl.load(out_ptr + row * M + column, mask=here, other=0.0).to(tl.float32)
            if ARRIVES:
                follows = slot * 0
            else:
                recursion = tl.load(recursion_ptr + row)
                follows = recursion + 1
                old = tl.load(x_ptr + slot * M + column, mask=here, other=0.0).to(tl.float32)
                logit_in = tl.load(logits_ptr + slot * R + recursion)
                score = logit_in
                if SCORE == "sigmoid":
                    score = tl.sigmoid(logit_in)
                if SCORE == "tanh":
                    score = 2 * tl.sigmoid(2 * logit_in) - 1
                gate = alpha * score
                new = ((1 - gate) if CHANGE else 1.0) * old + gate * new
                tl.store(depth_ptr + slot, follows)
                if OWN:
                    count_ptr = entries_ptr + slot * T + tl.load(recursion_tables_ptr + recursion)
                    tl.store(count_ptr, tl.load(count_ptr) + 1)
            kept = new.to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + slot * M + column, kept, mask=here)
            next_recursion = tl.minimum(follows, R - 1)
            wide = kept.to(tl.float32)
            logit = tl.sum(wide * tl.load(main_ptr + next_recursion * M + column, mask=here, other=0.0), 0)
            if ARRIVES:
                number = tl.arange(0, LOGITS)
                tl.store(logits_ptr + slot * R + number, tl.where(number == 0, logit, 0.0), mask=number < R)
                stage = follows + _CORE
            else:
                tl.store(logits_ptr + slot * R + next_recursion, logit)
                if CHOICE == "router":
                    judged = tl.sum(wide * tl.load(judge_ptr + next_recursion * M + column, mask=here, other=0.0), 0)
                    goes = (judged + bias >= 0) | (tl.load(selective_ptr + next_recursion) == 0)
                else:
                    number = tl.load(positions_ptr + row)
                    if CHOICE == "forced":
                        number += 7919 * tl.load(epoch_ptr + slot * C)
                    else:
                        number += 1000003 * tl.load(token_ptr + slot * C)  # routers.draw_key
                    goes = _drawn(number, next_recursion) >= tl.load(least_ptr + next_recursion)
                    if CHOICE == "random":
                        goes = goes | (tl.load(selective_ptr + next_recursion) == 0)
                goes = goes & (next_recursion < tl.load(deepest_ptr + slot * C)) & (follows < R)
                stage = tl.where(goes, _CORE + follows, _CORE + R)
            tl.store(stage_ptr + slot * C, stage.to(tl.int64))
            tl.store(since_ptr + slot * C, tl.load(clock_ptr))
