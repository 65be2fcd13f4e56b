"""`fathomlm COMMAND ...`: the table of commands, and the one place where errors become exit codes.

User errors print one line on standard error and exit with 2; a bug keeps its traceback. A command is a dataclass of options
and what runs it, its `run` method or a function elsewhere. Both are imported when it is chosen, and names, paths and devices
are checked (`check_first`) before that imports torch and transformers. So help and typos answer at once.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import errno
import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fathomlm import __version__
from fathomlm.cli.flags import add_flags, from_args
from fathomlm.errors import FathomError, OptionError, choices
from fathomlm.interrupts import end_without_interrupts, interrupt_within
from fathomlm.options import check_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A row of the table: a command, or a group of commands."""

    help: str
    options: str = ""
    """Where its dataclass is, `module:Class` below `fathomlm`; the class's docstring is the description."""
    run: str = ""
    """Where the function is that takes them, where they have no `run` of their own. Its file may import what it likes."""
    kinds: Mapping[str, Command] = field(default_factory=dict)
    """The commands of a group."""
    description: str = ""
    """Of a group."""
    default_kind: str | None = None
    """The kind that may be left out."""


def _lab(room: str, options: str, run: str, help: str) -> Command:
    """A command of the lab, whose options are in `options.py` of its room."""
    return Command(help=help, options=f"lab.{room}.options:{options}", run=f"lab.{room}.{run}")


COMMANDS: dict[str, Command] = {
    "demo": Command(help="show tokens by depth, or a plain model beside its recursive version", options="cli.demo:Demo"),
    "get": Command(help="download a pretrained model", options="cli.get:Get"),
    "inspect": Command(help="count parameters, FLOPs and KV cache without loading weights", options="cli.inspect:Inspect"),
    "convert": Command(help="tie a model's layers into a recursive block, or drop layers", options="cli.convert:Convert"),
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
    "export": Command(help="write a plain Hugging Face checkpoint or a GGUF file", options="cli.export:Export"),
    "generate": Command(help="complete a prompt", options="cli.generate:Generate"),
    "chat": Command(help="chat with a model", options="cli.chat:Chat"),
    "serve": Command(help="serve a model with an OpenAI-compatible API", options="cli.serve:Serve"),
    "calibrate": _lab("analyze", "Calibrate", "calibrate:run", "learn the confidence threshold for early exit"),
    "eval": Command(
        help="evaluate quality: tasks, perplexity, generation",
        description="Evaluate MODEL: likelihood tasks (tasks), perplexity (ppl), generated text against references "
        "(generate), quality against cost over many depths (frontier), and generated text judged by another model (judge). "
        "The word tasks may be left out: `fathomlm eval MODEL --tasks hellaswag`.",
        default_kind="tasks",
        kinds={
            "tasks": _lab("evaluate", "Tasks", "run_tasks:run_tasks", "accuracy and perplexity on likelihood tasks"),
            "ppl": _lab("evaluate", "Perplexity", "run_tasks:run_perplexity", "perplexity and bits per byte on text"),
            "generate": _lab(
                "evaluate", "EvalGenerate", "generation:run", "ROUGE, BLEU or SQuAD scores with latency and exit rate"
            ),
            "frontier": _lab(
                "evaluate",
                "Frontier",
                "frontier_report:run",
                "quality against latency and FLOPs over thresholds, depths or exit layers",
            ),
            "judge": _lab("evaluate", "Judge", "judge_results:run", "Likert scores and pairwise wins from a judge model"),
        },
    ),
    "bench": Command(
        help="measure speed: throughput, latency, kernels, host",
        description="Measure how fast the engine runs MODEL. Everything counts, from the first request to the last token. "
        "Ctrl-C ends a benchmark with what was measured so far.",
        kinds={
            "throughput": _lab("bench", "Throughput", "run:run", "tokens per second over many requests"),
            "latency": _lab("bench", "Latency", "run:run", "milliseconds per token, one request at a time"),
            "kernels": _lab("bench", "Kernels", "kernels:run", "each kernel of a decode step by itself"),
            "host": _lab("bench", "Host", "host:run", "what the engine costs the CPU, without a model"),
        },
    ),
    "plot": _lab("analyze", "Plot", "runs_report:run_plot", "draw training curves"),
    "analyze": Command(
        help="analyze routing, KV cache, exits, weights or training runs",
        description="Analyze a model on text, its weights, or training runs. Writes the numbers as JSON, pictures, and one "
        "HTML page into a directory.",
        kinds={
            "routing": _lab(
                "analyze", "AnalyzeRouting", "routing_report:run", "how deep tokens go, and how well routers decide"
            ),
            "kv": _lab(
                "analyze", "KeysAndValues", "kv_report:run", "how hidden states, keys and values change from step to step"
            ),
            "exits": _lab(
                "analyze", "Exits", "exits_report:run", "agreement, confidence and time of every layer as an exit"
            ),
            "weights": _lab(
                "analyze", "AnalyzeWeights", "weights_report:run", "what tying layers loses, and the rank that restores it"
            ),
            "runs": _lab("analyze", "Runs", "runs_report:run", "training curves as a page"),
        },
    ),
    "plan": _lab("analyze", "Plan", "plans:run", "plan training: tokens for a FLOP budget, model size, GPU memory"),
    "simulate": Command(
        help="simulate throughput from exit depths and measured times",
        description="Simulate the throughput of a model whose tokens exit at given depths on a device with given times, "
        "with the engine's own scheduler. The word throughput may be left out.",
        default_kind="throughput",
        kinds={
            "throughput": _lab(
                "simulate",
                "SimulateThroughput",
                "throughput:run",
                "vanilla, sequence-wise and depth-wise batching of the same sequences",
            ),
            "thesis": _lab(
                "simulate", "Thesis", "thesis:run", "the thesis' throughput tables, simulated from its A100 times"
            ),
            "validate": _lab(
                "simulate", "Validate", "validate:run", "a simulated workload against the engine's measurement"
            ),
        },
    ),
    "study": Command(
        help="run studies: many training runs, a ledger, tables and verdicts",
        description="A study is a YAML file: runs that differ in one thing each, seeds, and the claims that they decide.",
        kinds={
            "list": _lab("study", "ListStudies", "spec:run_list", "list the shipped studies"),
            "show": _lab("study", "ShowStudy", "commands:run_show", "show the runs of a study"),
            "run": _lab("study", "RunStudy", "commands:run_queue", "run what is left of a study"),
            "status": _lab("study", "StudyStatus", "commands:run_status", "count finished, failed and remaining runs"),
            "merge": _lab("study", "Merge", "ledger:run_merge", "merge the ledger of another machine"),
            "report": _lab("study", "Report", "commands:run_report", "write tables, pictures and verdicts from the ledger"),
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
        self.options = _find(command.options)
        self.description = inspect.cleandoc(self.options.__doc__ or "")
        self.allow_abbrev = "fields" not in self.options.__annotations__
        add_flags(self, self.options)
        self.set_defaults(options=self.options, row=command)
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


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"fathomlm.{module}"), name)


def _checked(command: Command, options: Any) -> Any:
    """What runs a command, once its options are checked; both may import packages that are not installed."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise OptionError("the current directory no longer exists; change to another one") from error
    try:
        check_first(options)
        return partial(_find(command.run), options) if command.run else options.run
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fathomlm"):
            raise
        raise OptionError(f"this command requires the package {error.name}: pip install 'fathomlm[all]'") from error


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


def read_command(argv: Sequence[str] | None) -> tuple[Command, Any]:
    """The command that was typed, and its options."""
    args = build_parser().parse_args(argv)
    return args.row, from_args(args.options, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Without `argv` the process is for this alone and ends with it: no signal
    interrupts that any more."""
    _print_any_text()
    answer = interrupt_within(_run)
    signal.signal(signal.SIGTERM, answer)
    share_cores()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return _exit_code(argv)
    if argv is None:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # runs last
    signal.signal(signal.SIGINT, answer)
    code = 1
    try:
        code = _exit_code(argv)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if argv is not None else end_without_interrupts(code))
    return code


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        return _run(argv)
    except FathomError as error:
        print(f"fathomlm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fathomlm: interrupted; nothing was left half-written", file=sys.stderr)
        return 2
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"fathomlm: cannot access {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader went away (`fathomlm inspect ... | head`)
        _drop_output()
        return 0
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename is not None:
            name = os.fsdecode(error.filename)
            print(f"fathomlm: {name[:60]}{'...' * (len(name) > 60)}: {error.strerror}", file=sys.stderr)
            return 2
        if error.errno == errno.ENOSPC and error.filename is None:
            _drop_output()
            print(f"fathomlm: cannot write the output: {error.strerror}", file=sys.stderr)
            return 2
        raise


def _print_any_text() -> None:
    """Where the terminal's encoding lacks a character of the output, a question mark stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Keep Python from complaining again at exit that standard output cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    """All that signals may interrupt."""
    command, options = read_command(argv)
    return int(_checked(command, options)())


def share_cores() -> None:
    """Threads that wait for each other sleep soon instead of spinning, unless the user has said how they wait: beside other
    busy programs they would spin away the time of those they wait for. OpenMP reads it when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


if __name__ == "__main__":
    sys.exit(main())
