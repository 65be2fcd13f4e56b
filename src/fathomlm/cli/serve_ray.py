"""`fathomlm serve --ray`: the options of replicas, and running them until somebody says stop."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from fathomlm.errors import OptionError

if TYPE_CHECKING:
    from fathomlm.engine.options import EngineOptions
    from fathomlm.serve.options import ReplicaOptions, ServeOptions
    from fathomlm.serve.service import ServedModel

SPARE = 64
"""Requests that a replica is given beyond what its engine holds: those that it answers with 429, and looks at its status."""


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("many replicas", "copies of the server behind one address, on Ray Serve").add_argument
    add("--ray", action="store_true", help="run on Ray Serve, on this machine or a cluster")
    add("--replicas", metavar="N", type=int, help="so many copies of the model, each with an engine (default: 1)")
    most = "with much to do up to N replicas, with little --replicas of them (default: always --replicas)"
    add("--max-replicas", metavar="N", type=int, help=most)
    where = "a Ray cluster that runs already, host:port, or auto on one of its machines (default: start Ray here)"
    add("--ray-address", metavar="ADDRESS", help=where)


def read_replicas(args: argparse.Namespace, engine: EngineOptions) -> ReplicaOptions | None:
    """None for a server of one process; checked before anything is loaded."""
    if not args.ray:
        for option in ("replicas", "max_replicas", "ray_address"):
            value = getattr(args, option)
            if value is not None and (option, value) != ("replicas", 1):
                raise OptionError(
                    f"--{option.replace('_', '-')} goes with --ray, which shares requests out among replicas; without it "
                    "start one server for each GPU, each with a --port of its own, and a load balancer in front"
                )
        return None
    if importlib.util.find_spec("ray") is None:
        raise OptionError("--ray needs Ray Serve: pip install -c constraints.txt -e '.[serve,ray]'")
    if args.device.startswith("cuda:"):
        raise OptionError(f"Ray gives each replica a GPU of its own: with --ray say --device cuda, not {args.device}")
    from fathomlm.serve.options import ReplicaOptions

    sequences = engine.max_sequences or 2 * engine.batch_size
    return ReplicaOptions(
        replicas=1 if args.replicas is None else args.replicas,
        max_replicas=args.max_replicas,
        address=args.ray_address,
        cpus=args.threads or 1,
        gpus=int(args.device == "cuda"),
        ongoing=engine.batch_size,
        max_ongoing=engine.max_queue + sequences + SPARE,
    )


def run_on_ray(
    load: Callable[[], ServedModel], options: ServeOptions, replicas: ReplicaOptions, host: str, port: int,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    from fathomlm.serve.replicas import run_replicas

    def ready() -> None:
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"{replicas.replicas} replicas are ready at {at} (base URL for OpenAI clients: {at}/v1)")

    run_replicas(load, options, replicas, host, port, ready)
