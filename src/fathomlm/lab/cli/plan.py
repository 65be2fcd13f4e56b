"""`fathomlm plan`: what a budget buys, which size it is best spent on, and what fits a device. No weights are read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.depth.plan import KV_MODES
from fathomlm.depth.routing import ROUTERS
from fathomlm.depth.sharing import STRATEGIES
from fathomlm.errors import OptionError
from fathomlm.lab.tables import print_table
from fathomlm.sizes import MEGABYTE, parse_size

if TYPE_CHECKING:
    from fathomlm.depth import Architecture

HELP = "plan training: tokens under a FLOP budget, the best model size, what fits a GPU"
DESCRIPTION = (
    "Three plans, any of them together. --budget: how many tokens it buys for the plain, the recursive and the routed (MoR) "
    "model of each base. --runs: which size each budget was best spent on, from finished runs. --gpu-memory: which "
    "recursions, ranks and batches fit. FLOPs are the forward pass without embedding and head, as the thesis counts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", metavar="M,M", help="presets, or other models by their configuration: smollm-135m,smollm-360m")
    add("--recursions", metavar="N,N", help="how often the shared block is run (3; for --gpu-memory 1,2,3)")
    add(
        "--sharing",
        metavar="S",
        choices=tuple(STRATEGIES),
        default="middle-cycle",
        help="which layers are tied (middle-cycle)",
    )
    add("--router", metavar="R", choices=ROUTERS, default="expert", help="of the MoR rows: expert or token (expert)")
    add("--kv", metavar="MODE", choices=KV_MODES, default="cache", help="keys and values of the MoR rows (cache)")
    add("--context", metavar="T", type=int, default=2048, help="tokens of a row (2048)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add = parser.add_argument_group("tokens under a budget").add_argument
    add("--budget", metavar="FLOPS", help="forward FLOPs, also several: 16.5e18, or 2e18,5e18,16.5e18")
    wide = "count k and v as wide as q, as the thesis' printed budgets do"
    add("--wide-kv", action="store_true", help=wide)
    add = parser.add_argument_group("the best size").add_argument
    add("--runs", metavar="DIR", nargs="+", type=Path, help="finished runs, or directories of runs")
    add("--out", metavar="FILE", type=Path, help="draw the fits: .png, .svg or .pdf")
    add = parser.add_argument_group("what fits a device").add_argument
    add("--gpu-memory", metavar="SIZE", help="80GB, 24GiB (a number alone is bytes); nine tenths of it are planned for")
    add("--ranks", metavar="K,K", help="LoRA ranks to try on every linear; 0 is none (0,64,256)")
    again = "what the backward pass computes again: none, inner, recursion or layer (none)"
    add("--recompute", metavar="HOW", default="none", help=again)


def run(args: argparse.Namespace) -> int:
    _check(args)
    record: dict[str, Any] = {}
    tables: list[tuple[str, list[list[str]]]] = []
    bases = _bases(args.models)
    if args.budget is not None:
        _plan_tokens(args, bases, record, tables)
    if args.gpu_memory is not None:
        _plan_memory(args, bases, record, tables)
    if args.runs is not None:
        _plan_sizes(args, record, tables)
    if args.json:
        from fathomlm.train.report import strict

        print(json.dumps(strict(record), allow_nan=False))
        return 0
    for title, table in tables:
        print_table(table, title)
    if args.out is not None:
        print(f"drawn into {args.out}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.budget is None and args.runs is None and args.gpu_memory is None:
        raise OptionError("say what to plan: --budget FLOPS, --runs DIR or --gpu-memory SIZE")
    if (args.budget is not None or args.gpu_memory is not None) and args.models is None:
        raise OptionError("--budget and --gpu-memory need --models, such as smollm-135m,smollm-360m")
    if args.models is not None and args.budget is None and args.gpu_memory is None:
        raise OptionError("--models goes with --budget or --gpu-memory")
    if args.out is not None and args.runs is None:
        raise OptionError("--out draws the fits of --runs")
    if args.ranks is not None and args.gpu_memory is None:
        raise OptionError("--ranks goes with --gpu-memory")
    if args.context < 1:
        raise OptionError(f"--context must be >= 1, got {args.context}")


def _bases(models: str | None) -> dict[str, Architecture]:
    from fathomlm.depth.presets import PRESETS

    found = {}
    for name in (name.strip() for name in (models or "").split(",")):
        if not name:
            continue
        if name in PRESETS and not Path(name).exists():
            architecture = PRESETS[name].architecture
        else:
            from fathomlm.checkpoints.resolve import architecture_of

            architecture = architecture_of(name)[0]
        if architecture.cross:
            raise OptionError(f"{name} is an encoder-decoder model; plans are for decoder-only ones")
        found[name] = architecture
    if models is not None and not found:
        raise OptionError("--models names no model")
    return found


def _plan_tokens(
    args: argparse.Namespace,
    bases: dict[str, Architecture],
    record: dict[str, Any],
    tables: list[tuple[str, list[list[str]]]],
) -> None:
    from fathomlm.lab.analyze.isoflop import IsoOptions, iso_rows, iso_table
    from fathomlm.train.recipe import parse_amount

    budgets = [parse_amount("--budget", part) for part in args.budget.split(",")]
    options = IsoOptions(
        recursions=_numbers("--recursions", args.recursions or "3"),
        sharing=args.sharing,
        router=args.router,
        kv=args.kv,
        context=args.context,
        wide_kv=args.wide_kv,
    )
    rows = iso_rows(bases, budgets, options)
    record["isoflop"] = [row.to_dict() for row in rows]
    title = (
        "tokens under a budget. params: without embeddings. ratio: tokens against the vanilla row. equal: EFLOPs for as "
        "many tokens as that row has"
    )
    tables.append((title, iso_table(rows)))


def _plan_memory(
    args: argparse.Namespace,
    bases: dict[str, Architecture],
    record: dict[str, Any],
    tables: list[tuple[str, list[list[str]]]],
) -> None:
    from fathomlm.lab.analyze.capacity import CapacityOptions, capacity_rows, capacity_table

    options = CapacityOptions(
        memory=parse_size(args.gpu_memory, "--gpu-memory", least=MEGABYTE),
        recursions=_numbers("--recursions", args.recursions or "1,2,3"),
        ranks=_numbers("--ranks", args.ranks or "0,64,256"),
        sharing=args.sharing,
        router=args.router,
        kv=args.kv,
        context=args.context,
        recompute=args.recompute,
    )
    rows = capacity_rows(bases, options)
    record["memory"] = {"bytes": options.memory, "context": args.context, "rows": [row.to_dict() for row in rows]}
    title = (
        f"what fits {options.memory / 1e9:.4g} GB at {args.context:,} tokens a row. train: rows in one pass, and the memory "
        "they take. serve: sequences at once, each with its KV beside the weights"
    )
    tables.append((title, capacity_table(rows)))


def _plan_sizes(args: argparse.Namespace, record: dict[str, Any], tables: list[tuple[str, list[list[str]]]]) -> None:
    import dataclasses

    from fathomlm.lab.analyze.scaling import fit_runs, fit_table, read_finished

    kind = None
    if args.out is not None:
        from fathomlm.lab.analyze.runs_report import check_out
        from fathomlm.lab.drawing import check_matplotlib

        kind = check_out(args.out)
        check_matplotlib()
    runs = read_finished(args.runs)
    fits = fit_runs(runs)
    if kind is not None:
        from fathomlm.lab.analyze.scaling import draw_scaling_fits

        draw_scaling_fits(fits, args.out, kind)
    record["runs"] = [dataclasses.asdict(run) for run in runs]
    record["fits"] = [fit.to_dict() for fit in fits]
    record["out"] = None if args.out is None else str(args.out)
    tables.append(("the best size for each budget, by a quadratic in ln(parameters)", fit_table(fits)))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words: Sequence[str] = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise OptionError(f"{option} takes integers such as 2,3; got '{text}'")
    return tuple(dict.fromkeys(int(word) for word in words))
