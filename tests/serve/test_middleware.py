"""Which names a server answers to, and that a page which has rebound its own name is not let in."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from fathomlm.cli.main import read_command
from fathomlm.errors import OptionError
from fathomlm.serve.app import create_app
from fathomlm.serve.middleware import AllowedHosts, host_name
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.service import Service
from serve.serving import Running


def status(name: str, path: str = "/v1/models", **options: Any) -> int:
    client = TestClient(create_app(Service(lambda: pytest.fail("it is not started")), ServeOptions(**options)))
    key = {"authorization": f"Bearer {options['api_keys'][0]}"} if "api_keys" in options else {}
    return client.get(path, headers=key | {"host": name}).status_code


OWN = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1:8000",
    "[::1]:8000",
    "127.3.2.1",
    "10.1.2.3:80",
    "[2001:db8::1]",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "evil.example@localhost",
    "",
    "[",
    "0",
]


@pytest.mark.parametrize("host", OWN)
def test_loopback_names_and_addresses_are_answered(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/v1/fathom/status", "/health"])
def test_other_names_are_not(host: str, path: str) -> None:
    assert status(host, path) == 403


def test_http_1_0_has_no_host() -> None:
    assert AllowedHosts(pytest.fail, frozenset({"localhost"}))._wrong({"headers": []}) is None  # type: ignore[arg-type]


def test_the_name_that_the_server_listens_at_is_its_own() -> None:
    assert status("gpu7.lan:8000", host="gpu7.lan") == 200
    assert status("evil.example", host="gpu7.lan") == 403


def test_everywhere_without_a_key_is_addresses_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box")
    for everywhere in ("0.0.0.0", "::"):
        assert [status(host, host=everywhere) for host in ("10.0.0.5:8000", "box:8000", "localhost")] == [200] * 3
        assert status("evil.example", host=everywhere) == 403


def test_everywhere_with_a_key_is_any_name_unless_there_is_a_list() -> None:
    """A page that has rebound its name has no key."""
    assert status("service.namespace", host="0.0.0.0", api_keys=("key",)) == 200
    assert status("service.namespace", host="0.0.0.0", api_keys=("key",), allowed_hosts=("other",)) == 403
    assert status("service.namespace", api_keys=("key",)) == 403


def test_a_list_of_names() -> None:
    names = ("api.example.org", "*.internal")
    for host, found in (
        ("API.example.org:443", 200), ("a.internal", 200), ("a.b.internal", 200), ("localhost", 200), ("10.0.0.1", 200),
        ("internal", 403), ("evilinternal", 403), ("x.api.example.org", 403),
    ):  # fmt: skip
        assert status(host, allowed_hosts=names) == found
    assert status("anything.example", allowed_hosts=("*",)) == 200


def test_the_refusal_is_an_openai_error(server: Running) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers={"host": "evil.example:80"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (403, "host_not_allowed", "permission_error")
    assert "evil.example" in error["message"]
    assert "access-control-allow-origin" not in response.headers
    with pytest.raises(openai.PermissionDeniedError):
        server.client(default_headers={"host": "evil.example"}).models.list()


def test_pages_of_other_origins_cannot_ask(server: Running) -> None:
    """CORS is off: a preflight fails, and an answer cannot be read."""
    page = {"origin": "http://evil.example"}
    asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    preflight = server.http.options("/v1/completions", headers=asked)
    assert preflight.status_code == 405
    for response in (preflight, server.http.get("/v1/models", headers=page)):
        assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
def test_what_a_page_may_send_without_a_preflight_is_refused(server: Running, kind: str) -> None:
    headers = {"origin": "http://evil.example"} | ({"content-type": kind} if kind else {})
    response = server.http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_the_option_takes_lists_and_may_be_given_again() -> None:
    args = read_command(["serve", "--allowed-hosts", "a.example, *.b.example", "--allowed-hosts", "c"])[1]
    options = args.server_options
    assert (options.allowed_hosts, options.host) == (("a.example", "*.b.example", "c"), "127.0.0.1")


@pytest.mark.parametrize("name", ["", "a.example:80", "http://a.example", "a b", "a.*", "*a"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(OptionError, match="allowed host"):
        ServeOptions(allowed_hosts=(name,))


def test_the_name_in_a_header() -> None:
    assert [host_name(one) for one in ("A.b:1", "[::1]:1", "[::1]", "a.", " a ")] == ["a.b", "::1", "::1", "a", "a"]
