"""Training checkpoints: a FathomLM directory that any verb can use, with what a resumed run needs in `training/`.

    step-00000500/
      config.json, model.safetensors, tokenizer files     usable at once: fathomlm generate RUN/last
      training/state.json                                 step, rows read, best loss, the recipe
      training/optimizer-00000-of-00002.safetensors       each rank's part
      training/random.safetensors                         random number generators

A checkpoint appears whole or not at all. Each rank writes the rows that it holds and a reader joins the parts, so a run
may go on with another number of ranks. We do this by hand because the metadata of torch.distributed.checkpoint is a
pickle, and nothing from a checkpoint is ever executed here.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils import logging as hf_logging

from fathomlm.checkpoints.save import weight_bytes
from fathomlm.checkpoints.writing import check_room, whole_directory
from fathomlm.errors import CheckpointError, FathomError, OutputError
from fathomlm.model.seq2seq import FathomModel
from fathomlm.train.optim import named_state
from fathomlm.train.parallel import World, like, own_part, whole

FORMAT = 1


@dataclass(slots=True)
class Progress:
    """How far a run is: all that changes from step to step outside the model and the optimizer."""

    step: int = 0
    """Optimizer steps done."""
    rows: int = 0
    """Rows of data read, over all ranks; with the seed, this is the whole state of the data."""
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    """Steps whose loss was not finite, in all."""
    best: float | None = None
    best_step: int | None = None
    validation: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(
    directory: Path,
    model: FathomModel,
    module: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    recipe: dict[str, Any],
    world: World,
) -> Path:
    """Write `directory`, all ranks together. The disk may be full, for one of them only: then nothing is left and every
    rank raises the same error."""
    needed = weight_bytes(model) * (1 if not optimizer.state else 3)
    place: Path | None = None
    with ExitStack() as stack:
        failure: Exception | None = None
        if world.first:
            try:
                check_room(directory, needed)
                place = stack.enter_context(whole_directory(directory, force=directory.exists()))
                (place / "training").mkdir()
            except (OSError, FathomError) as error:
                failure = error
        _fail_together(failure, directory, world)
        place = world.tell(place)
        assert place is not None
        # Whole tensors are gathered by all ranks together, before any of them can fail on its own.
        weights = {}
        for name, value in module.state_dict().items():
            full = whole(value.detach())
            if world.first:
                weights[name] = full.cpu()
        try:
            _write(place, model, weights, module, optimizer, progress, recipe, world)
        except (OSError, SafetensorError) as error:
            failure = error
        _fail_together(failure, directory, world)
        try:
            stack.close()
        except OutputError as error:
            failure = error
    _fail_together(failure, directory, world)
    return directory


def _fail_together(failure: Exception | None, directory: Path, world: World) -> None:
    """Raise on every rank what went wrong on any, so that none waits for one that has given up."""
    text = None
    if failure is not None:
        ours = isinstance(failure, FathomError)
        text = str(failure) if ours else f"cannot write {directory}: {failure}; nothing was left behind"
    if (word := world.first_word(text)) is not None:
        raise OutputError(word) from failure


def _write(
    place: Path,
    model: FathomModel,
    weights: dict[str, Tensor],
    module: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    recipe: dict[str, Any],
    world: World,
) -> None:
    state, numbers = _optimizer_tensors(module, optimizer, world)
    save_file(state, place / "training" / f"optimizer-{world.rank:05d}-of-{world.size:05d}.safetensors")
    if not world.first:
        return
    hf_logging.disable_progress_bar()
    model.save_pretrained(place, state_dict=weights)
    save_file(_random_state(world.device), place / "training" / "random.safetensors")
    record = {"format": FORMAT, "progress": asdict(progress), "ranks": world.size, "optimizer": numbers, "recipe": recipe}
    (place / "training" / "state.json").write_text(json.dumps(record, indent=1))


def _optimizer_tensors(
    module: nn.Module, optimizer: Optimizer, world: World
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """This rank's tensors, and the plain numbers. What is not sharded is the same everywhere: the first rank writes it."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, entries in named_state(module, optimizer).items():
        for key, value in entries.items():
            if not isinstance(value, Tensor):
                if value is not None:
                    numbers.setdefault(name, {})[key] = value
                continue
            part = own_part(value)
            if part is not value or world.first:
                tensors[f"{name}:{key}"] = part.detach().cpu().contiguous()
    return tensors, numbers


def load_checkpoint(directory: Path, module: nn.Module, optimizer: Optimizer, world: World) -> Progress:
    """Put a checkpoint's weights, optimizer state and random state back. Any number of ranks may have written it."""
    record = read_state(directory)
    try:
        _load_weights(directory, module)
        _load_optimizer(directory, record, module, optimizer)
        with safe_open(directory / "training" / "random.safetensors", framework="pt") as file:
            _set_random_state({key: file.get_tensor(key) for key in file.keys()}, world.device)  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{directory}: not a whole training checkpoint ({error})") from error
    return Progress(**record["progress"])


def read_state(directory: Path) -> dict[str, Any]:
    """The record of a training checkpoint."""
    path = directory / "training" / "state.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no training checkpoint (it has no training/state.json)") from None
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{directory} has format {record.get('format')}; this version reads {FORMAT}")
    return record


def _load_weights(directory: Path, module: nn.Module) -> None:
    targets = module.state_dict()
    shards = sorted(directory.glob("model*.safetensors"))
    left = set(targets)
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a handle, not a dict
                targets[name].copy_(like(file.get_tensor(name), targets[name]))
                left.discard(name)
    if left:
        raise CheckpointError(f"{directory}: the weights lack '{min(left)}'")


def _load_optimizer(directory: Path, record: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    ranks = int(record["ranks"])
    with ExitStack() as stack:
        files = [
            stack.enter_context(
                safe_open(directory / "training" / f"optimizer-{rank:05d}-of-{ranks:05d}.safetensors", framework="pt")
            )
            for rank in range(ranks)
        ]
        holders: dict[str, list[Any]] = {}
        for file in files:
            for key in file.keys():  # noqa: SIM118 - a handle, not a dict
                holders.setdefault(key, []).append(file)
        for key, found in holders.items():
            name, _, entry = key.rpartition(":")
            parameter = parameters[name]
            parts = [file.get_tensor(key) for file in found]
            full = parts[0] if len(parts) == 1 else torch.cat(parts)
            same = full.shape == parameter.shape
            optimizer.state[parameter][entry] = like(full, parameter) if same else full.to(parameter.device)
    for name, numbers in record["optimizer"].items():
        optimizer.state[parameters[name]].update(numbers)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def saved_steps(checkpoints: Path) -> dict[int, Path]:
    """The whole checkpoints of a run, by step."""
    found = (path for path in checkpoints.glob("step-" + "[0-9]" * 8) if (path / "training" / "state.json").is_file())
    return {int(path.name.removeprefix("step-")): path for path in sorted(found)}


def prune(checkpoints: Path, keep: int, protected: set[int]) -> None:
    """Remove all but the latest `keep` (0: all are kept) and the protected ones."""
    steps = sorted(saved_steps(checkpoints))
    for step in steps[:-keep] if keep else []:
        if step not in protected:
            going = checkpoints / f".{step_name(step)}.replaced-{os.getpid()}"  # what `clean_up` finishes if we are killed
            (checkpoints / step_name(step)).rename(going)
            shutil.rmtree(going, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, in one stroke."""
    fresh = link.with_name(f".{link.name}.fresh-{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, link.parent))
    os.replace(fresh, link)


def clean_up(checkpoints: Path) -> None:
    """Remove what a killed run left half-written."""
    for stale in (*checkpoints.glob(".step-*.partial-*"), *checkpoints.glob(".step-*.replaced-*")):
        shutil.rmtree(stale, ignore_errors=True)
