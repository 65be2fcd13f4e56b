"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt or a conversation becomes, and back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from fathomlm.decode.prompts import encode_prompt
from fathomlm.errors import FathomError
from fathomlm.serve.bodies import DetokenizeBody, TokenizeBody, as_messages, read_body, request_body
from fathomlm.serve.completions import GONE, ClientGone, in_time
from fathomlm.serve.errors import as_api_error, json_response, refused
from fathomlm.serve.middleware import ENTRY
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.served_model import ServedModel
from fathomlm.serve.service import Service


def add_tokenize(app: FastAPI, service: Service, options: ServeOptions, refusals: dict[int | str, dict[str, Any]]) -> None:
    @app.post("/tokenize", responses=refusals, response_model=None, openapi_extra=request_body(TokenizeBody))
    async def tokenized(request: Request) -> Response:
        """The tokens of a prompt or a conversation."""
        return await answer(request, TokenizeBody, tokenize, service, options)

    @app.post("/detokenize", responses=refusals, response_model=None, openapi_extra=request_body(DetokenizeBody))
    async def detokenized(request: Request) -> Response:
        """The text of tokens, special ones included."""
        return await answer(request, DetokenizeBody, detokenize, service, options)


async def answer(request: Request, kind: Any, work: Any, service: Service, options: ServeOptions) -> Response:
    """What `work` makes of a body and the model that it names, in the time that a request has."""
    deadline = asyncio.get_running_loop().time() + options.timeout
    body = await read_body(request, kind)
    try:
        served = await in_time(request.receive, service.find(body.model), options, deadline)
        request.scope[ENTRY].model = served.name
        return json_response(await in_time(request.receive, work(body, served), options, deadline))
    except ClientGone:
        return GONE


async def tokenize(body: TokenizeBody, served: ServedModel) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise refused("give either prompt or messages", "prompt", "invalid_value")
    where = "prompt" if body.messages is None else "messages"
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    try:
        if body.messages is None:
            assert body.prompt is not None
            work = partial(encode_prompt, served.model, body.prompt, special=special)
            tokens = await served.tokenizers.run(len(body.prompt), work)
        else:
            begins = body.add_generation_prompt is not False
            tokens = await served.encode_chat(as_messages(body.messages), special=special, begins_reply=begins)
    except FathomError as error:
        raise as_api_error(error, where) from error
    strings = [served.tokens.text(token) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.max_length, "tokens": tokens, "token_strs": strings}


async def detokenize(body: DetokenizeBody, served: ServedModel) -> dict[str, Any]:
    vocab, most = served.model.architecture.vocab, max(body.tokens, default=0)
    if most >= vocab:
        raise refused(f"tokens: id {most} is outside the model's vocabulary of {vocab}", "tokens", "invalid_value")
    if served.model.tokenizer is None:
        raise refused("this model has no tokenizer", "model", "invalid_value")
    return {"prompt": await served.tokenizers.run(len(body.tokens), served.tokens.whole, body.tokens)}
