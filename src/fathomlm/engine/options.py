"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass

from fathomlm.errors import OptionError

PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of one engine. None means: chosen for the model and the device."""

    rows: int = 32
    """Tokens of a pass."""
    slots: int | None = None
    """Sequences in flight. By default as many as rows; twice as many where tokens differ in depth, so that every pass is
    full (thesis 3.3.5)."""
    max_length: int | None = None
    """The most tokens of a sequence, prompt included; by default the model's context."""
    memory: int | None = None
    """Bytes for keys and values. By default enough for every slot at a quarter of `max_length`, and for one at full."""
    page_size: int = PAGE
    max_queue: int = 1024
    chunk: int = 256
    """Prompt tokens that are read between two ticks, over all sequences."""
    burst: int | None = None
    """Ticks that are started one after the other before the host looks again: 4 on a GPU, 1 elsewhere."""
    lag: int | None = None
    """Bursts that the device may be ahead of the host: 1 on a GPU, none elsewhere."""
    prefix_caching: bool = True
    max_logprobs: int = 5
    penalties: bool = True
    fuse: bool | None = None
    """Whether layers run in kernels made for few rows, where they can; by default on a GPU."""
    compile: bool | None = None
    """Whether the work between layers is compiled; by default on a GPU."""
    capture: bool | None = None
    """Whether ticks are recorded as CUDA graphs; by default on a GPU."""
    cores: int | None = None
    """routed: passes of the block to one turn; by default as many as the mean depth that the routers were trained for."""
    shallows: int = 1
    """exits: passes in front of the exit to one behind it, where the two cannot share one."""
    depth_bias: float = 0.0
    """routed: moves what routers decide; above 0 sends tokens deeper."""
    forced_depths: tuple[float, ...] | None = None
    """routed, for measurements: the part of the tokens that runs each recursion, drawn and not decided."""
    forced_exits: float | None = None
    """exits, for measurements: the part of the tokens that leaves, drawn and not decided."""

    def __post_init__(self) -> None:
        least = {"rows": 1, "page_size": 1, "max_queue": 1, "chunk": 1, "shallows": 1, "max_logprobs": 0}
        optional = {"slots": 1, "max_length": 2, "memory": 1, "burst": 1, "lag": 0, "cores": 1}
        for name, low in (least | optional).items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if self.page_size & (self.page_size - 1):
            raise OptionError(f"page_size must be a power of two, got {self.page_size}")
        if self.forced_exits is not None and not 0 <= self.forced_exits <= 1:
            raise OptionError(f"forced_exits must be between 0 and 1, got {self.forced_exits}")
