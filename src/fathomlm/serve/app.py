"""The HTTP API. Everything that takes time happens in the engine's thread; what is here only waits and writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from fathomlm import __version__
from fathomlm.serve import errors
from fathomlm.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, LoadBody, TokenizeBody
from fathomlm.serve.completions import GONE, ClientGone, CompletionHandler, in_time
from fathomlm.serve.encodings import detokenize, embed, tokenize
from fathomlm.serve.errors import json_response
from fathomlm.serve.metrics import Metrics, exit_rate, mean_depth
from fathomlm.serve.middleware import ENTRY, AllowedHosts, ApiKeys, BodyLimit, RequestLog, allowed_hosts
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.pages import STATIC, add_pages
from fathomlm.serve.reading import describe, read_body, request_body
from fathomlm.serve.requests import chat_requests, completion_requests
from fathomlm.serve.responses import ChatFormat, CompletionFormat
from fathomlm.serve.responses_api import ResponsesBody, ResponsesFormat
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.service import Service, unknown_model

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
Answer = Callable[[Any, ServedModel, "Call"], Awaitable[Any]]
"""What is made of a body and the model that it names: a response, or a record."""
T = TypeVar("T")


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
    _add_posts(app, service, options, metrics)
    _add_models(app, service)
    _add_operations(app, service, metrics)
    pages = add_pages(app, service, static)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path)
    app.add_middleware(BodyLimit, most=options.max_body, timeout=options.body_timeout)
    app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=pages)
    if options.cors:
        origins = list(options.cors)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    app.add_middleware(AllowedHosts, allowed=allowed_hosts(options))
    app.add_middleware(RequestLog, metrics=metrics, paths=paths, numbered=service.replica is not None)
    return app


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way, and how long it may take."""

    request: Request
    options: ServeOptions
    deadline: float

    async def within(self, work: Awaitable[T]) -> T:
        return await in_time(self.request.receive, work, self.options, self.deadline)


def _add_posts(app: FastAPI, service: Service, options: ServeOptions, metrics: Metrics) -> None:
    async def complete(body: Any, served: ServedModel, call: Call) -> Response:
        chats, (build, form) = not isinstance(body, CompletionBody), COMPLETIONS[type(body)]
        if isinstance(body, ResponsesBody):
            body = body.chat()
        if chats:
            service.check_chats(served)
        requests = await call.within(build(body, served, options))
        entry = call.request.scope[ENTRY]
        if options.log_prompts:
            entry.prompts = body.prompts
        response = form(served, body, requests)
        await call.within(response.prepare())
        return await CompletionHandler(response, options, metrics, entry).respond(call.request.receive, call.deadline)

    async def load(body: LoadBody, served: ServedModel) -> dict[str, Any]:
        return model_record(service, served.name, served)

    def within(work: Callable[[Any, ServedModel], Awaitable[dict[str, Any]]]) -> Answer:
        async def answer(body: Any, served: ServedModel, call: Call) -> dict[str, Any]:
            return await call.within(work(body, served))

        return answer

    def add(path: str, kind: type[Any], description: str, answer: Answer) -> None:
        async def post(request: Request) -> Response:
            call = Call(request, options, asyncio.get_running_loop().time() + options.timeout)
            service.require()
            body = await read_body(request, kind)
            try:
                served = await call.within(service.find(body.model))
                request.scope[ENTRY].model = served.name
                found = await answer(body, served, call)
            except ClientGone:
                return GONE
            return found if isinstance(found, Response) else json_response(found)

        app.add_api_route(
            path, post, methods=["POST"], name=path.removeprefix("/v1").strip("/").replace("/", " "),
            description=description, responses=REFUSALS, response_model=None, openapi_extra=request_body(kind),
        )  # fmt: skip

    add("/v1/completions", CompletionBody, "Continue a prompt.", complete)
    add("/v1/chat/completions", ChatBody, "Reply in a conversation.", complete)
    add("/v1/responses", ResponsesBody, "Reply in a conversation, in OpenAI's newer form.", complete)
    add("/tokenize", TokenizeBody, "The tokens of a prompt or a conversation.", within(tokenize))
    add("/detokenize", DetokenizeBody, "The text of tokens, special ones included.", within(detokenize))
    add("/v1/embeddings", EmbeddingBody, "Embed texts.", within(embed))
    now = "Load a model now, before the first request that names it. Returns when it is ready."
    add("/v1/fathom/load", LoadBody, now, within(load))
    describe(app, *COMPLETIONS, TokenizeBody, DetokenizeBody, EmbeddingBody, LoadBody)


COMPLETIONS: dict[type[Any], tuple[Callable[..., Awaitable[Any]], type[Any]]] = {
    CompletionBody: (completion_requests, CompletionFormat),
    ChatBody: (chat_requests, ChatFormat),
    ResponsesBody: (chat_requests, ResponsesFormat),
}
"""What a body becomes: the engine's requests, and the form of what comes of them."""


def model_record(service: Service, name: str, served: ServedModel | None) -> dict[str, Any]:
    """What a model can do is known from when it has been loaded."""
    found = {
        "id": name, "object": "model", "created": service.begun, "owned_by": "fathomlm", "max_model_len": None,
        "endpoints": None, "loaded": served is not None,
    }  # fmt: skip
    if served is None:
        return found | {"download": service.catalog.offers[name].download()}
    return found | {
        "created": served.created, "max_model_len": served.max_length, "endpoints": served.endpoints, "download": None
    }  # fmt: skip


def _add_models(app: FastAPI, service: Service) -> None:
    def records() -> dict[str, dict[str, Any]]:
        own = {} if service.served is None else {service.served.name: service.served}
        offered = {name: service.catalog.loaded.get(name) for name in service.catalog.offers}
        return {name: model_record(service, name, served) for name, served in (own | offered).items()}

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
            phase = "loading" if (name or "") in service.catalog.loading else "not loaded"
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
