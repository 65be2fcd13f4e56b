"""Three ways to batch (thesis 3.3.5): by waiting for the longest text, by text, and by depth.

The first is a loop of a few lines. The other two run the engine's scheduler (`simulation`). The thesis lets a token that
left have its deeper keys and values for nothing (`free`), though not their memory; the engine makes them later in passes of
their own (`exact`), which has one exit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fathomlm.errors import OptionError
from fathomlm.lab.simulate.costs import Costs
from fathomlm.lab.simulate.devices import Device, ExitRows, LoopRows, WholeRows
from fathomlm.lab.simulate.outcome import Outcome
from fathomlm.lab.simulate.simulation import Progress, Setting, Simulation
from fathomlm.lab.simulate.trajectories import Trajectories

Fill = Literal["free", "exact"]
FILLS: tuple[Fill, ...] = get_args(Fill)
Waiting = Literal["shrink", "pad"]
WAITINGS: tuple[Waiting, ...] = get_args(Waiting)
"""What a batch takes once some of its texts are over: the time of the rows that are left, or as much as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The three of them over the same texts."""

    vanilla: Outcome
    """The plain model; a batch waits for its longest text."""
    sequence: Outcome
    """The plain model with continuous sequence-wise batching."""
    depth: Outcome
    """The model with depths, and continuous depth-wise batching."""

    @property
    def delta_v(self) -> float:
        """The thesis' Delta_V."""
        return self.depth.tokens_per_s / self.vanilla.tokens_per_s

    @property
    def delta_seq(self) -> float:
        """The thesis' Delta_Seq."""
        return self.depth.tokens_per_s / self.sequence.tokens_per_s

    def record(self) -> dict[str, Any]:
        named = {"vanilla": self.vanilla, "sequence": self.sequence, "depth": self.depth}
        return {name: outcome.record() for name, outcome in named.items()} | {
            "delta_v": self.delta_v,
            "delta_seq": self.delta_seq,
        }


def run_vanilla(trajectories: Trajectories, costs: Costs, rows: int, waiting: Waiting = "shrink") -> Outcome:
    """The plain model in batches of `rows` texts, each of which begins when the one before is over.

    A batch reads all its prompts, then makes a token of each text until the longest is done.
    """
    curve, texts = costs.curve("step"), trajectories.texts
    spent = {"step": 0.0, "reading": 0.0, "host": 0.0}
    offered = filled = ticks = 0
    for first in range(0, len(texts), rows):
        batch = texts[first : first + rows]
        prompts = sum(text.prompt - 1 for text in batch)
        spent["reading"] += costs.of_chunk(prompts) if prompts else 0.0  # all of them are one pass
        spent["host"] += costs.host.placement * len(batch)
        rising = sorted(len(text.depths) for text in batch)
        before = 0
        for over, length in enumerate(rising):
            left = len(rising) - over
            active = rows if costs.padded else len(rising) if waiting == "pad" else left
            steps = length - before
            spent["step"] += steps * curve.at(active)
            spent["host"] += steps * (costs.host.step + left * costs.host.token)
            filled += steps * left
            before = length
        ticks += rising[-1]
        offered += rising[-1] * rows
    kept = {kind: ms for kind, ms in spent.items() if ms}
    return Outcome(
        tokens=trajectories.tokens, ms=sum(spent.values()), ticks=ticks, rows=rows, slots=rows,
        offered={"step": offered}, filled={"step": filled}, spent=kept,
    )  # fmt: skip


def run_sequence(trajectories: Trajectories, costs: Costs, setting: Setting, on_progress: Progress | None = None) -> Outcome:
    """The plain model, a text in the place of another as soon as that is over. A row is a slot."""
    return Simulation(WholeRows(setting.slots), setting, costs, trajectories).run(on_progress)


def run_depth(
    trajectories: Trajectories,
    costs: Costs,
    setting: Setting,
    device: Device,
    on_progress: Progress | None = None,
) -> Outcome:
    """The model with depths, rows of all depths together."""
    return Simulation(device, setting, costs, trajectories).run(on_progress)


def loop_device(
    trajectories: Trajectories, rows: int, fill: Fill = "free", cores: tuple[int, ...] | None = None, stack: int = 16
) -> Device:
    """A block that tokens run as often as they are deep, by what becomes of the entries of those that left. `cores` are
    passes of the block to a turn, as the engine has them; without, every token that is through goes on at once."""
    if fill == "free":
        return LoopRows(rows, cores or (1,), recursions=trajectories.deepest, at_once=cores is None)
    if trajectories.deepest != 2:
        raise OptionError(
            f"--fill exact is what the engine does, with one exit between two loops; these tokens go up to "
            f"{trajectories.deepest} deep. Use --fill free, or trajectories of depths 1 and 2"
        )
    return ExitRows(rows, mixed=True, stack=stack)


def compare(
    trajectories: Trajectories,
    costs: Costs,
    *,
    plain: Setting,
    deep: Setting,
    device: Device,
    plain_costs: Costs | None = None,
    waiting: Waiting = "shrink",
    on_progress: Progress | None = None,
) -> Comparison:
    """All three. `plain_costs` are those of the plain model, where they are not in `costs`."""
    of_plain = plain_costs or costs
    return Comparison(
        vanilla=run_vanilla(trajectories, of_plain, plain.slots, waiting),
        sequence=run_sequence(trajectories, of_plain, plain, on_progress),
        depth=run_depth(trajectories, costs, deep, device, on_progress),
    )


def with_lookahead(setting: Setting, passes: int) -> Setting:
    """Pages ahead of need for ticks that may choose `passes` tokens of a text each."""
    return replace(setting, lookahead=(setting.lag + 1) * setting.burst * passes + 1)
