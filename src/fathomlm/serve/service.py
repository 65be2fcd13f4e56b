"""The models of a server, from loading to the end: its own, and those of its catalog."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from fathomlm.errors import choices
from fathomlm.serve.catalog import Catalog, in_daemon_thread
from fathomlm.serve.errors import ApiError, refused
from fathomlm.serve.served_model import ServedModel

Phase = Literal["loading", "ready", "restarting", "draining", "failed"]


def unknown_model(name: str, known: Iterable[str]) -> ApiError:
    return ApiError(404, choices("model", name, known), param="model", code="model_not_found")


class Service:
    """Loads the server's own model in the background, and tracks whether it is ready. Requests may also name those of the
    catalog, which are loaded when one does."""

    def __init__(self, load: Callable[[], ServedModel], replica: str | None = None, catalog: Catalog | None = None) -> None:
        self._load = load
        self.catalog = catalog or Catalog()
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

    def check_endpoint(self, served: ServedModel, path: str) -> None:
        """Refuse what the model cannot do, and name those that can, or may: of one that is not loaded nobody knows yet."""
        if path in served.endpoints or served.model.tokenizer is None:
            return
        unknown = [name for name in self.catalog.offers if name not in self.catalog.loaded]
        able = [*(each.name for each in self.loaded_models if path in each.endpoints), *unknown]
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
