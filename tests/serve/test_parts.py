"""The small parts: bytes of tokens, options, log lines, sockets, and loading that fails."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from fathomlm.errors import EngineStopped, ModelNotFound, OptionError, QueueFull, RequestTooLarge
from fathomlm.serve.app import create_app
from fathomlm.serve.errors import as_api_error, to_json
from fathomlm.serve.logs import LOGGER, JsonLines
from fathomlm.serve.middleware import is_loopback
from fathomlm.serve.options import ServeOptions, address_of, bind
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.server import Server
from fathomlm.serve.service import Service
from fathomlm.serve.tokens import TokenStrings


def test_bytes_of_tokens_make_up_any_text(tiny_tokenizer: Any) -> None:
    texts = TokenStrings(tiny_tokenizer)
    text = "the depth: µ, 深い, 🐋 and \x00\x1f"
    tokens = tiny_tokenizer(text)["input_ids"]
    assert any("\N{REPLACEMENT CHARACTER}" in texts.text(token) for token in tokens)  # some are parts of a character
    assert bytes(byte for token in tokens for byte in texts.bytes(token) or ()).decode() == text


def test_special_tokens_have_their_name(tiny_tokenizer: Any) -> None:
    texts = TokenStrings(tiny_tokenizer)
    assert texts.text(tiny_tokenizer.eos_token_id) == "<|im_end|>"
    assert texts.bytes(tiny_tokenizer.eos_token_id) == list(b"<|im_end|>")


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert (TokenStrings(None).text(7), TokenStrings(None).bytes(7)) == ("token_id:7", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0}, {"timeout": float("inf")}, {"drain_timeout": -1}, {"max_body": 0}, {"max_choices": True},
        {"max_tokens": 0}, {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("schlüssel",)},
        {"cors": ("a.example",)}, {"cors": ("http://a.example/",)},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServeOptions(**wrong)


def test_our_errors_have_their_status() -> None:
    errors = (QueueFull("x"), RequestTooLarge("x"), EngineStopped("secret"), OptionError("x"))
    assert [as_api_error(error).status for error in errors] == [429, 400, 503, 400]
    assert "secret" not in as_api_error(errors[2]).message


def test_json_survives_half_a_surrogate_pair_and_refuses_what_json_has_not() -> None:
    assert json.loads(to_json({"a": "\ud800 深"})) == {"a": "\ud800 深"}
    with pytest.raises(ValueError):
        to_json(float("nan"))


def test_a_log_record_is_one_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.Logger(LOGGER)
    logger.addHandler(handler)
    logger.info("request", extra={"fields": {"path": '/x\n{"event": "forged"}'}})
    try:
        raise RuntimeError("gone\nfor good")
    except RuntimeError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["path"]) == ("request", "info", '/x\n{"event": "forged"}')
    assert "RuntimeError: gone" in second["traceback"]


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert address_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(OptionError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    for host, wrong in (("127.0.0.1", 70000), ("nowhere.invalid", 0)):
        with pytest.raises(OptionError):
            bind(host, wrong)


def test_which_hosts_are_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


def test_loading_that_fails_ends_the_server_with_the_error() -> None:
    def load() -> ServedModel:
        raise ModelNotFound("there is no such model")

    service = Service(load)
    server = Server(create_app(service), service, ServeOptions())
    with pytest.raises(ModelNotFound, match="no such model"):
        server.run_at(bind("127.0.0.1", 0))
    assert service.phase == "failed"
