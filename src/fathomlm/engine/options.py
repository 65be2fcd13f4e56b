"""How an engine is set up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fathomlm.errors import OptionError, choices, require

PAGE = 16
KvDtype = Literal["auto", "fp8"]
KV_DTYPES: tuple[KvDtype, ...] = ("auto", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of one engine. None means: chosen for the model and the device."""

    batch_size: int = 32
    """Tokens of a forward pass."""
    max_sequences: int | None = None
    """Max concurrent sequences. By default `batch_size`; twice that where tokens differ in depth, so that every pass is full
    (thesis 3.3.5)."""
    max_length: int | None = None
    """The most tokens of a sequence, prompt included; by default the model's context."""
    memory: int | None = None
    """Bytes of the KV cache. By default enough for every sequence at a quarter of `max_length`, and for one at full."""
    kv_dtype: KvDtype = "auto"
    """Of the KV cache: "auto" is the dtype of the weights; "fp8" is one byte for each number (float8_e4m3fn, not scaled, cut
    off at 448), so that the same memory holds more pages."""
    page_size: int = PAGE
    max_queue: int = 1024
    prefill_chunk: int = 256
    """Prompt tokens that are prefilled between two decode steps, over all sequences."""
    burst: int | None = None
    """Decode steps that are started one after the other before the host looks again: 4 on a GPU, 1 elsewhere."""
    lag: int | None = None
    """Bursts that the device may be ahead of the host: 1 on a GPU, none elsewhere."""
    prefix_caching: bool = True
    max_logprobs: int = 5
    penalties: bool = True
    fuse: bool | None = None
    """Whether layers run in kernels for small batches, where they can; by default on a GPU."""
    compile: bool | None = None
    """Whether the work between layers is compiled; by default on a GPU."""
    capture: bool | None = None
    """Whether decode steps are captured as CUDA graphs; by default on a GPU."""
    cores: int | None = None
    """routed: passes of the block to one turn; by default as many as the mean depth that the routers were trained for."""
    shallows: int = 1
    """exits: passes in front of the exit to one behind it, where the two cannot share one."""
    depth_bias: float = 0.0
    """routed: added to what routers decide by; above 0 sends tokens deeper."""
    forced_depths: tuple[float, ...] | None = None
    """routed, for measurements: the part of the tokens that runs each recursion, drawn and not decided. It begins with 1 and
    never rises."""
    forced_exits: float | None = None
    """exits, for measurements: the part of the tokens that exits, drawn and not decided."""

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "page_size": 1, "max_queue": 1, "prefill_chunk": 1, "shallows": 1, "max_logprobs": 0}
        optional = {"max_sequences": 1, "max_length": 2, "memory": 1, "burst": 1, "lag": 0, "cores": 1}
        for name, low in (least | optional).items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionError(f"{name} must be an integer >= {low}, got {value!r}")
        if self.page_size & (self.page_size - 1):
            raise OptionError(f"page_size must be a power of two, got {self.page_size}")
        if self.kv_dtype not in KV_DTYPES:
            raise OptionError(choices("kv_dtype", str(self.kv_dtype), KV_DTYPES))
        if self.forced_depths is not None:
            rule = "parts of all tokens that begin with 1, never rise and stay above 0, such as (1.0, 0.6, 0.3)"
            require(_are_parts(self.forced_depths), "forced_depths", rule, self.forced_depths)
        if self.forced_exits is not None:
            right = _is_number(self.forced_exits) and 0 <= self.forced_exits <= 1
            require(right, "forced_exits", "a number from 0 to 1", self.forced_exits)


def _are_parts(parts: object) -> bool:
    """Every token runs the first recursion, and none runs one without those before it."""
    if not isinstance(parts, Sequence) or not parts or not all(map(_is_number, parts)):
        return False
    return parts[0] == 1 and all(0 < part <= before for part, before in zip(parts[1:], parts, strict=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
