"""What `benchmarks/compress_smollm2.py` says of models with other tokens, and the text that `compress_corpus.py` picks."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def model(vocab: int, loss: float, lambada: float, words: float, tokens: int) -> dict[str, Any]:
    return {
        "vocab": vocab, "loss": loss, "parameters": 100 * vocab, "flops_per_token": 7,
        "text_tokens": {"wikitext2_raw": tokens},
        "scores": {"lambada_openai": lambada, "wikitext2_raw": words},
    }  # fmt: skip


def test_losses_are_those_of_the_original_s_tokens() -> None:
    from compress_smollm2 import TIMES, compare  # type: ignore[import-not-found]

    original = model(49_152, 2.5, 0.4, 3.0, 1000)
    small = compare(model(32_768, 2.6, 0.3, 3.1, 1030), original)
    assert small["loss"] == pytest.approx(2.6 * TIMES[32_768])
    assert small["loss_gap"] == pytest.approx(2.6 * TIMES[32_768] - 2.5, abs=1e-4)
    assert small["scores"]["wikitext2_raw"] == pytest.approx(3.1 * 1.03)
    assert (small["lambada_share"], small["own_loss"]) == (0.75, 2.6)
    alike = compare(model(49_152, 2.6, 0.3, 3.1, 1000), original)
    assert (alike["loss"], alike["loss_gap"], alike["scores"]["wikitext2_raw"]) == (2.6, 0.1, 3.1)
    with pytest.raises(KeyError):
        compare(model(24_576, 2.6, 0.3, 3.1, 1030), original)


def test_without_rounds_times_are_those_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shipped ledger and record, as the page says it: losses anew, times and their environment as they were."""
    import compress_smollm2

    shipped, out = ROOT / "benchmarks" / "results" / "compress_smollm2_h200.json", tmp_path / "record.json"
    before = json.loads(shipped.read_text())
    aged = before | {"curve": [{**model, "loss": 9.0} for model in before["curve"] if model["study"] != "compress-vocab"]}
    out.write_text(json.dumps(aged))
    words = ["run", "--rounds", "0", "--out", str(out), "--ledger", str(ROOT / "benchmarks" / "results" / "study")]
    words += ["--studies", "uptrain", "uptrain-exits", "uptrain-long", "compress", "compress-vocab"]
    monkeypatch.setattr(sys, "argv", ["compress_smollm2.py", *words])
    compress_smollm2.main()
    after = json.loads(out.read_text())
    assert {**after, "losses_of": ""} == {**before, "losses_of": ""}, "the shipped record is the ledger's"
    assert after["environment"]["device"] == "NVIDIA H200"
    assert after["models"]["dropped"]["tokens_per_s_one_row"] == before["models"]["dropped"]["tokens_per_s_one_row"] > 0
    assert "timed" not in after["models"]["fewer tokens"]
    studies = {"uptrain", "uptrain-exits", "uptrain-long", "compress", "compress-vocab"}
    assert {model["study"] for model in after["curve"]} == studies
    exits = after["models"]["looped + exits"]
    assert exits["tokens"] > 14.9e6, "those of the run that it continues are counted"
    out.unlink()
    compress_smollm2.main()
    assert not any("timed" in model for model in json.loads(out.read_text())["curve"])


def test_a_share_of_the_characters_are_of_some_sources(tmp_path: Path) -> None:
    sources = ("novels-100en", "elife", "standardebooks", "frus")
    for shard in range(2):
        with lzma.open(tmp_path / f"train-0{shard}.jsonl.xz", "wt", encoding="utf-8") as file:
            for n in range(200):
                row = {"id": f"{shard}-{n}", "source": sources[n % 4], "text": f"{shard} {n} " + "x" * 90}
                file.write(json.dumps(row) + "\n")
    out = tmp_path / "made" / "train.jsonl.xz"
    command = [sys.executable, str(ROOT / "benchmarks" / "compress_corpus.py"), "--corpus", str(tmp_path), "--out", str(out)]
    for _ in range(2):
        subprocess.run([*command, "--share", "0.3", "--characters", "20000"], check=True, capture_output=True)
        rows = [json.loads(line) for line in lzma.decompress(out.read_bytes()).splitlines()]
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        total = sum(len(row["text"]) for row in rows)
        novels = sum(len(row["text"]) for row in rows if row["source"] in ("novels-100en", "standardebooks"))
        assert total == pytest.approx(20_000, rel=0.02)
        assert novels / total == pytest.approx(0.3, abs=0.02)
        assert len({row["id"] for row in rows}) == len(rows)
    assert {row["text"][0] for row in rows} == {"0", "1"}, "of every shard"


def test_the_original_has_as_many_tokens_or_the_gap_is_a_least_one() -> None:
    """A model of more tokens than any original is not compared with one of fewer tokens than another: that would flatter."""
    from compress_smollm2 import beside_original, table

    def made(kind: str, tokens: int, loss: float, budget: str) -> dict[str, Any]:
        own = {"kind": kind, "tokens": tokens, "study": "s", "variant": kind, "budget": budget, "layout": "1 x 1"}
        return model(49_152, loss, 0.3, 3.0, 1000) | own

    originals = [made("original", 10, 2.8, "10"), made("original", 100, 2.65, "100"), made("original", 100, 2.7, "slow")]
    small = made("dropped", 100, 3.0, "100")
    found = beside_original(small, [*originals, small])
    assert (found["original"], found["equal_tokens"], found["loss_gap"]) == ("s/original/100", True, 0.35)
    longer = made("dropped", 200, 2.9, "200")
    found = beside_original(longer, [*originals, longer])
    assert (found["original"], found["equal_tokens"], found["loss_gap"]) == ("s/original/100", False, 0.25)
    record = {"settings": {"rows": 64}, "models": {"dropped": found}, "untrained": {"scores": {"lambada_openai": 0.31}}}
    rows = table(record).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert "| original, not trained |" in rows[2]
    assert rows[2].endswith("| - | - | 31.0 % | - |")
    assert "2.900 (+0.25 or more)" in rows[3]
    between = made("dropped", 50, 2.95, "50")
    record["models"] = {"dropped": beside_original(between, [*originals, between])}
    assert "2.950 (+0.30 or less)" in table(record)


def test_a_model_is_also_compared_with_the_original_of_its_own_study() -> None:
    """Another text and vocabulary move the original, too."""
    from compress_smollm2 import TIMES, beside_original

    def made(kind: str, vocab: int, loss: float, lambada: float, study: str) -> dict[str, Any]:
        own = {"kind": kind, "tokens": 100, "study": study, "variant": kind, "budget": "b", "layout": "1 x 1"}
        return model(vocab, loss, lambada, 3.0, 1000) | own

    whole, cut = made("original", 49_152, 2.6, 0.3, "s"), made("original, fewer tokens", 32_768, 2.7, 0.4, "v")
    small = made("fewer tokens", 32_768, 2.9, 0.2, "v")
    models = [whole, cut, small]
    found = beside_original(small, models)
    assert (found["original"], found["loss_gap"]) == ("s/original/b", round(2.9 * TIMES[32_768] - 2.6, 4))
    own = {"original": "v/original, fewer tokens/b", "loss_gap": round(0.2 * TIMES[32_768], 4), "lambada_share": 0.5}
    assert found["in_study"] == own
    assert "in_study" not in beside_original(cut, models)


def test_the_original_with_fewer_tokens_is_no_smaller_model(tmp_path: Path) -> None:
    from compress_smollm2 import KINDS, kind_of

    from fathomlm.lab.study.ledger import Ledger
    from fathomlm.lab.study.report import results_of
    from fathomlm.lab.study.spec import read_study

    (results,) = results_of([read_study("compress-vocab")], Ledger(tmp_path))
    kinds = {row.variant.name: kind_of(row) for row in results.rows}
    assert kinds.pop("original") not in KINDS
    assert set(kinds.values()) == {"fewer tokens"}
