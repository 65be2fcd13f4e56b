"""How large a model may say that it is: one table, looked at before anything is built; and shapes and plans as records of
files.

Sizes come from files that anyone can write. Each bound is far above every published model, and low enough that what follows
from a size alone (a plan's steps, a model without weights) takes seconds and megabytes at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from fathomlm.errors import FathomError, OptionError
from fathomlm.fields import Fields, shown
from fathomlm.options import option

T = TypeVar("T")

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


def size(name: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that holds such a size; `options.check` looks at it."""
    least, most = BOUNDS[name]
    return option(default, ge=least, le=most)


def read_record(cls: type[T], record: object, what: str, *, error: type[FathomError] = OptionError) -> T:
    """A dataclass from an object of a file, with known fields only and the required ones among them."""
    if not isinstance(record, dict):
        raise error(f"the {what} must be an object, got {shown(record)}")
    return Fields(record, f"the {what}", error=error).build(cls)


def to_record(instance: Any, later: Collection[str] = ()) -> dict[str, Any]:
    """A dataclass as JSON has it, which `read_record` restores. Fields that came `later` are left out where they have their
    default, so that files stay as they were."""
    found = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if field.init and (field.name not in later or value != field.default):
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found
