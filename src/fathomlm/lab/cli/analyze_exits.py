"""`fathomlm analyze exits MODEL --data FILE`: what would happen at every layer if tokens left there."""

from __future__ import annotations

import argparse
import dataclasses

from fathomlm.cli.exit_options import add_pack_arguments, lift_exit_vocab, pack_options, read_layers
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import load_model
from fathomlm.errors import OptionError
from fathomlm.lab.cli.analyze_options import SOURCES, about, add_shared_arguments, answer, check_least, out_directory

HELP = "what every layer would say, how sure it is, and what leaving early costs in time"
DESCRIPTION = (
    "Runs text through MODEL and asks every layer what it would have said: agreement with the last layer, cosine of the "
    "states, confidences by agreement with the fitted Beta densities. Then decodes a few texts and shows where the time "
    "goes: layers, heads, confidences, cache, copied states."
)
LONGEST_ROW = 256
"""Every layer is asked at every token, which takes a while: rows are short enough for a bar to move."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser, "exits", longest=LONGEST_ROW)
    add = parser.add_argument
    add("--data", metavar="FILE", action="append", required=True, help=f"{SOURCES}; may be given more than once")
    add("--tokens", metavar="N", type=int, default=1024, help="ask about so many tokens (1024)")
    where = "exits whose confidences are shown, from 1: 8 or 4,8 (the model's own, or some of the layers)"
    add("--exit-layer", metavar="N", action="append", help=where)
    add("--confidence", metavar="KIND", default="gap", help="gap, max, state or classifier (gap)")
    add_pack_arguments(add)
    likely = "how likely agreement must be above the threshold (0.4)"
    add("--condition", metavar="P", type=float, default=0.4, help=likely)
    add("--texts", metavar="N", type=int, default=4, help="texts to decode for the times; 0 leaves them out (4)")
    add("--max-new-tokens", metavar="N", type=int, default=32, help="length of each (32)")


def run(args: argparse.Namespace) -> int:
    check_least("tokens", args.tokens, 2)
    check_least("texts", args.texts, 0)
    check_least("max-new-tokens", args.max_new_tokens, 2)
    layers, pack = read_layers(args.exit_layer), pack_options(args)
    out = out_directory(args, "exits")

    from fathomlm.checkpoints.resolve import plan_of
    from fathomlm.decode.threshold import ThresholdOptions
    from fathomlm.lab.analyze.breakdown import measure_times
    from fathomlm.lab.analyze.exits import check_exits, measure
    from fathomlm.lab.analyze.exits_report import fit_table, layer_table, time_table, write_exits
    from fathomlm.lab.analyze.token_rows import find, read_rows, row_length

    ThresholdOptions(condition=args.condition)  # refuses what is out of range, before anything is loaded
    places = find(args.data)
    exits = check_exits(plan_of(args.model, args.exits), layers, args.confidence)
    model = load_model(args, **pack)
    lift_exit_vocab(model)
    context = row_length(model, args.context, most=min(LONGEST_ROW, args.tokens))
    rows = read_rows(places, model, context=context, rows=max(1, args.tokens // context), column=args.column)
    with layer_bar("layers", unit="rows") as tick:
        numbers = measure(model, rows, layers=exits, confidence=args.confidence, condition=args.condition, on_rows=tick)
    if args.texts:
        prompts = _prompts(rows.tokens_NT.tolist(), args.texts, model.architecture.context - args.max_new_tokens)
        threshold = numbers.exits[0].estimator.threshold
        with layer_bar("times", unit="texts") as tick:
            times = measure_times(
                model, prompts, exits=exits, threshold=threshold, new_tokens=args.max_new_tokens, on_text=tick
            )
        numbers = dataclasses.replace(numbers, breakdown=times)
    shown = about(args, model, args.data)
    if args.exits is not None:
        shown = dataclasses.replace(shown, plan=f"{shown.plan}, exits of {args.exits}")
    files = write_exits(numbers, shown, out, args.force)
    tables = [layer_table(numbers), fit_table(numbers)]
    if numbers.breakdown is not None:
        tables.append(time_table(numbers.breakdown))
    answer(args, shown, numbers.summary(), tables, files)
    return 0


def _prompts(rows: list[list[int]], many: int, room: int, length: int = 32) -> list[list[int]]:
    """Beginnings of rows, or of their parts where there are fewer rows than prompts."""
    if room < 1:
        raise OptionError("--max-new-tokens leaves no room for a prompt in the model's context")
    size = min(length, room, len(rows[0]))
    pieces = [row[at : at + size] for row in rows for at in range(0, len(row) - size + 1, size)]
    step = max(1, len(pieces) // many)
    return pieces[::step][:many]
