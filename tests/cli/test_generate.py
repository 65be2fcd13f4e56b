"""`fathomlm generate`: text, stream and JSON from a tiny model's directory, and one line for every mistake."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints.resolve import load
from fathomlm.cli.generate import Generate
from fathomlm.cli.main import main
from fathomlm.decode.full import generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.session import EngineSession

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "the depth of the water"


class Answer:
    """What a run of the command printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> Answer:
        code = main(["generate", str(tiny_model_dir), *arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def mistake(run: Any) -> Any:
    """Run what must fail in one line on standard error, and give back that line."""

    def call(*arguments: str) -> str:
        answer = run(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("fathomlm: ")
        assert answer.err.count("\n") == 1
        return str(answer.err)

    return call


def text_of(tiny_model: Any, prompt: str = PROMPT, **options: Any) -> str:
    return generate(tiny_model, prompt, max_new_tokens=12, **options)[0].text


def test_text_on_standard_output_and_cost_on_standard_error(run: Any, tiny_model: Any) -> None:
    answer = run("-p", PROMPT, "--max-new-tokens", "12")
    assert answer.code == 0
    assert answer.out == text_of(tiny_model) + "\n"
    assert answer.err.count("\n") == 1
    assert "new in" in answer.err
    assert "tokens/s" in answer.err


@pytest.mark.parametrize("form", ["text", "json"])
def test_tokens_that_all_come_at_once_have_no_rate(run: Any, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """As a text of a few tokens may, whose drafts are verified in one pass."""
    with_times = EngineSession._generation
    monkeypatch.setattr(
        EngineSession, "_generation", lambda *args: dataclasses.replace(with_times(*args), decode_seconds=0.0)
    )
    answer = run("-p", PROMPT, "--max-new-tokens", "3", *(["--json"] if form == "json" else []))
    assert answer.code == 0
    if form == "json":
        assert json.loads(answer.out)["tokens_per_second"] == json.loads(answer.out)["results"][0]["tokens_per_second"] == 0
    else:
        assert "3 new in 0.00 s; " in answer.err


def test_streamed_text_is_the_same(run: Any, tiny_model: Any) -> None:
    answer = run("-p", PROMPT, "--max-new-tokens", "12", "--stream")
    assert answer.out == text_of(tiny_model) + "\n"
    assert "tokens/s" in answer.err


def test_a_batch_from_options_and_a_file(run: Any, tiny_model: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a fathom\n\n  six feet é\n", encoding="utf-8")
    answer = run("-p", PROMPT, "--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "12", "--json")
    record = json.loads(answer.out)
    prompts = [PROMPT, "a fathom", "  six feet é"]
    assert [result["prompt"] for result in record["results"]] == prompts
    assert [result["text"] for result in record["results"]] == [text_of(tiny_model, prompt) for prompt in prompts]
    shown = run("-p", PROMPT, "-p", "a fathom", "--max-new-tokens", "12").out
    assert f"--- 1: {PROMPT}\n{text_of(tiny_model)}\n--- 2: a fathom\n" in shown


def test_the_record_says_everything(run: Any, tiny_model: Any, tiny_model_dir: Path) -> None:
    answer = run("-p", PROMPT, "--max-new-tokens", "12", "--json")
    record = json.loads(answer.out)
    assert answer.err == ""
    assert record["model"] == str(tiny_model_dir)
    assert record["plan"] == "2 layers looped 2 times (cycle)"
    assert record["dtype"] == "float32"
    expected = generate(tiny_model, PROMPT, max_new_tokens=12)[0]
    (result,) = record["results"]
    assert result["tokens"] == list(expected.tokens)
    assert result["prompt_tokens"] == list(expected.prompt_tokens)
    assert result["finish"] == expected.finish
    assert record["tokens_per_second"] == result["tokens_per_second"] > 0
    assert set(record["timings"]) == {"load_seconds", "prefill_seconds", "decode_seconds"}


def test_standard_input_is_a_prompt(run: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    assert run("-p", "-", "--max-new-tokens", "12").out == text_of(tiny_model) + "\n"


def test_chat_puts_the_template_around_the_prompt(run: Any, tiny_model: Any) -> None:
    messages = [{"role": "system", "content": "be deep"}, {"role": "user", "content": PROMPT}]
    expected = generate(tiny_model, [chat_prompt(tiny_model, messages)], max_new_tokens=12)[0].text
    assert run("-p", PROMPT, "--chat", "--system", "be deep", "--max-new-tokens", "12").out == expected + "\n"
    assert run("-p", PROMPT, "--chat", "--max-new-tokens", "12").out != expected + "\n"


def test_every_sampling_option_arrives(run: Any, tiny_model: Any) -> None:
    options = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    text = text_of(tiny_model, **options)
    command = ("-p", PROMPT, "--max-new-tokens", "12", *flags)
    assert run(*command, "--reference").out == text + "\n"
    assert text != text_of(tiny_model)
    drawn = run(*command).out.removesuffix("\n")  # the engine draws otherwise, but the same each time
    for said, more in ((text, ("--reference",)), (drawn, ())):
        stop = said[4:6]
        stopped = json.loads(run(*command, "--stop", "never", "--stop", stop, "--json", *more).out)
        assert stopped["results"][0]["text"] == said[: said.find(stop)]
        assert stopped["results"][0]["finish"] == "stop"
        assert stopped["decoder"] == ("reference" if more else "engine")


def test_dtype_and_threads(run: Any) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        answer = run("-p", PROMPT, "--max-new-tokens", "2", "--dtype", "bfloat16", "--threads", "2", "--json")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads(answer.out)["dtype"] == "bfloat16"


def test_progress_goes_to_a_terminal_only(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    answer = run("-p", PROMPT, "--max-new-tokens", "12")
    assert "generating" in answer.err
    assert "generating" not in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt: give -p TEXT, -p - for standard input, or --prompt-file FILE"),
        (("-p", "a", "-p", "b", "--stream"), "--stream takes one prompt, got 2"),
        (("-p", "a", "--stream", "--json"), "--stream cannot be combined with --json"),
        (("-p", "a", "--system", "x"), "--system requires --chat"),
        (("-p", "-", "-p", "-"), "once"),
        (("--prompt-file", "/no/such/file"), "cannot read /no/such/file"),
        (("-p", "a", "--top-p", "0"), "--top-p must be > 0 and <= 1, got 0.0"),
        (("-p", "a", "--temperature", "nan"), "temperature must be"),
        (("-p", "a", "--stop", ""), "stop must be"),
        (("-p", "a", "--threads", "0"), "--threads must be >= 1, got 0"),
        (("-p", "a", "--max-new-tokens", "256"), "make 257, more than the context of 256"),
    ],
)
def test_mistakes_are_one_line(mistake: Any, arguments: tuple[str, ...], message: str) -> None:
    assert message in mistake(*arguments)


def test_a_file_that_is_no_text_is_refused(mistake: Any, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in mistake("--prompt-file", str(tmp_path / "bytes"))


def test_a_missing_cuda_device_is_said(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no such device" in mistake("-p", "a", "--device", "cuda")


def test_integer_weights(
    run: Any, mistake: Any, tiny_model_dir: Path, kernels_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATHOMLM_HOME", str(kernels_home))
    answer = run("-p", PROMPT, "--max-new-tokens", "12", "--quantize", "int4", "--json")
    record = json.loads(answer.out)
    assert record["dtype"] == "int4"
    assert record["results"][0]["text"] == text_of(load(tiny_model_dir, quantize="int4"))
    assert "did you mean 'int8'?" in mistake("-p", PROMPT, "--quantize", "int")
    assert "--quantize int8 requires --dtype float32" in mistake("-p", PROMPT, "--quantize", "int8", "--dtype", "float16")


def test_a_packaged_model_computes_in_int8_on_the_cpu(
    packaged: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathomlm.kernels.cpu_library.compiler", lambda: "cc")
    prompt = {"prompt": ("a",)}
    assert Generate(model=packaged, **prompt).quantized(packaged) == "int8"
    assert Generate(model=packaged, quantize="int4", **prompt).quantized(packaged) == "int4"
    for options in ({"quantize": "none"}, {"dtype": "bfloat16"}, {"device": "cuda"}):
        assert Generate(model=packaged, **prompt, **options).quantized(packaged) is None
    assert Generate(model=str(tiny_model_dir), **prompt).quantized(str(tiny_model_dir)) is None
    monkeypatch.setattr("fathomlm.kernels.cpu_library.compiler", lambda: None)
    assert Generate(model=packaged, **prompt).quantized(packaged) is None
