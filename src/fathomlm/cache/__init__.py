"""Keys and values by step of the depth plan."""

from fathomlm.cache.dense import DenseCache, StepKV

__all__ = ["DenseCache", "StepKV"]
