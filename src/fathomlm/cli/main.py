"""`fathomlm VERB ...`: a table of verbs, and the one place where errors become exit codes.

A mistake of the user's is one line on standard error and exit code 2; a bug keeps its traceback. Verbs import torch and
transformers inside `run`, so that `--help` and typos answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from fathomlm import __version__
from fathomlm.errors import FathomError, OptionError, choices

CORE = ("demo", "get", "inspect", "convert", "data", "train", "export", "generate", "chat", "serve")
LAB = ("calibrate", "eval", "bench", "plot", "analyze", "plan", "simulate", "study")
VERBS = (*CORE, *LAB)


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest verb, option or value named when one is mistyped."""

    takes_fields = False
    """Whether words that the parser does not know are kept for the verb: fields of a training recipe."""
    complete: Callable[[list[str]], list[str]] | None = None
    """Puts the word in front that a verb's users may leave out."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see: {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        args = args if self.complete is None else self.complete(args)
        found, rest = super().parse_known_args(args, namespace)
        if self.takes_fields:
            found.fields, rest = rest, []
        wrong = next((word for word in rest if word.startswith("-")), None)
        if wrong is not None:
            self.error(
                choices("option", wrong.split("=")[0], [o for o in self._option_string_actions if o.startswith("--")])
            )
        return found, rest

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            what = action.dest.replace("_", " ")
            raise argparse.ArgumentError(None, choices(what, str(value), [str(c) for c in action.choices]))


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fathomlm",
        description="Convert, inspect and run adaptive-depth language models.",
        epilog="MODEL is a preset name (smollm2-135m), a Hugging Face directory or hub id, a GGUF file, or a FathomLM "
        "directory. `fathomlm VERB --help` explains a verb.",
    )
    parser.add_argument("--version", action="version", version=f"fathomlm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for verb in VERBS:
        module = importlib.import_module(f"fathomlm.cli.{verb}" if verb in CORE else f"fathomlm.lab.cli.{verb}")
        sub = verbs.add_parser(verb, help=module.HELP, description=module.DESCRIPTION)
        sub.takes_fields = verb == "train"
        sub.complete = module.with_kind if verb in ("eval", "simulate") else None
        sub.allow_abbrev = not sub.takes_fields
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except FathomError as error:
        print(f"fathomlm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fathomlm: interrupted; nothing was left half-written", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away (`fathomlm inspect ... | head`); keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
