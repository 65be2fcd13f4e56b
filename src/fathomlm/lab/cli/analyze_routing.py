"""`fathomlm analyze routing MODEL --data FILE`: how deep tokens go, and how well the routers decide."""

from __future__ import annotations

import argparse

from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import load_model
from fathomlm.lab.cli.analyze_options import SOURCES, about, add_shared_arguments, answer, check_least, out_directory

HELP = "how deep tokens go, and how well the routers decide"
DESCRIPTION = (
    "Runs text through a routed MODEL as in training (top-k) and as in use (causal): metrics of both, router scores, "
    "compute, the loss at every maximum depth, whether depth is spent where it lowers the loss, which tokens go deep, and "
    "text coloured by depth."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser, "routing")
    add = parser.add_argument
    add("--data", metavar="FILE", action="append", required=True, help=f"{SOURCES}; may be given more than once")
    add("--rows", metavar="N", type=int, default=64, help="read so many rows, or all there are (64)")
    add("--samples", metavar="N", type=int, default=4, help="rows whose beginning is shown as coloured text (4)")


def run(args: argparse.Namespace) -> int:
    check_least("rows", args.rows)
    check_least("samples", args.samples)
    out = out_directory(args, "routing")

    from fathomlm.checkpoints.resolve import architecture_of
    from fathomlm.lab.analyze.routing import check_routed, measure
    from fathomlm.lab.analyze.routing_report import (
        flops_table,
        gain_table,
        routing_table,
        scaling_table,
        worth_table,
        write_routing,
    )
    from fathomlm.lab.analyze.token_rows import find, read_rows, row_length

    places = find(args.data)
    check_routed(architecture_of(args.model)[1], args.model)
    model = load_model(args)
    context = row_length(model, args.context)
    rows = read_rows(places, model, context=context, rows=args.rows, column=args.column)
    with layer_bar("routing", unit="rows") as tick:
        numbers = measure(model, rows, samples=args.samples, on_rows=tick)
    shown = about(args, model, args.data)
    files = write_routing(numbers, shown, out, args.force)
    limits = [row[:2] + row[3:4] for row in scaling_table(numbers)]
    tables = (routing_table(numbers), flops_table(numbers), limits, gain_table(numbers), worth_table(numbers))
    answer(args, shown, numbers.summary(), tables, files)
    return 0
