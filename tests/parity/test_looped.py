"""Released looped models against plain references of their own: logits, greedy text, the engine, and the way back out."""

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
from fathomlm.errors import FathomError, OptionError, UnsupportedModel
from parity.looped_reference import nanbeige_logits, ouro_logits, ouro_states

TOKENS = torch.randint(3, 96, (20,), generator=torch.Generator().manual_seed(1))
NANBEIGE: dict[str, Any] = {
    "model_type": "nanbeige", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 70_000_000.0,
    "tie_word_embeddings": False, "num_loops": 3, "skip_loop_final_norm": False, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        scale = 0.2 if len(shape) > 1 else 0.1
        return torch.randn(shape, generator=generator) * scale + (len(shape) == 1)

    M, inner, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    vocab = config["vocab_size"]
    found = {"model.embed_tokens.weight": drawn(vocab, M), "model.norm.weight": drawn(M), "lm_head.weight": drawn(vocab, M)}
    shapes = {
        "self_attn.q_proj": (q, M), "self_attn.k_proj": (kv, M), "self_attn.v_proj": (kv, M), "self_attn.o_proj": (M, q),
        "mlp.gate_proj": (inner, M), "mlp.up_proj": (inner, M), "mlp.down_proj": (M, inner), "input_layernorm": (M,),
        "post_attention_layernorm": (M,),
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    return found


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=[False, True], ids=["norm between loops", "no norm between"])
def nanbeige(request: Any, tmp_path_factory: Any) -> tuple[dict[str, Any], Path]:
    config = NANBEIGE | {"skip_loop_final_norm": request.param}
    return config, written(tmp_path_factory.mktemp("nanbeige") / "model", config)


def greedy(config: dict[str, Any], directory: Path, new: int) -> list[int]:
    tensors, tokens = load_file(directory / "model.safetensors"), TOKENS
    for _ in range(new):
        tokens = torch.cat((tokens, nanbeige_logits(tensors, config, tokens)[-1:].argmax(-1)))
    return tokens[len(TOKENS) :].tolist()


@torch.inference_mode()
def test_logits_are_the_references(nanbeige: Any) -> None:
    config, directory = nanbeige
    model = fathomlm.load(directory)
    assert (model.plan.layout, model.plan.recursions) == ("2", 3)
    assert model.plan.loop_norm != config["skip_loop_final_norm"]
    expected = nanbeige_logits(load_file(directory / "model.safetensors"), config, TOKENS)
    assert expected.abs().max() > 1
    torch.testing.assert_close(model(TOKENS[None]).logits[0], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_greedy_text_is_the_references_in_the_decoder_and_the_engine(nanbeige: Any) -> None:
    config, directory = nanbeige
    model, expected = fathomlm.load(directory), greedy(config, directory, 12)
    found = fathomlm.generate(model, [TOKENS.tolist()], max_new_tokens=12, ignore_eos=True)[0]
    assert list(found.tokens) == expected
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    engine = fathomlm.Engine(model, max_sequences=3, batch_size=3)
    prompts = [TOKENS.tolist(), TOKENS[:5].tolist(), TOKENS.tolist()]
    found = engine.generate(prompts, **sampling)
    assert list(found[0].tokens) == list(found[2].tokens) == expected


@torch.inference_mode()
def test_it_goes_back_out_as_it_came(nanbeige: Any, tmp_path: Path) -> None:
    config, directory = nanbeige
    out = fathomlm.export(fathomlm.load(directory), tmp_path / "again")
    before, after = (load_file(each / "model.safetensors") for each in (directory, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = json.loads((out / "config.json").read_text())
    assert {name: again[name] for name in config} == config


@torch.inference_mode()
def test_exits_and_routers_between_normed_loops_agree_everywhere(nanbeige: Any) -> None:
    """Batch and cache and engine, where tokens of different loops share a pass."""
    model = fathomlm.load(nanbeige[1])
    routed = fathomlm.convert(model, router="expert")
    torch.nn.init.normal_(routed.decoder.routers.main[0].out.weight, generator=torch.Generator().manual_seed(3))
    torch.nn.init.normal_(routed.decoder.routers.main[1].out.weight, generator=torch.Generator().manual_seed(4))
    prompts = [TOKENS.tolist(), TOKENS[3:9].tolist()]
    alone = [fathomlm.generate(routed, [p], max_new_tokens=10, ignore_eos=True)[0] for p in prompts]
    depths = {depth for result in alone for depth in result.depths}
    assert len(depths) > 1
    together = fathomlm.Engine(routed, max_sequences=2, batch_size=2).generate(prompts, max_new_tokens=10, ignore_eos=True)
    assert [list(r.tokens) for r in together] == [list(r.tokens) for r in alone]
    whole = routed(torch.tensor([prompts[0] + list(alone[0].tokens)])).logits[0, len(prompts[0]) - 1 : -1]
    assert whole.argmax(-1).tolist() == list(alone[0].tokens)


def test_a_plain_checkpoint_has_no_place_for_the_norm(tmp_path: Path) -> None:
    model = fathomlm.load(written(tmp_path / "model", NANBEIGE))
    looped = fathomlm.convert(model, router="expert")
    assert looped.plan.loop_norm
    with pytest.raises(OptionError, match="cannot hold a router"):
        fathomlm.export(looped, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["loop_share_kv", "enable_depth_attention", "enable_mhc", "qk_layernorm"])
def test_variants_without_a_block_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"nanbeige with {name} is not supported"):
        plan_from_config(NANBEIGE | {name: True}, "here")


@pytest.mark.parametrize("loops", [0, -1, "2", 10**6])
def test_a_wrong_number_of_loops_is_one_line(loops: object) -> None:
    with pytest.raises(FathomError, match="num_loops"):
        plan_from_config(NANBEIGE | {"num_loops": loops}, "here")


def test_one_loop_is_a_plain_model(tmp_path: Path) -> None:
    model = fathomlm.load(written(tmp_path / "model", NANBEIGE | {"num_loops": 1}))
    assert (model.plan.recursions, model.plan.loop_norm) == (1, False)


OURO: dict[str, Any] = {
    "model_type": "ouro", "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "total_ut_steps": 4, "early_exit_threshold": 1.0, "max_position_embeddings": 512,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ouro(tmp_path_factory: Any) -> Path:
    directory: Path = tmp_path_factory.mktemp("ouro") / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(OURO))
    tensors, generator = tensors_of(OURO), torch.Generator().manual_seed(7)
    for number in range(OURO["num_hidden_layers"]):
        for name in ("input_layernorm_2", "post_attention_layernorm_2"):
            drawn = 1 + 0.1 * torch.randn(24, generator=generator)
            tensors[f"model.layers.{number}.{name}.weight"] = drawn
    tensors["model.early_exit_gate.weight"] = 0.3 * torch.randn(1, 24, generator=generator)
    tensors["model.early_exit_gate.bias"] = torch.tensor([-0.5])
    save_file(tensors, directory / "model.safetensors")
    return directory


@torch.inference_mode()
def test_ouros_logits_after_every_loop_are_the_references(ouro: Path) -> None:
    model = fathomlm.load(ouro)
    plan = model.plan
    assert (plan.layout, plan.recursions, plan.loop_norm, plan.exit_gate, plan.exits) == ("2", 4, True, True, (1, 3, 5))
    tensors = load_file(ouro / "model.safetensors")
    states = ouro_states(tensors, OURO, TOKENS)
    expected = states[-1] @ tensors["lm_head.weight"].T
    assert expected.abs().max() > 1
    torch.testing.assert_close(model(TOKENS[None]).logits[0], expected, rtol=0, atol=1e-5)
    found = model.decoder.states(TOKENS[None], at=(*plan.exits, 7))
    for index, state in zip((*plan.exits, 7), states, strict=True):
        torch.testing.assert_close(model.decoder.exit_hidden(found[index], index)[0], state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.65, 1.0])
@torch.inference_mode()
def test_ouros_gate_chooses_the_references_loops_and_text(ouro: Path, threshold: float) -> None:
    """Greedy text where each token is taken at the loop where the gate lets it go, over keys and values of all loops."""
    model, tensors = fathomlm.load(ouro), load_file(ouro / "model.safetensors")
    tokens, loops = TOKENS, []
    for _ in range(12):
        logits, left = ouro_logits(tensors, OURO, tokens, threshold)
        tokens = torch.cat((tokens, logits[-1:].argmax(-1)))
        loops.append(int(left[-1]))
    exiting = fathomlm.Exiting(mode="select", confidence="gate", threshold=threshold)
    both = fathomlm.generate(
        model, [TOKENS.tolist(), TOKENS[:6].tolist()], max_new_tokens=12, ignore_eos=True, exiting=exiting
    )
    assert list(both[0].tokens) == tokens[len(TOKENS) :].tolist()
    assert [layer // 2 for layer in both[0].exit_layers] == loops
    assert (len(set(loops)) > 1) == (threshold < 1)
    full = fathomlm.generate(model, [TOKENS.tolist()], max_new_tokens=12, ignore_eos=True)[0]
    assert (list(full.tokens) == list(both[0].tokens)) == (threshold == 1)


@torch.inference_mode()
def test_ouros_gate_exits_in_the_engine(ouro: Path) -> None:
    """Tokens leave the batch where the gate lets them go, and their deeper entries are made later, exactly: the text is that
    of the reference, which runs every loop. All loops are one block, so rows of all of them share passes."""
    model = fathomlm.load(ouro)
    prompts = [TOKENS.tolist(), TOKENS[:6].tolist(), TOKENS[3:5].tolist()]
    for mode, threshold in (("parallel", 0.3), ("parallel", 0.65), ("parallel", 1.0)):
        wanted = fathomlm.generate(
            model, prompts, max_new_tokens=12, ignore_eos=True,
            exiting=fathomlm.Exiting(mode="select", confidence="gate", threshold=threshold),
        )  # fmt: skip
        exiting = fathomlm.Exiting(mode=mode, confidence="gate", threshold=threshold, max_stack=2)
        engine = fathomlm.Engine(model, batch_size=3, max_sequences=3, exiting=exiting)
        found = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
        assert [(r.tokens, r.depths) for r in found] == [(w.tokens, w.exit_layers) for w in wanted]
        assert engine.runner.program.mixed


@torch.inference_mode()
def test_ouro_runs_all_loops_in_the_engine(ouro: Path) -> None:
    model = fathomlm.load(ouro)
    prompts = [TOKENS.tolist(), TOKENS[:5].tolist()]
    alone = [fathomlm.generate(model, [p], max_new_tokens=10, ignore_eos=True)[0] for p in prompts]
    found = fathomlm.Engine(model, max_sequences=2, batch_size=2).generate(prompts, max_new_tokens=10, ignore_eos=True)
    assert [list(r.tokens) for r in found] == [list(r.tokens) for r in alone]


@torch.inference_mode()
def test_ouro_goes_back_out_and_through_our_own_format(ouro: Path, tmp_path: Path) -> None:
    model = fathomlm.load(ouro)
    out = fathomlm.export(model, tmp_path / "again")
    before, after = (load_file(each / "model.safetensors") for each in (ouro, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = json.loads((out / "config.json").read_text())
    assert {name: again[name] for name in OURO} == OURO
    saved = fathomlm.load(save(model, tmp_path / "ours"))
    assert saved.plan == model.plan
    assert torch.equal(saved(TOKENS[None]).logits, model(TOKENS[None]).logits)
    assert torch.equal(saved.decoder.exit_gate.weight, model.decoder.exit_gate.weight)
    with pytest.raises(OptionError, match="the nanbeige format cannot hold residual"):
        fathomlm.export(model, tmp_path / "nanbeige", loops="nanbeige")


def test_a_gate_is_required_by_name(tmp_path: Path) -> None:
    model = fathomlm.load(written(tmp_path / "model", NANBEIGE))
    exiting = fathomlm.Exiting(mode="select", confidence="gate", exit_layers=(2,))
    with pytest.raises(OptionError, match="confidence 'gate' requires a model with an exit gate"):
        fathomlm.generate(model, [TOKENS.tolist()], max_new_tokens=2, exiting=exiting)
    with pytest.raises(OptionError, match="the ouro format requires an exit after each loop"):
        fathomlm.export(model, tmp_path / "out", loops="ouro")
