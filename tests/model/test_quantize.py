"""Models with integer weights against the same models with those weights multiplied out: in `generate`, step by step through
modules, and in the engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decode.exit_models import build, exiting, mixing_threshold
from engine.test_engine import NEW, SMALL
from engine.test_engine import many as all_prompts
from fathomlm.cache import DenseCache
from fathomlm.checkpoints import resolve
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.export import export
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import dtype_name, load
from fathomlm.decode.full import Session, generate
from fathomlm.engine.engine import Engine
from fathomlm.errors import OptionError
from fathomlm.kernels.cpu_library import CpuLibrary
from fathomlm.kernels.quantized import GPU_KINDS, KINDS, Kind, QuantizedWeight
from fathomlm.lab.bench.floor import decode_step_bytes
from fathomlm.model.blocks.attention import QuantizedLinear
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.quantize import quantize_layers
from model.route.small import WINDOWS, model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
ROUTED = {
    "routed": lambda: model_of(routed()),
    "routed, shared": lambda: model_of(routed("token", "share")),
    "routed, windows": lambda: model_of(routed(), architecture=WINDOWS),
}
WHOLE = {"vanilla", "loop-shared-kv", "plain-shared-kv", *ROUTED}
"""Models whose layers are run whole by the compiled kernels."""
CASES = ["vanilla", "lora", "gemma3", "neox", "encoding", "loop-shared-kv", "plain-shared-kv", *ROUTED]
PROMPTS = 3


def many(model: FathomForCausalLM) -> list[list[int]]:
    return all_prompts(model)[:PROMPTS]


def plain(name: str) -> FathomForCausalLM:
    return ROUTED[name]() if name in ROUTED else build(name)


def quantized(name: str, kind: Kind, library: CpuLibrary) -> FathomForCausalLM:
    model = copy.deepcopy(plain(name))
    quantize_layers(model.decoder, kind, library)
    return model


def twin(model: FathomForCausalLM, name: str) -> FathomForCausalLM:
    """The plain model with what the integers stand for."""
    slow = copy.deepcopy(plain(name))
    found = dict(model.decoder.named_modules())
    with torch.no_grad():
        for path, linear in slow.decoder.named_modules():
            if isinstance(linear, nn.Linear) and isinstance(integers := found[path], QuantizedLinear):
                linear.weight.copy_(integers.weight)
    return slow


def told(model: FathomForCausalLM, prompts: list[list[int]] | None = None, **options: Any) -> list[Any]:
    rows = [generate(model, [prompt], max_new_tokens=NEW, **options)[0] for prompt in prompts or many(model)]
    return [(row.tokens, row.depths) for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_generation_is_that_of_the_weights_multiplied_out(name: str, cpu_library: CpuLibrary) -> None:
    model = quantized(name, "int8", cpu_library)
    assert (model.decoder.cpu_layers is not None) == (name in WHOLE)
    expected = told(twin(model, name))
    assert told(model) == expected
    model.decoder.cpu_layers = None
    assert told(model) == expected


GPU_CASES = ["vanilla", "lora", "gemma3", "encoding", "plain-shared-kv", "own-layer", "routed", "routed, shared"]


def for_gpu(name: str, kind: Kind = "int8") -> FathomForCausalLM:
    """As the kernels of decoding rows take it; here their twins do."""
    model = copy.deepcopy(plain(name))
    quantize_layers(model.decoder, kind, None)
    return model


@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu_all_ways_multiply_with_the_same_weights(name: str) -> None:
    """Modules, and where layers can be packed the fused way too, whose weights have their norms folded in."""
    model = for_gpu(name)
    packs = name not in ("lora", "gemma3")
    assert bool(model.decoder.pack_rows()) == packs
    assert model.decoder.cpu_layers is None
    slow = twin(model, name)
    if packs:  # the twin's norms are where they were: its weights take them out again
        for ours, theirs in zip(model.decoder.layers, slow.decoder.layers, strict=True):
            theirs.norm_attn.load_state_dict(ours.norm_attn.state_dict())
            theirs.norm_mlp.load_state_dict(ours.norm_mlp.state_dict())
    expected = told(slow)
    assert told(model) == expected
    for fuse in (True, False):
        results = Engine(model, fuse=fuse, **SMALL).generate(many(model), max_new_tokens=NEW)
        assert [(result.tokens, result.depths) for result in results] == expected


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_norms_that_are_folded_in_are_not_lost(kind: Kind) -> None:
    plain_model, tokens_BT = copy.deepcopy(build("vanilla")), torch.tensor([[5, 9, 33, 7]])
    with torch.no_grad():
        for layer in plain_model.decoder.layers:  # norms that matter
            layer.norm_attn.weight.uniform_(0.1, 3.0, generator=torch.Generator().manual_seed(1))
        model, rounded = (copy.deepcopy(plain_model) for _ in range(2))
        quantize_layers(model.decoder, kind, None)
        for linear in rounded.decoder.layers.modules():
            if isinstance(linear, nn.Linear):
                linear.weight.copy_(QuantizedWeight(linear.weight, kind, None).multiplied_out())
        wanted, found, near = (one.decoder(tokens_BT) for one in (plain_model, model, rounded))
    off, usual = ((logits - wanted).square().mean().sqrt() for logits in (found, near))
    assert 0 < off < 4 * usual
    assert dtype_name(model) == kind
    assert decode_step_bytes(Engine(model, **SMALL).runner) < decode_step_bytes(Engine(plain_model, **SMALL).runner) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_one_more_token(kind: Kind, cpu_library: CpuLibrary) -> None:
    model = quantized("vanilla", kind, cpu_library)
    slow, tokens_BT = twin(model, "vanilla"), torch.tensor([[5, 9, 33, 7], [1, 2, 3, 4]])
    for one in (model, slow):
        one.decoder.limit_exits(None)
    with torch.no_grad():
        found = []
        for decoder in (model.decoder, slow.decoder):
            cache = DenseCache(decoder.plan, reserve=2)  # it grows under the compiled kernels too
            decoder(tokens_BT[:, :1], cache=cache)
            found.append(torch.cat([decoder(tokens_BT[:, i : i + 1], cache=cache) for i in range(1, 4)], 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vanilla", "lora", "plain-shared-kv", "routed", "routed, shared"])
def test_the_engine_says_what_generate_says(name: str, cpu_library: CpuLibrary) -> None:
    model = quantized(name, "int8", cpu_library)
    expected = told(model)
    for fuse in (None, False):
        results = Engine(model, fuse=fuse, **SMALL).generate(many(model), max_new_tokens=NEW)
        assert [(result.tokens, result.depths) for result in results] == expected


@pytest.mark.parametrize("mode", ["parallel", "state-copy", "speculative"])
@pytest.mark.parametrize("name", ["vanilla", "own-layer"])
def test_the_engine_exits_early(name: str, mode: str, cpu_library: CpuLibrary) -> None:
    model = quantized(name, "int8", cpu_library)
    how = exiting(name, mode, threshold=mixing_threshold(name))
    expected = [generate(model, [prompt], max_new_tokens=NEW, exiting=how)[0].tokens for prompt in many(model)]
    results = Engine(model, exiting=how, **SMALL).generate(many(model), max_new_tokens=NEW)
    assert [result.tokens for result in results] == expected


def test_an_exits_own_layer_runs_with_the_others(cpu_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module of it is called for a token, and it is as sure as its modules are."""
    model = quantized("own-layer", "int8", cpu_library)
    how = exiting("own-layer", "parallel", threshold=mixing_threshold("own-layer"))
    by_modules = Engine(model, exiting=how, fuse=False, **SMALL).generate(many(model), max_new_tokens=NEW)
    (own,) = model.decoder.exit_blocks.values()
    monkeypatch.setattr(own, "forward", lambda *given: pytest.fail("the own layer's modules ran"))
    found = Engine(model, exiting=how, **SMALL).generate(many(model), max_new_tokens=NEW)
    assert [r.tokens for r in found] == [r.tokens for r in by_modules]
    for one, other in zip(found, by_modules, strict=True):
        assert one.confidences == pytest.approx(other.confidences, abs=1e-4)


def test_batches_and_sessions(cpu_library: CpuLibrary) -> None:
    model = quantized("vanilla", "int8", cpu_library)
    prompts = many(model)
    together = generate(model, prompts, max_new_tokens=NEW)  # of different lengths: padded, with masks
    alike = generate(model, [prompts[0], prompts[0][::-1]], max_new_tokens=NEW)
    assert [row.tokens for row in together] == [tokens for tokens, _ in told(model)]
    assert [row.tokens for row in alike] == [tokens for tokens, _ in told(model, [prompts[0], prompts[0][::-1]])]
    session = Session(model)
    first = session.generate(prompts[0], max_new_tokens=3)
    longer = [*prompts[0], *first.tokens, 7]
    assert session.generate(longer, max_new_tokens=NEW).tokens == told(model, [longer])[0][0]


def test_a_tied_head_has_integers_and_the_embedding_has_not(cpu_library: CpuLibrary, packaged: str) -> None:
    model = load(packaged)
    assert model.decoder.head is None
    table_VM = model.decoder.embed.weight.detach().clone()
    before = decode_step_bytes(Engine(model, **SMALL).runner)
    quantize_layers(model.decoder, "int8", cpu_library)
    assert torch.equal(model.decoder.embed.weight, table_VM)
    assert isinstance(model.decoder.tied_head, QuantizedLinear)
    assert model.decoder.logits(table_VM[:2]).shape == (2, len(table_VM))
    assert dtype_name(model) == "int8"
    assert decode_step_bytes(Engine(model, **SMALL).runner) < before / 2


def test_a_copy_goes_its_own_way(cpu_library: CpuLibrary) -> None:
    model = quantized("vanilla", "int8", cpu_library)
    copied = copy.deepcopy(model)
    expected = told(model)
    del model
    assert told(copied) == expected


# Loading.


@pytest.fixture
def _home(kernels_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOMLM_HOME", str(kernels_home))


@pytest.mark.usefixtures("_home")
def test_what_cannot_be_done_with_integers(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = load(tiny_model_dir, quantize="int4")
    for doing, done in ((save, "saved"), (export, "exported")):
        with pytest.raises(OptionError, match=rf"loaded with quantize='int4' cannot be {done}; load it without"):
            doing(model, tmp_path / "out")
    with pytest.raises(OptionError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "out")
    with pytest.raises(OptionError, match="cannot be converted"):
        replan(model, model.plan.with_exits([1]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "invalid quantize 'int3'|unknown quantize 'int3'"),
        ({"quantize": "int8", "dtype": "bfloat16"}, "computes in float32 on the CPU; .* with dtype 'bfloat16'"),
        ({"quantize": "int8", "device": "meta"}, "with device 'meta'; use int8 or int4 on the CPU, int8 or fp8 on a GPU"),
        ({"quantize": "fp8"}, "quantize fp8 cannot be combined with device 'cpu'"),
    ],
)
def test_mistakes_are_found_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load("/nowhere", **options)


def test_without_a_compiler_or_a_place_for_it_a_model_stays_as_it_is(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fathomlm.kernels.cpu_library.compiler", lambda: "cc")  # it is not run: there is no place for it
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FATHOMLM_HOME", str(tmp_path / "file"))
    assert dtype_name(load(tiny_model_dir, quantize="int8")) == "float32"
    assert "cannot keep the compiled kernels in" in caplog.text
    monkeypatch.setattr(resolve, "build_library", lambda _: None)
    model = load(tiny_model_dir, quantize="int8")
    assert "quantize int8 requires a C compiler (cc, gcc, clang); computing in float32" in caplog.text
    assert dtype_name(model) == "float32"


def test_weights_that_are_not_finite_are_named(cpu_library: CpuLibrary) -> None:
    model = copy.deepcopy(build("vanilla"))
    with torch.no_grad():
        model.decoder.get_parameter("layers.1.mlp.up.weight")[0, 0] = float("nan")
    with pytest.raises(OptionError, match=r"the weight of '1.mlp.up' holds numbers that are not finite"):
        quantize_layers(model.decoder, "int8", cpu_library)


def test_exits_with_a_vocabulary_of_their_own_read_integers(cpu_library: CpuLibrary) -> None:
    """Their part of the head is most of what a draft reads; the choice is that of the rows multiplied out."""
    model = copy.deepcopy(build("own-layer"))
    decoder = model.decoder
    decoder.limit_exits(torch.arange(0, model.architecture.vocab, 2))
    assert decoder.exit_vocab is not None
    hidden_BTM = torch.randn(1, 3, model.architecture.hidden, generator=torch.Generator().manual_seed(0))
    before_BTW = decoder.exit_vocab.few(hidden_BTM)
    quantize_layers(decoder, "int8", cpu_library)
    rows = decoder.exit_vocab.quantized
    assert rows is not None
    found_BTW = decoder.exit_vocab.few(hidden_BTM)
    torch.testing.assert_close(found_BTW, hidden_BTM @ rows.weight.T, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found_BTW, before_BTW)
    torch.testing.assert_close(found_BTW, before_BTW, rtol=0.05, atol=0.05)
