"""The simulated twin of an engine: the same program, rows, slots, pages, bursts and lag."""

from __future__ import annotations

from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.request import Result
from fathomlm.lab.simulate.devices import Device, ExitRows, LoopRows, WholeRows
from fathomlm.lab.simulate.simulation import Setting
from fathomlm.lab.simulate.trajectories import Trajectories, Trajectory


def mirror(engine: Engine) -> tuple[Device, Setting]:
    runner, options = engine.runner, engine.options
    sizes, plan, layout = runner.sizes, runner.decoder.plan, runner.layout
    setting = Setting(
        slots=sizes.max_sequences, tables=sizes.tables, pool_pages=sizes.pool_pages, page_size=options.page_size,
        chunk=options.prefill_chunk, burst=sizes.burst, lag=sizes.lag, lookahead=sizes.lookahead,
    )  # fmt: skip
    program = runner.program
    if isinstance(program, RoutedProgram):
        own = plan.kv == "cache"
        outer = own and len(layout.tables) > plan.recursions
        return LoopRows(options.batch_size, program.cores, recursions=plan.recursions, own=own, outer=outer), setting
    if isinstance(program, ExitProgram):
        waits = not program.copies and any(not plan.reads_kv(step) for step in program.deep)
        shallows = program.passes.count("shallow")
        return ExitRows(
            options.batch_size, mixed=program.mixed, stack=program.stack, waits=waits, shallows=shallows
        ), setting
    return WholeRows(options.batch_size), setting


def deepest_of(engine: Engine) -> int:
    """How deep a trajectory of this engine may go: recursions of a routed model, in front of and behind an exit, or 1."""
    kinds = {"whole": 1, "exits": 2, "routed": engine.runner.decoder.plan.recursions}
    return kinds[engine.runner.layout.kind]


def recorded(engine: Engine, results: list[Result], label: str) -> Trajectories:
    """What an engine did, to be simulated: exits' depths become 1 and 2."""
    kind, plan = engine.runner.layout.kind, engine.runner.decoder.plan
    texts = []
    for result in results:
        depths = result.depths or (1,) * len(result.tokens)
        if kind == "exits":
            depths = tuple(1 if depth < plan.unrolled_layers else 2 for depth in depths)
        texts.append(Trajectory(len(result.prompt_tokens), depths))
    return Trajectories(tuple(texts), deepest_of(engine), "file", label)
