"""What tokens of different recursions add to one layer, against each recursion's own delta, row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decode.exit_models import LLAMA, LOOP, NEOX
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, Relaxation
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.engine.engine import Engine
from fathomlm.engine.grouped import GroupedDelta
from fathomlm.engine.programs.exits import ExitProgram
from fathomlm.model.config import FathomConfig
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.relax import StepDelta

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN = dataclasses.replace(LLAMA, family="qwen3", qk_norm=True)
SHAPES = {"llama": LLAMA, "neox": NEOX, "qwen3": QWEN}
ROWS = [0, 1, 1, 0, 1]
PROMPTS = [[5, 9, 33, 7], [17], [3, 90, 11, 42, 8, 8], [61, 2]]


def build(architecture: Architecture, kind: str, rank: str | int = 3, *, vectors: bool = True) -> FathomForCausalLM:
    relaxation = build_relaxation(architecture.linears(), kind, rank, linears_only=not vectors)
    config = FathomConfig.of(architecture, LOOP.with_exits(LOOP.recursion_ends()), relaxation, dtype=torch.float32)
    model = FathomForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = "norm" in name and "bias" not in name and "offsets" not in name
            centre = 1.0 if plain or "magnitude" in name else 0.0
            parameter.normal_(mean=centre, std=0.5 if "embed" in name or "head.w" in name else 0.2, generator=generator)
    return model


@pytest.mark.parametrize("rank", [3, "q=2,down=4"])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_gets_its_recursions_own(shape: str, kind: str, vectors: bool, rank: str | int) -> None:
    model = build(SHAPES[shape], kind, rank, vectors=vectors)
    decoder, a = model.decoder, model.architecture
    deltas = [decoder.delta(step) for step in decoder.plan.uses(1)]
    grouped = GroupedDelta.build(deltas)
    assert grouped is not None
    layer, recursion_N, random = decoder.layers[1], torch.tensor(ROWS), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for spec in a.linears():
            linear = layer.get_submodule(spec.path)
            x_N1M = torch.randn(len(ROWS), 1, spec.inputs, generator=random)
            found = grouped.at(recursion_N).project(spec.name, linear, x_N1M)
            for n, recursion in enumerate(ROWS):
                wanted = deltas[recursion].project(spec.name, linear, x_N1M[n : n + 1])
                torch.testing.assert_close(found[n : n + 1], wanted, rtol=1e-5, atol=1e-5)
                alone = GroupedDelta([deltas[recursion]])
                torch.testing.assert_close(alone.project(spec.name, linear, x_N1M[n : n + 1]), wanted, rtol=1e-5, atol=1e-5)
        for name, norm in layer.named_modules():
            if "norm" not in name:
                continue
            shape_ = (len(ROWS), a.heads, 1, a.head_dim) if "attn." in name else (len(ROWS), 1, a.hidden)
            x = torch.randn(*shape_, generator=random)
            found = grouped.at(recursion_N).norm(name, norm, x)
            for n, recursion in enumerate(ROWS):
                wanted = deltas[recursion].norm(name, norm, x[n : n + 1])
                torch.testing.assert_close(found[n : n + 1], wanted, rtol=1e-5, atol=1e-5)


class Doubled(StepDelta):
    """A kind that nobody here knows."""

    factor = 2.0

    def project(self, name: str, linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.factor * linear(x)
        return out


def test_other_kinds_are_computed_for_every_recursion() -> None:
    deltas = [Doubled(LLAMA, Relaxation(kind="encoding")) for _ in range(2)]
    deltas[1].factor = 5.0
    linear, x_N1M = torch.nn.Linear(6, 4), torch.randn(5, 1, 6)
    found = GroupedDelta(deltas).at(torch.tensor(ROWS)).project("q", linear, x_N1M)
    factors = torch.tensor([[[deltas[recursion].factor]] for recursion in ROWS])
    torch.testing.assert_close(found, factors * linear(x_N1M))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_shared_products_run_once(kind: str) -> None:
    """Counted by torch: a pass over rows of both recursions costs the tied layer, and the low-rank products of both."""
    model = build(LLAMA, kind)
    decoder, a = model.decoder, model.architecture
    deltas = [decoder.delta(step) for step in decoder.plan.uses(1)]
    grouped = GroupedDelta.build(deltas)
    assert grouped is not None
    layer = decoder.layers[1]
    inputs = {spec.name: torch.randn(len(ROWS), 1, spec.inputs) for spec in a.linears()}

    def count() -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for spec in a.linears():
                grouped.at(torch.tensor(ROWS)).project(spec.name, layer.get_submodule(spec.path), inputs[spec.name])
        return counter.get_total_flops()

    count()  # lengths of rows are found once
    low = sum(2 * 3 * (spec.inputs + spec.outputs) for spec in a.linears())
    assert count() == 2 * len(ROWS) * (sum(spec.inputs * spec.outputs for spec in a.linears()) + low)


def served(model: FathomForCausalLM, exiting: Exiting | None = None, **options: object) -> tuple[Engine, list[object]]:
    engine = Engine(model, exiting=exiting, page_size=4, batch_size=3, max_length=48, **options)
    results = engine.generate(PROMPTS, max_new_tokens=6)
    return engine, [(result.tokens, result.depths) for result in results]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_relaxed_models_pack_as_tied_ones_do(kind: str, vectors: bool, merge: bool) -> None:
    """Merged weights give the reference decoder's tokens; also with exits, whose rows then run one recursion a pass."""
    model = build(LLAMA, kind, vectors=vectors)
    wanted = generate(model, PROMPTS, max_new_tokens=6)
    engine, found = served(model, fuse=True, merge=merge)
    assert engine.runner.layers.fused is engine.runner.layers.merged is merge
    assert [tokens for tokens, _ in found] == [result.tokens for result in wanted]
    exits = Exiting(mode="parallel", exit_layers=(3,), threshold=0.05, max_stack=2)
    leaves = generate(model, PROMPTS, max_new_tokens=6, exiting=exits)
    engine, found = served(model, exits, fuse=True, merge=merge)
    assert isinstance(engine.runner.program, ExitProgram)
    assert engine.runner.program.mixed is not merge
    assert found == [(result.tokens, result.exit_layers) for result in leaves]
    assert {depth for result in leaves for depth in result.exit_layers} == {3, 6}
