"""`fathomlm COMMAND ...`: the table of commands, and the one place where errors become exit codes.

User errors print one line on standard error and exit with 2; a bug keeps its traceback. A command is a dataclass of options
with a `run` method and is imported when it is chosen; names, paths and devices are checked (`check_first`) before `run`
imports torch and transformers. So help and typos answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fathomlm import __version__
from fathomlm.errors import FathomError, OptionError, choices
from fathomlm.options import add_flags, check_first, from_args


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A row of the table: a command, or a group of commands."""

    help: str
    options: str = ""
    """Where its dataclass is, `module:Class` below `fathomlm`; the class's docstring is the description."""
    kinds: Mapping[str, Command] = field(default_factory=dict)
    """The commands of a group."""
    description: str = ""
    """Of a group."""
    default_kind: str | None = None
    """The kind that may be left out."""


COMMANDS: dict[str, Command] = {
    "demo": Command(help="show tokens by depth, or a plain model beside its recursive version", options="cli.demo:Demo"),
    "get": Command(help="download a pretrained model", options="cli.get:Get"),
    "inspect": Command(help="count parameters, FLOPs and KV cache without loading weights", options="cli.inspect:Inspect"),
    "convert": Command(help="tie a model's layers into a recursive block", options="cli.convert:Convert"),
    "data": Command(
        help="prepare text for training",
        description="Prepare a corpus: a directory of tokens that training reads. A corpus belongs to one tokenizer.",
        kinds={
            "prepare": Command(help="tokenize text into a corpus", options="cli.data:Prepare"),
            "check": Command(help="verify a corpus against its checksums", options="cli.data:Check"),
            "show": Command(help="print the first documents of a corpus", options="cli.data:ShowData"),
        },
    ),
    "train": Command(help="train a model from a recipe", options="cli.train:Train"),
    "export": Command(help="write a plain Hugging Face checkpoint", options="cli.export:Export"),
    "generate": Command(help="complete a prompt", options="cli.generate:Generate"),
    "chat": Command(help="chat with a model", options="cli.chat:Chat"),
    "serve": Command(help="serve a model with an OpenAI-compatible API", options="cli.serve:Serve"),
    "calibrate": Command(help="learn the confidence threshold for early exit", options="lab.cli.calibrate:Calibrate"),
    "eval": Command(
        help="evaluate quality: tasks, perplexity, generation",
        description="Evaluate MODEL: likelihood tasks (tasks), perplexity (ppl), generated text against references "
        "(generate), quality against cost over many depths (frontier), and generated text judged by another model (judge). "
        "The word tasks may be left out: `fathomlm eval MODEL --tasks hellaswag`.",
        default_kind="tasks",
        kinds={
            "tasks": Command(help="accuracy and perplexity on likelihood tasks", options="lab.cli.eval_tasks:Tasks"),
            "ppl": Command(help="perplexity and bits per byte on text", options="lab.cli.eval_ppl:Perplexity"),
            "generate": Command(
                help="ROUGE, BLEU or SQuAD scores with latency and exit rate", options="lab.cli.eval_generate:EvalGenerate"
            ),
            "frontier": Command(
                help="quality against latency and FLOPs over thresholds, depths or exit layers",
                options="lab.cli.eval_frontier:Frontier",
            ),
            "judge": Command(help="Likert scores and pairwise wins from a judge model", options="lab.cli.eval_judge:Judge"),
        },
    ),
    "bench": Command(
        help="measure speed: throughput, latency, kernels, host",
        description="Measure how fast the engine runs MODEL. Everything counts, from the first request to the last token. "
        "Ctrl-C ends a benchmark with what was measured so far.",
        kinds={
            "throughput": Command(help="tokens per second over many requests", options="lab.cli.bench:Throughput"),
            "latency": Command(help="milliseconds per token, one request at a time", options="lab.cli.bench:Latency"),
            "kernels": Command(help="each kernel of a decode step by itself", options="lab.cli.bench:Kernels"),
            "host": Command(help="what the engine costs the CPU, without a model", options="lab.cli.bench:Host"),
        },
    ),
    "plot": Command(help="draw training curves", options="lab.cli.plot:Plot"),
    "analyze": Command(
        help="analyze routing, KV cache, exits, weights or training runs",
        description="Analyze a model on text, its weights, or training runs. Writes the numbers as JSON, pictures, and one "
        "HTML page into a directory.",
        kinds={
            "routing": Command(
                help="how deep tokens go, and how well routers decide", options="lab.cli.analyze:AnalyzeRouting"
            ),
            "kv": Command(
                help="how hidden states, keys and values change from step to step", options="lab.cli.analyze:KeysAndValues"
            ),
            "exits": Command(
                help="agreement, confidence and time of every layer as an exit", options="lab.cli.analyze:Exits"
            ),
            "weights": Command(
                help="what tying layers loses, and the rank that restores it", options="lab.cli.analyze:AnalyzeWeights"
            ),
            "runs": Command(help="training curves as a page", options="lab.cli.analyze:Runs"),
        },
    ),
    "plan": Command(help="plan training: tokens for a FLOP budget, model size, GPU memory", options="lab.cli.plan:Plan"),
    "simulate": Command(
        help="simulate throughput from exit depths and measured times",
        description="Simulate the throughput of a model whose tokens exit at given depths on a device with given times, "
        "with the engine's own scheduler. The word throughput may be left out.",
        default_kind="throughput",
        kinds={
            "throughput": Command(
                help="vanilla, sequence-wise and depth-wise batching of the same sequences",
                options="lab.cli.simulate_throughput:SimulateThroughput",
            ),
            "thesis": Command(
                help="the thesis' throughput tables, simulated from its A100 times", options="lab.cli.simulate_thesis:Thesis"
            ),
            "validate": Command(
                help="a simulated workload against the engine's measurement", options="lab.cli.simulate_validate:Validate"
            ),
        },
    ),
    "study": Command(
        help="run studies: many training runs, a ledger, tables and verdicts",
        description="A study is a YAML file: runs that differ in one thing each, seeds, and the claims that they decide.",
        kinds={
            "list": Command(help="list the shipped studies", options="lab.cli.study:ListStudies"),
            "show": Command(help="show the runs of a study", options="lab.cli.study:ShowStudy"),
            "run": Command(help="run what is left of a study", options="lab.cli.study:RunStudy"),
            "status": Command(help="count finished, failed and remaining runs", options="lab.cli.study:StudyStatus"),
            "merge": Command(help="merge the ledger of another machine", options="lab.cli.study:Merge"),
            "report": Command(help="write tables, pictures and verdicts from the ledger", options="lab.cli.study:Report"),
        },
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse that fills itself when its command is chosen, and names the nearest command or flag when one is mistyped."""

    command: Command | None = None
    options: type | None = None
    """The command's dataclass, once it is loaded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=28)

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see: {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._fill()
        command = self.command
        args = args if command is None or command.default_kind is None else _with_kind(command, args)
        found, rest = super().parse_known_args(args, namespace)
        if self.options is not None and "fields" in self.options.__annotations__:
            found.fields, rest = tuple(rest), []
        wrong = next((word for word in rest if word.startswith("-")), None)
        if wrong is not None:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(choices("option", wrong.split("=")[0], known))
        if self.options is not None and rest:
            self._refuse_value(list(args), rest[0])
        return found, rest

    def _refuse_value(self, args: Sequence[str], word: str) -> None:
        """A word that nothing takes, behind a flag that takes no value; a longer flag may have been meant."""
        flag = args[max(0, args.index(word) - 1)]
        action = self._option_string_actions.get(flag)
        if action is not None and action.nargs == 0:
            longer = next((name for name in self._option_string_actions if name.startswith(flag) and name != flag), None)
            self.error(f"{flag} takes no value, got '{word}'" + (f"; {longer} does" if longer else ""))

    def _fill(self) -> None:
        command = self.command
        if command is None or self.options is not None or self._subparsers is not None:
            return
        if command.kinds:
            self.description = command.description
            self.usage = f"%(prog)s {'[KIND]' if command.default_kind else 'KIND'} ..."
            self.epilog = f"`{self.prog} KIND --help` lists the options of a kind."
            add_commands(self, command.kinds, "KIND", prog=self.prog)
            return
        module, _, name = command.options.partition(":")
        self.options = getattr(importlib.import_module(f"fathomlm.{module}"), name)
        self.description = inspect.cleandoc(self.options.__doc__ or "")
        self.allow_abbrev = "fields" not in self.options.__annotations__
        add_flags(self, self.options)
        self.set_defaults(options=self.options)
        needed = [f"{action.option_strings[-1]} {action.metavar}" for action in self._actions if _is_required_flag(action)]
        arguments = [self._usage_of(action) for action in self._get_positional_actions()]
        self.usage = " ".join(["%(prog)s", "[options]", *needed, *arguments])

    def _usage_of(self, action: argparse.Action) -> str:
        return {"?": f"[{action.metavar}]", "*": f"[{action.metavar} ...]", "+": f"{action.metavar} ..."}.get(
            str(action.nargs), str(action.metavar)
        )

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(None, choices(action.dest, str(value), [str(c) for c in action.choices]))


def _is_required_flag(action: argparse.Action) -> bool:
    return action.required and bool(action.option_strings)


def _with_kind(command: Command, words: list[str]) -> list[str]:
    """What was typed behind a group, with the kind that may be left out. A first word that is nearly a kind, with another
    behind it, is a slip and no model."""
    kinds = command.kinds
    if not words or words[0] in (*kinds, "-h", "--help"):
        return words
    two = len(words) > 1 and not words[0].startswith("-") and not words[1].startswith("-")
    slip = two and bool(difflib.get_close_matches(words[0], kinds, n=1)) and not Path(words[0]).exists()
    return words if slip else [str(command.default_kind), *words]


def add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, Command], what: str, **options: Any) -> None:
    """A subparser for each command, which loads the command when it is chosen."""
    actions = parser.add_subparsers(dest=what.lower(), metavar=what, required=True, parser_class=_Parser, **options)
    for name, command in commands.items():
        actions.add_parser(name, help=command.help).command = command


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fathomlm",
        usage="%(prog)s COMMAND ...",
        description="Convert, train, serve and measure adaptive-depth language models.",
        epilog="MODEL is a preset name (smollm2-135m), a Hugging Face directory or hub id, a GGUF file, or a FathomLM "
        "directory. `fathomlm COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"fathomlm {__version__}")
    add_commands(parser, COMMANDS, "COMMAND", prog="fathomlm")
    return parser


def read_command(argv: Sequence[str] | None) -> Any:
    """The command that was typed, ready to `run`."""
    args = build_parser().parse_args(argv)
    return from_args(args.options, args)


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _terminated)
    share_cores()
    try:
        command = read_command(argv)
        check_first(command)
        return int(command.run())
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


def share_cores() -> None:
    """Threads that wait for each other sleep soon instead of spinning, unless the user has said how they wait: beside other
    busy programs they would spin away the time of those they wait for. OpenMP reads it when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
