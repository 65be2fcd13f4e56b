"""`fathomlm serve`: what it refuses before it loads anything, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fathomlm.cli import serve
from fathomlm.cli.main import main, read_command
from fathomlm.cli.serve_models import model_name
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.errors import OptionError
from fathomlm.serve import logs, server


def exits_of(args: Any) -> Any:
    return args.exiting.settle(args.model)


def parse(*words: str) -> Any:
    return read_command(["serve", *words])[1]


def test_the_defaults_are_the_small_model_and_this_machine_only(nothing_packaged: None) -> None:
    args = parse()
    assert (args.model, args.server.host, args.server.port) == ("smollm2-135m", "127.0.0.1", 8000)
    assert args.server_options.api_keys == ()
    assert exits_of(parse("--exits", "none")) is exits_of(parse("--decode", "full")) is None
    assert (args.engine_options.batch_size, parse("--device", "cuda").engine_options.batch_size) == (8, 32)
    assert (args.engine_options.kv_dtype, parse("--kv-dtype", "fp8").engine_options.kv_dtype) == ("auto", "fp8")
    assert (args.engine_options.merge, parse("--no-merge").engine_options.merge) == (True, False)


def test_what_is_packaged_is_served_by_default_under_its_name(packaged: str, one_thread: None) -> None:
    import asyncio

    args = parse("--max-length", "64", "--batch-size", "2")
    assert args.model == packaged
    served = serve.load_served(args, args.engine_options, exits_of(args))
    assert (served.name, served.max_length, served.facts["kind"]) == (packaged, 64, "routed")
    asyncio.run(served.close())
    assert parse("smollm2-135m").model == "smollm2-135m"


def test_a_checkpoint_is_served_under_its_runs_name(tmp_path: Path) -> None:
    step = tmp_path / "ex" / "checkpoints" / "step-00000032"
    step.mkdir(parents=True)
    (tmp_path / "ex" / "last").symlink_to(step)
    (tmp_path / "small.q8.gguf").write_bytes(b"GGUF")
    names = {str(tmp_path / "ex" / "last"): "ex-last", str(step): "ex-step-00000032", "owner/name": "owner/name"}
    names |= {str(tmp_path / "small.q8.gguf"): "small.q8", "smollm2-135m": "smollm2-135m"}
    assert {source: model_name(source) for source in names} == names


def test_models_are_named_or_those_at_hand(packaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*words: str) -> tuple[str, ...]:
        found = parse(*words)
        return (found.model, *found.several.models)

    monkeypatch.setattr("fathomlm.cli.serve_models._cached", lambda repo_id: repo_id == "EleutherAI/pythia-70m")
    assert names() == (packaged, "smollm2-135m", "pythia-70m")
    assert names("a") == names("--model", "a") == ("a",)
    assert names("a", "--model", "b", "--model", "c") == names("--model", "a", "--model", "b", "--model", "c")
    assert names("--max-loaded", "1") == names("--ray") == (packaged,)
    with pytest.raises(OptionError, match="--ray cannot be combined"):
        parse("a", "--model", "b", "--ray")


def test_another_model_has_its_own_context_and_no_options_of_the_first(packaged: str, tiny_model_dir: Path) -> None:
    import asyncio

    args = parse(packaged, "--model", str(tiny_model_dir), "--max-depth", "1", "--name", "first", "--max-length", "4096")
    engine = args.engine_options
    catalog = serve.catalog_of("first", args.several.models, 2, lambda source: serve.load_other(args, engine, source))
    served = catalog.offers["tiny"].load()
    assert (served.name, served.max_length, served.max_depth) == ("tiny", 256, None)
    asyncio.run(served.close())


def test_generate_and_chat_still_ask_for_a_model(packaged: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["generate", "-p", "x"], ["chat"]):
        assert main(words) == 2
        assert "MODEL" in capsys.readouterr().err


def test_keys_come_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n third \n")
    options = parse("--api-key", "first", "--api-key-file", str(file)).server_options
    assert options.api_keys == ("first", "second", "third")


WRONG = [
    ["--port", "70000"], ["--port", "x"], ["--batch-size", "0"], ["--timeout", "0"], ["--max-body", "0"],
    ["--cors", "a.example"],
    ["--api-key", ""], ["--api-key-file", "/does/not/exist"], ["--threshold", "1.5"], ["--threshold", "often"],
    ["--threshold", "adaptive"], ["--exit-layer", "0"], ["--exit-layer", "2", "--max-depth", "1"], ["--max-queue", "0"],
    ["--memory", "800000GB"], ["--memory", "x"], ["--header-timeout", "0"], ["--max-connections", "0"],
    ["--allowed-hosts", "a:80"], ["--max-loaded", "0"], ["--model", "other", "--max-loaded", "1"],
    ["--model", "a", "--model", "a"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_slip_is_one_line_and_costs_no_loading(
    words: list[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "load_served", lambda *_: pytest.fail("it was loaded"))
    assert main(["serve", str(tiny_model_dir), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_memory_that_cannot_be_had_is_one_line(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the check before loading lets it pass: the machine has so much, and not as much is free."""
    monkeypatch.setattr(serve, "check_memory", lambda *_: None)
    monkeypatch.setattr(logs, "configure_logging", lambda: None)
    assert main(["serve", str(tiny_model_dir), "--port", "0", "--memory", "800000GB"]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert "lower --memory" in last


def test_an_adaptive_threshold_is_the_calibrated_one(tmp_path: Path) -> None:
    estimator = ThresholdEstimator(ThresholdOptions(initial=0.7))
    Calibration(exit_layer=2, confidence="gap", estimator=estimator).save(tmp_path / FILE)
    exiting = exits_of(parse(str(tmp_path), "--threshold", "adaptive"))
    assert exiting is not None
    assert (exiting.exit_layers, exiting.threshold_now()) == ((2,), 0.7)
    with pytest.raises(OptionError, match="layer 2"):
        exits_of(parse(str(tmp_path), "--threshold", "adaptive", "--exit-layer", "3"))


def test_the_exits_that_ship_for_a_model_draft(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is lost by it, so nobody has to ask for it; what takes the exit's word is asked for. A draft layer that ships
    comes before an exit."""
    monkeypatch.setattr("fathomlm.cli.decoding.packaged_drafts", lambda name: tmp_path)
    drafting = (parse("x", *words).exiting.used_pack("smollm2-135m") for words in ((), ("--decode", "parallel")))
    assert [found == tmp_path for found in drafting] == [True, False]
    monkeypatch.setattr("fathomlm.cli.decoding.packaged_drafts", lambda name: None)
    args = parse("smollm2-135m")
    exiting = exits_of(args)
    assert exiting is not None
    assert (exiting.mode, exiting.exit_layers) == ("speculative", (2,))
    assert exiting.threshold_now() == pytest.approx(0.18, abs=0.01), "a wrong draft costs time and no token"
    said = capsys.readouterr().err
    assert "exits that ship with FathomLM" in said
    assert "the full model verifies what they draft" in said
    taken = exits_of(parse("smollm2-135m", "--decode", "parallel", "--threshold", "0.6"))
    assert taken is not None
    assert (taken.mode, taken.threshold_now()) == ("parallel", 0.6)
    assert args.exiting.used_pack("smollm2-135m") == parse("x", "--decode", "parallel").exiting.used_pack("smollm2-135m")
    placed = exits_of(parse("smollm2-135m", "--exit-layer", "8"))
    assert placed is not None
    assert (placed.mode, placed.exit_layers) == ("parallel", (8,))
    assert parse("x", "--exit-layer", "8").exiting.used_pack("smollm2-135m") is None
    with pytest.raises(OptionError, match="cannot be combined with --decode full"):
        exits_of(parse("smollm2-135m", "--decode", "full", "--threshold", "0.5"))


def test_an_open_door_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(server.Server, "run_at", lambda self, sock: sock.close())
    monkeypatch.setattr(logs, "configure_logging", lambda: None)
    assert main(["serve", "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "without --api-key anybody" in capsys.readouterr().err
    assert main(["serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "k"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_served_is_what_the_options_say(tiny_model_dir: Path, one_thread: None) -> None:
    import asyncio

    args = parse(str(tiny_model_dir), "--exit-layer", "2", "--threshold", "0.5", "--max-length", "64", "--batch-size", "2")
    served = serve.load_served(args, args.engine_options, exits_of(args))
    assert (served.name, served.max_length, served.threshold, served.facts["exit_layer"]) == ("tiny", 64, 0.5, 2)
    asyncio.run(served.close())
    routed = parse(str(tiny_model_dir), "--max-depth", "1")
    with pytest.raises(OptionError, match="router"):
        serve.load_served(routed, routed.engine_options, None)


@contextmanager
def started(*words: str) -> Iterator[tuple[Any, str]]:
    """The command in a process of its own, and its address once it is ready."""
    command = [sys.executable, "-m", "fathomlm.cli.main", "serve", *words, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(1500, process.kill)
    late.start()
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if " ready at " in line)
        yield process, line.split(" ready at ")[1].split()[0]
    finally:
        late.cancel()
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tiny_model_dir: Path, number: int) -> None:
    with started(str(tiny_model_dir), "--port", "0") as (process, url):
        body = {"prompt": "the fox", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 32}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            while httpx.get(f"{url}/ready").status_code == 200:
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(600) == 1
            said = [json.loads(line) for line in process.stdout]
        events = [line["event"] for line in said]
        assert "cut off" in events
        assert "drained" not in events
        assert all("traceback" not in line for line in said)


@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_exits_well(tiny_model_dir: Path) -> None:
    with started(str(tiny_model_dir), "--port", "0") as (process, url):
        body = {"prompt": "the fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(600) == 0
        events = [json.loads(line)["event"] for line in process.stdout]
        assert events == ["ready", "draining", "request", "drained"] or events == ["ready", "draining", "drained", "request"]
