"""`fathomlm bench`: a table for people, one JSON object of a fixed form, "forced" wherever depths were, and one line for
every mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathomlm.cli.main import main, read_command
from fathomlm.lab.bench import floor, kernels, play

pytestmark = pytest.mark.usefixtures("one_thread", "quick")
FEW = ("--workload", "64-256", "--requests", "3", "--batch-size", "3")
ROUTED = ("--sharing", "middle-cycle", "--recursions", "2", "--router", "expert")

MEASURED: dict[str, Any] = {
    "depth": {"source", "label", "unit", "full", "mean", "ran", "exit_rate"},
    "timing": {
        "requests", "finished", "failed", "error", "prompt_tokens", "tokens", "seconds", "tokens_per_s",
        "time_to_first_token_ms", "inter_token_ms", "interrupted",
    },
    "work": {
        "batch_size", "max_sequences", "decode_steps", "passes_per_decode_step", "ms_per_decode_step",
        "batch_filled", "batch_filled_by_pass", "stages",
        "preemptions", "prefix_hits",
    },
    "memory": {"weights", "kv", "kv_most", "kv_dtype"},
    "floor": {"bytes_per_decode_step", "reading_bytes_per_s", "ms_per_decode_step", "share"},
}  # fmt: skip
"""The form that scripts rely on: what is here may grow, and nothing may go."""
STAGES = {"scheduling", "applying", "prefill", "launching", "waiting", "collecting", "idle", "other"}
WORKLOAD = {
    "name", "requests", "prompt_tokens", "new_tokens", "longest", "arrivals", "rate_per_s", "prompts", "seed",
}  # fmt: skip
ABOUT = {"kind", "model", "dtype", "device", "environment"}
ENVIRONMENT = {"date", "device", "threads", "python", "torch", "transformers", "fathomlm"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short look at the memory, and few copies of weights: figures mean nothing here anyway."""
    monkeypatch.setattr(floor, "PROBE_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(kernels, "COLD_BYTES", 1e5)
    monkeypatch.setattr(kernels, "SECONDS", 0.0)
    monkeypatch.setattr(play, "REPORT_SECONDS", 0.0)


@pytest.fixture
def bench(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(kind: str, *words: str, code: int = 0) -> str:
        assert main(["bench", kind, str(tiny_model_dir), *words]) == code
        captured = capsys.readouterr()
        assert ("interrupted" in captured.err) == (code == 2)
        return captured.out

    return call


def check_measured(found: dict[str, Any]) -> None:
    for part, names in MEASURED.items():
        assert set(found[part]) == names
    assert set(found["work"]["stages"]) == STAGES
    assert sum(found["work"]["stages"].values()) == pytest.approx(1)
    for times in ("time_to_first_token_ms", "inter_token_ms"):
        assert set(found["timing"][times]) == {"p50", "p99", "mean"}


@pytest.mark.usefixtures("short")
def test_a_thesis_like_workload(bench: Callable[..., str]) -> None:
    record = json.loads(
        bench("throughput", "--dummy", "--requests", "20", "--batch-size", "16", "--peer", "vanilla", "--json")
    )
    assert set(record) == ABOUT | {"plan", "weights", "workload", "ours", "peers", "interrupted"}
    assert set(record["environment"]) == ENVIRONMENT
    assert set(record["workload"]) == WORKLOAD
    assert (record["weights"], record["interrupted"]) == ("random", False)
    assert (record["workload"]["name"], record["workload"]["requests"]) == ("thesis", 20)
    ours, vanilla = record["ours"], record["peers"]["vanilla"]
    for found in (ours, vanilla):
        check_measured(found)
        assert found["timing"]["finished"] == 20
        assert found["timing"]["tokens"] == record["workload"]["new_tokens"]
        assert found["timing"]["tokens_per_s"] == pytest.approx(found["timing"]["tokens"] / found["timing"]["seconds"])
        assert found["depth"]["source"] == "full"
    assert vanilla["speedup"] == pytest.approx(ours["timing"]["tokens_per_s"] / vanilla["timing"]["tokens_per_s"])
    assert vanilla["memory"]["weights"] > ours["memory"]["weights"]  # two loops of a block against all its layers
    assert vanilla["floor"]["bytes_per_decode_step"] == ours["floor"]["bytes_per_decode_step"]  # which both read in a tick


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("words", "source"),
    [
        ((*ROUTED, "--depths", "1,0.25"), "forced"),
        (("--exit-rate", "0.8", "--exit-layer", "2"), "forced"),
        (ROUTED, "router"),
        (("--threshold", "0.01", "--exit-layer", "2", "--decode", "state-copy"), "confidence"),
    ],
    ids=["depths", "exits", "router", "confidence"],
)
def test_forced_depths_are_labelled_in_every_output(bench: Callable[..., str], words: tuple[str, ...], source: str) -> None:
    depth = json.loads(bench("throughput", "--dummy", *FEW, *words, "--json"))["ours"]["depth"]
    assert depth["source"] == source
    assert depth["label"].startswith("forced") == (source == "forced")
    table = bench("throughput", "--dummy", *FEW, *words)
    assert ("this model (forced)" in table) == (source == "forced")
    assert ("Depth: forced:" in table) == (source == "forced")


@pytest.mark.usefixtures("short")
def test_forced_depths_are_the_trained_capacities_unless_others_are_named(bench: Callable[..., str]) -> None:
    record = json.loads(bench("throughput", "--dummy", *FEW, *ROUTED, "--depth", "forced", "--json"))
    assert "parts 1, 0.5 of all tokens" in record["ours"]["depth"]["label"]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("words", [(), ("--dummy",), ("--recursions", "2", "--dummy")], ids=" ".join)
def test_integer_weights(
    bench: Callable[..., str], words: tuple[str, ...], kernels_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATHOMLM_HOME", str(kernels_home))
    words = (*words, "--workload", "64-256", "--requests", "1", "--json")
    wide, narrow = (json.loads(bench("latency", *words, *more)) for more in ((), ("--quantize", "int8")))
    assert (wide["dtype"], narrow["dtype"]) == ("float32", "int8")
    assert narrow["ours"]["floor"]["bytes_per_decode_step"] < wide["ours"]["floor"]["bytes_per_decode_step"] / 2
    assert narrow["ours"]["timing"]["finished"] == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_keys_and_values_in_float8(bench: Callable[..., str], kind: str) -> None:
    words = ("--dummy", "--workload", "64-256", "--requests", "2", "--dtype", "bfloat16", "--peer", "vanilla")
    wide = json.loads(bench(kind, *words, "--json"))
    narrow = json.loads(bench(kind, *words, "--kv-dtype", "fp8", "--json"))
    for found in ("ours", "vanilla"):
        before, after = (one["ours"] if found == "ours" else one["peers"][found] for one in (wide, narrow))
        assert (before["memory"]["kv_dtype"], after["memory"]["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
        assert before["memory"]["kv"] == 2 * after["memory"]["kv"]
        assert after["timing"]["finished"] == 2
    assert "float8" in bench(kind, *words, "--kv-dtype", "fp8")


@pytest.mark.usefixtures("short")
def test_headings_are_whole_on_a_narrow_terminal(bench: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = bench("throughput", "--dummy", *FEW, *ROUTED, "--depths", "1,0.5", "--peer", "vanilla", "--peer", "transformers")
    assert " transformers " in table


@pytest.mark.usefixtures("short")
def test_loaded_weights_real_text_and_arrivals(bench: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the depth of the water is the measure of the fathom line " * 3)
    words = ("--data", str(text), "--arrivals", "200", "--memory", "1MB", "--max-sequences", "3")
    record = json.loads(bench("throughput", *FEW, *words, "--json"))
    assert record["weights"] == "loaded"
    assert (record["workload"]["prompts"], record["workload"]["arrivals"]) == ("text", "poisson")
    assert record["workload"]["rate_per_s"] == 200
    assert record["ours"]["memory"]["kv"] <= 10**6
    assert record["ours"]["timing"]["finished"] == 3
    routed = json.loads(bench("throughput", *FEW, "--router", "expert", "--kv", "share", "--json"))
    assert routed["plan"] == "2 layers looped 2 times (cycle, expert-choice router, shared KV)"
    assert routed["ours"]["depth"]["unit"] == "recursions"


@pytest.mark.usefixtures("short")
def test_latency_is_one_text_at_a_time(bench: Callable[..., str]) -> None:
    words = ("--dummy", "--requests", "2", "--peer", "transformers", "--peer", "vanilla")
    record = json.loads(bench("latency", *words, "--json"))
    ours = record["ours"]
    check_measured(ours)
    assert (ours["work"]["batch_size"], ours["work"]["max_sequences"], record["workload"]["arrivals"]) == (
        1,
        1,
        "one by one",
    )
    latency, gaps = ours["latency"], ours["timing"]["inter_token_ms"]
    assert set(latency) == {
        "ms_per_token", "ms_per_token_p50", "ms_per_token_p99", "floor_ms_per_token", "floor_share",
    }  # fmt: skip
    assert (latency["ms_per_token"], latency["ms_per_token_p99"]) == (gaps["mean"], gaps["p99"])
    assert latency["floor_ms_per_token"] == pytest.approx(ours["floor"]["ms_per_decode_step"])  # a tick is a token here
    assert latency["floor_share"] == pytest.approx(latency["floor_ms_per_token"] / latency["ms_per_token"])
    for peer in record["peers"].values():
        assert peer["speedup"] == pytest.approx(peer["latency"]["ms_per_token"] / latency["ms_per_token"])
    assert record["peers"]["transformers"]["timing"]["tokens"] == 20
    table = bench("latency", "--dummy", "--requests", "2", "--exit-rate", "1", "--exit-layer", "2", "--max-stack", "4")
    assert "milliseconds a token" in table
    assert "this model (forced)" in table


@pytest.mark.usefixtures("short")
def test_transformers_beside_it(bench: Callable[..., str]) -> None:
    record = json.loads(bench("throughput", "--dummy", *FEW, "--peer-batch-size", "2", "--peer", "transformers", "--json"))
    peer = record["peers"]["transformers"]
    assert (peer["how"], peer["rows"]) == ("continuous batching", 2)
    assert set(peer["timing"]) == MEASURED["timing"]
    assert peer["timing"]["tokens"] == peer["workload"]["new_tokens"] == 30
    assert peer["speedup"] > 0
    table = bench("throughput", "--dummy", *FEW, *ROUTED, "--peer", "transformers")
    assert "transformers was not measured: transformers does not support routers." in " ".join(table.split())


def test_kernels(bench: Callable[..., str]) -> None:
    record = json.loads(bench("kernels", "--batch-size", "3", "--context", "20", "--json"))
    assert set(record) == ABOUT | {"settings", "implementation", "reading_bytes_per_s", "kernels", "interrupted"}
    assert record["implementation"] == "CPU twin"
    assert record["reading_bytes_per_s"] is None
    assert {one["kernel"] for one in record["kernels"]} == {
        "norm_qkv_rope_write", "paged_attention", "add_linear", "norm_gated", "norm_linear", "add_grouped_lora",
    }  # fmt: skip
    for one in record["kernels"]:
        names = {"kernel", "use", "twin", "us", "floor_us", "reads_bytes", "floor_share", "layer_share"}
        assert set(one) == names
        assert one["us"] is None
    table = bench("kernels", "--batch-size", "3", "--context", "20")
    assert "CPU twin" in table
    assert " us" not in table.replace("CPU twin", "")


@pytest.mark.usefixtures("short")
def test_ctrl_c_ends_with_what_was_measured(bench: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fathomlm.lab.bench.timed import TimedEngine

    whole, steps = TimedEngine.step, [0]

    def step(engine: TimedEngine) -> None:
        steps[0] += 1
        if steps[0] == 40:
            raise KeyboardInterrupt
        whole(engine)

    monkeypatch.setattr(TimedEngine, "step", step)
    record = json.loads(bench("throughput", "--dummy", *FEW, "--requests", "40", "--peer", "vanilla", "--json", code=2))
    assert record["interrupted"]
    assert record["ours"]["timing"]["interrupted"]
    assert 0 < record["ours"]["timing"]["tokens"] < record["workload"]["new_tokens"]
    assert record["peers"] == {}


def test_ctrl_c_between_kernels(bench: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    timed = iter((1.0, 2.0))

    def time_case(case: kernels.KernelCase, device: Any) -> float:
        for seconds in timed:
            return seconds
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "time_case", time_case)
    record = json.loads(bench("kernels", "--json", code=2))
    assert record["interrupted"]
    assert [one["kernel"] for one in record["kernels"]] == ["norm_qkv_rope_write", "paged_attention"]


BAD: list[tuple[tuple[str, ...], str]] = [
    (("throughputs",), "unknown kind 'throughputs' (did you mean 'throughput'?)"),
    (
        ("throughput", "--workload", "thesys"),
        "invalid --workload 'thesys' (did you mean 'thesis'?); choose from thesis, 512-2048, 64-256",
    ),
    (("throughput", "--reqests", "3"), "did you mean '--requests'?"),
    (("throughput", "--requests", "0"), "--requests must be >= 1, got 0"),
    (("throughput", "--batch-size", "-1"), "--batch-size must be >= 1, got -1"),
    (("throughput", "--arrivals", "0"), "--arrivals must be > 0, got 0"),
    (("throughput", "--arrivals", "nan"), "--arrivals must be a number > 0, got nan"),
    (
        ("throughput", "--memory", "lots"),
        "--memory takes a size such as 512MB, 8GB or 8GiB",
    ),
    (("throughput", "--memory", "10KB"), "must hold two pages"),
    (("throughput", "--memory", "9" * 400 + "GB"), "is more than any machine has"),
    (("throughput", "--memory", "900000000GB", "--requests", "1"), "--memory is 900,000,000.0 GB, but cpu has"),
    (("throughput", "--kv-dtype", "fp4"), "invalid --kv-dtype 'fp4' (did you mean 'fp8'?); choose from auto, fp8"),
    (("throughput", "--page-size", "3"), "page_size must be a power of two, got 3"),
    (("throughput", "--batch-size", "9" * 20), "--batch-size must be <= 2147483647"),
    (("throughput", "--seed", "9" * 20), "--seed must be between 0 and 9223372036854775807"),
    (("throughput", "--threads", "100000"), "the processors of this machine; got 100,000"),
    (("throughput", "--device", "mps"), "the engine runs on cpu, cuda or cuda:N, not on 'mps'"),
    (("throughput", "--depth", "deep"), "invalid --depth 'deep'; choose from router, confidence, forced"),
    (("throughput", "--depth", "router"), "--depth router requires a model with a router"),
    (("throughput", "--depth", "forced"), "--depth forced requires --exit-rate P without a router"),
    (("throughput", "--depths", "1,0.5"), "--depths requires a model with a router"),
    (("throughput", *ROUTED, "--depths", "1,0.5,0.2"), "--depths has 3 parts, but the model has 2 recursions"),
    (("throughput", *ROUTED, "--depths", "0.9,0.5"), "--depths must begin with 1"),
    (("throughput", *ROUTED, "--depths", "1,1.5"), "--depths must be > 0 and <= 1, got 1.5"),
    (("throughput", *ROUTED, "--depths", "1,half"), "--depths must be a number > 0 and <= 1, got 'half'"),
    (("throughput", *ROUTED, "--depths", "1,0.5", "--depth", "router"), "--depths cannot be combined with --depth router"),
    (("throughput", *ROUTED, "--exit-rate", "0.5"), "--exit-rate requires a model without a router"),
    (("throughput", *ROUTED, "--depth", "confidence"), "cannot be combined with a router"),
    (("throughput", *ROUTED[:-1], "token", "--depth", "forced"), "forced depths require an expert-choice router"),
    (
        ("throughput", "--exit-rate", "0.5", "--depths", "1"),
        "--depths cannot be combined with --exit-rate: it requires a router",
    ),
    (("throughput", "--exit-rate", "1.5", "--exit-layer", "2"), "--exit-rate must be between 0 and 1, got 1.5"),
    (("throughput", "--exit-rate", "0.5"), "has no exits of its own; give an exit layer: 2"),
    (("throughput", "--exit-rate", "0.5", "--exit-layer", "9"), "exit layers must be between 1 and 3"),
    (("throughput", "--exit-rate", "0.5", "--threshold", "0.5"), "--threshold cannot be combined with forced depths"),
    (
        ("throughput", "--threshold", "2", "--exit-layer", "2"),
        "--threshold must be between 0 and 1, got 2",
    ),
    (
        ("throughput", "--depth", "confidence", "--exit-rate", "0.5"),
        "--exit-rate cannot be combined with --depth confidence",
    ),
    (("throughput", "--max-sequences", "1", "--batch-size", "2"), "max_sequences must be at least batch_size"),
    (("throughput", "--router-alpha", "1"), "--router-alpha requires --router"),
    (("throughput", "--resize"), "--resize requires --sharing or --recursions"),
    (("throughput", "--recursions", "3"), "3 recursions do not divide 4 layers"),
    (("throughput", "--peer", "vllm"), "invalid --peer 'vllm'; choose from vanilla, transformers"),
    (("throughput", "--peer", "vanilla", "--peer", "vanilla"), "duplicate --peer"),
    (("throughput", "--recursions", "1", "--peer", "vanilla"), "--peer vanilla is what this is already"),
    (
        ("throughput", "--data", "x.txt", "--workload", "64-256"),
        "--data cannot be combined with --dummy: it requires the model's tokenizer",
    ),
    (("latency", "--arrivals", "3"), "unknown option '--arrivals'"),
    (("latency", "--requests", "0"), "--requests must be >= 1"),
    (("latency", "--quantize", "int8", "--peer", "transformers"), "--peer cannot be combined with --quantize"),
    (
        ("latency", "--quantize", "int8", "--dtype", "bfloat16"),
        "--quantize int8 requires --dtype float32 on a CPU, got 'bfloat16'",
    ),
    (("kernels", "--batch-size", "0"), "--batch-size must be >= 1, got 0"),
    (
        ("kernels", "--context", "2000000000"),
        "too little memory for this; lower --batch-size, --context, --rank or --recursions",
    ),
    (("kernels", "--threads", "100000"), "the processors of this machine; got 100,000"),
    (("kernels", "--device", "mps"), "the engine runs on cpu, cuda or cuda:N, not on 'mps'"),
]


def test_what_is_given_is_the_engines() -> None:
    found = read_command(["bench", "throughput", "smollm2-135m", "--no-merge", "--burst", "2"])[1]
    assert (found.engine.merge, found.engine.burst) == (False, 2)
    assert read_command(["bench", "throughput", "smollm2-135m"])[1].engine.merge


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_mistakes_are_one_line(
    words: tuple[str, ...], message: str, tiny_model_dir: Path, mistake_of: Callable[..., str]
) -> None:
    dummy = () if words[0] == "kernels" else ("--dummy",)
    assert message in mistake_of("bench", words[0], str(tiny_model_dir), *dummy, *words[1:])


def test_mistakes_with_loaded_weights(
    tiny_model_dir: Path, tmp_path: Path, mistake_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tiny_model_dir)
    with monkeypatch.context() as patched:  # which is seen before anything is loaded
        patched.setattr("fathomlm.lab.bench.run.load_planned", lambda *_: pytest.fail("loaded"))
        assert "more than the model's context of 256" in mistake_of("bench", "throughput", place)
    assert "has no prompts to cut" in mistake_of("bench", "throughput", place, "--data", "x.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    words = ("--workload", "64-256", "--data", str(tmp_path / "empty.txt"))
    assert "has no text" in mistake_of("bench", "throughput", place, *words)
    assert "unknown model 'smollm-360' (did you mean" in mistake_of("bench", "throughput", "smollm-360", "--dummy")
    assert "encoder-decoder" in mistake_of("bench", "throughput", "t5-small", "--dummy")
    assert "no kernels for rows of neox" in mistake_of("bench", "kernels", "pythia-70m")
