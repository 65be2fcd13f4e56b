"""transformers as a peer: the same weights, the same scores, and times that add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from decode.exit_models import LLAMA, build
from fathomlm.depth import DepthPlan
from fathomlm.errors import UnsupportedModel
from fathomlm.lab.bench.measure import Timing
from fathomlm.lab.bench.models import batched, hugging_face_model, one_by_one, random_model
from fathomlm.lab.bench.workload import Workload, WorkloadRequest
from fathomlm.model.hub import FathomForCausalLM
from model.route.small import model_of, routed

pytestmark = pytest.mark.usefixtures("one_thread")
WORKLOAD = Workload("test", 0, "together", None, tuple(WorkloadRequest((5, 9, token), 4) for token in (1, 2, 3)))


def random(family: str, plan: DepthPlan, **traits: Any) -> FathomForCausalLM:
    shape = replace(LLAMA, family=family, **traits)
    return random_model(shape, plan, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["plain", "tied embeddings, layers that run twice", "norms of heads"])
def test_the_peer_has_the_same_weights_and_gives_the_same_scores(name: str) -> None:
    model = {
        "plain": lambda: build("vanilla"),
        "tied embeddings, layers that run twice": lambda: random(
            "llama", DepthPlan.build("middle-cycle", 2, 6), tied_embeddings=True
        ),
        "norms of heads": lambda: random("qwen3", DepthPlan.vanilla(6), qk_norm=True),
    }[name]()
    peer = hugging_face_model(model)
    tokens = torch.tensor([[5, 9, 33, 7, 81, 2, 64]])
    with torch.inference_mode():
        expected = model.decoder.logits(model.decoder(tokens))
        torch.testing.assert_close(peer(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    ours = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in peer.parameters()} <= ours  # nothing was copied


def test_continuous_batching_is_timed_by_its_own_clock() -> None:
    played = batched(hugging_face_model(build("vanilla")), WORKLOAD, batch_size=2)
    found = Timing.of(played)
    assert (found.requests, found.finished, found.failed, found.tokens, found.prompt_tokens) == (3, 3, 0, 12, 9)
    assert found.tokens_per_s == pytest.approx(12 / found.seconds)
    assert all(sorted(one.times) == one.times and one.times[0] > one.arrival for one in played.requests)
    # Two at a time: the third request's first token comes after another's last.
    firsts, lasts = ([one.times[at] for one in played.requests] for at in (0, -1))
    assert max(firsts) > min(lasts)


def test_generate_is_timed_token_by_token() -> None:
    played = one_by_one(hugging_face_model(build("vanilla")), WORKLOAD)
    found = Timing.of(played)
    assert (found.requests, found.tokens) == (3, 12)
    assert played.begun == played.requests[0].arrival  # warming up is left out
    for before, after in pairwise(played.requests):
        assert before.times[-1] <= after.arrival < after.times[0]


def test_what_transformers_has_no_place_for_is_said() -> None:
    for model, why in (
        (model_of(routed()), "router"),
        (build("shared-kv"), "shared KV cache"),
        (build("lora"), "lora"),
        (build("neox"), "NeoX"),
    ):
        with pytest.raises(UnsupportedModel, match=why):
            hugging_face_model(model)
