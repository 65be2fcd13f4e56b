"""Whatever a client sends, the server answers, and never with a fault of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from fathomlm.serve.options import ServeOptions
from serve.serving import Running, running, until

OPERATIONS = [
    ("/v1/completions", "POST"), ("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/v1/models/{model}", "GET"),
    ("/v1/fathom/status", "GET"), ("/v1/fathom/load", "POST"), ("/health", "GET"), ("/ready", "GET"), ("/metrics", "GET"),
    ("/tokenize", "POST"), ("/detokenize", "POST"), ("/v1/embeddings", "POST"), ("/v1/responses", "POST"),
]  # fmt: skip


@pytest.fixture(scope="module")
def quick(tiny_model: Any, one_thread: None) -> Iterator[Running]:
    with running(tiny_model, ServeOptions(max_tokens=2, max_choices=4)) as found:
        yield found


def test_the_document_names_every_operation(quick: Running) -> None:
    paths = quick.http.get("/openapi.json").json()["paths"]
    assert {(path, method.upper()) for path, methods in paths.items() for method in methods} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*one, "positive") for one in OPERATIONS] + [(*one, "negative") for one in OPERATIONS if one[1] == "POST"],
)
def test_no_request_is_the_servers_fault(quick: Running, path: str, method: str, mode: str) -> None:
    schema: Any = schemathesis.openapi.from_dict(quick.http.get("/openapi.json").json())
    operation = schema[path][method]
    many = 7 if method == "POST" else 3
    statuses = set()

    @settings(max_examples=many, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: Any) -> None:
        response = case.call(base_url=quick.url)
        statuses.add(response.status_code)
        assert response.status_code < 500
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert statuses <= {200, 400, 404, 405}
    until(quick.free)
