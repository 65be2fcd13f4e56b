"""What a browser gets at `/`: the page in the package's `static` folder, or a few links where there is none.

The page is at `/` and its files are under `/static/`. Each has a path of its own, so that nothing outside the folder can be
asked for and the API's paths stay the API's. Texts that a model made are never part of what is sent from here.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response

from fathomlm.serve.served import Service

STATIC = Path(__file__).parent / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, nothing inline, and no frame around it."""
HEADERS = {"content-security-policy": CSP, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
LINKS = ("/v1/models", "/v1/fathom/status", "/metrics", "/health", "/ready", "/openapi.json")


def add_page(app: FastAPI, service: Service, static: Path = STATIC) -> frozenset[str]:
    """Returns the paths that it added."""
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
    name = "no model yet" if service.offer is None else service.offer.name
    items = "".join(f'<li><a href="{escape(link)}">{escape(link)}</a></li>' for link in LINKS)
    body = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>FathomLM</title><h1>FathomLM</h1>'
        f"<p>{escape(name)}: {escape(service.phase)}. OpenAI clients take this address with /v1 as their base URL.</p>"
        f"<ul>{items}</ul></html>"
    )
    return HTMLResponse(body, headers=HEADERS)
