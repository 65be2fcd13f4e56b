"""The draft layer that comes for SmolLM2-135M: its size, its card, and that it spares passes without changing the text."""

from __future__ import annotations

from pathlib import Path

import pytest

import fathomlm
from fathomlm.checkpoints.exit_pack import read_pack
from fathomlm.checkpoints.resolve import load
from fathomlm.decode.exiting import Exiting
from fathomlm.packaged import packaged_drafts
from packaged.shipped import record_of

NAME = "smollm2-135m"
PATH = packaged_drafts(NAME)
NEW = 16

pytestmark = [
    pytest.mark.skipif(PATH is None, reason=f"no draft layer is packaged here: src/fathomlm/packaged/drafts/{NAME}"),
]


def test_it_is_small_and_says_what_it_is() -> None:
    assert PATH is not None
    assert sum(file.stat().st_size for file in PATH.rglob("*") if file.is_file()) < 12e6
    pack, record = read_pack(PATH), record_of(PATH)
    assert pack.parts.draft
    assert sum(value.numel() for value in pack.tensors.values()) == record["parameters"]
    card = (PATH / "README.md").read_text(encoding="utf-8")
    assert f"{record['greedy_1row']['speedup']:.2f}" in card


@pytest.mark.real
def test_the_text_is_the_full_models_with_half_the_passes(
    smollm2_path: Path, prompts: list[list[int]], replies: list[tuple[int, ...]]
) -> None:
    drafted = fathomlm.generate(
        load(smollm2_path, dtype="float32", exits=PATH), prompts, max_new_tokens=NEW, exiting=Exiting(mode="speculative")
    )
    assert [row.tokens for row in drafted] == [reply[:NEW] for reply in replies]
    passes, made = sum(row.exits.deep_passes for row in drafted if row.exits), sum(len(row.tokens) for row in drafted)
    assert passes < 0.6 * made
