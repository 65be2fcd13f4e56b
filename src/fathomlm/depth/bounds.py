"""How large a model may say that it is: one table, looked at before anything is built.

Sizes come from files that anyone can write. Each bound is far above every published model, and low enough that what follows
from a size alone (a plan's steps, a model without weights) takes seconds and megabytes at most.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fathomlm.errors import FathomError, OptionError, is_number, nearest
from fathomlm.jsonfile import shown, shown_name

BOUNDS: dict[str, tuple[int, int]] = {
    "layers": (1, 1024),
    "hidden": (1, 1 << 17),
    "intermediate": (1, 1 << 20),
    "heads": (1, 1 << 12),
    "kv_heads": (1, 1 << 12),
    "head_dim": (1, 1 << 14),
    "vocab": (1, 1 << 24),
    "context": (1, 1 << 27),
    "original_context": (1, 1 << 27),
    "relative_buckets": (1, 1 << 16),
    "relative_distance": (1, 1 << 27),
    "memory_width": (0, 1 << 17),
    "base_layers": (1, 1024),
    "unrolled_layers": (1, 2048),
    "recursions": (1, 1024),
    "kv_loops": (1, 1024),
    "experts": (0, 1 << 12),
    "experts_per_token": (0, 1 << 12),
    "rank": (0, 1 << 16),
    "prefix_length": (0, 1 << 16),
    "window": (1, 1 << 31),
}
"""The least and the most of each size."""


def check_size(name: str, value: object, *, called: str | None = None) -> int:
    """A size within its bounds, or an error that says them. `called` is its name in the message."""
    least, most = BOUNDS[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{called or name} must be an integer from {least} to {most}, got {shown(value)}")
    if not least <= value <= most:
        rule = f">= {least}" if value < least else f"<= {most}"
        raise OptionError(f"{called or name} must be {rule}, got {shown(value)}")
    return value


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, got {shown(value)}")
    return value


def check_number(name: str, value: Any, *, above: float | None = None) -> float:
    """A finite number."""
    if not is_number(value) or (above is not None and value <= above):
        rule = "a finite number" if above is None else f"> {above:g}"
        raise OptionError(f"{name} must be {rule}, got {shown(value)}")
    return float(value)


def check_name(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise OptionError(f"{name} must be one of {', '.join(known)}, got {shown(value)}{hint}")
    return value


def check_record(
    what: str,
    record: object,
    known: Collection[str],
    required: Collection[str] = (),
    *,
    error: type[FathomError] = OptionError,
) -> dict[str, Any]:
    """An object of a file with known fields only, the required ones among them."""
    if not isinstance(record, dict):
        raise error(f"the {what} must be an object, got {shown(record)}")
    if unknown := sorted(shown_name(str(name)) for name in record if name not in known):
        raise error(f"unknown {what} field(s): {', '.join(unknown[:8])}; known: {', '.join(sorted(known))}")
    if missing := sorted(set(required) - set(record)):
        raise error(f"the {what} is missing {', '.join(missing)}")
    return record
