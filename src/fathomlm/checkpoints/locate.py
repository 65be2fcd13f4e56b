"""Where a model's files are: from what a user types to a path, without a tensor library, so that a mistyped name is answered
before seconds go into importing one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fathomlm.checkpoints.fetch import fetch, hub_config, hub_snapshot
from fathomlm.depth.presets import PRESETS, Preset
from fathomlm.errors import CheckpointError, ModelNotFound, choices, nearest
from fathomlm.packaged import packaged_models, packaged_path

EXITS, EXITS_RECORD = "pack of exits", "exits.json"
HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
HUB_ID = re.compile(r"(?!\.\.?/)[\w.-]+/[\w.-]+(?<!\.gguf)")


def locate(source: str | Path, config_only: bool = False) -> Path:
    """Where a source's files are on this machine, fetched if they must be. A path that exists wins over a name, and a
    model that came with the package over a preset."""
    path, name = _path_and_name(source)
    if path.exists():
        return path
    if (packaged := packaged_path(name)) is not None:
        return packaged
    if name in PRESETS:
        chosen = PRESETS[name]
        if chosen.wheel is not None:
            return fetch(chosen.wheel)
        return hub_snapshot(_hub_of(name, chosen), config_only=config_only)
    if HUB_ID.fullmatch(name):
        with _or_a_path(path):
            return hub_snapshot(name, config_only=config_only)
    raise _unknown(name)


def check_source(source: str | Path, *, shape: bool = False) -> None:
    """Refuse a source that `load` would refuse, as far as names, paths and file kinds say; where only its `shape` is asked
    for, a preset needs no weights. A hub id is looked up on the hub unless its configuration is cached; weights are never
    fetched."""
    path, name = _path_and_name(source)
    if path.is_dir():
        check_model_directory(path)
    elif path.exists():
        check_gguf(path)
    elif packaged_path(name) is None:
        preset = PRESETS.get(name)
        if preset is None and HUB_ID.fullmatch(name) is None:
            raise _unknown(name)
        if preset is None:
            with _or_a_path(path):
                hub_config(name)
        elif not shape and preset.wheel is None:
            hub_config(_hub_of(name, preset))


def check_model_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        last = directory / "last"  # a training run keeps its newest checkpoint there
        hint = f"; it is a training run, whose model is {last}" if (last / "config.json").is_file() else ""
        raise CheckpointError(f"{directory} has no config.json, so it is not a model directory{hint}")


def check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if start != b"GGUF":
        why = "not a GGUF file (it does not begin with 'GGUF')" if start else "the file is empty"
        raise CheckpointError(f"{path}: {why}")


def is_gguf(path: Path) -> bool:
    """Whether a file is one, or has nothing in it yet."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) in (b"GGUF", b"")


def check_exits(path: Path) -> None:
    path = path.expanduser()
    if not (path / EXITS_RECORD).is_file():
        missing = "does not exist" if not path.exists() else f"has no {EXITS_RECORD}"
        raise CheckpointError(f"{path} {missing}; a {EXITS} is what `fathomlm export MODEL OUT --format exits` writes")


def named_preset(source: str | Path) -> Preset | None:
    """The preset that a source names, where no path and no packaged model has that name."""
    name = str(source)
    taken = Path(source).expanduser().exists() or packaged_path(name) is not None
    return None if taken else PRESETS.get(name)


def _hub_of(name: str, preset: Preset) -> str:
    if preset.hub is None:
        raise ModelNotFound(f"the preset '{name}' is a shape without weights; it can be inspected and trained, not loaded")
    return preset.hub


@contextmanager
def _or_a_path(path: Path) -> Iterator[None]:
    """Two words with a slash between them are a hub id, or a directory that was mistyped: where the hub has no such model,
    the message says both."""
    try:
        yield
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; nor is there a directory {path}{_near(path)}") from error


def _path_and_name(source: str | Path) -> tuple[Path, str]:
    """An empty name, such as a variable of the shell that is not set, would as a path be the current directory."""
    name = str(source)
    if not name.strip():
        raise ModelNotFound("the model's name is empty; give a preset, a directory, a GGUF file or a hub id (owner/name)")
    return Path(source).expanduser(), name


def _unknown(name: str) -> ModelNotFound:
    if (page := HUB_PAGE.match(name)) is not None:
        return ModelNotFound(f"{name} is a page of the hub; its model is {page[1]}")
    if "/" in name or name.endswith(".gguf"):
        path = Path(name).expanduser()
        return ModelNotFound(f"{name} does not exist{_near(path)}")
    here = [each.name for each in _entries(Path()) if each.suffix == ".gguf" or os.path.isfile(each / "config.json")]
    known = choices("model", name, [*packaged_models(), *PRESETS, *here])
    return ModelNotFound(f"{known}; or give a directory, a GGUF file or a hub id (owner/name)")


def _near(path: Path) -> str:
    """The end of a message where the first part of a path that does not exist looks like a slip."""
    missing = next((each for each in reversed((path, *path.parents)) if not os.path.exists(each)), path)
    rest = path.relative_to(missing)
    return nearest(str(path), [str(each / rest) for each in _entries(missing.parent) if os.path.exists(each / rest)])


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, as far as it can be read. What is looked for in them is asked of `os.path`: a `Path` raises
    where it may not look."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []
