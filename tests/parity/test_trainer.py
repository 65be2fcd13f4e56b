"""transformers' own Trainer over our models: one optimizer step is the same however the batch is split, and as it is for
transformers' own model with the same weights.

The Trainer counts the labels of all micro-batches of a step and leaves the division to the model (`num_items_in_batch`). A
model that takes the number and divides by its own labels has gradients that grow with accumulation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import fathomlm
from parity.families import tiny
from parity.t5_models import write_tiny_t5

ROWS, WIDTH = 8, 12
LABELS = (11, 1, 7, 3, 9, 2, 5, 12)
"""How many labels each row has: a mean of means would be another number than the mean over all labels."""


def _rows(source: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for count in LABELS:
        tokens = torch.randint(3, 96, (WIDTH,), generator=generator)
        labels = tokens.clone()
        labels[: WIDTH - count] = -100
        rows.append({"input_ids": tokens.flip(0) if source else tokens, "labels": labels})
    return rows


def _step(model: Any, directory: Path, each: int, smoothing: float = 0.0) -> dict[str, Any]:
    """One optimizer step over all rows, `each` at a time, without the dropout of transformers' encoders."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # attention's
            module.dropout = 0.0
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=each,
        gradient_accumulation_steps=ROWS // each,
        max_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,  # clips nothing, and logs the norm
        label_smoothing_factor=smoothing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_rows(model.config.is_encoder_decoder))
    trainer.train()
    logged = next(each for each in trainer.state.log_history if "grad_norm" in each)
    tokens = torch.arange(3, 15)[None]
    model.eval()
    with torch.inference_mode():
        more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        logits = model(tokens, **more).logits
    return {"loss": logged["loss"], "norm": logged["grad_norm"], "logits": logits}


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)  # logged with four digits behind the point
    assert one["norm"] == pytest.approx(other["norm"], rel=1e-4)
    torch.testing.assert_close(one["logits"], other["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_is_that_of_a_transformers_llama_however_the_batch_is_split(tmp_path: Path, smoothing: float) -> None:
    tiny("llama").save_pretrained(tmp_path / "llama")
    theirs = _step(tiny("llama"), tmp_path / "out", 8, smoothing)
    before = fathomlm.load(tmp_path / "llama")(torch.arange(3, 15)[None]).logits
    for each in (8, 2):
        _same(_step(tiny("llama"), tmp_path / "out", each, smoothing), theirs)
        ours = _step(fathomlm.load(tmp_path / "llama"), tmp_path / "out", each, smoothing)
        _same(ours, theirs)
        assert (ours["logits"] - before).abs().max() > 0.01


@pytest.mark.parametrize("name", ["t5", "flan-t5"])
def test_an_encoder_decoder_step_is_the_same_however_the_batch_is_split(tmp_path: Path, name: str) -> None:
    write_tiny_t5(name, tmp_path / name)
    whole, split = (_step(fathomlm.load(tmp_path / name), tmp_path / "out", each) for each in (8, 2))
    _same(whole, split)


@pytest.mark.parametrize("number", [40, torch.tensor(40)], ids=["int", "tensor"])
@torch.inference_mode()
def test_the_number_of_items_divides_the_sum_of_losses(tmp_path: Path, number: Any) -> None:
    theirs = tiny("llama")
    theirs.save_pretrained(tmp_path / "llama")
    ours = fathomlm.load(tmp_path / "llama")
    rows = _rows(source=False)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for more in ({}, {"num_items_in_batch": number}, {"shift_labels": batch["labels"].roll(-1, dims=1)}):
        torch.testing.assert_close(ours(**batch, **more).loss, theirs(**batch, **more).loss, rtol=0, atol=1e-5)
    assert ours(**batch, num_items_in_batch=number).loss != ours(**batch).loss
    write_tiny_t5("t5", tmp_path / "t5")
    seq2seq = fathomlm.load(tmp_path / "t5")
    mean = seq2seq(**batch).loss
    torch.testing.assert_close(seq2seq(**batch, num_items_in_batch=number).loss, mean * sum(LABELS) / 40, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_without_a_label_the_sum_is_zero(tmp_path: Path) -> None:
    """A micro-batch of a step may have no label of its own: the mean over none is NaN, its part of the sum is 0."""
    tiny("llama").save_pretrained(tmp_path / "llama")
    ours = fathomlm.load(tmp_path / "llama")
    tokens = torch.arange(3, 15)[None]
    assert ours(tokens, labels=torch.full_like(tokens, -100), num_items_in_batch=torch.tensor(7)).loss == 0
