"""`fathomlm bench throughput MODEL`: tokens a second over many texts at once."""

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

HELP = "many texts at once: tokens a second, waiting times, rows filled, distance from the floor"
DESCRIPTION = (
    "Runs a workload through the engine and says how many tokens a second came out, end to end, and where the time went. "
    "With --dummy any shape and plan can be measured without weights, such as `smollm-360m --sharing middle-cycle "
    "--recursions 3 --router expert --dummy --depth forced`. Peers are measured in the same process afterwards."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    asked = add_workload_arguments(parser, "thesis", None)
    asked.add_argument(
        "--arrivals", metavar="RATE", type=float, help="Poisson arrivals, RATE requests a second (all at once)"
    )
    engine = add_engine_arguments(parser)
    engine.add_argument("--rows", metavar="N", type=int, default=32, help="tokens of a pass (32)")
    engine.add_argument("--slots", metavar="N", type=int, help="texts in flight (rows; twice that where depths differ)")
    engine.add_argument("--peer-rows", metavar="N", type=int, help="rows of the peers (as many)")
    add_depth_arguments(parser)
    add_peer_argument(parser, "its continuous batching of the same weights, 64 requests of 128 tokens")


def run(args: argparse.Namespace) -> int:
    return bench_engine.run(args)
