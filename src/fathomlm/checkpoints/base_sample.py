"""A few hundred numbers of a model, by which what was trained over it knows it again.

A checksum would not do: the same base is stored as float32, bfloat16, int8 or 4-bit GGUF, and every copy has other bits.
What all of them keep, up to the rounding of bfloat16, are the vectors: norms and biases are never quantised, and training a
whole model moves them. Matrices do move when they are quantised, in four bits by a tenth of their size, so of them only the
rough values are compared. That tells other models apart, and fine-tunes where all weights learnt. A fine-tune that left the
norms alone (merged LoRA) cannot be told from a quantised copy.
"""

from __future__ import annotations

import math
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

import torch
from torch import Tensor

from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.decoder import Decoder

VECTORS, MATRICES = 256, 512
"""About how many numbers are kept; each tensor gives as many, one at least."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, lie evenly in any number, and in no matrix all in one column."""
ROUNDING = 1.25 * 2**-8
"""How far bfloat16 moves a number, as a part of it, with some air for copies that were rounded twice."""
TINY = 1e-6
OWN = "exit_"
"""How the names of all tensors begin that exits have of their own, and of no others."""
HALF = 0.5
"""Numbers of matrices may be off by this part of their size, by the medians of both: 4-bit copies are by about 0.1, other
models of the same shape by 1 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSample:
    """Numbers of a decoder's own weights, those of its exits left out, in an order that follows from their names."""

    vectors: tuple[float, ...]
    """Of norms and biases."""
    matrices: tuple[float, ...]

    @classmethod
    def of(cls, decoder: Decoder) -> BaseSample:
        names = sorted((name, value) for name, value in decoder.named_parameters() if not name.startswith(OWN))
        return cls.of_tensors([value for _, value in names])

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> BaseSample:
        vectors = [value for value in tensors if value.dim() < 2]
        matrices = [value for value in tensors if value.dim() >= 2]
        return cls(vectors=_numbers(vectors, VECTORS), matrices=_numbers(matrices, MATRICES))

    @classmethod
    def joined(cls, samples: Sequence[BaseSample]) -> BaseSample:
        """Of several parts, the sample of all."""
        parts = ([getattr(sample, name) for sample in samples] for name in ("vectors", "matrices"))
        vectors, matrices = (tuple(chain.from_iterable(part)) for part in parts)
        return cls(vectors=vectors, matrices=matrices)

    @classmethod
    def from_dict(cls, record: dict[str, str], where: str) -> BaseSample:
        found = {name: _decode(record.get(name), f"{where}, {name}") for name in ("vectors", "matrices")}
        return cls(**found)

    def to_dict(self) -> dict[str, str]:
        """Float32 in base64: not for reading, and a line each."""
        parts = {"vectors": self.vectors, "matrices": self.matrices}
        return {name: b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode() for name, numbers in parts.items()}

    def difference(self, other: BaseSample) -> str | None:
        """What makes `other` another base, in words; None where it is the same one, as far as a sample can tell."""
        if (len(self.vectors), len(self.matrices)) != (len(other.vectors), len(other.matrices)):
            return "the sample of its weights is of another length"
        apart = median(abs(a - b) for a, b in zip(self.matrices, other.matrices, strict=True))
        size = median(abs(a) for a in self.matrices)
        if apart > HALF * size:
            return f"its weights differ by {_percent(apart, size)}, more than any quantised copy's"
        moved = sum(abs(a - b) > TINY + ROUNDING * abs(a) for a, b in zip(self.vectors, other.vectors, strict=True))
        if moved:
            return f"{moved} of {len(self.vectors)} sampled norms and biases are others, as in a fine-tune"
        return None


def _numbers(tensors: Sequence[Tensor], about: int) -> tuple[float, ...]:
    many = max(1, about // len(tensors))
    spread = torch.arange(1, many + 1, dtype=torch.float64) * GOLDEN % 1
    found = torch.cat([_at(tensor, spread) for tensor in tensors])
    if not bool(found.isfinite().all()):
        raise OptionError("the model holds numbers that are not finite: nothing that was trained over it is worth keeping")
    return tuple(found.tolist())


def _decode(text: object, where: str) -> tuple[float, ...]:
    try:
        data = b64decode(text, validate=True) if isinstance(text, str) else b""
        numbers = struct.unpack(f"<{len(data) // 4}f", data)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{where} is damaged ({error})") from error
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise CheckpointError(f"{where} must hold finite numbers")
    return numbers


def _at(tensor: Tensor, spread: Tensor) -> Tensor:
    places = (spread * tensor.numel()).long().to(tensor.device)
    return tensor.detach().reshape(-1)[places].float().cpu()


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "all their size"
