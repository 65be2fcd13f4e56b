"""Packs with an exit vocabulary: it comes back on any copy of the base, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.exit_packs import EVERY, bare, build, edit, rewrite, said
from decode.exit_models import PROMPTS
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.exit_pack import RECORD, WEIGHTS, read_pack, write_pack
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.full import generate
from fathomlm.errors import CheckpointError, OptionError
from fathomlm.model.hub import FathomForCausalLM
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = torch.tensor([40, 3, 95, 0, 17, 18, 60, 61])
RISING = sorted(VOCAB.tolist())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: read it, do not write to it."""
    return save(bare(build("every")), tmp_path_factory.mktemp("exit_vocab") / "base")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(build("every"), tmp_path / "pack", exit_vocab=VOCAB)


def vocab_of(model: Any) -> list[int] | None:
    limited = model.decoder.exit_vocab
    return None if limited is None else limited.vocab_W.tolist()


def test_what_is_written(pack: Path) -> None:
    stored, record = load_file(pack / WEIGHTS), json.loads((pack / RECORD).read_text())
    assert (stored["exit_vocab"].dtype, stored["exit_vocab"].tolist()) == (torch.int32, RISING)
    assert (record["exit_vocab"], record["version"]) == (8, 1)
    found = read_pack(pack)
    assert found.exit_vocab is not None
    assert found.exit_vocab.tolist() == RISING
    assert "exit_vocab" not in found.tensors, "it is no weight of a decoder"


@pytest.mark.parametrize("kind", ["every", "head", "nothing", "two", "looped"])
def test_exits_choose_among_them_and_drafts_are_made_whole(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    base, pack = save(bare(model), tmp_path / "base"), write_pack(model, tmp_path / "pack", exit_vocab=VOCAB)
    full = [row.tokens for row in generate(load(base), PROMPTS, max_new_tokens=6)]
    again = load(base, exits=pack)
    model.decoder.limit_exits(VOCAB)
    assert vocab_of(again) == RISING
    assert said(again, "full") == full
    assert said(again, "speculative", threshold=0.3) == full
    assert said(again, "static") == said(model, "static")
    assert {token for row in said(again, "static") for token in row} <= set(RISING)
    assert said(load(base, exits=write_pack(build(kind), tmp_path / "all")), "static") != said(again, "static")


def test_an_encoder_decoders_drafts_too(tmp_path: Path) -> None:
    write_tiny_t5("t5", tmp_path / "t5")
    plain = load(tmp_path / "t5", dtype="float32")
    model = replan(plain, plain.plan.with_exits([0]), **EVERY)
    again = load(
        tmp_path / "t5", dtype="float32", exits=write_pack(model, tmp_path / "pack", exit_vocab=torch.tensor([1, 5, 9]))
    )
    assert vocab_of(again) == [1, 5, 9]
    assert said(again, "speculative", threshold=0.0) == said(again, "full")
    assert {token for row in said(again, "static") for token in row} <= {1, 5, 9}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_rows_are_the_heads_wherever_the_model_is(dtype: torch.dtype, base: Path, pack: Path) -> None:
    early = load(base, torch.bfloat16 if dtype == torch.bfloat16 else None, exits=pack)
    for model in (early, early.to(dtype)):
        limited, head = model.decoder.exit_vocab, model.decoder.head_weight
        assert limited is not None
        assert (limited.rows_WM.dtype, limited.vocab_W.dtype) == (head.dtype, torch.long)
        assert torch.equal(limited.rows_WM, head[RISING])
    held = dict(early.to("meta").decoder.exit_vocab.named_buffers())  # type: ignore[union-attr]
    assert {name for name, value in held.items() if value.is_meta} == {"vocab_W", "rows_WM"}


def test_a_models_own_words_come_along(base: Path, pack: Path, tmp_path: Path) -> None:
    model = load(base, exits=pack)
    assert (write_pack(model, tmp_path / "again") / WEIGHTS).read_bytes() == (pack / WEIGHTS).read_bytes()
    others = write_pack(model, tmp_path / "others", exit_vocab=torch.tensor([7, 2], dtype=torch.int16))
    assert vocab_of(load(base, exits=others)) == [2, 7]
    model.decoder.limit_exits(None)
    assert read_pack(write_pack(model, tmp_path / "every")).exit_vocab is None
    assert vocab_of(load(save(load(base, exits=pack), tmp_path / "model"))) == RISING, "a model's directory keeps them"


def test_a_pack_from_before_there_were_words_is_read(base: Path, tmp_path: Path) -> None:
    pack = write_pack(build("every"), tmp_path / "pack")
    assert json.loads((pack / RECORD).read_text())["exit_vocab"] is None
    edit(pack, exit_vocab=...)
    assert "exit_vocab" not in json.loads((pack / RECORD).read_text())
    assert read_pack(pack).exit_vocab is None
    assert vocab_of(load(base, exits=pack)) is None


def put(exit_vocab: Tensor) -> Callable[[Path], None]:
    return lambda pack: rewrite(pack, lambda held: held.update(exit_vocab=exit_vocab))


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (
        lambda pack: rewrite(pack, lambda held: held.pop("exit_vocab")),
        "is missing 'exit_vocab', according to exits.json",
    ),
    "not announced": (lambda pack: edit(pack, exit_vocab=None), "has an unexpected tensor 'exit_vocab'"),
    "not known of": (lambda pack: edit(pack, exit_vocab=...), "has an unexpected tensor 'exit_vocab'"),
    "another number": (
        lambda pack: edit(pack, exit_vocab=9),
        r"'exit_vocab' is \(8,\) of int32; exits.json asks for \(9,\) of int32",
    ),
    "below nothing": (lambda pack: edit(pack, exit_vocab=-1), r"asks for \(-1,\)"),
    "no number": (lambda pack: edit(pack, exit_vocab=True), "exit_vocab must be an integer or null"),
    "a list": (lambda pack: edit(pack, exit_vocab=[3]), "exit_vocab must be an integer or null"),
    "long": (put(torch.arange(8)), r"'exit_vocab' is \(8,\) of int64; .* of int32"),
    "fractions": (put(torch.arange(8.0)), r"\(8,\) of float32"),
    "a matrix": (put(ids(*range(8)).view(2, 4)), r"'exit_vocab' is \(2, 4\) of int32"),
    "not in order": (put(ids(0, 2, 1, 3, 4, 5, 6, 7)), "different tokens in rising order, from 0 to 95"),
    "twice": (put(ids(0, 1, 1, 3, 4, 5, 6, 7)), "different tokens in rising order"),
    "negative": (put(ids(-1, 1, 2, 3, 4, 5, 6, 7)), "from 0 to 95"),
    "beyond": (put(ids(1, 2, 3, 4, 5, 6, 7, 96)), "from 0 to 95"),
}


def empty(pack: Path) -> None:
    put(ids())(pack)
    edit(pack, exit_vocab=0)


@pytest.mark.parametrize("damage", [*DAMAGES, "none at all"])
def test_damaged_words_are_named(damage: str, base: Path, pack: Path) -> None:
    harm, says = DAMAGES.get(damage, (empty, "different tokens in rising order"))
    harm(pack)
    with pytest.raises(CheckpointError, match=says):
        load(base, exits=pack)


@pytest.mark.parametrize(
    ("exit_vocab", "says"),
    [
        (torch.tensor([], dtype=torch.long), "one or more different"),
        (torch.tensor([3, 3]), "one or more different"),
        (torch.tensor([[3, 4]]), "one or more different"),
        (torch.tensor([1.5, 2.0]), "one or more different"),
        (torch.tensor([96]), "from 0 to 95"),
        (torch.tensor([-1]), "from 0 to 95"),
    ],
)
def test_an_invalid_exit_vocab_is_not_written(exit_vocab: Tensor, says: str, tmp_path: Path) -> None:
    model: FathomForCausalLM = build("every")
    with pytest.raises(OptionError, match=says):
        write_pack(model, tmp_path / "pack", exit_vocab=exit_vocab)
    assert list(tmp_path.iterdir()) == []
