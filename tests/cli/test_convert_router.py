"""`fathomlm convert --router` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fathomlm
from fathomlm.cli.main import main
from fathomlm.depth import build_routing
from parity.families import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "plain"
    tiny("llama").save_pretrained(directory)
    return directory


def test_a_router_and_hybrid_entries(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m"
    words = ["--sharing", "middle-cycle", "--router", "expert", "--kv", "hybrid", "--json"]
    assert main(["convert", str(plain), str(out), *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["router"], record["layout"], record["plan"]["kv"]) == ("expert", "1+2+1", "hybrid")
    routing = build_routing("expert", 2, update="interpolate", alpha=2.0)
    assert record["plan"]["routing"] == routing.to_dict()
    model = fathomlm.load(out)
    assert model.plan.to_dict() == record["plan"]
    assert model.plan.routing == routing
    held = sum(parameter.numel() for parameter in model.parameters())
    assert record["non_embedding_parameters"] + record["embedding_parameters"] == held
    with torch.inference_mode():
        assert model(torch.arange(3, 13)[None]).logits.isfinite().all()


def test_every_option_of_a_router_arrives(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--router", "expert", "--router-network", "mlp", "--router-score", "tanh", "--router-alpha", "0.3"]
    words += ["--router-update", "add", "--recursions", "3", "--seed", "4"]
    assert main(["convert", str(plain), str(tmp_path / "m"), *words]) == 0
    model = fathomlm.load(tmp_path / "m")
    assert model.plan.routing == build_routing("expert", 3, network="mlp", score="tanh", alpha=0.3, update="add")
    options = {"kind": "expert", "network": "mlp", "score": "tanh", "alpha": 0.3, "update": "add"}
    again = fathomlm.convert(plain, recursions=3, router=options, seed=4)
    ours, theirs = (m.decoder.routers.main[2].out.weight for m in (model, again))
    assert torch.equal(ours, theirs)


def test_what_was_made_is_said(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(plain), str(tmp_path / "m"), "--router", "token", "--kv", "share"]) == 0
    said = capsys.readouterr().out
    assert "3 layers looped 2 times (cycle, token-choice router, shared KV), from 6 layers" in said
    assert "uptrain" in said
    assert main(["inspect", str(tmp_path / "m")]) == 0


def test_without_a_router_there_is_none(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(plain), str(tmp_path / "m"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["router"] is None
    assert "routing" not in record["plan"]


def test_a_recursive_model_is_given_a_router(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looped, out = tmp_path / "looped", tmp_path / "routed"
    assert main(["convert", str(plain), str(looped), "--recursions", "3", "--relax", "lora", "--rank", "2"]) == 0
    assert main(["convert", str(looped), str(out), "--router", "expert"]) == 0
    assert "2 layers looped 3 times (cycle, lora, expert-choice router)" in capsys.readouterr().out
    model, given = fathomlm.load(looped), dict(fathomlm.load(out).named_parameters())
    assert all(torch.equal(given[name], value) for name, value in model.named_parameters())
    assert main(["convert", str(looped), str(tmp_path / "x"), "--router", "expert", "--relax", "lora"]) == 2
    assert "relax says how a plain model is tied" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--router-alpha", "0.5"), "--router-alpha requires --router"),
        (("--router-network", "mlp"), "--router-network requires --router"),
        (("--router-score", "tanh"), "--router-score requires --router"),
        (("--router-update", "add"), "--router-update requires --router"),
        (("--router", "expert", "--router-alpha", "0"), "alpha must be > 0, got 0.0"),
        (("--router", "expert", "--router-score", "softmax"), "unknown score 'softmax'; known: identity, sigmoid, tanh"),
        (("--router", "expert", "--router-update", "subtract"), "invalid --router-update 'subtract'; choose from add"),
        (
            ("--router", "token", "--router-update", "add"),
            "update cannot be combined with token-choice routing",
        ),
        (("--router", "expert", "--recursions", "1"), "a router requires recursions >= 2"),
        (("--router", "expert", "--sharing", "sequence"), "a router requires a looped core"),
        (("--kv", "hybrid"), "kv mode 'hybrid' requires a router"),
        (("--router", "exprt"), "invalid --router 'exprt' (did you mean 'expert'?)"),
        (("--kv", "shard"), "invalid --kv 'shard' (did you mean 'share'?)"),
        (("--router", "expert", "--router-alpha", "x"), "--router-alpha must be a number > 0, got 'x'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: tuple[str, ...], message: str, plain: Path, tmp_path: Path, mistake_of: Callable[..., str]
) -> None:
    assert message in mistake_of("convert", str(plain), str(tmp_path / "m"), *words)
    assert list(tmp_path.iterdir()) == []
