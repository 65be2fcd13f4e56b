"""How transformers learns of our model types without being imported for it.

`import fathomlm` must cost nothing: torch and transformers take seconds, and `fathomlm --help` needs neither. Yet
`AutoModelForCausalLM.from_pretrained` is to read our directories afterwards, whichever of the two packages was imported
first, in a script, under `python -m` and in a notebook alike. So it is registered with transformers as soon as its table of
configurations exists, now or when it is imported later, of stand-ins: the first use of one imports our classes, which put
themselves in its place.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"
"""The module of transformers that has `CONFIG_MAPPING`. Every Auto class asks it which configuration a directory has."""
CLASSES = ("fathomlm.model.hub", "fathomlm.model.seq2seq")
"""Importing these registers their configurations and models."""
TYPES = {
    "fathomlm": ("fathomlm.model.hub", "FathomConfig"),
    "fathomlm-seq2seq": ("fathomlm.model.seq2seq", "FathomSeq2SeqConfig"),
}


TARGETS = "peft.utils.constants"
"""PEFT's module that has, for each model type, the linears that adapters sit on where a user names none."""
LORA = ["attn.q", "attn.v"]
"""As for the families of transformers: queries and values."""


class Later:
    """A configuration class that is not imported yet. It can be called, and has the attributes of the class."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self._module, self.__name__ = TYPES[model_type]

    def _real(self) -> Any:
        for name in CLASSES:
            importlib.import_module(name)
        return getattr(sys.modules[self._module], self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy, pickle and inspect of any object
            raise AttributeError(name)
        return getattr(self._real(), name)


class Watch:
    """Runs what `ANNOUNCED` says once one of its modules has been imported. It finds no module itself; others do, and it
    lets their loaders do one thing more."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ANNOUNCED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = partial(_run, spec.loader.exec_module)  # type: ignore[method-assign]
                return spec
        return None


def _run(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    exec_module(module)
    ANNOUNCED[module.__name__](module)


def announce(table: ModuleType) -> None:
    """Tell transformers of the types that it does not know yet."""
    for model_type in TYPES:
        if model_type not in table.CONFIG_MAPPING:
            table.CONFIG_MAPPING.register(model_type, Later(model_type))


def announce_targets(constants: ModuleType) -> None:
    """Tell PEFT where its adapters sit by default."""
    known: dict[str, list[str]] = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for model_type in TYPES:
        known.setdefault(model_type, LORA)


ANNOUNCED = {TABLE: announce, TARGETS: announce_targets}


def register() -> None:
    """With what is imported already, and with the rest when it is."""
    if not any(isinstance(finder, Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watch())
    for name, tell in ANNOUNCED.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            tell(module)
