"""The models of a server, from loading to the end: its own, and those that it has at hand beside it, which are loaded when a
request names one and unloaded when another needs the room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fathomlm.errors import FathomError, ModelNotFound, choices
from fathomlm.serve.errors import INTERNAL, ApiError, refused
from fathomlm.serve.logs import log_event

if TYPE_CHECKING:  # a slip in the models' names is answered before torch is imported
    from fathomlm.serve.served_model import ServedModel

Phase = Literal["loading", "ready", "restarting", "draining", "failed"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A model that can be loaded."""

    load: Callable[[], ServedModel]
    download: Callable[[], int | None] = lambda: None
    """Bytes that loading it downloads first; None where its files are on this machine."""


class Catalog:
    """At most `most` of the models are loaded at a time. All methods belong to the server's event loop."""

    def __init__(self, offers: Mapping[str, Offer] | None = None, most: int = 1) -> None:
        self.offers, self._most = dict(offers or {}), most
        self.loaded: dict[str, ServedModel] = {}
        """By name, the least recently used first."""
        self.loading: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def get(self, name: str) -> ServedModel:
        """The model of that name. Loading goes on when whoever waits for it stops waiting: the next one may want it."""
        while name not in self.loaded or self.loaded[name].engine.failure is not None:
            if name not in self.loading:
                task = self.loading[name] = asyncio.create_task(self._load(name))
                task.add_done_callback(partial(self._loaded, name))
            task = self.loading[name]
            await asyncio.wait((task,))
            if task.cancelled():
                raise ApiError(503, "the server is shutting down and accepts no new requests", code="draining")
            task.result()
        served = self.loaded[name] = self.loaded.pop(name)
        return served

    def stop_loading(self) -> None:
        """For the end of the server: whoever waits for a model is told."""
        for task in self.loading.values():
            task.cancel()

    async def close(self) -> None:
        self.stop_loading()
        for served in self.loaded.values():
            await served.close()

    def _loaded(self, name: str, task: asyncio.Task[None]) -> None:
        del self.loading[name]
        if not task.cancelled():
            task.exception()  # asyncio would complain of one that nobody has waited for

    async def _load(self, name: str) -> None:
        async with self._one_at_a_time:
            load = self.offers[name].load
            if await self._make_room(name):
                load = partial(_load_behind, load)
            begun = time.perf_counter()
            try:
                self.loaded[name] = await in_daemon_thread(load)
            except ModelNotFound as error:
                raise ApiError(404, f"{name} cannot be loaded: {error}", param="model", code="model_not_found") from error
            except FathomError as error:
                raise ApiError(503, f"{name} cannot be loaded: {error}", param="model", code="failed") from error
            except Exception as error:
                log_event("loading failed", logging.ERROR, error, model=name)
                raise ApiError(500, INTERNAL, code="internal_error") from error
            log_event("loaded", model=name, seconds=round(time.perf_counter() - begun, 3))

    async def _make_room(self, name: str) -> bool:
        """Unload one of the same name that has failed, and the least recently used ones that have nothing to do. Returns
        whether any was unloaded."""
        unloaded = False
        if (failed := self.loaded.pop(name, None)) is not None:
            await failed.close()
            unloaded = True
        while len(self.loaded) >= self._most:
            idle = next((each for each, served in self.loaded.items() if not served.engine.status().in_flight), None)
            if idle is None:
                busy = ", ".join(self.loaded)
                raise ApiError(503, f"{name} cannot be loaded while {busy} has requests", param="model", code="unavailable")
            await self.loaded.pop(idle).close()
            log_event("unloaded", model=idle)
            unloaded = True
        return unloaded


def _load_behind(load: Callable[[], ServedModel]) -> ServedModel:
    """Load a model behind one that was unloaded, whose memory is free first: it is in cycles that `settle_heap` leaves out
    of collections."""
    from fathomlm.engine.heap import collect_heap

    collect_heap()
    return load()


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread that nobody waits for at the end: a download may take long, and Ctrl-C should not wait for it."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not found.cancelled():
            set_it(value)

    def run() -> None:
        try:
            settled = partial(settle, found.set_result, work())
        except BaseException as error:
            settled = partial(settle, found.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settled)

    threading.Thread(target=run, name="fathomlm-load", daemon=True).start()
    return found


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    return ApiError(404, choices("model", name, known), param="model", code="model_not_found")


class Service:
    """Loads the server's own model in the background, and tracks whether it is ready. Requests may also name those of the
    catalog, which are loaded when one does."""

    def __init__(self, load: Callable[[], ServedModel], replica: str | None = None, catalog: Catalog | None = None) -> None:
        self._load = load
        self.catalog = catalog or Catalog()
        self.begun = int(time.time())
        self.replica = replica
        """Its name, where a server has several. Its application starts once its model is loaded."""
        self.served: ServedModel | None = None
        self.failure: BaseException | None = None
        """Why there is no model: loading failed."""
        self.draining = False
        self.abandoned = False
        """Whether the process ends without waiting for the engine."""
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self._over = False
        self._settled = asyncio.Event()

    @property
    def phase(self) -> Phase:
        if self.failure is not None or (self.served is not None and self.served.engine.failure is not None):
            return "failed"
        if self.draining or self._over:
            return "draining"
        if self.served is None:
            return "loading"
        return "restarting" if self.served.engine.restarting else "ready"

    def require(self) -> ServedModel:
        """The server's own model, for a new request."""
        phase = self.phase
        if phase == "ready" and self.served is not None:
            return self.served
        why = {
            "loading": "the model is loading",
            "restarting": "the engine has failed and is restarting",
            "draining": "the server is shutting down and accepts no new requests",
            "failed": "the engine has failed permanently; see the server's log",
        }
        raise ApiError(503, why[phase], code=phase)

    async def find(self, name: str | None) -> ServedModel:
        """The model that a request names, loaded if need be; None is the server's own."""
        own = self.require()
        if name is None or name == own.name:
            return own
        if name not in self.catalog.offers:
            raise unknown_model(name, [own.name, *self.catalog.offers])
        return await self.catalog.get(name)

    def check_chats(self, served: ServedModel) -> None:
        """Refuse a conversation with a model that has no chat template, and name those that have one, or may: of one that is
        not loaded nobody knows yet."""
        if served.chats or served.model.tokenizer is None:
            return
        unknown = [name for name in self.catalog.offers if name not in self.catalog.loaded]
        able = [*(each.name for each in self.loaded_models if each.chats), *unknown]
        hint = f", or another model: {', '.join(able)}" if able else ""
        raise refused(f"{served.name} has no chat template; use /v1/completions{hint}", "model", "invalid_value")

    @property
    def loaded_models(self) -> list[ServedModel]:
        return [*([] if self.served is None else [self.served]), *self.catalog.loaded.values()]

    def start(self) -> None:
        in_daemon_thread(self._load).add_done_callback(self._loaded)

    async def loaded(self) -> None:
        """Returns when the model is ready; raises the error of loading."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    def _loaded(self, found: asyncio.Future[ServedModel]) -> None:
        if found.cancelled():  # the server ends
            return
        self._settled.set()
        self.failure = found.exception()
        if self.failure is not None:
            self.on_failure()
            return
        self.served = found.result()
        self.on_ready()

    async def drain(self, timeout: float, grace: float) -> bool:
        """Accept no new requests and wait for the running ones; after `timeout` seconds abort them. Returns whether all
        finished. An engine in the middle of a step cannot be aborted: after `grace` more seconds it is abandoned."""
        self.draining = True
        self.catalog.stop_loading()
        engines = [served.engine for served in self.loaded_models]
        try:
            await asyncio.wait_for(asyncio.gather(*(engine.drain() for engine in engines)), timeout)
        except TimeoutError:
            try:
                await asyncio.wait_for(asyncio.gather(*(engine.close() for engine in engines)), grace)
            except TimeoutError:
                self.abandoned = True
            return False
        return True

    async def close(self) -> None:
        self._over = True
        if self.served is not None:
            await self.served.close()
        await self.catalog.close()
