"""The same identities on a CUDA device. Run with `pytest -m gpu`; continuous integration has none."""

from __future__ import annotations

import pytest
import torch

import fathomlm
from parity.families import CONFIGS, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS = torch.randint(3, 96, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def exact_float32():
    """TensorFloat-32 would round every product to ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", list(CONFIGS))
@torch.inference_mode()
def test_logits_equal_transformers(name, tmp_path):
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = fathomlm.load(tmp_path, device="cuda")
    tokens = TOKENS.cuda()
    torch.testing.assert_close(ours(tokens).logits, theirs.cuda()(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "neox", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"relax": "lora", "rank": 4}, {"relax": "dora", "rank": 4}, {"relax": "prefix"}])
@torch.inference_mode()
def test_conversion_and_generation_equal_the_cpu(name, options, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    here = fathomlm.convert(tmp_path, recursions=2, device="cpu", **options)
    there = fathomlm.convert(tmp_path, recursions=2, device="cuda", **options)
    torch.testing.assert_close(there(TOKENS.cuda()).logits.cpu(), here(TOKENS).logits, rtol=0, atol=5e-5)
    prompts = [[5, 6, 7, 8], [9, 10], [11] * 13]
    one = fathomlm.generate(here, prompts, max_new_tokens=12, ignore_eos=True)
    two = fathomlm.generate(there, prompts, max_new_tokens=12, ignore_eos=True)
    assert [row.tokens for row in one] == [row.tokens for row in two]


@pytest.mark.parametrize("name", ["llama", "gemma3", "neox"])
@torch.inference_mode()
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path):
    tokens = TOKENS.cuda()
    exact = tiny(name).to(torch.bfloat16).float().cuda()(tokens).logits
    theirs = tiny(name).to(torch.bfloat16).cuda()
    theirs.save_pretrained(tmp_path)
    ours = fathomlm.load(tmp_path, device="cuda")
    assert ours.decoder.embed.weight.dtype == torch.bfloat16
    their_error = (theirs(tokens).logits.float() - exact).norm() / exact.norm()
    our_error = (ours(tokens).logits.float() - exact).norm() / exact.norm()
    assert our_error < 1.25 * their_error


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_calibration_and_what_is_made_of_it_equal_the_cpu(name, tmp_path):
    """Influence, second moments, the greedy search, and the layers and neurons that are kept by them."""
    tiny(name).save_pretrained(tmp_path)
    rows = torch.randint(3, 90, (16, 32), generator=torch.Generator().manual_seed(0))
    here, there = (fathomlm.measure_activations(tmp_path, rows, greedy=3, device=device) for device in ("cpu", "cuda"))
    assert there.order == here.order
    assert there.influence == pytest.approx(here.influence, abs=1e-5)
    assert there.order_losses == pytest.approx(here.order_losses, abs=1e-4)
    torch.testing.assert_close(there.moment(1, "down"), here.moment(1, "down"), rtol=1e-4, atol=1e-6)
    made = [fathomlm.convert(tmp_path, drop=2, by="greedy", neurons=16, activations=found) for found in (here, there)]
    assert made[0].config.kept_layers == made[1].config.kept_layers
    torch.testing.assert_close(made[0](rows).logits, made[1](rows).logits, rtol=0, atol=1e-3)
