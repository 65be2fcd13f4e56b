"""`fathomlm eval ppl MODEL --data FILE`: how well a model predicts text."""

from __future__ import annotations

import argparse
import time
from itertools import chain, islice
from typing import Any

from fathomlm.cli.exit_options import lift_exit_vocab, pack_options
from fathomlm.cli.progress import layer_bar
from fathomlm.cli.sampling_options import add_model_arguments, load_model
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.cli.eval_options import (
    about,
    add_output_arguments,
    add_run_arguments,
    check_least,
    number,
    print_record,
    read_outputs,
)
from fathomlm.lab.tables import print_table

HELP = "predicting text: nats per token, perplexity, bits per byte"
DESCRIPTION = (
    "Runs text through MODEL in windows and says how well it is predicted: in nats per token, as perplexity, and in bits "
    "per byte, which can be compared between tokenizers. A text file is one document, each row of JSON lines another; a "
    "document begins with the model's begin token."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    files = "text (.txt, .md), JSON lines (.jsonl, also .gz, .xz, .zst) or Parquet; may be given more than once"
    add("--data", metavar="FILE", action="append", required=True, help=files)
    add("--column", metavar="NAME", default="text", help="where the text is in JSON lines and Parquet (text)")
    add("--join", action="store_true", help="make one document of all, blank lines between, as is usual for WikiText")
    add("--context", metavar="N", type=int, help="tokens of a window (default: what the model was trained for)")
    step = "new tokens that a window scores; fewer give each more context and take longer (default: all that fit)"
    add("--stride", metavar="N", type=int, help=step)
    add_output_arguments(parser)
    add_run_arguments(parser, batch=8, rows="documents")


def run(args: argparse.Namespace) -> int:
    check_least(args, "limit", "batch", "context", "stride")
    texts = _texts(args)
    outputs, pack = read_outputs(args), pack_options(args)

    from fathomlm.lab.evaluate.encoding import TextEncoder
    from fathomlm.lab.evaluate.perplexity import predict
    from fathomlm.lab.evaluate.scoring import Scorer

    model = load_model(args, **pack)
    lift_exit_vocab(model)
    if args.context is not None and args.context > model.architecture.context:
        raise OptionError(f"--context must be <= the model's {model.architecture.context:,} tokens, got {args.context}")
    begun = time.perf_counter()
    scorer = Scorer(model, outputs, batch=args.batch, max_length=args.context)
    with layer_bar("predicting", unit="windows") as tick:
        found = predict(scorer, TextEncoder(model), texts, stride=args.stride, join=args.join, on_done=tick)
    record: dict[str, Any] = about(args, model) | {
        "data": args.data,
        "context": scorer.max_length,
        "stride": args.stride or scorer.max_length,
        "outputs": [output.record() | each.record() for output, each in zip(outputs, found, strict=True)],
        "seconds": time.perf_counter() - begun,
    }
    if args.json:
        print_record(record)
        return 0
    rows = [["output", "tokens", "nats per token", "perplexity", "bits per byte"]]
    rows += [
        [each["output"], f"{each['tokens']:,}"]
        + [number(each[name]) for name in ("nats_per_token", "perplexity", "bits_per_byte")]
        for each in record["outputs"]
    ]
    print_table(rows)
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    """The documents, read before a model is loaded."""
    from fathomlm.train.data.sources import expand, read

    documents = chain.from_iterable(read(source, (args.column,)) for source in expand(args.data))
    texts = [document.fields[0] for document in islice(documents, args.limit)]
    if not any(text.strip() for text in texts):
        raise DataError(f"{', '.join(args.data)} has no text")
    return texts
