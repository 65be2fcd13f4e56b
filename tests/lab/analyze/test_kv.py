"""Lengths and cosines of hidden states, keys and values, against a walk that is done step by step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fathomlm.depth import Relaxation
from fathomlm.lab.analyze.kv import KVNumbers, StateMaps, _KVSums, measure
from fathomlm.lab.analyze.kv_report import kv_table
from fathomlm.lab.token_rows import TokenRows, find, read_rows, text_row
from fathomlm.model.hub import FathomForCausalLM
from fathomlm.model.route import RoutingTrace
from lab.analyze.tiny import model_of, text_file

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = {"q": 2, "k": 3, "v": 3, "down": 2}
PLAIN: dict[str, dict[str, Any]] = {
    "vanilla": {"sharing": "cycle", "recursions": 1},
    "cycle": {"sharing": "cycle", "recursions": 2},
    "sequence": {"sharing": "sequence", "recursions": 2},
    "lora": {"relaxation": Relaxation(kind="lora", ranks=RANKS)},
    "dora": {"relaxation": Relaxation(kind="dora", ranks=RANKS)},
    "prefix": {"relaxation": Relaxation(kind="prefix", prefix_length=3)},
}


def rows_of(model: FathomForCausalLM, directory: Path, context: int = 40, rows: int = 3) -> TokenRows:
    return read_rows(find([text_file(directory)]), model, context=context, rows=rows)


@dataclass
class Slow:
    """Vectors of every step, (S, tokens, width), and which of them count."""

    hidden: Tensor
    key: Tensor
    value: Tensor
    ran: Tensor


@torch.no_grad()
def slow_plain(model: FathomForCausalLM, tokens_NT: Tensor) -> Slow:
    """An unrouted model's: each step's input from the states before it, its weights merged with what the step adds."""
    decoder, plan = model.decoder, model.plan
    states = decoder.states(tokens_NT, at=range(plan.unrolled_layers))
    x, keys, values = decoder.embed(tokens_NT), [], []
    for step in plan:
        layer, delta = decoder.layers[step.layer], decoder.delta(step)
        normed = layer.norm_attn(x) if delta is None else delta.norm("norm_attn", layer.norm_attn, x)
        for name, found in (("k", keys), ("v", values)):
            weight = getattr(layer.attn, name).weight
            found.append(normed @ (weight if delta is None else delta.merged(f"attn.{name}.weight", weight)).T)
        x = states[step.index]
    hidden = [*states.values(), decoder.norm(x)]
    ran = torch.ones(plan.unrolled_layers, tokens_NT.numel(), dtype=torch.bool)
    return Slow(*(torch.stack(each).flatten(1, 2) for each in (hidden, keys, values)), ran)


@torch.no_grad()
def slow_routed(model: FathomForCausalLM, tokens_NT: Tensor) -> Slow:
    """A routed model's, by plain hooks on its linears: it adds nothing to its layers."""
    decoder, plan = model.decoder, model.plan
    calls: dict[str, list[Tensor]] = {"hidden": [], "k": [], "v": []}
    handles = [layer.register_forward_hook(lambda _, __, out: calls["hidden"].append(out)) for layer in decoder.layers]
    for name in ("k", "v"):
        for layer in decoder.layers:
            linear = getattr(layer.attn, name)
            handles.append(linear.register_forward_hook(lambda _, __, out, name=name: calls[name].append(out)))
    trace = RoutingTrace()
    calls["hidden"].append(decoder(tokens_NT, trace=trace))
    for handle in handles:
        handle.remove()
    depths = trace.depths_BT.flatten()
    ran = torch.stack([depths > step.recursion if step.part == "core" else depths >= 0 for step in plan])
    return Slow(*(torch.stack(each).flatten(1, 2) for each in calls.values()), ran)


def assert_same(found: StateMaps, vectors: Tensor, ran: Tensor, context: int) -> None:
    lengths = vectors.norm(dim=-1)
    position = torch.arange(vectors.shape[1]) % context
    buckets = len(found.by_position[0])
    for i, row in enumerate(found.by_position):
        assert found.magnitude[i] == pytest.approx(float(lengths[i][ran[i]].mean()), rel=1e-4)
        for bucket, value in enumerate(row):
            inside = ran[i] & (position * buckets // context == bucket)
            assert value == (pytest.approx(float(lengths[i][inside].mean()), rel=1e-4) if inside.any() else None)
        for j, value in enumerate(found.cosine[i]):
            both = ran[i] & ran[j]
            cosine = F.cosine_similarity(vectors[i][both], vectors[j][both], dim=-1).mean()
            assert value == (pytest.approx(float(cosine), abs=1e-4) if both.any() else None)


@pytest.mark.parametrize("name", list(PLAIN))
def test_plain_models_by_a_slow_walk(name: str, tmp_path: Path) -> None:
    model = model_of(None, **PLAIN[name])
    rows = rows_of(model, tmp_path)
    numbers, slow = measure(model, rows), slow_plain(model, rows.tokens_NT)
    norm_too = torch.cat((slow.ran, slow.ran[:1]))
    assert_same(numbers.hidden, slow.hidden, norm_too, 40)
    assert_same(numbers.key, slow.key, slow.ran, 40)
    assert_same(numbers.value, slow.value, slow.ran, 40)
    assert numbers.running == [1.0] * model.plan.unrolled_layers
    assert [note.name for note in numbers.hidden.steps] == [*map(str, range(1, 9)), "norm"]
    assert [note.layer for note in numbers.key.steps] == [step.layer + 1 for step in model.plan]


@pytest.mark.parametrize("router", ["expert", "token"])
def test_routed_models_count_the_tokens_that_ran(router: str, tmp_path: Path) -> None:
    model = model_of(router)
    rows = rows_of(model, tmp_path)
    numbers, slow = measure(model, rows), slow_routed(model, rows.tokens_NT)
    assert 0 < numbers.running[-2] < numbers.running[3] < 1
    assert numbers.running == pytest.approx(slow.ran.float().mean(1).tolist())
    everyone = torch.ones(1, rows.tokens_NT.numel(), dtype=torch.bool)
    assert_same(numbers.hidden, slow.hidden, torch.cat((slow.ran, everyone)), 40)
    assert_same(numbers.key, slow.key, slow.ran, 40)
    assert_same(numbers.value, slow.value, slow.ran, 40)


@pytest.mark.parametrize("router", [None, "expert"])
def test_steps_that_read_show_what_they_read(router: str | None, tmp_path: Path) -> None:
    model = model_of(router, kv="share")
    numbers = measure(model, rows_of(model, tmp_path))
    assert [note.reads for note in numbers.key.steps] == [None, None, None, 2, 3, 2, 3, None]
    assert all(note.reads is None for note in numbers.hidden.steps)
    for states in (numbers.key, numbers.value):
        for step, source in ((3, 1), (4, 2), (5, 1), (6, 2)):
            assert states.by_position[step] == states.by_position[source]
            assert states.cosine[step][source] == pytest.approx(1.0, abs=1e-5)
        assert states.tied is None  # nothing of their own to compare
        assert states.untied is not None
    assert numbers.hidden.tied is not None


def test_hybrid_steps_make_their_own(tmp_path: Path) -> None:
    model = model_of(kv="hybrid")
    rows = rows_of(model, tmp_path)
    numbers, slow = measure(model, rows), slow_routed(model, rows.tokens_NT)
    assert all(note.reads is None for note in numbers.key.steps)
    assert_same(numbers.key, slow.key, slow.ran, 40)


def test_recursions_have_borders(tmp_path: Path) -> None:
    for options, borders in (
        ({}, [1, 3, 5, 7]),
        ({"sharing": "cycle", "recursions": 2}, [4]),
        ({"sharing": "sequence", "recursions": 2}, []),
        ({"sharing": "cycle", "recursions": 1}, []),
    ):
        model = model_of(None, **options)
        numbers = measure(model, rows_of(model, tmp_path, context=10, rows=1))
        assert numbers.borders == borders
        assert (numbers.hidden.tied is None) == (options.get("recursions") == 1)


def test_keys_have_their_norm(tmp_path: Path) -> None:
    """Per-head norms leave every head with the same length, whatever the projection made."""
    model = model_of(None, traits={"family": "qwen3", "qk_norm": True})
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.attn.k_norm.weight.fill_(1.0)
    numbers = measure(model, rows_of(model, tmp_path))
    assert numbers.key.magnitude == pytest.approx([4.0] * 8, rel=1e-3)  # two heads of eight


def test_tied_steps_without_attention_are_alike() -> None:
    """Where layers add nothing, each recursion sees the stream that the one before saw: the same keys and values."""
    model = model_of(None, sharing="cycle", recursions=2)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.attn.o.weight.zero_()
            layer.mlp.down.weight.zero_()
    numbers = measure(model, text_row(model, "six feet to the fathom", most=64))
    assert (numbers.rows, numbers.context, len(numbers.buckets)) == (1, 22, 16)
    for states in numbers.states().values():
        assert states.tied == pytest.approx(1.0, abs=1e-5)
        assert states.magnitude[:4] == pytest.approx(states.magnitude[4:8])


def test_one_token_is_enough() -> None:
    model = model_of(None)
    numbers = measure(model, text_row(model, "x", most=64))
    assert (numbers.context, numbers.buckets) == (1, [0])
    assert json.dumps(asdict(numbers), allow_nan=False)


def test_buckets_hold_all_positions() -> None:
    model = model_of(None)
    numbers = measure(model, text_row(model, "x" * 50, most=64))
    position = torch.arange(50)
    firsts = [int(position[position * 16 // 50 == bucket].min()) for bucket in range(16)]
    assert numbers.buckets == firsts


def test_a_step_that_no_token_ran_is_null() -> None:
    sums = _KVSums(2, 2, torch.device("cpu"))
    ran = torch.tensor([[True, True], [False, False]])
    sums.add([torch.ones(2, 4), torch.ones(2, 4)], ran, torch.tensor([0, 1]))
    model = model_of(None)
    notes = measure(model, text_row(model, "x", most=4)).key.steps[:2]
    found = sums.read(notes)
    assert (found.magnitude, found.cosine, found.untied) == ([2.0, None], [[1.0, None], [None, None]], None)


def test_records_and_table(tmp_path: Path) -> None:
    model = model_of()
    told = []
    numbers: KVNumbers = measure(model, rows_of(model, tmp_path), on_rows=lambda *at: told.append(at))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert json.loads(json.dumps(asdict(numbers), allow_nan=False))["key"]["steps"][0]["name"] == "1"
    assert set(numbers.summary()) == {"rows", "context", "steps", "hidden", "key", "value"}
    header, *rows = kv_table(numbers)
    assert [row[0] for row in rows] == ["hidden", "key", "value"]
    assert {len(row) for row in rows} == {len(header)}


def test_hooks_are_gone_afterwards() -> None:
    model = model_of(None)
    measure(model, text_row(model, "six feet", most=64))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
