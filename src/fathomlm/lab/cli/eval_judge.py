"""`fathomlm eval judge FILE [FILE]`: texts judged by a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathomlm.cli.progress import layer_bar
from fathomlm.errors import DataError, OptionError
from fathomlm.jsonfile import parse
from fathomlm.lab.cli.eval_options import check_least, print_record
from fathomlm.lab.tables import print_table

if TYPE_CHECKING:
    from fathomlm.lab.evaluate.judge.client import Endpoint
    from fathomlm.lab.evaluate.judge.prompts import Templates
    from fathomlm.lab.evaluate.judge.questions import Answers, Kind
    from fathomlm.lab.evaluate.judge.texts import JudgedTexts

HELP = "texts judged by another model: Likert scores and pairwise wins, over any OpenAI-compatible endpoint"
DESCRIPTION = (
    "Asks a language model what texts are worth, as the thesis does for summaries: points from 1 to 5 for relevance, "
    "informativeness, fluency and coherence, and of two systems which is better, in both orders. FILE is what `fathomlm "
    "eval generate --out` writes, or JSON lines with source and output; give two files, or one with output_a and output_b, "
    "to compare. Answers are kept as they come, and the same command again asks only for what is missing. The exit code "
    "is 1 where questions got no answer."
)

_COUNTS = ("read", "unreadable", "failed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", metavar="FILE", type=Path, nargs="+", help="one or two of JSON lines (.jsonl, also .gz, .xz, .zst)")
    add("--source", metavar="FIELD", help="the field that was read (default: source, else prompt)")
    add("--output", metavar="FIELD", action="append", default=[], help="the field that was written; twice for two systems")
    add("--names", metavar="NAME,NAME", help="what to call the systems (default: the files' or fields' names)")
    add("--limit", metavar="N", type=int, help="take the first N rows only (default: all)")
    add("--draw", metavar="N", type=int, help="take N rows at random (the thesis: 100)")
    add("--seed", metavar="N", type=int, default=0, help="which ones --draw takes (default: 0)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    _add_questions(parser)
    _add_endpoint(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is asked").add_argument
    kinds = "likert, pairwise or both (default: likert, and pairwise where there are two systems)"
    add("--ask", metavar="KIND", choices=("likert", "pairwise", "both"), help=kinds)
    dimensions = "comma list (default: relevance,informativeness,fluency,coherence)"
    add("--dimensions", metavar="NAME,...", help=dimensions)
    add("--likert-template", metavar="FILE", type=Path, help="another text, with {source}, {text}, {dimensions}, {form}")
    add("--pairwise-template", metavar="FILE", type=Path, help="another text, with {source}, {text_0} and {text_1}")


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who is asked").add_argument
    add("--base-url", metavar="URL", required=True, help="an OpenAI-compatible API, such as http://localhost:8000/v1")
    add("--model", metavar="NAME", required=True, help="what the endpoint calls the judge")
    key = "the environment variable that holds the key; keys are never taken from the command line"
    add("--api-key-env", metavar="NAME", help=key)
    add("--max-tokens", metavar="N", type=int, default=128, help="new tokens of an answer (default: 128)")
    more = "further fields of a request; null leaves one out, as in '{\"max_tokens\": null}'"
    add("--body", metavar="JSON", help=more)
    add("--concurrency", metavar="N", type=int, default=4, help="questions in flight (default: 4)")
    add("--retries", metavar="N", type=int, default=5, help="tries after one that failed, with growing pauses (default: 5)")
    add("--timeout", metavar="S", type=float, default=120.0, help="seconds for one try (default: 120)")
    kept = "where answers are kept (default: analysis/judge-NAME.jsonl, by the first file's name)"
    add("--answers", metavar="FILE", type=Path, help=kept)
    add("--again", action="store_true", help="ask once more where the kept answer could not be read")


def run(args: argparse.Namespace) -> int:
    check_least(args, "limit", "draw", "concurrency", "max_tokens")

    from fathomlm.lab.evaluate.judge.questions import AnswerFile, ask_all, questions
    from fathomlm.lab.evaluate.judge.tally import is_unreadable
    from fathomlm.lab.evaluate.tasks import stem

    templates, endpoint = _templates(args), _endpoint(args)
    material = _material(args)
    kinds = _kinds(args, len(material.systems))
    path = args.answers or Path("analysis") / f"judge-{stem(args.files[0])}.jsonl"
    begun = time.perf_counter()
    with AnswerFile(path) as answers, layer_bar("asking", unit="questions") as tick:
        asked = ask_all(
            questions(material, templates, kinds),
            endpoint,
            answers,
            concurrency=args.concurrency,
            again=(lambda question, reply: is_unreadable(question, reply, templates.dimensions)) if args.again else None,
            on_done=tick,
        )
    record = _record(args, material, kinds, templates, asked) | {
        "answers": str(path),
        "seconds": time.perf_counter() - begun,
    }
    _warn(record, asked)
    if args.json:
        print_record(record)
    else:
        _print(record)
    return 1 if asked.failed else 0


def _material(args: argparse.Namespace) -> JudgedTexts:
    from fathomlm.lab.evaluate.judge.texts import read_texts

    return read_texts(
        args.files,
        source=args.source,
        outputs=args.output,
        names=_words(args.names),
        limit=args.limit,
        draw=args.draw,
        seed=args.seed,
    )


def _kinds(args: argparse.Namespace, systems: int) -> tuple[Kind, ...]:
    if args.ask in ("pairwise", "both") and systems == 1:
        raise OptionError(f"--ask {args.ask} compares two systems; give a second file, or a file with output_a and output_b")
    if args.ask in ("likert", "pairwise"):
        return (args.ask,)
    return ("likert", "pairwise") if systems == 2 else ("likert",)


def _templates(args: argparse.Namespace) -> Templates:
    from fathomlm.lab.evaluate.judge.prompts import Templates

    given: dict[str, Any] = {}
    if args.dimensions is not None:
        given["dimensions"] = _words(args.dimensions)
    for name in ("likert", "pairwise"):
        path = getattr(args, f"{name}_template")
        if path is not None:
            given[name] = _text(path)
    return Templates(**given)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from error


def _endpoint(args: argparse.Namespace) -> Endpoint:
    from fathomlm.lab.evaluate.judge.client import Endpoint

    return Endpoint(
        base_url=args.base_url,
        model=args.model,
        key=_key(args.api_key_env),
        timeout=args.timeout,
        retries=args.retries,
        max_tokens=args.max_tokens,
        body=_body(args.body),
    )


def _key(name: str | None) -> str | None:
    """What is wrong is said without the word that was given: it may be the key itself."""
    if name is None:
        return None
    if re.fullmatch(r"[A-Za-z_]\w*", name) is None:
        raise OptionError("--api-key-env takes the name of an environment variable, not a key")
    if name not in os.environ:
        raise OptionError("the environment variable that --api-key-env names is not set")
    return os.environ[name].strip()


def _body(text: str | None) -> dict[str, Any]:
    found = parse(text or "{}", "--body", error=OptionError)
    if not isinstance(found, dict) or {"messages", "model", "stream"} & found.keys():
        raise OptionError("--body takes a JSON object of further fields: not messages, model or stream")
    return found


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _record(
    args: argparse.Namespace, material: JudgedTexts, kinds: tuple[Kind, ...], templates: Templates, asked: Answers
) -> dict[str, Any]:
    from fathomlm import __version__
    from fathomlm.lab.evaluate.judge.tally import likert, pairwise

    return {
        "kind": "judge",
        "judge": args.model,
        "base_url": args.base_url,
        "version": __version__,
        "data": [str(path) for path in args.files],
        "systems": list(material.systems),
        "rows": len(material.rows),
        "asked": len(asked.replies) + len(asked.failed) - asked.kept,
        "kept": asked.kept,
        "failed": len(asked.failed),
        "likert": likert(asked, material.systems, templates.dimensions) if "likert" in kinds else None,
        "pairwise": pairwise(asked, material.systems) if "pairwise" in kinds else None,
    }


def _warn(record: dict[str, Any], asked: Answers) -> None:
    counted = [*(record["likert"]["systems"].values() if record["likert"] else ()), *filter(None, [record["pairwise"]])]
    unreadable, cut = (sum(each[name] for each in counted) for name in ("unreadable", "cut"))
    if unreadable:
        hint = f"; {cut} of them were cut off, so a larger --max-tokens may help" if cut else ""
        print(f"fathomlm: {unreadable} answers could not be read and are not counted{hint}", file=sys.stderr)
    if asked.failed:
        why = next(iter(asked.failed.values()))
        many = f"{len(asked.failed)} questions got no answer"
        print(f"fathomlm: {many}; the same command asks for them again. The first: {why}", file=sys.stderr)


def _print(record: dict[str, Any]) -> None:
    if record["likert"]:
        systems = record["likert"]["systems"]
        rows = [["points from 1 to 5", *systems]]
        rows += [
            [dimension, *(_score(each["scores"][dimension]) for each in systems.values())]
            for dimension in record["likert"]["dimensions"]
        ]
        rows += [[f"texts {what}", *(str(each[what]) for each in systems.values())] for what in _COUNTS]
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
                f"The text shown first was chosen in {place['first_chosen']:.1%} of the answers; always the first in "
                f"{place['always_first']} rows, always the second in {place['always_second']}."
            )


def _score(score: dict[str, Any]) -> str:
    if score["mean"] is None:
        return "-"
    return f"{score['mean']:.2f}" + ("" if score["stderr"] is None else f" ± {score['stderr']:.2f}")
