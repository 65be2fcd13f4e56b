"""Training on a GPU: kernels against their plain twins, compiled steps against eager ones, a run that resumes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fathomlm.depth import Architecture, DepthPlan
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.kernels import cross_entropy, half, qkv, swiglu
from fathomlm.model.decoder import Decoder
from fathomlm.train.losses.head import _add_product
from fathomlm.train.objective import Objective
from fathomlm.train.recipe import ExitRecipe, LossRecipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = "cuda"
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [512, 700, 2560])
def test_swiglu_kernel_means_what_its_twin_means(dtype: torch.dtype, width: int) -> None:
    both = torch.randn(67, 2 * width, device=CUDA, dtype=dtype)
    d_inner = torch.randn(67, width, device=CUDA, dtype=dtype)
    scale = torch.rand(67, device=CUDA)
    ours, theirs = swiglu.swiglu_backward(both, d_inner, scale), swiglu.plain_swiglu_backward(both, d_inner, scale)
    for fast, slow in zip(ours, theirs, strict=True):
        torch.testing.assert_close(fast, slow, rtol=NEAR[dtype], atol=NEAR[dtype])
    only, nothing = swiglu.swiglu_backward(both, d_inner, scale, again=False)
    assert nothing is None
    assert torch.equal(only, ours[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [257, 4096, 49152])
def test_cross_entropy_kernel_means_what_its_twin_means(dtype: torch.dtype, vocab: int) -> None:
    logits = 4 * torch.randn(33, vocab, device=CUDA, dtype=dtype)
    targets = torch.randint(0, vocab, (33,), device=CUDA)
    targets[5] = targets[20] = -100
    fast, slow = logits.clone(), logits.clone()
    ours = cross_entropy.cross_entropy_(fast, targets, 0.3)
    theirs = cross_entropy.plain_cross_entropy_(slow, targets, 0.3)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast, slow, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert not fast[5].any()


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(15, 5, 64), (4, 2, 16), (3, 1, 32)])
def test_packing_kernel_means_what_its_twin_means(heads: int, groups: int, head_dim: int) -> None:
    B, T = 3, 37
    d_q = torch.randn(B, T, heads, head_dim, device=CUDA).transpose(1, 2)
    d_k, d_v = (torch.randn(B, groups, T, head_dim, device=CUDA) for _ in range(2))
    angle = torch.randn(B, 1, T, head_dim // 2, device=CUDA)
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    scale = torch.rand(B * T, device=CUDA) + 0.5
    fast = qkv.unrotate_and_pack(d_q, d_k, d_v, cos, sin, scale)
    torch.testing.assert_close(fast, qkv.plain_unrotate_and_pack(d_q, d_k, d_v, cos, sin, scale), rtol=1e-5, atol=1e-5)
    product = torch.randn(B, T, (heads + 2 * groups) * head_dim, device=CUDA)
    ours, theirs = (f(product, heads, groups, cos, sin, scale) for f in (qkv.rotate_and_split, qkv.plain_rotate_and_split))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(37, 96), (5000, 960), (2048, 2048)])
def test_norm_kernel_means_what_its_twin_means(dtype: torch.dtype, tokens: int, width: int) -> None:
    x, pull, d_stream = (torch.randn(tokens, width, device=CUDA, dtype=dtype) for _ in range(3))
    scale = torch.rsqrt(x.float().pow(2).mean(-1) + 1e-5)
    fast, slow = (f(x, pull, d_stream, scale) for f in (half.norm_backward, half.plain_norm_backward))
    torch.testing.assert_close(fast, slow, rtol=NEAR[dtype], atol=NEAR[dtype])


def test_the_head_adds_its_products_in_float32() -> None:
    total, a, b = torch.randn(96, 64, device=CUDA), *(torch.randn(256, n, device=CUDA).bfloat16() for n in (96, 64))
    wanted = total.double() + a.double().T @ b.double()
    _add_product(total, a.T, b)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("relax", [None, "lora"])
@pytest.mark.parametrize("recompute", ["none", "recursion"])
def test_a_compiled_step_has_the_gradients_of_an_eager_one(relax: str | None, recompute: Any) -> None:
    shape = {"layers": 4, "hidden": 96, "intermediate": 160, "heads": 6, "kv_heads": 2, "head_dim": 16, "vocab": 300}
    architecture = Architecture(family="llama", **shape)
    relaxation = build_relaxation(architecture.linears(), relax, 8 if relax else None)
    decoder = Decoder(architecture, DepthPlan.build("cycle", 2, 4), relaxation)
    decoder.reset_parameters()
    objective = Objective(decoder.to(CUDA), LossRecipe(exits=ExitRecipe(distill="forward_kl")), recompute=recompute)
    tokens, targets = torch.randint(0, 300, (2, 2, 64), device=CUDA)
    found = []
    for compiled in (False, True):
        if compiled:
            for layer in decoder.layers:
                layer.compile()
        loss, _ = objective(tokens, targets)
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}))
        decoder.zero_grad()
    (eager, slow), (fast_loss, fast) = found
    torch.testing.assert_close(fast_loss, eager, rtol=1e-5, atol=1e-3)
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=1e-3 * float(slow[name].abs().max()), msg=name)


@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_bfloat16_gradients_are_as_near_to_float32_as_eager_ones(autocast: bool) -> None:
    """In bfloat16 a compiled layer uses the forms with written-out backward passes; rounding may differ, nothing else."""
    shape = {"layers": 4, "hidden": 960, "intermediate": 2560, "heads": 15, "kv_heads": 5, "head_dim": 64, "vocab": 1000}
    decoder = Decoder(Architecture(family="llama", **shape), DepthPlan.build("cycle", 2, 4))
    decoder.reset_parameters()
    tokens, targets = torch.randint(0, 1000, (2, 2, 256), device=CUDA)

    def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        decoder.to(CUDA, torch.float32 if autocast else dtype).zero_grad()
        with torch.autocast(CUDA, torch.bfloat16, enabled=autocast and dtype == torch.bfloat16):
            loss, _ = Objective(decoder, LossRecipe())(tokens, targets)
        loss.backward()
        return {name: p.grad.float() for name, p in decoder.named_parameters() if p.grad is not None}

    exact, eager = gradients(torch.float32), gradients(torch.bfloat16)
    decoder.compile_for_training()
    compiled = gradients(torch.bfloat16)
    for name, wanted in exact.items():
        errors = [float((found[name] - wanted).norm() / wanted.norm()) for found in (compiled, eager)]
        assert errors[0] < 1.5 * errors[1] + 5e-3, (name, errors)


@pytest.mark.parametrize("capture", [False, True])
def test_a_compiled_bf16_run_learns_and_resumes(tmp_path: Path, capture: bool) -> None:
    """Captured or not, with validations and checkpoints between the passes."""
    from fathomlm.train.data.prepare import PrepareOptions, prepare
    from fathomlm.train.reading import build_recipe
    from fathomlm.train.run import train

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    more = tmp_path / "more.txt"
    more.write_text("a fathom is six feet of water, and the line is marked in fathoms. " * 50)
    prepare(PrepareOptions(sources=(str(text),), validation_from=(str(more),), out=tmp_path / "corpus", tokenizer="bytes"))
    shape = {"layers": 4, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "context": 128}
    values = {
        "model": {"architecture": shape, "recursions": 2},
        "data": {"path": str(tmp_path / "corpus"), "context": 128},
        "budget": {"steps": 60},
        "batch": {"sequences": 8, "micro": 4},
        "optimizer": {"lr": 3e-3},
        "loss": {"exits": {}},
        "precision": "bf16",
        "compile": True,
        "capture": capture,
        "evaluate": {"every": 20, "rows": 8},
        "checkpoint": {"every": 30},
        "log": {"every": 1, "tensorboard": False},
        "out": str(tmp_path / "run"),
    }
    recipe = build_recipe(values)
    whole = train(recipe)
    assert whole.loss is not None
    assert whole.loss < 2.5  # from 6.1, a guess over 257 bytes and the exit's tenth of one
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000060")
    again = train(recipe, resume=True)
    assert again.validation == pytest.approx(whole.validation, rel=1e-2)


@pytest.mark.parametrize(
    ("recursions", "words", "draft", "taught"),
    [(1, 0, 0, True), (1, 0, 0, False), (3, 0, 0, False), (1, 40, 0, False), (1, 40, 3, False)],
)
def test_captured_steps_are_steps(recursions: int, words: int, draft: int, taught: bool) -> None:
    """Replayed passes leave the losses and weights that passes leave which are run one by one, also those of an exit that
    learns among some words, of a draft layer, and beside a teacher."""
    from fathomlm.depth import build_routing
    from fathomlm.train.data.loader import Batch
    from fathomlm.train.distributed import World
    from fathomlm.train.loop import Stepper
    from fathomlm.train.optim import build_optimizer, choose_trained
    from fathomlm.train.recipe import DistillRecipe, Recipe
    from fathomlm.train.schedule import LearningRate

    shape = {"layers": 5, "hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 512}
    plan = DepthPlan.vanilla(5)
    if recursions > 1:
        plan = DepthPlan.build("middle-cycle", 3, 5).with_routing(build_routing("expert", 3))
    exits = ExitRecipe(at=[2], coefficient=1.0, distill="forward_kl", adapter_rank=8, classifier=True, exit_vocab=words)
    distill = DistillRecipe(source="teacher") if taught else None
    loss, own = (
        LossRecipe(exits=exits if words else None, distill=distill),
        {"exit_adapter": 8, "exit_classifier": True} if words else {},
    )
    plan = plan.with_exits((1,)) if words else plan
    if draft:
        plan, own = plan.with_exits((), draft=True), {}
        loss = LossRecipe(exits=ExitRecipe(coefficient=1.0, distill="forward_kl", draft=draft, exit_vocab=words))
    tokens = torch.randint(0, 512, (8, 8, 65), generator=torch.Generator().manual_seed(1))
    found = []
    for capture in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        decoder = Decoder(Architecture(family="llama", **shape), plan, **own)
        decoder.reset_parameters()
        decoder.limit_exits(torch.arange(0, 512, 512 // words)[:words] if words else None)
        choose_trained(decoder, "exits" if words else "all")
        decoder.to(CUDA).compile_for_training()
        recipe = Recipe(precision="bf16", capture=capture, train="exits" if words else "all", loss=loss)
        teacher = None
        if taught:
            teacher = Decoder(Architecture(family="llama", **shape), plan)
            teacher.reset_parameters()
            teacher.to(CUDA).requires_grad_(False).compile_for_training()
        objective = Objective(decoder, recipe.loss, teacher=teacher)
        objective.compile_parts()
        optimizer = build_optimizer(objective, recipe.optimizer)
        world = World(0, 1, torch.device(CUDA))
        stepper = Stepper(recipe, objective, objective, optimizer, LearningRate.of(recipe.schedule, 100), world)
        losses = []
        for number, rows in enumerate(tokens):
            batch = Batch(tokens_BT=rows[:, :-1].contiguous(), targets_BT=rows[:, 1:].contiguous())
            losses.append(stepper.step(batch.split(4), number, wants_stop=False).read().loss)
        assert (stepper._captured is not None and stepper._captured.holds_gradients) == capture
        found.append((losses, {name: p.detach().clone() for name, p in decoder.named_parameters()}))
    (plain, slow), (captured, fast) = found
    torch.testing.assert_close(captured, plain, rtol=1e-4, atol=1e-4)
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=2e-4, msg=partial("{}: {}".format, name))
