"""Exits as files of their own: what was written comes back on any copy of the base, and on nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints.exit_packs import EVERY, KINDS, bare, build, edit, rewrite, said, weights
from checkpoints.gguf_files import write_gguf
from decode.exit_models import LLAMA, LOOP, LORA, PROMPTS, VANILLA
from fathomlm.checkpoints import exit_pack
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.base_sample import BaseSample
from fathomlm.checkpoints.exit_pack import RECORD, THRESHOLD, WEIGHTS, attach, read_pack, write_pack
from fathomlm.checkpoints.export import export
from fathomlm.checkpoints.native import save
from fathomlm.checkpoints.resolve import load, plan_of
from fathomlm.decode.calibration import FILE
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan, Relaxation
from fathomlm.errors import CheckpointError, FathomError, OptionError, OutputError
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from model.route.small import model_of, routed
from parity.t5_models import write_tiny_t5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> FathomForCausalLM:
    return build("every")


@pytest.fixture
def base(model: FathomForCausalLM, tmp_path: Path) -> Path:
    return save(bare(model), tmp_path / "base")


@pytest.fixture
def pack(model: FathomForCausalLM, tmp_path: Path) -> Path:
    return write_pack(model, tmp_path / "pack")


@pytest.mark.parametrize("kind", KINDS)
def test_base_and_pack_are_the_model_again(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    base, pack = save(bare(model), tmp_path / "base"), write_pack(model, tmp_path / "pack")
    own = {name for name in weights(model) if name.startswith("exit_")}
    assert bool(own) == (kind != "nothing")
    assert set(load_file(pack / WEIGHTS)) == own
    assert not own & weights(load(base)).keys()
    again = load(base, exits=pack)
    assert (again.plan, again.config.exit_parts, again.training) == (model.plan, model.config.exit_parts, False)
    assert plan_of(base, pack) == model.plan
    assert weights(again).keys() == weights(model).keys()
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(again).items())
    modes: list[tuple[str, dict[str, float]]] = [
        ("parallel", {"threshold": 0.05}), ("speculative", {"threshold": 0.02}), ("static", {}),
    ]  # fmt: skip
    mode, options = modes[list(KINDS).index(kind) % 3]
    assert said(again, mode, **options) == said(model, mode, **options)
    assert said(again, "speculative", threshold=0.0) == said(again, "full")
    saved = load(save(again, tmp_path / "again"))
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(saved).items())


@pytest.mark.parametrize("kind", ["every", "two", "looped"])
def test_full_decoding_is_the_bases_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    base, pack = save(bare(model), tmp_path / "base"), write_pack(model, tmp_path / "pack")
    plain, exited = load(base), load(base, exits=pack)
    tokens = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        assert torch.equal(exited(tokens).logits, plain(tokens).logits)
    full = [row.tokens for row in generate(plain, PROMPTS, max_new_tokens=6)]
    assert said(exited, "full") == full
    assert said(exited, "static") != full


def test_an_encoder_decoder_too(tmp_path: Path) -> None:
    write_tiny_t5("t5", tmp_path / "t5")
    plain = load(tmp_path / "t5", dtype="float32")
    model = replan(plain, plain.plan.with_exits([0]), **EVERY)
    with torch.no_grad():
        for name, value in weights(model).items():
            if name.startswith("exit_"):
                value.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    again = load(tmp_path / "t5", dtype="float32", exits=write_pack(model, tmp_path / "pack"))
    assert type(again) is type(model)
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(again).items())
    for mode in ("parallel", "speculative"):
        assert said(again, mode, threshold=0.01) == said(model, mode, threshold=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pack_may_be_smaller_than_what_it_came_from(
    dtype: torch.dtype, model: FathomForCausalLM, base: Path, pack: Path, tmp_path: Path
) -> None:
    small = write_pack(model, tmp_path / "small", dtype=dtype)
    stored = load_file(small / WEIGHTS)
    assert {value.dtype for value in stored.values()} == {dtype}
    again = weights(load(base, exits=small))
    for name in stored:
        assert again[name].dtype == torch.float32
        assert torch.equal(again[name], weights(model)[name].to(dtype).float())
    assert read_pack(small).sample == read_pack(pack).sample
    assert {value.dtype for value in load(base, "bfloat16", exits=pack).parameters()} == {torch.bfloat16}


def copies(model: FathomForCausalLM, place: Path) -> dict[str, Path]:
    """The base as others would have it."""
    plain = bare(model)
    found = {"Hugging Face": export(plain, place / "hf"), "int8": save(plain, place / "int8", quantize="int8")}
    found["bfloat16"] = save(bare(model).to(torch.bfloat16), place / "bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(found["Hugging Face"])
    for kind in ("F16", "Q8_0", "Q4_0"):
        found[kind] = write_gguf(place / f"{kind}.gguf", theirs, kind=gguf.GGMLQuantizationType[kind])
    return found


def test_every_copy_of_the_base_takes_it(model: FathomForCausalLM, pack: Path, tmp_path: Path) -> None:
    sources = copies(model, tmp_path)
    for name, source in sources.items():
        again = weights(load(source, "float32", exits=pack))
        wanted = {key: value for key, value in weights(model).items() if key.startswith("exit_")}
        assert all(torch.equal(again[key], value) for key, value in wanted.items()), name
    moved = load(sources["Q4_0"], "float32").decoder.embed.weight - weights(model)["embed.weight"]
    part = (moved.std() / model.decoder.embed.weight.std()).item()
    assert 0.02 < part < 0.3, "four bits move it visibly"
    other = write_pack(load(sources["Q4_0"], exits=pack), tmp_path / "from four bits")
    assert load(sources["bfloat16"], exits=other).plan == model.plan


@torch.no_grad()
def change(model: FathomForCausalLM, name: str, by: float) -> None:
    """Move a part of the weights by a part of their size, as training would."""
    generator = torch.Generator().manual_seed(3)
    for key, value in weights(model).items():
        if name in key:
            value.mul_(1 + by * torch.randn(value.shape, generator=generator))


@pytest.mark.parametrize(
    ("name", "by", "says"),
    [
        ("norm", 0.02, r"\d+ of 247 sampled norms and biases are others, as in a fine-tune"),
        ("norm.weight", 0.02, "sampled norms and biases"),
        ("", 5.0, r"its weights differ by \d+%"),
        (".attn.", 0.05, None),
    ],
)
def test_another_fine_tune_is_refused_where_it_can_be_told(
    name: str, by: float, says: str | None, model: FathomForCausalLM, base: Path, pack: Path
) -> None:
    other = load(base)
    change(other, name, by)
    save(other, base, force=True)
    exited = load(base, exits=pack, any_base=True)
    assert all(torch.equal(value, weights(exited)[key]) for key, value in weights(other).items())
    assert exited.plan == model.plan
    if says is None:  # no more than four bits change: it cannot be told, and the page says so
        assert load(base, exits=pack).plan == model.plan
        return
    with pytest.raises(OptionError, match=rf"trained over another model: .*{says}.*--any-base"):
        load(base, exits=pack)


def test_another_model_of_the_same_shape_is_refused(pack: Path, tmp_path: Path) -> None:
    stranger = save(bare(build("every", seed=1)), tmp_path / "stranger")
    with pytest.raises(OptionError, match=r"its weights differ by 1\d\d%"):
        load(stranger, exits=pack)


def test_the_sample_looks_everywhere(model: FathomForCausalLM) -> None:
    """A change in any one layer is seen, whichever it is; exits are no part of it."""
    before = BaseSample.of(model.decoder)
    assert (len(before.vectors) > 200, len(before.matrices) > 400) == (True, True)
    for name, value in weights(model).items():
        kept = value.detach().clone()
        with torch.no_grad():
            value.add_(1.0)
        assert (BaseSample.of(model.decoder) == before) == name.startswith("exit_"), name
        with torch.no_grad():
            value.copy_(kept)
    assert BaseSample.of(model.decoder) == before


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"hidden": 64}, "a model with hidden 32, and this has 64"),
        ({"layers": 5}, "layers 6, and this has 5"),
        ({"vocab": 97}, "vocab 96, and this has 97"),
        ({"kv_heads": 4}, "kv_heads 2, and this has 4"),
        ({"tied_embeddings": True}, "tied_embeddings False"),
        ({"plan": LOOP}, "recursions 1, and this has 2"),
        ({"plan": LOOP, "relaxation": LORA}, "recursions 1"),
        ({"plan": VANILLA.with_kv("share", "cycle", 2)}, "kv cache, and this has share"),
        ({"plan": VANILLA.with_exits([1])}, "has exits already, after 2"),
        ({"relaxation": Relaxation(kind="prefix", prefix_length=2)}, "relaxation None"),
    ],
)
def test_another_shape_is_refused_whatever_is_asked(
    other: dict[str, Any], says: str, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {name: getattr(LLAMA, name) for name in LLAMA.__slots__}
    plan, relaxation = other.pop("plan", None), other.pop("relaxation", None)
    architecture = Architecture(**{**fields, **other})
    parts = architecture, plan or DepthPlan.vanilla(architecture.layers), relaxation
    source = save(FathomForCausalLM(FathomConfig.of(*parts, dtype=torch.float32)), tmp_path / "other")
    for call in (lambda: plan_of(source, pack), lambda: load(source, exits=pack, any_base=True)):
        with monkeypatch.context() as patched:
            patched.setattr("fathomlm.checkpoints.resolve.load_native", lambda *_: pytest.fail("weights were read"))
            with pytest.raises(OptionError, match=says):
                call()
    with pytest.raises(OptionError, match=says):
        attach(load(source), read_pack(pack), any_base=True)


def test_loops_are_told_apart(tmp_path: Path) -> None:
    pack = write_pack(build("looped"), tmp_path / "pack")
    for plan, relaxation, says in (
        (DepthPlan.build("sequence", 2, 6), LORA, "sharing cycle, and this has sequence"),
        (DepthPlan.build("cycle", 3, 6), LORA, "recursions 2, and this has 3"),
        (LOOP, None, "relaxation .*, and this has None"),
        (LOOP, Relaxation(kind="lora", ranks={"q": 2}), "relaxation"),
    ):
        with pytest.raises(OptionError, match=says):
            read_pack(pack).plan_over(LLAMA, plan, relaxation)
    model = model_of(routed("expert"))
    without = replan(model, model.plan.with_routing(None).with_exits([1]), exit_adapter=2)
    with pytest.raises(OptionError, match="routing None, and this has expert"):
        attach(model, read_pack(write_pack(without, tmp_path / "without a router")))


def test_nothing_else_is_touched(base: Path, pack: Path) -> None:
    model, exits = load(base), read_pack(pack)
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    exited = attach(model, exits)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.plan.exits == ()
    for name, value in weights(model).items():
        assert weights(exited)[name].data_ptr() == value.data_ptr(), f"{name} is held twice"


def flip(pack: Path) -> None:
    data = bytearray((pack / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (pack / WEIGHTS).write_bytes(data)


ADAPTER, CLASSIFIER = "exit_adapters.2.a", "exit_classifiers.2.bias"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (lambda pack: shutil.rmtree(pack), r"pack does not exist; a pack of exits is what `fathomlm export"),
    "no record": (lambda pack: (pack / RECORD).unlink(), r"pack has no exits\.json"),
    "no weights": (lambda pack: (pack / WEIGHTS).unlink(), r"cannot read .*exits\.safetensors: No such file"),
    "a flipped bit": (flip, r"exits\.safetensors is not what was written: its checksum"),
    "cut": (lambda pack: (pack / WEIGHTS).write_bytes((pack / WEIGHTS).read_bytes()[:-9]), "is corrupt or truncated"),
    "empty": (lambda pack: (pack / WEIGHTS).write_bytes(b""), "is corrupt or truncated"),
    "no JSON": (lambda pack: (pack / RECORD).write_text("{"), r"exits\.json is not valid JSON"),
    "a list": (lambda pack: (pack / RECORD).write_text("[]"), "holds a list, not a JSON object"),
    "other format": (lambda pack: edit(pack, format="lora"), "is not a pack of exits: its format is 'lora'"),
    "later version": (lambda pack: edit(pack, version=2), "has version 2; this FathomLM reads version 1"),
    "true version": (lambda pack: edit(pack, version=True), "has version true"),
    "strange field": (lambda pack: edit(pack, exit=1), r"exits\.json: unknown field 'exit' \(did you mean 'exits'"),
    "lacks a field": (lambda pack: edit(pack, sha256=...), "is missing sha256"),
    "no base": (lambda pack: edit(pack, base=None), "base must be "),
    "no sample": (lambda pack: edit(pack, base__sample=None), "base.sample must be "),
    "cut sample": (lambda pack: edit(pack, base__sample__vectors="AAA="), "sample, vectors is damaged"),
    "odd sample": (lambda pack: edit(pack, base__sample__vectors="!"), "sample, vectors is damaged"),
    "empty sample": (lambda pack: edit(pack, base__sample__matrices=""), "matrices must hold finite numbers"),
    "infinite sample": (lambda pack: edit(pack, base__sample__matrices="AACAfw=="), "matrices must hold finite numbers"),
    "strange shape": (lambda pack: edit(pack, base__architecture__colour=1), "the architecture: unknown field 'colour'"),
    "wrong shape": (
        lambda pack: edit(pack, base__architecture__hidden="wide"),
        "the architecture: hidden must be an integer",
    ),
    "strange plan": (lambda pack: edit(pack, base__plan__sharing="knot"), "unknown sharing strategy 'knot'"),
    "exits too deep": (lambda pack: edit(pack, exits=[5]), "an exit goes after one of the steps 1 to 5 of 6, got 6"),
    "no exits": (lambda pack: edit(pack, exits=[]), "exits must be a list of steps"),
    "odd exits": (lambda pack: edit(pack, exits=["2"]), r"exits\[0\] must be an integer, got '2'"),
    "odd rank": (lambda pack: edit(pack, parts__adapter_rank=True), "parts.adapter_rank must be an integer, got true"),
    "odd layer": (lambda pack: edit(pack, parts__layer=1), "parts.layer must be true or false, got 1"),
    "other rank": (lambda pack: edit(pack, parts__adapter_rank=5), r"'exit_adapters\.2\..' is .*asks for"),
    "fewer parts": (lambda pack: edit(pack, parts__classifier=False), "has an unexpected tensor 'exit_classifiers.2.bias'"),
    "lacks a tensor": (lambda pack: rewrite(pack, lambda held: held.pop(ADAPTER)), f"is missing '{ADAPTER}'"),
    "strange tensor": (lambda pack: rewrite(pack, lambda held: held.update(x=torch.ones(1))), "unexpected tensor 'x'"),
    "integers": (
        lambda pack: rewrite(pack, lambda held: held.update({CLASSIFIER: torch.ones(1, dtype=torch.int32)})),
        r"is \(1,\) of int32; exits.json asks for \(1,\) of floating numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, base: Path, pack: Path) -> None:
    harm, says = DAMAGES[damage]
    harm(pack)
    with pytest.raises(CheckpointError, match=says):
        load(base, exits=pack)


def test_what_is_not_worth_keeping_is_refused(model: FathomForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the model has no exits to write; `train: exits`"):
        write_pack(bare(model), tmp_path / "pack")
    for name, says in ((ADAPTER, f"'{ADAPTER}' holds numbers"), ("layers.3.attn.q.weight", "the model holds numbers")):
        broken = build("every")
        with torch.no_grad():
            weights(broken)[name].fill_(float("nan"))
        with pytest.raises(FathomError, match=f"{says} that are not finite"):
            write_pack(broken, tmp_path / "pack")
    large = build("every")
    with torch.no_grad():
        weights(large)[ADAPTER].fill_(1e6)
    with pytest.raises(OptionError, match="not finite"):
        write_pack(large, tmp_path / "pack", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_a_pack_appears_whole_or_not_at_all(
    model: FathomForCausalLM, pack: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in pack.iterdir()}
    with pytest.raises(OutputError, match="exists"):
        write_pack(model, pack)
    with pytest.raises(OutputError, match=r"does not look like a pack of exits \(no exits\.json\)"):
        write_pack(model, base, force=True)
    with pytest.raises(OutputError, match="nothing was left behind"):
        write_pack(build("every", seed=1), pack, force=True, threshold=tmp_path / "missing.json")
    with monkeypatch.context() as patched:
        patched.setattr(exit_pack, "_digest", lambda data: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_pack(build("every", seed=1), pack, force=True)
        with pytest.raises(KeyboardInterrupt):
            write_pack(model, tmp_path / "new" / "pack")
    assert {file.name: file.read_bytes() for file in pack.iterdir()} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "pack"]
    write_pack(build("every", seed=1), pack, force=True)
    assert (pack / WEIGHTS).read_bytes() != before[WEIGHTS]


def test_a_threshold_comes_along(model: FathomForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "learnt.json").write_text("{}")
    pack = write_pack(model, tmp_path / "pack", threshold=tmp_path / "learnt.json")
    assert {file.name for file in pack.iterdir()} == {RECORD, WEIGHTS, THRESHOLD}
    assert FILE == THRESHOLD, "calibrate and the pack must agree in its name"
