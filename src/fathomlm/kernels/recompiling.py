"""How often torch.compile may compile a function: beyond dynamo's limit it runs eagerly, or fails where it may not."""

from __future__ import annotations

import torch


def allow_recompiling(most: int) -> None:
    """Let a process hold `most` compiled versions of a function, or as many as it was allowed before."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, most)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * most)
