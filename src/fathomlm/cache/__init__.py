"""Keys and values by step of the depth plan."""

from fathomlm.cache.dense import Cache, DenseCache, Entries, StepKV
from fathomlm.cache.no_cache import NoCache, RolledEntries
from fathomlm.cache.routed import RoutedCache
from fathomlm.cache.slots import Focus, SlotCache, Span
from fathomlm.depth import DepthPlan


def build_cache(plan: DepthPlan, reserve: int = 64, kv_loops: int | None = None) -> DenseCache:
    """The cache that a plan needs; `reserve` is how many slots to set aside at first, `kv_loops` of how many loops entries
    are kept, all by default."""
    if plan.routing is None:
        return DenseCache(plan, reserve, kv_loops)
    assert kv_loops is None
    return RoutedCache(plan, reserve)


__all__ = [
    "Cache",
    "DenseCache",
    "Entries",
    "Focus",
    "NoCache",
    "RolledEntries",
    "RoutedCache",
    "SlotCache",
    "Span",
    "StepKV",
    "build_cache",
]
