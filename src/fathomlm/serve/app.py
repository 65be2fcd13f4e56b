"""The HTTP API. Everything that takes time happens in the engine's thread; what is here only waits and writes."""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, Response

from fathomlm import __version__
from fathomlm.engine.request import Request as EngineRequest
from fathomlm.serve import errors
from fathomlm.serve.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadBody,
    RequestBody,
    TokenizeBody,
    describe,
    read_body,
    request_body,
)
from fathomlm.serve.completions import GONE, ClientGone, CompletionHandler, in_time
from fathomlm.serve.docs_page import add_docs
from fathomlm.serve.embeddings import add_embeddings
from fathomlm.serve.errors import json_response
from fathomlm.serve.metrics import Metrics, exit_rate, mean_depth
from fathomlm.serve.middleware import ENTRY, AllowedHosts, ApiKeys, BodyLimit, RequestLog, allowed_hosts
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.requests import chat_requests, completion_requests
from fathomlm.serve.responses import ChatFormat, CompletionFormat, ResponseFormat
from fathomlm.serve.responses_api import ResponsesBody, ResponsesFormat, read_responses
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.service import Service, unknown_model
from fathomlm.serve.tokenize import add_tokenize

STATIC = Path(__file__).parent / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, nothing inline, and no frame around it."""
HEADERS = {"content-security-policy": CSP, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
LINKS = ("/v1/models", "/v1/fathom/status", "/metrics", "/health", "/ready", "/docs", "/openapi.json")
PATHS = frozenset(
    {
        "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/fathom/status", "/v1/fathom/load", "/health", "/ready",
        "/metrics", "/tokenize", "/detokenize", "/docs", "/v1/embeddings", "/v1/responses",
    }
)  # fmt: skip
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": what}
    for code, what in {
        400: "The request is invalid; `param` names the field", 401: "API key missing or wrong",
        403: "Host not allowed",
        404: "No such model",
        408: "The body did not arrive in time", 413: "The body is too large", 429: "The queue is full",
        500: "The engine failed",
        503: "Loading, restarting, draining or failed", 504: "The request timed out",
    }.items()
}  # fmt: skip
Body = TypeVar("Body", bound=RequestBody)


def create_app(service: Service, options: ServeOptions | None = None, static: Path = STATIC) -> FastAPI:
    """An ASGI application. It loads the model at startup and frees it at shutdown."""
    options = options or ServeOptions()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        service.start()
        if service.replica is not None:
            await service.loaded()
        yield
        if not service.abandoned:
            await service.close()

    app = FastAPI(title="FathomLM", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    metrics = Metrics(service)
    errors.install(app)
    _add_completions(app, service, options, metrics)
    add_tokenize(app, service, options, REFUSALS)
    add_embeddings(app, service, options, REFUSALS)
    _add_models(app, service, options)
    _add_operations(app, service, metrics)
    describe(app, CompletionBody, ChatBody, LoadBody, TokenizeBody, DetokenizeBody, EmbeddingBody, ResponsesBody)
    paths = add_page(app, service, static)
    add_docs(app, HEADERS, "static/style.css" if "/static/style.css" in paths else None)
    app.add_middleware(BodyLimit, most=options.max_body, timeout=options.body_timeout)
    app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=paths)
    if options.cors:
        origins = list(options.cors)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    app.add_middleware(AllowedHosts, allowed=allowed_hosts(options))
    app.add_middleware(RequestLog, metrics=metrics, paths=PATHS | paths, numbered=service.replica is not None)
    return app


def _add_completions(app: FastAPI, service: Service, options: ServeOptions, metrics: Metrics) -> None:
    async def respond(
        request: Request,
        read: Callable[[Request], Awaitable[Body]],
        build: Callable[[Body, ServedModel, ServeOptions], Awaitable[list[EngineRequest]]],
        response: type[ResponseFormat],
        endpoint: str = "/v1/chat/completions",
    ) -> Response:
        deadline = asyncio.get_running_loop().time() + options.timeout
        service.require()
        body, entry = await read(request), request.scope[ENTRY]
        try:
            served = await in_time(request.receive, service.find(body.model), options, deadline)
            service.check_endpoint(served, endpoint)
            requests = await in_time(request.receive, build(body, served, options), options, deadline)
        except ClientGone:
            return GONE
        entry.model = served.name
        if options.log_prompts:
            entry.prompts = body.prompts
        form = response(served, body, requests)
        try:
            await in_time(request.receive, form.prepare(), options, deadline)
        except ClientGone:
            return GONE
        handler = CompletionHandler(form, options, metrics, entry)
        return await handler.respond(request.receive, deadline)

    @app.post(
        "/v1/completions", responses=REFUSALS, response_model=None, openapi_extra=request_body(CompletionBody)
    )  # fmt: skip
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await respond(
            request, partial(read_body, model=CompletionBody), completion_requests, CompletionFormat, "/v1/completions"
        )

    @app.post(
        "/v1/chat/completions", responses=REFUSALS, response_model=None, openapi_extra=request_body(ChatBody)
    )  # fmt: skip
    async def chat(request: Request) -> Response:
        """Reply in a conversation."""
        return await respond(request, partial(read_body, model=ChatBody), chat_requests, ChatFormat)

    @app.post(
        "/v1/responses", responses=REFUSALS, response_model=None, openapi_extra=request_body(ResponsesBody)
    )  # fmt: skip
    async def responses(request: Request) -> Response:
        """Reply in a conversation, in OpenAI's newer form."""
        return await respond(request, read_responses, chat_requests, ResponsesFormat)


def _add_models(app: FastAPI, service: Service, options: ServeOptions) -> None:
    catalog, begun = service.catalog, int(time.time())

    def record(name: str, served: ServedModel | None) -> dict[str, Any]:
        """What a model can do is known from when it has been loaded."""
        found = {
            "id": name, "object": "model", "created": begun, "owned_by": "fathomlm", "max_model_len": None,
            "endpoints": None, "loaded": served is not None,
        }  # fmt: skip
        if served is None:
            return found | {"download": catalog.offers[name].download()}
        return found | {
            "created": served.created, "max_model_len": served.max_length, "endpoints": served.endpoints, "download": None
        }  # fmt: skip

    def records() -> dict[str, dict[str, Any]]:
        own = {} if service.served is None else {service.served.name: service.served}
        offered = {name: catalog.loaded.get(name) for name in catalog.offers}
        return {name: record(name, served) for name, served in (own | offered).items()}

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The server's own model, once it is loaded, and those that are loaded when a request names them."""
        return json_response({"object": "list", "data": list(records().values())})

    @app.get("/v1/models/{model:path}", responses={404: {"description": "No such model"}}, response_model=None)
    async def model(model: str) -> Response:
        found = records()
        if model not in found:
            raise unknown_model(model, found)
        return json_response(found[model])

    @app.post("/v1/fathom/load", response_model=None, openapi_extra=request_body(LoadBody))
    async def load(request: Request) -> Response:
        """Load a model now, before the first request that names it. Returns when it is ready."""
        deadline = asyncio.get_running_loop().time() + options.timeout
        body = await read_body(request, LoadBody)
        try:
            served = await in_time(request.receive, service.find(body.model), options, deadline)
        except ClientGone:
            return GONE
        return json_response(record(served.name, served))


def _add_operations(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the process answers."""
        return json_response({"status": "ok"})

    @app.get("/ready", responses={503: {"description": "Not now"}}, response_model=None)
    async def ready() -> Response:
        """Whether requests are accepted: not while the model is loading, the engine is being rebuilt or the server is
        draining, nor after the engine has failed permanently."""
        phase = service.phase
        return json_response({"status": phase}, 200 if phase == "ready" else 503)

    @app.get("/metrics", response_model=None)
    async def measured() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/fathom/status", response_model=None)
    async def status(model: str | None = None) -> Response:
        """The plan, the state of the engine, and the depths of tokens so far, of the server's own model or another."""
        return json_response(_status(service, metrics, model))


def _status(service: Service, metrics: Metrics, name: str | None) -> dict[str, Any]:
    served = service.served
    if name is not None and name in service.catalog.offers:
        served = service.catalog.loaded.get(name)
    elif name is not None and served is not None and name != served.name:
        raise unknown_model(name, [served.name, *service.catalog.offers])
    if served is None:
        phase: str = service.phase
        if phase == "ready":  # the server's own is there, the one that was asked for is not
            phase = "loading" if service.catalog.is_loading(name or "") else "not loaded"
        return {"status": phase, "version": __version__, "model": name, "replica": service.replica}
    found = served.engine.status()
    counters = found.counters
    pools = zip(counters.pages_used, counters.pages_cached, served.pool_pages, strict=True)
    return {
        "status": service.phase,
        "version": __version__,
        "model": served.name,
        "replica": service.replica,
        "endpoints": served.endpoints,
        **served.facts,
        "decode": served.decodes,
        "threshold": served.threshold,
        "failure": found.failure,
        "restarts": found.restarts,
        "uptime": round(found.uptime, 3),
        "tokens_per_second": round(found.tokens_per_second, 3),
        "in_flight": found.in_flight,
        "queued": counters.queued,
        "prefilling": counters.prefilling,
        "running": counters.running,
        "preemptions": counters.preemptions,
        "prefix_hits": counters.prefix_hits,
        "evictions": counters.evictions,
        "totals": asdict(found.totals),
        "kv": [{"used": used, "cached": cached, "pages": pages} for used, cached, pages in pools],
        "depths": {str(depth): count for depth, count in sorted(metrics.depths[served.name].items())},
        "mean_depth": mean_depth(found),
        "exit_rate": exit_rate(found),
    }


def add_page(app: FastAPI, service: Service, static: Path = STATIC) -> frozenset[str]:
    """What a browser gets: the page in the package's `static` folder at `/` and its files under `/static/`, or a few links
    where there is none. Each file has a path of its own, so that nothing outside the folder can be requested and the API's
    paths stay the API's. Completions are never part of what is sent from here. Returns the paths that it added."""
    if not (static / "index.html").is_file():
        app.add_api_route("/", lambda: _links(service), methods=["GET", "HEAD"], include_in_schema=False)
        return frozenset({"/"})
    files = {f"/static/{file.relative_to(static).as_posix()}": file for file in sorted(static.rglob("*")) if file.is_file()}
    files["/"] = static / "index.html"
    for path, file in files.items():
        app.add_api_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)
    return frozenset(files)


def _sender(file: Path) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return FileResponse(file, media_type=kind, headers=HEADERS)

    return send


def _links(service: Service) -> Response:
    name = "no model yet" if service.served is None else service.served.name
    items = "".join(f'<li><a href="{escape(link)}">{escape(link)}</a></li>' for link in LINKS)
    body = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>FathomLM</title><h1>FathomLM</h1>'
        f"<p>{escape(name)}: {escape(service.phase)}. OpenAI clients take this address with /v1 as their base URL.</p>"
        f"<ul>{items}</ul></html>"
    )
    return HTMLResponse(body, headers=HEADERS)
