"""Where documents come from: text files, JSON lines, Parquet and streamed Hugging Face datasets, read in a fixed order.

A document is known by its source and its number there, which is all that a resumed preparation needs to find its place.
Local files are not read through the `datasets` package: it infers one schema for a file, names no line in its errors, bounds
no document, and goes on from a row only by parsing all rows before it.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fathomlm.errors import DataError, OptionError, choices, nearest
from fathomlm.jsonfile import parse
from fathomlm.packaged import packaged_texts, text_path
from fathomlm.train.data.tokenizers import one_line, quiet_hub

PACKAGED = "packaged:"
HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^@]+))?(@(?P<split>.+))?")
KNOWN = re.compile(r"\.(?P<text>txt|md)$|\.(jsonl|json-lines)(\.(gz|xz|zst))?$|\.(?P<parquet>parquet)$", re.IGNORECASE)
NAMES = ".txt, .md, .jsonl (also .gz, .xz, .zst), .parquet"
MOST = 64 << 20
"""Bytes of one line, where no one says otherwise."""
_CHUNK = 1 << 17
_PIECE = 1 << 10
"""Packed bytes that are unpacked at once: zstd makes at most 32,768 bytes of one, so this is at most 32 MB."""
_WINDOW = 1 << 31
"""The largest window that zstd's long mode uses."""
_ROWS = 1024
"""Parquet rows that are read at once."""
KINDS = {int: "a number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}
"""What a column may hold instead of text, in a user's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """One file, or one dataset of the hub."""

    name: str
    """A path, or hf:owner/name:config@split."""
    kind: str
    """text, jsonl, parquet or hub."""
    bytes: int | None
    """The file's size, by which a changed file is noticed; None for the hub."""
    validation: bool
    """Whether all of its documents go to validation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, or one pair, as it stands in its source."""

    fields: tuple[str, ...]
    """The text, or the source and the target text of a pair."""
    position: int
    """How many of its file's bytes had been read with it, for the progress bar."""
    too_long: bool = False
    """Whether it stands for one that was left out because of its size."""


def expand(
    patterns: Sequence[str], *, validation_from: Sequence[str] = (), leave_out: Path | None = None
) -> list[DataSource]:
    """All sources in reading order, each once: those for validation first, so that --max-tokens never cuts them off.

    A file that is named for validation is not trained on, even where a directory above it is. Files under `leave_out`,
    the directory being written, are not sources.
    """
    found: dict[str, DataSource] = {}
    for validation, group in ((True, validation_from), (False, patterns)):
        for pattern in group:
            for source in _expand_one(pattern, validation):
                key = source.name if source.kind == "hub" else str(Path(source.name).resolve())
                inside = leave_out is not None and Path(key).is_relative_to(leave_out.resolve())
                if not inside:
                    found.setdefault(key, source)
    if not any(not source.validation for source in found.values()):
        raise DataError("no source is left to train on: all are named with --validation-from, or lie in the output")
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLimit:
    """How large a document may be. A tokenizer needs some 80 times a text's size while it works."""

    bytes: int = MOST
    """Of a text file, of a line of JSON lines as it stands there, or of the columns of a row."""
    skip: bool = False
    """Whether larger ones are left out; else the first one is an error."""
    hint: str = ""
    """What the error adds."""

    def refuse(self, where: str, columns: tuple[str, ...], position: int) -> Document:
        """The stand-in for a document that is too large, or the error."""
        if not self.skip:
            raise DataError(f"{where} has more than {self.bytes:,} bytes, the most that a document may have{self.hint}")
        return Document(fields=("",) * len(columns), position=position, too_long=True)


def read(
    source: DataSource, columns: tuple[str, ...], skip: int = 0, limit: DocumentLimit | None = None
) -> Iterator[Document]:
    """The documents of a source in order, without the first `skip`."""
    limit = limit or DocumentLimit()
    match source.kind:
        case "text":
            return _read_text(source, columns, skip, limit)
        case "jsonl":
            return _read_jsonl(source, columns, skip, limit)
        case "parquet":
            return _read_parquet(source, columns, skip, limit)
    return _read_hub(source, columns, skip, limit)


def _expand_one(pattern: str, validation: bool) -> list[DataSource]:
    if pattern.startswith("hf:"):
        if HUB.fullmatch(pattern) is None:
            raise DataError(f"'{pattern}' is not a hub dataset; write hf:owner/name or hf:owner/name:config@split")
        return [DataSource(name=pattern, kind="hub", bytes=None, validation=validation)]
    path = _packaged(pattern) or Path(pattern).expanduser()
    if path.is_dir():
        files = [file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    elif path.exists():
        if KNOWN.search(path.name) is None:
            raise DataError(f"{path}: unsupported file type; supported: {NAMES}")
        files = [path]
    elif glob.has_magic(pattern):
        files = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        raise DataError(missing(path))
    wanted = sorted(file for file in files if KNOWN.search(file.name) and file.is_file())
    if not wanted:
        raise DataError(f"{pattern}: no supported file found; supported: {NAMES}")
    return [
        DataSource(name=str(file), kind=_kind(file), bytes=file.stat().st_size, validation=validation) for file in wanted
    ]


def _packaged(pattern: str) -> Path | None:
    """Where the text lies that a name such as packaged:docs stands for, from whatever working directory."""
    if not pattern.startswith(PACKAGED):
        return None
    name = pattern.removeprefix(PACKAGED)
    if (found := text_path(name)) is None:
        raise DataError(choices("packaged text", name, packaged_texts()))
    return found


def _kind(path: Path) -> str:
    found = KNOWN.search(path.name)
    assert found is not None
    return "text" if found["text"] else "parquet" if found["parquet"] else "jsonl"


def missing(path: Path, what: str = "source") -> str:
    """The message for a file that is not there, with the nearest name beside it."""
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f" (did you mean {path.parent / near[0]}?)" if near else ""
    return f"the {what} {path} does not exist{hint}"


def _read_text(source: DataSource, columns: tuple[str, ...], skip: int, limit: DocumentLimit) -> Iterator[Document]:
    if len(columns) > 1:
        raise OptionError(
            f"{source.name}: a text file has no columns; --pairs requires JSON lines, Parquet or a hub dataset"
        )
    if skip:
        return
    try:
        with Path(source.name).open("rb") as file:
            raw = file.read(limit.bytes + 1)
        if len(raw) > limit.bytes:
            yield limit.refuse(source.name, columns, source.bytes or len(raw))
            return
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {source.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise DataError(f"{source.name} line {line}: not UTF-8 text") from error
    yield Document(fields=(text,), position=len(raw))


def _read_jsonl(source: DataSource, columns: tuple[str, ...], skip: int, limit: DocumentLimit) -> Iterator[Document]:
    seen = 0
    for number, (line, position) in enumerate(open_lines(Path(source.name), limit.bytes), start=1):
        if line is not None and not line.strip():
            continue
        seen += 1
        if seen <= skip:
            continue
        where = f"{source.name} line {number}"
        if line is None:
            yield limit.refuse(where, columns, position)
            continue
        record = parse(line, where, error=DataError, nonfinite=True)
        if not isinstance(record, dict):
            raise DataError(f"{where}: a {type(record).__name__}, not a JSON object")
        yield Document(fields=_fields(record, columns, where), position=position)


def _read_parquet(source: DataSource, columns: tuple[str, ...], skip: int, limit: DocumentLimit) -> Iterator[Document]:
    parquet = _module("pyarrow.parquet", source)
    arrow = _module("pyarrow", source)
    try:
        file = parquet.ParquetFile(source.name)
        names = file.schema_arrow.names
        if lacking := [column for column in columns if column not in names]:
            raise DataError(_no_column(lacking[0], names, source.name))
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= skip:
                row += rows
                continue
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=list(columns)):
                for record in batch.to_pylist():
                    row += 1
                    if row > skip:
                        position = (source.bytes or 0) * row // file.metadata.num_rows
                        yield _row(record, columns, f"{source.name} row {row}", position, limit)
    except UnicodeDecodeError as error:
        raise DataError(f"{source.name} near row {row + 1}: not UTF-8 text") from error
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{source.name} is damaged, or not a Parquet file ({one_line(error)})") from error


def _read_hub(source: DataSource, columns: tuple[str, ...], skip: int, limit: DocumentLimit) -> Iterator[Document]:
    datasets = _module("datasets", source)
    found = HUB.fullmatch(source.name)
    assert found is not None
    try:
        with quiet_hub():
            stream = datasets.load_dataset(found["name"], found["config"], split=found["split"] or "train", streaming=True)
            records = iter(stream.skip(skip) if skip else stream)
    except Exception as error:  # the hub, its HTTP client and dataset scripts raise what they like
        raise DataError(f"{source.name} could not be opened on the hub: {one_line(error)}") from error
    row = skip
    while True:
        try:
            record = next(records, None)
        except Exception as error:
            raise DataError(f"{source.name} stopped downloading after row {row:,}: {one_line(error)}") from error
        if record is None:
            return
        row += 1
        yield _row(record, columns, f"{source.name} row {row}", 0, limit)


def _row(record: dict[str, Any], columns: tuple[str, ...], where: str, position: int, limit: DocumentLimit) -> Document:
    fields = _fields(record, columns, where)
    if sum(len(field.encode("utf-8")) for field in fields) > limit.bytes:
        return limit.refuse(where, columns, position)
    return Document(fields=fields, position=position)


def _fields(record: dict[str, Any], columns: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The wanted columns as text. A list in the last column of a pair holds several answers; the first is taken."""
    values = []
    for at, column in enumerate(columns):
        if column not in record:
            raise DataError(_no_column(column, list(record), where))
        value = record[column]
        if at > 0 and isinstance(value, list):
            value = value[0] if value else None
        value = "" if value is None else value
        if not isinstance(value, str):
            raise DataError(f"{where}: column '{column}' holds {KINDS.get(type(value), 'something else')}, not text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: column '{column}' holds half a character (a lone surrogate)") from error
        values.append(value)
    return tuple(values)


def _no_column(column: str, names: list[str], where: str) -> str:
    return f"{where}: no column '{column}'{nearest(column, names)}; it has: {', '.join(names[:12]) or 'none'}"


def _module(name: str, source: DataSource) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"reading {source.name} requires the package {name.split('.')[0]}: pip install 'fathomlm[train]'"
        ) from error


def open_lines(path: Path, most: int = MOST) -> Iterator[tuple[bytes | None, int]]:
    """Each line, with how many bytes of the file have been read for it. None stands for a line of more than `most` bytes,
    which is never held whole: who goes on passes over it."""
    try:
        with path.open("rb") as file, _unpacked(path, file) as lines:
            while line := lines.readline(most + 2):
                if len(line.removesuffix(b"\n").removesuffix(b"\r")) <= most:
                    yield line, file.tell()
                    continue
                yield None, file.tell()
                while line and not line.endswith(b"\n"):
                    line = lines.readline(_CHUNK)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged or cut short ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes] | io.BufferedIOBase:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(file, "rb")
        case ".xz":
            return lzma.open(file, "rb")
        case ".zst":
            return io.BufferedReader(_Zstd(file), _CHUNK)
    return file


class _Zstd(io.RawIOBase):
    """zstandard's own reader takes a file that stops in the middle of a frame for a whole one; this one does not."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError("reading .zst files requires the package zstandard: pip install 'fathomlm[train]'") from error
        self._file = file
        self._damage: type[Exception] = zstandard.ZstdError
        self._context = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        self._frame: Any | None = None
        self._packed = memoryview(b"")
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed and not (packed := self._file.read(_CHUNK)):
                if self._frame is not None:
                    raise EOFError("the file ends within a frame")
                return 0
            self._packed = self._packed or memoryview(packed)
            piece, rest = self._packed[:_PIECE], self._packed[_PIECE:]
            self._frame = self._frame or self._context.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._damage as error:
                raise EOFError(str(error)) from error
            unused = len(self._frame.unused_data) if self._frame.eof else 0
            self._packed = self._packed[len(piece) - unused :] if unused else rest
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
