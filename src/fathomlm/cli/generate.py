"""`fathomlm generate MODEL -p TEXT`: continue one prompt or a batch of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.captured_options import add_captured_argument, check_captured, open_session
from fathomlm.cli.exit_options import add_exit_arguments, exit_record, exit_statistic, pack_options, read_exiting
from fathomlm.cli.sampling_options import (
    add_depth_arguments,
    add_model_arguments,
    add_sampling_arguments,
    load_any_model,
    read_depth,
    read_sampling,
)
from fathomlm.errors import OptionError

if TYPE_CHECKING:
    from fathomlm.decode.generation import Generation
    from fathomlm.model.seq2seq import FathomModel

HELP = "continue a prompt"
DESCRIPTION = (
    "Continue one prompt, or several as one batch. The text goes to standard output, what it cost to standard error. "
    "With --chat a prompt is a message, and the model's chat format is put around it."
)
ENDED = {"eos": "ended by itself", "stop": "ended at a stop text", "length": "ended at --max-new-tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    again = "the text to continue; '-' reads standard input; given more than once, the prompts run as one batch"
    add("-p", "--prompt", metavar="TEXT", action="append", default=[], help=again)
    add("--prompt-file", metavar="FILE", type=Path, help="a file with one prompt a line; empty lines are skipped")
    add("--chat", action="store_true", help="take the prompt as a message in a chat")
    add("--system", metavar="TEXT", help="with --chat: the instruction that comes before the message")
    add("--stream", action="store_true", help="show the text as it is made (one prompt only)")
    add("--json", action="store_true", help="print one JSON object")
    add_sampling_arguments(parser, max_new_tokens=128)
    add_depth_arguments(parser)
    add_exit_arguments(parser)
    add_captured_argument(parser)


def run(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    _check(args, prompts)
    sampling = read_sampling(args)
    exiting, pack = read_exiting(args), pack_options(args)
    check_captured(args, sampling)

    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.decode.full import generate

    begun = time.perf_counter()
    model = load_any_model(args, **pack)
    loaded = time.perf_counter()
    how: dict[str, Any] = {"control": read_depth(args, model), "exiting": exiting}
    inputs = _encode(args, model, prompts)
    if args.captured:
        session = open_session(args, decoder_only(model, "--captured"), **how)
        on_text = _show if args.stream else None
        results = [session.generate(prompt, sampling, on_text=on_text) for prompt in inputs]
        print(end="\n" if args.stream else "")
    elif args.stream:
        results = generate(model, inputs, sampling, on_text=lambda _, piece: _show(piece), **how)
        print()
    else:
        with _progress(sampling.max_new_tokens) as on_step:
            results = generate(model, inputs, sampling, on_step=on_step, **how)
    if args.json:
        record = _record(args, model, prompts, results, load_seconds=loaded - begun)
        record["exits"] = exit_record(exiting, model, results)
        print(json.dumps(record, ensure_ascii=False))
        return 0
    if not args.stream:
        _print_texts(prompts, results)
    print(_statistic(results), file=sys.stderr)
    return 0


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _check(args: argparse.Namespace, prompts: Sequence[str]) -> None:
    if not prompts:
        raise OptionError("give a prompt: -p TEXT, -p - for standard input, or --prompt-file FILE")
    if args.system is not None and not args.chat:
        raise OptionError("--system goes with --chat")
    if args.stream and len(prompts) > 1:
        raise OptionError(f"--stream shows one text as it is made, but there are {len(prompts)} prompts; leave it out")
    if args.stream and args.json:
        raise OptionError("--stream and --json exclude each other: JSON is printed whole, at the end")


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt.count("-") > 1:
        raise OptionError("standard input can be read once only; give '-p -' once")
    prompts = [_read_input() if prompt == "-" else prompt for prompt in args.prompt]
    if args.prompt_file is not None:
        prompts += [line for line in _read_file(args.prompt_file).splitlines() if line.strip()]
    return prompts


def _read_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error


def _encode(args: argparse.Namespace, model: FathomModel, prompts: Sequence[str]) -> Sequence[str] | Sequence[list[int]]:
    from fathomlm.decode.prompts import chat_prompt

    if not args.chat:
        return prompts
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [chat_prompt(model, [*system, {"role": "user", "content": prompt}]) for prompt in prompts]


@contextmanager
def _progress(most: int) -> Iterator[Callable[[int], None] | None]:
    """Tokens, rate and time left on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("tokens  {task.fields[rate]:.1f} tokens/s, at most")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=most, rate=0.0)
        begun = time.perf_counter()

        def on_step(done: int) -> None:
            progress.update(task, completed=done, rate=done / (time.perf_counter() - begun))

        yield on_step


def _print_texts(prompts: Sequence[str], results: Sequence[Generation]) -> None:
    if len(results) == 1:
        print(results[0].text)
        return
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1):
        start = " ".join(prompt.split())
        print(f"--- {number}: {start if len(start) <= 60 else start[:57] + '...'}")
        print(result.text)


def _rate(results: Sequence[Generation]) -> float:
    """Tokens a second of the whole batch while decoding; the first token of each row belongs to the prefill."""
    seconds = max(result.decode_seconds for result in results)
    tokens = sum(len(result.tokens) - 1 for result in results)
    return tokens / seconds if tokens else 0.0


def _statistic(results: Sequence[Generation]) -> str:
    prompt_tokens = sum(len(result.prompt_tokens) for result in results)
    tokens = sum(len(result.tokens) for result in results)
    seconds = max(result.decode_seconds for result in results)
    ended = ENDED[results[0].finish] if len(results) == 1 else f"{len(results)} texts"
    return (
        f"[{prompt_tokens} prompt tokens in {results[0].prefill_seconds:.2f} s, {tokens} new in {seconds:.2f} s, "
        f"{_rate(results):.1f} tokens/s; {_depths(results)}{exit_statistic(results)}{ended}]"
    )


def _depths(results: Sequence[Generation]) -> str:
    """How deep the new tokens went, where a router chose."""
    depths = [depth for result in results for depth in result.depths or ()]
    if not depths:
        return ""
    counts = ", ".join(f"{depths.count(depth)} x {depth}" for depth in range(1, max(depths) + 1))
    return f"mean depth {sum(depths) / len(depths):.2f} ({counts}); "


def _record(
    args: argparse.Namespace,
    model: FathomModel,
    prompts: Sequence[str],
    results: Sequence[Generation],
    load_seconds: float,
) -> dict[str, Any]:
    from fathomlm.checkpoints.resolve import describe, dtype_name

    rows = [
        {"prompt": prompt, **asdict(result), "tokens_per_second": result.tokens_per_second}
        for prompt, result in zip(prompts, results, strict=True)
    ]
    return {
        "model": args.model,
        "exit_pack": None if args.exits is None else str(args.exits),
        "plan": describe(model),
        "dtype": dtype_name(model),
        "device": args.device,
        "results": rows,
        "timings": {
            "load_seconds": load_seconds,
            "prefill_seconds": results[0].prefill_seconds,
            "decode_seconds": max(result.decode_seconds for result in results),
        },
        "tokens_per_second": _rate(results),
    }
