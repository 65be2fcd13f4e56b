"""Training checkpoints: a FathomLM directory that any verb can use, with what a resumed run needs in `training/`.

    step-00000500/
      config.json, model.safetensors, tokenizer files     usable at once: fathomlm generate RUN/last
      training/state.json                                 step, rows read, best loss, the recipe, all checksums
      training/optimizer-00000-of-00002.safetensors       each rank's part
      training/random.safetensors                         random number generators

A checkpoint appears whole or not at all, and is on the disk before it has its name (`checkpoints/writing.py`); `state.py`
says whether it still is what was written. Each rank writes the rows that it holds and a reader joins the parts, so a run
may go on with another number of ranks. We do this by hand because the metadata of torch.distributed.checkpoint is a
pickle, and nothing from a checkpoint is ever executed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.utils import logging as hf_logging

from fathomlm.checkpoints.native import weight_bytes
from fathomlm.checkpoints.writing import check_room, sync_file, whole_directory
from fathomlm.errors import CheckpointError, FathomError, OutputError
from fathomlm.model.seq2seq import FathomModel
from fathomlm.train.distributed import World, like, local_part, whole
from fathomlm.train.optim import named_state
from fathomlm.train.state import (
    FileChecksum,
    TrainingProgress,
    TrainingState,
    file_checksums,
    file_names,
    part_name,
)


def save_checkpoint(
    directory: Path,
    model: FathomModel,
    module: nn.Module,
    optimizer: Optimizer,
    progress: TrainingProgress,
    recipe: dict[str, Any],
    world: World,
) -> Path:
    """Write `directory`, all ranks together. The disk may be full, for one of them only: then nothing is left and every
    rank raises the same error."""
    needed = weight_bytes(model) * (1 if not optimizer.state else 3)
    place: Path | None = None
    with ExitStack() as stack:
        with _failing_together(directory, world):
            if world.first:
                check_room(directory, needed)
                place = stack.enter_context(whole_directory(directory, force=directory.exists()))
                (place / "training").mkdir()
        place = world.broadcast(place)
        assert place is not None
        # Whole tensors are gathered by all ranks together, before any of them can fail on its own.
        weights = {}
        for name, value in module.state_dict().items():
            full = whole(value.detach())
            if world.first:
                weights[name] = full.cpu()
        with _failing_together(directory, world):
            numbers = _write(place, model, weights, module, optimizer, world)
            files = _settle(place, world)
        parts = world.gather(files)
        with _failing_together(directory, world):  # within the stack, which would put an unfinished checkpoint in place
            if world.first:
                known = {name: entry for part in parts for name, entry in part.items()}
                state = TrainingState(progress=progress, ranks=world.size, optimizer=numbers, recipe=recipe, files=known)
                state.write(place)
        with _failing_together(directory, world):
            stack.close()
    return directory


@contextmanager
def _failing_together(directory: Path, world: World) -> Iterator[None]:
    """What goes wrong within on any rank is raised on every one, so that none waits for one that has given up."""
    failure: Exception | None = None
    text = None
    try:
        yield
    except FathomError as error:
        failure, text = error, str(error)
    except (OSError, SafetensorError) as error:
        failure, text = error, f"cannot write {directory}: {error}; nothing was left behind"
    if (word := world.first_error(text)) is not None:
        raise OutputError(word) from failure


def _write(
    place: Path,
    model: FathomModel,
    weights: dict[str, Tensor],
    module: nn.Module,
    optimizer: Optimizer,
    world: World,
) -> dict[str, dict[str, float]]:
    """This rank's files, all but the record; the optimizer's plain numbers are for that."""
    state, numbers = _optimizer_tensors(module, optimizer, world)
    save_file(state, place / part_name(world.rank, world.size))
    if world.first:
        hf_logging.disable_progress_bar()
        model.save_pretrained(place, state_dict=weights)
        states = {"cpu": torch.get_rng_state()}
        if world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(world.device)
        save_file(states, place / "training" / "random.safetensors")
    return numbers


def _settle(place: Path, world: World) -> dict[str, FileChecksum]:
    """Put this rank's files on the disk, which only the machine that wrote them can, and take their checksums."""
    part = part_name(world.rank, world.size)
    others = {part_name(rank, world.size) for rank in range(world.size)} - {part}
    names = [name for name in file_names(place) if name not in others] if world.first else [part]
    for name in names:
        sync_file(place / name)
    return file_checksums(place, names)


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
            part = local_part(value)
            if part is not value or world.first:
                tensors[f"{name}:{key}"] = part.detach().cpu().contiguous()
    return tensors, numbers


def load_checkpoint(
    directory: Path, state: TrainingState, module: nn.Module, optimizer: Optimizer, world: World
) -> TrainingProgress:
    """Put a checkpoint's weights, optimizer state and random state back. Any number of ranks may have written it."""
    try:
        _load_weights(directory, module)
        _load_optimizer(directory, state, module, optimizer)
        with safe_open(directory / "training" / "random.safetensors", framework="pt") as file:
            torch.set_rng_state(file.get_tensor("cpu"))
            if world.device.type == "cuda" and "cuda" in file.keys():  # noqa: SIM118 - a handle, not a dict
                torch.cuda.set_rng_state(file.get_tensor("cuda"), world.device)
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{directory}: not a complete training checkpoint ({error})") from error
    return state.progress


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
        raise CheckpointError(f"{directory}: the weights are missing '{min(left)}'")


def _load_optimizer(directory: Path, state: TrainingState, module: nn.Module, optimizer: Optimizer) -> None:
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(directory / part_name(rank, state.ranks), framework="pt"))
            for rank in range(state.ranks)
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
    for name, numbers in state.optimizer.items():
        optimizer.state[parameters[name]].update(numbers)
