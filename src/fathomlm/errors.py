"""User errors, in one line: what is wrong, where, and what would be right.

The command line prints these without a traceback and exits with code 2. Anything else that is raised is a bug of ours
and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Iterable, Iterator


class FathomError(Exception):
    """Base of every error that a user can mend."""


class ModelNotFound(FathomError):
    """A model source names no preset, no path and no reachable hub repository."""


class UnsupportedModel(FathomError):
    """A family, or an option of a family, that is not supported."""


class CheckpointError(FathomError):
    """A checkpoint that is corrupt, truncated, incomplete or of a kind that is never loaded."""


class DataError(FathomError):
    """A corpus that is missing, corrupt or made with another tokenizer."""


class PlanError(FathomError):
    """A depth plan that cannot be laid out over the given layers."""


class OptionError(FathomError):
    """An option whose value is out of range, or that does not go with another."""


class TrainingError(FathomError):
    """A run that cannot go on: the loss is not finite, or its checkpoint belongs to another recipe."""


class OutputError(FathomError):
    """A result that could not be written: it exists already, the disk is full, the path is not writable."""


class RequestTooLarge(FathomError):
    """A request that the engine could never hold, even with nothing else to do."""


class QueueFull(FathomError):
    """More requests are waiting than the engine accepts; a later try may pass."""


class EngineStopped(FathomError):
    """An engine that takes no more requests: it was closed, it is finishing its last ones, or it has failed."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], more: str = "") -> Iterator[None]:
    """Within, what the system refuses is an `OutputError` of this path; `more` is what else there is to say."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}{more}") from error


def choices(what: str, got: str, known: Iterable[str]) -> str:
    """The message for a name that is not in a list, with the nearest known name when the slip looks like a typo."""
    names, got = sorted(known), _short(got)
    hint = nearest(got, names)
    if hint and len(names) > 12:
        return f"unknown {what} '{got}'{hint}"
    if len(names) > 100:
        return f"unknown {what} '{got}'; {len(names):,} are known, such as {', '.join(names[:: len(names) // 4][:4])}"
    return f"unknown {what} '{got}'{hint}; known: {', '.join(names)}"


def nearest(got: str, known: Iterable[str]) -> str:
    """The end of a message where a name looks like a slip of a known one, and nothing otherwise. Names come from files too:
    no more of one is compared than is shown."""
    near = difflib.get_close_matches(_short(got), sorted(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def require(holds: bool, name: str, rule: str, value: object) -> None:
    """Refuse an option's value that breaks its rule."""
    if not holds:
        raise OptionError(f"{name} must be {rule}, got {_short(repr(value))}")


def _short(text: str) -> str:
    """What a message quotes: enough to know it again."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def is_int(value: object) -> bool:
    """An integer; Python counts True among them, users do not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """A finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
