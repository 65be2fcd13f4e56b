"""What fits a device: how many rows train at once, and how many sequences are served at once, for each number of recursions
and each rank (thesis 3.4 and 4.4.3: fewer unique layers leave more room for keys and values).

Training is counted as `fathomlm train --dry-run` counts it (`train/memory.py`): bfloat16 and compiled, with weights,
gradients and AdamW's moments in float32, and what the backward pass keeps. Serving is bfloat16 weights, and for each
sequence the keys and values of a whole context; of a routed model those that its capacities let through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.depth.routing import build_routing
from fathomlm.lab.analyze.isoflop import NAMES, PlannedRows
from fathomlm.lab.tables import Rows, amount
from fathomlm.train.memory import PLANNED, count_memory
from fathomlm.train.recipe import BatchRecipe, DataRecipe, Recipe
from fathomlm.train.student import StudentSpec

MOST_ROWS = 1 << 16
"""Nobody asks for more rows in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """One plan on one device."""

    base: str
    recursions: int
    rank: int
    """Of a LoRA on every linear; 0 without."""
    routed: bool
    layout: str
    parameters: int
    """All of them, embeddings included."""
    train_rows: int
    """Rows of a whole context that one pass can train; 0 where not even one fits."""
    train_bytes: int
    """What that many take, or what one row would take where none fits."""
    weight_bytes: int
    """In bfloat16, to serve."""
    kv_bytes_per_sequence: int
    serve_sequences: int
    """Sequences of a whole context that can be served at once."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(PlannedRows):
    memory: int
    """Bytes of the device, of which nine tenths may be planned for."""
    recursions: tuple[int, ...] = (1, 2, 3)
    ranks: tuple[int, ...] = (0,)
    router: str | None = None
    """Also a row with this router, for each number of recursions above 1 and rank 0."""
    recompute: str = "none"


def capacity_rows(bases: Mapping[str, Architecture], options: CapacityOptions) -> list[CapacityRow]:
    """A row for each base, number of recursions and rank; with one recursion nothing is tied, so it has no rank."""
    rows = []
    for base, architecture in bases.items():
        for recursions in options.recursions:
            ranks: Sequence[int] = options.ranks if recursions > 1 else (0,)
            plan = DepthPlan.build(options.sharing, recursions, architecture.layers, "add")
            for rank in ranks:
                relaxation = build_relaxation(architecture.linears(), "lora", rank) if rank else None
                rows.append(_row(base, architecture, plan, relaxation, rank, options))
            if options.router is not None and recursions > 1 and plan.loops:
                routed = plan.with_routing(build_routing(options.router, recursions)).with_kv(options.kv)
                rows.append(_row(base, architecture, routed, None, 0, options))
    return rows


def _row(
    base: str,
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    rank: int,
    options: CapacityOptions,
) -> CapacityRow:
    room = PLANNED * options.memory
    cost = count(architecture, plan, relaxation=relaxation, context=options.context)
    parts = StudentSpec(architecture=architecture, plan=plan, relaxation=relaxation)
    rows = _most_rows(parts, options, room)
    per_sequence = cost.kv_bytes_per_token * options.context
    return CapacityRow(
        base=base,
        recursions=plan.recursions,
        rank=rank,
        routed=plan.routing is not None,
        layout=cost.layout,
        parameters=cost.parameters,
        train_rows=rows,
        train_bytes=train_bytes(parts, max(rows, 1), options),
        weight_bytes=2 * cost.parameters,
        kv_bytes_per_sequence=per_sequence,
        serve_sequences=max(0, int((room - 2 * cost.parameters) // per_sequence)),
    )


def train_bytes(parts: StudentSpec, rows: int, options: CapacityOptions) -> int:
    """What one device needs to train so many rows in one pass."""
    recipe = Recipe(
        data=DataRecipe(context=options.context),
        batch=BatchRecipe(sequences=rows, micro=rows),
        recompute=options.recompute,  # type: ignore[arg-type]
        precision="bf16",
        compile=True,
    )
    return count_memory(recipe, parts, 0, "none").total


def _most_rows(parts: StudentSpec, options: CapacityOptions, room: float) -> int:
    """The largest number of rows that fits: doubled until it does not, then halved in between."""
    parts.plan.check_recompute(options.recompute)
    if train_bytes(parts, 1, options) > room:
        return 0
    low, high = 1, 2
    while high < MOST_ROWS and train_bytes(parts, high, options) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if train_bytes(parts, middle, options) <= room else (low, middle)
    return low


def capacity_table(rows: Sequence[CapacityRow]) -> Rows:
    table = [["base", "model", "rank", "params", "train", "memory", "KV", "serve"]]
    for row in rows:
        name = "vanilla" if row.recursions == 1 else f"{NAMES['mor' if row.routed else 'recursive']} {row.recursions}"
        table.append(
            [
                row.base,
                name,
                str(row.rank) if row.rank else "-",
                amount(row.parameters),
                f"{row.train_rows:,}" if row.train_rows else "none",
                _size(row.train_bytes),
                _size(row.kv_bytes_per_sequence),
                f"{row.serve_sequences:,}",
            ]
        )
    return table


def _size(number: float) -> str:
    return f"{number / 1e9:.1f}GB" if number >= 1e9 else f"{number / 1e6:.0f}MB"
