"""Exits trained over a plain model that stays as it is: batches, runs, and what tests of every kind of exit ask."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.errors import OptionError
from fathomlm.train.data.loader import IGNORE
from fathomlm.train.objective import Objective
from fathomlm.train.reading import build_recipe
from fathomlm.train.run import train

SHAPE = {"layers": 4, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 64, "vocab": 37}


@dataclass(frozen=True)
class Trained:
    """A plain model, and what was trained over it."""

    source: Path
    run: Path


def values_for(corpus: Path) -> dict[str, Any]:
    return {
        "data": {"path": str(corpus), "context": 32},
        "batch": {"sequences": 8, "micro": 8},
        "evaluate": {"every": 0, "rows": 0},
        "log": {"every": 1, "tensorboard": False},
        "device": "cpu",
    }


def train_exit(corpus: Path, source: Path, out: Path, own: dict[str, Any], steps: int, lr: float) -> Trained:
    """An exit behind the first layer, that has what `own` says."""
    exits = {"at": [1], "coefficient": 1.0, "distill": "forward_kl", "classifier": True, **own}
    values = values_for(corpus) | {"out": str(out), "model": {"source": str(source)}, "budget": {"steps": steps}}
    values |= {"loss": {"exits": exits}, "train": "exits", "optimizer": {"lr": lr, "weight_decay": 0.0}}
    train(build_recipe({**values, "evaluate": {"every": 0, "rows": 0, "first": True}}))
    return Trained(source, out)


def batch(rows: int = 3, length: int = 10, vocab: int = SHAPE["vocab"]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and which are there; the second row is three tokens short, the third one."""
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(0, vocab, (rows, length), generator=generator) for _ in range(2))
    keep = torch.arange(length)[None] < torch.tensor([length, length - 3, length - 1])[:rows, None]
    return tokens, targets.masked_fill(~keep, IGNORE), keep


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def check_compiled_gradients(model: nn.Module, objective: Objective, tokens: Tensor, targets: Tensor) -> None:
    """A compiled step has the eager one's."""

    def slopes() -> dict[str, Tensor]:
        model.zero_grad()
        objective(tokens, targets)[0].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    slow = slopes()
    model.compile_for_training("aot_eager")
    fast = slopes()
    torch._dynamo.reset()
    assert fast.keys() == slow.keys() != set()
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()) + 1e-6)


@contextmanager
def saved_activations(model: nn.Module, precision: str) -> Iterator[dict[int, Tensor]]:
    """What autograd keeps of two rows of 50 tokens, each memory once; weights and their narrow copies are left out."""
    own_places = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own_places and tensor.shape[0] in (2, 100):  # rows, or all their tokens
            kept.setdefault(place, tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        yield kept


def check_same_logits(one: Path, other: Path) -> None:
    """Bit for bit, at the full depth."""
    tokens = torch.arange(40)[None] * 5 % 256
    with torch.inference_mode():
        assert torch.equal(load(one)(tokens).logits, load(other)(tokens).logits)


def decode_every_mode(trained: Trained) -> tuple[Any, list[int], list[int]]:
    """The trained model, a prompt's tokens, and what static decoding makes of it. The tokens of full and speculative
    decoding are the source's."""
    model, prompt, made = load(trained.run / "last"), "7: the line is", {}
    for mode in ("full", "static", "speculative"):
        more = {"threshold": 0.2} if mode == "speculative" else {}
        (row,) = generate(model, prompt, max_new_tokens=16, exiting=Exiting(mode=mode, **more))  # type: ignore[arg-type]
        made[mode] = row.tokens
    (source,) = generate(load(trained.source), prompt, max_new_tokens=16)
    assert made["full"] == made["speculative"] == source.tokens
    return model, list(row.prompt_tokens), made["static"]


def check_resumes(
    recipe: Callable[..., Any], weights_of: Callable[[Path], dict[str, Any]], out: Path, **changes: Any
) -> None:
    """A run that was stopped and resumed ends with the weights of one that was not."""
    whole, halves = (recipe(**changes, out=str(out / name), checkpoint={"every": 3, "keep": 0}) for name in "ab")
    train(whole)
    train(halves)
    shutil.rmtree(out / "b/checkpoints/step-00000006")
    assert train(halves, resume=True).finished
    first, second = (weights_of(out / name / "last") for name in "ab")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def check_refused(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"model": {"shape": "smollm2-135m"}, "budget": {"steps": 1}, "batch": {"sequences": 1}}
    with pytest.raises(OptionError) as caught:
        build_recipe({**values, **changes})
    assert str(caught.value).startswith(message)
