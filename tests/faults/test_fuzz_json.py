"""Every reader of JSON from outside, given valid files with something wrong in them: it succeeds, or raises our error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints.exit_packs import build
from fathomlm.checkpoints.exit_pack import RECORD, read_pack, write_pack
from fathomlm.checkpoints.families import FAMILIES, SEQ2SEQ
from fathomlm.checkpoints.huggingface import tokens_of
from fathomlm.checkpoints.resolve import architecture_of, encoder_of, exits_of
from fathomlm.checkpoints.shards import INDEX, Shards, read_json, write_shards
from fathomlm.decode.calibration import Calibration
from fathomlm.decode.threshold import ThresholdEstimator
from fathomlm.errors import FathomError
from fathomlm.lab.evaluate.judge_client import _read_body, _reply
from fathomlm.lab.evaluate.judge_questions import AnswerFile
from fathomlm.lab.evaluate.tasks import read_rows
from fathomlm.lab.simulate.costs import read_costs
from fathomlm.lab.simulate.trajectories import read_trajectories
from fathomlm.packaged import packaged_path
from fathomlm.train.data.manifest import Manifest
from fathomlm.train.data.sources import DataSource, read

MANY = pytest.mark.parametrize("cases", [50, pytest.param(1000, marks=pytest.mark.slow)])
"""Of each reader; where there are more, the first are the same."""
HUGE = 10**31
VALUES = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, 5e-324, 2**31, 2**63, 2**64, 10_000_000, 1_000_000_000, HUGE, -HUGE,
    "", "x", "5", "../x.safetensors", "/etc/passwd", "\ud800", "\0", "a" * 10_000, [], {}, [[]], [None], ["x"], [1, "x"],
    {"x": 1}, {"": None}, list(range(2000)),
]  # fmt: skip
TEXTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "9" * 31,
    "9" * 5000,
    "[" * 5000,
    '{"a":' * 5000,
    '{"a": 1, "a": 2}',
    "\x00",
]


@dataclass
class Reader:
    name: str
    valid: Any
    """The record, or the records of JSON lines."""
    read: Callable[[Path], object]
    """Given the file that was written."""
    file: str = "config.json"


OWN_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "huginn_raven": {
        "n_embd": 32, "n_heads": 4, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1,
        "mean_recurrence": 3, "qk_bias": True, "init_values": {"embed_scale": 2.0}, "rope_base": 5e4, "block_size": 64,
    },
}  # fmt: skip
"""What families require beside Llama's."""


def hugging_face() -> Iterator[Reader]:
    for family in FAMILIES.values():
        record = {"model_type": family.model_type, "eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": 1}
        if family.model_type == "gemma3_text":
            record |= {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}
        record |= llama_fields() | {"rope_scaling": llama3_rope(), "layer_types": None}
        record["use_sliding_window"] = family.model_type != "ouro"
        record |= OWN_FIELDS.get(family.model_type, {})
        yield Reader(family.model_type, record, read_model)
    for family in SEQ2SEQ.values():
        decoder = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        more = {
            "vocab_size": 96,
            "feed_forward_proj": "gated-gelu",
            "dropout_rate": 0.1,
            "relative_attention_num_buckets": 8,
        }
        yield Reader(family.model_type, {"model_type": family.model_type, **decoder, **more}, read_model)


def llama_fields() -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 16, "max_window_layers": 1,
        "hidden_act": "silu", "quantization_config": None,
    }  # fmt: skip


def llama3_rope() -> dict[str, Any]:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", **factors, "original_max_position_embeddings": 32}


def read_model(path: Path) -> None:
    architecture_of(path.parent)
    exits_of(path.parent)
    encoder_of(path.parent)
    tokens_of(path.parent, read_json(path))


def native() -> Iterator[Reader]:
    packaged = packaged_path("fathom-mor-23m")
    assert packaged is not None
    config = json.loads((packaged / "config.json").read_text())
    yield Reader("routed", config, read_model)
    looped = copy.deepcopy(config)
    looped["plan"] = {
        "sharing": "cycle",
        "recursions": 2,
        "base_layers": 14,
        "unrolled_layers": 14,
        "exits": [6],
        "kv": "share",
    }
    looped |= {"exit_rank": 2, "exit_vocab": [1, 2, 3], "relaxation": {"kind": "lora", "ranks": {"q": 4}}}
    yield Reader("looped", looped, read_model)
    encoder = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    shape = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 4, "head_dim": 8, "vocab": 96}
    shape |= {"family": "t5", "positions": "relative", "rotary_fraction": 0.0, "cross": True, "memory_width": 32}
    plan = {"sharing": "cycle", "recursions": 1, "base_layers": 2, "unrolled_layers": 2}
    record = {"model_type": "fathomlm-seq2seq", "architecture": shape, "plan": plan, "encoder_config": encoder}
    yield Reader("seq2seq", record, read_model)


def others(tmp_path: Path) -> Iterator[Reader]:
    model = build("every")
    write_shards(tmp_path, iter(model.named_parameters()), limit=20_000)
    yield Reader("weight_map", json.loads((tmp_path / INDEX).read_text()), lambda path: Shards(path.parent).names(), INDEX)
    write_pack(model, tmp_path / "pack")
    record = json.loads((tmp_path / "pack" / RECORD).read_text())
    yield Reader("exit pack", record, lambda path: read_pack(path.parent), f"pack/{RECORD}")
    estimator = ThresholdEstimator()
    estimator.observe([0.5, 0.9], [False, True])
    estimator.end_sequence()
    yield Reader("threshold", estimator.to_dict(), ThresholdEstimator.load)
    calibration = {"exit_layer": 3, "confidence": "gap", "estimator": estimator.to_dict()}
    yield Reader("calibration", calibration, Calibration.load)
    shard = {"file": "train-00000.bin", "tokens": 5, "documents": 1, "sha256": "a", "index_sha256": "b"}
    empty = {"tokens": 0, "documents": 0, "shards": []}
    corpus = {
        "version": 1, "kind": "tokens", "tokenizer": "bytes", "fingerprint": "f", "vocab": 257, "dtype": "uint16",
        "separator": 256, "columns": ["text"], "validation_fraction": 0.0, "shard_tokens": 100, "max_tokens": None,
        "sources": [{"name": "a.txt", "kind": "text", "bytes": 5, "validation": False}],
        "splits": {"train": empty | {"tokens": 5, "documents": 1, "shards": [shard]}, "validation": empty},
        "cursor": {"source": 1, "documents": 0},
    }  # fmt: skip
    yield Reader("corpus", corpus, lambda path: Manifest.read(path.parent), "corpus.json")
    times = {"name": "mine", "block": {"1": 11.1, "43": 11.4}, "head": {"1": 1.0}, "prefill_ms": 0.1}
    yield Reader("times", times, lambda path: read_costs(path, 3), "times.json")
    yield Reader("YAML times", times, lambda path: read_costs(path, 3), "times.yaml")
    answer = {"choices": [{"message": {"content": "5"}, "finish_reason": "stop"}]}
    yield Reader("judge", answer, lambda path: _reply(path.read_bytes()))
    yield Reader(
        "body",
        {"top_p": 0.5, "extra": {"a": [1]}},
        lambda path: _read_body(path.read_text(encoding="utf-8", errors="replace"), "--body"),
    )


def line_readers() -> Iterator[Reader]:
    texts = [{"source": "oracle", "label": "mine", "deepest": 3}, {"prompt": 12, "depths": [1, 2, 1]}, {"depths": [1]}]
    yield Reader("trajectories", texts, read_trajectories, "depths.jsonl")

    def answers(path: Path) -> None:
        with AnswerFile(path):
            pass

    given = [{"key": "k", "text": "5", "finish": "stop"}, {"key": "l", "text": "5", "finish": None, "row": 3}]
    yield Reader("answers", given, answers, "answers.jsonl")
    rows = [{"text": "a b", "target": ["c"], "n": 5}, {"text": "d", "target": "e", "more": {"x": [1, 2]}}]

    def documents(path: Path) -> None:
        source = DataSource(name=str(path), kind="jsonl", bytes=None, validation=False)
        list(read(source, ("text", "target")))  # an empty file has none

    yield Reader("documents", rows, documents, "rows.jsonl")
    yield Reader("rows", rows, read_rows, "rows.jsonl")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def change(value: Any, path: tuple[Any, ...], draw: random.Random) -> Any:
    """The record with one place changed: another value, gone, or with an unknown key beside it."""
    value = copy.deepcopy(value)
    if not path:
        return draw.choice(VALUES)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    match draw.randrange(8):
        case 0:
            del holder[path[-1]]
        case 1 if isinstance(holder, dict):
            holder["unknown"] = draw.choice(VALUES)
        case 2:
            holder[path[-1]] = f"TEXT{draw.randrange(len(TEXTS))}"
        case _:
            holder[path[-1]] = draw.choice(VALUES)
    return value


def written(value: Any, lines: bool) -> bytes:
    whole = "".join(json.dumps(line) + "\n" for line in value) if lines and isinstance(value, list) else json.dumps(value)
    for at, text in enumerate(TEXTS):
        whole = whole.replace(f'"TEXT{at}"', text)
    return whole.encode("utf-8", "surrogatepass")


def damaged(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    match draw.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes(draw.randrange(256) for _ in range(8)) + data[at:]
        case 2:
            return data[:at] + data[at + draw.randrange(1, 9) :]
    return bytes(draw.randrange(256) for _ in range(200))


def attack(reader: Reader, directory: Path, cases: int, lines: bool = False) -> None:
    path = directory / reader.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written(reader.valid, lines))
    reader.read(path)  # the valid one is read
    draw = random.Random(reader.name)
    everywhere = list(places(reader.valid))
    refused = []
    for case in range(cases):
        value = change(reader.valid, draw.choice(everywhere), draw)
        data = written(value, lines)
        path.write_bytes(damaged(data, draw) if case % 5 == 0 else data)
        try:
            reader.read(path)
        except FathomError as error:
            refused.append(str(error))
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise AssertionError(f"{reader.name}: {said} for {path.read_bytes()[:300]!r}") from None
    assert len(refused) > cases // 5
    assert not [message[:200] for message in refused if "\n" in message or len(message) > 2000]


@MANY
@pytest.mark.parametrize("reader", [*hugging_face(), *native()], ids=lambda reader: reader.name)
def test_configurations(reader: Reader, cases: int, tmp_path: Path) -> None:
    attack(reader, tmp_path, cases)


@MANY
def test_other_files(cases: int, tmp_path: Path) -> None:
    for reader in others(tmp_path):
        attack(reader, tmp_path, cases)


@MANY
@pytest.mark.parametrize("reader", list(line_readers()), ids=lambda reader: reader.name)
def test_json_lines(reader: Reader, cases: int, tmp_path: Path) -> None:
    attack(reader, tmp_path, cases, lines=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers must be an integer from 1 to 1024, got 10000000"),
        ({"quantization_config": "x"}, "quantization_config must be an object, got 'x'"),
        ({"model_type": []}, "model type a list of 0 is not supported"),
        ({"pad_token_id": "x"}, "pad_token_id must be an integer"),
        ({"vocab_size": float("inf")}, "Infinity is not a JSON number"),
        ({"head_dim": HUGE}, "head_dim must be an integer from 1"),
    ],
)
def test_what_was_found_in_configurations(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    record = {"model_type": "llama", **llama_fields(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(FathomError) as caught:
        read_model(tmp_path / "config.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"plan": {"sharing": "cycle", "recursions": 1, "base_layers": 10**9, "unrolled_layers": 10**9}},
            "the plan: base_layers must be between 1 and 1024",
        ),
        ({"exit_rank": 0.5}, "exit_rank must be an integer"),
        ({"num_labels": 10**9}, None),
    ],
)
def test_what_was_found_in_our_own(changes: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    record = next(native()).valid | changes
    (tmp_path / "config.json").write_text(json.dumps(record))
    if said is None:
        read_model(tmp_path / "config.json")
        return
    with pytest.raises(FathomError) as caught:
        read_model(tmp_path / "config.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "file", [5, None, "../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "x.bin", "a\\b.safetensors"]
)
def test_an_index_names_files_of_its_own_directory(file: object, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    write_shards(directory, iter(build("nothing").named_parameters()), limit=20_000)
    index = json.loads((directory / INDEX).read_text())
    outside = tmp_path / "x.safetensors"
    outside.write_bytes(next(directory.glob("*-00001-*")).read_bytes())
    (directory / INDEX).write_text(json.dumps(index | {"weight_map": dict.fromkeys(index["weight_map"], file)}))
    with pytest.raises(FathomError, match=r"weight_map") as caught:
        Shards(directory)
    assert "\n" not in str(caught.value)


def test_the_hubs_cache_of_links_is_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(blobs, iter(build("nothing").named_parameters()), limit=20_000)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert sorted(Shards(snapshot).names()) == sorted(Shards(blobs).names())


def test_more_layers_than_the_files_have_tensors(tmp_path: Path) -> None:
    write_shards(tmp_path, iter(build("nothing").named_parameters()), limit=10**9)
    shards = Shards(tmp_path)
    shards.check_layers(6)
    with pytest.raises(FathomError, match=r"asks for 1,000 layers, and the files hold"):
        shards.check_layers(1000)
