"""`fathomlm data`: prepare text for training, check what is there, show what is in it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.checkpoints.heartbeat import Heartbeat
from fathomlm.cli.common import JsonOptions
from fathomlm.cli.display import progress_bar, rich_bar
from fathomlm.cli.first import check_text
from fathomlm.options import like, option
from fathomlm.sizes import amount
from fathomlm.train.data import PrepareOptions

if TYPE_CHECKING:
    from fathomlm.train.data.corpus import Corpus
    from fathomlm.train.data.prepare import OnProgress, PreparationProgress

_SHOWN = 400
"""Characters of a document that `show` prints."""


@dataclass(frozen=True, kw_only=True)
class Prepare(PrepareOptions, JsonOptions):
    """Tokenize SOURCES into the directory OUT. A stopped preparation continues when the same command is run again."""

    sources: tuple[str, ...] = like(PrepareOptions, "sources", first=check_text)
    validation_from: tuple[str, ...] = like(PrepareOptions, "validation_from", first=check_text)
    workers: int = like(PrepareOptions, "workers", len(os.sched_getaffinity(0)), default_text="all CPUs")

    def run(self) -> int:
        from fathomlm.train.data.manifest import FILE, Manifest
        from fathomlm.train.data.prepare import prepare

        begin = time.perf_counter()
        there = (self.out / FILE).is_file() and not self.force
        earlier = Manifest.read(self.out) if there else None
        try:
            with _bar() as on_progress:
                corpus = prepare(self, on_progress)
        except KeyboardInterrupt:
            print(f"fathomlm: interrupted; {_kept(self.out)}", file=sys.stderr)
            return 2
        seconds = time.perf_counter() - begin
        already = earlier is not None and earlier.complete
        if self.json:
            resumed = earlier is not None and earlier.started and not already
            record = {**_record(corpus), "already": already, "resumed": resumed, "seconds": round(seconds, 3)}
            print(json.dumps(record))
            return 0
        if already:
            print(f"{self.out} is already complete; nothing was done (--force starts again)")
        print(_summary(corpus) + ("" if already else f", {seconds:.1f} s"))
        manifest = corpus.manifest
        if manifest.empty_documents:
            print(f"  skipped {manifest.empty_documents:,} documents without text")
        if manifest.long_documents:
            print(f"  skipped {manifest.long_documents:,} documents of more than {manifest.skip_above:,} bytes")
        if not corpus.has("train"):
            print("  nothing to train on: every document was held out; see --validation-fraction")
        if not corpus.has("validation") and manifest.validation_fraction:
            print(f"  too few documents to hold any out; raise --validation-fraction above {self.fraction:g}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Check(JsonOptions):
    """Read all of a corpus and compare it with its checksums."""

    corpus: Path = option(positional=True, help="directory written by `fathomlm data prepare`")

    def run(self) -> int:
        from fathomlm.train.data.corpus import Corpus

        corpus = Corpus.open(self.corpus)
        with progress_bar("checking", unit="shards") as update:
            corpus.verify(update)
        corpus.load_tokenizer()  # beside the shards, and without a checksum
        if self.json:
            print(json.dumps({**_record(corpus), "whole": True}))
        else:
            print(_summary(corpus))
            print("  all sizes and checksums match")
        return 0


@dataclass(frozen=True, kw_only=True)
class ShowData(JsonOptions):
    """Print the counts of a corpus and its first documents as text."""

    corpus: Path = like(Check, "corpus")
    split: Literal["train", "validation"] = option("train", help="which part")
    number: int = option(3, ge=0, help="how many documents")

    def run(self) -> int:
        from fathomlm.train.data.corpus import Corpus

        corpus = Corpus.open(self.corpus, unfinished=True)
        documents = list(_documents(corpus, self.split, self.number))
        if self.json:
            print(json.dumps({**_record(corpus), "split": self.split, "shown": documents}))
            return 0
        print(_summary(corpus))
        pairs = corpus.manifest.kind == "pairs"
        for number, fields in enumerate(documents):
            print(f"--- {self.split} {'pair' if pairs else 'document'} {number}, {fields.pop('tokens'):,} tokens")
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

    console = Console(stderr=True)
    with rich_bar(console, "{task.fields[counts]}", counted=False) as bar:
        task = bar.add_task("preparing", total=None, counts="")
        begin = time.perf_counter()
        heartbeat = Heartbeat(bar=console.is_terminal)

        def tell(progress: PreparationProgress) -> None:
            rate = progress.characters / max(1e-9, time.perf_counter() - begin)
            counts = f"{amount(progress.documents)} documents, {amount(progress.tokens)} tokens, {amount(rate, 'B')}/s"
            if heartbeat.due():
                done = "" if progress.share is None else f" ({progress.share:.0%})"
                heartbeat.tell(f"preparing: {counts}{done}")
            total = None if progress.share is None else 1.0
            bar.update(task, completed=progress.share or 0.0, total=total, counts=counts)

        yield tell
