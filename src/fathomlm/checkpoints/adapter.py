"""LoRA adapters in PEFT's format, merged into a model that shares every other weight with its base.

An adapter may have been trained over a FathomLM model (`decoder.layers.0.attn.q`), or over the Hugging Face model that a
plain one was loaded from (`model.layers.0.self_attn.q_proj`). In a looped model a layer's change counts in every loop.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fathomlm.checkpoints.families import family_for, hf_name
from fathomlm.checkpoints.huggingface import stored_as
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.fields import Fields
from fathomlm.jsonfile import read_object
from fathomlm.model.hub import FathomForCausalLM, check_plain

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PAIR = (".lora_A.weight", ".lora_B.weight")
MOST_RANK = 4096


def check_adapter(directory: str | Path) -> Path:
    """A directory that has an adapter; nothing large is read."""
    path = Path(directory).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise OptionError(f"{directory} is not a LoRA adapter of PEFT: it has no {name}")
    return path


def with_adapter(model: FathomForCausalLM, directory: str | Path) -> FathomForCausalLM:
    """A model with the adapter's changes added to the weights of its linears. All else it shares with the one it was made
    from, which stays as it is."""
    path = check_adapter(directory)
    check_plain(model, "changed by an adapter")
    config = read_object(path / CONFIG, error=CheckpointError)
    _refuse_unknown(config)
    rank = config.integer("r", at_least=1, at_most=MOST_RANK)
    alpha = config.number("lora_alpha", default=8.0)
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora", default=False) else rank)
    made = _sharing(model)
    for name, (a_RK, b_OR) in _pairs(path, rank).items():
        linear = _linear(made, name, path)
        if linear.weight.shape != (len(b_OR), a_RK.shape[1]):
            shape = (len(b_OR), a_RK.shape[1])
            raise CheckpointError(f"{path}: {name} changes a matrix of {shape}, the model's is {tuple(linear.weight.shape)}")
        weight = linear.weight
        change_OK = (b_OR.float() @ a_RK.float()).to(weight.device) * scale
        linear.weight = nn.Parameter((weight.float() + change_OK).to(weight.dtype), requires_grad=False)
    return made


def _refuse_unknown(config: Fields) -> None:
    """What would change the model beyond its linears' weights, or otherwise than by B A."""
    kind = config.text("peft_type", default="LORA")
    if kind != "LORA":
        raise OptionError(f"{config.where}: peft_type must be LORA, got {kind}")
    for name in (
        "use_dora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "layer_replication",
        "trainable_token_indices",
    ):
        if config.raw(name):
            raise OptionError(f"{config.where}: {name} is not supported")
    if config.text("bias", default="none") != "none":
        raise OptionError(f"{config.where}: bias must be none")


def _pairs(path: Path, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By the name of a linear: A (rank, in) and B (out, rank)."""
    try:
        found = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path / WEIGHTS}: {error}") from error
    names = dict.fromkeys(key.removesuffix(end) for key in found for end in PAIR if key.endswith(end))
    strange = [key for key in found if not key.endswith(PAIR) or not key.startswith(PREFIX)]
    halves = [name for name in names if any(name + end not in found for end in PAIR)]
    if strange or halves or not names:
        what = f"'{(strange + halves)[0]}' is not a pair of LoRA matrices" if names else "it has no LoRA matrices"
        raise CheckpointError(f"{path / WEIGHTS}: {what}")
    pairs = {name.removeprefix(PREFIX): (found[name + PAIR[0]], found[name + PAIR[1]]) for name in names}
    for name, (a_RK, b_OR) in pairs.items():
        if a_RK.dim() != 2 or b_OR.dim() != 2 or len(a_RK) != rank or b_OR.shape[1] != rank:
            raise CheckpointError(
                f"{path / WEIGHTS}: {name} has {tuple(a_RK.shape)} and {tuple(b_OR.shape)}, but r is {rank}"
            )
    return pairs


def _sharing(model: FathomForCausalLM) -> FathomForCausalLM:
    """A copy of the modules over the same tensors."""
    shared: list[Any] = [*model.parameters(), *model.buffers(), model.tokenizer]
    return copy.deepcopy(model, {id(one): one for one in shared})


def _linear(model: FathomForCausalLM, name: str, path: Path) -> nn.Linear:
    modules = dict(model.decoder.named_modules())
    own = name.removeprefix("decoder.") if name.startswith("decoder.") else _from_hf(model).get(name)
    found = modules.get(own or "")
    if not isinstance(found, nn.Linear):
        raise CheckpointError(f"{path}: the model has no linear '{name}'; was the adapter trained over another model?")
    return found


def _from_hf(model: FathomForCausalLM) -> dict[str, str]:
    """Our name of each linear of a plain model by Hugging Face's, those apart that it keeps fused."""
    if model.plan.recursions > 1:
        return {}
    family, found = family_for(model.architecture), {}
    for name, module in model.decoder.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers.") and name.count(".") == 3:
            stored, part = stored_as(family, f"{name}.weight")
            if part is None:
                found[hf_name(family, stored).removesuffix(".weight")] = name
    return found
