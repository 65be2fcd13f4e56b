"""A prepared corpus: opened, checked, and read as one long stream of tokens whatever its shards are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fathomlm.errors import DataError, choices
from fathomlm.train.data.manifest import SPLITS, Manifest, Shard, Split
from fathomlm.train.data.shards import SAMPLE, damaged
from fathomlm.train.data.tokenizers import find_tokenizer, fingerprint

Verify = Literal["off", "sample", "full"]
TOKENIZER = "tokenizer"
"""The directory in which a corpus keeps its tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A corpus directory whose files are all there."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, verify: Verify = "off", unfinished: bool = False) -> Corpus:
        """Read corpus.json and compare every shard's sizes with it; `sample` and `full` then verify the contents.

        `unfinished` also opens a corpus whose preparation was stopped; training on one would later seem irreproducible.
        """
        path = Path(path).expanduser()
        manifest = Manifest.read(path)
        if not manifest.complete and not unfinished:
            raise DataError(f"{path} is incomplete; run the same `fathomlm data prepare` again to resume it")
        check_sizes(path, manifest)
        corpus = cls(path=path, manifest=manifest)
        corpus.check(verify)
        return corpus

    def check(self, verify: bool | Verify) -> None:
        """Verify everything, a sample, or nothing."""
        if verify in (True, "full"):
            self.verify()
        elif verify == "sample":
            self.verify_sample()

    @property
    def checksum(self) -> str:
        """What a corpus is known by: the checksums of all its shards."""
        shards = [shard for name in sorted(self.manifest.splits) for shard in self.manifest.splits[name].shards]
        return hashlib.sha256("".join(shard.sha256 + shard.index_sha256 for shard in shards).encode()).hexdigest()[:16]

    def verify(self, on_shard: Callable[[int, int], None] | None = None) -> None:
        """Read all shards and compare their checksums. `on_shard` is called with (done, total)."""
        shards = self._all_shards()
        for number, shard in enumerate(shards, start=1):
            self._verify_shard(shard)
            if on_shard is not None:
                on_shard(number, len(shards))

    def verify_sample(self, budget: int = SAMPLE) -> None:
        """Compare as many random blocks with their checksums as `budget` bytes hold: all of a small corpus, and of a large
        one enough to find a file that was cut, zeroed or copied wrongly, though rarely a single flipped bit.

        Shards without checksums of blocks, from an earlier version, are read as a whole while they fit in the budget.
        """
        draw, shards = random.SystemRandom(), self._all_shards()
        if (file := damaged(self.path, shards, budget, draw)) is not None:
            raise DataError(_ALTERED.format(file=file))
        older = [shard for shard in shards if not shard.blocks]
        for shard in draw.sample(older, len(older)):
            size = sum(file.stat().st_size for _, files in self._files(shard) for file in files)
            if size <= budget:
                budget -= size
                self._verify_shard(shard)

    def _all_shards(self) -> list[Shard]:
        return [shard for name in SPLITS for shard in self.manifest.splits[name].shards]

    def _verify_shard(self, shard: Shard) -> None:
        for wanted, files in self._files(shard):
            if _digest(files) != wanted:
                raise DataError(_ALTERED.format(file=files[0]))

    def _files(self, shard: Shard) -> list[tuple[str, list[Path]]]:
        """A shard's files, with the checksums over them."""
        index = [".idx", ".mid"] if self.manifest.kind == "pairs" else [".idx"]
        of = (self.path / shard.file).with_suffix
        return [(shard.sha256, [of(".bin")]), (shard.index_sha256, [of(suffix) for suffix in index])]

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that is not the corpus's: its tokens would mean something else."""
        theirs, ours = fingerprint(tokenizer), self.manifest.fingerprint
        if theirs != ours:
            raise DataError(
                f"{self.path} was made with the tokenizer {self.manifest.tokenizer} ({ours[:12]}, {self.manifest.vocab:,} "
                f"tokens), but the model's is {theirs[:12]} with {len(tokenizer):,}; prepare the text again with the model's"
            )

    def load_tokenizer(self) -> Any:
        """The tokenizer that the corpus was made with."""
        return find_tokenizer(str(self.path / TOKENIZER))

    def has(self, split: str) -> bool:
        """Whether a split holds anything."""
        return self._split(split).documents > 0

    def stream(self, split: str = "train") -> TokenStream:
        """A split's documents as one stream of tokens."""
        return TokenStream(self._shards(split, "tokens"))

    def pairs(self, split: str = "train") -> PairStream:
        """A split's pairs."""
        return PairStream(self._shards(split, "pairs"))

    def _split(self, name: str) -> Split:
        if name not in SPLITS:
            raise DataError(choices("split", name, SPLITS))
        return self.manifest.splits[name]

    def _shards(self, name: str, kind: str) -> list[_MappedShard]:
        split = self._split(name)
        if self.manifest.kind != kind:
            raise DataError(f"{self.path} holds {self.manifest.kind}, and {kind} are required here (see --pairs of prepare)")
        if not split.documents:
            raise DataError(f"{self.path} has no {name} documents; prepare it with another --validation-fraction")
        return [_MappedShard(self.path, shard, self.manifest) for shard in split.shards]


class _MappedShard:
    """A shard's files, mapped into memory: only what is read is loaded, and processes on one machine share it."""

    def __init__(self, directory: Path, shard: Shard, manifest: Manifest) -> None:
        path = directory / shard.file
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.tokens = np.memmap(path, dtype=dtype, mode="r")
        self.starts = np.memmap(path.with_suffix(".idx"), dtype="<u8", mode="r")
        self.middles = np.memmap(path.with_suffix(".mid"), dtype="<u8", mode="r") if manifest.kind == "pairs" else None


class _Documents:
    """What streams of tokens and of pairs have in common: documents, numbered through all shards."""

    def __init__(self, shards: list[_MappedShard]) -> None:
        self._shards = shards
        self._first_token = np.cumsum([0, *(len(shard.tokens) for shard in shards)])
        self._first_document = np.cumsum([0, *(len(shard.starts) - 1 for shard in shards)])

    @property
    def documents(self) -> int:
        return int(self._first_document[-1])

    def document(self, number: int) -> npt.NDArray[np.int64]:
        """One document's tokens, its separator included; for a pair, source and target in one."""
        shard, at = self._place(number)
        return shard.tokens[int(shard.starts[at]) : int(shard.starts[at + 1])].astype(np.int64)

    def _place(self, number: int) -> tuple[_MappedShard, int]:
        if not 0 <= number < self.documents:
            raise IndexError(f"document {number} of {self.documents}")
        index = int(np.searchsorted(self._first_document, number, side="right")) - 1
        return self._shards[index], number - int(self._first_document[index])


class TokenStream(_Documents):
    """A split's tokens as one sequence."""

    def __len__(self) -> int:
        return int(self._first_token[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `stop`, across shards."""
        parts = [shard.tokens[begin:end] for _, shard, begin, end in self._cover(start, stop)]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def document_of(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The number of the document in which each token of a range stands."""
        parts = [
            self._first_document[index] + np.searchsorted(shard.starts, np.arange(begin, end), side="right") - 1
            for index, shard, begin, end in self._cover(start, stop)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def _cover(self, start: int, stop: int) -> list[tuple[int, _MappedShard, int, int]]:
        """The shards that a range touches, with the part of each that it takes."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        first = int(np.searchsorted(self._first_token, start, side="right")) - 1
        last = int(np.searchsorted(self._first_token, stop, side="left"))
        parts = []
        for index in range(first, min(last, len(self._shards))):
            shard, base = self._shards[index], int(self._first_token[index])
            parts.append((index, shard, max(start - base, 0), min(stop - base, len(shard.tokens))))
        return parts


class PairStream(_Documents):
    """A split's pairs, by number."""

    def __len__(self) -> int:
        return self.documents

    def pair(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source tokens, and target tokens with the separator."""
        source, target = self.lengths(number)
        tokens = self.document(number)
        assert len(tokens) == source + target
        return tokens[:source], tokens[source:]

    def lengths(self, number: int) -> tuple[int, int]:
        """How long source and target are, without reading them."""
        shard, at = self._place(number)
        assert shard.middles is not None
        start, middle, end = int(shard.starts[at]), int(shard.middles[at]), int(shard.starts[at + 1])
        return middle - start, end - middle


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Every file that the manifest names is there, with the size that follows from its counts."""
    width = np.dtype(manifest.dtype).itemsize
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        wanted = {".bin": shard.tokens * width, ".idx": (shard.documents + 1) * 8}
        if manifest.kind == "pairs":
            wanted[".mid"] = shard.documents * 8
        for suffix, size in wanted.items():
            file = (directory / shard.file).with_suffix(suffix)
            if not file.is_file():
                raise DataError(f"{file} is missing; {_MEND}")
            if (found := file.stat().st_size) != size:
                raise DataError(f"{file} has {found:,} bytes in place of {size:,}: it was cut or altered; {_MEND}")
        starts = np.memmap((directory / shard.file).with_suffix(".idx"), dtype="<u8", mode="r")
        if starts[0] != 0 or starts[-1] != shard.tokens:
            raise DataError(f"{(directory / shard.file).with_suffix('.idx')} does not fit its tokens; {_MEND}")


_MEND = "copy the corpus again, or make it again with `fathomlm data prepare --force`"
_ALTERED = "{file} was altered since it was written (wrong checksum); " + _MEND


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
