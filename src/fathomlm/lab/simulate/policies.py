"""Three ways to batch (thesis 3.3.5): by waiting for the longest sequence, by sequence, and by depth.

The first is a loop of a few lines. The other two run the engine's scheduler (`simulation`). The thesis lets a token that
left have its deeper keys and values for nothing (`free`), though not their memory; the engine makes them later in passes of
their own (`exact`), which has one exit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from fathomlm.errors import OptionError
from fathomlm.lab.common import OnProgress, unwatched
from fathomlm.lab.simulate.costs import Costs
from fathomlm.lab.simulate.devices import Device, ExitDevice, LoopDevice, PlainDevice
from fathomlm.lab.simulate.simulation import EngineSetup, Simulation, SimulationResult
from fathomlm.lab.simulate.trajectories import Trajectories

Fill = Literal["free", "exact"]
Waiting = Literal["shrink", "pad"]
"""What a batch takes once some of its sequences are over: the time of the rows that are left, or as much as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The three of them over the same sequences."""

    vanilla: SimulationResult
    """The plain model; a batch waits for its longest sequence."""
    sequence: SimulationResult
    """The plain model with continuous sequence-wise batching."""
    depth: SimulationResult
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


def run_vanilla(trajectories: Trajectories, costs: Costs, batch_size: int, waiting: Waiting = "shrink") -> SimulationResult:
    """The plain model in batches of `batch_size` sequences, each of which begins when the one before is over.

    A batch reads all its prompts, then makes a token of each sequence until the longest is done.
    """
    curve, sequences = costs.curve("step"), trajectories.sequences
    spent = {"step": 0.0, "prefill": 0.0, "host": 0.0}
    batch_entries = filled = decode_steps = 0
    for first in range(0, len(sequences), batch_size):
        batch = sequences[first : first + batch_size]
        prompts = sum(sequence.prompt - 1 for sequence in batch)
        spent["prefill"] += costs.of_prefill(prompts) if prompts else 0.0  # all of them are one pass
        spent["host"] += costs.host.placement * len(batch)
        rising = sorted(len(sequence.depths) for sequence in batch)
        before = 0
        for over, length in enumerate(rising):
            left = len(rising) - over
            active = batch_size if costs.padded else len(rising) if waiting == "pad" else left
            steps = length - before
            spent["step"] += steps * curve.at(active)
            spent["host"] += steps * (costs.host.step + left * costs.host.token)
            filled += steps * left
            before = length
        decode_steps += rising[-1]
        batch_entries += rising[-1] * batch_size
    kept = {kind: ms for kind, ms in spent.items() if ms}
    return SimulationResult(
        tokens=trajectories.tokens,
        ms=sum(spent.values()),
        decode_steps=decode_steps,
        batch_size=batch_size,
        max_sequences=batch_size,
        batch_entries={"step": batch_entries},
        filled={"step": filled},
        spent=kept,
    )


def loop_device(
    trajectories: Trajectories, batch_size: int, fill: Fill = "free", cores: tuple[int, ...] | None = None
) -> Device:
    """A block that tokens run as often as they are deep, by what becomes of the entries of those that left. `cores` are
    passes of the block to a turn, as the engine has them; without, every token that is through goes on at once."""
    if fill == "free":
        return LoopDevice(batch_size, cores or (1,), recursions=trajectories.deepest, at_once=cores is None)
    if trajectories.deepest != 2:
        raise OptionError(
            f"--fill exact is what the engine does, with one exit between two loops; these tokens go up to "
            f"{trajectories.deepest} deep. Use --fill free, or trajectories of depths 1 and 2"
        )
    return ExitDevice(batch_size, mixed=True)


def compare(
    trajectories: Trajectories,
    costs: Costs,
    *,
    plain: EngineSetup,
    deep: EngineSetup,
    device: Device,
    plain_costs: Costs | None = None,
    waiting: Waiting = "shrink",
    on_progress: OnProgress = unwatched,
) -> Comparison:
    """All three. `plain_costs` are those of the plain model, where they are not in `costs`."""
    of_plain = plain_costs or costs
    return Comparison(
        vanilla=run_vanilla(trajectories, of_plain, plain.max_sequences, waiting),
        sequence=Simulation(PlainDevice(plain.max_sequences), plain, of_plain, trajectories).run(on_progress),
        depth=Simulation(device, deep, costs, trajectories).run(on_progress),
    )


def with_lookahead(setting: EngineSetup, passes: int) -> EngineSetup:
    """Pages ahead of need for decode steps that may choose `passes` tokens of a sequence each."""
    return replace(setting, lookahead=(setting.lag + 1) * setting.burst * passes + 1)
