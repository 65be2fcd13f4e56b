"""Models that come inside the package, as plain files: `models/NAME/` is a FathomLM directory with its tokenizer, a model
card (README.md) and a record of what it was measured to do (record.json).

An installation may lack those files. Then there is no packaged model, and everything works as if there never had been one.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def models_directory() -> Path | None:
    """Where they lie; None where there are none, or where they are no plain files (a package that is run out of a zip)."""
    place = resources.files("fathomlm.packaged") / "models"
    return place if isinstance(place, Path) and place.is_dir() else None


def packaged_models() -> list[str]:
    """The names of the models that came with this installation; the first is what commands take by default."""
    place = models_directory()
    if place is None:
        return []
    return sorted(
        each.name for each in place.iterdir() if not each.name.startswith(".") and (each / "config.json").is_file()
    )


def packaged_path(name: str) -> Path | None:
    """The directory of a packaged model; None where no such model came with this installation."""
    place = models_directory()
    return place / name if place is not None and name in packaged_models() else None
