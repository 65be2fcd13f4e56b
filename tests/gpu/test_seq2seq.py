"""A decoder over an encoder's output on a GPU: what the CPU computes, and gradients for the position bias in bfloat16."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_engine_seq2seq import ROUTED, SOURCES, model, routed, threshold
from fathomlm.cache import build_cache
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.engine.engine import Engine
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.engine.session import EngineSession
from fathomlm.model.decoder import Decoder
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.seq2seq import FathomForSeq2SeqLM
from fathomlm.train.data.prepare import PrepareOptions, prepare
from fathomlm.train.reading import build_recipe
from fathomlm.train.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA, NEW = "cuda", 8
MODES = ("full", "static", "parallel", "state-copy", "speculative")


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def decoder_of(width: int = 64) -> Decoder:
    architecture = Architecture(
        family="t5", layers=4, hidden=width, intermediate=2 * width, heads=4, kv_heads=4, head_dim=width // 4, vocab=300,
        activation="gelu_tanh", rotary_fraction=0.0, attention_scale=1.0, positions="relative", cross=True,
        memory_width=width,
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(architecture, DepthPlan.build("cycle", 2, 4))
    decoder.reset_parameters(std=0.1)
    return decoder


def source(width: int, device: str) -> EncoderMemory:
    states = torch.randn(3, 21, width, generator=torch.Generator().manual_seed(1))
    keep = torch.ones(3, 21, dtype=torch.bool)
    keep[1, 13:] = False
    return EncoderMemory(states.to(device), keep.to(device))


@torch.inference_mode()
def test_passes_behind_a_cache_equal_the_cpu() -> None:
    decoder, tokens = decoder_of(), torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(2))
    keep = torch.ones_like(tokens)
    keep[0, :5] = 0
    found = []
    for device in ("cpu", CUDA):
        decoder.to(device)
        memory, cache, at, outs = source(64, device), build_cache(decoder.plan), 0, []
        for part in tokens.to(device).split([17, 1, 1, 5], dim=1):
            at += part.shape[1]
            outs.append(decoder(part, keep_BS=keep[:, :at].to(device), memory=memory, cache=cache))
        found.append(torch.cat(outs, dim=1).cpu()[keep.bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_gradients_are_near_those_of_float32(padded: bool) -> None:
    """The bias reaches attention as a mask that wants a gradient, shared by all rows or one for each."""
    decoder = decoder_of(128).to(CUDA)
    decoder.reset_parameters(std=0.03)  # attention is not scaled here: large weights make any rounding grow without end
    tokens = torch.randint(0, 300, (3, 75), device=CUDA)
    keep = torch.ones_like(tokens)
    if padded:
        keep[0, -9:] = 0
    gradients = []
    for narrow in (False, True):
        decoder.zero_grad()
        with torch.autocast(CUDA, torch.bfloat16, enabled=narrow):
            (state,) = decoder.states(tokens, keep_BS=keep, memory=source(128, CUDA)).values()
            decoder.logits(decoder.norm(state))[keep.bool()].float().logsumexp(-1).mean().backward()
        gradients.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    assert decoder.relative is not None
    for name, exact in gradients[0].items():
        away = (gradients[1][name] - exact).norm() / exact.norm()
        assert away < 0.1, name


def spoken(name: str, mode: str) -> tuple[FathomForSeq2SeqLM, Exiting | None]:
    """A model, and how it leaves: where its exits are neither always sure nor never."""
    if mode == "full":
        return model(name), None
    stack: dict[str, Any] = {"max_stack": 3} if mode in ("parallel", "speculative") else {}
    sure: dict[str, Any] = {} if mode == "static" else {"threshold": threshold(name, (2,))}
    return model(name), Exiting(mode=mode, exit_layers=(2,), **sure, **stack)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "mode", "compiled"),
    [(name, mode, False) for name in ("vanilla", "loops, lora", "gated") for mode in MODES]
    + [("vanilla", "full", True), ("vanilla", "speculative", True), ("loops, lora", "parallel", True)]
    + [("gated", "full", True), ("gated", "parallel", True), ("gated loops, lora", "speculative", False)],
)
def test_the_engine_says_what_the_reference_says(name: str, mode: str, compiled: bool) -> None:
    """Eight sources at once, then one after the other: captured decode steps, in float32 as on a CPU."""
    sources = [*SOURCES, [9, 9, 4, 2], [17, 5]]
    made, setting = spoken(name, mode)
    wanted = generate(made, sources, max_new_tokens=NEW, ignore_eos=True, exiting=setting)
    torch._dynamo.reset()
    on_gpu = copy.deepcopy(made).to(CUDA)
    waits = 3 if mode in ("parallel", "speculative") else 1
    for rows in (8, 1):
        engine = Engine(
            on_gpu, exiting=setting, compile=compiled, always_draft=True, page_size=16, max_length=20, max_source=12,
            batch_size=rows * waits, max_sequences=rows, memory=10**6,
        )  # fmt: skip
        assert engine.runner.layers.fused == name.startswith("gated")
        if mode == "parallel" and "loops" not in name:
            assert isinstance(engine.runner.program, ExitProgram)
            assert (engine.runner.program._lone is not None) == (rows == 1)
        work = [sources] if rows == 8 else [[source] for source in sources]
        results = [r for some in work for r in engine.generate(some, max_new_tokens=NEW, ignore_eos=True)]
        assert [r.tokens for r in results] == [w.tokens for w in wanted]
        if mode in ("static", "parallel", "state-copy"):
            assert [r.depths for r in results] == [w.exit_layers for w in wanted]
        if mode == "speculative":
            assert 0 < engine.totals.accepted <= engine.totals.drafted


def test_captured_sources_are_read_as_others_are() -> None:
    """One after the other and several at once, each size three times: run, captured and replayed."""
    made = model("gated")
    work = [*SOURCES, [9, 9, 4, 2], [17, 5]]
    wanted = generate(made, work, max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(copy.deepcopy(made).to(CUDA), page_size=16, max_length=20, max_source=12, batch_size=4, memory=10**6)
    for sources in (work, work, [work[0]], [work[1]], [work[2]], work):
        found = engine.generate(sources, max_new_tokens=NEW, ignore_eos=True)
        assert [r.tokens for r in found] == [wanted[work.index(source)].tokens for source in sources]
    reader = engine.runner._reader
    assert reader is not None
    assert reader.short is not None
    assert {(1, 16), (4, 16)} <= reader.short._graphs.keys()


def test_a_session_on_a_gpu_in_half_precision_and_beside_the_cpu() -> None:
    """What `fathomlm generate` and `eval generate` run; sources longer than before have another engine."""
    made = model("vanilla")
    session = EngineSession(copy.deepcopy(made).to(CUDA), sequences=len(SOURCES))
    for sources in (SOURCES, [[7, 2] * 40]):
        wanted = generate(made, sources, max_new_tokens=NEW, ignore_eos=True)
        found = session.generate_all(sources, max_new_tokens=NEW, ignore_eos=True)
        assert [one.tokens for one in found] == [one.tokens for one in wanted]
    half = EngineSession(copy.deepcopy(made).to(CUDA, torch.bfloat16))
    assert len(half.generate(SOURCES[0], max_new_tokens=NEW, ignore_eos=True).tokens) == NEW


@pytest.mark.parametrize("compiled", [False, True])
def test_captured_training_steps_are_steps(tmp_path: Path, compiled: bool) -> None:
    """With an encoder, its dropout left out, a shallow model and layerwise distillation."""
    lines = [json.dumps({"word": f"w{i:03d}", "back": f"{i:03d}w"}) + "\n" for i in range(48)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "held.jsonl").write_text(lines[0])
    options: Any = {"tokenizer": "bytes", "pairs": ("word", "back"), "validation_from": (str(tmp_path / "held.jsonl"),)}
    corpus = prepare(PrepareOptions(sources=(str(tmp_path / "a.jsonl"),), out=tmp_path / "corpus", **options)).path
    found = []
    for capture in (False, True):
        torch._dynamo.reset()
        shape = {"family": "t5", "layers": 3, "hidden": 64, "intermediate": 96, "heads": 4}
        out = tmp_path / f"run-{capture}"
        train(
            build_recipe(
                {
                    "out": str(out),
                    "model": {"architecture": shape, "encoder": {"layers": 2}},
                    "data": {"path": str(corpus), "pairs": ["word", "back"], "source_length": 8, "target_length": 8},
                    "budget": {"steps": 12},
                    "batch": {"sequences": 16, "micro": 16},
                    "loss": {"exits": {"at": [1], "weights": "weighted"}, "layerwise": {"shallow": 1}},
                    "evaluate": {"every": 0, "rows": 1},
                    "checkpoint": {"every": 1000},
                    "log": {"every": 1, "tensorboard": False},
                    "device": CUDA,
                    "compile": compiled,
                    "capture": capture,
                }
            )
        )
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append([record["loss"] for record in records if "loss" in record])
    assert len(found[0]) >= 12
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize(("kv", "router", "sharing"), ROUTED)
def test_routed_models_say_what_the_reference_says(kv: str, router: str, sharing: str) -> None:
    made = routed(kv, router, sharing)
    wanted = generate(made, SOURCES, max_new_tokens=NEW, ignore_eos=True)
    engine = Engine(copy.deepcopy(made).to(CUDA), page_size=16, batch_size=4, max_length=20, max_source=12)
    found = engine.generate(SOURCES, max_new_tokens=NEW, ignore_eos=True)
    assert [(one.tokens, one.depths) for one in found] == [(one.tokens, one.depths) for one in wanted]
