"""What fits a device's memory: how many texts at once, and how many pages the scheduler has to give (thesis 3.5.5).

Weights and keys and values are counted as `fathomlm plan` counts them. Keys and values of every token at every depth have
their memory, also where a token left before it: so does the thesis. A routed model keeps what its capacities let through.
"""

from __future__ import annotations

from dataclasses import dataclass

from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.depth.cost import count
from fathomlm.engine.layout import build_layout
from fathomlm.engine.options import PAGE
from fathomlm.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Of one model."""

    weights: int
    """Bytes."""
    kv: int
    """Bytes that are left for keys and values."""
    texts: int
    """Texts of the full length that fit at once."""
    tables: tuple[int, ...]
    pool_pages: tuple[int, ...]


def find_room(
    architecture: Architecture,
    plan: DepthPlan,
    relaxation: Relaxation | None,
    *,
    memory: int,
    length: int,
    element_bytes: int = 2,
    page_size: int = PAGE,
) -> Room:
    """What `memory` bytes hold beside the weights, for texts of `length` tokens."""
    cost = count(architecture, plan, relaxation=relaxation, context=length, kv_element_bytes=element_bytes)
    weights = element_bytes * (cost.non_embedding_parameters + cost.embedding_parameters)
    kv, a_text = memory - weights, cost.kv_bytes_per_token * length
    if kv < a_text:
        raise OptionError(
            f"--memory {memory / 1e9:.4g} GB holds no text of {length:,} tokens: weights take {weights / 1e9:.4g} GB and "
            f"its keys and values {a_text / 1e9:.4g} GB"
        )
    layout = build_layout(architecture, plan, relaxation, None)
    page = 2 * architecture.kv_width * element_bytes * page_size
    shares = [float(layout.tables.count(pool)) for pool in range(len(layout.planes))]
    if plan.routing is not None and len(layout.planes) > 1:
        shares = [1.0, sum(plan.routing.capacity)]
    whole = sum(page * planes * share for planes, share in zip(layout.planes, shares, strict=True))
    pool_pages = tuple(max(1, int(kv * share / whole)) for share in shares)
    return Room(weights=weights, kv=kv, texts=int(kv // a_text), tables=layout.tables, pool_pages=pool_pages)
