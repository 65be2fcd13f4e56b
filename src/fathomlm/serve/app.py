"""The HTTP API. Everything that takes time happens in the engine's thread; what is here only waits and writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from fathomlm import __version__
from fathomlm.serve import errors
from fathomlm.serve.answers import Answer, ChatAnswer, CompletionAnswer
from fathomlm.serve.asking import Order, read_chat, read_completion
from fathomlm.serve.bodies import Asked, describe, read_body, request_body
from fathomlm.serve.choices import ClientGone, unless_gone
from fathomlm.serve.completing import GONE, Completing, late
from fathomlm.serve.errors import ApiError, json_response
from fathomlm.serve.guards import ENTRY, BodyLimit, Journal, Keys
from fathomlm.serve.hosts import Hosts, allowed_hosts
from fathomlm.serve.metrics import Metrics, exit_rate, mean_depth
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.page import STATIC, add_page
from fathomlm.serve.schemas import ChatAsked, CompletionAsked
from fathomlm.serve.served import Offer, Service

PATHS = frozenset(
    {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/fathom/status", "/health", "/ready", "/metrics"}
)


def create_app(service: Service, options: ServeOptions | None = None, static: Path = STATIC) -> FastAPI:
    """An ASGI application. It loads the model when it starts, and lets go of it when it ends."""
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
    _add_models(app, service)
    _add_operations(app, service, metrics)
    paths = add_page(app, service, static)
    app.add_middleware(BodyLimit, most=options.max_body, timeout=options.body_timeout)
    app.add_middleware(Keys, keys=options.api_keys, open_paths=paths)
    if options.cors:
        origins = list(options.cors)
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    app.add_middleware(Hosts, allowed=allowed_hosts(options))
    app.add_middleware(Journal, metrics=metrics, paths=PATHS | paths, numbered=service.replica is not None)
    return app


def _add_completions(app: FastAPI, service: Service, options: ServeOptions, metrics: Metrics) -> None:
    refusals: dict[int | str, dict[str, Any]] = {
        code: {"description": what}
        for code, what in {
            400: "The request is wrong; `param` says where", 401: "No key, or a wrong one", 403: "Not this server's name",
            404: "No such model",
            408: "The body did not arrive", 413: "The body is too long", 429: "The queue is full", 500: "The engine failed",
            503: "Loading, restarting, draining or failed", 504: "It took too long",
        }.items()
    }  # fmt: skip

    describe(app, CompletionAsked, ChatAsked)

    async def respond(
        request: Request,
        body: type[Asked],
        read: Callable[[Asked, Offer, ServeOptions], Awaitable[Order]],
        answer: Callable[[Offer, Order], Answer],
    ) -> Response:
        deadline = asyncio.get_running_loop().time() + options.timeout
        offer, asked = service.require(), await read_body(request, body)
        order = await _reading(request, read(asked, offer, options), options, deadline)
        if order is None:
            return GONE
        work = Completing(answer(offer, order), options, metrics, request.scope[ENTRY])
        return await work.respond(request.receive, deadline)

    @app.post(
        "/v1/completions", responses=refusals, response_model=None, openapi_extra=request_body(CompletionAsked)
    )  # fmt: skip
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await respond(request, CompletionAsked, read_completion, CompletionAnswer)

    @app.post(
        "/v1/chat/completions", responses=refusals, response_model=None, openapi_extra=request_body(ChatAsked)
    )  # fmt: skip
    async def chat(request: Request) -> Response:
        """Answer in a conversation."""
        return await respond(request, ChatAsked, read_chat, ChatAnswer)


def _add_models(app: FastAPI, service: Service) -> None:
    def record(offer: Offer) -> dict[str, Any]:
        return {
            "id": offer.name, "object": "model", "created": offer.created, "owned_by": "fathomlm",
            "max_model_len": offer.max_length,
        }  # fmt: skip

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The model that is served; none while it is being loaded."""
        offer = service.offer
        return json_response({"object": "list", "data": [] if offer is None else [record(offer)]})

    @app.get("/v1/models/{model:path}", responses={404: {"description": "No such model"}}, response_model=None)
    async def model(model: str) -> Response:
        offer = service.offer
        if offer is None or model != offer.name:
            raise ApiError(404, f"the model '{model}' does not exist here", param="model", code="model_not_found")
        return json_response(record(offer))


def _add_operations(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the process answers."""
        return json_response({"status": "ok"})

    @app.get("/ready", responses={503: {"description": "Not now"}}, response_model=None)
    async def ready() -> Response:
        """Whether requests are taken: not while the model is loaded, the engine built again or the
        last texts finished, nor after the engine has failed for good."""
        phase = service.phase
        return json_response({"status": phase}, 200 if phase == "ready" else 503)

    @app.get("/metrics", response_model=None)
    async def measured() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/fathom/status", response_model=None)
    async def status() -> Response:
        """The plan, where the engine stands, and how deep tokens went."""
        return json_response(_status(service, metrics))


def _status(service: Service, metrics: Metrics) -> dict[str, Any]:
    offer = service.offer
    if offer is None:
        return {"status": service.phase, "version": __version__, "model": None, "replica": service.replica}
    found = offer.front.status()
    counters = found.counters
    pools = zip(counters.pages_used, counters.pages_cached, offer.pool_pages, strict=True)
    return {
        "status": service.phase,
        "version": __version__,
        "model": offer.name,
        "replica": service.replica,
        **offer.facts,
        "decode": offer.decodes,
        "threshold": offer.threshold,
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
        "depths": {str(depth): count for depth, count in sorted(metrics.depths.items())},
        "mean_depth": mean_depth(found),
        "exit_rate": exit_rate(found),
    }


async def _reading(request: Request, work: Awaitable[Order], options: ServeOptions, deadline: float) -> Order | None:
    """A prompt may take a while to read; None where nobody waits for it any more."""
    try:
        async with asyncio.timeout_at(deadline):
            return await unless_gone(request.receive, work)
    except ClientGone:
        return None
    except TimeoutError:
        raise late(options) from None
