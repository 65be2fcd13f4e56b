"""`fathomlm serve [MODEL]`: OpenAI's API over one model or several."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.common import ModelOptions, QuantizeOptions, memory_errors, threshold_file
from fathomlm.cli.decoding import DepthOptions, ShippedExitOptions, calibrated_fields, tell_shipped
from fathomlm.cli.first import check_device, check_memory, check_threads
from fathomlm.cli.serve_models import RayOptions, SeveralOptions, at_hand, catalog_of, model_name, read_lora, run_on_ray
from fathomlm.decode.exiting import SERVED_MODES, Exiting, Threshold
from fathomlm.engine.options import EngineOptions, RestartPolicy
from fathomlm.errors import OptionError
from fathomlm.options import like, option, section
from fathomlm.packaged import default_model
from fathomlm.serve.options import ReplicaOptions, ServeOptions

if TYPE_CHECKING:
    from fathomlm.serve.served_model import ServedModel
    from fathomlm.serve.service import Catalog, Service

REQUIRED = ("fastapi", "uvicorn", "prometheus_client")


def check_installed() -> None:
    """Refuse to serve where the server's own packages are missing."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"serving requires {', '.join(missing)}: pip install -c constraints.txt -e '.[serve]'")


@dataclass(frozen=True, kw_only=True)
class ServedDepthOptions(ShippedExitOptions):
    """How deep tokens go, for every request."""

    mode: str | None = like(
        Exiting, "mode", None, choices=("full", *SERVED_MODES),
        help="what happens at an exit: full never exits; static always does; speculative lets the full model verify what "
        "the exit drafted, where that is measured to be faster; parallel takes it and runs the deeper layers later (FREE); "
        "state-copy gives them the exit's state (CALM); entry-copy gives deeper loops the keys and values of the loop where "
        "a token exited. full and speculative keep the full model's output",
        default_text="speculative with the exits of a pack, parallel with --exit-layer or --threshold, else full",
    )  # fmt: skip
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers")
    confidence: str | None = like(Exiting, "confidence")
    threshold: Threshold | str | None = like(
        Exiting, "threshold",
        help="exit where the confidence exceeds T, from 0 (always) to 1 (never); one for each exit as 0.9,0.8; 'adaptive' "
        "is the calibrated threshold",
    )  # fmt: skip
    max_depth: int | None = like(
        DepthOptions, "max_depth", default_text=None, help="routed models: at most N recursions, for every request"
    )

    def used_pack(self, model: str) -> Path | None:
        """The pack whose exits are used: the one that is named, or one that ships for the model where nothing else says how
        tokens exit."""
        placed = (
            self.exit_layers is not None or self.max_depth is not None or (self.mode is None and self.threshold is not None)
        )
        return self.pack(model, self.mode or "speculative", placed=placed)

    def settle(self, model: str) -> Exiting | None:
        """How tokens exit early; None where they do not. Checked before the model is loaded, as far as that can be."""
        from fathomlm.checkpoints.resolve import plan_of

        pack = self.used_pack(model)
        given = (self.mode, self.exit_layers, self.threshold, self.confidence)
        if self.mode == "full":
            if given[1:] != (None,) * 3 or pack is not None:
                raise OptionError(
                    "--exit-layer, --threshold, --confidence and --exits cannot be combined with --decode full"
                )
            return None
        if pack is not None:
            plan_of(model, pack)
        elif given == (None,) * len(given):
            return None
        if self.max_depth is not None:
            raise OptionError("--max-depth cannot be combined with early exit: it requires a router")
        mode: Any = self.mode or ("speculative" if pack is not None else "parallel")
        path = threshold_file(model, pack)
        adaptive = self.threshold == "adaptive"
        if adaptive and not path.is_file():
            raise OptionError(f"{self.exits or model} has no calibrated threshold: run `fathomlm calibrate` first")
        how: dict[str, Any] = {"exit_layers": self.exit_layers, "threshold": self.threshold, "confidence": self.confidence}
        if adaptive or (pack is not None and self.threshold is None and path.is_file()):
            drafts = mode == "speculative"
            how = calibrated_fields(path, self.exit_layers, self.confidence, drafts=drafts, adaptive=adaptive)
        exiting = Exiting(mode=mode, **how)
        if pack is not None and self.exits is None:
            tell_shipped(model)
            if mode == "speculative":
                _tell("the full model verifies what they draft; they draft wherever that is measured to be faster")
        return exiting


@dataclass(frozen=True, kw_only=True)
class Serve(QuantizeOptions, ModelOptions):
    """Serve MODEL with an OpenAI-compatible API: /v1/completions and /v1/chat/completions, with /health, /ready, /metrics
    and /v1/fathom/status beside them, and a page at /. Logs go to standard output, one JSON object per line."""

    model: str = like(ModelOptions, "model", "", default_text="the model that ships with FathomLM")
    device: str = like(ModelOptions, "device", first=None)
    threads: int | None = like(ModelOptions, "threads", first=None)
    several: SeveralOptions = section(SeveralOptions, "several models", "--name and the options of depth are those of MODEL")
    name: str | None = option(
        None, metavar="NAME", help="model name for clients", default_text="MODEL, or its last path part and run"
    )
    api_key_file: Path | None = option(None, metavar="FILE", help="file with one API key per line")
    batch_size: int | None = like(EngineOptions, "batch_size", None, default_text="32 on a GPU, 8 elsewhere")
    server: ServeOptions = section(ServeOptions, "server")
    engine: EngineOptions = section(
        EngineOptions,
        "engine",
        only=(
            "max_sequences", "max_length", "max_source", "memory", "kv_dtype", "max_queue", "prefill_chunk",
            "stream_interval", "merge",
        ),
    )  # fmt: skip
    restarts: RestartPolicy = section(RestartPolicy)
    exiting: ServedDepthOptions = section(ServedDepthOptions, "depth")
    ray: RayOptions = section(RayOptions, "replicas", "copies of the server behind one address, on Ray Serve")

    def __post_init__(self) -> None:
        """Without MODEL the first `--model` is it, and without that the default, beside all that is at hand."""
        super().__post_init__()
        named = (*((self.model,) if self.model else ()), *(self.several.models or ()))
        alone = self.ray.ray or self.several.max_loaded == 1
        first, *others = named or dict.fromkeys((default_model(), *(() if alone else at_hand())))
        if self.ray.ray and (others or self.several.loras):
            raise OptionError("--ray cannot be combined with several models or adapters; start a server for each")
        if self.several.loras and self.quantize is not None:
            raise OptionError("--lora cannot be combined with --quantize: an adapter is merged into the weights")
        object.__setattr__(self, "model", first)
        object.__setattr__(self, "several", replace(self.several, models=tuple(others)))

    @property
    def server_options(self) -> ServeOptions:
        """With the keys of --api-key-file."""
        return replace(self.server, api_keys=(*self.server.api_keys, *_keys(self.api_key_file)))

    @property
    def engine_options(self) -> EngineOptions:
        """With what depends on the device."""
        from fathomlm.engine.request import MAX_LOGPROBS

        batch_size = self.batch_size or (32 if self.device.startswith("cuda") else 8)
        return replace(self.engine, batch_size=batch_size, max_logprobs=MAX_LOGPROBS)

    def run(self) -> int:
        check_installed()
        from fathomlm.serve.options import bind

        options, engine = self.server_options, self.engine_options
        replicas = self.ray.of_engine(engine, self.device, self.threads)
        if replicas is None:  # replicas may be on other machines
            check_device(self.device)
            check_threads(self.threads or 1)
            check_memory(engine.memory, self.device)
        services: list[Service] = []  # the one whose model adapters are merged into, once there is one
        adapters = [read_lora(given) for given in self.several.loras or ()]
        catalog = catalog_of(
            served_name(self), self.several.models or (), self.several.max_loaded, partial(load_other, self, engine),
            {name: partial(load_adapter, self, engine, services, name, directory) for name, directory in adapters},
        )  # fmt: skip
        if len({name for name, _ in adapters}) < len(adapters):
            raise OptionError("--lora: two adapters have the same name")
        with closing(bind(options.host, options.port)) as sock:
            return self._serve(sock, options, engine, replicas, catalog, services)

    def _serve(
        self, sock: socket.socket, options: ServeOptions, engine: EngineOptions, replicas: ReplicaOptions | None,
        catalog: Catalog, services: list[Service],
    ) -> int:  # fmt: skip
        """What imports torch: all that can be known before is checked."""
        from fathomlm.engine.heap import settle_heap
        from fathomlm.serve.app import create_app
        from fathomlm.serve.logs import configure_logging, log_event
        from fathomlm.serve.middleware import is_loopback
        from fathomlm.serve.options import address_of
        from fathomlm.serve.server import Server
        from fathomlm.serve.service import Service

        load = partial(load_served, self, engine, self.exiting.settle(self.model), self.restarts)
        if not is_loopback(options.host) and not options.api_keys:
            _tell(f"warning: {options.host} can be reached from other machines; without --api-key anybody there has access")
        if replicas is not None:
            port = sock.getsockname()[1]
            sock.close()  # it is free: Ray's proxies listen there
            _tell(f"starting {replicas.replicas} replicas of {self.model} on Ray; Ctrl-C stops the server")
            run_on_ray(load, options, replicas, options.host, port, _tell)
            return 0
        configure_logging()
        service = Service(load, catalog=catalog)
        services.append(service)

        def ready() -> None:
            assert service.served is not None
            settle_heap()
            at, others = address_of(sock), ", ".join(catalog.offers)
            _tell(f"{service.served.name} is ready at {at} (a page for browsers; base URL for OpenAI clients: {at}/v1)")
            if others:
                _tell(f"loaded when a request names them: {others}")
            log_event("ready", model=service.served.name, address=address_of(sock))

        service.on_ready = ready
        server = Server(create_app(service, options), service, options)
        _tell(f"loading {self.model}; {address_of(sock)}/ready reports when it is ready, Ctrl-C stops the server")
        server.run_at(sock)
        if server.started:
            # Threads that cannot be stopped, an engine in a step or a tokenizer, may still be at work: Python would wait for
            # them or crash around them, and takes seconds to take torch apart. Nothing is left to be saved.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(server.force_exit))
        return 0


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the keys in {path}: {error}") from error
    if not keys:
        raise OptionError(f"{path} has no API key; write one per line")
    return keys


def load_served(
    options: Serve, engine_options: EngineOptions, exiting: Exiting | None, restarts: RestartPolicy | None = None
) -> ServedModel:
    from fathomlm.engine.engine import Engine
    from fathomlm.serve.served_model import serve_model

    model = options.load_any(exits=options.exiting.used_pack(options.model), any_base=options.exiting.any_base)
    if exiting is not None and exiting.exit_layers is None and not exiting.drafts_behind(model.plan):
        exiting = replace(exiting, exit_layers=tuple(index + 1 for index in exiting.exits(model.plan)))
    with memory_errors("--memory, --max-sequences or --max-length"):
        engine = Engine(model, engine_options, exiting=exiting)
        if options.device.startswith("cuda"):
            engine.generate([[0]], max_new_tokens=2)  # compiles and records, so that nobody has to wait for it later
    return serve_model(
        engine, name=served_name(options), exiting=exiting, max_depth=options.exiting.max_depth, restarts=restarts,
        sampling=options.server.generation_config,
    )  # fmt: skip


def served_name(options: Serve) -> str:
    return options.name or model_name(options.model)


def load_other(options: Serve, engine_options: EngineOptions, source: str) -> ServedModel:
    """A model beside the first: as it is, and with a context of its own where that is shorter."""
    from fathomlm.checkpoints.resolve import architecture_of
    from fathomlm.engine.heap import settle_heap

    longest = engine_options.max_length
    if longest is not None:
        engine_options = replace(engine_options, max_length=min(longest, architecture_of(source)[0].context))
    alone = replace(options, model=source, name=None, exiting=ServedDepthOptions())
    served = load_served(alone, engine_options, alone.exiting.settle(source), options.restarts)
    settle_heap()
    return served


def load_adapter(
    options: Serve, engine_options: EngineOptions, services: Sequence[Service], name: str, directory: str
) -> ServedModel:
    """The server's own model with an adapter merged into it, over the same weights where it changes none, at full depth."""
    from fathomlm.checkpoints.adapter import with_adapter
    from fathomlm.checkpoints.resolve import decoder_only
    from fathomlm.engine.engine import Engine
    from fathomlm.serve.served_model import serve_model

    base = services[0].served
    assert base is not None, "a request is taken when the server's own model is ready"
    with memory_errors("--memory, --max-sequences or --max-length"):
        engine = Engine(with_adapter(decoder_only(base.model, "--lora"), directory), engine_options)
    return serve_model(
        engine, name=name, max_depth=base.max_depth, restarts=options.restarts, sampling=options.server.generation_config
    )


def _tell(text: Any) -> None:
    print(f"fathomlm: {text}", file=sys.stderr, flush=True)
