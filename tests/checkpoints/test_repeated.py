"""Layers that run several times in place, in smaller steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fathomlm
from fathomlm.cache import NoCache
from fathomlm.depth.dropping import repeated_layers, repeated_plan
from fathomlm.errors import OptionError
from fathomlm.model.attention_mask import TokenBatch, full_masks
from lab.analyze.tiny import TEXT, model_of
from parity.families import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.arange(3, 30)[None]


@pytest.fixture(scope="module", params=["llama", "neox", "smollm3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Also with biases and parallel halves, and with layers that do not rotate; six layers each."""
    directory = tmp_path_factory.mktemp("base")
    tiny(request.param).save_pretrained(directory)
    return fathomlm.load(directory)


def test_the_plan_keeps_the_ends() -> None:
    assert repeated_layers(6, 2) == (0, 1, 2, 2, 3, 3, 4, 4, 5)
    assert repeated_layers(4, 3) == (0, 1, 2, 2, 2, 3)
    plan = repeated_plan(6, 2)
    assert [step.layer for step in plan] == list(repeated_layers(6, 2))
    assert (plan.unique_layers, plan.unrolled_layers, plan.layout) == (6, 9, "2+3+1")


@pytest.mark.parametrize("times", [2, 3])
def test_the_model_computes_the_base_with_inner_steps_repeated_and_divided(base: Any, times: int) -> None:
    looped = fathomlm.convert(base, drop=0, repeat=times)
    scaled = fathomlm.convert(base, drop=0).eval()
    with torch.no_grad():
        for layer in scaled.decoder.layers[2:5]:
            for name, parameter in layer.named_parameters():
                if name.startswith(("attn.o.", "mlp.down.")):
                    parameter /= times
    steps = [scaled.plan.steps[layer] for layer in repeated_layers(6, times)]
    decoder, plan = scaled.decoder, scaled.plan
    x = decoder.enter(TOKENS)
    masks = full_masks(scaled.architecture, plan, TokenBatch.of(x, None, None, past=0), x.dtype)
    expected = decoder.logits(decoder.norm(decoder.run_steps(x, steps, masks, NoCache(plan))))
    torch.testing.assert_close(looped.eval()(TOKENS).logits, expected, rtol=0, atol=1e-5)
    assert sum(p.numel() for p in looped.parameters()) == sum(p.numel() for p in base.parameters())


def test_smaller_steps_stay_nearer_to_the_base_than_whole_ones(base: Any) -> None:
    looped = fathomlm.convert(base, drop=0, repeat=2).eval()
    near = (looped(TOKENS).logits - base(TOKENS).logits).abs().mean()
    with torch.no_grad():
        for layer in looped.decoder.layers[2:5]:
            for name, parameter in layer.named_parameters():
                if name.startswith(("attn.o.", "mlp.down.")):
                    parameter *= 2
    assert near < 0.7 * (looped(TOKENS).logits - base(TOKENS).logits).abs().mean()


def test_after_dropping_and_narrowing_and_through_a_file(tmp_path: Path) -> None:
    base = model_of(None, sharing="cycle", recursions=1)
    found = fathomlm.measure_activations(base, [TEXT] * 2, tokens=1024, greedy=3)
    small = fathomlm.convert(base, drop=3, by="greedy", neurons=16, repeat=2, activations=found)
    plain = fathomlm.convert(base, drop=3, by="greedy", neurons=16, activations=found)
    kept = plain.config.kept_layers
    assert small.config.kept_layers == [kept[layer] for layer in repeated_layers(5, 2)]
    assert (small.architecture.intermediate, small.plan.unrolled_layers) == (16, 7)
    assert torch.equal(small.decoder.layers[2].mlp.up.weight, plain.decoder.layers[2].mlp.up.weight)
    assert torch.equal(small.decoder.layers[2].mlp.down.weight, plain.decoder.layers[2].mlp.down.weight / 2)
    assert torch.equal(small.decoder.layers[1].mlp.down.weight, plain.decoder.layers[1].mlp.down.weight)
    fathomlm.save(small, tmp_path / "small")
    assert torch.equal(fathomlm.load(tmp_path / "small")(TOKENS).logits, small(TOKENS).logits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeat": 2}, "repeat requires drop"),
        ({"drop": 0, "repeat": 1}, "repeat must be >= 2"),
        ({"drop": 0, "repeat": 2, "recursions": 2}, "cannot be combined with recursions"),
        ({"drop": 0, "repeat": 2, "sharing": "cycle"}, "cannot be combined with sharing"),
        ({"drop": 0, "repeat": 2, "relax": "lora"}, "cannot be combined with relax"),
        ({"drop": 3, "repeat": 2}, "requires more than 3, got 3"),
        ({"drop": 0, "repeat": 10**6}, "must be <= 1024, got 3000003"),
    ],
)
def test_refusals(base: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        fathomlm.convert(base, **options)


def test_norms_behind_the_projections_are_refused(tmp_path: Path) -> None:
    tiny("gemma3").save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="without norms behind"):
        fathomlm.convert(tmp_path, drop=0, repeat=2)
