"""GET /docs: the endpoints and the fields of their bodies as a plain page, made from the OpenAPI document. Nothing is loaded
from elsewhere and no script runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

Json = Mapping[str, Any]


def add_docs(app: FastAPI, headers: Mapping[str, str], style: str | None) -> None:
    """`style` is the path of a style sheet."""

    async def docs() -> Response:
        return HTMLResponse(page(app.openapi(), style), headers=dict(headers))

    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)


def page(document: Json, style: str | None = None) -> str:
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
