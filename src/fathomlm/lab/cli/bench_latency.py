"""`fathomlm bench latency MODEL`: the time for a token when there is one text at a time."""

from __future__ import annotations

import argparse

from fathomlm.lab.cli import bench_engine
from fathomlm.lab.cli.bench_options import (
    add_depth_arguments,
    add_engine_arguments,
    add_peer_argument,
    add_source_arguments,
    add_workload_arguments,
)

HELP = "one text at a time: milliseconds a token, and how near to reading the weights once"
DESCRIPTION = (
    "Runs one text after the other through the engine and says how long a token takes. The floor is the time that reading "
    "the weights takes at this device's own reading speed, measured in the same run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    add_workload_arguments(parser, "64-256", 8)
    add_engine_arguments(parser)
    add_depth_arguments(parser)
    add_peer_argument(parser, "its generate over the same weights")


def run(args: argparse.Namespace) -> int:
    return bench_engine.run(args)
