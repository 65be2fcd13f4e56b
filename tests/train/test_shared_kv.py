"""Sharing keys and values in training on several devices: what a model never uses must not hold its gradients up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.depth.relaxation import build_relaxation
from fathomlm.train.distributed import World, parallelize
from fathomlm.train.objective import Objective
from fathomlm.train.optim import choose_trained
from fathomlm.train.recipe import LossRecipe
from model.route.small import LLAMA, LOOPS, model_of, routed, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = build_relaxation(LLAMA.linears(), "lora", 2)
MODELS: dict[str, tuple[DepthPlan, Relaxation | None]] = {
    "expert": (routed(), None),
    "expert, aux router, share": (routed("expert, aux router", "share"), None),
    "token, loss-free": (routed("token, loss-free"), None),
    "expert, hybrid, lora": (routed("expert", "hybrid"), LORA),
    "looped, share": (LOOPS["middle"].with_kv("share"), None),
    "looped, share, lora": (LOOPS["middle"].with_kv("share"), LORA),
    "expert, share, lora": (routed("expert", "share"), LORA),
    "plain, share": (DepthPlan.vanilla(8).with_kv("share", "cycle", 2), None),
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A group of one: DDP looks for gradients that never came as it does in a larger one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield World(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_ddp_finds_all_gradients(name: str, group: World) -> None:
    decoder = model_of(*MODELS[name]).decoder.train()
    choose_trained(decoder, "all")
    module = parallelize(Objective(decoder, LossRecipe()), "ddp", group, "float32")
    for seed in range(3):
        tokens = some_tokens(2, 12, seed)
        total, _ = module(tokens, tokens.roll(-1, 1))
        total.backward()
        module.zero_grad()
