"""FathomLM: language models that give every token the depth it needs.

    import fathomlm
    model = fathomlm.load("smollm2-135m")
    small = fathomlm.convert(model, sharing="cycle", recursions=2, init="average", relax="lora", rank=64)
    small.save_pretrained("small")

Importing the package also teaches transformers' `AutoModelForCausalLM`, `AutoModelForSeq2SeqLM` and `AutoConfig` to read
FathomLM directories, and imports neither torch nor transformers for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fathomlm.registration import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fathomlm.checkpoints.convert import convert
    from fathomlm.checkpoints.export import export
    from fathomlm.checkpoints.resolve import load
    from fathomlm.checkpoints.save import save
    from fathomlm.decode.captured_session import CapturedSession
    from fathomlm.decode.exiting import Exiting
    from fathomlm.decode.full import Session, generate
    from fathomlm.decode.prompts import chat_prompt
    from fathomlm.decode.rows import Generation
    from fathomlm.decode.sampling import Sampling
    from fathomlm.depth import Architecture, DepthPlan, Relaxation
    from fathomlm.engine.async_engine import AsyncEngine
    from fathomlm.engine.engine import Engine
    from fathomlm.engine.options import EngineOptions
    from fathomlm.engine.request import Request
    from fathomlm.errors import FathomError
    from fathomlm.model.hub import FathomConfig, FathomForCausalLM
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomSeq2SeqConfig

_PUBLIC = {
    "Architecture": "fathomlm.depth",
    "AsyncEngine": "fathomlm.engine.async_engine",
    "CapturedSession": "fathomlm.decode.captured_session",
    "DepthPlan": "fathomlm.depth",
    "Engine": "fathomlm.engine.engine",
    "EngineOptions": "fathomlm.engine.options",
    "Exiting": "fathomlm.decode.exiting",
    "FathomConfig": "fathomlm.model.hub",
    "FathomError": "fathomlm.errors",
    "FathomForCausalLM": "fathomlm.model.hub",
    "FathomForSeq2SeqLM": "fathomlm.model.seq2seq",
    "FathomSeq2SeqConfig": "fathomlm.model.seq2seq",
    "Generation": "fathomlm.decode.rows",
    "Relaxation": "fathomlm.depth",
    "Request": "fathomlm.engine.request",
    "Sampling": "fathomlm.decode.sampling",
    "Session": "fathomlm.decode.full",
    "chat_prompt": "fathomlm.decode.prompts",
    "convert": "fathomlm.checkpoints.convert",
    "export": "fathomlm.checkpoints.export",
    "generate": "fathomlm.decode.full",
    "load": "fathomlm.checkpoints.resolve",
    "save": "fathomlm.checkpoints.save",
}

__all__ = [
    "Architecture",
    "AsyncEngine",
    "CapturedSession",
    "DepthPlan",
    "Engine",
    "EngineOptions",
    "Exiting",
    "FathomConfig",
    "FathomError",
    "FathomForCausalLM",
    "FathomForSeq2SeqLM",
    "FathomSeq2SeqConfig",
    "Generation",
    "Relaxation",
    "Request",
    "Sampling",
    "Session",
    "__version__",
    "chat_prompt",
    "convert",
    "export",
    "generate",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: torch and transformers take seconds, `fathomlm --help` must not."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fathomlm' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


register()
