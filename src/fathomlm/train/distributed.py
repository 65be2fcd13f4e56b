"""Many processes as one: who this rank is, what ranks tell each other, and how the model is spread over them.

FSDP2 (`fully_shard`) keeps a shard of every weight on each rank and gathers a unit's weights before its forward. A layer
that is its own unit is gathered once for each of its uses, so a looped block would be gathered N_r times. Layers that
are shared therefore belong to the outermost unit, whose forward is the whole walk: they are gathered once and stay for
all their uses (thesis 4.3.1, "N_r iterations per gather"), in the backward pass and for all micro-batches of a step too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fathomlm.checkpoints.resolve import parse_device
from fathomlm.errors import FathomError, OptionError, TrainingError
from fathomlm.train.objective import Objective

T = TypeVar("T")
COMFORT = 0.4
"""The part of a device's memory that weights, gradients and optimizer may take before `auto` shards them."""


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of this run. A world of one needs no process group."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def first_error(self, word: str | None) -> str | None:
        """What the lowest rank with something to say says, on every rank: a disk may be full for one of them only."""
        if self.size == 1:
            return word
        messages = self.gather(word)
        return next((f"{message} (rank {rank})" for rank, message in enumerate(messages) if message is not None), None)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """What the first rank's work gives, on every rank; an error of ours that it ends in is raised on all of them."""
        found: T | None = None
        failure: FathomError | None = None
        if self.first:
            try:
                found = work()
            except FathomError as error:
                failure = error
        failure, found = self.broadcast((failure, found))
        if failure is not None:
            raise failure
        return found

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str) -> Iterator[World]:
    """The world that torchrun's environment variables describe, or a world of one."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in os.environ]:
        raise TrainingError(
            f"WORLD_SIZE is {size}, but {' and '.join(missing)} not set; start several ranks with torchrun, or unset it"
        )
    place = parse_device(_local(device))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if size == 1:
        yield World(0, 1, place)
        return
    backend, bound = ("nccl", place) if place.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(minutes=30), device_id=bound)
    try:
        yield World(rank, size, place)
    finally:
        dist.destroy_process_group()


def _local(device: str) -> str:
    """`auto` is this rank's own GPU, or the CPU."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda":
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
    return kind


def choose_parallel(kind: str, world: World, state_bytes: int) -> str:
    """none, ddp or fsdp: `auto` keeps whole copies while weights, gradients and optimizer fit comfortably."""
    if world.size == 1:
        return "none"
    if kind != "auto":
        return kind
    if world.device.type != "cuda":
        return "ddp"
    room = torch.cuda.get_device_properties(world.device).total_memory
    return "ddp" if state_bytes < COMFORT * room else "fsdp"


def parallelize(objective: Objective, kind: str, world: World, precision: str) -> nn.Module:
    """The objective as it runs on this rank."""
    if kind == "none":
        return objective
    if kind == "ddp":
        places = [world.device] if world.device.type == "cuda" else None
        # The same everywhere, and they do not change: exits' words and their rows of a frozen head. DDP would send them in
        # every pass.
        buffers = [name for name, _ in objective.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(objective, buffers)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(objective, device_ids=places, gradient_as_bucket_view=True)
    if kind != "fsdp":
        raise OptionError(f"parallel must be auto, ddp or fsdp, got {kind}")
    mesh = init_device_mesh(world.device.type, (world.size,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "bf16" else MixedPrecisionPolicy()
    decoder = objective.decoder
    for layer in range(decoder.plan.unique_layers):
        if len(decoder.plan.uses(layer)) == 1:
            fully_shard(decoder.layers[layer], mesh=mesh, mp_policy=policy)
    for block in () if objective.encoder is None else objective.encoder.block:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    return objective


@contextmanager
def accumulating(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged once a step, with its last micro-batch."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last, recurse=False)  # the outermost unit stays gathered for the next one
    yield


def whole(tensor: Tensor) -> Tensor:
    """A tensor's full value on every rank; all ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, example: Tensor) -> Tensor:
    """A full tensor laid out as `example` is; every rank has read it, so nothing is sent."""
    full = full.to(example.device)
    if isinstance(example, DTensor):
        placed = distribute_tensor(full, example.device_mesh, example.placements, src_data_rank=None)
        return torch.empty_like(placed).copy_(placed)  # a view of its rows would keep all of `full`
    return full
