"""Documents that are too large: refused or left out without ever being held; what is prepared beside them is the same."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.errors import DataError
from fathomlm.train.data import sources as compressed
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.data.sources import DocumentLimit, expand, open_lines, read

MEGABYTES = 4_000_000


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def make(path: Path, data: bytes) -> Path:
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(data))
        case ".xz":
            path.write_bytes(lzma.compress(data))
        case ".zst":
            path.write_bytes(pytest.importorskip("zstandard").compress(data))
        case _:
            path.write_bytes(data)
    return path


def corpus(source: Path, out: Path, **more: Any) -> Corpus:
    options = {"tokenizer": "bytes", "validation_fraction": 0.0, **more}
    return prepare(PrepareOptions(sources=(str(source),), out=out, **options))


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_a_line_that_is_too_long_is_refused_by_file_and_line(tmp_path: Path, suffix: str) -> None:
    path = make(tmp_path / f"a.jsonl{suffix}", lines("short", "x" * MEGABYTES, "after"))
    with pytest.raises(DataError) as caught:
        corpus(path, tmp_path / "out", max_document_bytes=1000)
    said = f"{path} line 2 has more than 1,000 bytes, the most that a document may have; --max-document-bytes raises"
    assert str(caught.value).startswith(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_long_documents_are_left_out_and_counted(tmp_path: Path, suffix: str) -> None:
    long = make(tmp_path / f"a.jsonl{suffix}", lines("one", "x" * MEGABYTES, "two", "y" * 1001, "three"))
    plain = make(tmp_path / "b.jsonl", lines("one", "two", "three"))
    found = corpus(long, tmp_path / "out", max_document_bytes=1000, skip_long=True)
    expected = corpus(plain, tmp_path / "expected")
    assert (found.manifest.long_documents, found.manifest.empty_documents) == (2, 0)
    names = [shard.file for shard in expected.manifest.splits["train"].shards]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_no_more_than_the_bound_is_read_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Counted(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            held.append(len(line))
            return line

    monkeypatch.setattr(compressed, "_unpacked", lambda path, file: Counted(path.read_bytes()))
    path = make(tmp_path / "a.jsonl", lines("x" * MEGABYTES, "after"))
    found = [line for line, _ in open_lines(path, 1000)]
    assert found == [None, lines("after")]
    assert max(held) <= 1 << 17


def test_a_zstd_bomb_is_unpacked_in_pieces(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(b"0" * 50_000_000) + zstandard.compress(b"\nlast\n"))
    assert [line for line, _ in open_lines(path, 1000)] == [None, b"last\n"]
    with path.open("rb") as file:
        unpacked = compressed._Zstd(file)
        assert unpacked.readinto(bytearray(10)) == 10
        assert len(unpacked._ready) <= 32 << 20


def test_the_bound_is_inclusive(tmp_path: Path) -> None:
    data = lines("x" * 100)
    path = make(tmp_path / "a.jsonl", data)
    (source,) = expand([str(path)])
    exact = len(data) - 1
    assert [document.fields for document in read(source, ("text",), limit=DocumentLimit(bytes=exact))] == [("x" * 100,)]
    with pytest.raises(DataError, match="line 1 has more than"):
        list(read(source, ("text",), limit=DocumentLimit(bytes=exact - 1)))


def test_text_files_and_tables_have_the_bound_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = make(tmp_path / "a.txt", b"x" * 2000)
    table = tmp_path / "b.parquet"
    parquet.write_table(arrow.table({"text": ["short", "x" * 2000, "after"]}), table)
    for path, where in ((text, str(text)), (table, f"{table} row 2")):
        (source,) = expand([str(path)])
        with pytest.raises(DataError) as caught:
            list(read(source, ("text",), limit=DocumentLimit(bytes=1000)))
        assert str(caught.value).startswith(f"{where} has more than 1,000 bytes")
        left = [
            document.fields
            for document in read(source, ("text",), limit=DocumentLimit(bytes=1000, skip=True))
            if not document.too_long
        ]
        assert left == ([("short",), ("after",)] if path is table else [])


def test_a_corpus_made_with_another_bound_is_another_corpus(tmp_path: Path) -> None:
    path = make(tmp_path / "a.jsonl", lines("one", "x" * 2000))
    corpus(path, tmp_path / "out", max_document_bytes=1000, skip_long=True)
    with pytest.raises(Exception, match="was prepared with largest document 1,000, not none"):
        corpus(path, tmp_path / "out")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "a.jsonl", lines("one", "x" * MEGABYTES))
    command = ["data", "prepare", str(path), str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "1"]
    command += ["--validation-fraction", "0", "--max-document-bytes", "1MB"]
    assert main(command) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "a.jsonl line 2 has more than 1,000,000 bytes" in said[0]
    assert main([*command, "--skip-long"]) == 0
    assert "skipped 1 documents of more than 1,000,000 bytes" in capsys.readouterr().out
