"""`fathomlm data`: prepare text for training, check what is there, show what is in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import amount, layer_bar

if TYPE_CHECKING:
    from fathomlm.train.data.corpus import Corpus
    from fathomlm.train.data.prepare import OnProgress, PrepareOptions
    from fathomlm.train.data.segments import PreparationProgress

HELP = "prepare text for training"
DESCRIPTION = "Turns text into a corpus: a directory of tokens that training reads. A corpus belongs to one tokenizer."
_SHOWN = 400
"""Characters of a document that `show` prints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    prepare = actions.add_parser(
        "prepare",
        help="tokenise text into a corpus",
        description="Tokenises SOURCES into the directory OUT. A preparation that was stopped goes on when the same "
        "command is given again.",
    )
    _add_prepare_arguments(prepare)
    check = actions.add_parser(
        "check", help="compare a corpus with its checksums", description="Reads all of a corpus and compares checksums."
    )
    show = actions.add_parser(
        "show", help="print what is in a corpus", description="Prints a corpus's counts and its first documents as text."
    )
    for each in (check, show):
        each.add_argument("out", metavar="CORPUS", type=Path, help="a directory that `data prepare` made")
        each.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    show.add_argument("--split", choices=("train", "validation"), default="train", help="which part (train)")
    show.add_argument("--number", metavar="N", type=int, default=3, help="how many documents (3)")


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="text (.txt, .md), JSON lines (.jsonl, also .gz, .xz, .zst), Parquet; directories and patterns of these; "
        "or hf:owner/name, hf:owner/name:config@split from the Hugging Face hub",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    parser.add_argument(
        "--tokenizer", metavar="T", required=True, help="a model source, a tokenizer's directory or file, or: bytes"
    )
    what = parser.add_argument_group("what is taken").add_argument
    what("--column", metavar="NAME", default="text", help="where the text is in JSON lines and tables (text)")
    what("--pairs", metavar=("SOURCE", "TARGET"), nargs=2, help="two columns: make pairs, to learn TARGET from SOURCE")
    what("--source-prefix", metavar="TEXT", default="", help="pairs: put in front of every source, such as 'summarize: '")
    what("--max-tokens", metavar="N", help="stop at about so many training tokens: 500M, 2B (all)")
    what("--max-document-bytes", metavar="SIZE", default="16MB", help="largest document; a larger one is an error (16MB)")
    what("--skip-long", action="store_true", help="leave larger documents out, and count them")
    what("--separator", metavar="TOKEN", help="token behind every document (<|endoftext|>, or the tokenizer's end token)")
    held = parser.add_argument_group("what is held out for validation").add_argument
    held("--validation-fraction", metavar="F", type=float, help="share of the documents (0.01; 0 with --validation-from)")
    held("--validation-from", metavar="SOURCE", action="append", default=[], help="a source held out whole; repeatable")
    how = parser.add_argument_group("how it is done").add_argument
    how("--shard-tokens", metavar="N", default="32M", help="tokens a file, which is also how often it is saved (32M)")
    how("--workers", metavar="N", type=int, help="processes that tokenise (as many as there are CPUs)")
    parser.add_argument("--force", action="store_true", help="delete the corpus in OUT and start again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    return {"prepare": _prepare, "check": _check, "show": _show}[args.action](args)


def _prepare(args: argparse.Namespace) -> int:
    from fathomlm.train.data.manifest import FILE, Manifest
    from fathomlm.train.data.prepare import prepare

    options = _options(args)
    begin = time.perf_counter()
    there = (args.out / FILE).is_file() and not args.force
    earlier = Manifest.read(args.out) if there else None
    try:
        with _bar() as tell:
            corpus = prepare(options, tell)
    except KeyboardInterrupt:
        print(f"fathomlm: interrupted; {_kept(args.out)}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - begin
    already = earlier is not None and earlier.complete
    if args.json:
        resumed = earlier is not None and earlier.started and not already
        record = {**_record(corpus), "already": already, "resumed": resumed, "seconds": round(seconds, 3)}
        print(json.dumps(record))
        return 0
    if already:
        print(f"{args.out} is complete already; nothing was done (--force starts again)")
    print(_summary(corpus) + ("" if already else f", {seconds:.1f} s"))
    if corpus.manifest.empty_documents:
        print(f"  {corpus.manifest.empty_documents:,} documents without text were left out")
    if corpus.manifest.long_documents:
        most = corpus.manifest.skip_above
        print(f"  {corpus.manifest.long_documents:,} documents of more than {most:,} bytes were left out")
    if not corpus.has("train"):
        print("  there is nothing to train on: every document was held out; see --validation-fraction")
    if not corpus.has("validation") and corpus.manifest.validation_fraction:
        print(f"  of so few documents none was held out; --validation-fraction above {options.fraction:g} would")
    return 0


def _options(args: argparse.Namespace) -> PrepareOptions:
    from fathomlm.sizes import parse_size
    from fathomlm.train.data.prepare import PrepareOptions
    from fathomlm.train.recipe import parse_amount

    return PrepareOptions(
        sources=tuple(args.sources),
        out=args.out,
        tokenizer=args.tokenizer,
        column=args.column,
        pairs=None if args.pairs is None else (args.pairs[0], args.pairs[1]),
        source_prefix=args.source_prefix,
        validation_fraction=args.validation_fraction,
        validation_from=tuple(args.validation_from),
        separator=args.separator,
        shard_tokens=round(parse_amount("--shard-tokens", args.shard_tokens)),
        max_tokens=None if args.max_tokens is None else round(parse_amount("--max-tokens", args.max_tokens)),
        max_document_bytes=parse_size(args.max_document_bytes, "--max-document-bytes"),
        skip_long=args.skip_long,
        workers=len(os.sched_getaffinity(0)) if args.workers is None else args.workers,
        force=args.force,
    )


def _check(args: argparse.Namespace) -> int:
    from fathomlm.train.data.corpus import Corpus

    corpus = Corpus.open(args.out)
    with layer_bar("checking", unit="shards") as tick:
        corpus.verify(tick)
    if args.json:
        print(json.dumps({**_record(corpus), "whole": True}))
    else:
        print(_summary(corpus))
        print("  all sizes and checksums are right")
    return 0


def _show(args: argparse.Namespace) -> int:
    from fathomlm.errors import OptionError
    from fathomlm.train.data.corpus import Corpus

    if args.number < 0:
        raise OptionError(f"--number must not be negative, but is {args.number}")
    corpus = Corpus.open(args.out, unfinished=True)
    documents = list(_documents(corpus, args.split, args.number))
    if args.json:
        print(json.dumps({**_record(corpus), "split": args.split, "shown": documents}))
        return 0
    print(_summary(corpus))
    pairs = corpus.manifest.kind == "pairs"
    for number, fields in enumerate(documents):
        print(f"--- {args.split} {'pair' if pairs else 'document'} {number}, {fields.pop('tokens'):,} tokens")
        for name, text in fields.items():
            short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} [...]"
            print(f"{name}: {short}" if pairs else short)
    return 0


def _documents(corpus: Corpus, split: str, number: int) -> Iterator[dict[str, Any]]:
    """The first documents, decoded: their text, or their source and target."""
    tokenizer = corpus.load_tokenizer()
    if number and corpus.manifest.kind == "pairs":
        pairs = corpus.pairs(split)
        for at in range(min(number, len(pairs))):
            source, target = pairs.pair(at)
            yield {
                "tokens": len(source) + len(target),
                "source": tokenizer.decode(source.tolist()),
                "target": tokenizer.decode(target.tolist()),
            }
    elif number:
        stream = corpus.stream(split)
        for at in range(min(number, stream.documents)):
            tokens = stream.document(at)
            yield {"tokens": len(tokens), "text": tokenizer.decode(tokens.tolist())}


def _record(corpus: Corpus) -> dict[str, Any]:
    manifest = corpus.manifest
    splits = {
        name: {"tokens": split.tokens, "documents": split.documents, "shards": len(split.shards)}
        for name, split in manifest.splits.items()
    }
    return {
        "out": str(corpus.path),
        "kind": manifest.kind,
        "tokenizer": manifest.tokenizer,
        "fingerprint": manifest.fingerprint,
        "vocab": manifest.vocab,
        "splits": splits,
        "empty_documents": manifest.empty_documents,
        "long_documents": manifest.long_documents,
        "complete": manifest.complete,
    }


def _summary(corpus: Corpus) -> str:
    manifest = corpus.manifest
    what = "pair" if manifest.kind == "pairs" else "document"
    parts = [
        f"{name} {amount(split.tokens)} tokens in {split.documents:,} {what if split.documents == 1 else what + 's'}"
        for name, split in manifest.splits.items()
        if split.documents
    ]
    unfinished = "" if manifest.complete else " (not finished)"
    return f"{corpus.path}{unfinished}: {', '.join(parts)}; tokenizer {manifest.tokenizer} ({manifest.vocab:,} tokens)"


def _kept(out: Path) -> str:
    """What an interrupted preparation left to go on from."""
    from fathomlm.train.data.manifest import FILE, Manifest

    if not (out / FILE).is_file():
        return "no file was finished, so nothing was kept"
    tokens = sum(split.tokens for split in Manifest.read(out).splits.values())
    return f"{amount(tokens)} tokens are kept in {out}, and the same command goes on from there"


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """A bar for a preparation: documents, tokens, rate and, where the sources' sizes are known, the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=None, counts="")
        begin = time.perf_counter()

        def tell(progress: PreparationProgress) -> None:
            rate = progress.characters / max(1e-9, time.perf_counter() - begin)
            counts = f"{amount(progress.documents)} documents, {amount(progress.tokens)} tokens, {amount(rate, 'B')}/s"
            total = None if progress.share is None else 1.0
            bar.update(task, completed=progress.share or 0.0, total=total, counts=counts)

        yield tell
