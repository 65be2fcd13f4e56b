"""`fathomlm serve`: what it refuses before it loads anything, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from fathomlm.cli import serve
from fathomlm.cli.main import build_parser, main
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.errors import OptionError
from fathomlm.serve import logs, server


def parse(*words: str) -> Any:
    return build_parser().parse_args(["serve", *words])


def test_the_defaults_are_the_small_model_and_this_machine_only() -> None:
    args = parse()
    assert (args.model, args.host, args.port) == ("smollm2-135m", "127.0.0.1", 8000)
    assert serve.read_options(args).api_keys == ()
    assert serve.read_exits(args) is None
    assert (serve.read_engine(args).rows, serve.read_engine(parse("--device", "cuda")).rows) == (8, 32)


def test_keys_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n third \n")
    options = serve.read_options(parse("--api-key", "first", "--api-key-file", str(file)))
    assert options.api_keys == ("first", "second", "third")


WRONG = [
    ["--port", "70000"], ["--port", "x"], ["--rows", "0"], ["--timeout", "0"], ["--max-body", "0"], ["--cors", "a.example"],
    ["--api-key", ""], ["--api-key-file", "/does/not/exist"], ["--exit-threshold", "1.5"], ["--exit-threshold", "often"],
    ["--exit-threshold", "adaptive"], ["--exit-layer", "0"], ["--exit-layer", "2", "--max-depth", "1"], ["--max-queue", "0"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_slip_is_one_line_and_costs_no_loading(
    words: list[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "load_offer", lambda *_: pytest.fail("it was loaded"))
    assert main(["serve", str(tiny_model_dir), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_adaptive_threshold_is_the_calibrated_one(tmp_path: Path) -> None:
    estimator = ThresholdEstimator(ThresholdOptions(initial=0.7))
    Calibration(exit_layer=2, confidence="gap", estimator=estimator).save(tmp_path / FILE)
    exiting = serve.read_exits(parse(str(tmp_path), "--exit-threshold", "adaptive"))
    assert exiting is not None
    assert (exiting.exit_layers, exiting.threshold_now()) == ((2,), 0.7)
    with pytest.raises(OptionError, match="layer 2"):
        serve.read_exits(parse(str(tmp_path), "--exit-threshold", "adaptive", "--exit-layer", "3"))


def test_an_open_door_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server.Server, "run_at", lambda self, sock: sock.close())
    monkeypatch.setattr(logs, "set_up", lambda: None)
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "without --api-key anybody" in capsys.readouterr().err
    assert main(["serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "k"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_offer_is_what_the_options_say(tiny_model_dir: Path, one_thread: None) -> None:
    import asyncio

    args = parse(str(tiny_model_dir), "--exit-layer", "2", "--exit-threshold", "0.5", "--max-length", "64", "--rows", "2")
    offer = serve.load_offer(args, serve.read_engine(args), serve.read_exits(args))
    assert (offer.name, offer.max_length, offer.threshold, offer.facts["exit_layer"]) == ("tiny", 64, 0.5, 2)
    asyncio.run(offer.close())
    routed = parse(str(tiny_model_dir), "--max-depth", "1")
    with pytest.raises(OptionError, match="router"):
        serve.load_offer(routed, serve.read_engine(routed), None)


@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_exits_well(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "fathomlm.cli.main", "serve", str(tiny_model_dir), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        threading.Timer(120, process.kill).start()
        url = next(line for line in process.stderr if "is ready at" in line).split()[5]
        body = {"prompt": "the fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
        events = [json.loads(line)["event"] for line in process.stdout]
        assert events == ["ready", "draining", "request", "drained"] or events == ["ready", "draining", "drained", "request"]
    finally:
        process.kill()
        process.wait()
