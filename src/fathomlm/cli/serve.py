"""`fathomlm serve [MODEL]`: OpenAI's API over one model."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.device import HELP as THREADS
from fathomlm.cli.device import memory_errors
from fathomlm.cli.exit_options import add_pack_arguments, learnt_place, pack_options
from fathomlm.cli.sampling_options import add_dtype_argument, load_model
from fathomlm.cli.serve_ray import add_ray_arguments, read_replicas, run_on_ray
from fathomlm.engine.options import EngineOptions, RestartPolicy
from fathomlm.engine.request import MAX_LOGPROBS
from fathomlm.errors import OptionError
from fathomlm.options import add_flags, from_args
from fathomlm.packaged import default_model
from fathomlm.serve.options import ServeOptions

if TYPE_CHECKING:
    from fathomlm.decode.exiting import Exiting
    from fathomlm.serve.service import ServedModel

HELP = "serve a model over OpenAI's API"
DESCRIPTION = (
    "Serves MODEL over HTTP as OpenAI's API does: /v1/completions and /v1/chat/completions, with "
    "/health, /ready, /metrics and /v1/fathom/status beside them. Logs go to standard output, a JSON object a line."
)
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
ENGINE = ("max_sequences", "max_length", "memory", "kv_dtype", "max_queue", "prefill_chunk")
"""Options of the engine that have a flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "a preset, Hugging Face directory, hub id, GGUF file or FathomLM directory"
    model = default_model()
    add("model", metavar="MODEL", nargs="?", default=model, help=f"{what} (default: {model})")
    add("--name", metavar="NAME", help="what clients call the model (default: MODEL, of a path its last part)")
    add_dtype_argument(parser)
    add("--device", default="cpu", help="where to compute: cpu, cuda or cuda:N (default: cpu)")
    add("--threads", metavar="N", type=int, help=THREADS)
    add_flags(parser, ServeOptions, title="server")
    add("--api-key-file", metavar="FILE", type=Path, help="file with one API key per line")
    add(
        "--batch-size",
        dest="batch",
        metavar="N",
        type=int,
        help="tokens per forward pass (default: 32 on a GPU, 8 elsewhere)",
    )
    add_flags(parser, EngineOptions, only=ENGINE, title="engine")
    add_flags(parser, RestartPolicy)
    add_ray_arguments(parser)
    add = parser.add_argument_group("how deep tokens go").add_argument
    add("--exit-layer", metavar="N", type=int, help="let tokens leave after layer N, from 1 (default: the model's own exit)")
    above = (
        "leave where the exit is surer than T, from 0 to 1; 'adaptive' is what `fathomlm calibrate` learnt (default: 0.9)"
    )
    add("--exit-threshold", metavar="T", help=above)
    add_pack_arguments(add)
    add("--max-depth", metavar="N", type=int, help="routed models: at most N recursions, for every request")


def run(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"serving requires {', '.join(missing)}: pip install -c constraints.txt -e '.[serve]'")
    from fathomlm.serve.app import create_app
    from fathomlm.serve.logs import configure_logging, log_event
    from fathomlm.serve.middleware import is_loopback
    from fathomlm.serve.server import Server, address_of, bind
    from fathomlm.serve.service import Service

    options = read_options(args)
    engine = read_engine(args)
    exiting = read_exits(args)
    restarts = from_args(RestartPolicy, args)
    replicas = read_replicas(args, engine)
    if replicas is None:  # replicas may be on other machines
        check_memory(engine.memory, args.device)
    load = partial(load_served, args, engine, exiting, restarts)
    sock = bind(args.host, args.port)
    if not is_loopback(args.host) and not options.api_keys:
        _tell(f"warning: {args.host} can be reached by other machines, and without --api-key anybody there may ask")
    if replicas is not None:
        port = sock.getsockname()[1]
        sock.close()  # it is free: Ray's proxies listen there
        _tell(f"starting {replicas.replicas} replicas of {args.model} on Ray; Ctrl-C ends the server")
        run_on_ray(load, options, replicas, args.host, port, _tell)
        return 0
    configure_logging()
    service = Service(load)

    def ready() -> None:
        assert service.served is not None
        _tell(f"{service.served.name} is ready at {address_of(sock)} (base URL for OpenAI clients: {address_of(sock)}/v1)")
        log_event("ready", model=service.served.name, address=address_of(sock))

    service.on_ready = ready
    server = Server(create_app(service, options), service, options)
    _tell(f"loading {args.model}; {address_of(sock)}/ready says when it is ready, Ctrl-C ends the server")
    server.run_at(sock)
    if server.started:
        # Threads that cannot be stopped, an engine in a step or a tokenizer, may still be at work: Python would wait for
        # them or crash around them, and takes seconds to take torch apart. Nothing is left to be saved.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(server.force_exit))
    return 0


def read_options(args: argparse.Namespace) -> ServeOptions:
    return from_args(ServeOptions, args, api_keys=(*args.api_keys, *_keys(args.api_key_file)))


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the keys in {path}: {error}") from error
    if not keys:
        raise OptionError(f"{path} holds no key; write one a line")
    return keys


def read_engine(args: argparse.Namespace) -> EngineOptions:
    batch_size = args.batch if args.batch is not None else (32 if args.device.startswith("cuda") else 8)
    return from_args(EngineOptions, args, batch_size=batch_size, max_logprobs=MAX_LOGPROBS)


def check_memory(asked: int | None, device: str) -> None:
    """Refuse what the machine does not have before a model is loaded for it."""
    if asked is None:
        return
    if device.startswith("cuda"):
        import torch

        has = torch.cuda.mem_get_info(device)[1] if torch.cuda.is_available() else asked
    else:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if asked > has:
        raise OptionError(f"--memory asks for {asked / 1e9:,.1f} GB and {device} has {has / 1e9:,.1f} GB")


def read_exits(args: argparse.Namespace) -> Exiting | None:
    """How tokens leave early; None where they do not. Checked before the model is loaded, as far as that can be."""
    from fathomlm.checkpoints.resolve import plan_of
    from fathomlm.decode.exiting import Exiting

    if pack_options(args)["exits"] is not None:
        plan_of(args.model, args.exits)
    elif args.exit_layer is None and args.exit_threshold is None:
        return None
    if args.max_depth is not None:
        raise OptionError("--max-depth is for models with a router, and exits are for those without; give one of them")
    layers = None if args.exit_layer is None else (args.exit_layer,)
    if args.exit_threshold != "adaptive":
        try:
            threshold = None if args.exit_threshold is None else float(args.exit_threshold)
        except ValueError as error:
            message = f"--exit-threshold takes a number from 0 to 1, or adaptive; got '{args.exit_threshold}'"
            raise OptionError(message) from error
        return Exiting(mode="parallel", exit_layers=layers, threshold=threshold)
    from fathomlm.decode.calibration import FILE, Calibration

    path = learnt_place(args) / FILE
    if not path.is_file():
        raise OptionError(f"{args.exits or args.model} has learnt no threshold yet: run `fathomlm calibrate` first")
    found = Calibration.load(path)
    found.check([layer - 1 for layer in layers or (found.exit_layer,)], "gap", str(path))
    return Exiting(mode="parallel", exit_layers=(found.exit_layer,), threshold=found.estimator)


def load_served(
    args: argparse.Namespace, options: EngineOptions, exiting: Exiting | None, restarts: RestartPolicy | None = None
) -> ServedModel:
    from fathomlm.engine.engine import Engine
    from fathomlm.serve.service import serve_model

    model = load_model(args, **pack_options(args))
    if exiting is not None and exiting.exit_layers is None:
        exiting = replace(exiting, exit_layers=tuple(index + 1 for index in exiting.exits(model.plan)))
    with memory_errors("--memory, --max-sequences or --max-length"):
        engine = Engine(model, options, exiting=exiting)
        if args.device.startswith("cuda"):
            engine.generate([[0]], max_new_tokens=2)  # compiles and records, so that nobody has to wait for it later
    name = args.name or _name(args.model)
    return serve_model(engine, name=name, exiting=exiting, max_depth=args.max_depth, restarts=restarts)


def _name(source: str) -> str:
    path = Path(source).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else source


def _tell(text: Any) -> None:
    print(f"fathomlm: {text}", file=sys.stderr, flush=True)
