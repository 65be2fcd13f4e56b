"""`fathomlm inspect`: its facts as JSON and as a table, and one line for every mistake."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from fathomlm.cli.main import main
from fathomlm.depth import DepthPlan, Relaxation
from fathomlm.depth.cost import NEURON_TILE, Cost
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import OptionError
from fathomlm.sizes import parse_count


@pytest.fixture
def inspect(capsys):
    """Run `fathomlm inspect ... --json` and give back its record."""

    def run(*arguments: str) -> dict:
        assert main(["inspect", *arguments, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return run


@pytest.fixture
def mistake(mistake_of):
    return partial(mistake_of, "inspect")


@pytest.fixture
def saved_model(monkeypatch, tmp_path):
    """A source that is already recursive: what `architecture_of` answers for a FathomLM directory."""
    architecture = PRESETS["smollm-135m"].architecture
    plan = DepthPlan.build("middle-cycle", 3, 30, "add")
    relaxation = Relaxation(kind="prefix", prefix_length=16)
    answer = SimpleNamespace(architecture_of=lambda source: (architecture, plan, relaxation))
    monkeypatch.setitem(sys.modules, "fathomlm.checkpoints.resolve", answer)
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_the_record_has_every_field_of_the_cost_and_the_plan(inspect):
    record = inspect("smollm-360m", "--sharing", "middle-cycle", "--recursions", "2")
    chosen = {"model", "family", "sharing", "recursions", "relaxation", "router", "kv"}
    chosen |= {"exits", "exit_layer", "exit_parameters", "draft"}
    assert set(record) == {f.name for f in dataclasses.fields(Cost)} | chosen
    assert record["model"] == "smollm-360m"
    assert record["family"] == "llama"
    assert (record["sharing"], record["recursions"], record["layout"]) == ("middle-cycle", 2, "1+15+1")
    assert (record["unique_layers"], record["unrolled_layers"]) == (17, 32)
    assert record["non_embedding_parameters"] == 167_150_400
    assert record["embedding_parameters"] == 47_185_920
    assert record["relative_flops"] == 1.0
    assert (record["context"], record["tokens"], record["training_flops"]) == (2048, None, None)


def test_a_model_alone_is_shown_as_it_is(inspect):
    record = inspect("smollm-360m")
    assert (record["sharing"], record["recursions"], record["layout"]) == ("cycle", 1, "32")
    assert record["non_embedding_parameters"] == 314_635_200


def test_recursions_alone_mean_cycle(inspect):
    record = inspect("gemma-2b", "--recursions", "3")
    assert (record["sharing"], record["layout"]) == ("cycle", "6")


@pytest.mark.parametrize(
    ("resize", "layout", "unrolled"),
    [(["--resize"], "1+10+1", 32), (["--resize", "add"], "1+10+1", 32), (["--resize", "drop"], "1+9+1", 29)],
)
def test_resize(inspect, resize, layout, unrolled):
    record = inspect("smollm-135m", "--sharing", "middle-cycle", "--recursions", "3", *resize)
    assert (record["layout"], record["unrolled_layers"]) == (layout, unrolled)


def test_resize_before_another_option_takes_no_value_from_it(inspect):
    assert inspect("smollm-360m", "--recursions", "4", "--sharing", "middle-cycle", "--resize", "--context", "512")


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (["--relax", "encoding"], 3 * 960),
        (["--relax", "prefix"], 32 * 256 * 960),
        (["--relax", "prefix", "--prefix-length", "8"], 32 * 8 * 960),
        (["--relax", "lora", "--rank", "q=64,v=64"], 30 * (64 * (960 + 960 + 960 + 320) + 2 * 960)),
        (["--relax", "dora", "--rank", "o=2"], 30 * (2 * (960 + 960) + 960 + 2 * 960)),
    ],
)
def test_relaxations(inspect, options, added):
    record = inspect("smollm-360m", "--sharing", "middle-cycle", "--recursions", "3", *options)
    assert record["relaxation_parameters"] == added
    assert record["non_embedding_parameters"] == 117_988_800 + added


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_rank_is_64_unless_given(inspect, kind):
    plan = ("pythia-1b", "--recursions", "2", "--relax", kind)
    assert inspect(*plan) == inspect(*plan, "--rank", "64")
    assert inspect(*plan) != inspect(*plan, "--rank", "65")


def test_router_cache_mode_tokens_and_context(inspect):
    plan = ("smollm-360m", "--sharing", "middle-cycle", "--recursions", "3", "--router", "expert", "--tokens", "20B")
    cached = inspect(*plan)
    assert (cached["tokens"], cached["relative_max_batch"], cached["router_parameters"]) == (20 * 10**9, 48, 3 * 960)
    assert cached["relative_flops"] == pytest.approx(0.664, abs=5e-4)
    assert cached["training_flops"] == pytest.approx(cached["forward_flops_per_token"] * 20e9)
    shared = inspect(*plan, "--kv", "share")
    assert shared["relative_kv"] < cached["relative_kv"]
    assert shared["forward_flops_per_token"] != cached["forward_flops_per_token"]
    assert inspect(*plan, "--context", "512")["forward_flops_per_token"] < cached["forward_flops_per_token"]


def test_a_recursive_model_is_counted_by_its_own_plan(inspect, saved_model):
    record = inspect(saved_model)
    assert (record["sharing"], record["recursions"], record["layout"]) == ("middle-cycle", 3, "1+10+1")
    assert record["relaxation_parameters"] == 32 * 16 * 576


def test_another_plan_over_a_recursive_model_starts_from_its_base(inspect, saved_model):
    record = inspect(saved_model, "--recursions", "2")
    assert (record["sharing"], record["layout"], record["relaxation_parameters"]) == ("cycle", "15", 0)
    other = inspect(saved_model, "--relax", "encoding")
    assert (other["layout"], other["relaxation_parameters"]) == ("1+10+1", 3 * 576)


def test_the_table_says_the_same_beside_the_base(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan = ["smollm-360m", "--sharing", "middle-cycle", "--recursions", "2", "--router", "expert", "--tokens", "20e9"]
    assert main(["inspect", *plan]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    facts = [line.split("  ") for line in lines]
    table = {cells[0]: cells[1:] for cells in ([c.strip() for c in f if c.strip()] for f in facts) if len(cells) == 3}
    assert table["layers with weights of their own"] == ["1+15+1", "32"]
    assert table["parameters without embeddings"] == ["167.2M (0.53x the base)", "314.6M"]
    assert table["of these, router"] == ["1.92K", "-"]
    assert table["forward FLOPs per token"] == ["563.3M (0.75x the base)", "755M"]
    assert table["KV cache per token"] == ["30.6 KiB (0.77x the base)", "40.0 KiB"]
    assert table["sequences that fit"] == ["42", "32"]
    assert table["forward FLOPs for 20B tokens"] == ["1.13e+19", "1.51e+19"]
    assert "smollm-360m (llama), middle-cycle, 2 recursions, expert-choice router" in lines[0]


def test_the_table_names_the_relaxation(capsys):
    assert main(["inspect", "gemma-2b", "--recursions", "2", "--relax", "lora", "--rank", "q=8,ffn=32"]) == 0
    out = capsys.readouterr().out
    assert "lora rank 8 to 32" in out
    assert "of these, relaxation" in out
    assert "of these, router" not in out


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("20e9", 20 * 10**9),
        ("20B", 20 * 10**9),
        ("300M", 300 * 10**6),
        ("1.5T", 1_500_000_000_000),
        ("0.1b", 10**8),
        ("12k", 12_000),
        ("7", 7),
        ("1_000", 1000),
    ],
)
def test_tokens_are_read_exactly(text, tokens):
    assert parse_count(text, "--tokens") == tokens


@pytest.mark.parametrize("text", ["", "B", "twenty", "1.5", "0", "-3B", "nan", "inf", "1e99", "0.0000001K", "20BB"])
def test_tokens_that_are_no_whole_number(text):
    with pytest.raises(OptionError, match="--tokens must be an integer between 1 and 1e18"):
        parse_count(text, "--tokens")


def test_a_mistyped_preset_names_the_nearest(mistake):
    line = mistake("smolm-360m")
    assert "'smolm-360m' (did you mean 'smollm-360m'?)" in line


def test_a_mistyped_sharing_names_the_nearest(mistake):
    line = mistake("smollm-360m", "--sharing", "midle-cycle", "--recursions", "2")
    assert "invalid --sharing 'midle-cycle' (did you mean 'middle-cycle'?)" in line


def test_layers_that_do_not_divide_name_the_counts_that_do(mistake):
    line = mistake("smollm-360m", "--recursions", "3")
    assert "3 recursions do not divide 32 layers; these do: 1, 2, 4, 8, 16, 32." in line
    assert "--resize (model.resize in a recipe) adds 1 (11 looped 3 times, 33 layers in all)" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recursions", "0"], "recursions must be >= 1, got 0"),
        (["--recursions", "3", "--resize", "shrink"], "invalid --resize 'shrink'; choose from add, drop"),
        (["--resize"], "--resize requires --sharing or --recursions"),
        (["--recursions", "2", "--relax", "lorra"], "invalid --relax 'lorra' (did you mean 'lora'?)"),
        (["--recursions", "2", "--rank", "8"], "rank requires a lora or dora relaxation"),
        (["--recursions", "2", "--relax", "prefix", "--rank", "8"], "rank requires a lora or dora relaxation"),
        (["--recursions", "2", "--relax", "lora", "--rank", "big"], "cannot read 'big' as a rank"),
        (["--recursions", "2", "--relax", "lora", "--rank", "0"], "must be >= 1, got 0"),
        (["--recursions", "2", "--prefix-length", "8"], "prefix-length requires a prefix relaxation"),
        (["--recursions", "2", "--relax", "lora", "--prefix-length", "8"], "prefix-length requires a prefix relaxation"),
        (["--recursions", "2", "--relax", "prefix", "--prefix-length", "0"], "prefix requires prefix_length >= 1, got 0"),
        (["--sharing", "sequence", "--recursions", "2", "--relax", "encoding"], "loops as a whole"),
        (["--sharing", "sequence", "--recursions", "2", "--router", "expert"], "a router requires a looped core"),
        (["--recursions", "2", "--router", "exprt"], "invalid --router 'exprt' (did you mean 'expert'?)"),
        (["--recursions", "2", "--kv", "shared"], "invalid --kv 'shared' (did you mean 'share'?)"),
        (["--router", "expert"], "--router requires shared layers: --recursions 2 or more"),
        (["--kv", "share"], "--kv share requires shared layers: --recursions 2 or more"),
        (["--relax", "lora"], "lora relaxes a tie, but with one recursion nothing is tied"),
        (["--tokens", "many"], "--tokens must be an integer"),
        (["--context", "0"], "must be >= 1, got 0"),
    ],
)
def test_a_mistake_is_one_line(mistake, options, message):
    assert message in mistake("smollm-360m", *options)


def test_a_number_that_is_none_is_a_usage_error(mistake):
    assert "--recursions must be an integer, got 'two'" in mistake("smollm-360m", "--recursions", "two")


def test_a_preset_needs_neither_torch_nor_transformers():
    script = (
        "import sys; sys.argv = ['fathomlm', 'inspect', 'smollm-360m', '--recursions', '2', '--json']\n"
        "from fathomlm.cli.main import main\n"
        "code = main()\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert json.loads(done.stdout)["layout"] == "16"


def test_linears_only_leaves_out_the_offsets(inspect):
    whole = inspect("gemma-2b", "--recursions", "2", "--relax", "lora")
    strict = inspect("gemma-2b", "--recursions", "2", "--relax", "lora", "--linears-only")
    assert whole["relaxation_parameters"] - strict["relaxation_parameters"] == 18 * 2 * 2048
    assert strict["relaxation"]["vectors"] is False


def test_sharing_alone_means_two_recursions_as_in_convert(inspect):
    assert inspect("smollm-360m", "--sharing", "sequence")["recursions"] == 2


def test_a_mistyped_option_names_the_nearest(mistake):
    assert "unknown option '--recursionz' (did you mean '--recursions'?)" in mistake("smollm-360m", "--recursionz", "3")


def test_dropped_layers_are_counted_against_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2-135m", "--drop", "8", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["unrolled_layers"]) == ("22", 22)
    assert record["relative_flops"] == pytest.approx(22 / 30, abs=0.001)
    assert record["relative_kv"] == pytest.approx(22 / 30)


@pytest.mark.parametrize("budget", ["0.88", "0.91", "0.93"])
def test_biases_of_neurons_count_towards_a_budget(capsys: pytest.CaptureFixture[str], budget: str) -> None:
    assert main(["inspect", "pythia-2.8b", "--budget", budget, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    narrow = [each["options"].split() for each in found if "--neurons" in each["options"]]
    assert len(narrow) == 2
    total = {}
    for options in ([], *narrow):
        assert main(["inspect", "pythia-2.8b", *options, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        total[" ".join(options)] = record["non_embedding_parameters"] + record["embedding_parameters"]
    whole = total.pop("")
    assert max(total.values()) <= float(budget) * whole


def test_no_narrower_encoder_decoder_model_is_offered(capsys: pytest.CaptureFixture[str], mistake) -> None:
    """`convert` measures decoder-only models only."""
    assert main(["inspect", "t5-small", "--budget", "0.6", "--json"]) == 0
    assert not any("--neurons" in each["options"] for each in json.loads(capsys.readouterr().out)["candidates"])
    assert "neurons requires a decoder-only model" in mistake("t5-small", "--drop", "0", "--neurons", "8")


def test_a_budget_compares_plans_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2-135m", "--budget", "0.61", "--json"]) == 0
    found = {each["options"]: each for each in json.loads(capsys.readouterr().out)["candidates"]}
    assert max(each["bytes_share"] for each in found.values()) <= 0.61
    assert "--drop 15" in found, "one layer more would not fit"
    assert found["--drop 15"]["relative_kv"] == 0.5, "against the model as it is, as the table has it"
    assert 0.45 < found["--drop 15"]["relative_flops"] < 0.75
    assert found["--recursions 2"]["layout"] == "15"
    lora = next(options for options in found if "--recursions 3 --relax lora" in options)
    narrow = [options for options in found if "--neurons" in options]
    assert [options.split()[1] for options in narrow] == ["7", "0"]
    capsys.readouterr()
    both = [(lora, 1), *((options, NEURON_TILE) for options in narrow)]
    raised = [f"{options.rpartition(' ')[0]} {int(options.rpartition(' ')[2]) + by}" for options, by in both]
    for options, fits in (*((options, True) for options, _ in both), *((options, False) for options in raised)):
        assert main(["inspect", "smollm2-135m", *options.split(), "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        total = record["non_embedding_parameters"] + record["embedding_parameters"]
        assert (total <= 0.61 * 134_515_008) is fits
    assert main(["inspect", "smollm2-135m", "--budget", "0.61"]) == 0
    assert "15 layers" not in (said := capsys.readouterr().out)
    assert "drop 15" in said


def test_fewer_tokens_leave_more_of_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "smollm2-135m", "--vocab", "32768", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["non_embedding_parameters"], record["embedding_parameters"]) == (106_203_456, 32_768 * 576)
    found = {}
    for more in ((), ("--vocab", "32768")):
        assert main(["inspect", "smollm2-135m", "--budget", "0.6", *more, "--json"]) == 0
        found[more] = [each["options"] for each in json.loads(capsys.readouterr().out)["candidates"]]
    assert [options[0] for options in found.values()] == ["--drop 16", "--drop 13"]
    drop = ["--drop", "0", "--neurons", found[more][2].split()[-1], "--vocab", "32768"]
    assert main(["inspect", "smollm2-135m", *drop, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    left = 0.6 * 134_515_008 - record["non_embedding_parameters"] - record["embedding_parameters"]
    assert 0 <= left < NEURON_TILE * 3 * 576 * 30
    assert main(["inspect", "smollm2-135m", "--budget", "0.6", "--vocab", "32768"]) == 0
    assert "with 32,768 of 49,152 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--vocab", "49153"], "--vocab must be <= the model's vocabulary of 49,152, got 49153"),
        (["--vocab", "49153", "--budget", "0.6"], "--vocab must be <= the model's vocabulary of 49,152, got 49153"),
        (["--budget", "0.6", "--recursions", "2"], "--budget compares plans of its own"),
        (["--budget", "0.6", "--tokens", "20B"], "--budget compares plans of its own"),
        (["--budget", "0.1"], "no plan has 10% of the bytes: the embeddings alone are 21%"),
        (["--drop", "30"], "drop must be between 0 and 29"),
        (["--drop", "2", "--neurons", "8", "--recursions", "2"], "--neurons cannot be combined with"),
    ],
)
def test_budgets_and_drops_that_cannot_be(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["inspect", "smollm2-135m", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("sharing", [None, "middle-sequence"])
@pytest.mark.parametrize(("model", "budget"), [("smollm2-135m", "0.9"), ("qwen3-30b-a3b", "0.6"), ("gemma-7b", "0.9")])
def test_a_table_of_plans_breaks_no_option_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, budget: str, sharing: str | None
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["inspect", model, "--budget", budget, *(() if sharing is None else ("--sharing", sharing))]
    assert main([*words, "--json"]) == 0
    plans = [plan["options"] for plan in json.loads(capsys.readouterr().out)["candidates"]]
    assert any(int(plan.split()[-1]) > 99 for plan in plans if "--rank" in plan)
    assert main(words) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    for plan in plans:
        parts = [plan] if sharing is None else plan.replace(" --relax", "|--relax").split("|")
        assert all(any(line.strip().startswith(part) for line in lines) for part in parts), plan
