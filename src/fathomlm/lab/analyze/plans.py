"""How many tokens a budget buys: plain, recursive and routed models of the same base, side by side (thesis 4.4.2 "IsoFLOP
Analysis", its tables `tab_mor:main_results` and `tab_mor:scaling_laws`).

FLOPs are counted as the thesis counts them (`depth/cost.py`): forward only, without embedding and head. A recursive model
costs what its base costs, but for layers that are added where the recursions do not divide them; a routed one costs less,
so the same budget buys more tokens.

The thesis' printed budgets take k and v to be as wide as q, which three of its four bases do not have. `wide_kv` counts so
too, which brings the absolute numbers of tokens to the printed ones; ratios between rows hardly move with recursion-wise
caching.

What fits a device: how many rows train at once, and how many sequences are served at once, for each number of recursions
and each rank (thesis 3.4 and 4.4.3: fewer unique layers leave more room for keys and values).

Training is counted as `fathomlm train --dry-run` counts it (`train/memory.py`): bfloat16 and compiled, with weights,
gradients and AdamW's moments in float32, and what the backward pass keeps. Serving is bfloat16 weights, and for each
sequence the keys and values of a whole context; of a routed model those that its capacities let through.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathomlm.checkpoints.resolve import architecture_of
from fathomlm.cli.display import Rows, print_table
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import Cost, count
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.depth.routing import build_routing
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.options import Plan
from fathomlm.lab.analyze.runs_report import check_out
from fathomlm.lab.analyze.scaling import draw_scaling_fits, fit_runs, fit_table, read_finished
from fathomlm.lab.common import amount
from fathomlm.lab.drawing import check_matplotlib
from fathomlm.train.memory import PLANNED, count_memory
from fathomlm.train.recipe import BatchRecipe, DataRecipe, Recipe
from fathomlm.train.student import StudentSpec

NAMES = {"vanilla": "vanilla", "recursive": "rec.", "mor": "MoR"}
"""The kinds of models, and how tables call them."""
ISO_RECURSIONS = (3,)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsoRow:
    """One model under one budget."""

    base: str
    kind: str
    """vanilla, recursive or mor."""
    recursions: int
    layout: str
    """Unique layers, "32" or "1+10+1"."""
    unrolled_layers: int
    non_embedding_parameters: int
    budget: float
    """Forward FLOPs."""
    flops_per_token: int
    tokens: float
    """What the budget buys."""
    relative_tokens: float
    """Against the vanilla model of the same base."""
    flops_at_equal_tokens: float
    """What as many tokens cost as the budget buys for the vanilla model."""


def iso_rows(bases: Mapping[str, Architecture], budgets: Sequence[float], options: Plan) -> list[IsoRow]:
    """For each base and budget the vanilla row, and a recursive and a routed one for each number of recursions."""
    if min(options.recursions or ISO_RECURSIONS) < 2:
        raise OptionError(f"recursions must be >= 2, got {', '.join(map(str, options.recursions or ()))}")
    for budget in budgets:
        if not budget > 0:
            raise OptionError(f"a budget must be > 0 FLOPs, got {budget:g}")
    rows = []
    for base, architecture in bases.items():
        widened = dataclasses.replace(architecture, kv_heads=architecture.heads) if options.wide_kv else architecture
        models = list(zip(_costs(architecture, options), _costs(widened, options), strict=True))
        plain = models[0][1][2].forward_flops_per_token
        for budget, ((kind, recursions, cost), (_, _, counted)) in itertools.product(budgets, models):
            flops = counted.forward_flops_per_token
            rows.append(
                IsoRow(
                    base=base,
                    kind=kind,
                    recursions=recursions,
                    layout=cost.layout,
                    unrolled_layers=cost.unrolled_layers,
                    non_embedding_parameters=cost.non_embedding_parameters,
                    budget=budget,
                    flops_per_token=flops,
                    tokens=budget / flops,
                    relative_tokens=plain / flops,
                    flops_at_equal_tokens=budget * flops / plain,
                )
            )
    return rows


def _costs(architecture: Architecture, options: Plan) -> list[tuple[str, int, Cost]]:
    context = options.context
    found = [("vanilla", 1, count(architecture, DepthPlan.vanilla(architecture.layers), context=context))]
    for recursions in options.recursions or ISO_RECURSIONS:
        plan = DepthPlan.build(options.sharing, recursions, architecture.layers, "add")
        found.append(("recursive", recursions, count(architecture, plan, context=context)))
        if plan.loops:  # a router sits between passes of one block
            routed = count(architecture, plan, router=options.router, kv=options.kv, context=context)
            found.append(("mor", recursions, routed))
    return found


def iso_table(rows: Sequence[IsoRow]) -> Rows:
    """The thesis' columns: what a budget buys, and (equal) what as many tokens cost as the vanilla model gets."""
    header = ["base", "model", "layers", "params", "EFLOPs", "tokens", "ratio", "equal"]
    return [header, *(_iso_row(row) for row in rows)]


def _iso_row(row: IsoRow) -> list[str]:
    return [
        row.base,
        NAMES[row.kind] if row.kind == "vanilla" else f"{NAMES[row.kind]} {row.recursions}",
        row.layout,
        amount(row.non_embedding_parameters),
        f"{row.budget / 1e18:.4g}",
        amount(row.tokens),
        f"{row.relative_tokens:.3f}",
        f"{row.flops_at_equal_tokens / 1e18:.4g}",
    ]


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


def capacity_rows(bases: Mapping[str, Architecture], options: Plan) -> list[CapacityRow]:
    """A row for each base, number of recursions and rank; with one recursion nothing is tied, so it has no rank."""
    rows = []
    for base, architecture in bases.items():
        for recursions in options.recursions or (1, 2, 3):
            ranks = (options.ranks or (0, 64, 256)) if recursions > 1 else (0,)
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
    options: Plan,
) -> CapacityRow:
    room = PLANNED * (options.gpu_memory or 0)
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


def train_bytes(parts: StudentSpec, rows: int, options: Plan) -> int:
    """What one device needs to train so many rows in one pass."""
    recipe = Recipe(
        data=DataRecipe(context=options.context),
        batch=BatchRecipe(sequences=rows, micro=rows),
        recompute=options.recompute,
        precision="bf16",
        compile=True,
    )
    return count_memory(recipe, parts, 0, "none").total


def _most_rows(parts: StudentSpec, options: Plan, room: float) -> int:
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


def run(options: Plan) -> int:
    record: dict[str, Any] = {}
    tables: list[tuple[str, Rows]] = []
    bases = _bases(options.models)
    if options.budget:
        _plan_tokens(options, bases, record, tables)
    if options.gpu_memory is not None:
        _plan_memory(options, bases, record, tables)
    if options.runs:
        _plan_sizes(options, record, tables)

    def show(record: dict[str, Any]) -> None:
        for title, table in tables:
            print_table(table, title)
        if options.out is not None:
            print(f"wrote {options.out}")

    return options.answer(record, show)


def _bases(models: Sequence[str]) -> dict[str, Architecture]:
    found = {}
    for name in filter(None, models):
        architecture = architecture_of(name)[0]
        if architecture.cross:
            raise OptionError(f"{name} is an encoder-decoder model; plans are for decoder-only ones")
        found[name] = architecture
    if models and not found:
        raise OptionError("--models names no model")
    return found


def _plan_tokens(
    options: Plan, bases: dict[str, Architecture], record: dict[str, Any], tables: list[tuple[str, Rows]]
) -> None:
    rows = iso_rows(bases, options.budget, options)
    record["isoflop"] = [dataclasses.asdict(row) for row in rows]
    title = (
        "tokens under a budget. params: without embeddings. ratio: tokens against the vanilla row. equal: EFLOPs for as "
        "many tokens as that row has"
    )
    tables.append((title, iso_table(rows)))


def _plan_memory(
    options: Plan, bases: dict[str, Architecture], record: dict[str, Any], tables: list[tuple[str, Rows]]
) -> None:
    rows, memory = capacity_rows(bases, options), options.gpu_memory or 0
    found = [dataclasses.asdict(row) for row in rows]
    record["memory"] = {"bytes": memory, "context": options.context, "rows": found}
    title = (
        f"what fits {memory / 1e9:.4g} GB at {options.context:,} tokens per sequence. train: micro-batch size, "
        "and its memory. serve: concurrent sequences, each with its KV cache beside the weights"
    )
    tables.append((title, capacity_table(rows)))


def _plan_sizes(options: Plan, record: dict[str, Any], tables: list[tuple[str, Rows]]) -> None:
    kind = None
    if options.out is not None:
        kind = check_out(options.out)
        check_matplotlib()
    runs = read_finished(options.runs)
    fits = fit_runs(runs)
    if kind is not None and options.out is not None:
        draw_scaling_fits(fits, options.out, kind)
    record["runs"] = [dataclasses.asdict(run) for run in runs]
    record["fits"] = [dataclasses.asdict(fit) for fit in fits]
    record["out"] = None if options.out is None else str(options.out)
    tables.append(("the best size for each budget, by a quadratic in ln(parameters)", fit_table(fits)))
