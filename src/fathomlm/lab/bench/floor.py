"""The weight-read floor: with a small batch a decode step cannot be faster than reading the weights that it multiplies with.

Every pass reads the weights of its steps once, a looped layer as often as it is run: a block of a useful size does not stay
in any cache. Entries, embeddings of single tokens and what is computed are left out, so the floor is below what is possible,
the more so the longer sequences are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fathomlm.depth import Step
from fathomlm.engine.programs.exit_decisions import ALL
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.programs.whole import WholeProgram
from fathomlm.engine.runner import Runner
from fathomlm.model.blocks import Block
from fathomlm.model.blocks.attention import QuantizedLinear
from fathomlm.model.decoder import Decoder

PROBE_BYTES = {"cuda": 2**31, "cpu": 2**28}
PROBES = 6


def reading_speed(device: torch.device, size: int | None = None) -> float:
    """Bytes a second that a plain sum reads of memory that no cache holds; the best of a few tries."""
    size = PROBE_BYTES.get(device.type, PROBE_BYTES["cpu"]) if size is None else size
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    numbers = torch.ones(size // 4, device=device)
    times = []
    for _ in range(PROBES):
        finish(device)
        begun = time.perf_counter()
        numbers.sum()
        finish(device)
        times.append(time.perf_counter() - begun)
    return numbers.numel() * numbers.element_size() / min(times)


def finish(device: torch.device) -> None:
    """Wait for all that a device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode_step_bytes(runner: Runner) -> int:
    """Bytes of weights that one decode step reads."""
    program, decoder = runner.program, runner.decoder
    plan = decoder.plan
    head = _head(decoder)
    if isinstance(program, RoutedProgram):
        core = steps_bytes(decoder, plan.recursion_steps(0), mixed=True) + size_of(decoder.routers)
        outer = steps_bytes(decoder, [step for step in plan if step.part != "core"])
        passes = sum(program.cores) if runner.core_passes is None else runner.core_passes.wanted
        return round(passes * core + len(program.cores) * (outer + head))
    if isinstance(program, ExitProgram):
        return sum(_exit_pass(decoder, program, program.numbers[name], head) for name in program.passes)
    steps = program.steps if isinstance(program, WholeProgram) else plan.steps  # those up to a static exit
    own = [parts[str(index)] for index in runner.exits for parts in _exit_parts(decoder) if str(index) in parts]
    return steps_bytes(decoder, steps, merged=runner.layers.merged) + sum(map(size_of, own)) + head


def steps_bytes(decoder: Decoder, steps: Iterable[Step], mixed: bool = False, merged: bool = False) -> int:
    """Weights of some steps. `mixed`: rows of all recursions run them together, each with what its own adds. `merged`: what
    a step adds is in its weights, and not read beside them."""
    total = 0
    for step in steps:
        layer = decoder.layers[step.layer]
        assert isinstance(layer, Block)
        total += size_of(layer)
        if decoder.plan.reads_kv(step):
            total -= _entries(layer)
        uses = () if merged else decoder.plan.uses(step.layer) if mixed else (step,)
        total += sum(size_of(decoder.delta(use)) for use in uses)
    return total


def size_of(module: nn.Module | None) -> int:
    """Bytes of a module's parameters, and of weights that are integers."""
    if module is None:
        return 0
    integers = sum(linear.quantized.bytes for linear in module.modules() if isinstance(linear, QuantizedLinear))
    return integers + sum(p.numel() * p.element_size() for p in module.parameters())


def _exit_pass(decoder: Decoder, program: ExitProgram, kind: int, head: int) -> int:
    total = steps_bytes(decoder, program.segments[max(kind, 0)], program.mixed, program.parts.layers.merged) + head
    for k, index in enumerate(program.exits):
        if kind not in (k, ALL):
            continue
        own = [parts[str(index)] for parts in _exit_parts(decoder) if str(index) in parts]
        total += sum(size_of(part) for part in own)
        if own and kind == ALL:
            total += head  # the exit's scores and the full model's are computed for every row
        if program.copies:
            deeper = (step for steps in program.segments[k + 1 :] for step in steps)
            total += sum(_entries(decoder.layers[step.layer]) for step in deeper if not decoder.plan.reads_kv(step))
    return total


def _exit_parts(decoder: Decoder) -> Sequence[nn.ModuleDict]:
    return decoder.exit_adapters, decoder.exit_heads, decoder.exit_blocks


def _head(decoder: Decoder) -> int:
    """The final norm and the head, which may be the embedding."""
    tied = decoder.embed if decoder.tied_head is None else decoder.tied_head
    head = tied if decoder.head is None else decoder.head
    return size_of(decoder.norm) + size_of(head)


def _entries(layer: nn.Module) -> int:
    """What makes a layer's keys and values."""
    assert isinstance(layer, Block)
    return size_of(layer.attn.k) + size_of(layer.attn.v)
