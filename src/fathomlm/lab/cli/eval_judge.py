"""`fathomlm eval judge FILE [FILE]`: completions judged by a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fathomlm.cli.common import JsonOptions, SeedOptions, read_text
from fathomlm.cli.progress import progress_bar
from fathomlm.errors import OptionError
from fathomlm.lab.cli.eval_common import BatchOptions, answer
from fathomlm.lab.evaluate.judge.client import Endpoint
from fathomlm.lab.tables import print_table
from fathomlm.options import like, option, section

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.judge.outputs import JudgedOutputs
    from fathomlm.lab.evaluate.judge.prompts import Templates
    from fathomlm.lab.evaluate.judge.questions import Answers, Kind

_COUNTS = ("read", "unreadable", "failed")


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

    def run(self) -> int:
        from fathomlm.lab.evaluate.judge.questions import AnswerFile, ask_all, is_unreadable, questions
        from fathomlm.lab.evaluate.tasks import stem

        templates = _templates(self)
        material = _material(self)
        kinds = _kinds(self, len(material.systems))
        path = self.asking.answers or Path("analysis") / f"judge-{stem(self.files[0])}.jsonl"
        begun = time.perf_counter()
        with AnswerFile(path) as answers, progress_bar("asking", unit="questions") as update:
            outcome = ask_all(
                questions(material, templates, kinds),
                self.endpoint,
                answers,
                concurrency=self.asking.concurrency,
                again=(lambda question, reply: is_unreadable(question, reply, templates.dimensions))
                if self.asking.again
                else None,
                on_done=update,
            )
        record = _record(self, material, kinds, templates, outcome) | {
            "answers": str(path),
            "seconds": time.perf_counter() - begun,
        }
        _warn(record, outcome)
        answer(self, record, _print)
        return 1 if outcome.failed else 0


def _material(options: Judge) -> JudgedOutputs:
    from fathomlm.lab.evaluate.judge.outputs import read_outputs

    return read_outputs(
        options.files,
        source=options.source,
        outputs=options.output,
        names=options.names,
        limit=options.limit,
        draw=options.draw,
        seed=options.seed,
    )


def _kinds(options: Judge, systems: int) -> tuple[Kind, ...]:
    if options.questions.ask in ("pairwise", "both") and systems == 1:
        raise OptionError(
            f"--ask {options.questions.ask} compares two systems; give a second file, or a file with output_a and output_b"
        )
    if options.questions.ask in ("likert", "pairwise"):
        return (options.questions.ask,)
    return ("likert", "pairwise") if systems == 2 else ("likert",)


def _templates(options: Judge) -> Templates:
    from fathomlm.lab.evaluate.judge.prompts import Templates

    given: dict[str, Any] = {}
    if options.questions.dimensions:
        given["dimensions"] = options.questions.dimensions
    for name in ("likert", "pairwise"):
        path = getattr(options.questions, f"{name}_template")
        if path is not None:
            given[name] = read_text(path)
    return Templates(**given)


def _record(
    options: Judge, material: JudgedOutputs, kinds: tuple[Kind, ...], templates: Templates, outcome: Answers
) -> dict[str, Any]:
    from fathomlm import __version__
    from fathomlm.lab.evaluate.judge.questions import likert, pairwise

    return {
        "kind": "judge",
        "judge": options.endpoint.model,
        "base_url": options.endpoint.base_url,
        "version": __version__,
        "data": [str(path) for path in options.files],
        "systems": list(material.systems),
        "rows": len(material.rows),
        "asked": len(outcome.replies) + len(outcome.failed) - outcome.kept,
        "kept": outcome.kept,
        "failed": len(outcome.failed),
        "likert": likert(outcome, material.systems, templates.dimensions) if "likert" in kinds else None,
        "pairwise": pairwise(outcome, material.systems) if "pairwise" in kinds else None,
    }


def _warn(record: dict[str, Any], outcome: Answers) -> None:
    counted = [*(record["likert"]["systems"].values() if record["likert"] else ()), *filter(None, [record["pairwise"]])]
    unreadable, cut = (sum(each[name] for each in counted) for name in ("unreadable", "cut"))
    if unreadable:
        hint = f"; {cut} of them were cut off, so a larger --max-tokens may help" if cut else ""
        print(f"fathomlm: {unreadable} answers could not be read and are not counted{hint}", file=sys.stderr)
    if outcome.failed:
        why = next(iter(outcome.failed.values()))
        many = f"{len(outcome.failed)} questions got no answer"
        print(f"fathomlm: {many}; the same command asks for them again. The first: {why}", file=sys.stderr)


def _print(record: dict[str, Any]) -> None:
    if record["likert"]:
        systems = record["likert"]["systems"]
        rows = [["points from 1 to 5", *systems]]
        rows += [
            [dimension, *(_score(each["scores"][dimension]) for each in systems.values())]
            for dimension in record["likert"]["dimensions"]
        ]
        rows += [[f"completions {what}", *(str(each[what]) for each in systems.values())] for what in _COUNTS]
        print_table(rows)
    if (found := record["pairwise"]) is not None:
        place = found["position"]
        rows = [["wins, both orders agreeing", "rows"]]
        rows += [[name, str(wins)] for name, wins in found["wins"].items()]
        rows += [["tie", str(found["ties"])], ["not counted", str(found["rows"] - found["rows_counted"])]]
        print_table(rows)
        votes = ", ".join(f"{name} {many}" for name, many in found["votes"].items())
        print(f"Votes, each order by itself: {votes}.")
        if place["first_chosen"] is not None:
            print(
                f"The first completion was chosen in {place['first_chosen']:.1%} of the answers; always the first in "
                f"{place['always_first']} rows, always the second in {place['always_second']}."
            )


def _score(score: dict[str, Any]) -> str:
    if score["mean"] is None:
        return "-"
    return f"{score['mean']:.2f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.2f}")
