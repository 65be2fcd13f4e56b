"""A teacher's likeliest tokens, kept on disk, so that a second run on the same rows needs no teacher.

    cache.json           what they belong to: teacher, corpus, rows, K; anything else is refused
    train.tokens         (windows, T, K) token ids, and in train.logs their log-probabilities in float16
    train.done           a byte for each window: 1 where its tokens are there
    validation.*         the same

A run first fills in the windows that it will read and that are missing, then trains as if the teacher ran beside it: what is
compared is the same, but for the rounding of other batch shapes on a GPU. Filling can be stopped, and goes on with the next
run. Files are sparse until they are full; they are written as files and read as memory, since a disk that is full must not
end the process.

Shapes: B rows, T tokens of a row, K tokens that are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fathomlm.checkpoints.writing import whole_file
from fathomlm.errors import DataError, writing
from fathomlm.jsonfile import read_object
from fathomlm.model.seq2seq import FathomModel
from fathomlm.train.data.corpus import Corpus
from fathomlm.train.data.loader import Batch, Loader, rank_slice
from fathomlm.train.distributed import World
from fathomlm.train.losses.head import LikeliestTokens
from fathomlm.train.objective import Objective
from fathomlm.train.recipe import Recipe
from fathomlm.train.setup import TrainingData, build_teacher

FILE = "cache.json"
SAMPLED = 1 << 20
"""Bytes at both ends of a weights file that its mark is taken of."""


class SplitCache:
    """The windows of one split."""

    def __init__(self, directory: Path, split: str, windows: int, row: int, k: int, wide: bool) -> None:
        shape = (windows, row, k)
        self.tokens = _opened(directory / f"{split}.tokens", np.uint32 if wide else np.uint16, shape)
        self.logs = _opened(directory / f"{split}.logs", np.float16, shape)
        self.done = _opened(directory / f"{split}.done", np.uint8, (windows,))

    def missing(self, windows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        wanted: npt.NDArray[np.int64] = np.unique(windows)
        left: npt.NDArray[np.int64] = wanted[self.done[wanted] == 0]
        return left

    def put(self, windows: npt.NDArray[np.int64], found: LikeliestTokens) -> None:
        """The mark comes last, when the rest is on the disk: what was cut off in between is made again."""
        shape = (len(windows), *self.tokens.shape[1:])
        _write(self.tokens, windows, found.tokens_NK.cpu().numpy().reshape(shape))
        _write(self.logs, windows, found.logs_NK.cpu().numpy().reshape(shape))
        _write(self.done, windows, np.ones(len(windows)))


class TaughtLoader:
    """A loader whose batches have what the teacher finds likeliest."""

    def __init__(self, inner: Loader, cache: SplitCache) -> None:
        self.batch = inner.batch
        self._inner, self._cache = inner, cache

    def __len__(self) -> int:
        return len(self._inner)

    def batch_at(self, start: int, count: int, rank: int = 0, world: int = 1) -> Batch:
        windows = rank_slice(self._inner.samples(start, count), rank, world)
        tokens = torch.from_numpy(self._cache.tokens[windows].astype(np.int32))
        logs = torch.from_numpy(np.ascontiguousarray(self._cache.logs[windows]))
        return replace(self._inner.windows(windows), likeliest_BTK=tokens, likeliest_logs_BTK=logs)


def taught_data(
    recipe: Recipe, data: TrainingData, student: FathomModel, world: World, rows: int, note: Callable[[str], None]
) -> TrainingData:
    """The data of a run of so many rows, with the teacher's tokens; the first rank asks the teacher what is missing."""
    train, validation = data.train, data.validation
    assert isinstance(train, Loader)
    loaders, wanted = {"train": train}, {"train": train.samples(0, rows)}
    if isinstance(validation, Loader):
        loaders["validation"] = validation
        wanted["validation"] = np.arange(min(recipe.evaluate.rows or len(validation), len(validation)))
    vocab = student.architecture.vocab

    def complete() -> None:
        caches = open_cache(recipe, data.corpus, loaders, vocab)
        missing = {split: cache.missing(wanted[split]) for split, cache in caches.items()}
        if not any(len(windows) for windows in missing.values()):
            return
        teacher = build_teacher(recipe, data.corpus, student, world)
        assert teacher is not None
        objective = Objective(student.decoder, recipe.loss, teacher=teacher.decoder)
        for split, windows in missing.items():
            fill(
                caches[split], windows, loaders[split], objective.likeliest,
                rows=recipe.batch.micro, device=world.device, bf16=recipe.precision == "bf16", note=note,
            )  # fmt: skip

    world.on_first(complete)
    caches = open_cache(recipe, data.corpus, loaders, vocab)
    taught = {split: TaughtLoader(loader, caches[split]) for split, loader in loaders.items()}
    return replace(data, train=taught["train"], validation=taught.get("validation", validation))


def open_cache(recipe: Recipe, corpus: Corpus, loaders: dict[str, Loader], vocab: int) -> dict[str, SplitCache]:
    """The caches of a run's splits; one that belongs to something else is an error."""
    distill = recipe.loss.distill
    assert distill is not None
    assert distill.cache is not None
    directory, k = Path(distill.cache), min(distill.top_k, vocab)
    belongs: dict[str, Any] = {
        "format": 1,
        "teacher": distill.source,
        "weights": weights_mark(distill.source),
        "vocab": recipe.model.vocab,
        "precision": recipe.precision,
        "corpus": corpus.checksum,
        "context": recipe.data.context,
        "document_mask": recipe.data.document_mask,
        "top_k": k,
    }
    path = directory / FILE
    if path.exists():
        held = read_object(path, error=DataError).values
        other = next((name for name in belongs if held.get(name) != belongs[name]), None)
        if other is not None:
            raise DataError(
                f"{directory} keeps another teacher's tokens: {other} is {held.get(other)} there and {belongs[other]} here; "
                "name another loss.distill.cache"
            )
    else:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(belongs, indent=1) + "\n", encoding="utf-8")
    wide = vocab > 1 << 16
    return {split: SplitCache(directory, split, len(each), each.context, k, wide) for split, each in loaders.items()}


def fill(
    cache: SplitCache,
    windows: npt.NDArray[np.int64],
    loader: Loader,
    likeliest: Callable[[Batch], LikeliestTokens],
    *,
    rows: int,
    device: torch.device,
    bf16: bool,
    note: Callable[[str], None],
) -> None:
    """Ask the teacher about `windows`, so many rows at a time."""
    for at in range(0, len(windows), rows):
        part = windows[at : at + rows]
        autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        with torch.no_grad(), autocast:
            cache.put(part, likeliest(loader.windows(part).to(device)))
        done = at + len(part)
        if done * 10 // len(windows) > at * 10 // len(windows):
            note(f"the teacher has read {done:,} of {len(windows):,} rows")


def weights_mark(source: str) -> str | None:
    """What a teacher's files are known by, where it is a path: names, sizes, and both ends of each; None for a name."""
    place = Path(source).expanduser()
    if not place.exists():
        return None
    digest = hashlib.sha256()
    files = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLED))
            content.seek(max(0, size - SAMPLED))
            digest.update(content.read(SAMPLED))
    return digest.hexdigest()[:16]


def _opened(path: Path, kind: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """An array in a file, made with zeros where there is none; to be read."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    with writing(path):
        if not path.exists():
            with whole_file(path) as temporary, temporary.open("wb") as file:
                file.truncate(size)
        if (found := path.stat().st_size) != size:
            raise DataError(f"{path} has {found:,} bytes instead of {size:,}; delete its directory, or name another")
        return np.memmap(path, dtype=kind, mode="r", shape=shape)


def _write(array: np.memmap[Any, Any], windows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
    assert array.filename is not None
    size = array.nbytes // len(array)
    with writing(array.filename), Path(array.filename).open("r+b") as file:
        for window, value in zip(windows, values.astype(array.dtype), strict=True):
            file.seek(int(window) * size)
            file.write(value.tobytes())
        file.flush()
        os.fsync(file.fileno())
