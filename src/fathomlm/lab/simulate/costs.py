"""How long passes take, by their number of rows: from a table, from the thesis' A100 measurements, or measured here.

Between two measured numbers of rows the time is on the straight line between them; above the largest it goes on as the last
two do, and below the smallest it is the smallest's. A user's table is JSON or YAML:

    name: my device
    block:     {1: 11.1, 43: 11.4}     milliseconds of one pass of the shared block, by rows
    plain:     {1: 21.3, 43: 26.5}     of all layers of the plain model (default: the block's, as often as tokens may run it)
    embedding: {1: 0.09, 43: 0.09}     default: nothing
    head:      {1: 0.8, 43: 1.0}       default: nothing
    prefill_ms: 0.02                   of a prompt token (default: nothing)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathomlm.errors import DataError, OptionError, is_number
from fathomlm.fields import shown, shown_name
from fathomlm.jsonfile import parse, read_bytes

PassFill = tuple[str, int]
"""What kind of pass, and how many of its rows stood for a token."""
TABLE = ("block", "plain", "embedding", "head")


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Milliseconds by rows."""

    points: tuple[tuple[int, float], ...]
    """Rows, rising, and the time measured with so many."""

    def __post_init__(self) -> None:
        rows = [at for at, _ in self.points]
        assert rows, "a curve has a point"
        assert rows == sorted(set(rows)), "rows rise"

    @classmethod
    def flat(cls, ms: float) -> TimeCurve:
        return cls(((1, ms),))

    def at(self, rows: int) -> float:
        points = self.points
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        place = min(bisect_left(points, (rows,)), len(points) - 1)
        (low, before), (high, after) = points[place - 1], points[place]
        return before + (after - before) * (rows - low) / (high - low)

    def __add__(self, other: TimeCurve) -> TimeCurve:
        rows = sorted({at for at, _ in (*self.points, *other.points)})
        return TimeCurve(tuple((at, self.at(at) + other.at(at)) for at in rows))

    def times(self, factor: float) -> TimeCurve:
        return TimeCurve(tuple((rows, factor * ms) for rows, ms in self.points))


NOTHING = TimeCurve.flat(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """What the host's own work takes, in milliseconds. All zero where a table is of a device alone."""

    step: float = 0.0
    """Of each step, whatever happens in it."""
    token: float = 0.0
    """For each token that is collected."""
    placement: float = 0.0
    """For each sequence that is scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a simulated device and its host take."""

    name: str
    passes: Mapping[str, TimeCurve]
    """By kind of pass: step (a plain model's), core and turn (a loop's), both, shallow and deep (an exit's)."""
    decode_step: float | None = None
    """The time of a whole decode step instead, where decode steps are recorded and always run all of their passes."""
    padded: bool = False
    """Whether a pass takes what a full one takes, however many rows stand for a token: the engine's do."""
    chunk: float = 0.0
    """Of each chunk of a prompt, in milliseconds."""
    prompt_token: float = 0.0
    """Of each token in it, in milliseconds."""
    host: HostTimes = field(default_factory=HostTimes)
    overlapped: bool = False
    """Whether the host goes on while the device works, as on a GPU."""
    largest: int | None = None
    """Rows beyond which nothing was measured."""

    def of_decode_step(self, passes: Sequence[PassFill], batch_size: int) -> dict[str, float]:
        """Milliseconds by kind of pass."""
        if self.decode_step is not None:
            return {"decode step": self.decode_step}
        found: dict[str, float] = {}
        for kind, filled in passes:
            if filled:
                found[kind] = found.get(kind, 0.0) + self.curve(kind).at(batch_size if self.padded else filled)
        return found

    def curve(self, kind: str) -> TimeCurve:
        if kind not in self.passes:
            raise OptionError(f"{self.name} has no times of '{kind}' passes; it has {', '.join(self.passes) or 'none'}")
        return self.passes[kind]

    def of_prefill(self, tokens: int) -> float:
        return self.chunk + tokens * self.prompt_token


def from_table(table: Mapping[str, Any], deepest: int, where: str = "the table") -> Costs:
    """Costs from a user's table, for tokens that run the block at most `deepest` times."""
    unknown = sorted(shown_name(str(name)) for name in table.keys() - {*TABLE, "name", "prefill_ms"})
    if unknown:
        raise DataError(f"{where}: unknown {', '.join(unknown[:8])}; known: name, {', '.join(TABLE)}, prefill_ms")
    if "block" not in table:
        raise DataError(f"{where}: 'block' is missing: milliseconds of one pass of the shared block by rows")
    curves = {name: _curve(where, name, table[name]) for name in TABLE if name in table}
    block, ends = curves["block"], curves.get("embedding", NOTHING) + curves.get("head", NOTHING)
    plain = curves.get("plain", block.times(deepest))
    reading = table.get("prefill_ms", 0.0)
    if not is_number(reading) or reading < 0:
        raise DataError(f"{where}: prefill_ms must be a number >= 0, got {shown(reading)}")
    passes = {"step": plain + ends, "core": block, "turn": ends, "both": block + ends}
    largest = min(curve.points[-1][0] for curve in (block, plain))
    return Costs(name=str(table.get("name", where)), passes=passes, prompt_token=reading, largest=largest)


def read_costs(path: Path, deepest: int) -> Costs:
    found = _parsed(path, read_bytes(path, f"times from {path}", error=DataError))
    if not isinstance(found, dict):
        raise DataError(f'{path}: a table with \'block\' is expected, such as {{"block": {{"1": 11.1, "43": 11.4}}}}')
    return from_table(found, deepest, str(path))


def _parsed(path: Path, data: bytes) -> Any:
    if path.suffix.lower() in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise OptionError("YAML requires pyyaml: pip install 'fathomlm[train]', or write JSON") from None
        try:
            return yaml.safe_load(data.decode("utf-8-sig"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: invalid YAML ({(str(error).splitlines() or ['nested too deep'])[0]})") from error
    return parse(data, str(path), error=DataError)


def _curve(where: str, name: str, found: Any) -> TimeCurve:
    rule = f"{where}: {name} must be milliseconds by rows, such as {{1: 11.1, 43: 11.4}}"
    if not isinstance(found, dict) or not found:
        raise DataError(f"{rule}; got {shown(found)}")
    points = {}
    for rows, ms in found.items():
        if not str(rows).isdecimal() or len(str(rows)) > 9 or int(rows) < 1 or not is_number(ms) or ms < 0:
            raise DataError(f"{rule}; got {shown(rows)}: {shown(ms)}")
        points[int(rows)] = float(ms)
    return TimeCurve(tuple(sorted(points.items())))
