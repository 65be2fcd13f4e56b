"""`fathomlm export --format exits`, and `--exits` wherever tokens leave early: the base with a pack says what the model said
that the pack came from."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fathomlm.checkpoints.assemble import replan
from fathomlm.checkpoints.convert import convert
from fathomlm.checkpoints.native import directory_bytes, save
from fathomlm.checkpoints.resolve import load
from fathomlm.cli import serve
from fathomlm.cli.main import main, read_command
from fathomlm.decode.calibration import FILE, Calibration
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.errors import CheckpointError, OptionError
from jsonl import write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = {"exit_rank": 3, "exit_adapter": 4, "exit_classifier": True}
PROMPT = ("-p", "the depth of the water", "--max-new-tokens", "10")


def exits_of(args: Any) -> Any:
    return args.exiting.settle(args.model)


def with_exits(model: Any, *, layer: bool) -> Any:
    exited = replan(model, model.plan.with_exits([1], layer=layer), **EVERY)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in exited.decoder.named_parameters():
            if name.startswith("exit_"):
                value.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2, generator=generator)
    return exited


@pytest.fixture(scope="module")
def places(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with exits, with a layer each and without, and packs of them. Shared: read them, do not write to them."""
    place = tmp_path_factory.mktemp("packs")
    found = {}
    for name, layer in (("layered", True), ("thin", False)):
        found[name] = save(with_exits(tiny_model, layer=layer), place / name)
        found[f"{name} pack"] = place / f"{name}-pack"
        assert main(["export", str(found[name]), str(found[f"{name} pack"]), "--format", "exits"]) == 0
    return found


@pytest.fixture
def exited(places: dict[str, Path]) -> Path:
    return places["layered"]


@pytest.fixture
def pack(places: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(places["layered pack"], tmp_path / "pack"))


def learnt(place: Path, layer: int = 2, initial: float = 0.04) -> None:
    estimator = ThresholdEstimator(ThresholdOptions(initial=initial))
    Calibration(exit_layer=layer, confidence="gap", estimator=estimator).save(place / FILE)


def test_the_record_of_an_export(exited: Path, tmp_path: Path, told: Callable[..., Any]) -> None:
    out = tmp_path / "out"
    record = told("export", exited, out, "--format", "exits", "--dtype", "bfloat16")
    assert record == {
        "model": str(exited),
        "out": str(out),
        "exits": [2],
        "bytes": directory_bytes(out),
        "weights": "bfloat16",
        "threshold": False,
        "exit_vocab": None,
    }
    assert {value.dtype for value in load_file(out / "exits.safetensors").values()} == {torch.bfloat16}
    assert sorted(file.name for file in out.iterdir()) == ["exits.json", "exits.safetensors"]


def test_a_threshold_for_its_exit_comes_along(exited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(exited, tmp_path / "model")
    learnt(model)
    assert main(["export", str(model), str(tmp_path / "pack"), "--format", "exits"]) == 0
    said = capsys.readouterr()
    assert "the exits after 2 with their heads, layers, adapters, classifiers, and their threshold, float32" in said.out
    assert (tmp_path / "pack" / FILE).read_bytes() == (model / FILE).read_bytes()
    learnt(model, layer=3)
    assert main(["export", str(model), str(tmp_path / "pack"), "--format", "exits", "--force"]) == 0
    said = capsys.readouterr()
    assert "left out: the threshold for layer 3, where the model has no exit of its own" in said.err
    assert "their threshold" not in said.out
    assert not (tmp_path / "pack" / FILE).exists()


@pytest.mark.parametrize("mode", ["parallel", "speculative", "static", "state-copy"])
def test_generate_says_what_the_whole_model_says(
    mode: str, exited: Path, pack: Path, tiny_model_dir: Path, told: Callable[..., Any]
) -> None:
    words = (*PROMPT, "--decode", mode, *(() if mode == "static" else ("--threshold", "0.04")))
    whole, both = told("generate", exited, *words), told("generate", tiny_model_dir, "--exits", pack, *words)
    for name in ("tokens", "exit_layers", "confidences"):
        assert both["results"][0][name] == whole["results"][0][name]
    assert both["exits"] == whole["exits"]
    assert both["exits"]["exit_rate"] > 0
    assert (whole["exit_pack"], both["exit_pack"]) == (None, str(pack))
    bare = told("generate", tiny_model_dir, *words, "--exit-layer", "2")
    assert bare["results"][0]["confidences"] != both["results"][0]["confidences"] or mode == "static"
    full = told("generate", tiny_model_dir, *PROMPT)["results"][0]["tokens"]
    assert told("generate", tiny_model_dir, *PROMPT, "--exits", pack, "--decode", "full")["results"][0]["tokens"] == full
    assert (both["results"][0]["tokens"] == full) == (mode == "speculative")


def test_classifiers_come_along(exited: Path, pack: Path, tiny_model_dir: Path, told: Callable[..., Any]) -> None:
    words = (*PROMPT, "--decode", "parallel", "--confidence", "classifier", "--threshold", "0.5")
    whole, both = told("generate", exited, *words), told("generate", tiny_model_dir, "--exits", pack, *words)
    assert both["results"][0]["confidences"] == whole["results"][0]["confidences"]


def test_chat_says_what_the_whole_model_says(
    exited: Path, pack: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for words in ([str(exited)], [str(tiny_model_dir), "--exits", str(pack)]):
        monkeypatch.setattr("sys.stdin", io.StringIO("the depth\nand the fox?\n"))
        assert main(["chat", *words, "--max-new-tokens", "8", "--decode", "parallel", "--threshold", "0.04"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


def test_adaptive_finds_the_packs_threshold(
    pack: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    learnt(base, initial=0.7)  # for the exit that the base has without a pack
    words = ("generate", base, *PROMPT, "--exits", pack, "--decode", "parallel", "--threshold", "adaptive")
    assert told(*words)["exits"]["threshold"] == 1.0
    learnt(pack)
    exits = told(*words)["exits"]
    assert (exits["threshold"], exits["exit_layers"], exits["adaptive"]) == (0.04, [2], True)


def test_calibrate_writes_into_the_pack(
    exited: Path, pack: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    data = tmp_path / "texts.jsonl"
    write_jsonl(data, ({"text": f"the water is {n} fathoms deep and still"} for n in range(3)))
    model = shutil.copytree(exited, tmp_path / "model")
    words = ("--data", data, "--max-new-tokens", "6", "--prompt-tokens", "4")
    both, whole = told("calibrate", tiny_model_dir, "--exits", pack, *words), told("calibrate", model, *words)
    assert (both["file"], both["exit_layer"]) == (str(pack / FILE), 2)
    assert (pack / FILE).read_bytes() == (model / FILE).read_bytes()
    assert not (tiny_model_dir / FILE).exists()
    assert (both["threshold"], both["agree"]) == (whole["threshold"], whole["agree"])
    assert load(tiny_model_dir, exits=pack).plan.exits == (1,), "a threshold beside it does not damage a pack"


def test_eval_and_analyze_read_the_packs_exit(
    places: dict[str, Path], tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    text, asked, words = tmp_path / "text.txt", tmp_path / "asked.jsonl", tmp_path / "words.jsonl"
    text.write_text("the depth of the water is the measure of the fathom line. " * 4)
    asked.write_text(json.dumps({"context": "a fox.", "question": "who?", "answers": ["a fox"]}) + "\n")
    words.write_text(json.dumps({"context": "six fathoms", "target": "deep"}) + "\n")
    sweep = ("--sweep", "threshold", "--thresholds", "0,1", "--prompts", "1", "--max-new-tokens", "4", "--repeats", "1")
    commands: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
        "ppl": (("--data", text, "--exit", "2"), lambda found: found["outputs"]),
        "tasks": (("--tasks", words, "--exit", "2"), lambda found: found["outputs"]),
        "generate": (
            ("--data", asked, "--max-new-tokens", "4", "--decode", "parallel", "--threshold", "0.04"),
            lambda found: (found["quality"], found["exits"]["exit_rate"]),
        ),
        "frontier": (
            ("--data", text, *sweep, "--force", "--out", tmp_path / "frontier"),
            lambda found: [(point["value"], point["quality"]) for point in found["curves"][0]["points"]],
        ),
        "exits": (
            ("--data", text, "--tokens", "32", "--prompts", "0", "--force", "--out", tmp_path / "analysis"),
            lambda found: [{**each} for each in found["exits"]],
        ),
    }
    exits = ("--exits", places["thin pack"])
    for kind, (options, read) in commands.items():
        verb = ("analyze", kind) if kind == "exits" else ("eval", kind)
        whole, both = told(*verb, places["thin"], *options), told(*verb, tiny_model_dir, *exits, *options)
        assert read(both) == read(whole), kind
        named = both["plan"] if kind == "exits" else both["exit_pack"]
        assert named.endswith(str(places["thin pack"]))
    at_two = ("--data", text, "--exit", "2")
    assert told("eval", "ppl", tiny_model_dir, *at_two)["outputs"] != told("eval", "ppl", places["thin"], *at_two)["outputs"]


def parse(*words: str | Path) -> Any:
    return read_command(["serve", *(str(word) for word in words)])[1]


def test_serve_lets_tokens_leave_at_the_packs_exit(
    places: dict[str, Path], tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any]
) -> None:
    pack = shutil.copytree(places["thin pack"], tmp_path / "thin")
    words = (tiny_model_dir, "--exits", pack, "--max-length", "64", "--batch-size", "2")
    args = parse(*words)
    exiting = exits_of(args)
    assert exiting is not None
    assert exiting.threshold_now() == 0.9
    served = serve.load_served(args, args.engine_options, exiting)
    assert (served.facts["exit_layer"], served.threshold) == (2, 0.9)
    asyncio.run(served.close())
    with pytest.raises(OptionError, match=r"thin has no calibrated threshold"):
        exits_of(parse(*words, "--threshold", "adaptive"))
    learnt(pack)
    exiting = exits_of(parse(*words, "--threshold", "adaptive"))
    assert exiting is not None
    assert (exiting.threshold_now(), exiting.exit_layers) == (0.04, (2,))
    with pytest.raises(CheckpointError, match="does not exist"):
        exits_of(parse(tiny_model_dir, "--exits", tmp_path / "nowhere"))
    with pytest.raises(OptionError, match="has exits already"):
        exits_of(parse(places["thin"], "--exits", pack))
    for words, modes in (((), ("full", "speculative")), (("--decode", "parallel"), ("full", "parallel"))):
        layered = parse(tiny_model_dir, "--exits", places["layered pack"], "--max-length", "64", *words)
        served = serve.load_served(layered, layered.engine_options, exits_of(layered))
        assert served.decodes == modes
        asyncio.run(served.close())


def test_another_base_needs_a_word(
    pack: Path, tiny_model_dir: Path, tmp_path: Path, told: Callable[..., Any], mistake_of: Callable[..., str]
) -> None:
    stranger = load(tiny_model_dir)
    with torch.no_grad():
        for value in stranger.decoder.parameters():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(4)))
    save(stranger, tmp_path / "stranger")
    words = ("generate", str(tmp_path / "stranger"), *PROMPT, "--decode", "speculative", "--exits", str(pack))
    assert "were trained over another model: its weights differ by" in mistake_of(*words)
    full = told("generate", tmp_path / "stranger", *PROMPT)["results"][0]["tokens"]
    assert told(*words, "--any-base")["results"][0]["tokens"] == full


def damage(pack: Path) -> None:
    data = bytearray((pack / "exits.safetensors").read_bytes())
    data[-2] ^= 8
    (pack / "exits.safetensors").write_bytes(data)


TWO_MODELS = ("eval", "frontier", "smollm2-135m", "fathom-mor-23m", "--data", __file__, "--sweep", "depth")
BAD: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "damaged": (damage, (), "its checksum is not the one in exits.json"),
    "no weights": (lambda pack: (pack / "exits.safetensors").unlink(), (), "cannot read"),
    "no record": (lambda pack: (pack / "exits.json").unlink(), (), "has no exits.json; a pack of exits is what"),
    "nowhere": (shutil.rmtree, (), "pack does not exist"),
    "two models": (lambda pack: None, TWO_MODELS, "belong to one"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_pack_is_one_line(what: str, pack: Path, tiny_model_dir: Path, mistake_of: Callable[..., str]) -> None:
    harm, words, says = BAD[what]
    harm(pack)
    words = words or ("generate", str(tiny_model_dir), *PROMPT, "--decode", "parallel")
    assert says in mistake_of(*words, "--exits", str(pack))


def test_slips_with_exits_are_one_line(
    exited: Path, pack: Path, tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]
) -> None:
    base, exits = str(tiny_model_dir), ("--exits", str(pack))
    assert "--exits requires --decode, such as --decode parallel" in mistake_of("generate", base, *PROMPT, *exits)
    assert "--any-base requires --exits" in mistake_of("generate", base, *PROMPT, "--decode", "full", "--any-base")
    text = tmp_path / "text.txt"
    text.write_text("the depth of the water")
    predict = ("--data", str(text))
    assert "--any-base requires --exits" in mistake_of("eval", "ppl", base, *predict, "--any-base")
    decode = ("--decode", "parallel")
    assert "has exits already, after 2" in mistake_of("generate", str(exited), *PROMPT, *decode, *exits)
    looped = str(save(convert(tiny_model_dir, router="expert"), tmp_path / "routed"))
    assert "routing None, and this has expert" in mistake_of("generate", looped, *PROMPT, *decode, *exits)
    assert "layers 4, and this has 30" in mistake_of("eval", "ppl", "smollm2-135m", *predict, *exits)


def test_an_export_that_cannot_be_leaves_nothing(
    exited: Path, pack: Path, tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str]
) -> None:
    out, kind = str(tmp_path / "new"), ("--format", "exits")
    assert "has no exits to write; `train: exits`" in mistake_of("export", str(tiny_model_dir), out, *kind)
    assert "smollm2-135m has no exits to write" in mistake_of("export", "smollm2-135m", out, *kind)
    for option in (("--quantize", "int8"), ("--max-shard-size", "1MB")):
        assert f"{option[0]} cannot be combined with --format exits" in mistake_of(
            "export", str(exited), out, *kind, *option
        )
    assert "exists; choose another name" in mistake_of("export", str(exited), str(pack), *kind)
    model = shutil.copytree(exited, tmp_path / "model")
    assert "does not look like a pack of exits" in mistake_of("export", str(exited), str(model), *kind, "--force")
    (model / FILE).write_text("{")
    assert "threshold.json is not valid JSON" in mistake_of("export", str(model), out, *kind)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "pack"]
