"""Exits with a vocabulary of their own: the scores of its tokens, no other, and what a verifier mends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.depth import Architecture, DepthPlan
from fathomlm.errors import OptionError
from fathomlm.model.decoder import Decoder
from fathomlm.model.hub import FathomConfig, FathomForCausalLM

SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "intermediate": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab": 61,
}
VOCAB = torch.tensor([5, 60, 0, 17, 18, 33])
EXIT = 1


def decoder_of(tied: bool = True, **parts: Any) -> Decoder:
    torch.manual_seed(0)
    plan = DepthPlan.vanilla(4).with_exits((EXIT,))
    decoder = Decoder(Architecture(family="llama", tied_embeddings=tied, **SHAPE), plan, **parts)
    decoder.reset_parameters(std=0.3)
    with torch.no_grad():
        for parameter in (*decoder.exit_heads.parameters(), *decoder.exit_adapters.parameters()):
            parameter.normal_(std=0.2)
    return decoder.eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [{}, {"exit_rank": 3}, {"exit_adapter": 3}])
def test_an_exit_scores_its_words_and_no_other(tied: bool, parts: dict[str, int]) -> None:
    decoder = decoder_of(tied, **parts)
    x = torch.randn(2, 3, 32)
    whole, last = decoder.exit_logits(x, EXIT), decoder.exit_logits(x, 3)
    before = set(decoder.state_dict())
    decoder.limit_exits(VOCAB)
    few = decoder.exit_logits(x, EXIT)
    torch.testing.assert_close(few[..., VOCAB], whole[..., VOCAB])
    others = torch.ones(61, dtype=torch.bool).scatter(0, VOCAB, False)
    assert (few[..., others] == -torch.inf).all()
    assert torch.equal(decoder.exit_logits(x, 3), last), "the last output knows every word"
    assert set(decoder.state_dict()) == before, "nothing of it is stored"
    decoder.limit_exits(None)
    assert torch.equal(decoder.exit_logits(x, EXIT), whole)


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_speculative_texts_stay_the_whole_models(threshold: float) -> None:
    model = FathomForCausalLM(FathomConfig.of(Architecture(family="llama", **SHAPE), DepthPlan.vanilla(4)))
    model.decoder.reset_parameters(std=0.3, generator=torch.Generator().manual_seed(0))

    def text(mode: Any, **given: Any) -> tuple[int, ...]:
        where = Exiting(mode=mode, **({"exit_layers": (EXIT + 1,)} | given if given else {}))
        return generate(model.eval(), [[3, 7, 11]], max_new_tokens=30, ignore_eos=True, exiting=where)[0].tokens

    full = text("full")
    model.decoder.limit_exits(VOCAB)
    assert text("speculative", threshold=threshold) == full
    assert set(text("parallel", threshold=0.0)) <= set(VOCAB.tolist())


@pytest.mark.parametrize(
    ("exit_vocab", "message"),
    [([], "one or more different"), ([3, 3], "one or more different"), ([61], "from 0 to 60"), ([-1], "from 0 to 60")],
)
def test_an_invalid_exit_vocab_is_refused(exit_vocab: list[int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        decoder_of().limit_exits(torch.tensor(exit_vocab, dtype=torch.long))
