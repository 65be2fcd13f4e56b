"""`fathomlm eval judge FILE [FILE]`: from what `fathomlm eval generate` writes to scores and wins."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.judge_server import GOOD, Judge, Said, judge
from fathomlm.cli.main import main
from fathomlm.depth import DepthPlan
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from jsonl import write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
DIMENSIONS = ["relevance", "informativeness", "fluency", "coherence"]
ROWS = [{"dialogue": f"A: line {n}?\nB: deep.", "summaries": ["deep water"]} for n in range(3)]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_jsonl(path, rows))


def likes(word: str) -> Callable[[str, int], Said]:
    """A judge that prefers the text with a word in it, and the first where it sees no difference."""

    def answer(prompt: str, before: int) -> Said:
        if prompt.startswith("Evaluate"):
            return Said(GOOD)
        first, second = re.findall(r"^Summary [01]: (.*)$", prompt, re.MULTILINE)
        return Said("Summary 1" if word in second and word not in first else "Summary 0")

    return answer


@pytest.fixture
def server() -> Iterator[Judge]:
    with judge(likes("deep")) as found:
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def call(*words: str, code: int = 0) -> tuple[str, str]:
        assert main(["eval", "judge", *words]) == code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def endpoint(server: Judge) -> tuple[str, ...]:
    return ("--base-url", server.url, "--model", "tiny")


def test_what_eval_generate_writes_is_judged_as_it_is(
    run: Any, server: Judge, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, texts = lines(tmp_path / "talk.jsonl", ROWS), [tmp_path / "full.jsonl", tmp_path / "early.jsonl"]
    for out, exit in zip(texts, ((), ("--decode", "static", "--exit-layer", "2")), strict=True):
        words = ("--data", data, "--metric", "squad", "--max-new-tokens", "6", "--out", str(out), *exit)
        assert main(["eval", "generate", str(tiny_model_dir), *words]) == 0
    capsys.readouterr()
    out, err = run(*map(str, texts), *endpoint(server), "--json")
    record = json.loads(out)
    assert err == ""
    assert (record["systems"], record["rows"], record["failed"]) == (["full", "early"], 3, 0)
    assert record["likert"]["systems"]["early"]["read"] == 3
    assert record["likert"]["dimensions"] == DIMENSIONS
    assert record["pairwise"]["rows_counted"] == 3
    asked = next(prompt for prompt in server.prompts if prompt.startswith("Evaluate"))
    assert "\n\nArticle: A: line 0?\nB: deep.\nSummary: " in asked, "the source, without the words that asked for a summary"
    again, _ = run(*map(str, texts), *endpoint(server), "--json")
    repeated = json.loads(again)
    assert (repeated["asked"], repeated["kept"]) == (0, record["asked"])
    assert (repeated["likert"], repeated["pairwise"]) == (record["likert"], record["pairwise"])
    assert [path.name for path in (tmp_path / "analysis").iterdir()] == ["judge-full.jsonl"]


def test_scores_wins_and_places(run: Any, server: Judge, tmp_path: Path) -> None:
    rows = [("deep", "no"), ("no", "deep"), ("deep sea", "deep"), ("x", "x")]
    data = lines(tmp_path / "two.jsonl", [{"source": "s", "output_a": a, "output_b": b} for a, b in rows])
    out, _ = run(data, *endpoint(server), "--names", "ours,theirs", "--answers", "a.jsonl", "--json")
    record = json.loads(out)
    assert record["pairwise"]["wins"] == {"ours": 1, "theirs": 1}
    assert (record["pairwise"]["ties"], record["pairwise"]["position"]["always_first"]) == (2, 2)
    assert record["likert"]["systems"]["ours"]["scores"]["informativeness"]["mean"] == 4.0
    table, _ = run(data, *endpoint(server), "--names", "ours,theirs", "--answers", "a.jsonl")
    for part in ("5.00 ± 0.00", "ours", "tie", "Votes, each order by itself: ours 4, theirs 4.", "chosen in 75.0%"):
        assert part in table
    alone, _ = run(data, *endpoint(server), "--output", "output_b", "--ask", "likert", "--json")
    assert json.loads(alone)["pairwise"] is None


def test_what_cannot_be_read_or_had_is_counted(run: Any, tmp_path: Path) -> None:
    said = {
        "good": Said(GOOD),
        "odd": Said("All fine!"),
        "cut": Said("Relevance: 5", finish="length"),
        "lost": Said(status=400),
    }
    data = lines(tmp_path / "one.jsonl", [{"source": name, "output": "t"} for name in said])
    with judge(lambda prompt, before: said[re.findall("Article: (.*)", prompt)[0]]) as server:
        words = (data, *endpoint(server), "--json")
        out, err = run(*words, code=1)
        (counted,) = json.loads(out)["likert"]["systems"].values()
        assert [counted[name] for name in ("questions", "read", "unreadable", "cut", "failed")] == [4, 1, 2, 1, 1]
        assert counted["scores"]["relevance"] == {
            "mean": 5.0, "stderr": None, "counts": {"1": 0, "2": 0, "3": 0, "4": 0, "5": 1}
        }  # fmt: skip
        assert "2 answers could not be read and are not counted; 1 of them were cut off" in err
        assert "1 questions got no answer" in err
        said |= {"odd": Said(GOOD), "lost": Said(GOOD)}
        out, err = run(*words)
        assert (json.loads(out)["asked"], json.loads(out)["kept"]) == (1, 3)
        out, err = run(*words, "--again")
        assert (json.loads(out)["asked"], json.loads(out)["kept"]) == (2, 2)
        assert "1 answers could not be read" in err


def test_keys_come_from_the_environment_only(
    run: Any, server: Judge, tmp_path: Path, mistake_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "one.jsonl", [{"source": "s", "output": "t"}])
    monkeypatch.setenv("JUDGE_KEY", "s3cret\n")
    run(data, *endpoint(server), "--api-key-env", "JUDGE_KEY")
    assert server.headers[-1]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in (tmp_path / "analysis" / "judge-one.jsonl").read_text()
    words = ("eval", "judge", data, *endpoint(server))
    for given, message in (("sk-a1b2", "takes the name of an environment variable"), ("A1B2C3", "is not set")):
        said = mistake_of(*words, "--api-key-env", given)
        assert message in said
        assert given not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ask", "pairwise"), "--ask pairwise compares two systems"),
        (("--body", "[]"), "--body takes a JSON object"),
        (("--body", "{"), "--body is not valid JSON"),
        (("--body", '{"model": "x"}'), "not messages, model or stream"),
        (("--likert-template", "none.txt"), "cannot read none.txt: No such file"),
        (("--concurrency", "0"), "--concurrency must be >= 1"),
        (("--dimensions", "a,a"), "--dimensions must be different"),
        (("--source", "other"), "is missing other"),
        (("--base-url", "here"), "--base-url must begin with http://"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, mistake_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = lines(tmp_path / "one.jsonl", [{"source": "s", "output": "t"}])
    said = mistake_of("eval", "judge", data, "--base-url", "http://127.0.0.1:1", "--model", "m", *words)
    assert message in said
    assert not (tmp_path / "analysis").exists()


def test_other_templates_and_dimensions(run: Any, tmp_path: Path) -> None:
    template = tmp_path / "likert.txt"
    template.write_text("Rate {dimensions} of {text} for {source}.\n{form}")
    data = lines(tmp_path / "one.jsonl", [{"source": "s", "output": "t"}])
    with judge(lambda prompt, before: Said("depth: 2")) as server:
        words = ("--likert-template", str(template), "--dimensions", "depth", "--body", '{"max_tokens": null}')
        out, _ = run(data, *endpoint(server), *words, "--json")
    assert server.prompts == ["Rate depth of t for s.\nDepth: <number>"]
    assert "max_tokens" not in server.bodies[0]
    assert json.loads(out)["likert"]["systems"]["one"]["scores"] == {
        "depth": {"mean": 2.0, "stderr": None, "counts": {"1": 0, "2": 1, "3": 0, "4": 0, "5": 0}}
    }


def test_our_own_server_may_judge(run: Any, tmp_path: Path, tiny_model: Any) -> None:
    """An untrained judge says nothing that can be read; that is the result, and it is told."""
    pytest.importorskip("fastapi")
    from serve.serving import NAME, running

    data = lines(tmp_path / "two.jsonl", [{"source": f"s{n}", "output_a": "a", "output_b": f"b{n}"} for n in range(2)])
    with running(long_model(tiny_model), max_length=1024) as found:
        words = ("--base-url", f"{found.url}/v1", "--model", NAME, "--max-tokens", "8", "--concurrency", "3", "--json")
        out, err = run(data, *words)
        record = json.loads(out)
        assert (record["asked"], record["failed"]) == (8, 0)
        again, _ = run(data, *words)
    unreadable = record["pairwise"]["unreadable"] + sum(each["unreadable"] for each in record["likert"]["systems"].values())
    assert unreadable == 8
    assert record["pairwise"]["wins"] == {"output_a": 0, "output_b": 0}
    assert "8 answers could not be read and are not counted" in err
    assert json.loads(again)["kept"] == 8


def long_model(model: Any) -> FathomForCausalLM:
    """The tiny model's shape with room for a question of several hundred tokens."""
    architecture = dataclasses.replace(model.architecture, context=1024)
    ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    found = FathomForCausalLM(FathomConfig.of(architecture, DepthPlan.build("cycle", 2, 4), dtype=torch.float32, **ids))
    found.load_state_dict(model.state_dict())
    found.tokenizer = model.tokenizer
    return found.eval()
