"""POST /v1/embeddings: the mean of a text's hidden states at a depth, with length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from fathomlm.engine.forward import deepest, embedding
from fathomlm.errors import FathomError
from fathomlm.serve.bodies import EmbeddingBody, request_body
from fathomlm.serve.errors import as_api_error, refused
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.service import Service
from fathomlm.serve.tokenize import answer


def add_embeddings(app: FastAPI, service: Service, options: ServeOptions, refusals: dict[int | str, dict[str, Any]]) -> None:
    @app.post("/v1/embeddings", responses=refusals, response_model=None, openapi_extra=request_body(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Embed texts."""
        return await answer(request, EmbeddingBody, embed, service, options)


async def embed(body: EmbeddingBody, served: ServedModel) -> dict[str, Any]:
    width, most = served.model.architecture.hidden, deepest(served.model)
    if body.dimensions not in (None, width):
        raise refused(f"dimensions must be {width}, the model's width, got {body.dimensions}", "dimensions", "invalid_value")
    if body.depth is not None and body.depth > most:
        what = "recursions" if served.routed else "layers"
        raise refused(f"depth must be from 1 to the model's {most} {what}, got {body.depth}", "depth", "invalid_value")
    inputs, found, count = body.inputs, [], 0
    if not inputs:
        raise refused("input: give at least one text", "input", "invalid_value")
    for index, one in enumerate(inputs):
        try:
            least = served.least_tokens(one) if isinstance(one, str) else len(one)
            tokens = [] if least > served.max_length else await served.encode(one)
            if not tokens or len(tokens) > served.max_length:
                message = (
                    f"input: at most {served.max_length} tokens, number {index} has {len(tokens) or f'at least {least}'}"
                )
                raise refused(message, "input", "context_length_exceeded")
            values = await served.engine.call(partial(embedding, served.model, tokens, body.depth))
        except FathomError as error:
            raise as_api_error(error, "input") from error
        shown: Any = values
        if body.encoding_format == "base64":
            shown = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        found.append({"object": "embedding", "index": index, "embedding": shown})
        count += len(tokens)
        await asyncio.sleep(0)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": found, "model": served.name, "usage": usage}
