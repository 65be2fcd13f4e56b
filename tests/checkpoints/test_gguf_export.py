"""GGUF out: what is written is read back to the same model, tied where llama.cpp has loops, with its tokenizer."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import normalizers
from transformers import LlamaConfig

import fathomlm
from checkpoints.gguf_files import pieces_metadata
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.checkpoints.gguf.tokenizer import build_tokenizer, tokenizer_metadata
from fathomlm.checkpoints.gguf.writer import KINDS, export_gguf
from fathomlm.checkpoints.native import save
from fathomlm.cli.main import main
from fathomlm.errors import OptionError
from parity import families
from parity.families import CONFIGS, tiny


def LLAMA3() -> Any:  # noqa: N802
    """With the scaling that Meta's models have."""
    return LlamaConfig(
        **families.GROUPED,
        rope_parameters=families.LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 5e5},
    )


@pytest.fixture(scope="module")
def models(tiny_tokenizer: Any, tmp_path_factory: Any) -> Any:
    """Tiny random models of every family, with a vocabulary that the tiny tokenizer fits, read by us."""
    made: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in made:
            config = LLAMA3() if name == "llama3" else CONFIGS[name]()
            config.vocab_size = len(tiny_tokenizer) + 4  # more rows than tokens, as many checkpoints have
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(families.CONFIGS, "sized", lambda: config)
                directory = tmp_path_factory.mktemp(name)
                tiny("sized").save_pretrained(directory)
            made[name] = fathomlm.load(directory)
            made[name].tokenizer = copy.deepcopy(tiny_tokenizer)
            if name.startswith("neox"):
                made[name].tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Pythia's has
        return made[name]

    return model


UNSAID = ("llama3-rope", "mistral-window", "qwen2-window", "gemma3", "qwen3-yarn", "smollm3-window", "qwen3-moe-parts")
"""Tiny configurations that GGUF has no place for here: windows, YaRN, scalings that no released model has, and experts that
do not add up to 1."""
UNWRITTEN = ("phi3", "phi4-mini")
TOKENS = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", list(CONFIGS))
@torch.inference_mode()
def test_a_plain_model_comes_back(models: Any, name: str, tmp_path: Path) -> None:
    model = models(name)
    if name in UNSAID:
        with pytest.raises(OptionError, match=r"cannot hold (windows|attention_scale|rope|rotated|experts_normed|this)"):
            export_gguf(model, tmp_path / "m.gguf", "f32")
        assert list(tmp_path.iterdir()) == []
        return
    if name in UNWRITTEN:
        with pytest.raises(OptionError, match=r"GGUF export supports llama, .*, not "):
            export_gguf(model, tmp_path / "m.gguf", "f32")
        return
    found = export_gguf(model, tmp_path / "m.gguf", "f32")
    assert (found.layers, found.loops) == (6, 1)
    again = fathomlm.load(tmp_path / "m.gguf")
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)
    assert again.config.eos_token_id == model.config.eos_token_id
    text = "The depth of 12 fathoms, naïve 🙂"
    assert again.tokenizer(text).input_ids == model.tokenizer(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    chats = [one.tokenizer.apply_chat_template(messages, tokenize=False) for one in (again, model)]
    assert chats[0] == chats[1]


@pytest.mark.parametrize("name", ["llama", "smollm3", "granite", "olmo2", "qwen3-moe", "neox"])
def test_names_are_those_that_llama_cpp_reads(models: Any, name: str, tmp_path: Path) -> None:
    """By the tables of the gguf package, which are llama.cpp's own."""
    export_gguf(models(name), tmp_path / "m.gguf", "f32")
    file = GGUFFile(tmp_path / "m.gguf")
    kind = file.metadata["general.architecture"]
    arch = next(each for each, called in gguf.MODEL_ARCH_NAMES.items() if called == kind)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    stored = {re.sub(r"^blk\.\d+", "blk.{bid}", tensor).rpartition(".")[0] for tensor in file.tensors}
    assert stored <= known
    sections = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    templates = (str(value) for section in sections for value in vars(section).values())
    keys = {template.replace("{arch}", kind) for template in templates}
    assert {key for key in file.metadata if key.startswith(f"{kind}.")} <= keys


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama3", "llama-wide-head", "mistral"])
@torch.inference_mode()
def test_loops_are_kept(models: Any, name: str, tmp_path: Path) -> None:
    looped = fathomlm.convert(models(name), recursions=3)
    looped.tokenizer = models(name).tokenizer
    found = export_gguf(looped, tmp_path / "m.gguf", "f32")
    assert (found.architecture, found.layers, found.loops) == ("nanbeige", 2, 3)
    file = GGUFFile(tmp_path / "m.gguf")
    assert (file.metadata["nanbeige.num_loops"], file.metadata["nanbeige.skip_loop_final_norm"]) == (3, True)
    again = fathomlm.load(tmp_path / "m.gguf")
    assert (again.plan.recursions, again.plan.unique_layers, again.plan.loop_norm) == (3, 2, False)
    torch.testing.assert_close(again(TOKENS).logits, looped(TOKENS).logits, rtol=0, atol=1e-5)
    export_gguf(looped, tmp_path / "u.gguf", "f32", unroll=True)
    unrolled = fathomlm.load(tmp_path / "u.gguf")
    assert (unrolled.plan.recursions, unrolled.architecture.family) == (1, "llama")
    torch.testing.assert_close(unrolled(TOKENS).logits, looped(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"sharing": "middle-cycle", "recursions": 2},
        {"sharing": "sequence", "recursions": 3},
        {"recursions": 2, "relax": "lora", "rank": 4},
    ],
    ids=["middle-cycle", "sequence", "lora"],
)
@torch.inference_mode()
def test_other_plans_are_unrolled(models: Any, options: dict[str, Any], tmp_path: Path) -> None:
    looped = fathomlm.convert(models("llama"), **options)
    looped.tokenizer = models("llama").tokenizer
    found = export_gguf(looped, tmp_path / "m.gguf", "f32")
    assert (found.architecture, found.layers, found.loops) == ("llama", looped.plan.unrolled_layers, 1)
    again = fathomlm.load(tmp_path / "m.gguf")
    torch.testing.assert_close(again(TOKENS).logits, looped(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_matrices_are_packed(models: Any, kind: str, tmp_path: Path) -> None:
    model = models("llama")
    export_gguf(model, tmp_path / "m.gguf", kind)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.tensors["blk.0.attn_q.weight"].kind.name == kind.upper()
    assert file.tensors["output_norm.weight"].kind.name == "F32"
    assert file.tensors["blk.0.ffn_down.weight"].kind.name == (kind.upper() if kind in ("f32", "f16", "bf16") else "F16")
    bits = {"f32": 1e-7, "f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2, "q5_1": 0.1, "q5_0": 0.1, "q4_1": 0.2, "q4_0": 0.2}
    weight, again = (
        model.decoder.layers[0].attn.q.weight,
        GGUFCheckpoint(tmp_path / "m.gguf").tensor("layers.0.attn.q.weight"),
    )
    assert (weight - again).abs().max() <= bits[kind] * weight.abs().max()


def test_pieces_come_back(tmp_path: Path, models: Any) -> None:
    """A SentencePiece-like tokenizer, whose file has scores and no merges."""
    words = ["▁the", "▁depth", "▁of", "▁water", "▁fathom"]
    facts = pieces_metadata(words)
    architecture = models("llama").architecture
    tokenizer = build_tokenizer(_file_of(facts), architecture)
    again = build_tokenizer(_file_of(tokenizer_metadata(tokenizer, architecture, (2,))), architecture)
    for text in ("the depth of the water", "fathoms 12 🙂", " the  of"):
        assert again(text).input_ids == tokenizer(text).input_ids


class _file_of:  # noqa: N801
    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata, self.path = metadata, Path("here")


def test_what_gguf_cannot_say_is_refused_in_words(models: Any, tmp_path: Path, tiny_model: Any) -> None:
    out = tmp_path / "m.gguf"
    routed = fathomlm.convert(models("llama"), recursions=2, router="expert")
    routed.tokenizer = models("llama").tokenizer
    with pytest.raises(OptionError, match="cannot hold a router"):
        export_gguf(routed, out)
    nameless = fathomlm.convert(models("llama"), recursions=2)
    nameless.tokenizer = None
    with pytest.raises(OptionError, match="no tokenizer"):
        export_gguf(nameless, out)
    with pytest.raises(OptionError, match="unknown weight format 'q3_k'"):
        export_gguf(models("llama"), out, "q3_k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("llama-perplexity") is None, reason="needs llama.cpp's llama-perplexity on the path")
def test_llama_cpp_gives_a_looped_file_the_perplexity_of_its_unrolled_twin(tmp_path: Path) -> None:
    looped = fathomlm.convert(fathomlm.load("smollm2-135m"), recursions=2)
    text = tmp_path / "text.txt"
    text.write_text("The depth of the water is the measure of the fathom line. " * 200)
    found = []
    for unroll in (False, True):
        out = tmp_path / f"{unroll}.gguf"
        export_gguf(looped, out, "q8_0", unroll=unroll)
        command = ["llama-perplexity", "-m", str(out), "-f", str(text), "-c", "256", "--chunks", "2"]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        found.append(float(re.search(r"PPL = ([\d.]+)", run.stdout + run.stderr)[1]))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_a_saved_looped_model_is_exported_by_its_directory(models: Any, tmp_path: Path) -> None:
    looped = fathomlm.convert(models("llama"), recursions=2)
    looped.tokenizer = models("llama").tokenizer
    save(looped, tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "nb"), "--format", "nanbeige"]) == 0
    again = fathomlm.load(tmp_path / "nb")
    assert (again.architecture.family, again.plan.recursions, again.plan.unique_layers) == ("nanbeige", 2, 3)
