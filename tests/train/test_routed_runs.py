"""Whole runs of routed models: they learn, say how their routers do, go on bit for bit, and decide causally as by top-k."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.full import generate
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import DepthControl
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.reading import build_recipe
from fathomlm.train.recipe import BatchRecipe, RoutingLossRecipe
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import TrainingRun, World, train

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = World(0, 1, torch.device("cpu"))
STEPS, STOP = 14, 5
SHAPE = {"layers": 5, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "context": 64}
RUNS: dict[str, dict[str, Any]] = {
    "expert": {"model": {"router": {}}},
    "expert, share": {"model": {"router": {}, "kv": "share"}},
    "expert, hybrid, warm-up": {"model": {"router": {}, "kv": "hybrid"}, "loss": {"routing": {"capacity_warmup": 8}}},
    "aux router": {"model": {"router": {"sampling": "aux_router"}}, "loss": {"routing": {"aux_lr": 0.5}}},
    "random": {"model": {"router": {"random": True}}},
    "capacity": {"model": {"router": {"capacity": [1.0, 0.5, 0.25], "score": "tanh", "network": "mlp"}}},
    "expert, bf16, document mask": {"model": {"router": {}}, "precision": "bf16", "data": {"document_mask": True}},
    "token": {"model": {"router": {"kind": "token"}}},
    "token, loss-free": {
        "model": {"router": {"kind": "token", "balancing": "loss_free"}},
        "loss": {"routing": {"bias_rate": 0.01}},
    },
}
KEPT = {"capacity": [1.0, 0.5, 0.25]}


class StopAt(SilentWatcher):
    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if step == STOP:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Done:
    """One run of each kind: its recipe, where it is, and its records."""

    name: str
    values: Callable[[str], dict[str, Any]]
    place: Path
    records: list[dict[str, Any]]

    @property
    def validation(self) -> dict[str, float]:
        (record,) = (r for r in self.records if r["kind"] == "validation")
        return dict(record["parts"])

    @property
    def model(self) -> FathomForCausalLM:
        return load(self.place / "last")


@pytest.fixture(scope="module", params=RUNS)
def done(
    request: pytest.FixtureRequest, token_corpus: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Done:
    root = tmp_path_factory.mktemp("routed")
    changes = RUNS[request.param]

    def values(out: str) -> dict[str, Any]:
        return {
            "out": str(root / out),
            "model": {"architecture": SHAPE, "sharing": "middle-cycle", "recursions": 3, **changes["model"]},
            "data": {"path": str(token_corpus), "context": 32, **changes.get("data", {})},
            "precision": changes.get("precision", "float32"),
            "budget": {"steps": STEPS},
            "batch": {"sequences": 8, "micro": 8},
            "optimizer": {"lr": 1e-2},
            "evaluate": {"every": 0, "rows": 8},
            "checkpoint": {"every": 1000},
            "log": {"every": 1, "tensorboard": False},
            "loss": changes.get("loss", {}),
            "device": "cpu",
        }

    assert train(build_recipe(values("whole"))).finished
    return Done(request.param, values, root / "whole", read_records(root / "whole/metrics.jsonl"))


def curve(place: Path) -> list[tuple[Any, ...]]:
    return [(r["kind"], r["step"], r["loss"], r["parts"]) for r in read_records(place / "metrics.jsonl")]


def test_the_loss_falls(done: Done) -> None:
    losses = [record["parts"]["next_token"] for record in done.records if record["kind"] == "train"]
    assert len(losses) == STEPS
    assert losses[0] > 5.3
    assert losses[-1] < losses[0] - 1.5


def test_a_validation_says_how_the_routers_do(done: Done) -> None:
    found, expert = done.validation, "token" not in done.name
    assert {"next_token", "causal", "mean_depth", "load_1", "load_2", "load_3", "router", "router_z"} <= found.keys()
    assert sum(found[f"load_{i}"] for i in (1, 2, 3)) == pytest.approx(1)
    assert found["mean_depth"] == pytest.approx(sum(i * found[f"load_{i}"] for i in (1, 2, 3)))
    assert abs(found["causal"] - found["next_token"]) < (0.5 if expert else 1e-9), "token-choice is causal as it is"
    if not expert:
        assert {"max_violation", "entropy"} <= found.keys()
        assert "sampling_accuracy" not in found
        return
    assert 0 <= found["sampling_accuracy"] <= 1
    assert 0 <= found["dead_tokens"] <= 1
    kept = [int(32 * part + 1e-9) / 32 for part in KEPT.get(done.name, [1.0, 2 / 3, 1 / 3])]
    assert found["mean_depth"] == pytest.approx(sum(kept)), "the warm-up is over, or is not heeded"


def test_training_records_carry_the_routers_parts(done: Done) -> None:
    for record in (r for r in done.records if r["kind"] == "train"):
        expected = {"next_token", "router", "router_z", "mean_depth"}
        expected |= {"load_1", "load_2", "load_3"} if "token" in done.name else {"sampling_accuracy"}
        assert record["parts"].keys() == expected
    first = done.records[0]["parts"]["mean_depth"]
    assert (first == 3.0) == ("warm-up" in done.name)


def test_the_checkpoint_generates_with_depths_and_validates_as_the_run_did(done: Done) -> None:
    model = done.model
    assert model.plan.routing is not None
    result = generate(model, ["the line is "], max_new_tokens=6)[0]
    assert result.depths is not None
    assert len(result.depths) == len(result.tokens)
    assert set(result.depths) <= {0, 1, 2, 3}
    limited = generate(model, ["the line is "], max_new_tokens=6, control=DepthControl(max_depth=1))[0]
    assert set(limited.depths or ()) == {1}
    source = done.values("again") | {"model": {"source": str(done.place / "last")}}
    run = TrainingRun(build_recipe(source), CPU, SilentWatcher())
    assert run._student.plan == model.plan
    assert run._data.validation is not None
    found, _ = run._stepper.validate(run._data.validation, 8)
    assert found == pytest.approx(done.validation, rel=1e-5)


@pytest.mark.parametrize(
    "done", ["expert, hybrid, warm-up", "aux router", "expert, bf16, document mask", "token, loss-free"], indirect=True
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(done: Done) -> None:
    """Those with more to remember than weights: a warm-up, a second learning rate, masks, a bias without gradients."""
    made, parted = build_recipe(done.values("parted")), done.place.parent / "parted"
    summary = train(made, watcher=StopAt())
    assert not summary.finished
    assert STOP <= summary.step <= STOP + 1
    assert train(made, resume=True).finished
    trained = [entry for entry in curve(parted) if entry[0] == "train"]
    assert trained == [entry for entry in curve(done.place) if entry[0] == "train"]
    assert curve(parted)[-1] == curve(done.place)[-1]
    for name in ("model.safetensors", "training/optimizer-00000-of-00001.safetensors"):
        assert (parted / "last" / name).read_bytes() == (done.place / "last" / name).read_bytes()
    if done.name == "token, loss-free":
        assert done.model.decoder.routers.bias.abs().max() > 0.01


BALANCING = {
    "none": ("loss", RoutingLossRecipe(coefficient=0.0, z=0.0)),
    "loss": ("loss", RoutingLossRecipe(coefficient=0.3, z=0.0)),
    "loss_free": ("loss_free", RoutingLossRecipe(z=0.0, bias_rate=0.02)),
}


def test_balancing_evens_out_the_loads(recipe: Callable[..., Any]) -> None:
    """From a router that prefers some depths, both ways of balancing come nearer to an even use than neither does."""
    shape = {"architecture": SHAPE, "sharing": "middle-cycle", "recursions": 3, "router": {"kind": "token"}}
    base, worst = recipe(model=shape, schedule={"kind": "constant"}), {}
    for name, (balancing, teaches) in BALANCING.items():
        router = dataclasses.replace(base.model.router, balancing=balancing)
        model = dataclasses.replace(base.model, router=router)
        made = dataclasses.replace(base, model=model, loss=dataclasses.replace(base.loss, routing=teaches))
        run = TrainingRun(made, CPU, SilentWatcher())
        with torch.no_grad():
            run._student.decoder.routers.main[0].out.weight.mul_(30)
        for step in range(20):
            run._stepper.step([run._data.train.batch_at(8 * step, 8)], step, wants_stop=False)
        worst[name] = run._stepper.validate(run._data.validation, 8)[0]["max_violation"]
    assert worst["loss"] < worst["none"] - 0.5
    assert worst["loss_free"] < worst["none"] - 0.5


@pytest.mark.parametrize("router", ["expert", "token"])
def test_a_validation_reads_the_same_rows_in_any_micro_batches(router: str, recipe: Callable[..., Any]) -> None:
    """Seven rows: with micro-batches of two or four, rows past the end are read and do not count."""
    made, found = recipe(model={"router": {"kind": router}, "init_std": 0.2}), []
    for micro in (1, 2, 4):
        run = TrainingRun(dataclasses.replace(made, batch=BatchRecipe(sequences=4, micro=micro)), CPU, SilentWatcher())
        found.append(run._stepper.validate(run._data.validation, 7))
    assert found[0][1] == found[1][1] == found[2][1]
    for parts, _ in found[1:]:
        assert parts == pytest.approx(found[0][0], rel=1e-5)


@pytest.mark.parametrize("router", ["expert", "token"])
def test_pairs_are_validated_in_any_micro_batches(router: str, recipe: Callable[..., Any], pair_corpus: Path) -> None:
    """Rows of pairs are as wide as the longest of their batch, which differs between batches."""
    pairs = {"path": str(pair_corpus), "pairs": ["ask", "say"], "source_length": 16, "target_length": 12}
    made = recipe(data=pairs, model={"router": {"kind": router}})
    found = []
    for micro in (1, 2, 4):
        run = TrainingRun(dataclasses.replace(made, batch=BatchRecipe(sequences=4, micro=micro)), CPU, SilentWatcher())
        found.append(run._stepper.validate(run._data.validation, 0)[0])
    for other in found[1:]:
        assert other["causal"] == pytest.approx(found[0]["causal"], rel=1e-5)
        if router == "token":
            assert other == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_causal_rule_learns_to_say_what_the_top_k_say(seed: int, tmp_path: Path) -> None:
    """The method's claim, small: trained for some seconds on text that comes with the package (recipes/tiny-mor.yaml is a
    larger run of it), the routers decide without the future as they decide with it, and nothing is lost by that."""
    held = ("packaged:docs/generation.md",)
    prepare(PrepareOptions(sources=("packaged:docs",), validation_from=held, out=tmp_path / "corpus", tokenizer="bytes"))
    shape = {"layers": 5, "hidden": 64, "intermediate": 160, "heads": 4, "kv_heads": 2, "vocab": 257, "context": 128}
    values = {
        "out": str(tmp_path / "run"),
        "seed": seed,
        "model": {"architecture": shape, "sharing": "middle-cycle", "recursions": 3, "router": {}, "init_std": 0.06},
        "data": {"path": str(tmp_path / "corpus"), "context": 128},
        "budget": {"steps": 200},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 4e-3},
        "schedule": {"warmup": 20},
        "loss": {"routing": {"coefficient": 0.05}},
        "evaluate": {"every": 0, "first": True, "rows": 16},
        "log": {"tensorboard": False},
        "device": "cpu",
    }
    train(build_recipe(values))
    before, after = (r["parts"] for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "validation")
    assert after["next_token"] < 3.0 < before["next_token"]
    assert before["sampling_accuracy"] < 0.9, "fresh routers do not know"
    assert after["sampling_accuracy"] > 0.95
    assert abs(after["causal"] - after["next_token"]) < 0.02
    model = load(tmp_path / "run/last")
    result = generate(model, ["The model is "], max_new_tokens=40)[0]
    assert len(set(result.depths or ())) > 1, "tokens take different depths"
