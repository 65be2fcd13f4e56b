"""The kernel of `persistent_rows.py`: all layers of a decode step of one sequence, by programs that all run at once.

An experiment, compiled ahead of time for sm_90 but not run yet. It is not in the engine.

A kernel for each product spends most of its time between the end of the last one and its own first product. Here P
programs, one to a multiprocessor, stay: each has some rows of every weight and hands on what it computed. Weights do
not depend on that, so the next layer's rows are always on their way to shared memory: as soon as a phase has read its
rows, those of the next layer are asked for, and memory never waits for an exchange.

Phases of a layer: norm and QKV, rotated, keys and values stored; attention, a head or a part of its entries to a
program; its output product onto the stream; norm, gate and up; down onto the stream.

How programs hand each other numbers: a grid barrier costs a fence, an atomic and a second trip to read what the others
wrote. Here a number brings its own flag, as in NCCL's low-latency protocol: a word of 32 bits is a bfloat16 above a tag
of 16 bits, and whoever needs a row of words looks at them until all carry the tag of this launch. A word is written
whole, so no fence is needed, and it is seen as soon as it is there. Each place is written once in a launch, and the
next launch has another tag, so nobody overwrites what another still reads. Waiting is bounded: a program that gives up
leaves a mark instead of holding the device forever.

Written in Gluon, Triton's language with explicit layouts (Triton 3.6, where it is called experimental): Triton itself
would load words anew for every layout that it needs them in.

Shapes: R rows of a weight at a time (a unit), in pieces of KB entries; M hidden width, I inner width, H query heads,
G key-value heads, D head width, A = H x D.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

TAGS = 1 << 16
LIMIT = 1 << 14
"""Looks at a word before a program gives up: some ten milliseconds, where microseconds are usual. A launch waits some two
hundred times, so one in which nothing arrives ends after seconds, and those behind it do nothing."""
POLLS = (1, 2, 4, 8, 16)
"""Words to a thread."""


def poll(words: int) -> tuple[str, str]:
    """Instructions that look at so many words of a thread until all carry the tag, and their operands: the words, their
    places, the tag and the mark. Each look goes past the first-level cache."""
    loads = "\n".join(f"ld.relaxed.gpu.global.u32 ${i}, [${words + i}];" for i in range(words))
    tests = ("setp.ne.u32 p, t, 0;", *("setp.ne.or.u32 p, t, 0, p;",) * (words - 1))
    compares = "\n".join(
        f"xor.b32 t, ${i}, ${2 * words};\nand.b32 t, t, {TAGS - 1};\n{test}" for i, test in enumerate(tests)
    )
    text = f"""{{
        .reg .pred p, q;
        .reg .u32 n, t;
        mov.u32 n, {LIMIT};
        SPIN:
        {loads}
        {compares}
        @!p bra DONE;
        sub.u32 n, n, 1;
        setp.gt.s32 q, n, 0;
        @q bra SPIN;
        mov.u32 n, 1;
        st.global.u32 [${3 * words}], n;
        DONE:
    }}"""
    return text, ",".join(["=&r"] * words + ["l"] * words + ["r"] * words + ["l"] * words)


POLL_1, OPERANDS_1 = map(gl.constexpr, poll(1))
POLL_2, OPERANDS_2 = map(gl.constexpr, poll(2))
POLL_4, OPERANDS_4 = map(gl.constexpr, poll(4))
POLL_8, OPERANDS_8 = map(gl.constexpr, poll(8))
POLL_16, OPERANDS_16 = map(gl.constexpr, poll(16))
SEND = gl.constexpr("{\n.reg .pred p;\nsetp.ne.s32 p, $3, 0;\n@p st.relaxed.gpu.global.u32 [$1], $2;\nmov.u32 $0, 0;\n}")


@gluon.jit
def word_value(word):
    """The number in a word, in float32."""
    return (word & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def wait_for_words(at, tag, gave_up_ptr, EACH: gl.constexpr):
    """The words at `at`, once all of them carry the tag; EACH words to a thread."""
    tags = at.to(gl.int64).to(gl.int32) * 0 + tag
    mark = gave_up_ptr + tags * 0
    if EACH == 1:
        return gl.inline_asm_elementwise(POLL_1, OPERANDS_1, [at, tags, mark], dtype=gl.int32, is_pure=False, pack=1)
    elif EACH == 2:  # noqa: RET505
        return gl.inline_asm_elementwise(POLL_2, OPERANDS_2, [at, tags, mark], dtype=gl.int32, is_pure=False, pack=2)
    elif EACH == 4:
        return gl.inline_asm_elementwise(POLL_4, OPERANDS_4, [at, tags, mark], dtype=gl.int32, is_pure=False, pack=4)
    elif EACH == 8:
        return gl.inline_asm_elementwise(POLL_8, OPERANDS_8, [at, tags, mark], dtype=gl.int32, is_pure=False, pack=8)
    else:
        gl.static_assert(EACH == 16)
        return gl.inline_asm_elementwise(POLL_16, OPERANDS_16, [at, tags, mark], dtype=gl.int32, is_pure=False, pack=16)


@gluon.jit
def receive(ptr, numbers, tag, gave_up_ptr, K: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """K numbers to shared memory as soon as all are there, zeros behind them up to N."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    k = gl.arange(0, N, flat)
    word = wait_for_words(ptr + gl.minimum(k, K - 1), tag, gave_up_ptr, max(1, N // (32 * WARPS)))
    numbers.slice(0, N).store(gl.where(k < K, word_value(word), 0.0))


@gluon.jit
def send(ptr, value, here, tag):
    """A number each, rounded to bfloat16, from the thread that has it."""
    word = (value.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32) << 16) | tag
    there = word * 0 + here.to(gl.int32)
    gl.inline_asm_elementwise(SEND, "=r,l,r,r", [ptr, word, there], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_twice(ptr, value, here, tag, BEHIND: gl.constexpr):
    """The same in two words, the second BEHIND the first: what rounding took away."""
    send(ptr, value, here, tag)
    send(ptr + BEHIND, value - value.to(gl.bfloat16).to(gl.float32), here, tag)


@gluon.jit
def _room(N: gl.constexpr, R: gl.constexpr, KB: gl.constexpr, tile: gl.constexpr):
    """Pieces in shared memory, empty: a row's last piece may be shorter. Each is a buffer of its own, because the
    compiler puts a barrier between two uses of one."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    nothing = gl.zeros([R, KB], gl.bfloat16, tile)
    pieces = ()
    for _ in gl.static_range(N):
        pieces = pieces + (gl.allocate_shared_memory(gl.bfloat16, [R, KB], layout, nothing),)  # noqa: RUF005
    return pieces


@gluon.jit
def _fetch(pieces, FIRST: gl.constexpr, ptr, rows, here, K: gl.constexpr, KB: gl.constexpr, tile: gl.constexpr):
    """Rows of a weight on their way to shared memory. Each thread fetches what it will read itself."""
    for c in gl.static_range((K + KB - 1) // KB):
        k = c * KB + gl.arange(0, KB, gl.SliceLayout(0, tile))
        at = ptr + (gl.expand_dims(rows, 1) * K + gl.expand_dims(k, 0))
        async_copy.async_copy_global_to_shared(pieces[FIRST + c], at, mask=(gl.expand_dims(k, 0) < K) & here)


@gluon.jit
def _fetch_units(
    pieces, ptr, pid, here, UNITS: gl.constexpr, P: gl.constexpr, R: gl.constexpr, K: gl.constexpr, KB: gl.constexpr,
    SECOND: gl.constexpr, PAIRED: gl.constexpr, tile: gl.constexpr,
):  # fmt: skip
    """A program's units of a weight, one group of copies. With SECOND > 0 a unit is pairs of rows so far apart; PAIRED:
    such pairs fill blocks of 2 x SECOND rows, as the halves of heads do."""
    n: gl.constexpr = (K + KB - 1) // KB
    each: gl.constexpr = (UNITS + P - 1) // P
    for i in gl.static_range(each):
        unit = gl.minimum(pid + i * P, UNITS - 1)
        there = (pid + i * P < UNITS) & here
        rows = unit * R + gl.arange(0, R, gl.SliceLayout(1, tile))
        if PAIRED:
            rows += rows // SECOND * SECOND
        if SECOND > 0:
            _fetch(pieces, 2 * i * n, ptr, rows, there, K, KB, tile)
            _fetch(pieces, (2 * i + 1) * n, ptr, rows + SECOND, there, K, KB, tile)
        else:
            _fetch(pieces, i * n, ptr, rows, there, K, KB, tile)
    async_copy.commit_group()


@gluon.jit
def _row(numbers, K: gl.constexpr, KB: gl.constexpr, tile: gl.constexpr):
    """What was received, as every row of a unit is multiplied with it."""
    xs = ()
    for c in gl.static_range((K + KB - 1) // KB):
        xs = xs + (gl.expand_dims(numbers.slice(c * KB, KB).load(gl.SliceLayout(0, tile)), 0),)  # noqa: RUF005
    return xs


@gluon.jit
def _product(pieces, FIRST: gl.constexpr, xs, N: gl.constexpr, tile: gl.constexpr):
    total = pieces[FIRST].load(tile).to(gl.float32) * xs[0]
    for c in gl.static_range(1, N):
        total += pieces[FIRST + c].load(tile).to(gl.float32) * xs[c]
    return gl.sum(total, 1)


@gluon.jit
def _inverse_rms(xs, eps, N: gl.constexpr, K: gl.constexpr):
    squares = xs[0] * xs[0]
    for c in gl.static_range(1, N):
        squares += xs[c] * xs[c]
    return gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / K + eps)


@gluon.jit
def _turn_and_send(
    low, high, unit, iota, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, slot, slots, tag,
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    half: gl.constexpr = D // 2
    head, pair = unit // (half // R), unit % (half // R) * R + iota
    if head < H + G:
        cos_low, cos_high = gl.load(cos_ptr + pair).to(gl.float32), gl.load(cos_ptr + pair + half).to(gl.float32)
        sin_low, sin_high = gl.load(sin_ptr + pair).to(gl.float32), gl.load(sin_ptr + pair + half).to(gl.float32)
        turned = low * cos_low + high * sin_low
        high = high * cos_high + low * sin_high
        low = turned
    send(q_ptr + head * D + pair, low, pair >= 0, tag)
    send(q_ptr + head * D + pair + half, high, pair >= 0, tag)
    if head >= H:
        inside = (pair >= 0) & (slot >= 0) & (slot < slots)
        place = (slot * G + (head - H) % G) * D + pair
        if head < H + G:
            gl.store(k_ptr + place, low.to(gl.bfloat16), mask=inside)
            gl.store(k_ptr + place + half, high.to(gl.bfloat16), mask=inside)
        else:
            gl.store(v_ptr + place, low.to(gl.bfloat16), mask=inside)
            gl.store(v_ptr + place + half, high.to(gl.bfloat16), mask=inside)


@gluon.jit
def _entries(
    table_ptr, k_ptr, v_ptr, at, end, group, pages, columns,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Keys, values, and 0 where an entry counts: NaN for one in a page that is not there."""
    entry = at + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    seen = entry < end
    page = gl.load(table_ptr + gl.minimum(entry // PAGE, columns - 1), mask=seen, other=0).to(gl.int64)
    wrong = (page < 0) | (page >= pages)
    page = gl.minimum(gl.maximum(page, 0), pages - 1)
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    place = gl.expand_dims(((page * PAGE + entry % PAGE) * G + group) * D, 1) + gl.expand_dims(d, 0)
    k = gl.load(k_ptr + place, mask=gl.expand_dims(seen, 1), other=0.0)
    v = gl.load(v_ptr + place, mask=gl.expand_dims(seen, 1), other=0.0)
    return k, v, gl.where(wrong, float("nan"), gl.where(seen, 0.0, float("-inf")))


@gluon.jit
def _attend(q, k, v, counts, most, weight, mixed, scale):
    """One head over some entries, added to what was found before."""
    scores = gl.sum(k.to(gl.float32) * gl.expand_dims(q, 0), 1) * scale + counts
    higher = gl.maximum(most, gl.max(scores, 0))
    shrink, p = gl.exp2(most - higher), gl.exp2(scores - higher)
    mixed = mixed * shrink + gl.sum(gl.expand_dims(p, 1) * v.to(gl.float32), 0)
    return higher, weight * shrink + gl.sum(p, 0), mixed


@gluon.jit
def _combine(
    parts_ptr, numbers, tag, gave_up_ptr, working, most, weight, mixed,
    D: gl.constexpr, SPLITS: gl.constexpr, ROOM: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """What a head's first program found and what the others tell: 4 D words each (`_tell`)."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    n = gl.arange(0, ROOM, flat)
    part = gl.where((n < 4 * D) | (n >= working * 4 * D), 1, n // (4 * D))
    words = wait_for_words(parts_ptr + part * (4 * D) + n % (4 * D), tag, gave_up_ptr, max(1, ROOM // (32 * WARPS)))
    numbers.slice(0, ROOM).store(word_value(words))
    other: gl.constexpr = gl.SliceLayout(0, layout)
    d = gl.arange(0, D, other)
    for i in gl.static_range(1, SPLITS):
        if i < working:
            found = numbers.slice(i * 4 * D, D).load(other) + numbers.slice(i * 4 * D + D, D).load(other)
            extent = numbers.slice(i * 4 * D + 2 * D, D).load(other) + numbers.slice(i * 4 * D + 3 * D, D).load(other)
            its_most = gl.sum(gl.where(d == 0, extent, 0.0), 0)
            its_weight = gl.sum(gl.where(d == D // 2, extent, 0.0), 0)
            higher = gl.maximum(most, its_most)
            mine, its = gl.exp2(most - higher), gl.exp2(its_most - higher)
            weight = weight * mine + its_weight * its
            mixed = mixed * mine + found * its
            most = higher
    return weight, mixed


@gluon.jit(do_not_specialize=["layers", "slots", "pages", "columns"])
def persistent_rows_kernel(
    x_ptr, w_ptr, kc_ptr, vc_ptr, offsets_ptr, cos_ptr, sin_ptr, words_ptr, sync_ptr, slot_ptr, table_ptr, length_ptr,
    layers, slots, pages, columns, scale, eps,
    M: gl.constexpr, I: gl.constexpr,  # noqa: E741
    H: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    P: gl.constexpr, R: gl.constexpr, KB: gl.constexpr, WARPS: gl.constexpr, BLOCK: gl.constexpr, SPLITS: gl.constexpr,
    WIDE_A: gl.constexpr, WIDE_M: gl.constexpr, WIDE_I: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """offsets (layers, 6): where each layer's qkv, o, gate and up, down, keys and values begin, in entries from `w_ptr`,
    `kc_ptr` and `vc_ptr`. words (layers + 1, ...): what programs send, places of its own for each layer. sync: the last
    tag, how many programs have left, whether a wait was given up (it stays). WIDE_*: powers of two that hold a row; ROOM:
    one that holds what a head's parts tell."""
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [R, WARPS // R], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    half: gl.constexpr = D // 2
    A: gl.constexpr = H * D
    nm: gl.constexpr = (M + KB - 1) // KB
    na: gl.constexpr = (A + KB - 1) // KB
    ni: gl.constexpr = (I + KB - 1) // KB
    qkv_units: gl.constexpr = (H + 2 * G) * (half // R)
    row_units: gl.constexpr = M // R
    both_units: gl.constexpr = I // R
    qkv_each: gl.constexpr = (qkv_units + P - 1) // P
    row_each: gl.constexpr = (row_units + P - 1) // P
    both_each: gl.constexpr = (both_units + P - 1) // P
    pid = gl.program_id(0)
    gave_up_ptr = sync_ptr + 2
    tag = (gl.load(sync_ptr) + 1) & 65535
    layers = gl.where(gl.load(gave_up_ptr) != 0, 0, layers)  # behind a launch that gave up: nothing
    slot = gl.load(slot_ptr).to(gl.int64)
    length = gl.load(length_ptr).to(gl.int32)
    iota = gl.arange(0, R, gl.SliceLayout(1, tile))

    # The newest entry comes as words; the others are there, and divided among a head's programs by whole tiles.
    newest = gl.maximum(length - 1, 0)
    share = gl.maximum((newest + BLOCK * SPLITS - 1) // (BLOCK * SPLITS), 1) * BLOCK
    working = gl.maximum((newest + share - 1) // share, 1)
    head, part = (P - 1 - pid) // SPLITS, (P - 1 - pid) % SPLITS  # from the back: the first have more units
    group = head // (H // G)
    start, end = part * share, gl.minimum(part * share + share, newest)

    numbers = gl.allocate_shared_memory(
        gl.float32, [max(WIDE_A, WIDE_M, WIDE_I, ROOM)], gl.SwizzledSharedLayout(4, 1, 1, [0])
    )
    wq = _room(qkv_each * 2 * nm, R, KB, tile)
    wo = _room(row_each * na, R, KB, tile)
    wb = _room(both_each * 2 * nm, R, KB, tile)
    wd = _room(row_each * ni, R, KB, tile)
    gl.thread_barrier()
    for unit in range(pid, row_units, P):
        rows = unit * R + iota
        send(words_ptr + rows, gl.load(x_ptr + rows).to(gl.float32), rows >= 0, tag)

    # Four groups of copies are on their way or there: whoever needs the oldest waits until three are left.
    first = layers > 0
    _fetch_units(wq, w_ptr + gl.multiple_of(gl.load(offsets_ptr), 64), pid, first, qkv_units, P, R, M, KB, half, True, tile)
    _fetch_units(
        wo, w_ptr + gl.multiple_of(gl.load(offsets_ptr + 1), 64), pid, first, row_units, P, R, A, KB, 0, False, tile
    )
    _fetch_units(
        wb, w_ptr + gl.multiple_of(gl.load(offsets_ptr + 2), 64), pid, first, both_units, P, R, M, KB, I, False, tile
    )
    _fetch_units(
        wd, w_ptr + gl.multiple_of(gl.load(offsets_ptr + 3), 64), pid, first, row_units, P, R, I, KB, 0, False, tile
    )

    for layer in range(layers):
        stream_ptr = words_ptr + layer * ((H + 2 * G) * D + A + 2 * M + I + H * SPLITS * 4 * D)
        q_ptr = stream_ptr + M
        mixed_ptr = q_ptr + (H + 2 * G) * D
        after_ptr = mixed_ptr + A
        inner_ptr = after_ptr + M
        parts_ptr = inner_ptr + I + head * (SPLITS * 4 * D)
        out_ptr = inner_ptr + I + H * SPLITS * 4 * D
        k_ptr = kc_ptr + gl.multiple_of(gl.load(offsets_ptr + layer * 6 + 4), 64)
        v_ptr = vc_ptr + gl.multiple_of(gl.load(offsets_ptr + layer * 6 + 5), 64)
        more = layer + 1 < layers
        at_next = offsets_ptr + gl.where(more, layer + 1, layer) * 6
        next_qkv = w_ptr + gl.multiple_of(gl.load(at_next), 64)
        next_o = w_ptr + gl.multiple_of(gl.load(at_next + 1), 64)
        next_both = w_ptr + gl.multiple_of(gl.load(at_next + 2), 64)
        next_down = w_ptr + gl.multiple_of(gl.load(at_next + 3), 64)

        if pid < qkv_units:
            receive(stream_ptr, numbers, tag, gave_up_ptr, M, WIDE_M, WARPS)
        async_copy.wait_group(3)
        if pid < qkv_units:
            x_qkv = _row(numbers, M, KB, tile)
            s_qkv = _inverse_rms(x_qkv, eps, nm, M)
            for i in gl.static_range(qkv_each):
                low = _product(wq, 2 * i * nm, x_qkv, nm, tile) * s_qkv
                high = _product(wq, (2 * i + 1) * nm, x_qkv, nm, tile) * s_qkv
                if pid + i * P < qkv_units:
                    _turn_and_send(
                        low, high, pid + i * P, iota, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, slot, slots, tag, H, G, D, R
                    )
        _fetch_units(wq, next_qkv, pid, more, qkv_units, P, R, M, KB, half, True, tile)

        if (head < H) & (part < working):
            k, v, counts = _entries(table_ptr, k_ptr, v_ptr, start, end, group, pages, columns, G, D, PAGE, BLOCK, layout)
            n = gl.arange(0, 4 * D, flat)
            whose = gl.where(n < D, head, gl.where(n < 2 * D, H + group, H + G + group))
            own = wait_for_words(q_ptr + whose * D + n % D, tag, gave_up_ptr, max(1, 4 * D // (32 * WARPS)))
            numbers.slice(0, 4 * D).store(word_value(own))
            q = numbers.slice(0, D).load(gl.SliceLayout(0, layout))
            k_new = numbers.slice(D, D).load(gl.SliceLayout(0, layout))
            v_new = numbers.slice(2 * D, D).load(gl.SliceLayout(0, layout))
            most = gl.where(part == 0, gl.sum(q * k_new, 0) * scale, float("-inf"))
            weight = gl.where(part == 0, 1.0, 0.0)
            mixed = gl.where(part == 0, v_new, 0.0)
            most, weight, mixed = _attend(q, k, v, counts, most, weight, mixed, scale)
            for at in range(start + BLOCK, end, BLOCK):
                k, v, counts = _entries(table_ptr, k_ptr, v_ptr, at, end, group, pages, columns, G, D, PAGE, BLOCK, layout)
                most, weight, mixed = _attend(q, k, v, counts, most, weight, mixed, scale)
            d = gl.arange(0, D, gl.SliceLayout(0, layout))
            if part > 0:
                send_twice(parts_ptr + part * (4 * D) + d, mixed, d >= 0, tag, D)
                extent = gl.where(d < half, most, weight)
                send_twice(parts_ptr + part * (4 * D) + 2 * D + d, extent, d >= 0, tag, D)
            else:
                if working > 1:
                    weight, mixed = _combine(
                        parts_ptr, numbers, tag, gave_up_ptr, working, most, weight, mixed, D, SPLITS, ROOM, WARPS, layout
                    )
                mixed = gl.where(length > columns * PAGE, float("nan"), mixed / weight)
                send(mixed_ptr + head * D + d, mixed, d >= 0, tag)

        if pid < row_units:
            receive(mixed_ptr, numbers, tag, gave_up_ptr, A, WIDE_A, WARPS)
        async_copy.wait_group(3)
        if pid < row_units:
            x_o = _row(numbers, A, KB, tile)
            for i in gl.static_range(row_each):
                rows_o = gl.minimum(pid + i * P, row_units - 1) * R + iota
                stream = word_value(gl.load(stream_ptr + rows_o, cache_modifier=".cg"))
                send(after_ptr + rows_o, _product(wo, i * na, x_o, na, tile) + stream, pid + i * P < row_units, tag)
        _fetch_units(wo, next_o, pid, more, row_units, P, R, A, KB, 0, False, tile)

        if pid < both_units:
            receive(after_ptr, numbers, tag, gave_up_ptr, M, WIDE_M, WARPS)
        async_copy.wait_group(3)
        if pid < both_units:
            x_both = _row(numbers, M, KB, tile)
            s_both = _inverse_rms(x_both, eps, nm, M)
            for i in gl.static_range(both_each):
                rows_both = gl.minimum(pid + i * P, both_units - 1) * R + iota
                gate = _product(wb, 2 * i * nm, x_both, nm, tile) * s_both
                up = _product(wb, (2 * i + 1) * nm, x_both, nm, tile) * s_both
                send(inner_ptr + rows_both, gate / (1.0 + gl.exp(-gate)) * up, pid + i * P < both_units, tag)
        _fetch_units(wb, next_both, pid, more, both_units, P, R, M, KB, I, False, tile)

        if pid < row_units:
            receive(inner_ptr, numbers, tag, gave_up_ptr, I, WIDE_I, WARPS)
        async_copy.wait_group(3)
        if pid < row_units:
            x_down = _row(numbers, I, KB, tile)
            gave_up = gl.load(gave_up_ptr, volatile=True)
            for i in gl.static_range(row_each):
                rows_down = gl.minimum(pid + i * P, row_units - 1) * R + iota
                after = word_value(gl.load(after_ptr + rows_down, cache_modifier=".cg"))
                total = _product(wd, i * ni, x_down, ni, tile) + after
                send(out_ptr + rows_down, total, pid + i * P < row_units, tag)
                if not more:
                    total = gl.where(gave_up != 0, float("nan"), total)
                    inside = (rows_down >= 0) & (pid + i * P < row_units)
                    gl.store(x_ptr + rows_down, total.to(gl.bfloat16), mask=inside)
        _fetch_units(wd, next_down, pid, more, row_units, P, R, I, KB, 0, False, tile)

    async_copy.wait_group(0)
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr + 1, 1, sem="acq_rel") == P - 1:  # the last to leave: the next launch has another tag
        gl.store(sync_ptr, tag)
        gl.store(sync_ptr + 1, 0)
