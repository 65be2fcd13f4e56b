"""`fathomlm serve --ray`: the options of replicas, and running them until somebody says stop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fathomlm.errors import OptionError
from fathomlm.options import option
from fathomlm.serve.options import ReplicaOptions

if TYPE_CHECKING:
    from fathomlm.engine.options import EngineOptions
    from fathomlm.serve.options import ServeOptions
    from fathomlm.serve.served_model import ServedModel

SPARE = 64
"""Requests that a replica is given beyond what its engine holds: those that it answers with 429, and looks at its status."""


@dataclass(frozen=True, kw_only=True)
class RayOptions(ReplicaOptions):
    """Copies of the server behind one address."""

    ray: bool = option(False, help="run on Ray Serve, on this machine or a cluster")

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = {"--replicas": self.replicas != 1, "--max-replicas": self.max_replicas, "--ray-address": self.address}
        for flag in (flag for flag, given in flags.items() if given and not self.ray):
            raise OptionError(
                f"{flag} requires --ray; without it start one server for each GPU, each with its own --port, and a load "
                "balancer in front"
            )

    def of_engine(self, engine: EngineOptions, device: str, threads: int | None) -> ReplicaOptions | None:
        """With what each replica may use; None for a server of one process. Checked before anything is loaded."""
        if not self.ray:
            return None
        if importlib.util.find_spec("ray") is None:
            raise OptionError("--ray requires Ray Serve: pip install -c constraints.txt -e '.[serve,ray]'")
        if device.startswith("cuda:"):
            raise OptionError(f"--ray requires --device cuda, got {device}: Ray gives each replica a GPU of its own")
        sequences = engine.max_sequences or 2 * engine.batch_size
        return replace(
            self, cpus=threads or 1, gpus=int(device == "cuda"), ongoing=engine.batch_size,
            max_ongoing=engine.max_queue + sequences + SPARE,
        )  # fmt: skip


def run_on_ray(
    load: Callable[[], ServedModel], options: ServeOptions, replicas: ReplicaOptions, host: str, port: int,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    from fathomlm.serve.replicas import run_replicas

    def ready() -> None:
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"{replicas.replicas} replicas are ready at {at} (base URL for OpenAI clients: {at}/v1)")

    run_replicas(load, options, replicas, host, port, ready)
