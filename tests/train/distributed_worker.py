"""One of the two ranks that test_distributed.py launches.

One launch does all jobs of a list, in order, and leaves what each gave in a file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import FathomError
from fathomlm.model.decoder import Decoder
from fathomlm.train import checkpoint
from fathomlm.train.distributed import World, accumulating, join, like, local_part, parallelize, whole
from fathomlm.train.objective import Objective
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import LossRecipe
from fathomlm.train.report import SilentWatcher
from fathomlm.train.run import TrainingRun

WIDTHS = {"hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "vocab": 257}


class Caller(SilentWatcher):
    """Watches a rank, and sends it SIGTERM after a step."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if step == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    world: World,
    recipe: dict[str, Any],
    *,
    resume: bool = False,
    copy_of: str | None = None,
    term: list[int] | None = None,
    full_disk: int | None = None,
    no_rename: bool = False,
    bad_pass: list[int] | None = None,
) -> dict[str, Any]:
    """A run. `term`: the rank to send SIGTERM to and after which step; `full_disk`: the rank that cannot write; `bad_pass`:
    the rank whose loss is not a number, and the number of that pass."""
    if copy_of is not None and world.first:
        shutil.copytree(copy_of, recipe["out"], symlinks=True)
    world.wait()
    after = term[1] if term is not None and term[0] == world.rank else None
    try:
        bad = bad_pass[1] if bad_pass is not None and bad_pass[0] == world.rank else None
        with _full_disk(world.rank == full_disk), _no_rename(no_rename and world.first), _bad_pass(bad):
            summary = TrainingRun(build_recipe(recipe), world, Caller(after)).go(resume)
    except FathomError as error:
        return {"error": type(error).__name__, "text": str(error)}
    skipped = {"skipped": summary.skipped} if summary.skipped else {}
    return {"step": summary.step, "finished": summary.finished, **skipped}


@contextmanager
def _full_disk(here: bool) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(checkpoint, "save_file", refuse if here else checkpoint.save_file):
        yield


@contextmanager
def _bad_pass(number: int | None) -> Iterator[None]:
    forward, passes = Objective.forward, iter(range(1, 1000))

    def spoilt(self: Objective, *args: Any, **more: Any) -> Any:
        total, parts = forward(self, *args, **more)
        return (total * math.nan if self.training and next(passes) == number else total), parts

    with mock.patch.object(Objective, "forward", forward if number is None else spoilt):
        yield


@contextmanager
def _no_rename(here: bool) -> Iterator[None]:
    """The last stroke fails: a finished checkpoint cannot take its name."""
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if here and ".partial-" in self.name:
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(self, target)

    with mock.patch.object(Path, "rename", refuse):
        yield


def traffic(world: World, sharing: str, recursions: int, layers: int, naive: bool = False) -> dict[str, Any]:
    """How often weights are gathered and gradients sent in one forward and backward pass."""
    objective = _objective(sharing, recursions, layers)
    if naive:
        mesh = init_device_mesh("cpu", (world.size,))
        for layer in objective.decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh)
    else:
        parallelize(objective, "fsdp", world, "float32")
    tokens_BT = torch.arange(16).view(2, 8)
    with Traffic() as forward:
        total, _ = objective(tokens_BT, tokens_BT)
    with Traffic() as backward:
        total.backward()
    units = sum(isinstance(module, FSDPModule) for module in objective.modules())
    return {"units": units, "forward": forward.counts, "backward": backward.counts}


def step_traffic(world: World, micro_batches: int) -> dict[str, Any]:
    """The same over a step of several micro-batches."""
    objective = _objective("cycle", 2, 4)
    parallelize(objective, "fsdp", world, "float32")
    tokens_BT = torch.arange(16).view(2, 8)
    with Traffic() as mode:
        for i in range(micro_batches):
            with accumulating(objective, last=i == micro_batches - 1):
                objective(tokens_BT, tokens_BT)[0].backward()
    return mode.counts


def _objective(sharing: str, recursions: int, layers: int) -> Objective:
    decoder = Decoder(Architecture(family="llama", layers=layers, **WIDTHS), DepthPlan.build(sharing, recursions, layers))
    decoder.reset_parameters(generator=torch.Generator().manual_seed(0))
    return Objective(decoder, LossRecipe())


class Traffic(TorchDispatchMode):
    """Counts what is sent. CommDebugMode would, but its record of modules breaks on a module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"gathers": 0, "reductions": 0}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            name = op._schema.name.removeprefix("c10d::")
            kind = {"_allgather_base_": "gathers", "_reduce_scatter_base_": "reductions"}.get(name, name)
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return op(*args, **(kwargs or {}))


def gradient_memory(world: World) -> dict[str, Any]:
    """How many separate pieces of memory DDP's gradients are in after a step."""
    objective = _objective("cycle", 2, 4)
    module = parallelize(objective, "ddp", world, "float32")
    tokens_BT = torch.arange(16).view(2, 8)
    module(tokens_BT, tokens_BT)[0].backward()
    gradients = [p.grad for p in objective.parameters() if p.grad is not None]
    return {"gradients": len(gradients), "pieces": len({g.untyped_storage().data_ptr() for g in gradients})}


def layout(world: World, rows: int) -> dict[str, Any]:
    """A tensor laid out over ranks and put together again, and the memory that a rank keeps of it."""
    mesh = init_device_mesh("cpu", (world.size,))
    full = torch.arange(rows * 3.0).view(rows, 3)
    example = distribute_tensor(torch.zeros(rows, 3), mesh, [Shard(0)])
    part = local_part(placed := like(full, example))
    kept = part.untyped_storage().nbytes() // part.element_size()
    return {"rows": part.shape[0], "kept": kept, "same": torch.equal(whole(placed), full)}


JOBS = {f.__name__: f for f in (train, traffic, step_traffic, gradient_memory, layout)}


def main(jobs: str) -> None:
    path = Path(jobs)
    torch.set_num_threads(1)
    with join("cpu") as world, mock.patch.object(os, "fsync"):
        results = {}
        for name, job in json.loads(path.read_text()).items():
            results[name] = JOBS[job.pop("do")](world, **job)
            world.wait()
    path.with_name(f"rank-{world.rank}.json").write_text(json.dumps(results))
