"""`benchmarks/engine_scale.py`: a record that grows over several calls, and what is read from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fathomlm.errors import OptionError

ROOT = Path(__file__).resolve().parents[3]
HEAD = {
    "environment": {"device": "some GPU", "torch": "2.11", "date": "2026-11-18"},
    "gpu": "a",
    "source": "s",
    "commit": None,
}
HEAD |= {"settings": {"shape": "360m", "mean": 256.0, "rounds": 8}, "reading_gb_per_s": 4000.0}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def records() -> ModuleType:
    import engine_scale_record  # type: ignore[import-not-found]

    return engine_scale_record  # type: ignore[no-any-return]


@pytest.fixture
def pages() -> ModuleType:
    import engine_scale_page  # type: ignore[import-not-found]

    return engine_scale_page  # type: ignore[no-any-return]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    import engine_scale  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "argv", ["engine_scale.py", *words])
    return int(engine_scale.main())


def cell(speed: int, latency: float) -> dict[str, Any]:
    return {
        "tokens_per_s": speed, "slots": 64, "device_tokens_per_s": speed + 500, "host_us_per_token": 1.25,
        "floor_share": 0.375, "inter_token_ms_p50": latency, "rows": 1, "device_tokens_per_tick": 1.0,
    }  # fmt: skip


def test_cells_add_up_over_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "scale.json"
    words = ["--out", str(out), "--tiny", "--mean", "4", "--rounds", "1", "--parts", "rows", "--rows", "2", "--only"]
    assert call(monkeypatch, *words, "vanilla") == 0
    first = json.loads(out.read_text())
    assert list(first["seconds"]) == ["rows vanilla 2"]
    assert call(monkeypatch, *words, "vanilla", "mor3", "exits") == 0
    assert "measured before: rows vanilla 2\n" in capsys.readouterr().out
    second = json.loads(out.read_text())
    assert second["vanilla_2rows"] == first["vanilla_2rows"]
    ahead = {name: second[f"{name}_2rows"]["device_tokens_per_tick"] for name in ("vanilla", "mor3", "exits")}
    assert ahead["vanilla"] == 2.0  # every row has a token, which those of the workload's last steps do not
    assert 0 < ahead["exits"] < ahead["mor3"] <= 2.0
    assert second["mor3_2rows"]["mean_depth"] > 1
    assert 0 < second["exits_2rows"]["exit_rate"] < 1
    for name in ("vanilla", "mor3", "exits"):
        found = second[f"{name}_2rows"]
        assert found["speedup"] == round(found["tokens_per_s"] / second["vanilla_2rows"]["tokens_per_s"], 3)
        assert found["floor_share"] > 0
        device = 1e3 * found["device_tokens_per_tick"] / found["device_ms_per_tick"]
        assert found["device_tokens_per_s"] == round(device)
        assert found["preemptions"] == 0
    assert call(monkeypatch, *words, "vanilla", "--overbook", "3") == 2
    assert "measured with another settings" in capsys.readouterr().err
    assert call(monkeypatch, *words, "mor2", "--minutes", "0") == 0
    assert "not begun, call again: rows mor2 2\n" in capsys.readouterr().out
    assert json.loads(out.read_text()) == second


def test_prompts_are_measured_for_plain_and_routed_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "scale.json"
    assert call(monkeypatch, "--out", str(out), "--tiny", "--mean", "4", "--parts", "prefill") == 0
    record = json.loads(out.read_text())
    assert list(record["seconds"]) == ["prefill 360m", "prefill 1.7b", "prefill mor3_360m"]
    for cell in ("360m", "1.7b", "mor3_360m"):
        found = record[f"prefill_{cell}"]
        assert found["tokens_per_s"] > 0
        assert (found["prompt"], found["requests"]) == (20, 8)


def test_a_cell_that_fails_loses_nothing_else_and_is_tried_again_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import engine_scale

    order: list[str] = []
    broken = {"one"}

    def measured(name: str) -> Any:
        def measure(bench: Any) -> None:
            order.append(name)
            written = json.loads((tmp_path / "scale.json").read_text())
            assert written["failures"][name] == "stopped before its end"  # for a call that is killed
            if name in broken:
                raise ValueError("no room")
            bench.note(name, {"tokens_per_s": 7})

        return engine_scale.Cell(name, "rows", measure)

    words = ("--out", str(tmp_path / "scale.json"), "--tiny")
    monkeypatch.setattr(engine_scale, "cells", lambda args: [measured("one"), measured("two")])
    assert call(monkeypatch, *words) == 1
    assert "failed: one: ValueError: no room" in capsys.readouterr().err
    record = json.loads((tmp_path / "scale.json").read_text())
    assert record["failures"] == {"one": "ValueError: no room"}
    assert record["two"] == {"tokens_per_s": 7}
    monkeypatch.setattr(engine_scale, "cells", lambda args: [measured(name) for name in ("one", "two", "three")])
    broken.clear()
    assert call(monkeypatch, *words) == 0
    assert order == ["one", "two", "three", "one"]
    record = json.loads((tmp_path / "scale.json").read_text())
    assert record["failures"] == {}
    assert set(record["seconds"]) == {"one", "two", "three"}


def test_what_was_asked_for_comes_first() -> None:
    import engine_scale

    args = SimpleNamespace(
        tiny=False, rows=[1, 32, 256], only=list(engine_scale.MODELS), weights=["bf16"], parts=list(engine_scale.PARTS)
    )
    names = [found.name for found in engine_scale.cells(args)]
    assert len(set(names)) == len(names)
    assert names[:2] == ["rows vanilla 256", "rows mor3 256"]
    last = max(
        names.index(f"{part}")
        for part in ("prefill 1.7b", "prefill mor3_360m", "one 1.7b", "long mor3 256", "bundled bundled 256")
    )
    assert last < names.index("rows exits 1")
    first = engine_scale.cells(args)[0]
    assert first.expected({}) == engine_scale.PARTS["rows"]
    assert first.expected({"rows mor2 1": 90.0, "rows mor2 32": 8.0, "rows exits 1": 6.0, "long mor3 256": 200.0}) == 10.0
    args.parts = ["peer"]
    assert {found.part for found in engine_scale.cells(args)} == {"peer"}


def test_only_the_same_run_is_continued(records: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    record = records.open_record(path, HEAD)
    record["vanilla_1rows"] = cell(10, 1.0)
    records.write_record(record, path)
    tomorrow = HEAD | {"environment": {**HEAD["environment"], "date": "2026-11-19"}}  # type: ignore[dict-item]
    assert records.open_record(path, tomorrow) == record
    for name, other in (("gpu", "b"), ("source", "t"), ("environment", {"device": "another"})):
        with pytest.raises(OptionError, match=f"with another {name};"):
            records.open_record(path, HEAD | {name: other})
        assert records.open_record(path, HEAD | {name: other}, mixed=True)["mixed"] == [{name: other}]
    with pytest.raises(OptionError, match="another settings"):
        records.open_record(path, HEAD | {"settings": {}}, mixed=True)
    assert "vanilla_1rows" not in records.open_record(path, HEAD, fresh=True)
    path.write_text("{}")
    with pytest.raises(OptionError, match="not a record that can be continued"):
        records.open_record(path, HEAD)


def test_a_changed_file_is_another_source(records: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text(file.name)
    before = records.source_hash(files)
    assert records.source_hash(reversed(files)) == before
    files[1].write_text("x")
    assert records.source_hash(files) != before


def test_the_best_try_counts_and_speedups_do_not_depend_on_the_order(records: ModuleType) -> None:
    steps = [("mor3_same_bytes", "96", 150), ("vanilla_same_bytes", "80", 90), ("vanilla_same_bytes", "96", 100)]
    steps += [("bundled", "256", 50), ("mor3_same_bytes", "112", 140), ("bundled_plain", "256", 40)]
    for order in (steps, steps[::-1]):
        record = records.open_record(Path("nowhere"), HEAD)
        for key, label, speed in order:
            records.add_try(record, key, label, {"tokens_per_s": speed, "rows": int(label)})
            records.compare(record)
        assert record["mor3_same_bytes"]["speedup"] == 1.5
        assert record["mor3_same_bytes"]["rows"] == 96
        assert record["mor3_same_bytes"]["tried"] == {"96": 150, "112": 140}
        assert record["vanilla_same_bytes"]["speedup"] == 1.0
        assert record["bundled"]["speedup"] == 1.25


def test_bars_are_met_from_the_right_side(records: ModuleType) -> None:
    record = {
        "vanilla_256rows": {"tokens_per_s": 179_999, "host_us_per_token": 1.9},
        "mor3_256rows": {"host_us_per_token": 2.1},
    }
    said = {row[0]: row[3] for row in records.bar_rows(record)}
    assert said["vanilla_256rows.tokens_per_s"] == "NOT MET"
    assert said["vanilla_256rows.host_us_per_token"] == "met"
    assert said["mor3_256rows.host_us_per_token"] == "NOT MET"
    assert said["bundled.speedup"] == ""


def test_a_record_is_drawn_with_its_numbers(
    records: ModuleType, pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    record = records.open_record(tmp_path / "scale.json", HEAD)
    with pytest.raises(OptionError, match="no batch sizes to draw"):
        pages.draw(record, tmp_path / "scale.png")
    for number, name in enumerate(records.NAMES):
        for rows in (256, 1):
            record[f"{name}_{rows}rows"] = cell(1000 * rows + number, 0.5 * rows**0.2)
    latency = {"p50": 2.0, "p99": 9.5, "mean": 3.0}
    load = {"requests_per_s": 10.0, "time_to_first_token_ms": latency, "inter_token_ms": latency, "failed": 0}
    record["mor3_poisson"] = {"loads": {"0.95": load}}
    records.add_try(record, "mor4_same_bytes", "96", {"tokens_per_s": 5123, "rows": 96, "preemptions": 3})
    record["failures"]["peer 64"] = "RuntimeError: no"
    records.compare(record)
    records.write_record(record, tmp_path / "scale.json")
    assert call(monkeypatch, "--draw", str(tmp_path / "scale.json")) == 0
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "scale.md").read_text()
    assert "![Throughput against latency](scale.png)" in text
    first = next(number for number, line in enumerate(text.splitlines()) if line.startswith("| plain |"))
    assert text.splitlines()[first] == "| plain | 1 | 64 | 1,000 | 1.00 | 1,500 | 1.25 | 38% | 0.50 |"
    assert "| MoR, 3 recursions | 95% | 10.0 | 2.0 | 9.5 | 3.0 | 9.5 | 0 |" in text
    assert "| same bytes | MoR, 4 recursions | 5,123 | - | 96 | 3 | 96: 5,123 |" in text
    assert "- peer 64: RuntimeError: no" in text


def test_the_published_workload_is_nano_vllms() -> None:
    import engine_scale_parts  # type: ignore[import-not-found]

    work = engine_scale_parts.nano_vllm_work(49152)
    assert len(work) == 256
    assert sum(new for _, new in work) == 133_966  # as its README counts
    assert {len(prompt) >= 100 and len(prompt) <= 1024 for prompt, _ in work} == {True}
    assert engine_scale_parts.nano_vllm_work(96)[0][1] == work[0][1]


def test_keys_and_values_that_a_token_reads() -> None:
    import engine_scale_parts

    from fathomlm.depth import DepthPlan, build_routing

    bench = SimpleNamespace(kv_bytes=lambda: 6 * 10, shape=SimpleNamespace(layers=6))

    def read(plan: DepthPlan) -> float:
        return float(engine_scale_parts.read_bytes_per_token(bench, SimpleNamespace(plan=plan), 100))

    assert read(DepthPlan.vanilla(6)) == 100 * 10 * 6
    routed = DepthPlan.build("middle-cycle", 2, 6, "add").with_routing(build_routing("expert", 2))
    assert read(routed) == pytest.approx(100 * 10 * (2 + 2 * (1 + 0.5**2)))


def test_the_documentation_quotes_a_record(records: ModuleType, pages: ModuleType) -> None:
    record = records.open_record(Path("nowhere"), HEAD)
    for name, speed in (("vanilla", 120_644), ("mor3", 181_165)):
        record[f"{name}_256rows"] = cell(speed, 2.0)
    record["mor3_1rows"] = cell(1690, 0.5)
    records.compare(record)
    text = f"before\n\n{pages.BEGIN}\nold figures\n{pages.END}\n\nbehind\n"
    found = pages.quoted(text, record, "../results/scale.json")
    assert found.startswith(f"before\n\n{pages.BEGIN}\nsome GPU, torch 2.11, 2026-11-18 ([record](../results/scale.json),")
    assert found.endswith(f"\n{pages.END}\n\nbehind\n")
    assert "old figures" not in found
    assert "| 1 | - | 1,690 (2,190) |" in found
    assert "| 256 | 120,600 (121,100) | 181,200 (181,700): 1.50 times |" in found
    assert "At 256 and more the host and empty rows add at most 1.2 us per token" in found
    assert pages.quoted(found, record, "../results/scale.json") == found
    with pytest.raises(OptionError, match="one part between"):
        pages.quoted("nothing to fill in", record, "scale.json")


def test_records_without_the_devices_own_tokens_are_bounded_by_full_batches(pages: ModuleType) -> None:
    """They took a workload's average step for what the device does, which made the host cost less than nothing."""
    old = {"rows": 256, "tokens_per_s": 140_129, "device_ms_per_tick": 1.7638, "host_us_per_token": -0.483}
    assert pages.device_alone("vanilla", old) == (145_141, pytest.approx(0.246, abs=1e-3))
    assert pages.device_alone("mor2", old)[0] == 290_282  # two turns
    assert pages.device_alone("exits", old)[0] == 72_571  # a token takes two rows
    new = old | {"device_tokens_per_tick": 250.0, "device_tokens_per_s": 141_739, "host_us_per_token": 0.081}
    assert pages.device_alone("vanilla", new) == (141_739, 0.081)


def test_layers_that_a_token_runs() -> None:
    import engine_scale_parts

    from fathomlm.depth import DepthPlan, build_routing

    assert engine_scale_parts.layers_per_token(DepthPlan.vanilla(6)) == 6
    routed = DepthPlan.build("middle-cycle", 2, 6, "add").with_routing(build_routing("expert", 2))
    assert engine_scale_parts.layers_per_token(routed) == 2 + 2 * 1.5


def test_the_documentation_says_what_the_records_say(pages: ModuleType) -> None:
    import engine_throughput  # type: ignore[import-not-found]

    results = ROOT / "benchmarks" / "results"
    record = json.loads((results / "engine_scale_h200.json").read_text())
    text = (ROOT / "docs" / "engine.md").read_text()
    assert pages.quoted(text, record, "../benchmarks/results/engine_scale_h200.json") == text
    assert pages.page(record, "engine_scale_h200.png") == (results / "engine_scale_h200.md").read_text()
    older = json.loads((results / "engine_h200.json").read_text())
    assert engine_throughput.table(older) == (results / "engine_h200.md").read_text()
