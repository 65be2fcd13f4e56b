"""How large an engine is: its pools, sequences, chunks and bursts, and what a model and its options must agree on for that.

All of it is known before anything runs on the device; the simulator and the benchmarks ask for it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fathomlm.decode.exiting import BEAM, MOST_DRAFTS, SERVED_MODES, Exiting
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.burst_length import BURST, LONGER
from fathomlm.engine.captured_passes import ONE_AT_A_TIME
from fathomlm.engine.core_passes import CorePasses, passes_for
from fathomlm.engine.heap import collect_heap
from fathomlm.engine.kv_pages import entry_dtype, pool_page_bytes
from fathomlm.engine.layout import Kind, Layout, build_layout, pool_shares
from fathomlm.engine.options import EngineOptions
from fathomlm.errors import OptionError, UnsupportedModel
from fathomlm.kernels.paged_write import check_float8
from fathomlm.model.decoder import Decoder

DRAFTS = 4
"""Passes that draft in a decode step, to one that verifies."""
CHUNK, GPU_CHUNK = 256, 8192
"""Prompt tokens of one pass: a GPU needs thousands to be kept busy, and a CPU should not keep others waiting."""
LEAST_ROWS = 32
"""With fewer rows a decode step is hardly faster on a GPU."""
CPU_ROOM = 1 << 30
"""Bytes of a KV cache on a CPU where nobody says, unless a quarter of what all sequences may need is more."""
OVERBOOKED = 2
"""Sequences for each token of a forward pass, where tokens differ in depth."""
STAYS_FULL = 1.5
"""Of these as many as keep forward passes full, although nobody takes the places of those that end in a burst."""
RELIEVED = 32
"""Where they do not, on a GPU: tokens of a forward pass for each further sequence, which takes the row of one that ends.
With outputs of 256 tokens one of 256 ends in a decode step, and the host hears of it some five steps later, more where
bursts have become longer."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the scheduler has to know."""

    tables: tuple[int, ...]
    pool_pages: tuple[int, ...]
    max_sequences: int
    max_length: int
    prefill_chunk: int
    lookahead: int
    burst: int
    lag: int
    max_source: int = 0
    spare: int = 0
    """Entries of drafts beside those that a chain of them has (`Sequence.spare`)."""
    longest_burst: int = 0
    """As far as bursts follow what the host can do; as `burst` where they do not."""
    in_a_step: int = 1
    """Tokens of a sequence in a decode step, at most."""

    def lookahead_for(self, steps: int) -> int:
        """`lookahead` where bursts have so many steps."""
        return self.lookahead + (self.lag + 1) * (steps - self.burst) * self.in_a_step


def row_counts(kind: Kind, batch_size: int) -> tuple[int, ...]:
    """Rows of decode steps for few sequences, rising: a quarter and a half of the batch. Each takes another capture, of
    routed models one for each number of passes, so that they have a quarter only."""
    parts = {"whole": (4, 2), "routed": (4,)}.get(kind, ())
    return tuple(batch_size // part for part in parts if batch_size // part >= LEAST_ROWS)


def exits_of(plan: DepthPlan, exiting: Exiting | None) -> tuple[int, ...]:
    """The indices of the steps after which tokens exit."""
    if exiting is None or exiting.mode == "full":
        return ()
    if exiting.mode not in SERVED_MODES:
        raise OptionError(f"the engine exits by {', '.join(SERVED_MODES)} decoding, not '{exiting.mode}'")
    if exiting.refine is not None:
        raise OptionError("the engine does not support refinement; use fathomlm generate")
    return exiting.exits(plan)


def check_forced(plan: DepthPlan, layout: Layout, options: EngineOptions, exits: int, drafts: bool) -> None:
    """Depths that are drawn must be depths that the model has: a figure without them would be labelled wrongly."""
    if options.forced_depths is not None:
        if layout.kind != "routed":
            raise OptionError("forced_depths requires a model with a router; use forced_exits for one with an exit")
        if len(options.forced_depths) != plan.recursions:
            raise OptionError(
                f"forced_depths names {len(options.forced_depths)} parts, but the model has {plan.recursions} recursions"
            )
    if options.forced_exits is not None and (not exits or drafts or layout.kind == "whole"):
        raise OptionError("forced_exits requires an engine with exits that tokens may pass, and without drafts")


def prefix_entries(decoder: Decoder) -> int:
    relaxation = decoder.relaxation
    return 0 if relaxation is None else relaxation.method.extra_keys(relaxation)


def check_entries(options: EngineOptions, device: torch.device) -> None:
    if options.kv_dtype != "fp8" or device.type != "cuda":
        return
    check_float8(device, "kv_dtype 'fp8'")


def sizes_of(decoder: Decoder, layout: Layout, options: EngineOptions, gpu: bool, exiting: Exiting | None) -> Sizes:
    a, plan = decoder.architecture, decoder.plan
    behind = exiting is not None and exiting.drafts_behind(plan)
    sequences = options.max_sequences or usual_sequences(layout, options.batch_size, gpu, behind)
    if behind and sequences != options.batch_size:
        raise OptionError(f"max_sequences must be batch_size with a draft layer, got {sequences} and {options.batch_size}")
    if layout.kind == "whole" and sequences < options.batch_size:
        raise OptionError(
            "max_sequences must be at least batch_size where every token runs every layer, "
            f"got {sequences} and {options.batch_size}"
        )
    max_length = a.context if options.max_length is None else options.max_length
    max_source = (a.context if options.max_source is None else options.max_source) if a.cross else 0
    if max_length > a.context and a.positions == "rotary":
        raise OptionError(f"max_length {max_length} is more than the model's context of {a.context}")
    size = options.page_size
    dtype = entry_dtype(options.kv_dtype, decoder.embed.weight.dtype)
    sizes = pool_page_bytes(a, layout, size, dtype)
    tables = [layout.tables.count(pool) for pool in range(len(layout.planes))]
    full = [many * -(-max_length // size) for many in tables]
    full[0] += -(-max_source // size)
    if options.memory is None:
        every = sequences * sum(pages * one for pages, one in zip(full, sizes, strict=True))
        kept = min(1.0, max(1 / 4, room(decoder.embed.weight.device) / every))
        pool_pages = tuple(
            max(pages + tables_, math.ceil(kept * sequences * pages)) for pages, tables_ in zip(full, tables, strict=True)
        )
    else:
        share = pool_shares(plan, layout)
        whole = sum(one * part for one, part in zip(sizes, share, strict=True))
        pool_pages = tuple(int(options.memory * part / whole) for part in share)
        if min(pool_pages) < 2:
            raise OptionError(f"memory must hold two pages of {max(sizes):,} bytes, got {options.memory:,}")
    burst = options.burst or (BURST if gpu else 1)
    lag = options.lag if options.lag is not None else (1 if gpu else 0)
    in_a_step, waiting, spare = 1, 0, 0
    if layout.kind == "routed":
        in_a_step = len(core_passes(plan, options))
    elif exiting is not None and behind:
        in_a_step = 1 + drafts_ahead(exiting)
        spare = waiting = exiting.tree_nodes - in_a_step if exiting.tree_nodes else 0
    elif exiting is not None and layout.kind == "exits":
        in_a_step = shallow_passes(options, exiting) + len(exiting.exits(plan))
        waiting = (exiting.max_stack or 1) if exiting.mode == "speculative" else 0
    chunk = options.prefill_chunk or (GPU_CHUNK if gpu else CHUNK)
    lookahead = (lag + 1) * burst * in_a_step + 1 + waiting
    longest = burst * longer_bursts(options, gpu, drafts=behind or (exiting is not None and exiting.mode == "speculative"))
    return Sizes(
        layout.tables, pool_pages, sequences, max_length, chunk, lookahead, burst, lag, max_source, spare, longest, in_a_step
    )  # fmt: skip


def longer_bursts(options: EngineOptions, gpu: bool, *, drafts: bool) -> int:
    """How many times as long bursts may become. Drafts have their own way to choose a burst's steps, a batch of one has a
    burst as one piece of work, and with no lag the device always waits."""
    asked = options.burst is not None or options.lag == 0
    return LONGER if gpu and options.batch_size > 1 and not (asked or drafts) else 1


def usual_sequences(layout: Layout, batch_size: int, gpu: bool, behind: bool = False) -> int:
    """How many sequences are on the device where nobody says. `behind`: with a draft layer."""
    if behind:
        return batch_size
    if layout.kind == "whole":
        return batch_size + (batch_size // RELIEVED if gpu else 0)
    return OVERBOOKED * batch_size


def room(device: torch.device) -> int:
    """Bytes that a KV cache may take where nobody says: half of what is free on a GPU. What an engine before this one had,
    of a model that was unloaded, is free as well, once torch has let go of it."""
    if device.type != "cuda":
        return CPU_ROOM
    collect_heap()
    with ONE_AT_A_TIME:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] // 2


def shallow_passes(options: EngineOptions, exiting: Exiting) -> int:
    """exits: passes in front of the first exit in a decode step."""
    usual = min(DRAFTS, exiting.max_stack or 1) if exiting.mode == "speculative" else 1
    return options.shallows or usual


def drafts_ahead(exiting: Exiting) -> int:
    """Drafts of a draft layer, one behind the other: a pass that verifies settles one token more."""
    if exiting.tree_depth:
        return exiting.tree_depth
    return max(1, (exiting.max_stack or 1) - 1)


def core_passes(plan: DepthPlan, options: EngineOptions) -> tuple[int, ...]:
    """routed: passes of the block in front of each turn of a decode step, as the routers were trained for."""
    assert plan.routing is not None
    return (options.cores,) if options.cores else passes_for(sum(options.forced_depths or plan.routing.capacity))


def followed_passes(plan: DepthPlan, options: EngineOptions) -> CorePasses | None:
    """routed: passes that follow the measured depth, unless they are given or depths are known."""
    assert plan.routing is not None
    if options.cores or options.forced_depths:
        return None
    return CorePasses(sum(plan.routing.capacity), len(core_passes(plan, options)), plan.recursions)


def layout_for(decoder: Decoder, exiting: Exiting | None = None) -> Layout:
    """How the model's entries are laid out; `UnsupportedModel` where the engine does not run it."""
    if decoder.architecture.experts and decoder.embed.weight.is_cuda:
        raise UnsupportedModel("the engine runs mixtures of experts on a CPU only; use fathomlm generate")
    own = () if exiting is None else exiting.own_steps(decoder.plan)
    if exiting is not None and exiting.tree_depth:
        _check_tree(decoder.architecture, exiting.tree_depth)
    exits, static = exits_of(decoder.plan, exiting), exiting is not None and exiting.mode == "static"
    return build_layout(decoder.architecture, decoder.plan, decoder.relaxation, exits, own, static)


def settled_exiting(exiting: Exiting, decoder: Decoder, sequences: int) -> Exiting:
    """With the defaults for so many sequences at a time, where the model has room for a tree of drafts."""
    limited, windows = decoder.exit_vocab, [window for window in decoder.architecture.windows if window is not None]
    among = decoder.architecture.vocab if limited is None else len(limited.vocab_W)
    room = among >= BEAM and min(windows, default=MOST_DRAFTS) > MOST_DRAFTS // BEAM
    return exiting.for_plan(decoder.plan, decoder.embed.weight.device.type, sequences if room else None)


def _check_tree(architecture: Architecture, levels: int) -> None:
    """A row's window ends among what is settled, where entries are positions; not inside a tree."""
    window = min((window for window in architecture.windows if window is not None), default=None)
    if window is not None and window <= levels:
        raise UnsupportedModel(
            f"the engine requires attention windows of more positions than a tree of drafts has levels, got {window} for "
            f"{levels}; use fathomlm generate"
        )


def ample_memory(decoder: Decoder, options: EngineOptions, tokens: int, exiting: Exiting | None = None) -> int:
    """Bytes of a KV cache that never preempts: for every sequence `tokens` tokens, each of which goes as deep as it can, and
    one more page per table."""
    layout = layout_for(decoder, exiting)
    gpu = decoder.embed.weight.is_cuda
    slots = options.max_sequences or usual_sequences(layout, options.batch_size, gpu)
    dtype, size = entry_dtype(options.kv_dtype, decoder.embed.weight.dtype), options.page_size
    pages = slots * (-(-tokens // size) + 1)
    sizes = pool_page_bytes(decoder.architecture, layout, size, dtype)
    shares = pool_shares(decoder.plan, layout)
    # Memory is divided among pools by the trained depths: the pool with the least decides.
    times = max(layout.tables.count(pool) / share for pool, share in enumerate(shares))
    return math.ceil(pages * times * sum(one * share for one, share in zip(sizes, shares, strict=True)))
