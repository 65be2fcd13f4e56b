"""`fathomlm calibrate MODEL --data F`: learn the threshold at which tokens may leave early."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.exit_options import add_pack_arguments, learnt_place, pack_options, read_layers
from fathomlm.cli.sampling_options import add_model_arguments, load_any_model
from fathomlm.errors import DataError, OptionError

if TYPE_CHECKING:
    from fathomlm.decode.calibration import Calibration
    from fathomlm.decode.generation import Generation
    from fathomlm.decode.threshold import ThresholdEstimator
    from fathomlm.model.seq2seq import FathomModel

HELP = "learn when tokens may leave early"
DESCRIPTION = (
    "Make texts from the beginnings of documents, watch at every token whether an exit would have chosen what the whole "
    "model chooses, and fit the confidence from which it mostly does (two Beta densities). The result goes into the model's "
    "directory as threshold.json, with a picture, and `generate --threshold adaptive` reads it there."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--data", metavar="FILE", nargs="+", required=True, help="text, JSON lines or Parquet: documents to begin from")
    add("--column", metavar="NAME", default="text", help="where the text is in JSON lines and Parquet (text)")
    add("--texts", metavar="N", type=int, default=32, help="documents to begin from (default: 32)")
    begin = "tokens of each document that are the prompt (default: 32; an encoder reads up to 512)"
    add("--prompt-tokens", metavar="N", type=int, help=begin)
    add("--chat", action="store_true", help="documents are messages, each put whole into the model's chat template")
    add("--max-new-tokens", metavar="N", type=int, default=64, help="length of each text (default: 64)")
    add("--exit-layer", metavar="N", action="append", help="leave after layer N, from 1 (default: the model's own exit)")
    add("--confidence", metavar="KIND", help="gap (default), max, state or classifier")
    add_pack_arguments(add)
    likely = "how likely agreement must be above the threshold (default: 0.4)"
    add("--condition", metavar="P", type=float, default=0.4, help=likely)
    priors = "whether both classes count alike (equal, default) or as often as they occur (measured)"
    add("--priors", metavar="KIND", default="equal", help=priors)
    add("--out", metavar="DIR", type=Path, help="where to write (default: --exits, or MODEL if that is a directory)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from fathomlm.decode.calibration import FILE, calibrate
    from fathomlm.decode.sampling import Sampling
    from fathomlm.decode.threshold import ThresholdOptions
    from fathomlm.lab.analyze.threshold_picture import draw_threshold
    from fathomlm.lab.drawing import check_matplotlib

    out = _out_directory(args)
    layer, pack = _one_layer(args), pack_options(args)
    for name in ("texts", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if args.prompt_tokens is not None and args.prompt_tokens < 1:
        raise OptionError(f"--prompt-tokens must be >= 1, got {args.prompt_tokens}")
    if args.chat and args.prompt_tokens is not None:
        raise OptionError("--chat takes messages whole; leave out --prompt-tokens")
    learning: dict[str, Any] = {"condition": args.condition, "priors": args.priors}
    ThresholdOptions(**learning)  # refuses what is out of range, before anything is loaded
    check_matplotlib()
    documents = _documents(args)
    model = load_any_model(args, **pack)
    prompts = [_message(model, text) if args.chat else _beginning(model, text, args.prompt_tokens) for text in documents]
    sampling = Sampling(max_new_tokens=args.max_new_tokens)
    with _progress(len(prompts)) as on_text:
        found = calibrate(
            model,
            prompts,
            sampling,
            exit_layer=layer,
            confidence=args.confidence,
            options=ThresholdOptions(calibrating_sequences=len(prompts), **learning),
            on_text=on_text,
        )
    out.mkdir(parents=True, exist_ok=True)
    found.save(out / FILE)
    picture = (out / FILE).with_suffix(".png")
    draw_threshold(found.estimator, picture, name=args.model)
    record = _record(found, out / FILE, picture)
    print(json.dumps(record) if args.json else _describe(record))
    return 0


def _one_layer(args: argparse.Namespace) -> int | None:
    layers = read_layers(args.exit_layer)
    if layers is not None and len(layers) != 1:
        raise OptionError(f"a threshold is for one exit, got {len(layers)}; calibrate them one after the other")
    return None if layers is None else layers[0]


def _out_directory(args: argparse.Namespace) -> Path:
    if args.out is not None:
        if args.out.exists() and not args.out.is_dir():
            raise OptionError(f"{args.out} is not a directory")
        out: Path = args.out
        return out
    path = learnt_place(args)
    if args.exits is None and not (path / "config.json").is_file():
        raise OptionError(f"{args.model} is no directory to write a threshold into; say where with --out DIR")
    return path


def _documents(args: argparse.Namespace) -> list[str]:
    from fathomlm.train.data.sources import expand, read

    sources = expand([str(pattern) for pattern in args.data])
    documents = chain.from_iterable(read(source, (args.column,)) for source in sources)
    texts = [document.fields[0] for document in islice(documents, args.texts) if document.fields[0].strip()]
    if not texts:
        raise DataError(f"{', '.join(str(name) for name in args.data)} has no text to begin from")
    return texts


def _beginning(model: FathomModel, text: str, most: int | None) -> list[int]:
    from fathomlm.decode.prompts import encode_prompt
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM

    tokens = encode_prompt(model, text)
    return tokens[: most or (512 if isinstance(model, FathomForSeq2SeqLM) else 32)]


def _message(model: FathomModel, text: str) -> list[int]:
    from fathomlm.decode.prompts import chat_prompt

    return chat_prompt(model, [{"role": "user", "content": text}])


@contextmanager
def _progress(many: int) -> Iterator[Callable[[Generation, ThresholdEstimator], None] | None]:
    """Texts and the threshold so far on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = TextColumn("texts, threshold {task.fields[threshold]:.3f}")
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), shown, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=many, threshold=0.9)

        def on_text(text: Generation, estimator: ThresholdEstimator) -> None:
            progress.update(task, advance=1, threshold=estimator.threshold)

        yield on_text


def _record(found: Calibration, path: Path, picture: Path) -> dict[str, Any]:
    estimator = found.estimator
    last = estimator.history[-1]
    return {
        "threshold": estimator.threshold,
        "exit_layer": found.exit_layer,
        "confidence": found.confidence,
        "texts": estimator.sequences,
        "agreements": last.agreements,
        "disagreements": last.disagreements,
        "agree": {"alpha": last.agree.alpha, "beta": last.agree.beta},
        "disagree": {"alpha": last.disagree.alpha, "beta": last.disagree.beta},
        "condition": estimator.options.condition,
        "history": [{"text": refit.sequence, "threshold": refit.threshold} for refit in estimator.history],
        "file": str(path),
        "picture": str(picture),
    }


def _describe(record: dict[str, Any]) -> str:
    samples = record["agreements"] + record["disagreements"]
    part = record["agreements"] / samples if samples else 0.0
    lines = [
        f"threshold {record['threshold']:.3f}: confidence '{record['confidence']}' after layer {record['exit_layer']}",
        f"{record['texts']} texts, {samples} tokens; the exit agreed with the whole model at {part:.1%} of them",
        _beta("agreed", record["agreements"], record["agree"]),
        _beta("did not", record["disagreements"], record["disagree"]),
        f"wrote {record['file']} and {record['picture']}",
    ]
    return "\n".join(lines)


def _beta(name: str, count: int, fit: dict[str, float]) -> str:
    return f"  {name:8} {count:>6} tokens, Beta({fit['alpha']:.3g}, {fit['beta']:.3g})"
