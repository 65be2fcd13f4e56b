"""`fathomlm analyze KIND MODEL`: look into a model. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse
import importlib

HELP = "look into a model: its routing, exits, weights, keys and values; or into training runs"
DESCRIPTION = (
    "Looks into a model, with text that is run through it or at its weights, or into training runs. The numbers go to a "
    "JSON file, with pictures and one page that shows it all, into a directory."
)
KINDS = {kind: f"fathomlm.cli.analyze_{kind}" for kind in ("routing", "kv", "exits", "weights", "runs")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=type(parser))
    for kind, name in KINDS.items():
        module = importlib.import_module(name)
        sub = kinds.add_parser(kind, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(sub)
        sub.set_defaults(analyze=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.analyze(args))
