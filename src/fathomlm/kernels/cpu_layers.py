"""Whole pre-norm layers over decoding rows in one call of cpu_rows.c: nothing of Python between two products.

The twin is the model's own modules: each row is one token, whose keys and values go to pages and which looks at those of its
own row. A page is any run of entries, so the buffers of a dense cache serve as one page a row.

Shapes: N rows, M hidden width, D head width, P pages of a row's table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fathomlm.depth import Architecture
from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.kernels.quantized import MOST_ROWS, CWeight, QuantizedWeight


class LayerWeights(NamedTuple):
    """In the order of `Layer` in cpu_rows.c."""

    q: QuantizedWeight
    k: QuantizedWeight
    v: QuantizedWeight
    o: QuantizedWeight
    gate: QuantizedWeight
    up: QuantizedWeight
    down: QuantizedWeight
    norm_attn_M: Tensor
    norm_mlp_M: Tensor


class StepEntries(NamedTuple):
    """A step and its entries: the fields of `Step` in cpu_rows.c."""

    layer: int
    k: int
    v: int
    page_stride: int
    entry_stride: int
    head_stride: int
    page_size: int
    window: int
    """How many entries a row sees; 0 is all."""
    reads: bool
    """The entries are another step's; this one makes none."""
    rotates: bool
    starts: int
    """Which row of `CpuLayers.run`'s `starts_KN` says from where on rows see; -1 where the window does."""

    @classmethod
    def over(
        cls, layer: int, k: Tensor, v: Tensor, axes: tuple[int, int, int], window: int | None, reads: bool, rotates: bool,
        starts: int | None = None,
    ) -> StepEntries:  # fmt: skip
        """For keys and values whose dimensions `axes` are pages, entries of a page and heads."""
        assert k.dtype == torch.float32
        assert k.stride() == v.stride()
        assert k.stride(-1) == 1
        page, entry, head = axes
        strides = k.stride(page), k.stride(entry), k.stride(head)
        starts = -1 if starts is None else starts
        return cls(layer, k.data_ptr(), v.data_ptr(), *strides, k.shape[entry], window or 0, reads, rotates, starts)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, CWeight) for name in LayerWeights._fields[:7]),
        *((name, ctypes.c_void_p) for name in LayerWeights._fields[7:]),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "rows", "hidden", "inner", "heads", "groups", "width", "pages", "threads", "most_entries"
        )),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class CpuLayers:
    """The layers of a decoder. It keeps their weights alive, and reads them where they lie."""

    def __init__(self, layers: Sequence[LayerWeights], architecture: Architecture, library: CpuLibrary) -> None:
        self._kept, self._architecture, self._library = tuple(layers), architecture, library
        self._inner = layers[0].gate.shape[0]
        self._table = (_Layer * len(layers))(
            *(
                _Layer(*(weight.c_weight() for weight in layer[:7]), *(norm.data_ptr() for norm in layer[7:]))
                for layer in layers
            )
        )

    def __len__(self) -> int:
        return len(self._kept)

    def __deepcopy__(self, memo: dict[int, object]) -> CpuLayers:
        """Addresses are of this process and these tensors, which nobody changes: a copy may share them."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return CpuLayers, (self._kept, self._architecture, self._library)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether this many rows (..., M), of this kind, are for here."""
        few = x.numel() // x.shape[-1] <= MOST_ROWS
        return few and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_grad_enabled()

    def run(
        self, x_NM: Tensor, steps: Tensor, cos_ND: Tensor, sin_ND: Tensor, slots_N: Tensor, table_NP: Tensor,
        lengths_N: Tensor, starts_KN: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x after some steps, in place: `steps` is from `describe`. A row's entry goes to its slot, page x page size + place
        in it, and nowhere where that is negative; it sees the first `lengths_N` entries of its table, or of
        these the last ones: as many as the step's window has, or from the one on that its row of `starts_KN` names."""
        a, (N, M) = self._architecture, x_NM.shape
        rows = (x_NM, cos_ND, sin_ND, slots_N, table_NP, lengths_N)
        assert all(tensor.is_contiguous() and len(tensor) == N for tensor in rows)
        assert table_NP.dtype == lengths_N.dtype == torch.int32
        assert slots_N.dtype == torch.int64
        assert starts_KN is None or (starts_KN.is_contiguous() and starts_KN.dtype == torch.int32)
        threads, most = torch.get_num_threads(), int(lengths_N.max())
        shape = _Shape(
            N, M, self._inner, a.heads, a.kv_heads, a.head_dim, table_NP.shape[1], threads, most, a.norm_eps, a.scale
        )
        room = threads * (N * M + most) + N * (2 * a.heads * a.head_dim + self._inner)
        scratch = torch.empty(room)
        self._library.steps(
            ctypes.byref(self._table), steps.data_ptr(), len(steps), ctypes.byref(shape),
            *(tensor.data_ptr() for tensor in rows), None if starts_KN is None else starts_KN.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        return x_NM


def describe(steps: Sequence[StepEntries]) -> Tensor:
    return torch.tensor(steps, dtype=torch.int64)
