"""`fathomlm analyze KIND MODEL`: look into a model. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse
import importlib

HELP = "look into a model: its routing, its keys and values"
DESCRIPTION = (
    "Runs text through a model and looks at what happens inside. The numbers go to a JSON file, with pictures and one page "
    "that shows it all, into a directory."
)
KINDS = {"routing": "fathomlm.cli.analyze_routing", "kv": "fathomlm.cli.analyze_kv"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=type(parser))
    for kind, name in KINDS.items():
        module = importlib.import_module(name)
        sub = kinds.add_parser(kind, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(sub)
        sub.set_defaults(analyze=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.analyze(args))
