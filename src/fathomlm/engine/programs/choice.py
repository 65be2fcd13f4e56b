"""Which program an engine runs: what the layout asks for, and with exits their mode."""

from __future__ import annotations

from collections.abc import Sequence

from fathomlm.decode.draft_tree import BestShape, TreeShape
from fathomlm.decode.exiting import Exiting
from fathomlm.engine.batch_routers import BatchRouters
from fathomlm.engine.options import EngineOptions
from fathomlm.engine.programs.base import Program, ProgramContext
from fathomlm.engine.programs.draft_best import DraftBestProgram
from fathomlm.engine.programs.draft_layer import DraftLayerProgram
from fathomlm.engine.programs.draft_tree import DraftTreeProgram
from fathomlm.engine.programs.drafts import DraftProgram
from fathomlm.engine.programs.exits import Copies, ExitProgram
from fathomlm.engine.programs.injected_exits import InjectedExitProgram
from fathomlm.engine.programs.routed import RoutedProgram
from fathomlm.engine.programs.whole import WholeProgram
from fathomlm.engine.sizing import core_passes, drafts_ahead, shallow_passes
from fathomlm.model.decoder import Decoder
from fathomlm.model.route import Routers

COPIES: dict[str, Copies] = {"state-copy": "state", "entry-copy": "entries"}


def build_program(
    parts: ProgramContext, decoder: Decoder, options: EngineOptions, exits: Sequence[int], exiting: Exiting | None
) -> Program:
    plan, kind = parts.plan, parts.layout.kind
    if kind == "whole":
        return WholeProgram(parts, *exits)
    if kind == "routed":
        assert isinstance(decoder.routers, Routers)
        assert plan.routing is not None
        routers = BatchRouters(decoder.routers, options.depth_bias, options.forced_depths)
        return RoutedProgram(parts, routers, core_passes(plan, options))
    assert exiting is not None
    confidence = exiting.confidence or "gap"
    if exiting.drafts_behind(plan):
        if exiting.draft_tree is not None:
            return DraftTreeProgram(parts, TreeShape(exiting.draft_tree), confidence=confidence)
        if exiting.draft_best is not None:
            return DraftBestProgram(parts, BestShape(*exiting.draft_best), confidence=confidence)
        return DraftLayerProgram(parts, drafts=drafts_ahead(exiting), confidence=confidence)
    stack, shallows = min(exiting.max_stack or 1, options.batch_size), shallow_passes(options, exiting)
    if exiting.mode == "speculative":
        return DraftProgram(parts, exits, stack=stack, shallows=shallows, confidence=confidence)
    program = InjectedExitProgram if plan.injection else ExitProgram
    return program(
        parts,
        exits,
        stack=stack,
        copies=COPIES.get(exiting.mode),
        shallows=shallows,
        forced=options.forced_exits,
        confidence=confidence,
        decay=exiting.decay,
    )
