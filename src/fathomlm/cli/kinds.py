"""Verbs that have kinds: `fathomlm VERB KIND ...`, each kind a file beside its verb."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any


def add_kinds(parser: argparse.ArgumentParser, modules: Mapping[str, str], **options: Any) -> None:
    """The kinds of a verb by name, and the modules that know them; `options` are those of `add_subparsers`."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=type(parser), **options)
    for kind, name in modules.items():
        module = importlib.import_module(name)
        sub = kinds.add_parser(kind, help=module.HELP, description=module.DESCRIPTION)
        module.add_arguments(sub)
        sub.set_defaults(run_kind=module.run)


def run_kind(args: argparse.Namespace) -> int:
    return int(args.run_kind(args))
