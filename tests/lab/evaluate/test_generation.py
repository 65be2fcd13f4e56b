"""Generation tasks: prompts from rows, texts in any way of decoding, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathomlm.decode.exiting import Exiting
from fathomlm.decode.full import generate
from fathomlm.decode.generation import ExitStatistics, Generation
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import ThresholdEstimator, ThresholdOptions
from fathomlm.errors import DataError, OptionError
from fathomlm.lab.evaluate.generation import CompletedSamples, complete_samples, cut_prompt, latency, report
from fathomlm.lab.evaluate.samples import FORMS, PromptForm, Sample, choose_form, read_samples, squad
from jsonl import write_jsonl
from lab.evaluate.evaluate_models import model_of

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS: dict[str, dict[str, Any]] = {
    "question answering": {"id": "1", "context": "It rains.", "question": "Does it?", "answers": ["yes", "it does"]},
    "dialogue": {"id": "1", "dialogue": "A: hi", "summaries": ["a greeting"], "topics": ["hi"]},
    "document": {"id": "1", "title": "T", "document": "Long.", "summaries": ["short"]},
    "translation": {"id": 1, "de": "Ein Hund", "en": "A dog"},
    "sums": {"id": 1, "question": "1+1?", "answer": "two\n#### 2"},
    "source": {"source": "say", "references": "so"},
}  # fmt: skip
NONE: dict[str, Any] = {"source": None, "prompt": None, "reference": None, "metric": None, "shots": None}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    return write_jsonl(path, rows)


def prompts(*texts: str) -> list[Sample]:
    return [Sample(prompt=text, references=("fathom",), where="here", source=text) for text in texts]


def generation(tokens: int, seconds: float, **more: Any) -> Generation:
    return Generation(
        prompt_tokens=(1,),
        tokens=(5,) * tokens,
        text="x",
        finish="length",
        prefill_seconds=0.5,
        decode_seconds=seconds,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "prompt", "references"),
    [
        ("question answering", "It rains.\nQuestion: Does it?\nAnswer:", ("yes", "it does")),
        ("dialogue", "A: hi\n\nSummary:", ("a greeting",)),
        ("document", "Long.\n\nSummary:", ("short",)),
        ("translation", "German: Ein Hund\nEnglish:", ("A dog",)),
        ("sums", "Question: 1+1?\nAnswer:", ("two\n#### 2",)),
    ],
)
def test_known_forms_need_no_options(name: str, prompt: str, references: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS[name])
    form = choose_form(path, **NONE)
    assert form == FORMS[name]
    (sample,) = read_samples(path, choose_form(path, **{**NONE, "shots": 0}))
    assert (sample.prompt, sample.references) == (prompt, references)


def test_an_encoder_reads_the_source_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS["document"])
    (sample,) = read_samples(path, choose_form(path, **NONE), alone=True)
    assert sample.prompt == "Long."


def test_fields_and_prompts_may_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS["document"])
    form = choose_form(path, **{**NONE, "source": "title", "metric": "bleu"})
    assert form == PromptForm(prompt="{title}", source="title", reference="summaries", metric="bleu")
    form = choose_form(path, **{**NONE, "prompt": "{title}: {document} {not a field}", "reference": "id"})
    assert form.metric == "rouge"
    assert [sample.prompt for sample in read_samples(path, form)] == ["T: Long. {not a field}"]
    assert read_samples(path, form)[0].references == ("1",)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"a": "x", "b": "y"}, {}, "has the fields a, b; set --source .or --prompt. and --references"),
        ({"a": "x", "b": "y"}, {"source": "a"}, "and --references"),
        ({"a": "x", "b": "y"}, {"source": "a", "reference": "b"}, "set --metric"),
        (ROWS["source"], {}, "set --metric"),
        (ROWS["document"], {"source": "document", "prompt": "{document}"}, "give one of them"),
        (ROWS["document"], {"prompt": "summarise"}, r"names no field of a row, such as \{id\}"),
    ],
)
def test_what_is_not_said_is_asked_for(row: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        choose_form(write(tmp_path / "x.jsonl", row), **{**NONE, **options})


def test_rows_that_lack_something_say_where(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", ROWS["document"], {"document": " ", "summaries": ["s"]}, {"dokument": "d"})
    form = choose_form(path, **NONE)
    with pytest.raises(DataError, match=r"x.jsonl line 3 is missing document \(did you mean 'dokument'\?\)"):
        read_samples(path, form)
    bare = choose_form(path, **{**NONE, "source": "document"})
    with pytest.raises(DataError, match="line 2: the prompt is empty"):
        read_samples(path, bare, limit=2)


def test_worked_examples_have_their_answers(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(7)]
    path = write(tmp_path / "sums_test.jsonl", *rows)
    (sample,) = read_samples(path, choose_form(path, **NONE), limit=1)
    assert sample.prompt.count("Answer: ####") == 5
    assert sample.prompt.endswith("\n\nQuestion: 0+0?\nAnswer:")
    assert "0+0?\nAnswer: #" not in sample.prompt


def test_long_prompts_are_cut_where_it_hurts_least() -> None:
    model = model_of("plain")
    assert cut_prompt(model, [1, 2, 3], 3) == [1, 2, 3]
    assert cut_prompt(model, [1, 2, 3, 4], 2) == [3, 4]
    assert cut_prompt(model, [256, 1, 2, 3], 3) == [256, 2, 3]
    written = complete_samples(model, prompts("ab" * 60, "ab"), Sampling(max_new_tokens=8))
    assert written.cut == 1
    assert [len(result.prompt_tokens) for result in written.results] == [88, 2]
    limited = complete_samples(model, prompts("ab" * 60), Sampling(max_new_tokens=8), most_source=10)
    assert limited.results[0].prompt_tokens == tuple(b"ab" * 5)
    with pytest.raises(OptionError, match="leaves no room for a prompt in a context of 96"):
        complete_samples(model, prompts("a"), Sampling(max_new_tokens=96))


@pytest.mark.parametrize("mode", ["full", "static", "state-copy", "parallel", "speculative", "oracle"])
def test_texts_are_those_of_generate_in_every_mode(mode: str) -> None:
    model = model_of("plain")
    threshold = {"threshold": 0.2} if mode in ("state-copy", "parallel", "speculative") else {}
    exiting = None if mode == "full" else Exiting(mode=mode, exit_layers=(3,), **threshold)  # type: ignore[arg-type]
    samples = prompts("the water", "a", "deep as six fathoms")
    sampling = Sampling(max_new_tokens=9)
    told: list[tuple[int, int]] = []
    written = complete_samples(model, samples, sampling, batch=2, exiting=exiting, on_done=lambda *now: told.append(now))
    alone = [generate(model, [sample.prompt], sampling, exiting=exiting)[0] for sample in samples]
    assert [result.tokens for result in written.results] == [result.tokens for result in alone]
    assert told == [(2, 3), (3, 3)]
    assert [len(group) for group in written.batches] == [2, 1]
    found = report(written, samples, squad)
    layers = [layer for result in alone for layer in result.exit_layers or ()]
    if mode == "full":
        assert found["exits"] is None
    else:
        assert (found["exits"]["mode"], found["exits"]["oracle"]) == (mode, mode == "oracle")
        assert found["exits"]["exit_rate"] == layers.count(3) / len(layers)
        assert found["exits"]["mean_exit_layer"] == sum(layers) / len(layers)
    assert found["latency"]["tokens"] == sum(len(result.tokens) for result in alone)
    assert found["texts"] == 3


def test_an_adaptive_threshold_learns_from_the_first_texts_for_the_later() -> None:
    model = model_of("plain")
    learning = ThresholdEstimator(ThresholdOptions(rule="thesis", calibrating_sequences=3, initial=0.9))
    exiting = Exiting(mode="parallel", exit_layers=(3,), threshold=learning)
    samples = prompts("the water", "six fathoms", "a line")
    found = report(complete_samples(model, samples, Sampling(max_new_tokens=40), exiting=exiting), samples, squad)
    assert found["exits"]["first_threshold"] == 0.9  # the warm-up taught it nothing
    assert learning.sequences == 3
    assert found["exits"]["last_threshold"] != 0.9


def test_a_router_s_depths_are_said() -> None:
    model, samples = model_of("token"), prompts("the water")
    written = complete_samples(model, samples, Sampling(max_new_tokens=6))
    depths = written.results[0].depths
    assert depths is not None
    assert report(written, samples, squad)["mean_depth"] == sum(depths) / len(depths)


def test_latency_by_hand() -> None:
    first, second, third = generation(11, 2.0), generation(6, 1.0), generation(1, 0.0)
    written = CompletedSamples(results=(first, second, third), batches=((first, second), (third,)), cut=0, seconds=4.0)
    assert latency(written) == {
        "tokens": 18,
        "seconds": 4.0,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
        "tokens_per_second": 7.5,
        "ms_per_token": 200.0,
        "tokens_per_text": 6.0,
    }
    alone = CompletedSamples(results=(third,), batches=((third,),), cut=0, seconds=1.0)
    assert (latency(alone)["tokens_per_second"], latency(alone)["ms_per_token"]) == (0.0, 0.0)


def test_drafts_are_counted_over_all_texts() -> None:
    def exits(drafted: int, accepted: int) -> ExitStatistics:
        return ExitStatistics(mode="speculative", layers=6, threshold=0.5, layers_run=9, drafted=drafted, accepted=accepted)

    rows = tuple(generation(4, 1.0, exit_layers=(3, 3, 6, 6), exits=exits(*counts)) for counts in ((4, 2), (6, 6)))
    found = report(CompletedSamples(results=rows, batches=(rows,), cut=0, seconds=1.0), prompts("a", "b"), squad)
    assert found["exits"]["drafts_kept"] == 0.8
    assert found["exits"]["exit_rate"] == 0.5
