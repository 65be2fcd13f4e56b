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
from fathomlm.engine.rows import Reach
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

    def at(self, pool: int, plane: int, planes: int = 1) -> tuple[Tensor, Tensor]:
        """Pages of a plane, and of as many behind it as rows may be led to by an offset (`Reach.planes`). Kernels address
        nothing outside what they are given."""
        k, v = self._pools[pool]
        assert 0 <= plane < plane + planes <= len(k), f"planes {plane} to {plane + planes - 1} of {len(k)} in pool {pool}"
        return k[plane : plane + planes].flatten(0, 1), v[plane : plane + planes].flatten(0, 1)

    def stride(self, pool: int) -> int:
        """From a page of one plane to the same page of the next."""
        return self._pools[pool][0].shape[1]

    def check(self, pool: int, reach: Reach) -> None:
        """Assert that rows see and write only pages that are handed out, in planes that are theirs. It asks the device, so
        it is for CPUs, where that costs nothing; what is asserted of a program there holds for its twin on a GPU."""
        stride, pages = self.stride(pool), reach.table_NP.shape[1]
        longest = int(reach.lengths_N.max())
        assert longest <= pages * self.page_size, f"a row sees {longest} entries through a table of {pages} pages"
        firsts_P = torch.arange(pages, device=reach.table_NP.device) * self.page_size
        seen = reach.table_NP[firsts_P < reach.lengths_N[:, None]]
        written = reach.slots_N[reach.slots_N != -1].div(self.page_size, rounding_mode="floor")
        for named, does in ((seen, "sees"), (written, "writes")):
            inside = (named >= 0) & (named < reach.planes * stride) & (named % stride != stride - 1)
            assert inside.all(), f"a row {does} page {named[~inside][0]} of {reach.planes} plane(s) of {stride - 1} pages"

    def copy(self, order: Copy) -> None:
        handed_out = range(self.stride(order.pool) - 1)
        assert order.source in handed_out, f"page {order.source} of {len(handed_out)} is copied from"
        assert order.target in handed_out, f"page {order.target} of {len(handed_out)} is copied to"
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
