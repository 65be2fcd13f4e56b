"""`fathomlm plan`: what a budget buys, which size it is best spent on, and what fits a device. No weights are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import JsonOptions
from fathomlm.cli.first import check_shape
from fathomlm.depth.options import PlanOptions
from fathomlm.errors import OptionError
from fathomlm.lab.analyze.isoflop import IsoOptions, PlannedRows
from fathomlm.lab.cli.bench_setup import GpuOptions
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option
from fathomlm.sizes import parse_amount
from fathomlm.train.recipe import Recipe, Recompute

if TYPE_CHECKING:
    from fathomlm.depth import Architecture


@dataclass(frozen=True, kw_only=True)
class Plan(JsonOptions, PlannedRows):
    """Three plans, any of them together. --budget: how many tokens it buys for the plain, the recursive and the routed (MoR)
    model of each base. --runs: which model size each budget was best spent on, from finished runs. --gpu-memory: which
    recursions, ranks and batch sizes fit. FLOPs are the forward pass without embedding and head, as the thesis counts."""

    models: tuple[str, ...] = option(
        (), comma=True, metavar="MODEL,...", first=check_shape,
        help="presets, or other models by their configuration: smollm-135m,smollm-360m",
    )  # fmt: skip
    recursions: tuple[int, ...] | None = like(
        PlanOptions, "recursions", ge=1, metavar="N,...", default_text="3; 1,2,3 for --gpu-memory"
    )
    budget: tuple[float, ...] = option(
        (), metavar="FLOPS,...", parse=lambda text, flag: parse_amount(flag, text),
        help="forward FLOPs: 16.5e18, or several such as 2e18,5e18,16.5e18",
    )  # fmt: skip
    wide_kv: bool = like(IsoOptions, "wide_kv")
    runs: tuple[Path, ...] = option((), nargs="+", metavar="DIR", help="finished runs, or directories of runs")
    out: Path | None = option(
        None, metavar="FILE", help="picture of the fits to write: .png, .svg or .pdf", requires=("runs",)
    )
    gpu_memory: int | None = like(
        GpuOptions, "gpu_memory", help="80GB, 24GiB (a number alone is bytes); nine tenths of it are planned for"
    )
    ranks: tuple[int, ...] | None = option(
        None, ge=0, metavar="K,...", default_text="0,64,256", requires=("gpu_memory",),
        help="LoRA ranks to try on every linear; 0 is none",
    )  # fmt: skip
    recompute: Recompute = like(Recipe, "recompute")

    def run(self) -> int:
        _check(self)
        record: dict[str, Any] = {}
        tables: list[tuple[str, list[list[str]]]] = []
        bases = _bases(self.models)
        if self.budget:
            _plan_tokens(self, bases, record, tables)
        if self.gpu_memory is not None:
            _plan_memory(self, bases, record, tables)
        if self.runs:
            _plan_sizes(self, record, tables)
        if self.json:
            from fathomlm.train.report import strict

            print(json.dumps(strict(record), allow_nan=False))
            return 0
        for title, table in tables:
            print_table(table, title)
        if self.out is not None:
            print(f"wrote {self.out}")
        return 0


def _check(options: Plan) -> None:
    counted = bool(options.budget) or options.gpu_memory is not None
    if not counted and not options.runs:
        raise OptionError("nothing to plan: give --budget FLOPS, --runs DIR or --gpu-memory SIZE")
    if counted and not options.models:
        raise OptionError("--budget and --gpu-memory require --models, such as smollm-135m,smollm-360m")
    if options.models and not counted:
        raise OptionError("--models requires --budget or --gpu-memory")


def _bases(models: Sequence[str]) -> dict[str, Architecture]:
    from fathomlm.depth.presets import PRESETS

    found = {}
    for name in filter(None, models):
        if name in PRESETS and not Path(name).exists():
            architecture = PRESETS[name].architecture
        else:
            from fathomlm.checkpoints.resolve import architecture_of

            architecture = architecture_of(name)[0]
        if architecture.cross:
            raise OptionError(f"{name} is an encoder-decoder model; plans are for decoder-only ones")
        found[name] = architecture
    if models and not found:
        raise OptionError("--models names no model")
    return found


def _plan_tokens(
    options: Plan,
    bases: dict[str, Architecture],
    record: dict[str, Any],
    tables: list[tuple[str, list[list[str]]]],
) -> None:
    from fathomlm.lab.analyze.isoflop import iso_rows, iso_table

    settings = IsoOptions(recursions=options.recursions or (3,), wide_kv=options.wide_kv, **options.rows)
    rows = iso_rows(bases, options.budget, settings)
    record["isoflop"] = [dataclasses.asdict(row) for row in rows]
    title = (
        "tokens under a budget. params: without embeddings. ratio: tokens against the vanilla row. equal: EFLOPs for as "
        "many tokens as that row has"
    )
    tables.append((title, iso_table(rows)))


def _plan_memory(
    options: Plan,
    bases: dict[str, Architecture],
    record: dict[str, Any],
    tables: list[tuple[str, list[list[str]]]],
) -> None:
    from fathomlm.lab.analyze.capacity import CapacityOptions, capacity_rows, capacity_table

    settings = CapacityOptions(
        memory=options.gpu_memory or 0, recursions=options.recursions or (1, 2, 3), ranks=options.ranks or (0, 64, 256),
        recompute=options.recompute, **options.rows,
    )  # fmt: skip
    rows = capacity_rows(bases, settings)
    record["memory"] = {
        "bytes": settings.memory,
        "context": options.context,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    title = (
        f"what fits {settings.memory / 1e9:.4g} GB at {options.context:,} tokens per sequence. train: micro-batch size, "
        "and its memory. serve: concurrent sequences, each with its KV cache beside the weights"
    )
    tables.append((title, capacity_table(rows)))


def _plan_sizes(options: Plan, record: dict[str, Any], tables: list[tuple[str, list[list[str]]]]) -> None:
    from fathomlm.lab.analyze.scaling import fit_runs, fit_table, read_finished

    kind = None
    if options.out is not None:
        from fathomlm.lab.analyze.runs_report import check_out
        from fathomlm.lab.drawing import check_matplotlib

        kind = check_out(options.out)
        check_matplotlib()
    runs = read_finished(options.runs)
    fits = fit_runs(runs)
    if kind is not None and options.out is not None:
        from fathomlm.lab.analyze.scaling import draw_scaling_fits

        draw_scaling_fits(fits, options.out, kind)
    record["runs"] = [dataclasses.asdict(run) for run in runs]
    record["fits"] = [dataclasses.asdict(fit) for fit in fits]
    record["out"] = None if options.out is None else str(options.out)
    tables.append(("the best size for each budget, by a quadratic in ln(parameters)", fit_table(fits)))
