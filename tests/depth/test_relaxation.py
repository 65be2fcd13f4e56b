"""Relaxations: their ranks, their sizes, and what does not go together."""

from __future__ import annotations

import json
import re

import pytest

from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.depth.cost import relaxation_parameters
from fathomlm.depth.presets import PRESETS
from fathomlm.depth.relaxation import parse_ranks
from fathomlm.errors import OptionError

LLAMA = PRESETS["smollm-360m"].architecture
GEMMA = PRESETS["gemma-2b"].architecture
PYTHIA = PRESETS["pythia-1b"].architecture


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        (64, {"q": 64, "k": 64, "v": 64, "o": 64, "gate": 64, "up": 64, "down": 64}),
        ("64", {"q": 64, "k": 64, "v": 64, "o": 64, "gate": 64, "up": 64, "down": 64}),
        ("q=64,kv=128,ffn=256", {"q": 64, "k": 128, "v": 128, "gate": 256, "up": 256, "down": 256}),
        ("q=8, v = 16", {"q": 8, "v": 16}),
        ("attn=8,k=4", {"q": 8, "k": 4, "v": 8, "o": 8}),
        ({"qkv": 8, "out": 2}, {"q": 8, "k": 8, "v": 8, "o": 2}),
    ],
)
def test_ranks_are_read_by_linear_or_by_group(value, ranks):
    assert parse_ranks(value, LLAMA.linears()) == ranks


def test_a_family_without_a_gate_has_no_rank_there():
    assert parse_ranks("ffn=32", PYTHIA.linears()) == {"up": 32, "down": 32}
    with pytest.raises(OptionError, match="this family has no 'gate' linear; it has q, k, v, o, up, down"):
        parse_ranks("gate=32", PYTHIA.linears())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sixty", "cannot read 'sixty' as a rank"),
        ("", "cannot read '' as a rank"),
        ("--5", "cannot read '--5' as a rank"),
        ("q=", "cannot read 'q=' as a rank"),
        ("q=²", "cannot read 'q=²' as a rank"),
        ("64,128", "cannot read '64' as a rank"),
        ("fnn=8", "unknown linear in rank 'fnn' (did you mean 'ffn'?)"),
        (0, "must be >= 1, got 0"),
        ("-3", "must be >= 1, got -3"),
    ],
)
def test_ranks_that_cannot_be_read(value, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        parse_ranks(value, LLAMA.linears())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "lorra", "ranks": {"q": 1}}, "unknown relaxation 'lorra' (did you mean 'lora'?)"),
        ({"kind": "lora"}, "lora requires a rank"),
        ({"kind": "prefix"}, "prefix requires prefix_length >= 1, got 0"),
        ({"kind": "prefix", "prefix_length": -1}, "prefix_length must be between 0 and 65536, got -1"),
        ({"kind": "encoding", "prefix_length": 4}, "prefix_length requires prefix, and cannot be combined with encoding"),
        ({"kind": "encoding", "ranks": {"q": 1}}, "ranks requires lora or dora, and cannot be combined with encoding"),
        ({"kind": "dora", "ranks": {"qq": 1}}, "unknown linear 'qq'"),
        ({"kind": "dora", "ranks": {"q": 0}}, "the rank on q must be >= 1, got 0"),
    ],
)
def test_relaxations_that_make_no_sense(fields, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        Relaxation(**fields)


def test_a_rank_is_capped_by_its_matrix():
    relaxation = Relaxation(kind="lora", ranks=parse_ranks(512, GEMMA.linears()))
    capped = {linear.name: relaxation.rank(linear) for linear in GEMMA.linears()}
    assert capped == {"q": 512, "k": 256, "v": 256, "o": 512, "gate": 512, "up": 512, "down": 512}


def test_a_linear_that_is_not_named_has_no_rank():
    relaxation = Relaxation(kind="lora", ranks={"q": 4})
    added = {linear.name: relaxation.method.linear_weights(relaxation, linear) for linear in LLAMA.linears()}
    assert added == {"q": 4 * (960 + 960), "k": 0, "v": 0, "o": 0, "gate": 0, "up": 0, "down": 0}


def test_dora_adds_a_length_for_each_output_row_of_the_linears_it_relaxes():
    plan = DepthPlan.build("middle-cycle", 3, LLAMA.layers)
    lora = relaxation_parameters(LLAMA, plan, Relaxation(kind="lora", ranks={"q": 64, "v": 64}))
    dora = relaxation_parameters(LLAMA, plan, Relaxation(kind="dora", ranks={"q": 64, "v": 64}))
    assert dora - lora == 30 * (960 + 320)


def test_low_rank_relaxes_only_shared_steps_and_a_prefix_every_step():
    plan = DepthPlan.build("middle-cycle", 3, LLAMA.layers)
    lora = Relaxation(kind="lora", ranks={"o": 2}, vectors=False)
    assert relaxation_parameters(LLAMA, plan, lora) == 30 * 2 * (960 + 960)
    assert relaxation_parameters(LLAMA, plan, Relaxation(kind="prefix", prefix_length=7)) == 32 * 7 * 960
    plain = DepthPlan.vanilla(LLAMA.layers)
    assert relaxation_parameters(LLAMA, plain, lora) == 0
    assert relaxation_parameters(LLAMA, plain, Relaxation(kind="prefix", prefix_length=7)) == 32 * 7 * 960


def test_offsets_for_norms_and_biases_are_a_sliver_beside_the_low_rank_part():
    plan = DepthPlan.build("cycle", 2, PYTHIA.layers)
    ranks = parse_ranks(64, PYTHIA.linears())
    without = relaxation_parameters(PYTHIA, plan, Relaxation(kind="lora", ranks=ranks, vectors=False))
    offsets = relaxation_parameters(PYTHIA, plan, Relaxation(kind="lora", ranks=ranks)) - without
    norms, biases = 2 * 2 * 2048, 4 * 2048 + 8192 + 2048
    assert offsets == 16 * (norms + biases)
    assert offsets < 0.02 * without


def test_encoding_has_a_vector_for_each_recursion():
    plan = DepthPlan.build("middle-cycle", 3, LLAMA.layers)
    assert relaxation_parameters(LLAMA, plan, Relaxation(kind="encoding")) == 3 * 960


@pytest.mark.parametrize("sharing", ["cycle", "middle-cycle", "cycle-rev"])
def test_encoding_goes_with_a_core_that_loops_as_a_whole(sharing):
    plan = DepthPlan.build(sharing, 2, LLAMA.layers)
    assert relaxation_parameters(LLAMA, plan, Relaxation(kind="encoding")) == 2 * 960


@pytest.mark.parametrize("sharing", ["sequence", "middle-sequence"])
def test_encoding_does_not_go_with_a_sequence(sharing):
    plan = DepthPlan.build(sharing, 2, LLAMA.layers)
    with pytest.raises(OptionError, match=f"cycle, middle-cycle or cycle-rev.*not {sharing}"):
        relaxation_parameters(LLAMA, plan, Relaxation(kind="encoding"))


@pytest.mark.parametrize(
    "relaxation",
    [
        Relaxation(kind="lora", ranks={"q": 64, "down": 8}),
        Relaxation(kind="dora", ranks={"q": 64}, vectors=False),
        Relaxation(kind="prefix", prefix_length=256),
        Relaxation(kind="encoding"),
    ],
)
def test_a_relaxation_survives_json(relaxation):
    assert Relaxation.from_dict(json.loads(json.dumps(relaxation.to_dict()))) == relaxation


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "lora", "rank": 64}, "the relaxation: unknown field 'rank' (did you mean 'ranks'?)"),
        ({"ranks": {"q": 64}}, "the relaxation is missing kind"),
    ],
)
def test_a_record_with_the_wrong_fields(record, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        Relaxation.from_dict(record)
