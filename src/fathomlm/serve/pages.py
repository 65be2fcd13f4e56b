"""What a browser gets: the page in the `static` folder, and GET /docs: endpoints and the fields of their bodies as a plain
page made from the OpenAPI document. Nothing is loaded from elsewhere."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, HTMLResponse, Response

from fathomlm.serve.service import Service

STATIC = Path(__file__).parent / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing from elsewhere, nothing inline, and no frame around it."""
HEADERS = {"content-security-policy": CSP, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
LINKS = ("/v1/models", "/v1/fathom/status", "/metrics", "/health", "/ready", "/docs", "/openapi.json")
Json = Mapping[str, Any]


def add_pages(app: FastAPI, service: Service, static: Path = STATIC) -> frozenset[str]:
    """The docs; the page at `/` and its files under `/static/`, or a few links where there is none. Each file has a path of
    its own, so that nothing outside the folder can be requested and the API's paths stay the API's. Completions are never
    part of what is sent from here. Returns the paths that it added, but for the docs."""
    style = "static/style.css" if (static / "index.html").is_file() and (static / "style.css").is_file() else None

    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi(), style), headers=HEADERS)

    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)
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


def docs_page(document: Json, style: str | None = None) -> str:
    title = f"{document['info']['title']} {document['info']['version']}"
    sheet = "" if style is None else f'<link rel="stylesheet" href="{escape(style)}">'
    schemas = document.get("components", {}).get("schemas", {})
    operations = "".join(
        part
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for part in _operation(path, method, operation, schemas)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>{sheet}'
        f'<body class="docs"><main><h1>{escape(title)}</h1><p>OpenAI clients take this address with /v1 as their base URL. '
        f'The same as JSON: <a href="openapi.json">openapi.json</a>.</p>{operations}</main></body></html>'
    )


def _operation(path: str, method: str, operation: Json, schemas: Json) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
    body = operation.get("requestBody")
    if body is None:
        return
    schema = _resolved(body["content"]["application/json"]["schema"], schemas)
    rows = "".join(_rows(schema, schemas))
    yield f"<table><thead><tr><th>field</th><th>type</th><th></th></tr></thead><tbody>{rows}</tbody></table>"


def _rows(schema: Json, schemas: Json, prefix: str = "", depth: int = 2) -> Iterator[str]:
    """Fields, and those of the objects in them: `stream_options.include_usage`."""
    for name, field in schema.get("properties", {}).items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        kind, said = escape(_type(field, schemas)), escape(field.get("description", ""))
        yield f"<tr><td><code>{escape(prefix + name)}</code>{needed}</td><td>{kind}</td><td>{said}</td></tr>"
        for option in field.get("anyOf", [field]):
            inner = _resolved(option, schemas)
            if depth > 1 and "properties" in inner:
                yield from _rows(inner, schemas, f"{prefix}{name}.", depth - 1)


def _resolved(schema: Json, schemas: Json) -> Json:
    found: Json = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _type(schema: Json, schemas: Json) -> str:
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        kinds = [_type(kind, schemas) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"'{value}'" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f"{low:g} to {high:g}" if low is not None and high is not None and high < 2**31 - 1 else ""
    return f"{kind}, {bounds}" if bounds else str(kind)
