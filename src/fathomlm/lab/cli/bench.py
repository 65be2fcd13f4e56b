"""`fathomlm bench KIND MODEL`: how fast a model is. A kind is a file beside this one, named in `KINDS`."""

from __future__ import annotations

import argparse

from fathomlm.cli.kinds import add_kinds, run_kind

HELP = "measure how fast a model is: throughput, latency, kernels"
DESCRIPTION = (
    "Measures how fast the engine runs MODEL: many texts at once (throughput), one at a time (latency), and each kernel "
    "alone (kernels). Everything is counted, from the first request to the last token. The result is a table, or with "
    "--json one JSON object; progress goes to standard error. Ctrl-C ends it with what was measured so far."
)
KINDS = {
    "throughput": "fathomlm.lab.cli.bench_throughput",
    "latency": "fathomlm.lab.cli.bench_latency",
    "kernels": "fathomlm.lab.cli.bench_kernels",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kinds(parser, KINDS)


def run(args: argparse.Namespace) -> int:
    return run_kind(args)
