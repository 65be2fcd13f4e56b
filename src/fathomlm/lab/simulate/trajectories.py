"""How deep each token of many sequences goes: what a simulation plays (thesis 3.5.5, "exit trajectories").

A file has one JSON object a line, `{"prompt": 12, "depths": [1, 2, 1]}`: how many tokens are read, and for each token that
is made how many recursions (or parts between exits) it ran. A first line with `source` and `label` may say where they come
from. No tensors here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from fathomlm.checkpoints.writing import whole_file
from fathomlm.depth.bounds import BOUNDS
from fathomlm.errors import DataError, OptionError
from fathomlm.fields import Fields, shown_name
from fathomlm.jsonfile import read_lines

TrajectorySource = Literal["file", "forced", "oracle", "confidence", "router"]
"""A file that does not say; drawn and not decided; the earliest exit that agrees with the last; where an exit was sure; a
router's own choice."""
LONGEST, DEEPEST = BOUNDS["context"][1], BOUNDS["unrolled_layers"][1]
SOURCES: tuple[TrajectorySource, ...] = ("file", "forced", "oracle", "confidence", "router")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sequence."""

    prompt: int
    """Tokens to read, at least 1: the last of them is the first to run."""
    depths: tuple[int, ...]
    """For each token that is made, from 1."""

    @property
    def length(self) -> int:
        return self.prompt + len(self.depths)


@dataclass(frozen=True, slots=True)
class Trajectories:
    sequences: tuple[Trajectory, ...]
    deepest: int
    """How deep a token may go at most."""
    source: TrajectorySource
    label: str
    """The same in words, for tables."""

    def __post_init__(self) -> None:
        assert self.sequences, "there is no sequence"
        assert self.source not in ("forced", "oracle") or self.label.startswith(self.source), "it is called what it is"
        for sequence in self.sequences:
            assert sequence.prompt >= 1, "a sequence begins with a token"
            assert sequence.depths, "a sequence has a new token"
            assert min(sequence.depths) >= 1, "a token runs something"
            assert max(sequence.depths) <= self.deepest, f"a token is {max(sequence.depths)} deep, of {self.deepest}"

    @property
    def tokens(self) -> int:
        return sum(len(sequence.depths) for sequence in self.sequences)

    @property
    def mean_depth(self) -> float:
        return sum(sum(sequence.depths) for sequence in self.sequences) / self.tokens

    @property
    def longest(self) -> int:
        return max(sequence.length for sequence in self.sequences)

    @property
    def ran(self) -> tuple[float, ...]:
        """By depth, the part of all tokens that went so deep or deeper."""
        counts = [0] * (self.deepest + 1)
        for sequence in self.sequences:
            for depth in sequence.depths:
                counts[depth] += 1
        return tuple(sum(counts[depth:]) / self.tokens for depth in range(1, self.deepest + 1))

    def record(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "label": self.label,
            "sequences": len(self.sequences),
            "prompt_tokens": sum(sequence.prompt for sequence in self.sequences),
            "tokens": self.tokens,
            "longest": self.longest,
            "deepest": self.deepest,
            "mean_depth": self.mean_depth,
            "ran": list(self.ran),
        }


def draw(lengths: Iterable[tuple[int, int]], parts: Sequence[float], seed: int = 0) -> Trajectories:
    """Sequences of these (prompt, new) lengths; `parts[r]` of all tokens run recursion r, each drawn alone."""
    check_parts(parts)
    generator = random.Random(f"depths {seed}")
    deepest = len(parts)
    steps = [after / before for before, after in pairwise(parts)]
    sequences = []
    for prompt, new in lengths:
        depths = []
        for _ in range(new):
            depth = 1
            while depth < deepest and generator.random() < steps[depth - 1]:
                depth += 1
            depths.append(depth)
        sequences.append(Trajectory(prompt, tuple(depths)))
    shown = ", ".join(f"{part:.4g}" for part in parts)
    return Trajectories(
        tuple(sequences), deepest, "forced", f"forced: parts {shown} of all tokens run depths 1 to {deepest}"
    )


def check_parts(parts: Sequence[float]) -> None:
    falls = all(0 < part <= before for part, before in zip(parts, (1.0, *parts), strict=False))
    if not parts or parts[0] != 1 or not falls:
        shown = ",".join(f"{part:g}" for part in parts)
        raise OptionError(f"parts of all tokens must begin with 1, fall, and stay above 0, such as 1,0.4; got {shown}")


def read_trajectories(path: Path, deepest: int | None = None) -> Trajectories:
    """From a file. `deepest` is how deep tokens may go, where nobody of the file does."""
    sequences: list[Trajectory] = []
    head: dict[str, Any] = {}
    for found in read_lines(path, error=DataError):
        if not sequences and not head and "depths" not in found:
            head = _head(path, found)
        else:
            prompt = found.integer("prompt", at_least=1, at_most=LONGEST, default=1)
            depths = found.integers("depths", at_least=1, at_most=DEEPEST)
            if not depths:
                raise found.wrong("depths", "integers >= 1, one for each new token")
            sequences.append(Trajectory(prompt, tuple(depths)))
    if not sequences:
        raise DataError(f'{path} has no sequence; a line is {{"prompt": 12, "depths": [1, 2, 1]}}')
    maximum = max(max(sequence.depths) for sequence in sequences)
    most = max(maximum, head.get("deepest", 1)) if deepest is None else deepest
    if maximum > most:
        raise DataError(f"{path} has a token of depth {maximum}, but the model's tokens are at most {most} deep")
    source: TrajectorySource = head.get("source", "file")
    return Trajectories(tuple(sequences), most, source, head.get("label", f"depths from {path.name}"))


def write_trajectories(path: Path, trajectories: Trajectories) -> None:
    """A file that `read_trajectories` reads."""
    t = trajectories
    head = {"source": t.source, "label": t.label, "deepest": t.deepest}
    lines = [head, *({"prompt": sequence.prompt, "depths": list(sequence.depths)} for sequence in t.sequences)]
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _head(path: Path, found: Fields) -> dict[str, Any]:
    unknown = sorted(shown_name(name) for name in found if name not in ("source", "label", "deepest"))
    if unknown or not len(found):
        raise DataError(
            f"{found.where}: no depths, and {unknown[:8] or 'nothing'} instead; a sequence has 'prompt' and 'depths'"
        )
    source, label = found.text("source", known=SOURCES, default="file"), found.text("label", default="")
    deepest = found.integer("deepest", at_least=1, at_most=DEEPEST, default=1)
    if not label.startswith(source) and source in ("forced", "oracle"):
        label = f"{source}: {label or path.name}"
    return {"source": source, "label": label or f"depths from {path.name}", "deepest": deepest}
