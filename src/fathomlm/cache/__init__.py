"""Keys and values by step of the depth plan."""

from fathomlm.cache.dense import DenseCache, Entries, StepKV
from fathomlm.cache.no_cache import NoCache
from fathomlm.cache.routed import RoutedCache
from fathomlm.cache.slots import Focus, SlotCache, Span
from fathomlm.depth import DepthPlan


def build_cache(plan: DepthPlan, reserve: int = 64) -> DenseCache | RoutedCache:
    """The cache that a plan needs; `reserve` is how many slots to set aside at first."""
    return DenseCache(plan, reserve) if plan.routing is None else RoutedCache(plan, reserve)


__all__ = [
    "DenseCache",
    "Entries",
    "Focus",
    "NoCache",
    "RoutedCache",
    "SlotCache",
    "Span",
    "StepKV",
    "build_cache",
]
