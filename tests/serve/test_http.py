"""Shapes, limits and headers, seen without a client library."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from decode.exit_models import build, exit_layer, exiting, mixing_threshold
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.engine import Engine
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.serve.app import create_app
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.service import Service
from model.route.small import model_of, routed
from serve.serving import NAME, SMALL, Running, events, running, until

pytestmark = pytest.mark.usefixtures("one_thread")

ASKED: dict[str, Any] = {"model": NAME, "prompt": "the fox", "temperature": 0, "max_tokens": 6}
LOCAL = "http://127.0.0.1"
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>\r\ndata: [DONE]\n\n')


def samples(running: Running) -> dict[tuple[str, tuple[str, ...]], float]:
    text = running.http.get("/metrics").text
    found = text_string_to_metric_families(text)
    return {(one.name, tuple(one.labels.values())): one.value for family in found for one in family.samples}


def error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


def test_every_answer_has_an_id_and_cannot_be_sniffed(server: Running) -> None:
    responses = [server.http.get("/health"), server.post("completions", **ASKED), server.http.get("/nothing")]
    assert [response.status_code for response in responses] == [200, 200, 404]
    assert len({response.headers["x-request-id"] for response in responses}) == 3
    assert {response.headers["x-content-type-options"] for response in responses} == {"nosniff"}


def test_a_stream_is_events_and_ends_with_done(server: Running) -> None:
    response = server.post("completions", stream=True, **ASKED)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = events(response)
    assert last == "[DONE]"
    assert all(set(chunk) == {"id", "object", "created", "model", "choices"} for chunk in chunks)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b"", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"prompt": "x", "fathom": {"\\ud800": 1}}', "application/json"),
        (b"\xff\xfe", "application/json"),
        (json.dumps(ASKED).encode(), "text/plain"),  # what a foreign page may send without asking first
        (json.dumps(ASKED).encode(), "application/x-www-form-urlencoded"),
    ],
    ids=range(11),
)
def test_what_is_no_request_is_a_400(server: Running, content: bytes, kind: str) -> None:
    response = server.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert response.status_code == 400
    assert error(response)["message"]


def test_half_a_character_in_a_name_is_a_400(server: Running) -> None:
    content = b'{"prompt": "x", "model": "\\ud800"}'
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, error(response)["param"]) == (400, "model")


def test_other_paths_and_methods(server: Running) -> None:
    missing, method = server.http.get("/v1/nothing"), server.http.get("/v1/completions")
    assert (missing.status_code, method.status_code) == (404, 405)
    assert (error(missing)["code"], error(method)["code"]) == ("not_found", "method_not_allowed")
    assert method.headers["allow"] == "POST"


def test_bodies_have_a_limit_with_and_without_a_length(tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(max_body=2000)) as small:
        fits = small.post("completions", **ASKED, user="x" * 1500)
        long = small.post("completions", **ASKED, user="x" * 2000)
        chunked = small.http.post("/v1/completions", content=iter([b"x" * 1500] * 3))
        assert (fits.status_code, long.status_code, chunked.status_code) == (200, 413, 413)
        assert error(long)["code"] == "body_too_large"


def test_a_body_that_does_not_come_is_not_waited_for(tiny_model: Any) -> None:
    import socket

    with running(tiny_model, ServeOptions(body_timeout=0.2)) as strict:
        host, port = strict.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10\r\n\r\n{")
            assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_max_tokens_has_a_limit_of_the_servers(tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(max_tokens=4)) as strict:
        assert error(strict.post("completions", **ASKED))["param"] == "max_tokens"
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
        assert strict.post("chat/completions", **chat).json()["usage"]["completion_tokens"] == 4
        assert error(strict.post("chat/completions", **chat, max_completion_tokens=5))["param"] == "max_completion_tokens"


def test_cors_is_off_unless_asked_for(server: Running, tiny_model: Any) -> None:
    preflight = {"origin": "http://a.example", "access-control-request-method": "POST"}
    asked = {"method": "OPTIONS", "url": "/v1/completions", "headers": preflight}
    assert "access-control-allow-origin" not in server.http.request(**asked).headers
    assert "access-control-allow-origin" not in server.http.get("/health", headers=preflight).headers
    with running(tiny_model, ServeOptions(cors=("http://a.example",), api_keys=("key",))) as other:
        assert other.http.request(**asked).headers["access-control-allow-origin"] == "http://a.example"
        asked["headers"] = preflight | {"origin": "http://b.example"}
        assert "access-control-allow-origin" not in other.http.request(**asked).headers


def test_without_a_page_there_are_links_under_a_strict_policy(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    service = Service(lambda: pytest.fail("it is not started"))
    response = TestClient(create_app(service, static=tmp_path), base_url=LOCAL).get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert '<a href="/v1/models">' in response.text


def test_a_page_in_the_package_is_served_file_by_file(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    static = tmp_path / "static"
    (static / "parts").mkdir(parents=True)
    (static / "index.html").write_text("<p>page")
    (static / "parts" / "app.js").write_text("0")
    (tmp_path / "secret").write_text("secret")
    service = Service(lambda: pytest.fail("it is not started"))
    client = TestClient(create_app(service, ServeOptions(api_keys=("key",)), static), base_url=LOCAL)
    page, script = client.get("/"), client.get("/static/parts/app.js")
    assert page.text == client.get("/static/index.html").text == "<p>page"
    assert script.headers["content-type"].startswith("text/javascript")
    assert all("script-src 'self'" in one.headers["content-security-policy"] for one in (page, script))
    for path in ("/static/../secret", "/static/%2e%2e/secret", "/static/..%2f..%2fsecret"):
        assert "secret" not in client.get(path).text.replace(path, "").replace("secret:", "")
    assert client.get("/v1/completions", headers={"authorization": "Bearer key"}).status_code == 405


def test_ready_is_red_until_the_model_is_there() -> None:
    from starlette.testclient import TestClient

    service = Service(lambda: pytest.fail("it is not started"))
    client = TestClient(create_app(service), base_url=LOCAL)
    assert client.get("/health").status_code == 200
    assert (client.get("/ready").status_code, client.get("/ready").json()) == (503, {"status": "loading"})
    refused = client.post("/v1/completions", json=ASKED)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert client.get("/v1/models").json()["data"] == []
    assert client.get("/v1/fathom/status").json()["status"] == "loading"
    assert "fathomlm_ready 0.0" in client.get("/metrics").text


def test_metrics_count(tiny_model: Any) -> None:
    with running(tiny_model) as fresh:
        before = samples(fresh)
        assert before["fathomlm_ready", ()] == 1
        fresh.post("completions", **ASKED, n=2)
        until(fresh.free)
        after = samples(fresh)
    assert after["fathomlm_tokens_total", ()] == 12
    assert after["fathomlm_completions_total", ("length",)] == 2
    assert after["fathomlm_time_to_first_token_seconds_count", ()] == 2
    assert after["fathomlm_inter_token_seconds_count", ()] == 10
    assert after["fathomlm_http_requests_total", ("/v1/completions", "200")] == 1
    assert after["fathomlm_prompt_tokens_total", ()] == len(tiny_model.tokenizer("the fox")["input_ids"])
    assert (after["fathomlm_queued", ()], after["fathomlm_running", ()]) == (0, 0)
    assert after["fathomlm_kv_pages_used", ("0",)] == after["fathomlm_kv_pages_cached", ("0",)]
    assert after["fathomlm_kv_pages_total", ("0",)] > after["fathomlm_kv_pages_used", ("0",)] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_depths_and_confidences_of_exits(stream: bool) -> None:
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"))
    prompt = [5, 9, 33, 7]
    wanted = Engine(build("vanilla"), exiting=setting, **SMALL).generate([prompt], max_new_tokens=12)[0]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "fathom": {"depths": True}, "stream": stream}
    with running(build("vanilla"), exiting=setting) as early:
        response = early.post("completions", **body)
        told = events(response)[:-1] if stream else [response.json()]
        parts = [chunk["choices"][0]["fathom"] for chunk in told if "fathom" in chunk["choices"][0]]
        plain = early.post("completions", **(body | {"stream": False, "fathom": {}})).json()
        status = early.http.get("/v1/fathom/status").json()
    assert wanted.depths is not None
    assert len(set(wanted.depths)) == 2
    assert tuple(depth for part in parts for depth in part["depths"]) == wanted.depths
    assert tuple(sure for part in parts for sure in part["confidences"]) == wanted.confidences
    assert "fathom" not in plain["choices"][0]
    assert (status["kind"], status["threshold"]) == ("exits", mixing_threshold("vanilla"))
    assert status["exit_layer"] == exit_layer("vanilla")
    assert sum(status["depths"].values()) == 24
    assert status["mean_depth"] == pytest.approx(sum(wanted.depths) / 12)
    assert 0 < status["exit_rate"] < 1


def test_a_threshold_for_one_request(server: Running) -> None:
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"))
    body: dict[str, Any] = {"prompt": [5, 9, 33, 7], "temperature": 0, "max_tokens": 6}
    with running(build("vanilla"), exiting=setting) as early:
        never, always = (
            early.post("completions", **body, fathom={"depths": True, "threshold": threshold}).json()["choices"][0]["fathom"]
            for threshold in (1, 0)
        )
        same = early.post("completions", **body, fathom={"depths": True, "threshold": [1]}).json()["choices"][0]["fathom"]
        assert same == never
        few = error(early.post("completions", **body, fathom={"threshold": [0.5, 0.5]}))
        assert (few["param"], "one for each of 1 exit" in few["message"]) == ("fathom.threshold", True)
        assert error(early.post("completions", **body, fathom={"threshold": [2]}))["param"].startswith("fathom.threshold")
    assert set(never["depths"]) == {6}
    assert set(always["depths"]) == {exit_layer("vanilla")}
    assert error(server.post("completions", **ASKED, fathom={"threshold": 0.5}))["param"] == "fathom.threshold"


def test_the_full_depth_for_one_request(server: Running) -> None:
    setting = exiting("vanilla", "parallel", threshold=mixing_threshold("vanilla"))
    body: dict[str, Any] = {"prompt": [5, 9, 33, 7], "temperature": 0, "max_tokens": 12}
    right = generate(build("vanilla"), [body["prompt"]], max_new_tokens=12)[0].tokens
    with running(build("vanilla"), exiting=setting) as early:

        def depths(**fathom: Any) -> set[int]:
            reply = early.post("completions", **body, logprobs=0, fathom={"depths": True} | fathom).json()["choices"][0]
            told[fathom.get("decode")] = reply["logprobs"]["tokens"]
            return set(reply["fathom"]["depths"])

        told: dict[Any, list[str]] = {}
        assert depths(decode="full") == {6}
        assert depths() == depths(decode="parallel") == {exit_layer("vanilla"), 6}
        assert told["full"] == [f"token_id:{token}" for token in right]
        assert told["parallel"] == told[None]
        assert early.http.get("/v1/fathom/status").json()["decode"] == ["full", "parallel"]
        for wrong, param, says in (
            ({"decode": "state-copy"}, "fathom.decode", "'full' or 'parallel'"),
            ({"decode": "static"}, "fathom.decode", "threshold 0"),
            ({"decode": "fast"}, "fathom.decode", "'full' or 'parallel'"),
            ({"decode": "full", "threshold": 0.5}, "fathom.threshold", "'full'"),
            ({"decode": 1}, "fathom.decode", "string"),
        ):
            refused = early.post("completions", **body, fathom=wrong)
            assert (refused.status_code, error(refused)["param"]) == (400, param)
            assert says in error(refused)["message"]
    assert server.post("completions", **ASKED, fathom={"decode": "full"}).status_code == 200
    refused = error(server.post("completions", **ASKED, fathom={"decode": "parallel"}))
    assert refused["message"] == "fathom.decode must be 'full' on this server, which was not set up for 'parallel'"


def test_a_server_on_which_every_token_exits_has_no_full_depth() -> None:
    with running(build("vanilla"), exiting=exiting("vanilla", "static")) as shallow:
        assert shallow.http.get("/v1/fathom/status").json()["decode"] == ["static"]
        body: dict[str, Any] = {"prompt": [5, 9], "temperature": 0, "max_tokens": 3}
        own = shallow.post("completions", **body, fathom={"depths": True, "decode": "static"}).json()["choices"][0]
        assert set(own["fathom"]["depths"]) == {exit_layer("vanilla")}
        refused = error(shallow.post("completions", **body, fathom={"decode": "full"}))
        assert refused["message"] == "fathom.decode must be 'static' on this server, which was not set up for 'full'"


def test_too_many_prompts_are_counted_not_misread(server: Running) -> None:
    """Of all that a prompt may be, the message is about what this one is."""
    refused = server.post("completions", **ASKED | {"prompt": ["x"] * 4097})
    assert refused.status_code == 400
    assert error(refused)["param"] == "prompt"
    assert "4096" in error(refused)["message"]


def test_the_full_depth_of_a_routed_model_is_what_its_server_allows() -> None:
    model = model_of(routed())
    body: dict[str, Any] = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 8}
    with running(model, max_depth=2, max_length=32) as shallow:
        full, plain = (
            shallow.post("completions", **body, fathom={"depths": True} | more).json()["choices"][0]["fathom"]["depths"]
            for more in ({"decode": "full"}, {})
        )
        clash = shallow.post("completions", **body, fathom={"decode": "full", "max_depth": 1})
    assert full == plain
    assert max(full) == 2
    assert (clash.status_code, error(clash)["param"]) == (400, "fathom.max_depth")


def test_max_depth_of_a_routed_model() -> None:
    model = model_of(routed())
    body: dict[str, Any] = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 8}
    with running(model, max_depth=2, max_length=32) as shallow:
        depths = [
            shallow.post("completions", **body, fathom={"depths": True, "max_depth": most}).json()["choices"][0]["fathom"]
            for most in (1, 2, None)
        ]
        refused = shallow.post("completions", **body, fathom={"max_depth": 3})
        assert shallow.http.get("/v1/fathom/status").json()["max_depth"] == 2
    assert [max(one["depths"]) for one in depths] == [1, 2, 2]
    assert all(one["confidences"] is None for one in depths)
    assert (refused.status_code, error(refused)["param"]) == (400, "fathom.max_depth")


def test_a_model_of_one_depth_has_none_to_tell(server: Running) -> None:
    choice = server.post("completions", **ASKED, fathom={"depths": True}).json()["choices"][0]
    assert choice["fathom"] == {"depths": None, "confidences": None}


@pytest.fixture(scope="module")
def hostile_model(tiny_tokenizer: Any) -> Any:
    """A model that says nothing but markup."""
    from copy import deepcopy

    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(list(HOSTILE))
    shape = {"layers": 1, "hidden": 16, "intermediate": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "context": 64}
    architecture = Architecture(family="llama", vocab=len(tokenizer), tied_embeddings=False, **shape)  # type: ignore[arg-type]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    model = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.vanilla(1), dtype=torch.float32, **ids))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
        head = next(parameter for name, parameter in model.named_parameters() if name.endswith("head.weight"))
        head.zero_()
        head[-1].fill_(1.0)
        head[-2] = -head[-1]  # one of the two is above zero, whatever the state is
    model.tokenizer = tokenizer
    return model.eval()


@pytest.mark.parametrize("stream", [False, True])
def test_markup_from_a_model_is_text_in_json(hostile_model: Any, stream: bool) -> None:
    right = generate(hostile_model, ["dog"], max_new_tokens=6)[0].text
    assert any(text in right for text in HOSTILE)
    body = {"prompt": "dog", "temperature": 0, "max_tokens": 6, "stream": stream}
    with running(hostile_model, max_length=64) as hostile:
        response = hostile.post("completions", **body)
    found = events(response)[:-1] if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == right
    assert "html" not in response.headers["content-type"]


def test_logs_hold_no_text_unless_asked(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret = "the lazy secret"
    for options, told in ((ServeOptions(), False), (ServeOptions(log_prompts=True), True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "fathomlm.serve"), running(tiny_model, options) as logged:
            text = logged.post("completions", **(ASKED | {"prompt": secret})).json()["choices"][0]["text"]
            logged.post("completions", prompt=secret, temperature=secret)
            chat = [{"role": "user", "content": secret}]
            logged.post("chat/completions", messages=chat, max_tokens=3, stream=True, temperature=0)
        lines = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
        assert [line["status"] for line in lines] == [200, 400, 200]
        assert (lines[0]["completion_tokens"], lines[0]["finish"], lines[2]["stream"]) == (6, ["length"], True)
        assert (secret in str(lines)) == told
        assert (lines[0].get("completions") == [text]) == told
