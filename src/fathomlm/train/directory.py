"""A run's directory: its checkpoints, `last` and `best`, and what a killed run may have left half-done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fathomlm.checkpoints.durable import make_directories
from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import OutputError
from fathomlm.train.checkpoint import clean_up, point, prune, saved_steps, set_aside, step_name
from fathomlm.train.reading import to_yaml
from fathomlm.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run lives. Only its first rank writes here."""

    path: Path
    recipe: Recipe

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / step_name(step)

    def saved(self) -> dict[int, Path]:
        """The checkpoints, by step."""
        return saved_steps(self.checkpoints)

    def latest(self) -> str | None:
        saved = self.saved()
        return str(saved[max(saved)]) if saved else None

    def settle(self, best: int | None, damaged: Iterable[Path] = ()) -> None:
        """As a run needs it: made, or rid of what a killed run left half-done. Damaged checkpoints get other names, or they
        would count among those that are kept, and the run would meet them in its way."""
        with self._writing():
            make_directories(self.checkpoints)
            clean_up(self.checkpoints)
            for checkpoint in damaged:
                set_aside(checkpoint)
            for stale in (*self.path.glob(".*.partial-*"), *self.path.glob(".*.fresh-*")):
                stale.unlink()
        self.tidy(best)
        with whole_file(self.path / "recipe.yaml") as temporary:
            temporary.write_text(to_yaml(self.recipe), encoding="utf-8")

    def tidy(self, best: int | None) -> None:
        """Point `last` and `best` where they belong and remove what is not kept; a killed run may not have come to it."""
        recipe, saved = self.recipe.checkpoint, self.saved()
        with self._writing():
            if saved:
                point(self.path / "last", saved[max(saved)])
            if best is not None and best in saved:
                point(self.path / "best", saved[best])
            prune(self.checkpoints, recipe.keep, {*recipe.milestones} | ({best} if best is not None else set()))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error
