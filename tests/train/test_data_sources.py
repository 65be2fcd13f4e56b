"""Sources: every kind is read alike, in a fixed order, from any place; what is wrong is named with its place."""

from __future__ import annotations

import gzip
import json
import lzma

import pytest

from fathomlm.errors import DataError, OptionError
from fathomlm.train.data.sources import expand, read

TEXTS = ["first", "", "third\nwith a line", "ünï¢ode \u2028 🐟", "fifth"]


def lines(texts=TEXTS):
    return "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)).encode()


def zst(raw: bytes) -> bytes:
    import zstandard

    half = len(raw) // 2
    packer = zstandard.ZstdCompressor()
    return packer.compress(raw[:half]) + packer.compress(raw[half:])  # two frames, as pzstd writes


PACK = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".json-lines.xz": lzma.compress, ".jsonl.zst": zst}


def texts_of(path, skip=0, columns=("text",)):
    (source,) = expand([str(path)])
    return [document.fields[0] for document in read(source, columns, skip)]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("skip", [0, 2, 5, 9])
def test_json_lines_however_packed(tmp_path, suffix, skip):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(PACK[suffix](lines()))
    assert texts_of(path, skip) == TEXTS[skip:]


def test_a_byte_order_mark_and_blank_lines_are_no_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines().replace(b"\n", b"\r\n\r\n"))
    assert texts_of(path) == TEXTS
    assert texts_of(path, 3) == TEXTS[3:]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".json-lines.xz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "none"])
def test_a_damaged_file_is_never_a_short_one(tmp_path, suffix, damage):
    import random

    path = tmp_path / f"a{suffix}"
    letters = random.Random(0).choices("abcdefghijklmnop ", k=40_000)
    whole = PACK[suffix](lines(["".join(letters)] * 3 + ["".join(reversed(letters))]))
    broken = {"cut": whole[: len(whole) - 9], "flipped": b"garbage" + whole[7:], "none": whole}[damage]
    path.write_bytes(broken)
    if damage == "none":
        assert len(texts_of(path)) == 4
        return
    with pytest.raises(DataError, match=r"a\.json.* is damaged or cut short"):
        texts_of(path)


@pytest.mark.parametrize("skip", [0, 1, 3, 4, 5])
def test_parquet_skips_whole_row_groups(tmp_path, skip):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "n": range(5)}), path, row_group_size=2)
    assert texts_of(path, skip) == TEXTS[skip:]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'txt' \(did you mean 'text'\?\); it has: text, n"):
        texts_of(path, columns=("txt",))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is damaged"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl line 2 is not valid JSON"),
        (b"[1]", r"line 2: a list, not a JSON object"),
        (b'{"txt": "a"}', r"line 2: no column 'text' \(did you mean 'txt'\?\); it has: txt"),
        (b'{"text": 3}', r"line 2: column 'text' holds a number, not text"),
        (b'{"text": "\xff"}', r"line 2 is not UTF-8 text"),
        (b'{"text": "\\ud800"}', r"line 2: column 'text' holds half a character"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        texts_of(path)


def test_text_files_are_one_document_each(tmp_path):
    (tmp_path / "a.md").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_bytes(b"fine\nbad \xff\n")
    assert texts_of(tmp_path / "a.md") == ["one\n\ntwo"]
    assert texts_of(tmp_path / "a.md", 1) == []
    with pytest.raises(DataError, match=r"b\.txt line 2: not UTF-8"):
        texts_of(tmp_path / "b.txt")
    with pytest.raises(OptionError, match="a text file has no columns"):
        texts_of(tmp_path / "a.md", columns=("a", "b"))


def test_null_is_an_empty_document_and_a_list_of_targets_gives_its_first(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"s": "x", "t": ["y", "z"]}\n{"s": null, "t": []}\n')
    (source,) = expand([str(path)])
    assert [document.fields for document in read(source, ("s", "t"))] == [("x", "y"), ("", "")]


def test_directories_and_patterns_are_expanded_in_order_and_each_file_once(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.md", "sub/.hidden/d.txt", "e.csv", "out/f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")

    def names(*patterns, **more):
        return [(s.name.removeprefix(f"{tmp_path}/"), s.validation) for s in expand(patterns, **more)]

    every = [("a.jsonl", False), ("b.txt", False), ("sub/c.md", False)]
    assert names(str(tmp_path), leave_out=tmp_path / "out") == every
    assert names(str(tmp_path / "*.txt"), str(tmp_path), leave_out=tmp_path / "out") == [every[1], every[0], every[2]]
    held = names(str(tmp_path), validation_from=[str(tmp_path / "b.txt")], leave_out=tmp_path / "out")
    assert held == [("b.txt", True), every[0], every[2]]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a.jsnol", r"the source .*a\.jsnol does not exist \(did you mean .*a\.jsonl\?\)"),
        ("*.parquet", "no supported file found"),
        ("e.csv", "unsupported file type; supported: .txt"),
        ("empty", "no supported file found"),
    ],
)
def test_a_source_that_is_none(tmp_path, pattern, message):
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "e.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        expand([str(tmp_path / pattern)])


def test_a_packaged_text_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held, *others = expand(["packaged:docs"], validation_from=["packaged:docs/generation.md"])
    assert (held.validation, held.name.rpartition("/")[2]) == (True, "generation.md")
    assert len(others) > 20
    assert not any(source.validation or source.name == held.name for source in others)
    (document,) = read(held, ("text",))
    assert document.fields[0].startswith("# Generation")
    with pytest.raises(DataError, match=r"unknown packaged text 'dcs' \(did you mean 'docs'\?\)"):
        expand(["packaged:dcs"])


def test_all_held_out_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    with pytest.raises(DataError, match="no source is left to train on"):
        expand([str(tmp_path)], validation_from=[str(tmp_path)])


def test_hub_datasets_are_streamed(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config, *, split, streaming):
        assert streaming
        asked.append((name, config, split))
        return datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, skip in (("hf:owner/name", 0), ("hf:owner/name:small@test", 3)):
        (source,) = expand([name])
        assert [document.fields[0] for document in read(source, ("text",), skip)] == TEXTS[skip:]
    assert asked == [("owner/name", None, "train"), ("owner/name", "small", "test")]
    with pytest.raises(DataError, match="write hf:owner/name"):
        expand(["hf:wikitext"])


def test_a_hub_that_cannot_be_reached_or_goes_away(monkeypatch):
    import datasets

    (source,) = expand(["hf:owner/name"])

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"^hf:owner/name could not be opened on the hub: Couldn't reach the hub$"):
        list(read(source, ("text",)))

    def half():
        yield {"text": "a"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: half())
    with pytest.raises(DataError, match="hf:owner/name stopped downloading after row 1: gone"):
        list(read(source, ("text",)))
