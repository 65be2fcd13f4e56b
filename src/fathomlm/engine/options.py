"""How an engine is set up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fathomlm.depth.routing import MOST_BIAS
from fathomlm.engine.burst_length import BURST, LONGER
from fathomlm.errors import is_number, require
from fathomlm.options import check, option
from fathomlm.sizes import MEGABYTE

PAGE = 16
KvDtype = Literal["auto", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and policies of one engine. None means: chosen for the model and the device."""

    batch_size: int = option(32, ge=1, help="sequences per forward pass; one with several tokens in it counts as several")
    max_sequences: int | None = option(
        None, ge=1, help="max concurrent sequences",
        default_text="the batch size, on a GPU a 32nd more; twice the batch size where tokens differ in depth",
    )  # fmt: skip
    """Twice as many where tokens differ in depth, so that every pass is full (thesis 3.3.5). Where they do not, a GPU has a
    few more than the batch size, which take the rows of those that end."""
    max_length: int | None = option(
        None, ge=2, help="max tokens per sequence, prompt included", default_text="the model's context"
    )
    max_source: int | None = option(
        None, ge=1, help="encoder-decoder models: max tokens of a source", default_text="the model's context"
    )
    memory: int | None = option(
        None, ge=1, size=MEGABYTE, help="memory for the KV cache",
        default_text="enough for every sequence at --max-length, within half of a GPU's free memory or 1 GiB on a CPU",
    )  # fmt: skip
    kv_dtype: KvDtype = option("auto", help="data type of the KV cache; auto is that of the weights")
    """fp8 is one byte for each number (float8_e4m3fn, not scaled, cut off at 448): the same memory holds more pages."""
    page_size: int = option(PAGE, ge=1, help="tokens per page of the KV cache, a power of two")
    max_queue: int = option(1024, ge=1, help="max waiting requests; further ones are refused")
    prefill_chunk: int | None = option(
        None, ge=1, help="prompt tokens to prefill between two bursts of decode steps, over all sequences",
        default_text="8192 on a GPU, 256 elsewhere",
    )  # fmt: skip
    burst: int | None = option(
        None, ge=1, help="decode steps to start before the host reads results",
        default_text=f"{BURST} on a GPU, up to {BURST * LONGER} where it or requests would wait; 1 elsewhere",
    )  # fmt: skip
    lag: int | None = option(
        None, ge=0, help="bursts that the device may be ahead of the host", default_text="1 on a GPU, 0 elsewhere"
    )
    stream_interval: int = option(
        1, ge=1, help="stream the first token at once, and then every N; more take less of the host where many listen"
    )
    """Stop strings and constraints are heeded at every token all the same."""
    prefix_caching: bool = option(True, help="reuse the KV cache of prompts that begin alike")
    max_logprobs: int = option(5, ge=0, help="max alternatives per token with log probabilities")
    penalties: bool = option(True, help="accept penalties: five bytes per sequence and token of the vocabulary")
    fuse: bool | None = option(None, help="run layers in kernels for small batches", default_text="on a GPU")
    merge: bool = option(
        True,
        help="relaxed models on a GPU: merge each step's LoRA or DoRA into weights of its own, which is faster and takes "
        "the memory of the unrolled model",
    )  # fmt: skip
    """Without it weights in memory are the checkpoint's, and layers run as ordinary modules."""
    compile: bool | None = option(None, help="compile the work between layers", default_text="on a GPU")
    capture: bool | None = option(None, help="capture decode steps as CUDA graphs", default_text="on a GPU")
    cores: int | None = option(
        None, ge=1, help="routed models: passes of the shared block per turn",
        default_text="on a GPU as deep as tokens go, by measurement; else as the routers were trained for",
    )  # fmt: skip
    shallows: int | None = option(
        None, ge=1, help="exits: passes in front of the first exit per pass behind it, where they cannot share one",
        default_text="1; speculative: 4",
    )  # fmt: skip
    always_draft: bool = option(False, help="speculative: draft also where that was measured to be slower")
    depth_bias: float = option(
        0.0, metavar="B", help="routed models: added to router scores; above 0 sends tokens deeper, below 0 less deep"
    )
    forced_depths: tuple[float, ...] | None = None
    """routed, for measurements: the part of the tokens that runs each recursion, drawn and not decided. It begins with 1 and
    never rises."""
    forced_exits: float | None = option(None, ge=0, le=1)
    """exits, for measurements: the part of the tokens at an exit that exits there, drawn and not decided."""

    def __post_init__(self) -> None:
        check(self)
        require(not self.page_size & (self.page_size - 1), "page_size", "a power of two", self.page_size)
        require(
            abs(self.depth_bias) <= MOST_BIAS, "depth_bias", f"between {-MOST_BIAS:g} and {MOST_BIAS:g}", self.depth_bias
        )
        if self.forced_depths is not None:
            rule = "parts of all tokens that begin with 1, never rise and stay above 0, such as (1.0, 0.6, 0.3)"
            require(_are_parts(self.forced_depths), "forced_depths", rule, self.forced_depths)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a failed engine may be built again. Beyond that something is wrong that building again does not mend."""

    max_restarts: int = option(3, ge=0, help="build a failed engine again at most N times within --restart-window")
    restart_window: float = option(600.0, gt=0, metavar="S", help="seconds over which restarts are counted")

    def __post_init__(self) -> None:
        check(self)


def _are_parts(parts: object) -> bool:
    """Every token runs the first recursion, and none runs one without those before it."""
    if not isinstance(parts, Sequence) or not parts or not all(map(is_number, parts)):
        return False
    return parts[0] == 1 and all(0 < part <= before for part, before in zip(parts[1:], parts, strict=False))
