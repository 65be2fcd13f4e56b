"""The T5 family against Hugging Face: logits, padding, greedy text, caches, and the way out and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM

import fathomlm
from fathomlm.cache import build_cache
from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.native import save
from fathomlm.depth.cost import count
from fathomlm.model.encoder import encoder_parameters
from parity.t5_models import CONFIGS, UNTIED, write_tiny_t5

GENERATOR = torch.Generator().manual_seed(1)
SOURCE = torch.randint(3, 96, (3, 17), generator=GENERATOR)
KEEP = torch.ones_like(SOURCE)
KEEP[0, 11:] = 0
KEEP[2, 14:] = 0
TARGET = torch.randint(3, 96, (3, 30), generator=GENERATOR)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request, tmp_path_factory, one_thread):
    """A tiny Hugging Face model, ours read from its directory, and the directory."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = write_tiny_t5(request.param, directory)
    return theirs, fathomlm.load(directory), directory


def logits(model, target=TARGET, **options):
    with torch.inference_mode():
        return model(SOURCE, KEEP, target, **options).logits


@torch.inference_mode()
def greedy(model, source, keep, tokens):
    """Slow and obviously right: one token at a time, the likeliest."""
    memory, cache = model.encode(source, keep), build_cache(model.plan)
    said = torch.full((len(source), 1), model.config.decoder_start_token_id)
    for _ in range(tokens):
        hidden = model.decoder(said[:, -1:], memory=memory, cache=cache)
        said = torch.cat((said, model.decoder.logits(hidden).argmax(-1)), dim=1)
    return said


@torch.inference_mode()
def test_logits_equal(pair):
    theirs, ours, _ = pair
    expected = theirs(input_ids=SOURCE, attention_mask=KEEP, decoder_input_ids=TARGET).logits
    assert expected.std() > 0.1
    assert (expected[0] - expected[1]).abs().max() > 0.1
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padding_of_the_target_is_not_seen(pair, side):
    theirs, ours, _ = pair
    mask = torch.ones_like(TARGET)
    padded = slice(None, 7) if side == "left" else slice(-7, None)
    mask[0, padded] = 0
    expected = theirs(input_ids=SOURCE, attention_mask=KEEP, decoder_input_ids=TARGET, decoder_attention_mask=mask).logits[
        mask.bool()
    ]
    found = logits(ours, decoder_attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - logits(ours)[mask.bool()]).abs().max() > 1e-3 or side == "right"


@torch.inference_mode()
def test_greedy_text_equal(pair):
    theirs, ours, _ = pair
    # Without a cache: that of transformers fails where the decoder has more layers than the encoder.
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "use_cache": False}
    expected = theirs.generate(input_ids=SOURCE, attention_mask=KEEP, **options)
    found = greedy(ours, SOURCE, KEEP, 20)
    assert torch.equal(found, expected)
    assert len({tuple(row) for row in found.tolist()}) == 3


def test_special_tokens_come_along(pair, tmp_path):
    _, ours, _ = pair
    save(ours, tmp_path / "ours")
    for model in (ours, fathomlm.load(tmp_path / "ours")):
        config = model.config
        assert (config.decoder_start_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 0)
        assert config.is_encoder_decoder


def test_loss_equals(pair):
    theirs, ours, _ = pair
    labels = TARGET.clone()
    labels[1, 20:] = -100
    with torch.inference_mode():
        expected = theirs(input_ids=SOURCE, attention_mask=KEEP, labels=labels)
        found = ours(SOURCE, KEEP, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_prefill_and_decode_equal_one_forward(pair):
    """In pieces, with padding in front of a row, and with the encoder's keys and values made once."""
    _, ours, _ = pair
    mask = torch.ones_like(TARGET)
    mask[1, :4] = 0
    memory, cache = ours.encode(SOURCE, KEEP), build_cache(ours.plan, reserve=4)
    whole = ours.decoder(TARGET, keep_BS=mask, memory=memory)
    assert memory.bytes() == 0
    pieces, at = [], 0
    for size in (9, 4, 1, 1, 15):
        piece = TARGET[:, at : at + size]
        pieces.append(ours.decoder(piece, keep_BS=mask[:, : at + size], memory=memory, cache=cache))
        at += size
    kept = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[kept], whole[kept], rtol=0, atol=1e-5)
    entry = SOURCE.numel() * ours.architecture.kv_width * 4
    assert memory.bytes() == 2 * entry * ours.plan.unrolled_layers


@torch.inference_mode()
def test_batch_equals_singles(pair):
    _, ours, _ = pair
    together, text = logits(ours), greedy(ours, SOURCE, KEEP, 12)
    for row in range(3):
        kept = KEEP[row].bool()
        alone = SOURCE[row : row + 1, kept]
        torch.testing.assert_close(ours(alone, decoder_input_ids=TARGET[row : row + 1]).logits[0], together[row],
                                   rtol=0, atol=1e-5)  # fmt: skip
        assert torch.equal(greedy(ours, alone, torch.ones_like(alone), 12)[0], text[row])


def test_a_saved_model_is_the_same_and_stores_each_weight_once(pair, tmp_path):
    _, ours, directory = pair
    save(ours, tmp_path / "ours")
    again = fathomlm.load(tmp_path / "ours")
    auto = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    for model in (again, auto):
        assert isinstance(model, fathomlm.FathomForSeq2SeqLM)
        assert model.architecture == ours.architecture
        assert (model.decoder.head is None) == (directory.name.rstrip("0") not in UNTIED)
        assert torch.equal(logits(model), logits(ours))
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    cost = count(ours.architecture, ours.plan)
    decoder = cost.non_embedding_parameters + cost.embedding_parameters
    assert stored == decoder + encoder_parameters(ours.config.encoder_config)
    assert stored == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("options", [{}, {"relax": "lora", "rank": 3}], ids=["plain", "looped"])
def test_unrolled_export_equals_ours_in_plain_transformers(pair, options, tmp_path):
    theirs, ours, _ = pair
    model = fathomlm.convert(ours, recursions=2, **options) if options else ours
    fathomlm.export(model, tmp_path / "plain", shard_bytes=30_000)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "plain").eval()
    assert type(plain) is type(theirs)
    with torch.inference_mode():
        found = plain(input_ids=SOURCE, attention_mask=KEEP, decoder_input_ids=TARGET).logits
    torch.testing.assert_close(found, logits(model), rtol=0, atol=2e-5)
    again = fathomlm.load(tmp_path / "plain")
    assert torch.equal(logits(again), logits(model)) or options
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert written["decoder_start_token_id"] == plain.generation_config.decoder_start_token_id == 0


@pytest.mark.parametrize("relax", [None, "lora", "dora"])
def test_full_rank_restores_the_original_from_a_looped_decoder(pair, relax):
    _, ours, directory = pair
    options = {} if relax is None else {"relax": relax, "rank": 10_000}
    looped = fathomlm.convert(ours if relax == "lora" else directory, sharing="cycle", recursions=2, **options)
    difference = (logits(looped) - logits(ours)).abs().max()
    assert difference > 0.05 if relax is None else difference < 1e-4
    assert looped.encoder is not ours.encoder


def test_a_looped_plan_with_exits_gives_gradients_to_every_parameter(pair):
    _, ours, _ = pair
    looped = fathomlm.convert(ours, sharing="cycle", recursions=2, relax="lora", rank=3)
    model = replan(looped, looped.plan.with_exits([0, 1]), exit_rank=2)
    assert model.encoder is looped.encoder
    memory = model.encode(SOURCE, KEEP)
    states = model.decoder.states(TARGET, at=model.plan.exits, memory=memory)
    assert set(states) == {0, 1, 3}
    again = model.decoder.states(TARGET, at=model.plan.exits, memory=memory, recompute="layer")
    total = 0.0
    for index, state in states.items():
        torch.testing.assert_close(again[index], state)
        scores = model.decoder.exit_logits(state, index)
        total = total + scores.float().logsumexp(-1).square().sum()
    total.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    # An exit's second factor starts at zero, so the first has no gradient in the first step.
    assert silent == ["decoder.exit_heads.0.a", "decoder.exit_heads.1.a"]


def test_the_counter_counts_the_parameters_of_a_relaxed_decoder(pair):
    _, ours, _ = pair
    for options in ({"relax": "lora", "rank": "attn=2,cross=3,down=4"}, {"relax": "dora", "rank": 2}, {"relax": "prefix"}):
        model = fathomlm.convert(ours, sharing="middle-cycle", recursions=2, **options)
        cost = count(model.architecture, model.plan, relaxation=model.relaxation)
        here = sum(p.numel() for p in model.decoder.parameters())
        assert here == cost.non_embedding_parameters + cost.embedding_parameters
        assert torch.isfinite(logits(model)).all()
