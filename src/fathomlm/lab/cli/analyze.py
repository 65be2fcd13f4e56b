"""`fathomlm analyze KIND MODEL`: look into a model. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse

from fathomlm.cli.kinds import add_kinds, run_kind

HELP = "look into a model: its routing, exits, weights, keys and values; or into training runs"
DESCRIPTION = (
    "Looks into a model, with text that is run through it or at its weights, or into training runs. The numbers go to a "
    "JSON file, with pictures and one page that shows it all, into a directory."
)
KINDS = {kind: f"fathomlm.lab.cli.analyze_{kind}" for kind in ("routing", "kv", "exits", "weights", "runs")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    return run_kind(args)
