"""Options: one statement of type, default, bounds and help, and the flags and checks that follow from it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fathomlm.cli.flags import add_flags, from_args
from fathomlm.errors import OptionError, choices
from fathomlm.options import bounds, check, option, section
from fathomlm.sizes import parse_amount


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = option(0.5, ge=0, le=1, help="part of the tokens", metavar="P")
    rank: int | None = option(None, ge=1, help="rank of the delta", default_text="none")
    hidden: int = option(4, ge=1)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Everything:
    model: str = option(help="a model", positional=True)
    count: int = option(3, ge=1, le=10, help="how many")
    share: float = option(1.0, gt=0, le=1, help="100% at most")
    name: str = option("text", help="a column")
    out: Path | None = option(None, help="a file", metavar="FILE")
    kind: Literal["auto", "fp8"] = option("auto", help="how")
    known: str | None = option(None, choices=("cycle", "sequence"), help="which")
    layers: tuple[int, ...] = option((), ge=1, help="layers", flag="--layer")
    words: tuple[str, ...] = option((), help="words", short="-w")
    tasks: tuple[str, ...] = option(("one",), comma=True, help="tasks")
    pair: tuple[str, str] | None = option(None, help="two", metavar="A B")
    memory: int | None = option(None, size=1000, help="bytes")
    body: int = option(16_000_000, size=1, help="bytes")
    fast: bool = option(False, help="faster")
    cache: bool = option(True, help="keep")
    patience: float = option(math.inf, ge=0, finite=False, help="seconds")
    limit: int | None = option(None, parse=lambda text, flag: None if text == "all" else int(text), help="N or all")
    inner: Inner = section(Inner, "inside", rate=0.25)
    plain: int = 7


def parse(*words: str) -> Everything:
    parser = argparse.ArgumentParser()
    add_flags(parser, Everything)
    return from_args(Everything, parser.parse_args(["m", *words]))


def test_defaults_are_the_fields() -> None:
    assert parse() == Everything(model="m", inner=Inner(rate=0.25))


def test_every_kind_of_flag() -> None:
    found = parse(
        *("--count", "4", "--share", "0.5", "--name", "body", "--out", "f", "--kind", "fp8", "--known", "cycle"),
        *("--layer", "4,8", "--layer", "2", "-w", "a,b", "--words", "c", "--tasks", "x, y", "--pair", "s", "t"),
        *("--memory", "8GB", "--fast", "--no-cache", "--patience", "inf", "--limit", "all", "--rate", "1", "--rank", "2"),
    )
    assert found == Everything(
        model="m", count=4, share=0.5, name="body", out=Path("f"), kind="fp8", known="cycle", layers=(4, 8, 2),
        words=("a,b", "c"), tasks=("x", "y"), pair=("s", "t"), memory=8 * 10**9, fast=True, cache=False,
        inner=Inner(rate=1.0, rank=2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--count", "0"), "--count must be between 1 and 10, got 0"),
        (("--count", "x"), "--count must be an integer between 1 and 10, got 'x'"),
        (("--share", "0"), "--share must be > 0 and <= 1, got 0.0"),
        (("--share", "nan"), "--share must be a number > 0 and <= 1, got nan"),
        (("--kind", "fp9"), "invalid --kind 'fp9' (did you mean 'fp8'?); choose from auto, fp8"),
        (("--known", "cycel"), "invalid --known 'cycel' (did you mean 'cycle'?); choose from cycle, sequence"),
        (("--layer", "4,0"), "--layer must be >= 1, got 0"),
        (("--memory", "80"), "--memory 80 is 80 bytes, since a number alone is bytes; write 80GB for gigabytes"),
        (("--rank", "0"), "--rank must be >= 1, got 0"),
    ],
)
def test_a_flag_names_itself_and_its_rule(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse(*words)
    assert str(raised.value) == message


def test_fields_are_checked_by_their_names() -> None:
    with pytest.raises(OptionError, match=r"^rate must be between 0 and 1, got 2$"):
        Inner(rate=2)
    with pytest.raises(OptionError, match=r"^hidden must be an integer >= 1, got True$"):
        Inner(hidden=True)
    with pytest.raises(OptionError, match=r"^rate must be a number between 0 and 1, got 'x'$"):
        Inner(rate="x")  # type: ignore[arg-type]

    @dataclass(frozen=True)
    class Outer:
        lr: float = option(1.0, gt=0)
        inner: Bare = field(default_factory=lambda: Bare(steps=0))

    with pytest.raises(OptionError, match=r"^inner\.steps must be >= 1, got 0$"):
        check(Outer())


@dataclass(frozen=True)
class Bare:
    steps: int = option(1, ge=1)


def test_help_states_defaults_choices_and_groups() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, Everything, skip=("pair",))
    text = " ".join(parser.format_help().split())
    for part in (
        "--count N how many (default: 3)",
        "--share X 100% at most (default: 1)",
        "--kind {auto,fp8} how (default: auto)",
        "--known {cycle,sequence} which",
        "--body SIZE bytes (default: 16MB)",
        "--rank N rank of the delta (default: none)",
        "inside: --rate P part of the tokens (default: 0.25)",
        "--cache, --no-cache keep",
    ):
        assert part in text
    assert "--pair" not in text
    assert "--hidden" not in text


@dataclass(frozen=True)
class Counted:
    tokens: int | float | str | None = option(None, also=parse_amount)


def test_a_field_may_refuse_more_than_its_type_does() -> None:
    check(Counted("15B"))
    check(Counted())
    with pytest.raises(OptionError, match=r"^batch\.tokens must be > 0, got -1$"):
        check(Counted(-1), "batch.")


@dataclass(frozen=True, kw_only=True)
class Pairs:
    rule: str = option("risk", choices=("risk", "thesis"), help="which")
    risk: float = option(0.1, help="how much", requires=("rule", "risk"))
    drop: int | None = option(None, help="how many")
    how: str | None = option(None, flag="--by", help="which ones", requires=("drop",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rule", "thesis", "--risk", "0.2"), "--risk requires --rule risk, got thesis"),
        (("--by", "last"), "--by requires --drop"),
        (("--by", "last", "--drop", "0"), None),
        (("--risk", "0.2"), None),
        (("--rule", "thesis"), None),
    ],
)
def test_a_flag_names_the_one_it_requires(words: tuple[str, ...], message: str | None) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Pairs)
    args = parser.parse_args(words)
    if message is None:
        from_args(Pairs, args)
        return
    with pytest.raises(OptionError) as raised:
        from_args(Pairs, args)
    assert str(raised.value) == message


def test_bounds_for_others() -> None:
    assert bounds(Inner, "rate") == {"ge": 0, "le": 1}


def test_a_long_list_of_names_is_not_printed() -> None:
    """lm-evaluation-harness knows some fourteen thousand tasks."""
    names = [f"task_{number:05}" for number in range(14_000)]
    said = choices("task", "nothing like it", names)
    assert said == (
        "unknown task 'nothing like it'; 14,000 are known, such as task_00000, task_03500, task_07000, task_10500"
    )
    assert "did you mean 'task_00012'" in choices("task", "tsk_00012", names)
    assert choices("kind", "q", ["a", "b"]) == "unknown kind 'q'; known: a, b"
