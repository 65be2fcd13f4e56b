"""The options of `fathomlm eval`. Nothing here loads a tensor library: what they do is in the other files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fathomlm.cli.common import (
    SOURCE,
    ColumnOptions,
    DeviceOptions,
    ExitPackOptions,
    ForceOptions,
    JsonOptions,
    ModelOptions,
    SeedOptions,
    TextOptions,
)
from fathomlm.cli.decoding import DecodeOptions, DepthOptions, ReferenceOptions, ShippedExitOptions
from fathomlm.cli.first import check_file, check_model, check_new_file
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.engine.options import EngineOptions
from fathomlm.lab.common import PromptOptions
from fathomlm.lab.evaluate.judge_client import Endpoint
from fathomlm.options import like, option, section


@dataclass(frozen=True, kw_only=True)
class BatchOptions(JsonOptions):
    """How much is evaluated, and how much at once."""

    limit: int | None = option(None, ge=1, help="evaluate the first N examples, documents or rows only", default_text="all")
    batch_size: int = like(EngineOptions, "batch_size", 8, help="sequences per forward pass")


@dataclass(frozen=True, kw_only=True)
class ShotOptions:
    shots: int | None = option(None, ge=0, help="few-shot examples before each question")


@dataclass(frozen=True, kw_only=True)
class FieldOptions:
    """The fields of a row that are its prompt and its references, where the files' own names do not say so."""

    source: str | None = option(None, metavar="FIELD", help="field that is the prompt")
    prompt: str | None = option(
        None, metavar="TEMPLATE", help="prompt of several fields, such as '{document} In short:'; \\n is a new line"
    )
    references: str | None = option(None, metavar="FIELD", help="field with a reference, or a list of them")

    @property
    def template(self) -> str | None:
        return None if self.prompt is None else self.prompt.replace("\\n", "\n")


@dataclass(frozen=True, kw_only=True)
class EvaluatedOutputOptions(ExitPackOptions):
    """Which outputs of the model are evaluated."""

    exit: str | None = option(
        None, metavar="WHERE",
        help="exits to evaluate too: recursion, layer, all, or layers such as 4,8", default_text="the last output only",
    )  # fmt: skip
    max_depth: str | None = like(
        DepthOptions, "max_depth", metavar="N", default_text=None,
        help="looped models: at most N recursions; 'all' evaluates every number of them",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tasks(BatchOptions, ModelOptions):
    """Score how likely MODEL finds the answers of tasks such as lambada_openai, hellaswag or arc_easy. A task is read from a
    file (a .jsonl path, or its name with --data DIR), else by lm-evaluation-harness from the Hugging Face hub, which has
    thousands. Groups: thesis-rrt (LAMBADA, HellaSwag, PIQA, WinoGrande, ARC-e, ARC-c, OpenBookQA) and thesis-mor (LAMBADA,
    HellaSwag, PIQA, WinoGrande, ARC as one number, MMLU as continuation)."""

    tasks: tuple[str, ...] = option(comma=True, metavar="NAME,...", help="task and group names, or .jsonl files; repeatable")
    data: Path | None = option(None, metavar="DIR", help="read tasks from NAME.jsonl or NAME_test.jsonl.gz in DIR")
    shots: int | None = like(ShotOptions, "shots", default_text="the task's standard, none for those above")
    include: Path | None = option(None, metavar="DIR", help="directory of lm-evaluation-harness tasks (YAML) of your own")
    out: Path | None = option(
        None, metavar="FILE", first=check_new_file,
        help="write every example of local tasks with its scores, as JSON Lines",
    )  # fmt: skip
    batch_size: int = like(BatchOptions, "batch_size", 16)
    exit_options: EvaluatedOutputOptions = section(EvaluatedOutputOptions, "outputs")


@dataclass(frozen=True, kw_only=True)
class Perplexity(BatchOptions, TextOptions, ModelOptions):
    """Run text through MODEL in windows and report how well it is predicted: nats per token, perplexity, and bits per byte,
    which can be compared between tokenizers. A text file is one document, each row of JSON Lines another; a document begins
    with the model's begin-of-sequence token."""

    join: bool = option(False, help="join all documents with blank lines, as is usual for WikiText")
    context: int | None = option(None, ge=1, help="tokens per window", default_text="the model's context")
    stride: int | None = option(
        None, ge=1, help="new tokens per window; fewer give each more context and take longer", default_text="all that fit"
    )
    exit_options: EvaluatedOutputOptions = section(EvaluatedOutputOptions, "outputs")


@dataclass(frozen=True, kw_only=True)
class EvalGenerate(BatchOptions, ModelOptions, ReferenceOptions, FieldOptions):
    """Let MODEL complete a prompt for every row of FILE and compare the completion with the row's references: ROUGE-1/2/L,
    BLEU, SQuAD's F1 and exact match, or the number that a solution comes to. Quality, tokens per second and exit rate are
    shown together. Files with summaries, answers or translations are known by their fields; --source, --prompt and
    --references name others."""

    data: Path = option(metavar="FILE", first=check_file, help="JSON Lines (.jsonl, also .gz, .xz, .zst)")
    metric: str | None = option(
        None, metavar="NAME", help="rouge, bleu, squad or number", default_text="by the file's fields"
    )
    shots: int | None = like(ShotOptions, "shots", default_text="0; 5 for GSM8K")
    max_source_tokens: int | None = option(None, ge=1, help="truncate prompts to N tokens", default_text="the context")
    out: Path | None = option(
        None, metavar="FILE", first=check_new_file, help="write prompts, completions and references, as JSON Lines"
    )
    batch_size: int = like(BatchOptions, "batch_size", 1)
    sampling: Sampling = section(Sampling, "sampling", max_new_tokens=64)
    depth: DepthOptions = section(DepthOptions, "depth")
    decoding: DecodeOptions = section(DecodeOptions, "early exit", "how far down a model without a router each token goes")


QUALITIES = {
    "agreement": "agreement with the full model (fraction of tokens)",
    "ppl": "perplexity",
    "rouge": "ROUGE-L (points)",
    "bleu": "BLEU (points)",
    "squad": "SQuAD F1 (points)",
    "number": "exact match (points)",
}
SWEPT = ("sweep", "threshold")


@dataclass(frozen=True, kw_only=True)
class Frontier(
    ForceOptions,
    JsonOptions,
    ColumnOptions,
    DeviceOptions,
    ReferenceOptions,
    ShippedExitOptions,
    PromptOptions,
    FieldOptions,
):
    """Run each MODEL at many depths and draw quality against cost: time per token, measured here by decoding, and FLOPs. The
    quality is agreement with the full model, perplexity, or a metric of completions with references. A threshold sweep marks
    the calibrated threshold. The area under the curve sums a sweep up."""

    models: tuple[str, ...] = option(
        positional=True, metavar="MODEL", first=check_model, help=f"{SOURCE}; several on one picture"
    )
    data: Path = option(metavar="FILE", first=check_file, help="text or JSON Lines; with references for rouge and others")
    sweep: Literal["threshold", "depth", "exit-layer"] = option(help="what is varied; depth is the number of recursions")
    quality: str = option("agreement", choices=tuple(QUALITIES), help="what is measured")
    max_new_tokens: int = like(Sampling, "max_new_tokens", 32, ge=2)
    repeats: int = option(2, ge=1, help="how often each prompt is timed; the fastest counts")
    exit_layer: str | None = like(
        Exiting, "exit_layers", default_text="the model's own, or all",
        help="threshold: the exit; exit-layer: recursion, layer, or layers such as 4,8",
    )  # fmt: skip
    thresholds: tuple[float, ...] | None = option(
        None, ge=0, le=1, metavar="T,...", default_text="0,0.1,...,1", requires=SWEPT, help="threshold: which to try"
    )
    mode: str | None = like(
        Exiting, "mode", None, choices=("parallel", "state-copy", "speculative"), default_text="parallel",
        requires=SWEPT, help="threshold: what happens at an exit",
    )  # fmt: skip
    min_exit_layer: int | None = like(
        Exiting, "min_exit_layer", help="state-copy: every layer from N on is an exit", requires=SWEPT
    )
    confidence: str | None = like(Exiting, "confidence", requires=SWEPT)
    decay: float | None = like(Exiting, "decay", requires=SWEPT)
    out: Path = option(Path("analysis/frontier"), metavar="DIR", help="directory to write")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What the judge is asked."""

    ask: Literal["likert", "pairwise", "both"] | None = option(
        None, help="which questions", default_text="likert, and pairwise where there are two systems"
    )
    dimensions: tuple[str, ...] = option(
        (), comma=True, metavar="NAME,...", help="what Likert scores are given for",
        default_text="relevance,informativeness,fluency,coherence",
    )  # fmt: skip
    likert_template: Path | None = option(
        None, metavar="FILE", help="another prompt, with {source}, {text}, {dimensions}, {form}"
    )
    pairwise_template: Path | None = option(
        None, metavar="FILE", help="another prompt, with {source}, {text_0} and {text_1}"
    )


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """How many questions are asked at once, and where answers are kept."""

    concurrency: int = option(4, ge=1, help="concurrent requests")
    answers: Path | None = option(
        None,
        metavar="FILE",
        help="file to store answers in",
        default_text="analysis/judge-NAME.jsonl, by the first file's name",
    )
    again: bool = option(False, help="ask again where the stored answer could not be parsed")


@dataclass(frozen=True, kw_only=True)
class Judge(SeedOptions, JsonOptions):
    """Let a language model judge generated text, as the thesis does for summaries: points from 1 to 5 for relevance,
    informativeness, fluency and coherence, and of two systems which is better, in both orders. FILE is what `fathomlm eval
    generate --out` writes, or JSON Lines with source and output; give two files, or one with output_a and output_b, to
    compare. Answers are kept as they come, and the same command again asks only for what is missing. The exit code is 1
    where questions got no answer."""

    files: tuple[Path, ...] = option(
        positional=True, metavar="FILE", help="one or two JSON Lines files (.jsonl, also .gz, .xz, .zst)"
    )
    source: str | None = option(None, metavar="FIELD", help="field with the prompt", default_text="source, else prompt")
    output: tuple[str, ...] = option((), metavar="FIELD", help="field with the completion; repeat for two systems")
    names: tuple[str, ...] = option(
        (), comma=True, metavar="NAME,NAME", help="names of the systems", default_text="those of the files or fields"
    )
    limit: int | None = like(BatchOptions, "limit", help="judge the first N rows only")
    draw: int | None = option(None, ge=1, help="judge N rows at random; the thesis: 100")
    questions: QuestionOptions = section(QuestionOptions, "questions")
    endpoint: Endpoint = section(Endpoint, "judge")
    asking: AskOptions = section(AskOptions, "answers")
