"""LoRA adapters: the merged model is PEFT's own, shares what it does not change, and is served under its name."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.checkpoints.adapter import CONFIG, WEIGHTS, with_adapter
from fathomlm.checkpoints.resolve import load
from fathomlm.cli.main import read_command
from fathomlm.cli.serve import load_adapter
from fathomlm.cli.serve_models import read_lora
from fathomlm.decode.full import generate
from fathomlm.errors import CheckpointError, FathomError, OptionError
from fathomlm.serve.service import Catalog, Offer, Service
from serve.serving import running

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.tensor([[5, 9, 33, 7, 81, 2]])


def write_adapter(base: Any, directory: Path, **options: Any) -> Any:
    """An adapter of PEFT's own making, with random changes; PEFT's model."""
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q", "v", "down"]} | options
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    return model


@pytest.fixture
def looped(tiny_model_dir: Path) -> Any:
    return load(tiny_model_dir)


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "target_modules": ["o", "gate", "up"]}], ids=["lora", "rslora"]
)
def test_a_merged_adapter_is_pefts_model(looped: Any, tiny_model: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    write_adapter(deepcopy(tiny_model), tmp_path, **options)
    trained = peft.PeftModel.from_pretrained(deepcopy(tiny_model), tmp_path).eval()
    made = with_adapter(looped, tmp_path)
    with torch.no_grad():
        assert torch.allclose(made(TOKENS).logits, trained(TOKENS).logits, atol=1e-4)
        assert torch.equal(looped(TOKENS).logits, tiny_model(TOKENS).logits), "the base stays as it is"
        assert not torch.allclose(made(TOKENS).logits, looped(TOKENS).logits, atol=1e-2)
    changed = {name for name, one in made.named_parameters() if one is not dict(looped.named_parameters())[name]}
    targets = options.get("target_modules", ["q", "v", "down"])
    assert changed == {name for name, _ in looped.named_parameters() if name.split(".")[-2] in targets}


def test_an_adapter_over_the_hugging_face_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    theirs = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape)).eval()
    theirs.save_pretrained(tmp_path / "base")
    trained = write_adapter(theirs, tmp_path / "adapter", target_modules=["q_proj", "down_proj"]).eval()
    made = with_adapter(load(tmp_path / "base"), tmp_path / "adapter")  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.allclose(made(TOKENS).logits, trained(TOKENS).logits, atol=1e-4)


def test_an_adapter_is_served_beside_its_base(looped: Any, tiny_model: Any, tmp_path: Path) -> None:
    write_adapter(deepcopy(tiny_model), tmp_path / "deep")
    options = read_command(["serve", "tiny", "--lora", f"deep={tmp_path / 'deep'}", "--max-length", "96"])[1]
    assert [read_lora(given) for given in options.several.loras] == [("deep", str(tmp_path / "deep"))]
    services: list[Service] = []
    merge = partial(load_adapter, options, options.engine, services, "deep", str(tmp_path / "deep"))
    prompt, asked = "the quick brown", {"temperature": 0, "max_tokens": 8}
    with running(looped, catalog=Catalog({"deep": Offer(load=merge)})) as server:
        services.append(server.service)
        for name, model in (("tiny", looped), ("deep", with_adapter(looped, tmp_path / "deep"))):
            found = server.client().completions.create(model=name, prompt=prompt, **asked)  # type: ignore[call-overload]
            assert (found.model, found.choices[0].text) == (name, generate(model, [prompt], max_new_tokens=8)[0].text)
        assert [one.id for one in server.client().models.list().data] == ["tiny", "deep"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias must be none"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"r": 8}, "but r is 8"),
        ({"r": 0}, "r must be an integer"),
    ],
)
def test_what_an_adapter_cannot_have_is_refused(
    looped: Any, tiny_model: Any, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    write_adapter(deepcopy(tiny_model), tmp_path)
    file = tmp_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(FathomError, match=why):
        with_adapter(looped, tmp_path)


def test_adapters_of_other_models_and_broken_ones_are_refused(looped: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}), encoding="utf-8")
    for given in ("deep", "deep=", f"deep={tmp_path}"):
        with pytest.raises(OptionError, match=r"^--lora"):
            read_lora(given)
    pair = {"lora_A": torch.zeros(2, 32), "lora_B": torch.zeros(32, 2)}
    for name, parts, why in (
        ("model.layers.0.self_attn.q_proj", pair, "no linear 'model.layers.0.self_attn.q_proj'"),
        ("decoder.layers.9.attn.q", pair, "no linear"),
        ("decoder.layers.0.attn.k", pair, "changes a matrix of"),
        ("decoder.layers.0.attn.q", {"lora_A": pair["lora_A"]}, "not a pair of LoRA matrices"),
        ("decoder.embed", {"lora_embedding_A": pair["lora_A"]}, "not a pair|no LoRA matrices"),
    ):
        save_file({f"base_model.model.{name}.{part}.weight": one for part, one in parts.items()}, tmp_path / WEIGHTS)
        with pytest.raises(CheckpointError, match=why):
            with_adapter(looped, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot read"):
        with_adapter(looped, tmp_path)
    with pytest.raises(OptionError, match="cannot be combined with --quantize"):
        read_command(["serve", "tiny", "--lora", f"deep={tmp_path}", "--quantize", "int8"])
