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
    from fathomlm.cache import build_cache as build_cache
    from fathomlm.checkpoints.activations import measure_activations as measure_activations
    from fathomlm.checkpoints.assemble import replan as replan
    from fathomlm.checkpoints.assemble import with_loops as with_loops
    from fathomlm.checkpoints.convert import convert as convert
    from fathomlm.checkpoints.export import export as export
    from fathomlm.checkpoints.gguf.writer import export_gguf as export_gguf
    from fathomlm.checkpoints.native import save as save
    from fathomlm.checkpoints.resolve import load as load
    from fathomlm.checkpoints.vocabulary import trim_vocab as trim_vocab
    from fathomlm.decode.exiting import Exiting as Exiting
    from fathomlm.decode.full import Session as Session
    from fathomlm.decode.full import generate as generate
    from fathomlm.decode.generation import Generation as Generation
    from fathomlm.decode.prompts import chat_prompt as chat_prompt
    from fathomlm.decode.sampling import Sampling as Sampling
    from fathomlm.decode.threshold import ThresholdEstimator as ThresholdEstimator
    from fathomlm.depth import Architecture as Architecture
    from fathomlm.depth import DepthPlan as DepthPlan
    from fathomlm.depth import Relaxation as Relaxation
    from fathomlm.depth import Routing as Routing
    from fathomlm.depth import build_routing as build_routing
    from fathomlm.depth.cost import count as count
    from fathomlm.depth.presets import preset as preset
    from fathomlm.engine.async_engine import AsyncEngine as AsyncEngine
    from fathomlm.engine.engine import Engine as Engine
    from fathomlm.engine.options import EngineOptions as EngineOptions
    from fathomlm.engine.options import RestartPolicy as RestartPolicy
    from fathomlm.engine.request import Finished as Finished
    from fathomlm.engine.request import Request as Request
    from fathomlm.engine.request import Result as Result
    from fathomlm.engine.request import TokenEvent as TokenEvent
    from fathomlm.engine.session import EngineSession as EngineSession
    from fathomlm.engine.stream import Stream as Stream
    from fathomlm.errors import CheckpointError as CheckpointError
    from fathomlm.errors import DataError as DataError
    from fathomlm.errors import EngineStopped as EngineStopped
    from fathomlm.errors import FathomError as FathomError
    from fathomlm.errors import ModelNotFound as ModelNotFound
    from fathomlm.errors import OptionError as OptionError
    from fathomlm.errors import OutputError as OutputError
    from fathomlm.errors import PlanError as PlanError
    from fathomlm.errors import QueueFull as QueueFull
    from fathomlm.errors import RequestTooLarge as RequestTooLarge
    from fathomlm.errors import TrainingError as TrainingError
    from fathomlm.errors import UnsupportedModel as UnsupportedModel
    from fathomlm.model.decoder import Decoder as Decoder
    from fathomlm.model.encoder_memory import EncoderMemory as EncoderMemory
    from fathomlm.model.hub import FathomConfig as FathomConfig
    from fathomlm.model.hub import FathomForCausalLM as FathomForCausalLM
    from fathomlm.model.route import DepthControl as DepthControl
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM as FathomForSeq2SeqLM
    from fathomlm.model.seq2seq import FathomSeq2SeqConfig as FathomSeq2SeqConfig
    from fathomlm.serve.app import create_app as create_app
    from fathomlm.serve.served_model import serve_model as serve_model
    from fathomlm.serve.service import Catalog as Catalog
    from fathomlm.serve.service import Offer as Offer
    from fathomlm.serve.service import Service as Service
    from fathomlm.train.reading import read_recipe as read_recipe

_MODULES = {
    "fathomlm.cache": "build_cache",
    "fathomlm.checkpoints.activations": "measure_activations",
    "fathomlm.checkpoints.assemble": "replan with_loops",
    "fathomlm.checkpoints.convert": "convert",
    "fathomlm.checkpoints.export": "export",
    "fathomlm.checkpoints.gguf.writer": "export_gguf",
    "fathomlm.checkpoints.native": "save",
    "fathomlm.checkpoints.resolve": "load",
    "fathomlm.checkpoints.vocabulary": "trim_vocab",
    "fathomlm.decode.exiting": "Exiting",
    "fathomlm.decode.full": "Session generate",
    "fathomlm.decode.generation": "Generation",
    "fathomlm.decode.prompts": "chat_prompt",
    "fathomlm.decode.sampling": "Sampling",
    "fathomlm.decode.threshold": "ThresholdEstimator",
    "fathomlm.depth": "Architecture DepthPlan Relaxation Routing build_routing",
    "fathomlm.depth.cost": "count",
    "fathomlm.depth.presets": "preset",
    "fathomlm.engine.async_engine": "AsyncEngine",
    "fathomlm.engine.engine": "Engine",
    "fathomlm.engine.options": "EngineOptions RestartPolicy",
    "fathomlm.engine.request": "Finished Request Result TokenEvent",
    "fathomlm.engine.session": "EngineSession",
    "fathomlm.engine.stream": "Stream",
    "fathomlm.errors": "CheckpointError DataError EngineStopped FathomError ModelNotFound OptionError "
    "OutputError PlanError QueueFull RequestTooLarge TrainingError UnsupportedModel",
    "fathomlm.model.decoder": "Decoder",
    "fathomlm.model.encoder_memory": "EncoderMemory",
    "fathomlm.model.hub": "FathomConfig FathomForCausalLM",
    "fathomlm.model.route": "DepthControl",
    "fathomlm.model.seq2seq": "FathomForSeq2SeqLM FathomSeq2SeqConfig",
    "fathomlm.serve.app": "create_app",
    "fathomlm.serve.served_model": "serve_model",
    "fathomlm.serve.service": "Catalog Offer Service",
    "fathomlm.train.reading": "read_recipe",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
"""Where each public name is; `TYPE_CHECKING` says the same to type checkers."""

__all__ = [*_PUBLIC, "__version__"]


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
