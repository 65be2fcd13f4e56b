"""Many processes as one: two gloo ranks against one process, what FSDP sends, checkpoints that change hands, stopping."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import fathomlm
from fathomlm.errors import TrainingError
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.distributed import COMFORT, World, choose_parallel, join
from fathomlm.train.reading import build_recipe
from fathomlm.train.report import SilentWatcher, read_records
from fathomlm.train.run import train
from forked import Forked

STEPS, STOP = 4, 2
SHAPE = {"layers": 4, "hidden": 24, "intermediate": 36, "heads": 2, "kv_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "exits": {"model": {"recursions": 2}, "loss": {"exits": {"at": "recursions", "distill": "forward_kl"}}},
    # Rank 1 is the hardest to share out: one rank holds a row, the other none.
    "middle_lora": {
        "model": {"recursions": 2, "sharing": "middle-cycle", "relax": "lora", "rank": 1},
        "recompute": "recursion",
    },
    "exit_heads": {"loss": {"exits": {"at": [2], "head_rank": 2}}, "train": "exit_heads"},
    "exit_parts": {
        "loss": {"exits": {"at": [2], "distill": "forward_kl", "adapter_rank": 2, "layer": True, "classifier": True}},
        "train": "exits",
    },
    "exit_vocab": {
        "loss": {"exits": {"at": [2], "distill": "forward_kl", "head_rank": 2, "classifier": True, "exit_vocab": 9}},
        "train": "exits",
    },
    # A model with exit heads that this run has no loss for.
    "unread_heads": {"model": {"source": "SOURCE", "architecture": None}},
    "expert": {"model": {"recursions": 2, "router": {}, "kv": "hybrid"}, "loss": {"routing": {"coefficient": 0.1}}},
    "aux_router": {"model": {"recursions": 2, "router": {"sampling": "aux_router"}}, "loss": {"routing": {"aux_lr": 0.5}}},
    # Rows with different numbers of labels: a mean over each rank's own would not be the mean over all.
    "pairs": {
        "data": {"path": "PAIRS", "pairs": ["ask", "say"], "source_length": 16, "target_length": 12},
        "loss": {"distill": {"source": "SOURCE", "weight": 0.5}, "exits": {"at": [2]}, "layerwise": {"shallow": 2}},
    },
    "loss_free": {
        "model": {"recursions": 4, "router": {"kind": "token", "balancing": "loss_free"}},
        "loss": {"routing": {"bias_rate": 0.02}},
    },
}
SPREAD = [(variant, "fsdp") for variant in VARIANTS if variant != "loss_free"]
SPREAD += [(variant, "ddp") for variant in ("exit_parts", "unread_heads", "aux_router", "pairs", "loss_free")]
"""Sharding splits each kind of tensor in its own way; copies only add gradients, so fewer variants show that."""
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
"""Sums in another order: what two ranks may differ by from one in float32."""


class Caller(SilentWatcher):
    """Sends SIGTERM to this process before the step that is to be its last."""

    def step(self, step: int, total: int, live: dict[str, Any]) -> None:
        if step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Bench:
    """Where runs lie, and what both ranks gave for each job."""

    root: Path
    ranks: tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of bytes (257 words, which two ranks cannot halve), and a model with exit heads."""
    root = tmp_path_factory.mktemp("parallel")
    generator = random.Random(0)
    words = ["the", "fathom", "line", "comes", "up", "wet", "from", "deep", "water", "and", "shallow"]
    lines = [json.dumps({"text": " ".join(generator.choices(words, k=30))}) for _ in range(60)]
    (root / "text.jsonl").write_text("\n".join(lines))
    prepare(
        PrepareOptions(sources=(str(root / "text.jsonl"),), out=root / "corpus", tokenizer="bytes", validation_fraction=0.3)
    )
    pairs = [{"ask": f"{n} fathoms" + "?" * (n % 9), "say": f"{6 * n} feet"[: 1 + n * 7 % 11]} for n in range(60)]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    options = {"tokenizer": "bytes", "pairs": ("ask", "say"), "validation_fraction": 0.3}
    prepare(PrepareOptions(sources=(str(root / "pairs.jsonl"),), out=root / "pairs", **options))
    return root


@pytest.fixture(scope="module")
def bench(root: Path, one_thread: None) -> Bench:
    """Every run of this file: on one process here, on two ranks in one launch."""
    train(build_recipe(recipe(root, "exit_heads", "exit_heads-one")))
    assert train(build_recipe(recipe(root, "exits", "stopped-one")), watcher=Caller()).step == STOP
    jobs: dict[str, dict[str, Any]] = {}
    for variant, kind in [*SPREAD, ("loss_free", "fsdp")]:
        jobs[f"{variant}-{kind}"] = {"do": "train", "recipe": recipe(root, variant, f"{variant}-{kind}", parallel=kind)}
    stopped = recipe(root, "exits", "stopped-fsdp", parallel="fsdp")
    jobs["stopped-fsdp"] = {"do": "train", "recipe": stopped, "term": [1, STOP - 1]}
    for source, kind in (("fsdp", "ddp"), ("fsdp", "fsdp"), ("one", "fsdp")):
        name = f"{source}-to-{kind}"
        goes_on = {"recipe": recipe(root, "exits", name, parallel=kind), "copy_of": str(root / f"stopped-{source}")}
        jobs[name] = {"do": "train", "resume": True, **goes_on}
    for name, how in {"full-0": {"full_disk": 0}, "full-1": {"full_disk": 1}, "no-rename": {"no_rename": True}}.items():
        soon = recipe(root, "exits", name, parallel="fsdp", budget={"steps": 1}, evaluate={"every": 0})
        jobs[name] = {"do": "train", "recipe": soon, **how}
    for kind in ("ddp", "fsdp"):
        short = {"budget": {"steps": 3}, "evaluate": {"every": 0}, "checkpoint": {"every": 1, "keep": 0}}
        kept = recipe(root, "vanilla", f"bad-{kind}", parallel=kind, **short)
        jobs[f"bad-{kind}"] = {"do": "train", "recipe": kept, "bad_pass": [1, 3]}
    for kind in ("ddp", "fsdp"):
        jobs[f"bf16-{kind}"] = {
            "do": "train",
            "recipe": recipe(root, "exits", f"bf16-{kind}", parallel=kind, precision="bf16"),
        }
    for n in (1, 2, 3):
        jobs[f"cycle-{n}"] = {"do": "traffic", "sharing": "cycle", "recursions": n, "layers": 2 * n}
        jobs[f"naive-{n}"] = {**jobs[f"cycle-{n}"], "naive": True}
    for n in (2, 3):
        jobs[f"middle-{n}"] = {"do": "traffic", "sharing": "middle-cycle", "recursions": n, "layers": 2 + 2 * n}
    jobs["step"] = {"do": "step_traffic", "micro_batches": 3}
    jobs["gradients"] = {"do": "gradient_memory"}
    jobs |= {f"layout-{rows}": {"do": "layout", "rows": rows} for rows in (257, 1)}
    (root / "jobs.json").write_text(json.dumps(jobs))
    ranks = launch("from train.distributed_worker import main; main(sys.argv[1])", root / "jobs.json")
    for variant in VARIANTS.keys() - {"exit_heads"}:
        train(build_recipe(recipe(root, variant, f"{variant}-one")))
    train(build_recipe(recipe(root, "exits", "bf16-one", precision="bf16")))
    return Bench(root, finish(root, ranks))


def recipe(root: Path, variant: str, out: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "out": str(root / out),
        "model": {"architecture": {**SHAPE}},
        "data": {"path": str(root / "corpus"), "context": 24},
        "budget": {"steps": STEPS},
        # 5 validation rows: the last round has one row for the first rank and none for the second.
        "batch": {"sequences": 8, "micro": 2},
        "evaluate": {"every": 2, "rows": 5},
        # Adam divides a gradient by its size: without a floor, what is nothing but rounding would learn at the full rate.
        "optimizer": {"lr": 1e-2, "eps": 1e-5},
        "schedule": {"warmup": 1},
        "checkpoint": {"every": 100},
        "log": {"every": 1, "tensorboard": False},
        "device": "cpu",
        **changes,
    }
    for name, value in deepcopy(VARIANTS[variant]).items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    for part in (values["model"], values.get("loss", {}).get("distill", {})):
        if part.get("source"):
            part["source"] = str(root / "exit_heads-one" / "last")
    if values["data"]["path"] == "PAIRS":
        values["data"] = {**values["data"], "path": str(root / "pairs")}
    return values


def launch(program: str, argument: Path) -> list[Forked]:
    """Two ranks with the variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [Forked(f"import os, sys; os.environ.update({rank}); {program}", str(argument)) for rank in ranks]


def communicate(ranks: list[Forked]) -> list[tuple[str, str]]:
    """What each printed and said; all are read at once, or one would wait for another that waits to be read."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(Forked.communicate, ranks))


def finish(root: Path, ranks: list[Forked]) -> tuple[dict[str, Any], dict[str, Any]]:
    outputs = communicate(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(map("".join, outputs))[-6000:]
    first, second = (json.loads((root / f"rank-{i}.json").read_text()) for i in range(2))
    return first, second


def assert_same_records(found: Path, expected: Path) -> None:
    ours, theirs = (read_records(path / "metrics.jsonl") for path in (found, expected))
    kinds = [(record["kind"], record["step"], record.get("tokens_seen")) for record in theirs]
    assert [(record["kind"], record["step"], record.get("tokens_seen")) for record in ours] == kinds
    assert sum(kind == "validation" for kind, _, _ in kinds) == STEPS // 2
    for one, other in zip(ours, theirs, strict=True):
        for name, value in {"loss": other["loss"], "grad_norm": other.get("grad_norm"), **other["parts"]}.items():
            assert {**one, **one["parts"]}.get(name) == (None if value is None else pytest.approx(value, rel=1e-5, abs=5e-6))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "last" / "model.safetensors")


def moments_of(run: Path) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, whatever number of ranks wrote them."""
    files = [load_file(path) for path in sorted((run / "last" / "training").glob("optimizer-*.safetensors"))]
    names = {name for file in files for name in file}
    parts = {name: [file[name] for file in files if name in file] for name in names}
    return {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}


@pytest.mark.parametrize(("variant", "kind"), SPREAD)
def test_two_ranks_train_the_model_that_one_process_trains(bench, variant, kind):
    one, two = bench.root / f"{variant}-one", bench.root / f"{variant}-{kind}"
    assert_same_records(two, one)
    torch.testing.assert_close(weights_of(two), weights_of(one), **CLOSE)
    torch.testing.assert_close(moments_of(two), moments_of(one), **CLOSE)
    parts = [load_file(path) for path in sorted((two / "last" / "training").glob("optimizer-*-of-00002.safetensors"))]
    whole = moments_of(one).keys()
    assert [part.keys() for part in parts] == [whole, {key for key in whole if kind == "fsdp" and not key.endswith(":step")}]


def test_the_bias_of_loss_free_balancing_is_moved_alike_on_every_rank_and_never_sharded(bench):
    one, two = (weights_of(bench.root / f"loss_free-{kind}")["decoder.routers.bias"] for kind in ("one", "ddp"))
    assert torch.equal(two, one)
    assert one.any()
    assert bench.ranks[0]["loss_free-fsdp"] == bench.ranks[1]["loss_free-fsdp"]
    assert bench.ranks[0]["loss_free-fsdp"]["error"] == "TrainingError"
    assert "use parallel: ddp or balancing: loss" in bench.ranks[0]["loss_free-fsdp"]["text"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(bench, kind):
    """Rank 1's third pass, in the second step."""
    assert [rank[f"bad-{kind}"] for rank in bench.ranks] == [{"step": 3, "finished": True, "skipped": 1}] * 2
    steps = sorted((bench.root / f"bad-{kind}" / "checkpoints").iterdir())
    first, second, third = (load_file(step / "model.safetensors") for step in steps)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert all(bool(value.isfinite().all()) and not torch.equal(value, second[name]) for name, value in third.items())


def test_two_ranks_in_bfloat16(bench):
    """Copies compute what one process does, but for sums in another order. Shards gather rounded weights, those of norms and
    the embedding too, which one process reads in float32: that is near, not the same. Checkpoints are float32 anyway."""
    runs = {kind: bench.root / f"bf16-{kind}" for kind in ("one", "ddp", "fsdp")}
    losses = {kind: [record["loss"] for record in read_records(run / "metrics.jsonl")] for kind, run in runs.items()}
    assert losses["ddp"] == pytest.approx(losses["one"], rel=1e-4)
    assert losses["fsdp"] == pytest.approx(losses["one"], rel=5e-3)
    assert losses["one"] != pytest.approx(
        [r["loss"] for r in read_records(bench.root / "exits-one/metrics.jsonl")], rel=1e-6
    )
    assert {value.dtype for value in weights_of(runs["fsdp"]).values()} == {torch.float32}


def test_one_process_learns_something_in_these_runs(bench):
    """Without this, equal losses could be losses that never move."""
    for variant in VARIANTS:
        losses = [r["loss"] for r in read_records(bench.root / f"{variant}-one" / "metrics.jsonl") if r["kind"] == "train"]
        assert abs(losses[-1] - losses[0]) > (1e-3 if variant.startswith("exit_") else 0.3), variant


def test_a_shared_block_is_gathered_once_for_all_its_uses(bench):
    for rank in bench.ranks:
        for recursions in (2, 3):
            found = rank[f"cycle-{recursions}"]
            assert found["units"] == 1
            assert found["forward"] == {"gathers": 1, "reductions": 0}
            assert found["backward"] == {"gathers": 0, "reductions": 1}
        assert rank["cycle-1"]["units"] == 3, "layers that run once are units of their own"
        assert rank["cycle-1"]["forward"]["gathers"] == rank["cycle-1"]["backward"]["reductions"] == 3


def test_layers_around_a_shared_block_are_units_and_the_block_is_not(bench):
    for rank in bench.ranks:
        assert rank["middle-2"] == rank["middle-3"]
        assert rank["middle-2"]["units"] == 3
        assert rank["middle-2"]["forward"] == {"gathers": 3, "reductions": 0}
        assert rank["middle-2"]["backward"] == {"gathers": 2, "reductions": 3}


def test_a_unit_for_each_shared_layer_would_be_gathered_for_each_use(bench):
    """What `spread` avoids; and the count that the tests above rely on does grow where it should."""
    forward = [bench.ranks[0][f"naive-{recursions}"]["forward"]["gathers"] for recursions in (1, 2, 3)]
    backward = [bench.ranks[0][f"naive-{recursions}"]["backward"]["gathers"] for recursions in (1, 2, 3)]
    assert forward == [3, 5, 7]
    assert backward == [2, 4, 6]


def test_micro_batches_of_a_step_share_one_gather_and_one_reduction(bench):
    assert [rank["step"] for rank in bench.ranks] == [{"gathers": 1, "reductions": 1}] * 2


def test_ddp_keeps_gradients_in_the_buckets_that_it_sends(bench):
    for rank in bench.ranks:
        assert rank["gradients"]["pieces"] == 1 < rank["gradients"]["gradients"]


@pytest.mark.parametrize(("rows", "shares"), [(257, (129, 128)), (1, (1, 0))])
def test_rows_that_do_not_divide_are_shared_out_and_come_back(bench, rows, shares):
    for rank, share in zip(bench.ranks, shares, strict=True):
        assert rank[f"layout-{rows}"] == {"rows": share, "kept": 3 * share, "same": True}


def test_sigterm_to_one_rank_saves_and_stops_them_all(bench):
    assert [rank["stopped-fsdp"] for rank in bench.ranks] == [{"step": STOP, "finished": False}] * 2
    assert sorted(moments_of(bench.root / "stopped-fsdp")) == sorted(moments_of(bench.root / "stopped-one"))


def test_a_checkpoint_goes_on_with_another_number_of_ranks(bench):
    expected = bench.root / "exits-one"
    train(build_recipe(recipe(bench.root, "exits", "stopped-fsdp")), resume=True)
    for name in ("stopped-fsdp", "fsdp-to-ddp", "one-to-fsdp"):
        found = bench.root / name
        assert_same_records(found, expected)
        torch.testing.assert_close(weights_of(found), weights_of(expected), **CLOSE)
        moments = moments_of(found)
        torch.testing.assert_close(moments, moments_of(expected), **CLOSE)
        assert all(bool(value.any()) for key, value in moments.items() if key.endswith(":exp_avg"))
        assert {float(value) for key, value in moments.items() if key.endswith(":step")} == {STEPS}


def test_a_run_that_goes_on_with_the_same_ranks_is_the_uninterrupted_one_bit_for_bit(bench):
    for read in (weights_of, moments_of):
        found, expected = read(bench.root / "fsdp-to-fsdp"), read(bench.root / "exits-fsdp")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_checkpoint_that_two_ranks_wrote_is_an_ordinary_model(bench):
    tokens_BT = torch.arange(24).view(2, 12)
    one, two = (fathomlm.load(str(bench.root / f"exits-{kind}" / "last")) for kind in ("one", "fsdp"))
    with torch.no_grad():
        torch.testing.assert_close(two(tokens_BT).logits, one(tokens_BT).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("job", "reason"),
    [("full-0", "No space left on device"), ("full-1", "No space left on device"), ("no-rename", "Read-only file system")],
)
def test_a_rank_that_cannot_write_stops_all_with_its_error_and_leaves_nothing(bench, job, reason):
    first, second = (rank[job] for rank in bench.ranks)
    assert first == second
    assert first["error"] == "OutputError"
    assert reason in first["text"]
    assert first["text"].endswith(f"nothing was left behind (rank {1 if job == 'full-1' else 0})")
    assert list((bench.root / job / "checkpoints").iterdir()) == []
    assert not (bench.root / job / "last").exists()


STOPPED = "from fathomlm.cli.main import main; sys.exit(main(['train', sys.argv[1]]))"


@pytest.mark.parametrize("launcher", ["ranks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_told_to_stop_save_and_only_the_first_speaks(root, launcher):
    """What a preempted job sees: SIGTERM to torchrun, which hands it to its ranks; or to the ranks themselves, which starts
    in a fraction of the time."""
    out, path = root / f"preempted-{launcher}", root / f"preempted-{launcher}.yaml"
    path.write_text(
        yaml.safe_dump(recipe(root, "exits", out.name, parallel="fsdp", budget={"steps": 100_000}, evaluate={"every": 0}))
    )
    with ExitStack() as running:
        if launcher == "torchrun":
            arguments = ["--standalone", "--nproc-per-node", "2", "-m", "fathomlm", "train", str(path)]
            runs = [Forked("from torch.distributed.run import main; main()", *arguments)]
        else:
            runs = launch(STOPPED, path)
        for run in runs:
            running.callback(run.close)
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(read_records(out / "metrics.jsonl")) > 2, runs)
        for run in runs:
            run.send_signal(signal.SIGTERM)
        lines = "".join(said for _, said in communicate(runs)).splitlines()
    assert launcher == "torchrun" or [run.returncode for run in runs] == [2, 2]
    assert len([line for line in lines if line.startswith("step 1:")]) == 1, lines
    last = int((out / "last").resolve().name.removeprefix("step-"))
    stops = [line for line in lines if line.startswith("fathomlm: ")]
    assert stops == [f"fathomlm: stopped at step {last:,} of 100,000, saved; --resume goes on"], lines
    trained = [record["step"] for record in read_records(out / "metrics.jsonl") if record["kind"] == "train"]
    assert trained == list(range(1, last + 1))
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{last:08d}"]


def wait_for(there: Any, runs: list[Forked], seconds: float = 1500) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert all(run.poll() is None for run in runs), communicate(runs)
        assert time.monotonic() < end, "the run did not start in time"
        time.sleep(0.05)


def test_auto_shards_where_a_whole_copy_would_not_fit_comfortably(monkeypatch):
    room = 80 * 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=room))
    gpus, cpus = (World(0, 2, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert choose_parallel("auto", gpus, round(COMFORT * room) - 1) == "ddp"
    assert choose_parallel("auto", gpus, round(COMFORT * room) + 1) == "fsdp"
    assert choose_parallel("auto", cpus, 10 * room) == "ddp"
    assert choose_parallel("fsdp", gpus, 1) == "fsdp"
    assert choose_parallel("ddp", gpus, 10 * room) == "ddp"
    assert choose_parallel("fsdp", World(0, 1, torch.device("cpu")), 10 * room) == "none"


def test_a_world_without_its_addresses_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TrainingError, match="RANK and MASTER_ADDR and MASTER_PORT not set"), join("cpu"):
        pass
