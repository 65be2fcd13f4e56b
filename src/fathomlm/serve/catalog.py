"""Models that a server has at hand beside its own: loaded when a request names one, unloaded when another needs the room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fathomlm.errors import FathomError, ModelNotFound
from fathomlm.serve.errors import INTERNAL, ApiError
from fathomlm.serve.logs import log_event

if TYPE_CHECKING:  # a slip in the models' names is answered before torch is imported
    from fathomlm.serve.served_model import ServedModel

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
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()

    def is_loading(self, name: str) -> bool:
        return name in self._loading

    async def get(self, name: str) -> ServedModel:
        """The model of that name. Loading goes on when whoever waits for it stops waiting: the next one may want it."""
        while name not in self.loaded or self.loaded[name].engine.failure is not None:
            if name not in self._loading:
                task = self._loading[name] = asyncio.create_task(self._load(name))
                task.add_done_callback(partial(self._loaded, name))
            task = self._loading[name]
            await asyncio.wait((task,))
            if task.cancelled():
                raise ApiError(503, "the server is shutting down and accepts no new requests", code="draining")
            task.result()
        served = self.loaded[name] = self.loaded.pop(name)
        return served

    def stop_loading(self) -> None:
        """For the end of the server: whoever waits for a model is told."""
        for task in self._loading.values():
            task.cancel()

    async def close(self) -> None:
        self.stop_loading()
        for served in self.loaded.values():
            await served.close()

    def _loaded(self, name: str, task: asyncio.Task[None]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # asyncio would complain of one that nobody has waited for

    async def _load(self, name: str) -> None:
        async with self._one_at_a_time:
            await self._make_room(name)
            begun = time.perf_counter()
            try:
                self.loaded[name] = await in_daemon_thread(self.offers[name].load)
            except ModelNotFound as error:
                raise ApiError(404, f"{name} cannot be loaded: {error}", param="model", code="model_not_found") from error
            except FathomError as error:
                raise ApiError(503, f"{name} cannot be loaded: {error}", param="model", code="failed") from error
            except Exception as error:
                log_event("loading failed", logging.ERROR, error, model=name)
                raise ApiError(500, INTERNAL, code="internal_error") from error
            log_event("loaded", model=name, seconds=round(time.perf_counter() - begun, 3))

    async def _make_room(self, name: str) -> None:
        """Unload one of the same name that has failed, and the least recently used ones that have nothing to do."""
        if (failed := self.loaded.pop(name, None)) is not None:
            await failed.close()
        while len(self.loaded) >= self._most:
            idle = next((each for each, served in self.loaded.items() if not served.engine.status().in_flight), None)
            if idle is None:
                busy = ", ".join(self.loaded)
                raise ApiError(503, f"{name} cannot be loaded while {busy} has requests", param="model", code="unavailable")
            await self.loaded.pop(idle).close()
            log_event("unloaded", model=idle)


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
