"""PEFT and TRL themselves, with their defaults, on looped, relaxed and routed models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.train.data.tokenizers import byte_tokenizer
from model.test_citizen import MODELS, make, tokens

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
TEXT = "the quick brown fox jumps over the lazy dog; "


def adapted(model: FathomForCausalLM, **options: Any) -> Any:
    """With adapters that add something."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for name, value in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.2)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"target_modules": "all-linear"}], ids=["default", "all-linear"])
def test_adapters_learn_and_merge(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    base = make(name).eval()
    with torch.no_grad():
        before = base(tokens()).logits
    model = adapted(base, **options).eval()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    learns = {path: value for path, value in model.named_parameters() if value.requires_grad}
    assert learns
    assert all("lora_" in path and value.grad is not None and value.grad.any() for path, value in learns.items()), learns
    with torch.no_grad():
        after = model(input_ids=tokens()).logits
        assert not torch.allclose(after, before, atol=1e-3)
        with model.disable_adapter():
            torch.testing.assert_close(model(input_ids=tokens()).logits, before)
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(make(name).eval(), tmp_path / "adapter").eval()
        torch.testing.assert_close(again(input_ids=tokens()).logits, after)
        merged = model.merge_and_unload()
        assert type(merged) is FathomForCausalLM
        torch.testing.assert_close(merged(tokens()).logits, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_generation_uses_adapters(name: str) -> None:
    """Our own decoding, which packs weights where it can, goes through wrapped linears as the plain forward does."""
    base = make(name).eval()
    adapted(base, target_modules="all-linear").eval()
    with torch.no_grad():
        written = tokens()[:1]
        for _ in range(6):
            written = torch.cat([written, base(written).logits[:, -1:].argmax(-1)], dim=1)
    result = fathomlm.generate(base, [tokens()[0].tolist()], max_new_tokens=6, ignore_eos=True)[0]
    assert list(result.tokens) == written[0, 12:].tolist()


def text_model(name: str) -> FathomForCausalLM:
    model = make(name, vocab=257, context=128)
    model.tokenizer = byte_tokenizer()
    return model


def trainer(model: FathomForCausalLM, place: Path, steps: int = 10, **options: Any) -> Any:
    from datasets import Dataset

    settings = {"max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 3e-2, "logging_steps": 1}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(place), report_to=[], use_cpu=True, bf16=False, **settings),
        train_dataset=Dataset.from_dict({"text": [TEXT] * 20}),
        processing_class=model.tokenizer,
        **options,
    )


def losses(found: Any) -> list[float]:
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", MODELS)
def test_sft_trains_with_its_defaults(name: str, tmp_path: Path) -> None:
    model = text_model(name)
    before = {path: value.detach().clone() for path, value in model.named_parameters()}
    found = trainer(model, tmp_path)
    assert found.args.gradient_checkpointing
    found.train()
    told = losses(found)
    assert told[-1] < told[0] - 0.3
    same = [path for path, value in model.named_parameters() if torch.equal(value, before[path])]
    assert not same
    found.save_model(str(tmp_path / "saved"))
    again = fathomlm.load(tmp_path / "saved").eval()
    row = torch.tensor([model.tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(again(row).logits, model.eval()(row).logits, atol=1e-5, rtol=1e-5)


def test_sft_computes_the_models_own_loss(tmp_path: Path) -> None:
    """TRL multiplies hidden states and head by itself; the first loss is what the model says of the same rows."""
    model = text_model("looped")
    row = torch.tensor([[*model.tokenizer(TEXT)["input_ids"], model.tokenizer.eos_token_id]])
    with torch.no_grad():
        mine = model.eval()(row, labels=row).loss.item()
    found = trainer(model, tmp_path, steps=1)
    found.train()
    assert losses(found)[0] == pytest.approx(mine, abs=1e-3)


def test_sft_trains_adapters(tmp_path: Path) -> None:
    model = text_model("lora")
    found = trainer(model, tmp_path, peft_config=peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
    before = {path: value.detach().clone() for path, value in found.model.named_parameters()}
    found.train()
    assert losses(found)[-1] < losses(found)[0]
    changed = {path for path, value in found.model.named_parameters() if not torch.equal(value, before[path])}
    assert changed
    assert all("lora_" in path for path in changed)
