"""What the tests of shipped files share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MESSAGES = (Path(__file__).parent / "held_out_messages.txt").read_text(encoding="utf-8").splitlines()
"""To which nothing that ships was trained to reply."""
REPLY = 64
"""Tokens of a reply, as the records were made with."""


def record_of(place: Path | None) -> dict[str, Any]:
    """What was measured of what lies in a directory of the package."""
    assert place is not None
    found: dict[str, Any] = json.loads((place / "record.json").read_text(encoding="utf-8"))
    return found
