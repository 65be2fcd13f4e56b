"""Request bodies read at a cost bounded by their length, and described for the OpenAPI document.

A megabyte of JSON can hold 300,000 objects, and building them, or saying of each what is wrong with it, takes seconds in
which nobody else is answered. So the objects and lists are counted before they are built, the first mistake ends the
reading, and what is longer than a few pages is read in a thread.
"""

from __future__ import annotations

import asyncio
import json
import re
from email.message import Message as Header
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from fathomlm.serve.errors import ApiError, refused, validation_error

MOST_CONTAINERS = 16_384
"""Objects and lists in one body."""
MOST_KEYS = 1024
"""Keys of one object."""
OFF_LOOP = 1 << 14
"""Bytes from which a body is read in a thread."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON. One that never ends goes to the end of the body, so that the search is over there."""
COMPONENT = "#/components/schemas/{model}"

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body, or a 400 with the reason."""
    body = await request.body()
    if not body or not _is_json(request.headers.get("content-type", "")):
        # Pages of other sites may send anything but JSON without permission.
        message = "the body must be a JSON object, sent with the content type application/json"
        raise refused(message, None, "invalid_json")
    if len(body) < OFF_LOOP:
        return parse(body, model)
    return await asyncio.to_thread(parse, body, model)


def parse(body: bytes, model: type[Body]) -> Body:
    if count_containers(body) > MOST_CONTAINERS:
        raise refused(f"the body has more than {MOST_CONTAINERS} objects and lists", None, "invalid_value")
    try:
        found = json.loads(body.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _not_json(f"it is not UTF-8 ({error.reason} at {error.start})") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at {error.pos}") from None
    except ValueError:  # Python's own limit
        raise _not_json("a number has too many digits") from None
    try:
        return model.model_validate(found)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_input=False), found) from None


def count_containers(body: bytes) -> int:
    """At most so many objects and lists. Brackets in strings count only where there are few in all."""
    least = body.count(b"[") + body.count(b"{")
    if least <= MOST_CONTAINERS:
        return least
    bare = STRING.sub(b"", body)
    return bare.count(b"[") + bare.count(b"{")


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """An operation's body for the OpenAPI document, which sees no parameter to describe."""
    schema = {"$ref": COMPONENT.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *models: type[BaseModel]) -> None:
    """Put the schemas of bodies into the app's OpenAPI document."""
    plain = app.openapi

    def whole() -> dict[str, Any]:
        document = plain()
        _, found = models_json_schema([(model, "validation") for model in models], ref_template=COMPONENT)
        document.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return document

    app.openapi = whole  # type: ignore[method-assign]


def _is_json(content_type: str) -> bool:
    header = Header()
    header["content-type"] = content_type
    kind, _, detail = header.get_content_type().partition("/")
    return kind == "application" and (detail == "json" or detail.endswith("+json"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise refused(f"an object in the body has more than {MOST_KEYS} keys", None, "invalid_value")
    return dict(pairs)


def _no_number(name: str) -> NoReturn:
    raise _not_json(f"{name} is not a JSON number")


def _not_json(why: str) -> ApiError:
    return refused(f"the body is not valid JSON: {why}", None, "invalid_json")
