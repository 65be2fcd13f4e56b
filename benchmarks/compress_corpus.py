"""Text to compress a model on: a part of a corpus in which some of its sources have a larger share.

    python benchmarks/compress_corpus.py --corpus CORPUS --out data/compress-vocab/train.jsonl.xz

CORPUS has files train-*.jsonl.xz with an `id`, a `source` and a `text` on each line. --share of the characters are of --of
(novels, of which LAMBADA is made, are a seventh of the whole corpus); documents are taken in the order of a checksum of
their ids, so that the same command gives the same file, and every part of it has the same mix.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from fathomlm.errors import writing
from fathomlm.sizes import parse_count

NOVELS = ("novels-100en", "standardebooks")


def documents(corpus: Path) -> Iterator[tuple[str, str, str]]:
    """Checksum of the id, source and line of every document."""
    for path in sorted(corpus.glob("train-*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                found = json.loads(line)
                yield hashlib.sha256(str(found["id"]).encode()).hexdigest(), found["source"], found["text"]


def chosen(found: list[tuple[str, str, int]], wanted: frozenset[str], share: float, characters: int) -> set[str]:
    """The documents, by checksum, that give so many characters, a share of them of the wanted sources: (checksum, source,
    characters) of each in `found`. Where one kind runs out there is less of it."""
    room = {True: share * characters, False: (1 - share) * characters}
    kept = set()
    for mark, source, length in sorted(found):
        kind = source in wanted
        if room[kind] > 0:
            room[kind] -= length
            kept.add(mark)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--of", nargs="+", default=NOVELS, help="sources that have a share of their own")
    parser.add_argument("--share", type=float, default=0.3, help="of the characters")
    parser.add_argument("--characters", type=lambda text: parse_count(text, "--characters"), default=210_000_000)
    args = parser.parse_args()
    wanted = frozenset(args.of)
    found = [(mark, source, len(text)) for mark, source, text in documents(args.corpus)]
    if not found:
        parser.error(f"{args.corpus} has no train-*.jsonl.xz")
    kept = chosen(found, wanted, args.share, args.characters)
    lines = sorted((mark, source, text) for mark, source, text in documents(args.corpus) if mark in kept)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_name(f".{args.out.name}.partial")
    with writing(args.out), lzma.open(partial, "wt", encoding="utf-8", preset=6) as file:
        for mark, source, text in lines:
            file.write(json.dumps({"id": mark[:16], "source": source, "text": text}, ensure_ascii=False) + "\n")
    partial.rename(args.out)
    total = sum(len(text) for _, _, text in lines)
    own = sum(len(text) for _, source, text in lines if source in wanted)
    print(f"{args.out}: {len(lines):,} documents, {total / 1e6:.1f}M characters, {own / total:.1%} of {', '.join(args.of)}")


if __name__ == "__main__":
    main()
