"""The options that `inspect` and `convert` share: the plan, and what each step adds of its own."""

from __future__ import annotations

import argparse

from fathomlm.depth.relaxation import DEFAULT_PREFIX_LENGTH, DEFAULT_RANK, KINDS
from fathomlm.depth.sharing import STRATEGIES

DEFAULT_RECURSIONS = 2


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the plan").add_argument
    add("--sharing", metavar="S", choices=tuple(STRATEGIES), help=f"which layers are tied: {', '.join(STRATEGIES)} (cycle)")
    add("--recursions", metavar="N", type=int, help=f"how often the shared block is run ({DEFAULT_RECURSIONS})")
    how = "where the recursions do not divide the layers: add steps (what --resize alone means) or drop some"
    add("--resize", metavar="HOW", nargs="?", const="add", choices=("add", "drop"), help=how)


def add_relax_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what each step adds of its own").add_argument
    add("--relax", metavar="KIND", choices=KINDS, help=f"{', '.join(KINDS)} (nothing)")
    ranks = f"lora, dora: a rank for every linear, or q=64,kv=128,ffn=256 where unnamed linears get none ({DEFAULT_RANK})"
    add("--rank", metavar="K", help=ranks)
    add("--linears-only", action="store_true", help="lora, dora: keep norms and biases tied, as the thesis does")
    add("--prefix-length", metavar="P", type=int, help=f"prefix: vectors a step ({DEFAULT_PREFIX_LENGTH})")
