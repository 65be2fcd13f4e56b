"""Prompts as tokens and as embeddings: POST /tokenize and /detokenize in vLLM's shapes, and POST /v1/embeddings, the mean of
a text's hidden states at a depth, with length 1."""

from __future__ import annotations

import asyncio
import base64
import struct
from functools import partial
from typing import Any

from fathomlm.decode.prompts import encode_prompt
from fathomlm.engine.forward import deepest, embedding
from fathomlm.errors import FathomError
from fathomlm.serve.bodies import DetokenizeBody, EmbeddingBody, TokenizeBody, as_messages
from fathomlm.serve.errors import as_api_error, refused
from fathomlm.serve.served_model import ServedModel


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
