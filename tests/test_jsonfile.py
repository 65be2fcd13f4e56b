"""The reader of JSON from outside: its bounds, and one line for whatever is wrong."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fathomlm.errors import CheckpointError, DataError, OptionError, choices, require
from fathomlm.fields import Fields
from fathomlm.jsonfile import MAX_DEPTH, MAX_DIGITS, bounded_lines, parse, parse_object, read_lines, read_object


def fields(text: str) -> Fields:
    return parse_object(text, "config.json", error=CheckpointError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b'{"a": ' + b"1" * (MAX_DIGITS + 1) + b"}", f"an integer of {MAX_DIGITS + 1} digits"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "an integer of 100,000 digits"),
        (b"[" * 100_000, "nested more than"),
        (b"[" * 500 + b"]" * 500, "nested more than"),
        (b'{"a": ' * 100_000, "nested more than"),
        (b"\x80\x81\x00", "not UTF-8 text"),
        (b"\x00\x01", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"5", "holds a number, not a JSON object"),
        (b"[]", "holds a list, not a JSON object"),
        (b"null", "holds null, not a JSON object"),
    ],
)
def test_what_is_not_plain_json_is_refused_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_object(path, error=CheckpointError)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(DataError, match="more than 100 bytes"):
        read_object(tmp_path / "a.json", error=DataError, max_bytes=100)
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read_object(tmp_path / "b.json", error=DataError)
    with pytest.raises(DataError, match=r"cannot read .*directory"):
        read_object(tmp_path, error=DataError)


def test_what_is_allowed_is_read() -> None:
    assert parse(b'\xef\xbb\xbf{"a": [1, -2.5e3, "\\ud83d\\ude00", null, true]}', "x", error=DataError) == {
        "a": [1, -2500.0, "\U0001f600", None, True]
    }
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    parse(deep, "x", error=DataError)
    with pytest.raises(DataError, match="nested"):
        parse(f"[{deep}]", "x", error=DataError)
    digits = "9" * MAX_DIGITS
    assert parse(f'[-{digits}, "{digits * 9}"]', "x", error=DataError) == [-int(digits), digits * 9]
    assert parse("[NaN, Infinity, 1e999]", "x", error=DataError, nonfinite=True)[1:] == [float("inf")] * 2


def test_fields_are_read_by_type() -> None:
    found = fields(
        '{"i": 3, "n": 0.5, "t": "yes", "f": true, "l": [1, 2], "s": ["a"], "o": {"i": 4}, "r": [{"i": 5}], "z": null}'
    )
    assert found.integer("i", at_least=1, at_most=3) == 3
    assert found.number("n") == 0.5
    assert found.number("i") == 3.0
    assert found.text("t", known=("yes", "no")) == "yes"
    assert found.flag("f") is True
    assert found.integers("l", at_least=1) == [1, 2]
    assert found.texts("s") == ["a"]
    assert found.record("o").integer("i") == 4
    assert found.integer("z", default=7) == 7
    assert found.integer("absent", default=None) is None
    assert found.record("absent", default=None) is None
    assert found.texts("absent", default=[]) == []


@pytest.mark.parametrize(
    ("text", "method", "options", "message"),
    [
        ('{"a": 5}', "integer", {"at_least": 1, "at_most": 4}, "config.json: a must be an integer from 1 to 4, got 5"),
        ('{"a": true}', "integer", {}, "config.json: a must be an integer, got true"),
        ('{"a": 0.5}', "integer", {"at_least": 1}, "config.json: a must be an integer >= 1, got 0.5"),
        ('{"a": "x"}', "integer", {"default": None}, "config.json: a must be an integer, got 'x'"),
        ("{}", "integer", {}, "config.json is missing a, which must be an integer"),
        ('{"a": null}', "integer", {}, "config.json: a must be an integer, got null"),
        ('{"a": []}', "number", {"at_least": 1}, "config.json: a must be a number >= 1, got a list of 0"),
        ('{"a": {}}', "text", {}, "config.json: a must be a string, got an object of 0"),
        ('{"a": "\\ud800"}', "text", {}, r"config.json: a must be a string, got '\ud800'"),
        ('{"a": "b"}', "text", {"known": ("c",)}, "config.json: unknown a 'b'; known: c"),
        ('{"a": 1}', "flag", {}, "config.json: a must be true or false, got 1"),
        ('{"a": "b"}', "texts", {}, "config.json: a must be a list, got 'b'"),
        ('{"a": [1, 2]}', "integers", {"at_most": 1}, "config.json: a must be a list of integers <= 1, and holds 2"),
        ('{"a": [1, "b"]}', "integers", {}, "config.json: a must be a list of integers, and holds 'b'"),
        ('{"a": [1]}', "texts", {}, "config.json: a must be a list of strings, and holds 1"),
        ('{"a": 1}', "record", {"default": None}, "config.json: a must be an object, got 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_rule_and_value(
    text: str, method: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        getattr(fields(text), method)("a", **options)
    assert str(caught.value) == message


def test_inner_fields_are_named_by_their_path() -> None:
    found = fields('{"plan": {"base_layers": 1000000000}}')
    with pytest.raises(
        CheckpointError, match=r"config.json: plan.base_layers must be an integer from 1 to 9, got 1000000000"
    ):
        found.record("plan").integer("base_layers", at_least=1, at_most=9)


def test_lines_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    class Counted(io.BytesIO):
        most = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            self.most = max(self.most, len(line))
            return line

    file = Counted(b"1234\n1234\r\n12345\n")
    lines = bounded_lines(file, 4, "x", error=DataError)
    assert [next(lines), next(lines)] == [b"1234\n", b"1234\r\n"]
    with pytest.raises(DataError, match="x line 3 has more than 4 bytes"):
        next(lines)
    file = Counted(b"a" * 10_000_000)
    with pytest.raises(DataError, match="line 1"):
        list(bounded_lines(file, 1000, "x", error=DataError))
    assert file.most <= 1002


def test_lines_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"ste')
    with pytest.raises(DataError, match=r"metrics.jsonl line 4 is not valid JSON"):
        list(read_lines(path, error=DataError))
    path.write_text('{"step": 1}\n\n{"step": 2}\n')
    assert [line.integer("step") for line in read_lines(path, error=DataError)] == [1, 2]
    path.write_bytes(b'{"step": 1}\n\x80\x81\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"line 2 is not UTF-8 text"):
        list(read_lines(path, error=DataError))


@dataclass(frozen=True)
class Inner:
    size: int
    share: float = 0.5


@dataclass(frozen=True)
class Pair:
    first: int
    second: int

    def __post_init__(self) -> None:
        if self.first == 9:
            raise OptionError(choices("order", str(self.first), ["0", "1"]))
        require(self.first >= self.second, "first", "at least second", self.first)


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["one", "two"] = "one"
    inner: Inner | None = None
    sizes: tuple[int, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    parts: tuple[Inner, ...] = ()
    pair: Pair | None = None


def test_a_dataclass_is_built_from_fields_of_its_names() -> None:
    found = fields('{"name": "a", "inner": {"size": 3, "share": 1}, "sizes": [1, 2], "by_name": {"b": {"size": 4}}}')
    assert found.build(Outer) == Outer("a", "one", Inner(3, 1.0), (1, 2), {"b": Inner(4)})
    assert isinstance(found.build(Outer).inner.share, float)
    assert fields('{"size": "3", "share": "1e-1"}').build(Inner, texts=True) == Inner(3, 0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nam": "a"}', "unknown field 'nam' (did you mean 'name'?)"),
        ('{"kind": "two"}', "config.json is missing name, which must be a string"),
        ('{"name": "a", "kind": "three"}', "config.json: kind must be one of 'one', 'two', got 'three'"),
        ('{"name": "a", "inner": 3}', "config.json: inner must be a section of fields or null, got 3"),
        ('{"name": "a", "inner": {"size": true}}', "config.json: inner.size must be an integer, got true"),
        ('{"name": "a", "inner": {"siez": 1}}', "config.json: unknown field in inner 'siez' (did you mean 'size'?)"),
        ('{"name": "a", "kind": "tow"}', "config.json: kind must be one of 'one', 'two', got 'tow' (did you mean 'two'?)"),
        ('{"name": "a", "sizes": [1, "2"]}', "config.json: sizes[1] must be an integer, got '2'"),
        ('{"name": "a", "parts": [{"size": 1}, {"size": 2.5}]}', "config.json: parts[1].size must be an integer, got 2.5"),
        ('{"name": "a", "parts": [{"size": 1}, {}]}', "config.json is missing parts[1].size, which must be an integer"),
        ('{"name": "a", "pair": {}}', "config.json is missing pair.first, pair.second"),
        ('{"name": "a", "pair": {"first": 0, "second": 1}}', "config.json: pair.first must be at least second, got 0"),
        ('{"name": "a", "pair": {"first": 9, "second": 1}}', "config.json: pair: unknown order '9'"),
        ('{"name": "a", "by_name": {"b": 1}}', "config.json: by_name.b must be a section of fields, got 1"),
    ],
)
def test_what_is_not_as_annotated_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        fields(text).build(Outer)
    assert message in str(caught.value)
