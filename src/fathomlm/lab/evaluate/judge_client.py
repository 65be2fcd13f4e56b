"""One question to an OpenAI-compatible endpoint, through the openai package: it retries with growing pauses, or as long as
the server asks for, and our errors are one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fathomlm.errors import FathomError, OptionError
from fathomlm.jsonfile import parse
from fathomlm.options import check, option

LONGEST_PAUSE = 120.0
"""Seconds between two tries at most, whatever a server asks for: the openai package's own limit."""
_FATAL = frozenset({401, 403, 404, 405})
"""Codes that every other question would get too."""
_SHOWN = 200


class JudgeError(FathomError):
    """A question that got no answer."""


class EndpointError(JudgeError):
    """An endpoint that will not answer any question: a wrong address, key or model."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's answer."""

    text: str
    finish: str | None
    """Why it stopped, such as `stop` or `length`."""


def _read_key(name: str, flag: str) -> str:
    """The error does not repeat the given word: it may be the key itself."""
    if re.fullmatch(r"[A-Za-z_]\w*", name) is None:
        raise OptionError(f"{flag} takes the name of an environment variable, not a key")
    if name not in os.environ:
        raise OptionError(f"the environment variable that {flag} names is not set")
    return os.environ[name].strip()


def _read_body(text: str, flag: str) -> dict[str, Any]:
    found = parse(text, flag, error=OptionError)
    if not isinstance(found, dict) or {"messages", "model", "stream"} & found.keys():
        raise OptionError(f"{flag} takes a JSON object of further fields: not messages, model or stream")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and how patiently."""

    base_url: str = option(metavar="URL", help="OpenAI-compatible API, such as http://localhost:8000/v1")
    """What `/chat/completions` is put behind."""
    model: str = option(metavar="NAME", help="name of the judge at the endpoint")
    key: str | None = option(
        None, flag="--api-key-env", metavar="NAME", parse=_read_key, repr=False,
        help="environment variable with the API key; keys are never taken from the command line",
    )  # fmt: skip
    timeout: float = option(120.0, gt=0, metavar="S", help="seconds per request")
    retries: int = option(5, ge=0, help="retries of a failed request, with growing pauses")
    body: dict[str, Any] = option(
        {},
        metavar="JSON",
        parse=_read_body,
        help="further fields of a request; null omits one, as in '{\"max_tokens\": null}'",
    )
    max_tokens: int = option(128, ge=1, help="new tokens per answer")

    def __post_init__(self) -> None:
        try:
            address = urlsplit(self.base_url)
            address.port  # noqa: B018 - reading it checks it
        except ValueError as error:
            raise OptionError(f"--base-url '{self.base_url}' is not a URL: {error}") from error
        if address.scheme not in ("http", "https") or not address.hostname:
            raise OptionError(f"--base-url must begin with http:// or https:// and name a server, got '{self.base_url}'")
        if address.username is not None or address.password is not None:
            raise OptionError("--base-url must not hold a key or password; --api-key-env names the variable that holds one")
        if self.key is not None and (
            not self.key or not self.key.isascii() or not self.key.isprintable() or " " in self.key
        ):
            raise OptionError("the variable that --api-key-env names holds no key: empty, or with spaces, lines or accents")
        check(self)

    def request(self, prompt: str) -> dict[str, Any]:
        """The body that is sent: greedy, so that the same question gets the same answer where the server can."""
        sent = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        return {name: value for name, value in (sent | self.body).items() if value is not None}

    def client(self) -> Any:
        """A client of the openai package. It follows no redirect, which would take the key to another server."""
        try:
            import openai
        except ImportError:
            raise OptionError("a judge requires the openai package: pip install 'fathomlm[eval]'") from None
        address = urlsplit(self.base_url)
        return openai.AsyncOpenAI(
            api_key=self.key or "none",
            base_url=address._replace(query="", fragment="").geturl(),
            default_query=dict(parse_qsl(address.query)),
            timeout=self.timeout,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    async def ask(self, client: Any, prompt: str) -> Reply:
        """One prompt to a client of this endpoint. A server that sends a byte now and then is waited for no longer than
        one that is silent at every try."""
        import openai

        tries = f"({self.retries + 1} tries)"
        fields = self.request(prompt)
        named = {name: fields.pop(name) for name in ("model", "messages")}
        # What the package takes from environment variables is for OpenAI, and this may be another server.
        ours = ("OpenAI-Organization", "OpenAI-Project", *(("Authorization",) if self.key is None else ()))
        headers = {name: openai.Omit() for name in ours}
        try:
            async with asyncio.timeout((self.retries + 1) * self.timeout + self.retries * LONGEST_PAUSE):
                response = await client.chat.completions.with_raw_response.create(
                    **named, extra_body=fields, extra_headers=headers
                )
        except (TimeoutError, openai.APITimeoutError) as error:
            raise JudgeError(f"no answer within {self.timeout:g} s {tries}") from error
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            if any(isinstance(each, socket.gaierror) for each in _causes(error)):
                raise EndpointError(f"the server of {self.base_url} is not known: {reason}") from error
            raise JudgeError(f"cannot reach {self.base_url}: {reason} {tries}") from error
        except openai.APIStatusError as error:
            raise self._refused(error.status_code, error.response.text, tries) from error
        return _reply(response.content)

    def _refused(self, code: int, text: str, tries: str) -> JudgeError:
        """The error for a response with a code; what it says is shown without the key."""
        with contextlib.suppress(JudgeError, KeyError, TypeError):  # OpenAI's form, else the body as it is
            text = str(parse(text, "the answer", error=JudgeError, nonfinite=True)["error"]["message"])
        detail = " ".join(text.split())[:_SHOWN]
        if self.key is not None:
            detail = detail.replace(self.key, "***")
        message = f"{self.base_url} answered {code}{': ' if detail else ''}{detail}"
        if code in _FATAL or 300 <= code < 400:
            return EndpointError(message)
        return JudgeError(f"{message} {tries}" if code in (408, 409, 429) or code >= 500 else message)


def _causes(error: BaseException | None) -> list[BaseException]:
    """An error, what it was raised from, what that was raised from."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _reply(data: bytes) -> Reply:
    try:
        choice = parse(data, "the answer", error=JudgeError, nonfinite=True)["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (JudgeError, KeyError, IndexError, TypeError, AttributeError) as error:
        start = data[:_SHOWN].decode("utf-8", "replace")
        raise JudgeError(f"the response is not a chat completion: {' '.join(start.split()) or '(empty)'}") from error
    if not isinstance(text, str | None):
        raise JudgeError("the response is not a chat completion: its content is not a string")
    return Reply(text or "", finish if isinstance(finish, str) else None)
