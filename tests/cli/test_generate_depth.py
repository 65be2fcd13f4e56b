"""`fathomlm generate` on routed models: how deep each token went, and options that say how deep it may go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import main
from fathomlm.decode.full import generate
from fathomlm.model.route import DepthControl

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, NEW = "the depth of the water", 12


@pytest.fixture(scope="module", params=["expert", "token"])
def place(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a router whose scores lie well apart."""
    model = convert(tiny_model_dir, router=request.param)
    with torch.no_grad():
        for parameter in model.decoder.routers.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    directory = tmp_path_factory.mktemp("models") / request.param
    save(model, directory)
    return directory


@pytest.fixture
def record(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*words: str) -> dict[str, Any]:
        assert main(["generate", str(place), "-p", PROMPT, "--max-new-tokens", str(NEW), "--json", *words]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)  # type: ignore[no-any-return]

    return call


def test_the_record_has_a_depth_for_each_token(record: Callable[..., dict[str, Any]], place: Path) -> None:
    said = record()
    (result,) = said["results"]
    expected = generate(load(place), PROMPT, max_new_tokens=NEW)[0]
    assert result["tokens"] == list(expected.tokens)
    assert result["depths"] == list(expected.depths or ())
    assert len(result["depths"]) == len(result["tokens"])
    assert set(result["depths"]) == {1, 2}, "both depths are used"
    assert f"{place.name}-choice router" in said["plan"]


def test_a_batch_has_depths_for_each_row(record: Callable[..., dict[str, Any]], place: Path) -> None:
    rows = record("-p", "a fathom")["results"]
    expected = generate(load(place), [PROMPT, "a fathom"], max_new_tokens=NEW)
    assert [row["depths"] for row in rows] == [list(result.depths or ()) for result in expected]


def test_a_depth_limit_holds(record: Callable[..., dict[str, Any]], place: Path) -> None:
    free, limited, whole = (record(*words)["results"][0] for words in ((), ("--max-depth", "1"), ("--max-depth", "2")))
    assert set(limited["depths"]) == {1}
    assert (whole["tokens"], whole["depths"]) == (free["tokens"], free["depths"])
    expected = generate(load(place), PROMPT, max_new_tokens=NEW, control=DepthControl(max_depth=1))[0]
    assert limited["tokens"] == list(expected.tokens)


def test_a_depth_bias_sends_tokens_deeper_or_lets_them_leave(record: Callable[..., dict[str, Any]]) -> None:
    for bias, depth in (("1000", 2), ("-1000", 1)):
        assert set(record("--depth-bias", bias)["results"][0]["depths"]) == {depth}
    assert record("--depth-bias", "0")["results"][0]["tokens"] == record()["results"][0]["tokens"]


def test_the_statistic_shows_the_mean_depth(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(place), "-p", PROMPT, "--max-new-tokens", str(NEW)]) == 0
    said = capsys.readouterr().err
    depths = generate(load(place), PROMPT, max_new_tokens=NEW)[0].depths or ()
    ones, twos = depths.count(1), depths.count(2)
    assert f"mean depth {(ones + 2 * twos) / len(depths):.2f} ({ones} x 1, {twos} x 2); " in said
    assert said.count("\n") == 1
    assert main(["generate", str(place), "-p", PROMPT, "--max-new-tokens", str(NEW), "--max-depth", "1", "--stream"]) == 0
    limited = capsys.readouterr().err
    assert "mean depth 1.00 (" in limited


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-depth", "9"), "max depth must be from 1 to the model's 2 recursions, got 9"),
        (("--max-depth", "0"), "--max-depth must be >= 1, got 0"),
        (("--depth-bias", "nan"), "--depth-bias must be a number, got nan"),
        (("--depth-bias", "inf"), "--depth-bias must be a number, got inf"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, place: Path, mistake_of: Callable[..., str]) -> None:
    assert message in mistake_of("generate", str(place), "-p", PROMPT, *words)


def test_a_model_without_a_router(
    tiny_model_dir: Path, mistake_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = mistake_of("generate", str(tiny_model_dir), "-p", PROMPT, "--depth-bias", "0.5")
    assert f"--depth-bias requires a routed model; {tiny_model_dir} has no router" in said
    assert "from 1 to the model's 2 recursions" in mistake_of(
        "generate", str(tiny_model_dir), "-p", PROMPT, "--max-depth", "3"
    )
    assert main(["generate", str(tiny_model_dir), "-p", PROMPT, "--max-new-tokens", "4", "--max-depth", "1"]) == 0
    limited = capsys.readouterr()
    assert "mean depth" not in limited.err
    assert main(["generate", str(tiny_model_dir), "-p", PROMPT, "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["depths"] is None
