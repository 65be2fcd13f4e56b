"""How the records of `bench` begin and end: where a figure was measured, and what is said when that broke off."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fathomlm.lab.environment import environment


def about(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """How every record begins."""
    return {
        "kind": args.kind,
        "model": args.model,
        "dtype": dtype,
        "device": args.device,
        "environment": environment(args.device),
    }


def print_record(record: dict[str, Any]) -> None:
    from fathomlm.train.report import strict

    print(json.dumps(strict(record), ensure_ascii=False, allow_nan=False))


def say_interrupted() -> None:
    print("fathomlm: interrupted; this is what was measured so far", file=sys.stderr)
