"""`fathomlm chat`: turns from a pipe and from a terminal, its commands, and what Ctrl-C stops."""

from __future__ import annotations

import errno
import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main
from fathomlm.decode.full import Session, generate
from fathomlm.decode.prompts import chat_prompt
from fathomlm.engine.session import EngineSession

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST, SECOND = "the depth of the water", "and the fox?"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command with lines on standard input; gives back its code and what it printed."""

    def call(*lines: str, options: tuple[str, ...] = (), terminal: bool = False) -> tuple[int, str, str]:
        source = Terminal() if terminal else io.StringIO("".join(line + "\n" for line in lines))
        monkeypatch.setattr("sys.stdin", source)
        code = main(["chat", str(tiny_model_dir), "--max-new-tokens", "8", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def reply(tiny_model: Any, *said: str, system: str | None = None) -> str:
    """What the model answers to a conversation of alternating messages, without any cache kept."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return str(generate(tiny_model, [chat_prompt(tiny_model, messages)], max_new_tokens=8)[0].text)


def test_each_line_is_a_turn_of_one_conversation(chat: Any, tiny_model: Any) -> None:
    one = reply(tiny_model, FIRST)
    two = reply(tiny_model, FIRST, one, SECOND)
    assert two != reply(tiny_model, SECOND), "the second reply must depend on the first turn"
    assert chat(FIRST, "", SECOND) == (0, f"{one}\n{two}\n", "")


def test_the_reference_says_the_same(chat: Any) -> None:
    for options in ((), ("--decode", "speculative", "--exit-layer", "2", "--threshold", "0.02")):
        plain = chat(FIRST, SECOND, "/reset", SECOND, options=options)
        assert chat(FIRST, SECOND, "/reset", SECOND, options=(*options, "--reference")) == plain


def test_the_cache_is_kept_between_turns(chat: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, ...]] = []
    real = Session.generate

    def spy(self: Session, prompt: list[int], *args: Any, **options: Any) -> Any:
        held.append(self.held)
        return real(self, prompt, *args, **options)

    monkeypatch.setattr(Session, "generate", spy)
    chat(FIRST, SECOND, options=("--reference",))
    first = tuple(chat_prompt(tiny_model, [{"role": "user", "content": FIRST}]))
    assert held[0] == ()
    assert held[1][: len(first)] == first
    assert len(held[1]) > len(first), "the reply is in the cache too"


def test_the_engine_reads_only_what_is_new(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prompts: list[int] = []
    real = EngineSession.generate

    def spy(self: EngineSession, prompt: list[int], *args: Any, **options: Any) -> Any:
        found = real(self, prompt, *args, **options)
        assert self._engine is not None
        read.append(self._engine.totals.prefill_tokens)
        prompts.append(len(prompt) - 1)
        return found

    monkeypatch.setattr(EngineSession, "generate", spy)
    chat(FIRST, SECOND)
    assert read[0] == prompts[0]
    assert read[1] - read[0] <= prompts[1] - 16, "a page of the first turn was found again"


def test_reset_and_system(chat: Any, tiny_model: Any) -> None:
    one = reply(tiny_model, FIRST)
    deep = reply(tiny_model, FIRST, system="be deep")
    assert one != deep
    code, out, err = chat(FIRST, "/reset", FIRST, "/reset", "/system be deep", FIRST, "/system", "/reset", FIRST)
    assert (code, out) == (0, f"{one}\n{one}\n{deep}\n{one}\n")
    assert err.count("[new conversation]") == 3
    assert chat(FIRST, options=("--system", "be deep"))[1] == f"{deep}\n"


def test_quit_leaves_at_once(chat: Any) -> None:
    assert chat("/quit", FIRST)[:2] == (0, "")


def test_help_lists_the_commands(chat: Any) -> None:
    _, out, err = chat("/help")
    assert out == ""
    for command in ("/reset", "/system", "/save", "/help", "/quit"):
        assert command in err


def test_save_writes_the_conversation_and_no_file_is_replaced(
    chat: Any, tiny_model: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "talk.json"
    code, _, err = chat("/system be deep", FIRST, f"/save {target}", f"/save {target}")
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["model"] == str(tiny_model_dir)
    assert record["messages"] == [
        {"role": "system", "content": "be deep"},
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": reply(tiny_model, FIRST, system="be deep")},
    ]
    assert code == 2, "a script must see that something failed"
    assert f"fathomlm: {target} exists; choose another name" in err


def test_a_save_that_fails_leaves_no_half_of_a_file(chat: Any, tmp_path: Path, monkeypatch: Any) -> None:
    target, write = tmp_path / "talk.json", Path.write_text

    def full(self: Path, text: str, **more: Any) -> int:
        write(self, text[:20], **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = chat(FIRST, f"/save {target}")
    assert code == 2
    assert f"fathomlm: cannot write {target}: No space left on device" in err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_do_not_end_the_conversation(chat: Any, tiny_model: Any) -> None:
    code, out, err = chat("/rset", "/save", "/save /no/such/place/x", FIRST)
    assert (code, out) == (2, reply(tiny_model, FIRST) + "\n")
    assert "unknown command '/rset' (did you mean '/reset'?)" in err
    assert "/save requires a file name" in err
    assert "cannot write /no/such/place/x" in err


def test_a_full_context_is_said_and_reset_mends_it(chat: Any, tiny_model: Any) -> None:
    code, out, err = chat("x" * 400, "/reset", FIRST)
    assert (code, out) == (2, reply(tiny_model, FIRST) + "\n")
    assert "the model's context is 256; /reset it" in err


def test_a_model_without_a_chat_format_is_refused(
    tiny_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model.tokenizer, "chat_template", None)
    tiny_model.save_pretrained(tmp_path / "plain")
    assert main(["chat", str(tmp_path / "plain")]) == 2
    assert "no chat template" in capsys.readouterr().err


def interrupted(number: int, after: str) -> Callable[..., Any]:
    """An `EngineSession.generate` that shows some text and is then struck by a signal, once."""
    real, struck = EngineSession.generate, []

    def generate_until_struck(self: EngineSession, prompt: Any, *args: Any, on_text: Any, **options: Any) -> Any:
        if struck:
            return real(self, prompt, *args, on_text=on_text, **options)
        struck.append(True)
        if after:
            on_text(after)
        signal.raise_signal(number)
        raise AssertionError("the signal must have been raised by now")

    return generate_until_struck


def test_ctrl_c_stops_the_reply_and_keeps_its_text(chat: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(EngineSession, "generate", interrupted(signal.SIGINT, "the sea"))
    assert chat(FIRST, SECOND)[:2] == (0, "the sea\n" + reply(tiny_model, FIRST, "the sea", SECOND) + "\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_any_text_forgets_the_message(chat: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSession, "generate", interrupted(signal.SIGINT, ""))
    assert chat(FIRST, SECOND)[:2] == (0, "\n" + reply(tiny_model, SECOND) + "\n")


def test_being_told_to_terminate_ends_the_program(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSession, "generate", interrupted(signal.SIGTERM, "the sea"))
    code, out, err = chat(FIRST, SECOND)
    assert (code, out) == (2, "the sea")
    assert "interrupted" in err


def test_on_a_terminal_ctrl_c_hints_and_ctrl_d_leaves(chat: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["ctrl-c", FIRST, "ctrl-d"])

    def read(prompt: str) -> str:
        line = next(typed)
        if line == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        if line == "ctrl-d":
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    code, out, err = chat(terminal=True)
    assert code == 0
    assert out == reply(tiny_model, FIRST) + "\n\n"
    assert "Ctrl-D or /quit to quit" in err
    assert "[cut at --max-new-tokens" in err
