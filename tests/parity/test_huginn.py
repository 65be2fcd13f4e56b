"""Huginn and the recurrent retrofits against a plain reference: logits, greedy text, the engine, and the way back out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fathomlm
from fathomlm.checkpoints.huggingface import plan_from_config
from fathomlm.checkpoints.native import save
from fathomlm.errors import OptionError, UnsupportedModel
from parity import huginn_reference as reference

TOKENS = torch.randint(3, 96, (14,), generator=torch.Generator().manual_seed(1))
SHARED: dict[str, Any] = {
    "model_type": "huginn_raven", "intermediate_size": 40, "vocab_size": 96, "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 3, "n_layers_in_coda": 1, "mean_recurrence": 4, "injection_type": "linear",
    "nonlin_name": "SiLU", "bias": False, "test_time_noise": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "huginn": SHARED | {
        "n_embd": 24, "n_heads": 3, "num_key_value_heads": 3, "rope_base": 50_000.0, "block_size": 512, "qk_bias": True,
        "tie_embeddings": True, "norm_eps": 1e-6, "init_values": {"std": 0.129, "embed_scale": 24**0.5},
    },
    "llama": SHARED | {
        "n_embd": 24, "n_heads": 4, "num_key_value_heads": 2, "rope_base": 500000.0, "rope_theta": 10_000.0,
        "max_position_embeddings": 512, "block_size": 4096, "qk_bias": False, "tie_embeddings": False, "norm_eps": 1e-5,
        "init_values": {"std": 0.129, "embed_scale": 1.0},
    },
    "olmo2": SHARED | {
        "n_embd": 24, "n_heads": 4, "num_key_value_heads": 4, "rope_theta": 500_000.0, "max_position_embeddings": 512,
        "qk_bias": False, "tie_embeddings": False, "norm_eps": 1e-6, "init_values": {"std": 0.129, "embed_scale": 1.0},
    },
}  # fmt: skip


def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    """Random weights by the published names."""
    config, generator = CONFIGS[kind], torch.Generator().manual_seed(0)
    M, inner, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    D, kv = M // heads, config["num_key_value_heads"] * (M // heads)

    def drawn(*shape: int, around: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.1 if around else 0.2) + around

    found = {"transformer.wte.weight": drawn(96, M), "transformer.ln_f.weight": drawn(M, around=1.0)}
    found["transformer.adapter.weight"] = drawn(M, 2 * M)
    for name, layers in (("prelude", 2), ("core_block", 3), ("coda", 1)):
        for number in range(layers):
            start = f"transformer.{name}.{number}."
            shapes = {"attn.Wqkv": (M + 2 * kv, M), "attn.proj": (M, M), "mlp.fc": (2 * inner, M), "mlp.proj": (M, inner)}
            found |= {f"{start}{each}.weight": drawn(*shape) for each, shape in shapes.items()}
            for norm in range(1, 5 if kind == "huginn" else 3):
                found[f"{start}norm_{norm}.weight"] = drawn(M, around=1.0)
            if kind == "huginn":
                found[f"{start}attn.qk_bias"] = drawn(2, 1, heads, D)
            if kind == "olmo2":
                found |= {f"{start}attn.{each}_norm.weight": drawn(M, around=1.0) for each in "qk"}
    if not config["tie_embeddings"]:
        found["lm_head.weight"] = drawn(96, M)
    return found


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: Any, tmp_path_factory: Any) -> tuple[str, Path]:
    directory: Path = tmp_path_factory.mktemp(request.param) / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    tensors = tensors_of(request.param)
    stored = {"freqs_cis": torch.zeros(2)} if request.param == "huginn" else {}
    save_file(tensors | stored, directory / "model.safetensors")
    return request.param, directory


def expected(kind: str, tokens_T: torch.Tensor, loops: int = 4) -> torch.Tensor:
    tensors, config = tensors_of(kind), CONFIGS[kind]
    return reference.predict(tensors, config, reference.states(tensors, config, tokens_T, loops)[-1])


def greedy(kind: str, new: int) -> list[int]:
    tokens = TOKENS
    for _ in range(new):
        tokens = torch.cat((tokens, expected(kind, tokens)[-1:].argmax(-1)))
    return tokens[len(TOKENS) :].tolist()


@torch.inference_mode()
def test_logits_are_the_references(pair: Any) -> None:
    kind, directory = pair
    model = fathomlm.load(directory)
    plan = model.plan
    assert (plan.layout, plan.recursions, plan.injection, plan.core_norm) == ("2+3+1", 4, True, kind == "huginn")
    right = expected(kind, TOKENS)
    assert right.abs().max() > 1
    torch.testing.assert_close(model(TOKENS[None]).logits[0], right, rtol=0, atol=1e-5)
    states = reference.states(tensors_of(kind), CONFIGS[kind], TOKENS, 4)
    seen = model(TOKENS[None], output_hidden_states=True).hidden_states
    for loop in range(1, 5):
        torch.testing.assert_close(seen[2 + 3 * loop][0], states[loop], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_greedy_text_is_the_references_in_the_decoder_and_the_engine(pair: Any) -> None:
    kind, directory = pair
    model, right = fathomlm.load(directory), greedy(kind, 10)
    rows = [TOKENS.tolist(), TOKENS[:5].tolist()]
    found = fathomlm.generate(model, rows, max_new_tokens=10, ignore_eos=True)
    assert list(found[0].tokens) == right
    assert list(fathomlm.generate(model, rows[1:], max_new_tokens=10, ignore_eos=True)[0].tokens) == list(found[1].tokens)
    served = fathomlm.Engine(model, max_sequences=2, batch_size=2).generate(rows, max_new_tokens=10, ignore_eos=True)
    assert [list(row.tokens) for row in served] == [list(row.tokens) for row in found]


@torch.inference_mode()
def test_any_number_of_loops(pair: Any) -> None:
    kind, directory = pair
    model = fathomlm.load(directory)
    for loops in (1, 7):
        looped = fathomlm.with_loops(model, loops)
        assert (looped.plan.recursions, looped.plan.unrolled_layers) == (loops, 3 + 3 * loops)
        right = expected(kind, TOKENS, loops)
        torch.testing.assert_close(looped(TOKENS[None]).logits[0], right, rtol=0, atol=2e-5)
    fewer = model.decoder.logits(model.decoder(TOKENS[None], control=fathomlm.DepthControl(max_depth=2)))
    torch.testing.assert_close(fewer[0], expected(kind, TOKENS, 2), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_random_start_is_the_same_in_any_batch_and_behind_any_cache(pair: Any) -> None:
    kind, directory = pair
    decoder = fathomlm.load(directory).decoder
    control = fathomlm.DepthControl(start_scale=1.0, seed=3)
    whole = decoder.logits(decoder(TOKENS[None], control=control))[0]
    std = (0.4 / 24) ** 0.5 * CONFIGS[kind]["init_values"]["embed_scale"]
    start = decoder.start_state(torch.zeros(1, 14, 24), 1.0, torch.arange(14)[None], 3)[0, :, 24:]
    assert 0.8 * std < float(start.std()) < 1.2 * std
    assert float(start.abs().max()) <= 3 * std
    states = reference.states(tensors_of(kind), CONFIGS[kind], TOKENS, 4, start)
    right = reference.predict(tensors_of(kind), CONFIGS[kind], states[-1])
    torch.testing.assert_close(whole, right, rtol=0, atol=1e-5)
    assert (whole - expected(kind, TOKENS)).abs().max() > 1e-3
    cache = fathomlm.build_cache(decoder.plan)
    parts = [
        decoder.logits(decoder(TOKENS[None, a:b], cache=cache, control=control)) for a, b in ((0, 9), (9, 10), (10, 14))
    ]
    torch.testing.assert_close(torch.cat(parts, 1)[0], whole, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_it_goes_back_out_as_it_came_and_through_our_own_format(pair: Any, tmp_path: Path) -> None:
    directory = pair[1]
    model = fathomlm.load(directory)
    out = fathomlm.export(model, tmp_path / "again")
    before, after = (load_file(each / "model.safetensors") for each in (directory, out))
    before.pop("freqs_cis", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    read, had = (json.loads((each / "config.json").read_text()) for each in (out, directory))
    same = set(had) - {"init_values", "rope_base", "block_size"}
    assert {name: read[name] for name in same} == {name: had[name] for name in same}
    assert plan_from_config(read, "here") == (model.architecture, model.plan)
    again = fathomlm.load(save(model, tmp_path / "ours"))
    assert (again.plan, again.architecture) == (model.plan, model.architecture)
    assert torch.equal(again(TOKENS[None]).logits, model(TOKENS[None]).logits)
    for wrong, match in (
        ({"loops": "nanbeige"}, "the nanbeige format cannot hold an injection"),
        ({"loops": "ouro"}, "injection"),
    ):
        with pytest.raises(OptionError, match=match):
            fathomlm.export(model, tmp_path / "wrong", **wrong)
    with pytest.raises(OptionError, match="a GGUF file cannot hold an injection"):
        fathomlm.export_gguf(model, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("name", "value"), [("bias", True), ("injection_type", "add"), ("initial_state_mode", "embed-init")]
)
def test_variants_without_a_block_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"huginn_raven with {name} other than"):
        plan_from_config(CONFIGS["huginn"] | {name: value}, "here")


def test_training_begins_from_noise_and_reaches_every_weight(pair: Any) -> None:
    model = fathomlm.load(pair[1])
    decoder = model.decoder.train()
    torch.manual_seed(0)
    first, second = (decoder.states(TOKENS[None])[14] for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    again = decoder.states(TOKENS[None], recompute="layer")[14]
    torch.testing.assert_close(again, first)
    decoder.logits(decoder.norm(again)).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in decoder.parameters())
