"""The simulated device is the engine's, decode step by decode step: given how deep the engine's tokens went, it takes as
many decode steps and fills as many rows of every kind of pass.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from decode.exit_models import build
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.engine import Engine
from fathomlm.engine.request import Request, Result
from fathomlm.lab.bench.timed import TimedEngine
from fathomlm.lab.simulate.costs import Costs, TimeCurve
from fathomlm.lab.simulate.simulation import Simulation
from fathomlm.lab.simulate.trajectories import Trajectories, Trajectory
from fathomlm.lab.simulate.validate import deepest_of, mirror
from model.route.small import model_of, routed
from pairwise import in_turn

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"page_size": 4, "batch_size": 3, "prefill_chunk": 5, "max_length": 48, "memory": 10**6}
FREE = Costs(
    name="no time", passes={kind: TimeCurve.flat(1.0) for kind in ("step", "core", "turn", "both", "shallow", "deep")}
)


def exits(name: str, mode: str = "parallel", **options: Any) -> tuple[Any, Exiting, dict[str, Any]]:
    model = build(name)
    layer = model.plan.unrolled_layers // 2
    stack = {"max_stack": 4} if mode == "parallel" else {}
    return model, Exiting(mode=mode, exit_layers=(layer,), **stack), {"forced_exits": 0.6} | options  # type: ignore[arg-type]


CASES: dict[str, Any] = {
    "whole": lambda: (build("vanilla"), None, {}),
    "whole, few pages": lambda: (build("vanilla"), None, {"memory": 28_000}),
    "routed": lambda: (model_of(routed()), None, {}),
    "routed, forced": lambda: (model_of(routed()), None, {"forced_depths": (1.0, 0.5, 0.25), "cores": 2}),
    "routed, shared": lambda: (model_of(routed(kv="share")), None, {"cores": 3}),
    "routed, no prelude": lambda: (model_of(routed(loop="cycle")), None, {"max_sequences": 3}),
    "exits, two parts": lambda: exits("vanilla"),
    "exits, two parts, more in front": lambda: exits("vanilla", shallows=3),
    "exits, one block": lambda: exits("lora", batch_size=5),
    "exits, shared": lambda: exits("plain-shared-kv"),
    "exits, copied": lambda: exits("lora", mode="state-copy"),
    "whole, more sequences": lambda: (build("vanilla"), None, {"max_sequences": 5}),
}


def requests(vocab: int) -> list[Request]:
    draw = random.Random(5)
    found = []
    for id in range(1, 9):
        prompt = tuple(draw.randrange(vocab) for _ in range(draw.choice((1, 3, 9))))
        sampling = Sampling(max_new_tokens=draw.randrange(1, 12), ignore_eos=True)
        found.append(Request(id=id, prompt=prompt, sampling=sampling))
    return found


def recorded(engine: Engine, results: list[Result]) -> Trajectories:
    """What an engine did, to be simulated: exits' depths become 1 and 2."""
    kind, plan = engine.runner.layout.kind, engine.runner.decoder.plan
    sequences = []
    for result in results:
        depths = result.depths or (1,) * len(result.tokens)
        if kind == "exits":
            depths = tuple(1 if depth < plan.unrolled_layers else 2 for depth in depths)
        sequences.append(Trajectory(len(result.prompt_tokens), depths))
    return Trajectories(tuple(sequences), deepest_of(engine), "file", "what the engine did")


PACES: dict[str, dict[str, int]] = {"at once": {}, "host behind": {"burst": 3, "lag": 1}}
OTHER = [("whole, few pages", "at once"), ("routed, forced", "at once"), ("exits, two parts", "host behind")]
OTHER += [("whole, more sequences", "at once")]
"""A case of each program at the other pace too."""


@pytest.mark.parametrize(("case", "how"), [*in_turn(CASES, list(PACES), 0), *OTHER])
def test_as_many_decode_steps_and_rows_as_the_engine(case: str, how: str) -> None:
    pace = PACES[how]
    model, setting, options = CASES[case]()
    engine = TimedEngine(model, exiting=setting, prefix_caching=False, **(SMALL | options | pace))
    results = engine.run(requests(model.architecture.vocab))
    ran = engine.totals.decode_steps
    assert engine.counters().preemptions == 0 or case == "whole, few pages"
    device, sizes = mirror(engine)
    simulation = Simulation(device, sizes, FREE, recorded(engine, results))
    outcome = simulation.run()
    assert (outcome.decode_steps, outcome.tokens) == (ran, engine.totals.tokens)
    assert outcome.preemptions == engine.counters().preemptions
    while engine.busy:  # decode steps that were started before the last token was heard of
        engine.step()
    if not pace:
        assert outcome.filled == dict(engine.passes.filled)
    assert all(pool.used == 0 for pool in simulation.scheduler.page_manager.pools)


def test_the_cases_have_what_they_say() -> None:
    """Else the above would hold for little."""
    model, setting, options = CASES["whole, few pages"]()
    engine = TimedEngine(model, exiting=setting, prefix_caching=False, **(SMALL | options))
    engine.run(requests(model.architecture.vocab))
    assert engine.counters().preemptions > 0
    for case in ("routed, forced", "exits, two parts", "exits, one block"):
        model, setting, options = CASES[case]()
        engine = TimedEngine(model, exiting=setting, prefix_caching=False, **(SMALL | options))
        found = recorded(engine, engine.run(requests(model.architecture.vocab)))
        assert all(0.05 < part < 0.95 for part in found.ran[1:]), case
