"""lm-evaluation-harness' settings in our words; what has no place here is refused, never passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathomlm.decode.sampling import Sampling
from fathomlm.depth import DepthPlan
from fathomlm.errors import OptionError, choices
from fathomlm.lab.evaluate.outputs import FULL, Output, depth_outputs, exit_outputs
from fathomlm.lab.evaluate.scoring import DEFAULT_BATCH

MOST_TOKENS = 256
"""New tokens where a task says nothing, as for lm-eval's own models."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names that the most new tokens go by; the first that is there counts."""
SAMPLED = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")


def read_output(plan: DepthPlan, exit_layer: int | None, max_depth: int | None) -> Output:
    """Where a model is read, from `exit_layer=` or `max_depth=` in its arguments."""
    if exit_layer is not None and max_depth is not None:
        raise OptionError("exit_layer and max_depth both say how deep tokens go; give one of them")
    if exit_layer is not None:
        return exit_outputs(plan, str(exit_layer))[0]
    return FULL if max_depth is None else depth_outputs(plan, max_depth)[0]


def read_batch(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """A number of rows; `auto` is ours to choose."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return DEFAULT_BATCH if max_batch_size is None else min(DEFAULT_BATCH, int(max_batch_size))
    if not str(batch_size).isdecimal():
        raise OptionError(f"batch_size must be a number of rows, or auto; got '{batch_size}'")
    return int(batch_size)


def read_sampling(options: Mapping[str, Any]) -> Sampling:
    """How a task wants tokens chosen."""
    rest = {name: value for name, value in options.items() if value is not None}
    until = rest.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    lengths = [rest.pop(name, None) for name in LENGTHS]
    most = next((length for length in lengths if length is not None), MOST_TOKENS)
    temperature = float(rest.pop("temperature", 0.0))
    if not rest.pop("do_sample", temperature > 0):
        temperature = 0.0
    elif temperature == 0:
        temperature = 1.0
    if rest.get("num_beams") == 1:
        del rest["num_beams"]
    for name in rest:
        if name not in SAMPLED:
            known = (*LENGTHS, *SAMPLED, "until", "temperature", "do_sample")
            raise OptionError(f"fathomlm cannot generate as asked: {choices('option', name, known)}")
    stop = tuple(text for text in until if text)
    return Sampling(max_new_tokens=int(most), temperature=temperature, stop=stop, **rest)
