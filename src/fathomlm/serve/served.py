"""The one model that a server offers, from loading to the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.decode.prompts import Prompt, chat_prompt, encode_prompt, end_tokens
from fathomlm.engine.async_engine import AsyncEngine
from fathomlm.engine.options import RestartPolicy
from fathomlm.errors import OptionError
from fathomlm.serve.errors import ApiError
from fathomlm.serve.logs import say
from fathomlm.serve.reading import LeastTokens, Readers
from fathomlm.serve.tokens import TokenTexts

if TYPE_CHECKING:
    from fathomlm.decode.exiting import Exiting
    from fathomlm.engine.engine import Engine
    from fathomlm.model.hub import FathomForCausalLM

Phase = Literal["loading", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A model that is ready, and what a server has to know of it."""

    front: AsyncEngine
    model: FathomForCausalLM
    name: str
    max_length: int
    """Tokens of a sequence, prompt included."""
    pool_pages: tuple[int, ...]
    """Pages for keys and values there are, by pool."""
    max_depth: int | None
    """The server's own: the default of requests, and the most that one may ask for."""
    exiting: Exiting | None
    """How tokens leave early, where they do."""
    facts: dict[str, Any]
    """What does not change, for the status: the plan and the engine's sizes."""
    tokens: TokenTexts
    least_tokens: LeastTokens
    readers: Readers
    ends: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def routed(self) -> bool:
        return self.model.plan.routing is not None

    @property
    def threshold(self) -> float | None:
        """The one in force for requests that name none."""
        return None if self.exiting is None else self.exiting.threshold_now()

    @property
    def decodes(self) -> tuple[str, ...]:
        """The ways of decoding that a request may ask for: to the full depth, and as this engine was built to."""
        return ("full",) if self.exiting is None else ("full", self.exiting.mode)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Long texts take a while to read; nobody else waits meanwhile."""
        return await self.readers.read(len(prompt), encode_prompt, self.model, prompt)

    async def encode_chat(self, messages: list[dict[str, str]], check: Callable[[str], object]) -> list[int]:
        """`check` sees the conversation as the text that the model reads, before it is tokenised."""
        size = sum(len(message["content"]) for message in messages)
        return await self.readers.read(size, chat_prompt, self.model, messages, check)

    async def close(self) -> None:
        await self.front.close()
        self.readers.close()


def offer(
    engine: Engine,
    *,
    name: str,
    exiting: Exiting | None = None,
    max_depth: int | None = None,
    restarts: RestartPolicy | None = None,
) -> Offer:
    """Put an engine behind its asyncio front and offer it. It belongs to the offer from then on: whoever keeps it keeps its
    memory from the engine that comes after it. By default a broken one is built again as often as `RestartPolicy` says."""
    model, sizes, options = engine.model, engine.runner.sizes, engine.options
    plan = model.plan
    if max_depth is not None:
        if plan.routing is None:
            raise OptionError(f"a maximum depth is for models with a router; {name} has none")
        if not 1 <= max_depth <= plan.recursions:
            raise OptionError(
                f"the maximum depth must be from 1 to the model's {plan.recursions} recursions, got {max_depth}"
            )
    facts = {
        "kind": engine.runner.layout.kind,
        "plan": {
            "layers": plan.layout, "unique_layers": plan.unique_layers, "unrolled_layers": plan.unrolled_layers,
            "recursions": plan.recursions, "sharing": plan.sharing if plan.recursions > 1 else None, "kv": plan.kv,
            "router": None if plan.routing is None else plan.routing.kind, "exits": [index + 1 for index in plan.exits],
        },
        "device": str(engine.runner.device), "dtype": str(model.decoder.embed.weight.dtype).removeprefix("torch."),
        "batch_size": options.batch_size, "max_sequences": sizes.max_sequences, "max_length": sizes.max_length,
        "max_queue": options.max_queue,
        "page_size": options.page_size, "kv_dtype": options.kv_dtype, "max_depth": max_depth,
        "exit_layer": None if exiting is None else (exiting.exit_layers or (None,))[0],
        "calibrated": exiting is not None and exiting.estimator is not None,
    }  # fmt: skip
    front = AsyncEngine(engine, restarts or RestartPolicy(), on_failure=_tell_failure, on_restart=_tell_restart)
    return Offer(
        front=front, model=model, name=name, max_length=sizes.max_length, pool_pages=sizes.pool_pages,
        max_depth=max_depth, exiting=exiting, facts=facts, tokens=TokenTexts(model.tokenizer), ends=end_tokens(model),
        least_tokens=LeastTokens(model.tokenizer), readers=Readers(model.tokenizer),
    )  # fmt: skip


def _tell_failure(error: BaseException, again: bool) -> None:
    """Once for each failure, however many requests it failed, and with its traceback, which no client sees."""
    say("engine failed", logging.ERROR, error, restarting=again)


def _tell_restart(seconds: float) -> None:
    say("engine restarted", logging.WARNING, seconds=round(seconds, 3))


class Service:
    """Loads an offer in the background, and knows whether there is one to be had."""

    def __init__(self, load: Callable[[], Offer], replica: str | None = None) -> None:
        self._load = load
        self.replica = replica
        """Which one this is, where a server has several. Its application starts with its model, not before it."""
        self.offer: Offer | None = None
        self.failure: BaseException | None = None
        """Why there is nothing to offer: loading failed."""
        self.draining = False
        self.abandoned = False
        """Whether the process ends without waiting for the engine."""
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._over = False
        self._settled = asyncio.Event()

    @property
    def phase(self) -> Phase:
        if self.failure is not None or (self.offer is not None and self.offer.front.failure is not None):
            return "failed"
        if self.draining or self._over:
            return "draining"
        if self.offer is None:
            return "loading"
        return "restarting" if self.offer.front.restarting else "ready"

    def require(self) -> Offer:
        """The offer, for a new request."""
        phase = self.phase
        if phase == "ready" and self.offer is not None:
            return self.offer
        why = {
            "loading": "the model is still being loaded",
            "restarting": "the engine has failed and is being built again",
            "draining": "the server is finishing its last requests and takes no new ones",
            "failed": "the engine has failed and takes no more requests; the server's log says why",
        }
        raise ApiError(503, why[phase], code=phase)

    def start(self) -> None:
        """In a thread that the process does not wait for: a download may take long, and Ctrl-C should not."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                found: Offer | BaseException = self._load()
            except BaseException as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(self._loaded, found)

        threading.Thread(target=work, name="fathomlm-load", daemon=True).start()

    async def loaded(self) -> None:
        """Returns when there is an offer; raises what kept it from being."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    def _loaded(self, found: Offer | BaseException) -> None:
        self._settled.set()
        if isinstance(found, BaseException):
            self.failure = found
            self.on_failure()
            return
        self.offer = found
        self.on_ready()

    async def drain(self, timeout: float, grace: float) -> bool:
        """Take nothing new and wait for what runs; after `timeout` seconds cut it off. Says whether all could end. An engine
        in the middle of a step cannot be cut off: after `grace` more seconds it is left to the end of the process."""
        self.draining = True
        if self.offer is None:
            return True
        front, whole = self.offer.front, True
        try:
            await asyncio.wait_for(front.drain(), timeout)
        except TimeoutError:
            whole = False
            try:
                await asyncio.wait_for(front.close(), grace)
            except TimeoutError:
                self.abandoned = True
        return whole

    async def close(self) -> None:
        self._over = True
        if self.offer is not None:
            await self.offer.close()
