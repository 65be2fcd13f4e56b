"""Weights as integers, and products with them: int8 and fp8 with a scale for each output, int4 with a scale and a minimum
for each group of inputs.

Only weights are rounded; sums are float32. `plain_product` is the meaning: multiply the weights out, then multiply. A few
rows go another way that reads the weights as they are: on a CPU cpu_rows.c, on a GPU the kernels for decoding rows
(`row_linear`). Many rows are bound by arithmetic and not by reading weights, so they go the plain way.

Shapes: O outputs, I inputs, G groups of a row, N rows.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.kernels.paged_write import FLOAT8, LARGEST_FLOAT8

Kind = Literal["int8", "int4", "fp8"]
KINDS: tuple[Kind, ...] = ("int8", "int4")
"""On a CPU, in the order of cpu_rows.c."""
GPU_KINDS: tuple[Kind, ...] = ("int8", "fp8")
LEVELS = 127
GROUP = 32
"""Inputs of int4 that share a scale and a minimum."""
MOST_ROWS = 32
"""Rows that the kernel takes; more are faster multiplied out."""
SMALL = 1 << 16
"""Weights below which one thread is faster than several."""


class CWeight(ctypes.Structure):
    """`Weight` of cpu_rows.c."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and scales. No weight moves by more than half its row's scale."""
    wide_OI = weight_OI.detach().float()
    largest_O = wide_OI.abs().amax(dim=1)
    # A row of zeros has no size of its own; any scale gives it back.
    scale_O = torch.where(largest_O > 0, largest_O / LEVELS, torch.ones_like(largest_O))
    whole_OI = (wide_OI / scale_O[:, None]).round().clamp(-LEVELS, LEVELS)
    return whole_OI.to(torch.int8), scale_O


def quantize_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float8 (e4m3), whose steps grow with the weights: no weight moves by more than a sixteenth of itself, or
    where it is tiny by 2^-10 of its row's scale."""
    wide_OI = weight_OI.detach().float()
    largest_O = wide_OI.abs().amax(dim=1)
    scale_O = torch.where(largest_O > 0, largest_O / LARGEST_FLOAT8, torch.ones_like(largest_O))
    return (wide_OI / scale_O[:, None]).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8), scale_O


def dequantize_int8(whole_OI: Tensor, scale_O: Tensor) -> Tensor:
    return whole_OI.float() * scale_O.float()[:, None]


def quantize_int4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights a byte (O, I / 2), and for each group its scale and minimum in bfloat16 (O, G, 2). Rounding to those two
    comes first, so that no weight moves by more than half a step and what bfloat16 moved the ends by."""
    wide_OGE = weight_OI.detach().float().view(len(weight_OI), -1, GROUP)
    least_OG = wide_OGE.amin(2).bfloat16()
    scale_OG = ((wide_OGE.amax(2) - least_OG.float()) / 15).bfloat16()
    scale_OG = torch.where(scale_OG > 0, scale_OG, torch.ones_like(scale_OG))
    whole_OGE = ((wide_OGE - least_OG.float()[..., None]) / scale_OG.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
    low, high = whole_OGE[..., : GROUP // 2], whole_OGE[..., GROUP // 2 :]
    return (low | high << 4).flatten(1), torch.stack((scale_OG, least_OG), 2)


def dequantize_int4(packed: Tensor, scales_OG2: Tensor) -> Tensor:
    halves = packed.view(len(packed), -1, GROUP // 2)
    whole_OGE = torch.cat((halves & 15, halves >> 4), 2).float()
    scale, least = scales_OG2.float().unbind(2)
    return (whole_OGE * scale[..., None] + least[..., None]).flatten(1)


_WAYS: dict[Kind, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]] = {
    "int8": (quantize_int8, dequantize_int8),
    "int4": (quantize_int4, dequantize_int4),
    "fp8": (quantize_fp8, dequantize_int8),
}


class QuantizedWeight:
    """A matrix in integers. Where its inputs do not come in whole groups, int4 is int8. `library` has the kernels for a CPU;
    without it products are plain ones, and `row_linear` takes the weight on a GPU."""

    def __init__(self, weight_OI: Tensor, kind: Kind, library: CpuLibrary | None) -> None:
        self.shape = tuple(weight_OI.shape)
        self.kind: Kind = "int8" if kind == "int4" and self.shape[1] % GROUP else kind
        self.data, self.scales = (part.contiguous() for part in _WAYS[self.kind][0](weight_OI))
        self._library = library

    def __getitem__(self, outputs: slice) -> QuantizedWeight:
        """Some of its outputs, a view."""
        part = copy.copy(self)
        part.data, part.scales = self.data[outputs], self.scales[outputs]
        part.shape = (len(part.data), self.shape[1])
        return part

    def c_weight(self) -> CWeight:
        """For the kernels; it does not keep the tensors alive."""
        return CWeight(KINDS.index(self.kind), *self.shape, self.data.data_ptr(), self.scales.data_ptr())

    def multiplied_out(self) -> Tensor:
        return _WAYS[self.kind][1](self.data, self.scales)

    def product(self, x: Tensor) -> Tensor:
        """x (..., I) times the weight, (..., O)."""
        rows = x.numel() // x.shape[-1]
        if self._library is None or rows > MOST_ROWS or x.dtype != torch.float32 or torch.compiler.is_compiling():
            return self.plain_product(x)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        threads = torch.get_num_threads() if self.shape[0] * self.shape[1] >= SMALL else 1
        self._library.linear(ctypes.byref(self.c_weight()), x.data_ptr(), rows, out.data_ptr(), threads)
        return out

    def plain_product(self, x: Tensor) -> Tensor:
        """The meaning."""
        return F.linear(x, self.multiplied_out().to(x.dtype))

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.data, self.scales))


def whole_weight(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """In numbers of `dtype`, where many rows are multiplied and reading the weight is not what takes the time."""
    return weight.multiplied_out().to(dtype) if isinstance(weight, QuantizedWeight) else weight
