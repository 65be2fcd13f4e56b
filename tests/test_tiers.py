"""`make quick` covers every room: each package has a file of tests that are not slow, on real weights or on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import LONG_FILES

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "fathomlm"
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
WHOLE_FILE = re.compile(r"^pytestmark = .*mark\.(slow|real|gpu)", re.MULTILINE)


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_a_quick_test(room: str) -> None:
    files = [path for path in (TESTS / room).rglob("test_*.py") if path.name not in LONG_FILES]
    assert [path for path in files if not WHOLE_FILE.search(path.read_text(encoding="utf-8"))]
