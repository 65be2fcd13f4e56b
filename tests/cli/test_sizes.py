"""Sizes: one reading for every verb that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fathomlm.errors import OptionError
from fathomlm.sizes import MEGABYTE, parse_size

SIZES = {
    "1024": 1024,
    "1024B": 1024,
    "77": 77,
    "8GB": 8 * 10**9,
    "1.5 MiB": 3 * 2**19,
    "2kb": 2000,
    "3KiB": 3072,
    "24gib": 24 * 2**30,
    " 1TB ": 10**12,
    "1TiB": 2**40,
}


@pytest.mark.parametrize("text", list(SIZES))
def test_a_size(text: str) -> None:
    assert parse_size(text, "--size") == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-1GB", "8 pages", "1e3", "MB", "12 M", "12MX", "inf", "nan", "٣GB", "1,5GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="--size takes a size such as 512MB, 8GB or 8GiB, or a number of bytes, got"):
        parse_size(text, "--size")


def test_a_number_alone_is_bytes_and_a_small_one_a_slip() -> None:
    assert parse_size("1000000", "--size", least=MEGABYTE) == 10**6
    assert parse_size("80KB", "--size", least=MEGABYTE) == 80_000  # said on purpose
    with pytest.raises(OptionError, match="--size 80 is 80 bytes, since a number alone is bytes; write 80GB for gigabytes"):
        parse_size("80", "--size", least=MEGABYTE)
    with pytest.raises(OptionError, match="is more than any machine has"):
        parse_size("9" * 400 + "GB", "--size")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "MODEL", "--memory"),
        ("bench", "throughput", "MODEL", "--memory"),
        ("simulate", "throughput", "--preset", "40gb/gemma-2b/2", "--depths", "1,0.5", "--gpu-memory"),
        ("plan", "--models", "smollm-135m", "--gpu-memory"),
        ("export", "MODEL", "OUT", "--max-shard-size"),
    ],
    ids=lambda words: words[0],
)
def test_80_is_80_bytes_in_every_verb(
    words: tuple[str, ...], tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]
) -> None:
    places = {"MODEL": str(tiny_model_dir), "OUT": str(tmp_path / "out")}
    said = mistake_of(*(places.get(word, word) for word in words), "80")
    assert f"{words[-1]} 80 is 80 bytes, since a number alone is bytes; write 80GB for gigabytes" in said
