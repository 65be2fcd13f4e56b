"""`fathomlm chat MODEL`: a conversation, with replies shown as they are made.

The cache stays from turn to turn (`Session`), so a turn costs what is new in it and not the whole conversation again.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from fathomlm.checkpoints.writing import whole_file
from fathomlm.cli.common import ModelOptions, QuantizeOptions, check_input
from fathomlm.cli.decoding import DecodeOptions, DepthOptions, MessageOptions, ReferenceOptions
from fathomlm.cli.first import check_new_file
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.errors import FathomError, OptionError, choices
from fathomlm.interrupts import on_signals
from fathomlm.options import like, section

if TYPE_CHECKING:
    from fathomlm.decode.full import Session
    from fathomlm.engine.session import EngineSession
    from fathomlm.model.hub import FathomForCausalLM
    from fathomlm.model.route import DepthControl

COMMANDS = {
    "/help": "show these commands",
    "/reset": "begin a new conversation; the system message stays",
    "/system TEXT": "set the system message; without TEXT, drop it",
    "/save FILE": "write the conversation as JSON to a new file",
    "/quit": "quit (or Ctrl-D)",
}


class ReplyStopped(Exception):
    """Ctrl-C. Not KeyboardInterrupt, which also stands for being told to terminate and must end the program."""


@dataclass(frozen=True, kw_only=True)
class Chat(QuantizeOptions, ModelOptions, ReferenceOptions):
    """Chat with a model that has a chat template. Each line is a message; /help lists the commands. Ctrl-C stops a reply,
    Ctrl-D ends the conversation. From a pipe, each line is a turn and only the replies are printed."""

    system: str | None = like(MessageOptions, "system", help="system message", requires=())
    sampling: Sampling = section(Sampling, "sampling", max_new_tokens=512)
    depth: DepthOptions = section(DepthOptions, "depth")
    decoding: DecodeOptions = section(DecodeOptions, "early exit", "how far down a model without a router each token goes")

    def run(self) -> int:
        exiting, pack = self.decoding.settle(self.model, self.depth)
        check_input()
        interactive = sys.stdin.isatty()
        model = self.load(**pack)
        how = (model, self.depth.control(self.model, model, self.sampling.seed or 0), exiting)
        session = self.open_engine(*how) or _reference(*how)
        conversation = Conversation(self.model, model, self.sampling, self.system, session)
        if interactive:
            print("One message per line; /help lists commands, Ctrl-D quits.", file=sys.stderr)
        failed = False
        with _ctrl_c_raises():
            for line in _lines(interactive):
                try:
                    if not _turn(conversation, line, interactive):
                        break
                except ReplyStopped:
                    print()
                except FathomError as error:
                    print(f"fathomlm: {error}", file=sys.stderr)
                    failed = True
        return 2 if failed and not interactive else 0


def _reference(model: FathomForCausalLM, control: DepthControl | None, exiting: Exiting | None) -> Session:
    from fathomlm.decode.full import Session

    return Session(model, control, exiting)


class Conversation:
    """The conversation so far, and the session that caches it."""

    def __init__(
        self,
        name: str,
        model: FathomForCausalLM,
        sampling: Sampling,
        system: str | None,
        session: Session | EngineSession,
    ) -> None:
        self.name = name
        self.model = model
        self.sampling = sampling
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._session = session
        self._prompt("Hello")  # a model that cannot chat is refused now, not after the first message

    def ask(self, text: str, show: Callable[[str], None]) -> bool:
        """Send a message and show the reply; says whether the reply came to an end of its own.

        Ctrl-C keeps what there is of it. A message that got no text at all is forgotten again.
        """
        prompt = self._prompt(text)
        context = self.model.architecture.context
        if len(prompt) >= context:
            raise OptionError(f"the conversation has {len(prompt)} tokens, the model's context is {context}; /reset it")
        pieces: list[str] = []

        def on_text(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        most = min(self.sampling.max_new_tokens, context - len(prompt))
        try:
            reply = self._session.generate(prompt, self.sampling, on_text=on_text, max_new_tokens=most)
            return reply.finish != "length"
        finally:
            if pieces:
                self.messages += [_message("user", text), _message("assistant", "".join(pieces))]

    def reset(self) -> None:
        self.messages = []
        self._session.reset()

    def save(self, path: Path) -> None:
        record = {"model": self.name, "messages": [*self._opening(), *self.messages]}
        check_new_file(path)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _opening(self) -> list[dict[str, str]]:
        return [] if self.system is None else [_message("system", self.system)]

    def _prompt(self, text: str) -> list[int]:
        from fathomlm.decode.prompts import chat_prompt

        return chat_prompt(self.model, [*self._opening(), *self.messages, _message("user", text)])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _turn(conversation: Conversation, line: str, interactive: bool) -> bool:
    """One line of input; says whether to go on."""
    text = line.strip()
    if not text:
        return True
    if text.startswith("/"):
        return _command(conversation, *_split(text))
    whole = conversation.ask(text, lambda piece: print(piece, end="", flush=True))
    print(flush=True)
    if not whole and interactive:
        print("[cut at --max-new-tokens or the end of the context]", file=sys.stderr)
    return True


def _split(text: str) -> tuple[str, str]:
    word, _, rest = text.partition(" ")
    return word, rest.strip()


def _command(conversation: Conversation, word: str, rest: str) -> bool:
    if word == "/quit":
        return False
    if word == "/help":
        for usage, meaning in COMMANDS.items():
            print(f"  {usage:14} {meaning}", file=sys.stderr)
    elif word == "/reset":
        conversation.reset()
        print("[new conversation]", file=sys.stderr)
    elif word == "/system":
        conversation.system = rest or None
        print("[system message set]" if rest else "[no system message]", file=sys.stderr)
    elif word == "/save":
        if not rest:
            raise OptionError("/save requires a file name")
        conversation.save(Path(rest).expanduser())
        print(f"[saved to {rest}]", file=sys.stderr)
    else:
        raise OptionError(choices("command", word, [usage.split()[0] for usage in COMMANDS]))
    return True


def _lines(interactive: bool) -> Iterator[str]:
    """Lines of input until there are no more."""
    if interactive:
        yield from _typed_lines()
        return
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ReplyStopped as error:
        raise KeyboardInterrupt from error


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401  (line editing and history for `input`)

    while True:
        try:
            line = input("> ")
        except ReplyStopped:
            print("\n[Ctrl-D or /quit to quit]", file=sys.stderr)
            continue
        except EOFError:
            print()
            return
        yield line


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Within, Ctrl-C raises `ReplyStopped`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise ReplyStopped

    with on_signals(stop, signal.SIGINT):
        yield
