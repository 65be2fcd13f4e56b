"""`fathomlm simulate [KIND]`: throughput without the device. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse

from fathomlm.cli.kinds import add_kinds, run_kind

HELP = "estimate throughput from exit depths and a table of times, with the engine's own scheduler"
DESCRIPTION = (
    "The thesis' hypothetical throughput: how many tokens a second a model would make whose tokens leave at given depths, "
    "on a device with given times. throughput (the word may be left out) compares vanilla, continuous sequence-wise and "
    "continuous depth-wise batching; thesis does it for the thesis' own tables; validate holds a prediction against the "
    "engine."
)
DEFAULT_KIND = "throughput"
KINDS = {kind: f"fathomlm.lab.cli.simulate_{kind}" for kind in ("throughput", "thesis", "validate")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] [KIND] ..."
    add_kinds(parser, KINDS, prog=parser.prog)


def run(args: argparse.Namespace) -> int:
    return run_kind(args)


def with_kind(words: list[str]) -> list[str]:
    """What was typed behind `simulate`, with the kind that nobody has to type."""
    if words and (words[0] in (*KINDS, "-h", "--help")):
        return words
    return [DEFAULT_KIND, *words]
