"""`fathomlm demo` where a model is packaged, and on any routed model: texts by depth, in colour or with raised numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fathomlm.checkpoints.resolve import load
from fathomlm.cli import demo_routed
from fathomlm.cli.demo_routed import CHOICE, PROMPTS
from fathomlm.cli.main import main
from fathomlm.decode.generation import Generation
from fathomlm.decode.sampling import Sampling
from fathomlm.depth.colours import depth_colours
from fathomlm.engine.session import decoder_for

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 24
WORDS = ["demo", "--tokens", str(NEW)]
INTERRUPTED = "fathomlm: interrupted; nothing was left half-written\n"


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of a few tokens: no test is about how fast this machine is."""
    monkeypatch.setattr(demo_routed, "ROUNDS", 3)
    monkeypatch.setattr(demo_routed, "TIMED", 4)


@pytest.fixture
def results(packaged: str) -> list[Generation]:
    """What the engine says to the same prompts."""
    return said(packaged, reference=False)


def said(packaged: str, *, reference: bool) -> list[Generation]:
    decode = decoder_for(load(packaged), sequences=len(PROMPTS), reference=reference)
    return decode(PROMPTS, Sampling(max_new_tokens=NEW, **CHOICE))


def said_tokens(results: list[Generation]) -> list[tuple[int, int]]:
    """Every token with its depth, end tokens left out."""
    pairs = [(result, pair) for result in results for pair in zip(result.tokens, result.depths or (), strict=True)]
    return [pair for result, pair in pairs if not (result.finish == "eos" and pair[0] == result.tokens[-1])]


@pytest.mark.parametrize("reference", [False, True])
def test_the_record(packaged: str, reference: bool, capsys: pytest.CaptureFixture[str]) -> None:
    results = said(packaged, reference=reference)
    assert main([*WORDS, "--json", *["--reference"] * reference]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["recursions"], record["layers"]) == (packaged, 3, 8)
    assert [text["prompt"] for text in record["texts"]] == list(PROMPTS)
    assert [text["text"] for text in record["texts"]] == [result.text for result in results]
    assert ["".join(text["pieces"]) for text in record["texts"]] == [result.text for result in results]
    pairs = said_tokens(results)
    told = [pair for text in record["texts"] for pair in zip(text["tokens"], text["depths"], strict=True)]
    assert told == pairs
    depths = [depth for _, depth in pairs]
    assert set(depths) == {1, 2, 3}, "every depth is used"
    assert record["mean_depth"] == pytest.approx(sum(depths) / len(depths))
    assert record["layers_per_token"] == pytest.approx(2 + 2 * sum(depths) / len(depths))
    assert [(use["depth"], use["tokens"]) for use in record["depths"]] == [(d, depths.count(d)) for d in (1, 2, 3)]
    assert sum(use["share"] for use in record["depths"]) == pytest.approx(1)
    speed = record["tokens_per_second"]
    assert speed["ratios"] == sorted(speed["ratios"])
    assert len(speed["ratios"]) == demo_routed.ROUNDS
    assert speed["ratio"] == speed["ratios"][demo_routed.ROUNDS // 2]
    assert record["sampling"] == CHOICE


def test_examples_are_tokens_that_went_there_most(
    packaged: str, results: list[Generation], capsys: pytest.CaptureFixture[str]
) -> None:
    from fathomlm.cli.display import label, token_text

    assert main([*WORDS, "--json"]) == 0
    uses = json.loads(capsys.readouterr().out)["depths"]
    tokenizer = load(packaged).tokenizer
    often = Counter((label(token_text(tokenizer, token)), depth) for token, depth in said_tokens(results))
    for use in uses:
        assert 0 < len(use["examples"]) <= demo_routed.EXAMPLES
        for text in use["examples"]:
            assert often[text, use["depth"]] == max(often[text, depth] for depth in (1, 2, 3)) > 0


def test_full_depth_is_measured_at_full_depth(
    packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speeds are of the runs that they are named for: every token through every recursion, and as the routers say."""
    seen: dict[bool, set[int]] = {}

    def watched(model: Any, control: Any = None, **options: Any) -> Any:
        def decode(*arguments: Any, **more: Any) -> list[Generation]:
            found = decoder_for(model, control, **options)(*arguments, **more)
            seen.setdefault(control is None, set()).update(*(result.depths or () for result in found))
            return found

        return decode

    monkeypatch.setattr(demo_routed, "decoder_for", watched)
    assert main([*WORDS, "--json"]) == 0
    assert seen == {True: {1, 2, 3}, False: {3}}


def test_a_shell_that_does_not_find_the_command_is_told_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.cli.display import command_note

    command = tmp_path / "bin" / "fathomlm"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("sys.executable", str(command.with_name("python")))
    assert command_note() == "\n(your shell does not find fathomlm; here it is python -m fathomlm)"
    command.parent.mkdir()
    command.touch()
    assert command_note() == "\n(your shell does not find fathomlm; here it is bin/fathomlm)"
    command.chmod(0o755)
    assert command_note() == ""


def test_a_ratio_is_told_where_all_rounds_agree() -> None:
    speed = demo_routed.Speed(routed=12.0, full_depth=10.0, ratio=1.2, ratios=[1.1, 1.2, 1.3])
    assert demo_routed._against(speed) == ": 1.20x (1.10x to 1.30x in 3 rounds)"
    unsure = replace(speed, ratios=[0.9, 1.2, 1.3])
    assert demo_routed._against(unsure) == "; which is faster differs between rounds (0.90x to 1.30x)"
    assert demo_routed._against(replace(speed, ratio=None, ratios=[])) == ""


def test_end_tokens_are_neither_shown_nor_counted(
    packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two texts end by themselves, one of them at once."""

    def ended(model: Any, control: Any = None, **options: Any) -> Any:
        def decode(prompts: Any, sampling: Sampling, **more: Any) -> list[Generation]:
            found = decoder_for(model, control, **options)(prompts, sampling, **more)
            if sampling.ignore_eos:
                return found
            end = model.tokenizer.eos_token_id
            cut = [
                replace(each, tokens=(*each.tokens[:many], end), depths=(each.depths or ())[: many + 1], finish="eos")
                for each, many in zip(found, (3, 0), strict=False)
            ]
            return [*cut, found[2]]

        return decode

    monkeypatch.setattr(demo_routed, "decoder_for", ended)
    assert main([*WORDS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [len(text["tokens"]) for text in record["texts"]] == [3, 0, len(record["texts"][2]["depths"])]
    assert sum(use["tokens"] for use in record["depths"]) == sum(len(text["tokens"]) for text in record["texts"])
    assert "<|im_end|>" not in "".join(record["texts"][0]["pieces"])
    assert record["texts"][1]["pieces"] == []


def test_a_pipe_gets_raised_numbers_and_no_colour(
    packaged: str, results: list[Generation], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.out.startswith(f"{packaged}: 1+2+1 layers looped 3 times (middle-cycle, expert-choice router), ")
    assert "The raised number behind a token is its depth" in captured.out
    depths = [depth for _, depth in said_tokens(results)]
    assert Counter(re.findall("[¹²³]", captured.out)) == {"¹²³"[depth - 1]: depths.count(depth) for depth in (1, 2, 3)}
    assert f"mean depth {sum(depths) / len(depths):.2f} of 3: " in captured.out
    assert re.search(r"tokens/s, batch size 1, this CPU: [\d.]+ as routed, [\d.]+ at full depth[:;] .*x\)?", captured.out)
    for command in ("serve      #", f"analyze routing {packaged} --data packaged:docs/", f"generate {packaged} -p"):
        assert f"\n  fathomlm {command}" in captured.out
    assert [line[:3] for line in captured.err.splitlines()] == ["1/3", "2/3", "3/3"]
    assert not list(Path.cwd().iterdir()), "nothing is written"


def test_a_token_that_ends_a_line_has_its_number_before_the_end() -> None:
    from fathomlm.cli.demo_routed import DemoCompletion, _coloured

    completion = DemoCompletion(
        prompt="a", text="", tokens=[1, 2, 3], pieces=[" b\n", "", "[red]"], depths=[1, 12, 3], finish="length"
    )
    assert _coloured(completion, None).plain == "a b↵¹\n·¹²[red]³"


def test_a_terminal_gets_the_colours_of_the_depths(
    packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    assert main(WORDS) == 0
    out = capsys.readouterr().out
    assert "Colours are depths: " in out
    assert not re.search("[¹²³]", out)
    for colour in depth_colours(3)[1:]:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        assert out.count(f"48;2;{red};{green};{blue}m") > 2, "in the legend, the table and the texts"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_numbers(
    name: str, value: str, packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color"), (name, value)):
        monkeypatch.setenv(*each)
    assert main(WORDS) == 0
    out = capsys.readouterr().out
    assert "48;" not in out
    assert "The raised number behind a token" in out


def test_any_routed_model_is_shown(
    packaged_models_dir: Path, nothing_packaged: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(packaged_models_dir / "tiny-mor")
    assert main(["demo", place, "--tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{place}: ")
    assert f"fathomlm serve {place}      #" in out
    assert "0.0 as routed, 0.0 at full depth" in out, "one token has no rate"


def test_ctrl_c_is_one_line(packaged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_routed, "decoder_for", lambda *_, **__: interrupted)
    assert main(WORDS) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(INTERRUPTED)
    assert not list(Path.cwd().iterdir())


def test_mistakes(packaged: str, mistake_of: Callable[..., str]) -> None:
    assert "--tokens must be >= 1, got 0" in mistake_of("demo", "--tokens", "0")
    assert f"--out cannot be combined with a routed model: {packaged} is not converted" in mistake_of("demo", "--out", "x")
