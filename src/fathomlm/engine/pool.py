"""The pages themselves: keys and values of every plane, and one page more in each plane, which nobody reads.

Shapes: L planes, P pages, E entries of a page, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathomlm.depth import Architecture
from fathomlm.engine.layout import Layout
from fathomlm.engine.options import KvDtype
from fathomlm.engine.orders import Copy
from fathomlm.kernels.paged_write import FLOAT8, copy_page


class Pages:
    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        pool_pages: Sequence[int],
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.page_size, self.dtype = page_size, dtype
        shape = (page_size, architecture.kv_heads, architecture.head_dim)
        self._pools = [
            tuple(torch.zeros(planes, pages + 1, *shape, device=device, dtype=dtype) for _ in range(2))
            for planes, pages in zip(layout.planes, pool_pages, strict=True)
        ]

    def at(self, pool: int, plane: int) -> tuple[Tensor, Tensor]:
        """Pages of a plane and of all planes behind it: row by row an offset may lead to a later one."""
        k, v = self._pools[pool]
        return k[plane:].flatten(0, 1), v[plane:].flatten(0, 1)

    def stride(self, pool: int) -> int:
        """From a page of one plane to the same page of the next."""
        return self._pools[pool][0].shape[1]

    def copy(self, order: Copy) -> None:
        for pages in self._pools[order.pool]:
            copy_page(pages, order.source, order.target)

    @property
    def bytes(self) -> int:
        """The spare pages left out."""
        return sum(t[:, :-1].numel() * t.element_size() for pair in self._pools for t in pair)


def entry_dtype(kv_dtype: KvDtype, weights: torch.dtype) -> torch.dtype:
    """What pages hold, of a model with such weights. Float8 entries are those of the kernels at scale 1: what does not fit
    is cut off at the largest number."""
    return FLOAT8 if kv_dtype == "fp8" else weights


def page_bytes(architecture: Architecture, planes: int, page_size: int, dtype: torch.dtype) -> int:
    """What one page of a pool takes."""
    return 2 * planes * page_size * architecture.kv_heads * architecture.head_dim * dtype.itemsize
