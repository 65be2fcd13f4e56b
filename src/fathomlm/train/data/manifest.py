"""corpus.json: what a corpus holds, what it was made from, and how far its preparation has come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from fathomlm.checkpoints.writing import SEAL, is_sealed, seal, whole_file
from fathomlm.errors import DataError
from fathomlm.fields import Fields, shown
from fathomlm.jsonfile import read_object
from fathomlm.train.data.sources import DataSource

FILE = "corpus.json"
VERSION = 2
READS = (1, 2)
"""Version 1 has neither checksums of blocks nor one of corpus.json itself."""
SPLITS = ("train", "validation")
MAX_MANIFEST = 64 << 20
_MOST = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens with its index beside it."""

    file: str
    """The .bin file; .idx, and .mid for pairs, have the same stem."""
    tokens: int
    documents: int
    sha256: str
    """Of the tokens."""
    index_sha256: str
    """Of the .idx file, followed by the .mid file where there is one."""
    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By suffix, the checksums of a file's blocks (`shards.py`); empty in corpora that were made before there were any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """All that is trained on, or all that is held out."""

    tokens: int = 0
    documents: int = 0
    shards: tuple[Shard, ...] = ()

    def plus(self, shard: Shard | None) -> Split:
        if shard is None:
            return self
        shards = (*self.shards, shard)
        return Split(tokens=self.tokens + shard.tokens, documents=self.documents + shard.documents, shards=shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far the sources have been read; everything before it is in the shards."""

    source: int = 0
    """Which source is being read."""
    documents: int = 0
    """How many of its documents have been taken, empty ones too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of corpus.json."""

    version: int = VERSION
    kind: Literal["tokens", "pairs"]
    """tokens: documents in one stream; pairs: a source and a target each."""
    tokenizer: str
    """Where the tokenizer came from, in the words of the one who prepared."""
    fingerprint: str
    """What the tokenizer is known by; see `tokenizers.fingerprint`."""
    vocab: int
    dtype: Literal["uint16", "uint32"]
    """uint16 where the vocabulary has room in it, else uint32; little-endian."""
    separator: int
    """The token that ends every document and every target."""
    columns: tuple[str, ...]
    sources: tuple[DataSource, ...]
    validation_fraction: float
    shard_tokens: int
    max_tokens: int | None
    source_prefix: str = ""
    """pairs: what was put in front of every source."""
    splits: dict[str, Split] = field(default_factory=lambda: dict.fromkeys(SPLITS, Split()))
    empty_documents: int = 0
    """Documents without text, which are left out."""
    skip_above: int | None = None
    """Documents of more bytes than this are left out; None where they are refused."""
    long_documents: int = 0
    """Those that were."""
    cursor: Cursor = field(default_factory=Cursor)
    complete: bool = False

    @property
    def started(self) -> bool:
        """Whether any shard is there."""
        return any(split.shards for split in self.splits.values())

    def plus(self, shards: dict[str, Shard | None], cursor: Cursor, empty: int, long: int = 0) -> Manifest:
        """This manifest after one more segment."""
        splits = {name: split.plus(shards[name]) for name, split in self.splits.items()}
        empty, long = self.empty_documents + empty, self.long_documents + long
        return replace(self, splits=splits, cursor=cursor, empty_documents=empty, long_documents=long)

    def difference(self, wanted: Manifest) -> str | None:
        """The first thing that `wanted` would make otherwise, in words; None where it would make the same corpus."""
        if self.fingerprint != wanted.fingerprint:
            return (
                f"tokenizer {self.tokenizer} ({self.fingerprint[:12]}), not {wanted.tokenizer} ({wanted.fingerprint[:12]})"
            )
        for name, what in _SETTINGS.items():
            mine, theirs = getattr(self, name), getattr(wanted, name)
            if mine != theirs:
                return f"{what} {_format(mine)}, not {_format(theirs)}"
        for mine, theirs in zip(self.sources, wanted.sources, strict=False):
            if mine != theirs:
                return f"source {_format(mine)}, not {_format(theirs)}"
        if len(self.sources) != len(wanted.sources):
            return f"{len(self.sources)} source file(s), not {len(wanted.sources)}"
        return None

    def write(self, directory: Path) -> None:
        """Replace corpus.json at once and for good: the shards it names are on the disk before it is."""
        with whole_file(directory / FILE) as temporary:
            record = seal(asdict(self))
            temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        path = directory / FILE
        try:
            path.stat()
            record = dict(read_object(path, error=DataError, max_bytes=MAX_MANIFEST).values)
        except FileNotFoundError as error:
            what = f"{directory} is not a corpus (no {FILE})" if directory.exists() else f"{directory} does not exist"
            raise DataError(f"{what}; `fathomlm data prepare` makes one") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except DataError as error:
            raise DataError(f"{error}; prepare the corpus again with --force") from error
        if record.get("version") not in READS:
            found, known = shown(record.get("version")), " and ".join(map(str, READS))
            raise DataError(f"{path} has format version {found}, and this FathomLM reads {known}; prepare it again")
        if (SEAL in record or record["version"] != READS[0]) and not is_sealed(record):
            raise DataError(f"{path} was altered since it was written (wrong checksum); prepare it again with --force")
        record = {key: value for key, value in record.items() if key != SEAL} | {"version": VERSION}
        manifest = Fields(record, str(path), error=DataError).build(cls)
        if (problem := manifest._problem()) is not None:
            raise DataError(f"{path} is damaged ({problem}); prepare the corpus again with --force")
        return manifest

    def _problem(self) -> str | None:
        """What no preparation writes, although each field has its type."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        counts = [self.separator, self.vocab - 1, self.shard_tokens - 1, self.empty_documents, self.long_documents]
        counts += [self.max_tokens or 0, self.skip_above or 0, self.cursor.source, self.cursor.documents]
        counts += [source.bytes or 0 for source in self.sources]
        parts: list[Split | Shard] = [*self.splits.values(), *shards]
        counts += [count for part in parts for count in (part.tokens, part.documents)]
        if not 0 <= min(counts) <= max(counts) <= _MOST or not 0 <= self.validation_fraction <= 1:
            return "a number is out of range"
        if set(self.splits) != set(SPLITS):
            return f"its splits must be {' and '.join(SPLITS)}"
        stranger = next((shard.file for shard in shards if Path(shard.file).name != shard.file), None)
        return None if stranger is None else f"{shown(stranger)} is not the name of a file beside {FILE}"


_SETTINGS = {
    "kind": "kind",
    "columns": "column(s)",
    "separator": "separator token",
    "validation_fraction": "validation fraction",
    "shard_tokens": "shard tokens",
    "max_tokens": "max tokens",
    "source_prefix": "source prefix",
    "skip_above": "largest document",
}
"""What decides a corpus besides its tokenizer and sources, and how it is called."""


def _format(value: object) -> str:
    match value:
        case DataSource():
            size = "" if value.bytes is None else f" ({value.bytes:,} bytes)"
            return f"{value.name}{size}{' for validation' if value.validation else ''}"
        case tuple():
            return " ".join(map(str, value))
        case None:
            return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
