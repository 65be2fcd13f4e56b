"""One question to an OpenAI-compatible endpoint, asked until it is answered or there is no hope of it.

The standard library does this. httpx and OpenAI's client are here for development only, and one kind of request is not
worth asking every user to install them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import IO, Any

from fathomlm.errors import FathomError, OptionError, require
from fathomlm.jsonfile import parse

LONGEST_PAUSE = 60.0
"""Seconds between two tries at most, whatever a server asks for."""
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
"""Codes that a later try may be spared."""
_NEVER = frozenset({401, 403, 404, 405})
"""Codes that every other question would get too."""
_MOST_BYTES = 1 << 24
_SHOWN = 200


class JudgeError(FathomError):
    """A question that got no answer."""


class NoHope(JudgeError):
    """An endpoint that will not answer any question: a wrong address, key or model."""


class Stopped(Exception):
    """Somebody else gave up while this question waited."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge said."""

    text: str
    finish: str | None
    """Why it stopped, such as `stop` or `length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and how patiently."""

    base_url: str
    """What `/chat/completions` is put behind, such as http://localhost:8000/v1."""
    model: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    """Seconds for one try, from sending to the last byte."""
    retries: int = 5
    """Tries after the first."""
    first_pause: float = 1.0
    """Seconds before the second try; doubled for each further one."""
    body: dict[str, Any] = field(default_factory=dict)
    """Further fields of a request; None leaves one out that would be sent."""
    max_tokens: int = 128

    def __post_init__(self) -> None:
        try:
            address = urllib.parse.urlsplit(self.base_url)
            address.port  # noqa: B018 - reading it checks it
        except ValueError as error:
            raise OptionError(f"--base-url '{self.base_url}' is no address: {error}") from error
        if address.scheme not in ("http", "https") or not address.hostname:
            raise OptionError(f"--base-url must begin with http:// or https:// and name a server, got '{self.base_url}'")
        if address.username is not None or address.password is not None:
            raise OptionError("--base-url must not hold a key or password; --api-key-env names the variable that holds one")
        if self.key is not None and (
            not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key
        ):
            raise OptionError("the variable that --api-key-env names holds no key: empty, or with spaces, lines or accents")
        require(self.timeout > 0, "--timeout", "> 0", self.timeout)
        require(self.retries >= 0, "--retries", ">= 0", self.retries)
        require(self.max_tokens >= 1, "--max-tokens", ">= 1", self.max_tokens)

    def request(self, prompt: str) -> dict[str, Any]:
        """The body that is sent: greedy, so that the same question gets the same answer where the server can."""
        sent = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        return {name: value for name, value in (sent | self.body).items() if value is not None}

    def ask(self, prompt: str, stop: threading.Event) -> Reply:
        """Waits between tries as long as the server says, else twice as long each time."""
        data = json.dumps(self.request(prompt)).encode()
        for attempt in range(self.retries + 1):
            if stop.is_set():
                raise Stopped
            try:
                return _reply(self._post(data))
            except _Again as error:
                if attempt == self.retries:
                    raise JudgeError(f"{error} ({attempt + 1} tries)") from error
                pause = error.pause if error.pause is not None else self.first_pause * 2**attempt * random.uniform(0.5, 1)
                stop.wait(min(pause, LONGEST_PAUSE))
        raise AssertionError("the last try returns or raises")

    def _post(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "fathomlm"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        address = urllib.parse.urlsplit(self.base_url)
        url = address._replace(path=f"{address.path.rstrip('/')}/chat/completions", fragment="").geturl()
        ends = time.monotonic() + self.timeout
        try:
            request = urllib.request.Request(url, data=data, headers=headers, method="POST")
            with _opener().open(request, timeout=self.timeout) as response:
                return _read(response, ends)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except TimeoutError as error:
            raise _Again(f"no answer within {self.timeout:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _Again(f"no answer within {self.timeout:g} s") from error
            if isinstance(error.reason, socket.gaierror):
                raise NoHope(f"the server of {self.base_url} is not known: {error.reason.strerror}") from error
            raise _Again(f"cannot reach {self.base_url}: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"the connection to {self.base_url} broke: {error or type(error).__name__}") from error
        except ValueError as error:
            raise NoHope(f"--base-url {self.base_url} is no address that can be asked: {error}") from error

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        said = self._without_key(_message(error))
        text = f"{self.base_url} answered {error.code}{': ' if said else ''}{said}"
        if error.code in _AGAIN:
            return _Again(text, _asked_pause(error.headers.get("Retry-After")))
        if error.code in _NEVER or 300 <= error.code < 400:
            return NoHope(text)
        return JudgeError(text)

    def _without_key(self, text: str) -> str:
        return text if self.key is None else text.replace(self.key, "***")


class _Again(Exception):
    """A try that failed as later ones may not."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A question that is sent on would lose its body, or take the key to another server."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _read(response: IO[bytes], ends: float) -> bytes:
    """All of it before the time is over: a socket's own limit starts anew with every byte."""
    parts, size = [], 0
    while part := response.read1(1 << 16):  # type: ignore[attr-defined]
        parts.append(part)
        size += len(part)
        if time.monotonic() > ends:
            raise TimeoutError
        if size > _MOST_BYTES:
            raise JudgeError(f"an answer of more than {_MOST_BYTES >> 20} MiB is no judgement")
    return b"".join(parts)


def _reply(data: bytes) -> Reply:
    try:
        choice = parse(data, "the answer", error=JudgeError, nonfinite=True)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (JudgeError, KeyError, IndexError, TypeError, AttributeError) as error:
        start = data[:_SHOWN].decode("utf-8", "replace")
        raise JudgeError(f"the answer is no chat completion: {' '.join(start.split()) or '(empty)'}") from error
    if not isinstance(text, str | None):
        raise JudgeError("the answer is no chat completion: its content is no text")
    return Reply(text or "", finish if isinstance(finish, str) else None)


def _message(error: urllib.error.HTTPError) -> str:
    """What an error's body says, in OpenAI's form or as it is."""
    text = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = error.read(1 << 16).decode("utf-8", "replace")
    with contextlib.suppress(JudgeError, KeyError, TypeError):
        text = str(parse(text, "the answer", error=JudgeError, nonfinite=True)["error"]["message"])
    return " ".join(text.split())[:_SHOWN]


def _asked_pause(header: str | None) -> float | None:
    """Seconds that a server asks for; its other form, a date, is not used by such servers."""
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, float(header or ""))
    return None
