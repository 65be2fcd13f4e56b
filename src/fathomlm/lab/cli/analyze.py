"""`fathomlm analyze KIND`: look into a model with text or at its weights, or into training runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fathomlm.checkpoints.tying import WEIGHTS_ONLY, InitOptions
from fathomlm.cli.common import (
    SOURCE,
    ExitPackOptions,
    ForceOptions,
    JsonOptions,
    ModelOptions,
    TextOptions,
    ThreadOptions,
    read_documents,
)
from fathomlm.cli.decoding import lift_exit_vocab
from fathomlm.cli.display import model_name
from fathomlm.cli.first import check_model
from fathomlm.cli.progress import progress_bar
from fathomlm.decode.exiting import Exiting
from fathomlm.decode.sampling import Sampling
from fathomlm.decode.threshold import ThresholdOptions
from fathomlm.depth.options import PlanOptions
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_common import PromptOptions
from fathomlm.lab.drawing import PlotOptions
from fathomlm.options import like, option, section

if TYPE_CHECKING:
    from fathomlm.lab.analyze.exits import DecodedSource
    from fathomlm.lab.analyze.report import About, RunsAbout
    from fathomlm.lab.analyze.token_rows import TokenRows
    from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

LONGEST_EXIT_ROW = 256
"""Every layer is asked at every token, which takes a while: rows are short enough for a bar to move."""
LONGEST_SOURCE = 512
"""Tokens of a document that an encoder reads, as `fathomlm calibrate` has it."""


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions(ForceOptions, JsonOptions):
    """What all kinds share: where they write, and how they answer."""

    kind: ClassVar[str]
    out: Path | None = option(None, metavar="DIR", help="directory to write", default_text="analysis/KIND-NAME")

    def directory(self, source: str) -> Path:
        """Where to write; refused now if it could not be written later."""
        from fathomlm.lab.analyze.report import check_directory
        from fathomlm.lab.drawing import check_matplotlib

        check_matplotlib()
        out = self.out or Path("analysis") / f"{self.kind}-{model_name(source)}"
        check_directory(out, self.kind, self.force)
        return out

    def answer(
        self,
        about: About | RunsAbout,
        summary: dict[str, Any],
        tables: Sequence[list[list[str]]],
        files: Sequence[Path],
    ) -> int:
        """A table or a record, and where the rest is."""
        if self.json:
            from fathomlm.train.report import strict

            record = {"kind": self.kind, **dataclasses.asdict(about), **summary, "files": [str(file) for file in files]}
            print(json.dumps(strict(record), ensure_ascii=False, allow_nan=False))
            return 0
        from fathomlm.lab.tables import print_table

        for table in tables:
            print_table(table)
        page = next(file for file in files if file.name == "index.html")
        print(f"report: {page}; numbers and pictures are in the same directory")
        return 0


@dataclass(frozen=True, kw_only=True)
class TextAnalysis(AnalysisOptions, ModelOptions, TextOptions):
    """What the kinds share that run text through a model."""

    data: tuple[str, ...] = like(
        TextOptions, "data",
        help="text (.txt, .md), JSON Lines (.jsonl, also .gz, .xz, .zst), or the validation split of a corpus; repeatable",
    )  # fmt: skip
    context: int | None = option(None, ge=1, help="tokens per row", default_text="the model's context, at most 1024")

    def about(self, model: FathomModel) -> About:
        from fathomlm import __version__
        from fathomlm.checkpoints.resolve import describe, dtype_name
        from fathomlm.lab.analyze.report import About

        return About(
            model=self.model,
            name=model_name(self.model),
            plan=describe(model),
            dtype=dtype_name(model),
            device=self.device,
            data=list(self.data) or ["--text"],
            version=__version__,
        )


@dataclass(frozen=True, kw_only=True)
class AnalyzeRouting(TextAnalysis):
    """Run text through a routed MODEL as in training (top-k) and as in inference (causal): metrics of both, router scores,
    compute, the loss at every maximum depth, whether depth is spent where it lowers the loss, which tokens go deep, and text
    colored by depth."""

    kind = "routing"
    rows: int = option(64, ge=1, help="max rows of text")
    samples: int = option(4, ge=1, help="rows whose beginning is shown as colored text")

    def run(self) -> int:
        out = self.directory(self.model)

        from fathomlm.checkpoints.resolve import architecture_of
        from fathomlm.lab.analyze import routing_report as report
        from fathomlm.lab.analyze.routing import check_routed, measure
        from fathomlm.lab.analyze.token_rows import find, read_rows, row_length

        places = find(self.data)
        check_routed(architecture_of(self.model)[1], self.model)
        model = self.load()
        context = row_length(model, self.context)
        rows = read_rows(places, model, context=context, rows=self.rows, column=self.column)
        with progress_bar("routing", unit="rows") as update:
            numbers = measure(model, rows, samples=self.samples, on_rows=update)
        about = self.about(model)
        files = report.write_routing(numbers, about, out, self.force)
        limits = [row[:2] + row[3:4] for row in report.scaling_table(numbers)]
        tables = [report.routing_table(numbers), report.flops_table(numbers), limits]
        tables += [report.gain_table(numbers), report.worth_table(numbers)]
        return self.answer(about, numbers.summary(), tables, files)


@dataclass(frozen=True, kw_only=True)
class KeysAndValues(TextAnalysis):
    """Run text through any MODEL and map hidden states, keys and values over its steps: their norms and how similar they
    are. Where recursions compute nearly the same keys and values, they could share them."""

    kind = "kv"
    data: tuple[str, ...] = like(TextAnalysis, "data", ())
    text: str | None = option(None, help="text to run instead of --data")
    tokens: int = option(2048, ge=2, help="run about N tokens")

    def run(self) -> int:
        if bool(self.data) == (self.text is not None):
            raise OptionError("give either --data FILE or --text TEXT")
        out = self.directory(self.model)

        from fathomlm.lab.analyze.kv import measure
        from fathomlm.lab.analyze.kv_report import kv_table, write_kv
        from fathomlm.lab.analyze.token_rows import LONGEST_ROW, find, read_rows, row_length, text_row

        places = find(self.data) if self.data else []
        model = self.load()
        context = row_length(model, self.context, most=min(LONGEST_ROW, self.tokens))
        if self.text is None:
            count = max(1, self.tokens // context)
            rows = read_rows(places, model, context=context, rows=count, column=self.column)
        else:
            rows = text_row(model, self.text, most=min(context, self.tokens))
        with progress_bar("steps", unit="rows") as update:
            numbers = measure(model, rows, on_rows=update)
        about = self.about(model)
        files = write_kv(numbers, about, out, self.force)
        return self.answer(about, numbers.summary(), [kv_table(numbers)], files)


@dataclass(frozen=True, kw_only=True)
class Exits(TextAnalysis, ExitPackOptions):
    """Run text through MODEL and treat every layer as an exit: agreement with the last layer, cosine similarity of the
    states, confidences by agreement with the fitted Beta densities. Then complete a few prompts and break down the time:
    layers, heads, confidences, cache, copied states. An encoder-decoder reads each document and is evaluated on its own
    completion."""

    kind = "exits"
    context: int | None = like(TextAnalysis, "context", default_text=f"the model's context, at most {LONGEST_EXIT_ROW}")
    tokens: int = option(1024, ge=2, help="evaluate about N tokens")
    exit_layers: tuple[int, ...] | None = like(Exiting, "exit_layers", default_text="the model's own, or some of the layers")
    confidence: str = like(Exiting, "confidence", "gap", default_text=None)
    rule: ThresholdOptions = section(ThresholdOptions, rule="thesis")
    prompts: int = like(PromptOptions, "prompts", 4, ge=0, help="documents to complete for the times; 0 skips them")
    max_new_tokens: int = like(Sampling, "max_new_tokens", 32, ge=2)

    def run(self) -> int:
        out = self.directory(self.model)

        from fathomlm.checkpoints.resolve import plan_of
        from fathomlm.lab.analyze.breakdown import measure_times
        from fathomlm.lab.analyze.exits import check_exits, measure
        from fathomlm.lab.analyze.exits_report import fit_table, layer_table, time_table, write_exits
        from fathomlm.lab.analyze.token_rows import find, read_rows, row_length
        from fathomlm.model.seq2seq import FathomForSeq2SeqLM

        places = find(self.data)
        exits = check_exits(plan_of(self.model, self.exits), self.exit_layers, self.confidence)
        model = self.load_any(exits=self.exits, any_base=self.any_base)
        lift_exit_vocab(model)
        rows: TokenRows | list[DecodedSource]
        if isinstance(model, FathomForSeq2SeqLM):
            rows = self._completions(model)
            prompts = [each.source for each in rows[: self.prompts]]
        else:
            context = row_length(model, self.context, most=min(LONGEST_EXIT_ROW, self.tokens))
            rows = read_rows(places, model, context=context, rows=max(1, self.tokens // context), column=self.column)
            room = model.architecture.context - self.max_new_tokens
            prompts = _prompts(rows.tokens_NT.tolist(), self.prompts, room) if self.prompts else []
        with progress_bar("layers", unit="rows") as update:
            numbers = measure(model, rows, layers=exits, confidence=self.confidence, rule=self.rule, on_rows=update)
        if prompts:
            threshold = numbers.exits[0].estimator.threshold
            with progress_bar("times", unit="prompts") as update:
                times = measure_times(
                    model, prompts, exits=exits, threshold=threshold, new_tokens=self.max_new_tokens, on_text=update
                )
            numbers = dataclasses.replace(numbers, breakdown=times)
        about = self.about(model)
        if self.exits is not None:
            about = dataclasses.replace(about, plan=f"{about.plan}, exits of {self.exits}")
        files = write_exits(numbers, about, out, self.force)
        tables = [layer_table(numbers), fit_table(numbers)]
        if numbers.breakdown is not None:
            tables.append(time_table(numbers.breakdown))
        return self.answer(about, numbers.summary(), tables, files)

    def _completions(self, model: FathomForSeq2SeqLM) -> list[DecodedSource]:
        """Of as many documents as about `--tokens` new tokens take."""
        from fathomlm.decode.prompts import encode_prompt
        from fathomlm.lab.analyze.exits import complete

        documents = read_documents(self.data, self.column, max(1, self.tokens // self.max_new_tokens))
        sources = [encode_prompt(model, text)[: self.context or LONGEST_SOURCE] for text in documents]
        with progress_bar("completions", unit="documents") as update:
            return complete(model, sources, self.max_new_tokens, on_text=update)


def _prompts(rows: list[list[int]], many: int, room: int, length: int = 32) -> list[list[int]]:
    """Beginnings of rows, or of their parts where there are fewer rows than prompts."""
    if room < 1:
        raise OptionError("--max-new-tokens leaves no room for a prompt in the model's context")
    size = min(length, room, len(rows[0]))
    pieces = [row[at : at + size] for row in rows for at in range(0, len(row) - size + 1, size)]
    step = max(1, len(pieces) // many)
    return pieces[::step][:many]


@dataclass(frozen=True, kw_only=True)
class AnalyzeWeights(AnalysisOptions, ThreadOptions):
    """Tie the layers of a plain MODEL on paper, as `convert` would, and analyze what each step loses: the singular values of
    the residuals that a LoRA or DoRA would start from. Shows for each linear and depth which rank captures how much, and
    what it costs. No text is needed, and nothing is converted."""

    kind = "weights"
    model: str = option(positional=True, help=SOURCE, first=check_model)
    init: tuple[str, ...] = like(
        InitOptions, "init", ("average", "stepwise"), comma=True, choices=WEIGHTS_ONLY, metavar="NAME,...",
        default_text=None, help="initializations of tied layers",
    )  # fmt: skip
    plan: PlanOptions = section(PlanOptions, "depth plan")

    def run(self) -> int:
        out = self.directory(self.model)

        from fathomlm import __version__
        from fathomlm.lab.analyze.report import About
        from fathomlm.lab.analyze.weights import check_inits, measure, open_plain
        from fathomlm.lab.analyze.weights_report import kind_table, rank_table, write_weights

        inits = check_inits(self.init)
        self.use_threads()
        base = open_plain(self.model)
        plan = self.plan.build_plan(base.architecture.layers)
        with progress_bar("spectra", unit="linears") as update:
            numbers = measure(base, plan, inits, on_linear=update)
        about = About(
            model=self.model,
            name=model_name(self.model),
            plan=f"{plan.layout} layers looped {plan.recursions} times ({plan.sharing})",
            dtype=str(base.dtype).removeprefix("torch."),
            device="cpu",
            data=[],
            version=__version__,
        )
        files = write_weights(numbers, about, out, self.force)
        return self.answer(about, numbers.summary(), [rank_table(numbers), kind_table(numbers)], files)


@dataclass(frozen=True, kw_only=True)
class Runs(AnalysisOptions):
    """Write a page about training runs: losses, validation, exits, learning rate, speed and gradient norms, with the final
    numbers. RUN is a run's directory, a directory of runs, or a metrics.jsonl. `fathomlm plot` draws one of them."""

    kind = "runs"
    runs: tuple[Path, ...] = option(positional=True, metavar="RUN", help="such as runs/*, runs, runs/tiny/metrics.jsonl")
    curves: PlotOptions = section(PlotOptions, skip=("metric",))

    def run(self) -> int:
        out = self.directory(str(self.runs[0]) if len(self.runs) == 1 else f"{len(self.runs)}-places")

        from fathomlm import __version__
        from fathomlm.lab.analyze.report import RunsAbout
        from fathomlm.lab.analyze.runs import read_runs, summarise
        from fathomlm.lab.analyze.runs_report import table_of, write_runs

        runs = read_runs(self.runs)
        summaries = [summarise(each) for each in runs]
        name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
        about = RunsAbout(name=name, runs=[str(path) for path in self.runs], x=self.curves.x, version=__version__)
        files = write_runs(runs, summaries, self.curves, about, out, self.force)
        table = table_of([dataclasses.replace(summary, exits={}) for summary in summaries])
        return self.answer(about, {"summaries": [dataclasses.asdict(summary) for summary in summaries]}, [table], files)
