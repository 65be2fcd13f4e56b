"""A model without some of its layers is an ordinary model: it computes, decodes, serves and exports as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fathomlm
from fathomlm.checkpoints.assemble import ModelBase
from fathomlm.errors import OptionError
from lab.analyze.tiny import TEXT, model_of
from parity.families import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.arange(3, 30)[None]


@pytest.fixture(scope="module", params=["llama", "gemma3", "smollm3", "neox"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Also with windows, with layers that do not rotate, and with fused tensors."""
    directory = tmp_path_factory.mktemp("base")
    tiny(request.param).save_pretrained(directory)
    return fathomlm.load(directory)


def test_dropping_none_equals_the_base(base: Any) -> None:
    same = fathomlm.convert(base, drop=0)
    assert same.plan == base.plan
    assert torch.equal(same(TOKENS).logits, base(TOKENS).logits)


def test_the_rest_computes_what_the_base_computes_without_the_dropped_steps(base: Any) -> None:
    small = fathomlm.convert(base, drop=2, by="stepwise")
    assert (small.plan.layout, small.plan.recursions, small.architecture.layers) == ("4", 1, 4)
    kept = [base.plan.steps[layer] for layer in (0, 2, 3, 5)]
    base.decoder.eval()
    whole = base.decoder.plan
    base.decoder.plan = type("Few", (), {"__getattr__": lambda _, n: getattr(whole, n), "__iter__": lambda _: iter(kept)})()
    try:
        expected = base(TOKENS).logits
    finally:
        base.decoder.plan = whole
    torch.testing.assert_close(small(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_exports_are_plain_models_with_fewer_layers(base: Any, tmp_path: Path) -> None:
    small = fathomlm.convert(base, drop=2, by="last")
    fathomlm.save(small, tmp_path / "small")
    assert torch.equal(fathomlm.load(tmp_path / "small")(TOKENS).logits, small(TOKENS).logits)
    fathomlm.export(small, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.config.num_hidden_layers == 4
    torch.testing.assert_close(theirs(TOKENS).logits, small(TOKENS).logits, rtol=0, atol=3e-5)


def test_gguf_decoding_and_the_engine(tmp_path: Path) -> None:
    from fathomlm import Engine, EngineOptions, Sampling

    base = model_of(None, sharing="cycle", recursions=1)
    found = fathomlm.measure_activations(base, [TEXT], tokens=512, moments=False)
    small = fathomlm.convert(base, drop=3, activations=found)
    assert small.architecture.layers == 5
    prompt = list(TEXT[:20].encode())
    fathomlm.export_gguf(small, tmp_path / "small.gguf", "f32")
    torch.testing.assert_close(
        fathomlm.load(tmp_path / "small.gguf")(TOKENS).logits, small(TOKENS).logits, rtol=0, atol=1e-4
    )
    ids = torch.tensor([prompt])
    greedy = small.generate(ids, max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
    engine = Engine(small, EngineOptions(batch_size=2, max_length=32))
    assert list(engine.generate([prompt], Sampling(max_new_tokens=6, temperature=0.0))[0].tokens) == greedy


def test_layers_are_dropped_before_the_rest_is_tied(base: Any) -> None:
    small = fathomlm.convert(base, drop=2, by="last", recursions=2, init="average")
    assert (small.plan.layout, small.plan.unrolled_layers) == ("2", 4)
    tensor = ModelBase(base).tensor
    mean = (tensor("layers.0.mlp.up.weight") + tensor("layers.2.mlp.up.weight")) / 2
    torch.testing.assert_close(small.decoder.layers[0].mlp.up.weight.detach(), mean)
    assert fathomlm.convert(base, drop=2, sharing="cycle").plan.recursions == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop": 6}, "drop must be between 0 and 5"),
        ({"by": "last"}, "by says which layers are dropped; it requires drop"),
        ({"drop": 1, "by": "influence"}, "requires calibration text"),
        ({"drop": 1, "init": "average"}, "init says how layers are tied"),
        ({"drop": 1, "relax": "lora"}, "with one recursion nothing is tied"),
        ({"drop": 1, "recursions": 2}, "2 recursions do not divide 5 layers"),
    ],
)
def test_refusals(base: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError if "divide" not in says else fathomlm.FathomError, match=says):
        fathomlm.convert(base, **options)


def test_a_converted_model_loses_no_layers() -> None:
    with pytest.raises(OptionError, match="converted already"):
        fathomlm.convert(model_of(None), drop=1)
