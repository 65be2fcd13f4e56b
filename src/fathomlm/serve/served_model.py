"""A model behind an engine, with what a server has to know of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fathomlm.checkpoints.resolve import dtype_name, sampling_defaults
from fathomlm.decode.prompts import Prompt, chat_prompt, encode_prompt, end_tokens
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.grammar import Grammars
from fathomlm.engine.options import RestartPolicy
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.serve.logs import log_event
from fathomlm.serve.tokens import LeastTokens, TokenizerThreads, TokenStrings
from fathomlm.serve.tools import knows_tools, plain_messages

if TYPE_CHECKING:
    from fathomlm.decode.exiting import Exiting, Threshold
    from fathomlm.engine.engine import Engine
    from fathomlm.model.seq2seq import FathomModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model behind an engine, and what a server has to know of it."""

    engine: AsyncEngine
    model: FathomModel
    name: str
    max_length: int
    """Tokens of a sequence, prompt included."""
    max_source: int
    """Tokens that an encoder reads at most; 0 where there is none. A prompt is then its source, and takes none of
    `max_length`."""
    pool_pages: tuple[int, ...]
    """Pages of the KV cache, by pool."""
    max_depth: int | None
    """The server's own: the default of requests, and the most that one may have."""
    exiting: Exiting | None
    """How tokens exit early, where they do."""
    facts: dict[str, Any]
    """What does not change, for the status: the plan and the engine's sizes."""
    tokens: TokenStrings
    least_tokens: LeastTokens
    tokenizers: TokenizerThreads
    grammars: Grammars
    ends: frozenset[int]
    sampling: dict[str, float]
    """The defaults of requests, by the names of `Sampling`'s fields: what the model's generation_config says."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def routed(self) -> bool:
        return self.model.plan.routing is not None

    @property
    def threshold(self) -> Threshold | None:
        """The one in force for requests that name none."""
        return None if self.exiting is None else self.exiting.threshold_now()

    @property
    def chats(self) -> bool:
        """Whether the model can hold a conversation, which requires a chat template."""
        return self.model.tokenizer is not None and self.model.tokenizer.chat_template is not None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """What the model can do."""
        return ("/v1/completions", "/v1/chat/completions") if self.chats else ("/v1/completions",)

    @property
    def decodes(self) -> tuple[str, ...]:
        """The ways of decoding that a request may choose: to the full depth, and as this engine was built to. One whose
        tokens all exit has no layers behind the exit."""
        if self.exiting is None:
            return ("full",)
        return ("static",) if self.exiting.mode == "static" else ("full", self.exiting.mode)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Long prompts take a while; other requests do not wait for them."""
        return await self.tokenizers.run(len(prompt), encode_prompt, self.model, prompt)

    async def encode_chat(self, messages: list[dict[str, Any]], *check: Callable[[str], object], **how: Any) -> list[int]:
        """`check` gets the rendered conversation before it is tokenized; `how` is as in `chat_prompt`. Functions and calls
        are written out where the chat template knows of none."""
        tools, tokenizer = how.pop("tools", None), self.model.tokenizer
        if tokenizer is not None and tokenizer.chat_template is not None:
            if knows_tools(tokenizer.get_chat_template()):
                how["tools"] = tools or None
            else:
                messages = plain_messages(messages, tools or ())
        size = sum(len(message["content"]) for message in messages)
        return await self.tokenizers.run(size, partial(chat_prompt, self.model, messages, *check, **how))

    async def close(self) -> None:
        await self.engine.close()
        self.tokenizers.close()


def serve_model(
    engine: Engine,
    *,
    name: str,
    exiting: Exiting | None = None,
    max_depth: int | None = None,
    restarts: RestartPolicy | None = None,
    sampling: bool = True,
) -> ServedModel:
    """Put an engine behind asyncio. It belongs to the served model from then on: whoever keeps it keeps its memory from the
    engine that comes after it. By default a failed one is built again as often as `RestartPolicy` allows. `sampling` takes
    the defaults of requests from the model's generation_config."""
    model, sizes, options = engine.model, engine.runner.sizes, engine.options
    plan = model.plan
    if max_depth is not None:
        if plan.routing is None:
            raise OptionError(f"max_depth requires a model with a router; {name} has none")
        if not 1 <= max_depth <= plan.recursions:
            raise OptionError(f"max_depth must be between 1 and the model's {plan.recursions} recursions, got {max_depth}")
    defaults = sampling_defaults(model) if sampling else {}
    try:
        Sampling(**defaults)  # type: ignore[arg-type]
    except OptionError as error:
        raise CheckpointError(f"the generation_config.json of {name}: {error}") from error
    deepest = plan.recursions if exiting is None else plan.unrolled_layers
    facts = {
        "kind": engine.runner.layout.kind,
        "plan": {
            "layers": plan.layout, "unique_layers": plan.unique_layers, "unrolled_layers": plan.unrolled_layers,
            "recursions": plan.recursions, "sharing": plan.sharing if plan.recursions > 1 else None, "kv": plan.kv,
            "router": None if plan.routing is None else plan.routing.kind, "exits": [index + 1 for index in plan.exits],
        },
        "colours": [[colour, ink(colour)] for colour in depth_colours(deepest)],
        "device": str(engine.runner.device), "dtype": dtype_name(model),
        "batch_size": options.batch_size, "max_sequences": sizes.max_sequences, "max_length": sizes.max_length,
        "max_source": sizes.max_source or None, "max_queue": options.max_queue,
        "page_size": options.page_size, "kv_dtype": options.kv_dtype, "max_depth": max_depth,
        "exit_layer": None if exiting is None else (exiting.exit_layers or (None,))[0],
        "calibrated": exiting is not None and exiting.estimator is not None, "sampling": defaults,
    }  # fmt: skip
    running = AsyncEngine(engine, restarts or RestartPolicy(), on_failure=_log_failure, on_restart=_log_restart)
    return ServedModel(
        engine=running, model=model, name=name, max_length=sizes.max_length, max_source=sizes.max_source,
        pool_pages=sizes.pool_pages, max_depth=max_depth, exiting=exiting, facts=facts,
        tokens=TokenStrings(model.tokenizer), ends=end_tokens(model),
        sampling=defaults, grammars=Grammars(model),
        least_tokens=LeastTokens(model.tokenizer), tokenizers=TokenizerThreads(model.tokenizer),
    )  # fmt: skip


def _log_failure(error: BaseException, again: bool) -> None:
    """Once per failure, however many requests it failed, with its traceback, which no client sees."""
    log_event("engine failed", logging.ERROR, error, restarting=again)


def _log_restart(seconds: float) -> None:
    log_event("engine restarted", logging.WARNING, seconds=round(seconds, 3))
