"""What comes inside the package, as plain files. `models/NAME/` is a FathomLM directory with its tokenizer, a model card
(README.md) and a record of what it was measured to do (record.json). `exits/NAME/` is an exit pack for the model of that
name, a preset or a packaged one, and `drafts/NAME/` one with a draft layer. `texts/NAME/` is text to train and to try things
on; texts/README.md says what it is.

An installation may lack those files. Then nothing is packaged, and everything works as if it never had been.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FETCHED = "smollm2-135m"
"""What commands take where no model is named and none came along."""


def default_model() -> str:
    """What commands take where no model is named."""
    return next(iter(packaged_models()), FETCHED)


def models_directory() -> Path | None:
    """Where models lie; None where there are none, or where they are no plain files (a package that is run out of a zip)."""
    return _directory("models")


def exits_directory() -> Path | None:
    """The same for exit packs."""
    return _directory("exits")


def packaged_models() -> list[str]:
    """The names of the models that came with this installation; the first is what commands take by default."""
    return _named(models_directory(), "config.json")


def packaged_path(name: str) -> Path | None:
    """The directory of a packaged model; None where no such model came with this installation."""
    place = models_directory()
    return place / name if place is not None and name in packaged_models() else None


def packaged_exits(name: str) -> Path | None:
    """The exit pack that came for the model of this name; None where none did."""
    place = exits_directory()
    return place / name if place is not None and name in _named(place, "exits.json") else None


def packaged_drafts(name: str) -> Path | None:
    """The same of a draft layer."""
    place = _directory("drafts")
    return place / name if place is not None and name in _named(place, "exits.json") else None


def packaged_texts() -> list[str]:
    """The names of the texts that came with this installation: directories, and the files in them."""
    place = _directory("texts")
    if place is None:
        return []
    named = [each for each in place.iterdir() if each.is_dir()]
    return sorted(str(file.relative_to(place)) for each in named for file in (each, *each.iterdir()))


def text_path(name: str) -> Path | None:
    """Where a packaged text lies; None where none of that name came with this installation."""
    place = _directory("texts")
    return place / name if place is not None and name in packaged_texts() else None


def _directory(kind: str) -> Path | None:
    place = resources.files("fathomlm.packaged") / kind
    return place if isinstance(place, Path) and place.is_dir() else None


def _named(place: Path | None, sign: str) -> list[str]:
    """The directories that are whole: those with the file that tells their kind."""
    found = [] if place is None else place.iterdir()
    return sorted(each.name for each in found if not each.name.startswith(".") and (each / sign).is_file())
