"""What lies around the layers of a step that drafts with a draft layer and verifies, for greedy requests: a kernel in front
of the draft layer, one between its levels, one in front of all layers and one behind them.

Drafts are a tree of nodes, of which a chain is one with a single draft behind each. The meaning is the plain torch of
`engine.programs.draft_layer` and `draft_tree`, which the tests hold these kernels against.

Shapes: N rows, S slots and a spare one, J nodes of a tree, P places of a path, M hidden width, D head width.
"""

from __future__ import annotations

from fathomlm.kernels.routed_rows import ENTER, IDLE
from fathomlm.kernels.triton_here import tl, triton

if triton is not None:
    from fathomlm.kernels.best_token import load_few, next_best
    from fathomlm.kernels.triton_here import let_next_start, wait_for_last

    # A kernel sees constants only as such: the columns of a slot's numbers among them.
    _IDLE, _ENTER = tl.constexpr(IDLE), tl.constexpr(ENTER)
    _TOKEN, _POSITION, _STAGE, _GENERATED, _LIMIT = (tl.constexpr(column) for column in (0, 1, 2, 4, 5))
    _EPOCH, _IGNORES, _HELD = (tl.constexpr(column) for column in (6, 8, 9))

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _entry(table_ptr, rank, SIZE: tl.constexpr, PAGES: tl.constexpr):  # type: ignore[no-untyped-def]
        """Where an entry of a slot lies in a plane's pages."""
        page = tl.load(table_ptr + tl.minimum(rank // SIZE, PAGES - 1)).to(tl.int64)
        return page * SIZE + rank % SIZE

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _leave_view(  # type: ignore[no-untyped-def]
        row, there, rank, position, table_ptr, cos_ptr, sin_ptr,
        positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr,
        WIDE: tl.constexpr,
    ):  # fmt: skip
        """What a row looks at, and where it leaves its entry."""
        rank, position = tl.where(there, rank, 0), tl.where(there, position, 0)
        tl.store(positions_ptr + row, position)
        tl.store(mapping_ptr + row, tl.where(there, _entry(table_ptr, rank, SIZE, PAGES), -1))
        tl.store(lengths_ptr + row, tl.where(there, rank + 1, 0).to(tl.int32))
        column = tl.arange(0, WIDE)
        inside = column < D
        tl.store(row_cos_ptr + row * D + column, tl.load(cos_ptr + position * D + column, mask=inside), mask=inside)
        tl.store(row_sin_ptr + row * D + column, tl.load(sin_ptr + position * D + column, mask=inside), mask=inside)
        if COPY:
            page = tl.arange(0, WIDE_PAGES)
            tl.store(rows_ptr + row * PAGES + page, tl.load(table_ptr + page, mask=page < PAGES), mask=page < PAGES)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _normed(x_ptr, weight_ptr, eps, M: tl.constexpr, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
        hidden = tl.arange(0, HIDDEN)
        x = tl.load(x_ptr + hidden, mask=hidden < M, other=0.0)
        wide = x.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / M + eps)
        return tl.load(weight_ptr + hidden, mask=hidden < M, other=0.0) * wide.to(x.dtype)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _pair(  # type: ignore[no-untyped-def]
        row, token, embed_ptr, state_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr, M: tl.constexpr,
        HIDDEN: tl.constexpr,
    ):  # fmt: skip
        """A token's embedding and the state before it side by side, both normed: what the draft layer mixes."""
        hidden, pairs_ptr = tl.arange(0, HIDDEN), pairs_ptr + row * 2 * M
        tl.store(pairs_ptr + hidden, _normed(embed_ptr + token * M, token_norm_ptr, eps, M, HIDDEN), mask=hidden < M)
        tl.store(pairs_ptr + M + hidden, _normed(state_ptr, state_norm_ptr, eps, M, HIDDEN), mask=hidden < M)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def catch_up_kernel(  # type: ignore[no-untyped-def]
        numbers_ptr, capacity_ptr, count_ptr, tokens_ptr, states_ptr, there_ptr, asks_ptr, room_ptr, last_ptr,
        table_ptr, cos_ptr, sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        embed_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, PLACES: tl.constexpr, M: tl.constexpr,
        HIDDEN: tl.constexpr, SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr,
        D: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One token that the draft layer has not run yet; a slot's first one also says who runs and has room for drafts."""
        let_next_start(EARLY)
        row = tl.program_id(0).to(tl.int64)
        slot, place = row // PLACES, row % PLACES
        numbers_ptr += slot * COLUMNS
        position, capacity = tl.load(numbers_ptr + _POSITION), tl.load(capacity_ptr + slot * TABLES)
        live = (tl.load(numbers_ptr + _STAGE) == _ENTER) & (position < capacity)
        count = tl.load(count_ptr + slot)
        if place == 0:
            left = tl.load(numbers_ptr + _LIMIT) - tl.load(numbers_ptr + _GENERATED)
            room = tl.minimum(capacity - position, left) - 1
            tl.store(room_ptr + slot, room)
            tl.store(there_ptr + slot * J, live.to(tl.int32))
            tl.store(asks_ptr + slot, (live & (room > 0)).to(tl.int32))
            tl.store(last_ptr + slot, slot * PLACES + count - 1)
        mine = position - count + 1 + place
        _leave_view(
            row, live & (place < count), mine, mine, table_ptr + slot * TABLES * PAGES, cos_ptr, sin_ptr,
            positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
            SIZE, PAGES, WIDE_PAGES, COPY, D, WIDE,
        )  # fmt: skip
        token = tl.load(tokens_ptr + row)
        _pair(row, token, embed_ptr, states_ptr + row * M, token_norm_ptr, state_norm_ptr, eps, pairs_ptr, M, HIDDEN)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def grow_kernel(  # type: ignore[no-untyped-def]
        few_ptr, at_ptr, sum_ptr, vocab, names_ptr, x_ptr, x_stride, numbers_ptr, capacity_ptr, threshold_ptr, room_ptr,
        asks_ptr, drafts_ptr, there_ptr, sures_ptr, then_ptr, bits_ptr, row_bits_ptr,
        table_ptr, cos_ptr, sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        embed_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr,
        NAMED: tl.constexpr, LEVEL: tl.constexpr, ABOVE: tl.constexpr, FIRST: tl.constexpr, MANY: tl.constexpr,
        WIDTH: tl.constexpr, FOLLOWED: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr, WIDEST: tl.constexpr,
        PARTS: tl.constexpr,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr,
        SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr,
        WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One draft of a level: which token, whether it is there, and what the draft layer reads of it. A level has MANY
        nodes from FIRST on, WIDTH behind each of those from ABOVE on."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        slot, mine = row // MANY, row % MANY
        above = row // WIDTH
        x, place, left, sure = load_few(few_ptr, at_ptr, sum_ptr, above, vocab, CHUNKS, FEW, WIDEST, PARTS)
        choice = tl.zeros((), tl.int32)
        for number in tl.static_range(WIDTH):
            _, first = next_best(x, place, left, vocab)
            left = left & (place != first)
            choice = tl.where(mine % WIDTH == number, first, choice)
        token = choice.to(tl.int64)
        if NAMED:
            token = tl.load(names_ptr + token)
        asks, threshold = tl.load(asks_ptr + above) != 0, tl.load(threshold_ptr + slot)
        drafts = asks & ((threshold == 0.0) | (sure > threshold))
        node = FIRST + mine
        position = tl.load(numbers_ptr + slot * COLUMNS + _POSITION)
        there = drafts & (position + node < tl.load(capacity_ptr + slot * TABLES))
        then = there & (tl.load(room_ptr + slot) > LEVEL + 1)
        tl.store(drafts_ptr + slot * J + node, token)
        tl.store(there_ptr + slot * J + node, there.to(tl.int32))
        if FOLLOWED == 0:
            tl.store(sures_ptr + slot * J + node, 0.0)
        tl.store(sures_ptr + slot * J + ABOVE + mine // WIDTH, tl.where(asks, sure, 0.0), mask=mine % WIDTH == 0)
        if FOLLOWED:
            tl.store(then_ptr + row, then.to(tl.int32))
            tl.store(row_bits_ptr + row, tl.load(bits_ptr + node))
            _leave_view(
                row, then, position + node, position + LEVEL + 1, table_ptr + slot * TABLES * PAGES, cos_ptr, sin_ptr,
                positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
                SIZE, PAGES, WIDE_PAGES, COPY, D, WIDE,
            )  # fmt: skip
            state_ptr = x_ptr + above * x_stride
            _pair(row, token, embed_ptr, state_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr, M, HIDDEN)

    @triton.jit(do_not_specialize=["level", "node_above", "node_here"])  # type: ignore[untyped-decorator,unused-ignore]
    def grow_best_kernel(  # type: ignore[no-untyped-def]
        few_ptr, at_ptr, sum_ptr, vocab, names_ptr, x_ptr, x_stride, numbers_ptr, capacity_ptr, threshold_ptr, room_ptr,
        asks_ptr, drafts_ptr, there_ptr, sures_ptr, likely_ptr, parents_ptr, bits_ptr, then_ptr, row_bits_ptr,
        table_ptr, cos_ptr, sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        embed_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr, level, node_above, node_here,
        NAMED: tl.constexpr, WIDTH: tl.constexpr, BEAM: tl.constexpr, FOLLOWED: tl.constexpr, CHUNKS: tl.constexpr,
        FEW: tl.constexpr, WIDEST: tl.constexpr, PARTS: tl.constexpr,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr,
        SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr,
        WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One of the BEAM likeliest drafts of a level, nodes from `node_here` on, behind the WIDTH nodes from
        `node_above` on."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        slot, mine = row // BEAM, row % BEAM
        above, one, chunk = tl.arange(0, WIDTH), tl.arange(0, WIDEST), tl.arange(0, PARTS)
        row_above = slot * WIDTH + above
        offers = (one < CHUNKS * FEW)[None, :] & (above >= 0)[:, None]
        at = row_above[:, None] * CHUNKS * FEW + one[None, :]
        x = tl.load(few_ptr + at, mask=offers, other=float("-inf"))
        place = tl.load(at_ptr + at, mask=offers, other=vocab)
        left = place < vocab
        best = tl.max(x, 1)
        first = tl.min(tl.where(left & (x == best[:, None]), place, vocab), 1)
        second = tl.max(tl.where(place == first[:, None], float("-inf"), x), 1)
        here = (chunk < CHUNKS)[None, :] & (above >= 0)[:, None]
        most = tl.load(few_ptr + (row_above[:, None] * CHUNKS + chunk[None, :]) * FEW, mask=here, other=float("-inf"))
        sums = tl.load(sum_ptr + row_above[:, None] * CHUNKS + chunk[None, :], mask=here, other=0.0)
        total = tl.sum(sums * tl.exp(most - best[:, None]), 1)
        sure = (1.0 - tl.exp(second - best)) / total
        asks, threshold = tl.load(asks_ptr + row_above) != 0, tl.load(threshold_ptr + slot + above * 0)
        drafts = asks & ((threshold == 0.0) | (sure > threshold))
        tl.store(sures_ptr + slot * J + node_above + above, tl.where(asks, sure, 0.0), mask=above == mine)
        # Nothing above 0 is added: no draft comes before the one above it by rounding, or it would stand behind another.
        logs = x - best[:, None] - tl.maximum(tl.log(total), 0.0)[:, None]
        likely = tl.load(likely_ptr + slot * J + node_above + above)
        likely = tl.where(left & drafts[:, None], likely[:, None] + logs, float("-inf"))
        # The first of equal ones, by the node above and the token.
        number = above[:, None] * vocab + tl.minimum(place, vocab - 1)
        chance, choice = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
        for rank in tl.static_range(BEAM):
            chance_here = tl.max(tl.max(likely, 1), 0)
            found = tl.min(tl.min(tl.where(likely == chance_here, number, WIDTH * vocab - 1), 1), 0)
            likely = tl.where(number == found, float("-inf"), likely)
            chance, choice = tl.where(mine == rank, chance_here, chance), tl.where(mine == rank, found, choice)
        parent, token = choice // vocab, (choice % vocab).to(tl.int64)
        if NAMED:
            token = tl.load(names_ptr + token)
        node = node_here + mine
        position = tl.load(numbers_ptr + slot * COLUMNS + _POSITION)
        there = (chance > float("-inf")) & (position + node < tl.load(capacity_ptr + slot * TABLES))
        then = there & (tl.load(room_ptr + slot) > level + 1)
        bits = (tl.load(bits_ptr + slot * J + node_above + parent) << (node - node_above - parent)) | 1
        tl.store(drafts_ptr + slot * J + node, token)
        tl.store(there_ptr + slot * J + node, there.to(tl.int32))
        tl.store(likely_ptr + slot * J + node, tl.where(there, chance, float("-inf")))
        tl.store(parents_ptr + slot * J + node, node_above + parent)
        tl.store(bits_ptr + slot * J + node, bits)
        if FOLLOWED == 0:
            tl.store(sures_ptr + slot * J + node, 0.0)
        else:
            tl.store(then_ptr + row, then.to(tl.int32))
            tl.store(row_bits_ptr + row, bits)
            _leave_view(
                row, then, position + node, position + level + 1, table_ptr + slot * TABLES * PAGES, cos_ptr, sin_ptr,
                positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
                SIZE, PAGES, WIDE_PAGES, COPY, D, WIDE,
            )  # fmt: skip
            state_ptr = x_ptr + (slot * WIDTH + parent) * x_stride
            _pair(row, token, embed_ptr, state_ptr, token_norm_ptr, state_norm_ptr, eps, pairs_ptr, M, HIDDEN)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def best_nodes_kernel(  # type: ignore[no-untyped-def]
        numbers_ptr, drafts_ptr, there_ptr, sures_ptr, likely_ptr, parents_ptr, row_bits_ptr,
        row_drafts_ptr, row_there_ptr, row_sures_ptr, row_parents_ptr, row_depths_ptr,
        table_ptr, cos_ptr, sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        embed_ptr, x_ptr,
        ROWS: tl.constexpr, NODES: tl.constexpr, DEPTH: tl.constexpr, BEAM: tl.constexpr,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr,
        SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr,
        WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One of the likeliest nodes, in front of all layers: row 0 is the last settled token, and the others follow in the
        order of their levels."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        slot, mine = row // ROWS, (row % ROWS).to(tl.int32)
        node, other = tl.arange(0, NODES), tl.arange(0, NODES)
        is_draft = (node > 0) & (node < J)
        there = is_draft & (tl.load(there_ptr + slot * J + node, mask=is_draft, other=0) != 0)
        likely = tl.load(likely_ptr + slot * J + node, mask=there, other=float("-inf"))
        others = tl.load(likely_ptr + slot * J + other, mask=(other > 0) & (other < J), other=float("-inf"))
        before = others[None, :] > likely[:, None]
        before = before | ((others[None, :] == likely[:, None]) & (other[None, :] < node[:, None]))
        before = before & ((other > 0) & (other < J))[None, :]
        taken = there & (tl.sum(before.to(tl.int32), 1) < ROWS - 1)
        number = tl.where(node == 0, 0, tl.where(taken, tl.cumsum(taken.to(tl.int32), 0), -1))
        parents = tl.load(parents_ptr + slot * J + node, mask=there, other=0)
        at = tl.max(tl.where(number == mine, node, -1), 0)
        live = tl.load(there_ptr + slot * J) != 0
        is_there = live & (at >= 0)
        at = tl.maximum(at, 0)
        # Up to the last settled token: what a row sees of those in front of it.
        bits, above, above_number = (tl.zeros((), tl.int64) - 1) << (mine + 1), at, mine
        parent_number = tl.zeros((), tl.int32)
        for step in tl.static_range(DEPTH + 1):
            bits = bits | (tl.full((), 1, tl.int64) << (mine - above_number))
            above = tl.max(tl.where(node == above, parents, 0), 0)
            above_number = tl.max(tl.where(node == above, number, 0), 0)
            if step == 0:
                parent_number = above_number
        depth = tl.where(at > 0, (at + BEAM - 1) // BEAM, 0)
        position = tl.load(numbers_ptr + slot * COLUMNS + _POSITION)
        token = tl.load(numbers_ptr + slot * COLUMNS + _TOKEN)
        if at > 0:
            token = tl.load(drafts_ptr + slot * J + at)
        tl.store(row_bits_ptr + row, bits)
        tl.store(row_drafts_ptr + row, token)
        tl.store(row_there_ptr + row, is_there.to(tl.int32))
        tl.store(row_sures_ptr + row, tl.load(sures_ptr + slot * J + at))
        tl.store(row_parents_ptr + row, parent_number)
        tl.store(row_depths_ptr + row, depth.to(tl.int64))
        _leave_view(
            row, is_there, position + mine, position + depth, table_ptr + slot * TABLES * PAGES, cos_ptr, sin_ptr,
            positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
            SIZE, PAGES, WIDE_PAGES, COPY, D, WIDE,
        )  # fmt: skip
        hidden = tl.arange(0, HIDDEN)
        x = tl.load(embed_ptr + token * M + hidden, mask=hidden < M, other=0.0)
        tl.store(x_ptr + row * M + hidden, x, mask=hidden < M)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def nodes_kernel(  # type: ignore[no-untyped-def]
        numbers_ptr, drafts_ptr, there_ptr, depths_ptr, bits_ptr, row_bits_ptr,
        table_ptr, cos_ptr, sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
        embed_ptr, x_ptr,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, M: tl.constexpr, HIDDEN: tl.constexpr,
        SIZE: tl.constexpr, PAGES: tl.constexpr, WIDE_PAGES: tl.constexpr, COPY: tl.constexpr, D: tl.constexpr,
        WIDE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One node in front of all layers."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        row = tl.program_id(0).to(tl.int64)
        slot, node = row // J, row % J
        numbers_ptr += slot * COLUMNS
        position, there = tl.load(numbers_ptr + _POSITION), tl.load(there_ptr + row) != 0
        tl.store(row_bits_ptr + row, tl.load(bits_ptr + node))
        _leave_view(
            row, there, position + node, position + tl.load(depths_ptr + node), table_ptr + slot * TABLES * PAGES, cos_ptr,
            sin_ptr, positions_ptr, mapping_ptr, lengths_ptr, rows_ptr, row_cos_ptr, row_sin_ptr,
            SIZE, PAGES, WIDE_PAGES, COPY, D, WIDE,
        )  # fmt: skip
        token = tl.load(numbers_ptr + _TOKEN)
        if node > 0:
            token = tl.load(drafts_ptr + row)
        hidden = tl.arange(0, HIDDEN)
        x = tl.load(embed_ptr + token * M + hidden, mask=hidden < M, other=0.0)
        tl.store(x_ptr + row * M + hidden, x, mask=hidden < M)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def settle_drafts_kernel(  # type: ignore[no-untyped-def]
        chosen_ptr, logprobs_ptr, bad_ptr, numbers_ptr, drafts_ptr, there_ptr, sures_ptr, parents_ptr, parents_stride,
        ends_ptr, x_ptr, x_stride, count_ptr, tokens_ptr, states_ptr, clock_ptr, table_ptr, source_ptr, target_ptr, ints_ptr,
        floats_ptr, full,
        COLUMNS: tl.constexpr, TABLES: tl.constexpr, J: tl.constexpr, NODES: tl.constexpr, PLACES: tl.constexpr,
        M: tl.constexpr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, PAGES: tl.constexpr, E: tl.constexpr,
        ENDS: tl.constexpr, INTS: tl.constexpr, FLOATS: tl.constexpr, VALID: tl.constexpr, BAD: tl.constexpr,
        ENDED: tl.constexpr, DRAFTED: tl.constexpr, DRAFT_DEPTH: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One slot: along the drafts that the full model chose, what becomes its next tokens, and which entries move."""
        let_next_start(EARLY)
        wait_for_last(EARLY)
        slot = tl.program_id(0).to(tl.int64)
        numbers_ptr += slot * COLUMNS
        table_ptr += slot * TABLES * PAGES
        position, made = tl.load(numbers_ptr + _POSITION), tl.load(numbers_ptr + _GENERATED)
        limit, epoch = tl.load(numbers_ptr + _LIMIT), tl.load(numbers_ptr + _EPOCH)
        heeds, held = tl.load(numbers_ptr + _IGNORES) == 0, tl.load(numbers_ptr + _HELD) > 0
        any_, end, hidden = tl.arange(0, NODES), tl.arange(0, ENDS), tl.arange(0, HIDDEN)
        ends = tl.load(ends_ptr + end, mask=end < E, other=-1)
        first_row = slot * J
        live = tl.load(there_ptr + first_row) != 0
        drafted_ = (any_ > 0) & (any_ < J)
        drafted_ = drafted_ & (tl.load(there_ptr + first_row + any_, mask=drafted_, other=0) != 0)
        drafts = tl.load(drafts_ptr + first_row + any_, mask=drafted_, other=-1)
        parents = tl.load(parents_ptr + slot * parents_stride + any_, mask=drafted_, other=-1)
        on_path, open_ = live, live
        node, settled = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        last, over_last = tl.zeros((), tl.int64), live & False
        for place in tl.static_range(PLACES):
            row, out = first_row + node, slot * PLACES + place
            bad = tl.load(bad_ptr + row) != 0
            token = tl.load(chosen_ptr + row)
            there = drafted_ & (parents == node)
            drafted = on_path & (tl.max(there.to(tl.int32), 0) > 0)
            which = tl.min(tl.where(there & (drafts == token) & (bad == 0), any_, NODES), 0)
            kept = on_path & (which < NODES)
            met = (tl.max((ends == token).to(tl.int32), 0) > 0) & heeds
            over = met | (made + place + 1 >= limit) | bad
            emits = on_path & open_
            flags = VALID + BAD * bad.to(tl.int64) + ENDED * over.to(tl.int64) + DRAFTED * drafted.to(tl.int64)
            tl.store(ints_ptr + out * INTS, slot)
            tl.store(ints_ptr + out * INTS + 1, epoch)
            tl.store(ints_ptr + out * INTS + 2, token)
            tl.store(ints_ptr + out * INTS + 3, tl.where(kept, DRAFT_DEPTH, full).to(tl.int64))
            tl.store(ints_ptr + out * INTS + 4, tl.where(emits, flags, 0))
            tl.store(ints_ptr + out * INTS + 5, made + place)
            tl.store(floats_ptr + out * FLOATS, tl.load(logprobs_ptr + row))
            tl.store(floats_ptr + out * FLOATS + 1, tl.load(sures_ptr + row))
            tl.store(tokens_ptr + out, token, mask=on_path)
            x = tl.load(x_ptr + row * x_stride + hidden, mask=on_path & (hidden < M), other=0.0)
            tl.store(states_ptr + out * M + hidden, x, mask=on_path & (hidden < M))
            moves = on_path & (node != place)
            source = _entry(table_ptr, tl.where(moves, position + node, 0), SIZE, PAGES)
            target = _entry(table_ptr, tl.where(moves, position + place, 0), SIZE, PAGES)
            tl.store(source_ptr + out, tl.where(moves, source, -1))
            tl.store(target_ptr + out, tl.where(moves, target, -1))
            settled += emits.to(tl.int64)
            last, over_last = tl.where(emits, token, last), tl.where(emits, over, over_last)
            open_ = open_ & kept & (over == 0)
            on_path, node = kept, tl.where(kept, which, node)
        tl.store(numbers_ptr + _TOKEN, last, mask=live)
        tl.store(numbers_ptr + _POSITION, position + settled)
        tl.store(numbers_ptr + _GENERATED, made + settled)
        tl.store(numbers_ptr + _STAGE, tl.zeros((), tl.int64) + _IDLE, mask=live & (over_last | held))
        tl.store(count_ptr + slot, settled, mask=live)
        if slot == 0:
            tl.store(clock_ptr, tl.load(clock_ptr) + 1)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def move_entries_kernel(  # type: ignore[no-untyped-def]
        k_ptr, v_ptr, source_ptr, target_ptr, entries, PLACES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
    ):
        """Entries of one slot in one plane. In order: what a place overwrites is the source of an earlier one, if any."""
        slot, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
        column = tl.arange(0, WIDE)
        for place in tl.static_range(1, PLACES):
            target = tl.load(target_ptr + slot * PLACES + place)
            source = tl.maximum(tl.load(source_ptr + slot * PLACES + place), 0)
            moves = (target >= 0) & (column < WIDTH)
            to, of = (plane * entries + target) * WIDTH + column, (plane * entries + source) * WIDTH + column
            tl.store(k_ptr + to, tl.load(k_ptr + of, mask=moves), mask=moves)
            tl.store(v_ptr + to, tl.load(v_ptr + of, mask=moves), mask=moves)
