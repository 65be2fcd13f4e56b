"""docs/thesis.md: every table and figure has a row, and what a row names exists.

The thesis is not part of this project, so its labels are listed at the end of the page.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fathomlm.cli.main import COMMANDS as VERBS
from fathomlm.cli.main import build_parser
from fathomlm.train.reading import read_recipe, shipped_recipes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "thesis.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
SPANS = re.compile(r"`([^`\n]+)`")
LABEL = re.compile(r"(?:tab|fig)_\w+:[\w-]+")
STATES = ("measured", "counted", "runs", "not yet", "illustration")
COMMANDS = sorted({span for span in SPANS.findall(PAGE) if span.startswith("fathomlm ")})


def test_every_label_has_a_row_with_a_state() -> None:
    listed = PAGE.split("## All labels")[1].split("```")[1].split()
    assert len(listed) == len(set(listed)) == 108
    rows = {label: row for row in ROWS for label in SPANS.findall(row.split("|")[1]) if LABEL.fullmatch(label)}
    assert set(rows) == set(listed)
    for label, row in rows.items():
        assert row.rstrip(" |").split(" | ")[-1].lstrip("| ").startswith(STATES), label
    for row in ROWS:
        for label in SPANS.findall(row):
            assert not LABEL.fullmatch(label) or label in listed, label


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_can_be_typed(command: str) -> None:
    """Verb, kind, options and values; of a training run also the recipe and its fields."""
    _, verb, *words = shlex.split(command)
    assert verb in VERBS
    if not words or (len(words) == 1 and not words[0].startswith("-") and verb in ("eval", "analyze", "bench", "simulate")):
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args([verb, *words, "--help"])
        return
    args = build_parser().parse_args([verb, *words])
    if verb == "train":
        read_recipe(args.recipe, args.fields)


def test_recipes_that_are_named_exist() -> None:
    names = set(shipped_recipes())
    wanted = {span for span in SPANS.findall(PAGE) if re.fullmatch(r"(thesis|free|exits|pretrain)-[\w*-]+", span)}
    for name in wanted:
        assert any(re.fullmatch(name.replace("*", ".*"), known) for known in names), name


def test_files_and_tests_that_are_named_exist() -> None:
    rooms = (ROOT / "src" / "fathomlm", ROOT / "tests", ROOT)
    for line in PAGE.splitlines():
        files: list[Path] = [ROOT / "tests" / "depth" / "test_cost.py"]
        for span in SPANS.findall(line):
            name, _, test = span.partition("::")
            if name.endswith((".py", "/")) and " " not in name:
                found = [room / name for room in rooms if (room / name).exists()]
                assert found, span
                files.append(found[0])
            test = test or (name if name.startswith("test_") and not name.endswith(".py") else "")
            if test:
                assert any(f"def {test}(" in file.read_text(encoding="utf-8") for file in files if file.is_file()), span
        for target in re.findall(r"\]\(([^)#]+)", line):
            assert (ROOT / "docs" / target).exists(), target
