"""`fathomlm analyze kv MODEL --data FILE`: hidden states, keys and values from step to step."""

from __future__ import annotations

import argparse

from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import load_model
from fathomlm.errors import OptionError
from fathomlm.lab.cli.analyze_options import SOURCES, about, add_shared_arguments, answer, check_least, out_directory

HELP = "how hidden states, keys and values change from step to step"
DESCRIPTION = (
    "Runs text through any MODEL and maps hidden states, keys and values over its steps: how long they are, and how alike. "
    "Where recursions make nearly the same keys and values, they could share them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser, "kv")
    add = parser.add_argument
    add("--data", metavar="FILE", action="append", help=f"{SOURCES}; may be given more than once")
    add("--text", metavar="TEXT", help="a text to run in place of --data")
    add("--tokens", metavar="N", type=int, default=2048, help="run about so many tokens (2048)")


def run(args: argparse.Namespace) -> int:
    check_least("tokens", args.tokens, 2)
    if (args.data is None) == (args.text is None):
        raise OptionError("give either --data FILE or --text TEXT")
    out = out_directory(args, "kv")

    from fathomlm.lab.analyze.kv import measure
    from fathomlm.lab.analyze.kv_report import kv_table, write_kv
    from fathomlm.lab.analyze.token_rows import LONGEST_ROW, find, read_rows, row_length, text_row

    places = find(args.data) if args.data is not None else []
    model = load_model(args)
    context = row_length(model, args.context, most=min(LONGEST_ROW, args.tokens))
    if places:
        count = max(1, args.tokens // context)
        rows = read_rows(places, model, context=context, rows=count, column=args.column)
    else:
        rows = text_row(model, args.text, most=min(context, args.tokens))
    with layer_bar("steps", unit="rows") as tick:
        numbers = measure(model, rows, on_rows=tick)
    shown = about(args, model, args.data or ["--text"])
    files = write_kv(numbers, shown, out, args.force)
    answer(args, shown, numbers.summary(), [kv_table(numbers)], files)
    return 0
