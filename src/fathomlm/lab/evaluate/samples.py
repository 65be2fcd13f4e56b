"""Rows of a generation task as prompts and references, and the quality of completions against these in points, from 0 to
100.

A prompt is a template over a row's fields. Files whose form is known need none: their fields say what is asked.

rouge    ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) as rouge-score counts them, with stemming; F-measures
bleu     BLEU (Papineni et al. 2002) of a whole corpus as sacrebleu counts it: its 13a tokenizer, case as it is
squad    exact match and F1 of SQuAD (Rajpurkar et al. 2016): words in common without case, punctuation and articles
number   whether a text comes to the right number, as in GSM8K (Cobbe et al. 2021): the one behind "####", or the last
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fathomlm.errors import DataError, OptionError, choices
from fathomlm.fields import Fields
from fathomlm.lab.evaluate.likelihood import worked_examples
from fathomlm.lab.evaluate.tasks import one_or_more, read_rows, shots_file

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptForm:
    """What becomes of a row."""

    prompt: str
    """Text with {field} where a row's field goes."""
    reference: str
    """The field with one reference, or a list of them."""
    source: str | None = None
    """The field that an encoder reads alone; for a decoder the prompt has the instruction."""
    metric: str | None = None
    stop: tuple[str, ...] = ()
    """Where a decoder's answer ends; an encoder-decoder ends by itself."""
    shots: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        return (*_FIELD.findall(self.prompt), self.reference)


FORMS: dict[str, PromptForm] = {
    "question answering": PromptForm(
        prompt="{context}\nQuestion: {question}\nAnswer:", reference="answers", metric="squad", stop=("\n",)
    ),
    "dialogue": PromptForm(prompt="{dialogue}\n\nSummary:", source="dialogue", reference="summaries", metric="rouge"),
    "document": PromptForm(prompt="{document}\n\nSummary:", source="document", reference="summaries", metric="rouge"),
    "translation": PromptForm(prompt="German: {de}\nEnglish:", source="de", reference="en", metric="bleu", stop=("\n",)),
    "sums": PromptForm(
        prompt="Question: {question}\nAnswer:", reference="answer", metric="number", stop=("\n\n", "Question:"), shots=5
    ),
    "source": PromptForm(prompt="{source}", source="source", reference="references"),
}
"""Known by their fields, in the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One text to write."""

    prompt: str
    references: tuple[str, ...]
    where: str
    source: str
    """What the text is about, without the words around it and without worked examples."""

    @property
    def example(self) -> str:
        """The prompt with its first reference, as a worked example for another."""
        return f"{self.prompt.rstrip()} {self.references[0].lstrip()}"

    @property
    def subject(self) -> None:
        """Any row may be an example for any other."""
        return


def choose_form(
    path: Path, *, source: str | None, prompt: str | None, reference: str | None, metric: str | None, shots: int | None
) -> PromptForm:
    """How a file is read: as it was asked for, and for the rest as its first row's fields say."""
    if source is not None and prompt is not None:
        raise OptionError("--source names the field that is the prompt, --prompt makes one of several; give one of them")
    (first,) = read_rows(path, limit=1)
    known = next((form for form in FORMS.values() if all(name in first for name in form.fields)), None)
    if known is None and (reference is None or (source is None and prompt is None)):
        raise OptionError(
            f"{path} has the fields {', '.join(first) or '(none)'}; set --source (or --prompt) and --references, "
            "the fields with the prompt and the expected completion"
        )
    given = prompt if source is None else f"{{{source}}}"
    base = known if given is None else PromptForm(prompt=given, source=source, reference="", metric=None)
    assert base is not None
    form = dataclasses.replace(
        base,
        reference=reference or (known.reference if known is not None else ""),
        metric=metric or (known.metric if known is not None else None),
        shots=base.shots if shots is None else shots,
    )
    if form.metric is None:
        raise OptionError("set --metric: rouge, bleu, squad or number")
    if not _FIELD.search(form.prompt):
        raise OptionError(f"--prompt names no field of a row, such as {{{next(iter(first), 'source')}}}")
    if form.shots < 0:
        raise OptionError(f"--shots must be >= 0, got {form.shots}")
    return form


def read_samples(path: Path, form: PromptForm, *, limit: int | None = None, alone: bool = False) -> list[Sample]:
    """The rows of a file as prompts, worked examples in front. `alone` is for encoders, which read the source by itself
    where the form has one."""
    if limit is not None and limit < 1:
        raise OptionError(f"--limit must be >= 1, got {limit}")
    template = f"{{{form.source}}}" if alone and form.source is not None else form.prompt
    other = shots_file(path) if form.shots else None
    rows = read_rows(path, limit if other is not None or not form.shots else None)
    samples = [_sample(row, template, form) for row in rows]
    pool = None if other is None else [_sample(row, template, form) for row in read_rows(other)]
    pairs = zip(samples, worked_examples(samples, pool, form.shots), strict=True)
    return [dataclasses.replace(sample, prompt=text + sample.prompt) for sample, text in pairs][:limit]


def _sample(row: Fields, template: str, form: PromptForm) -> Sample:
    prompt = _FIELD.sub(lambda found: row.text(found[1]), template)
    if not prompt.strip():
        raise DataError(f"{row.where}: the prompt is empty")
    source = prompt if form.source is None else row.text(form.source)
    return Sample(prompt=prompt, references=one_or_more(row, form.reference), where=row.where, source=source)


ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARK = "####"


class Metric(Protocol):
    """Completions, and for each at least one reference; the metric's scores by name."""

    def __call__(self, completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]: ...


def rouge(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over completions; of several references the best counts, for each kind separately."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    best = [scorer.score_multi(list(each), text) for text, each in zip(completions, references, strict=True)]
    return {kind: 100 * sum(score[kind].fmeasure for score in best) / len(best) for kind in ROUGES}


def bleu(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Completions may have different numbers of references."""
    import sacrebleu

    most = max(len(each) for each in references)
    streams = [[each[i] if i < len(each) else None for each in references] for i in range(most)]
    return {"bleu": float(sacrebleu.corpus_bleu(list(completions), streams).score)}


def squad(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Means over completions; of several answers the best counts, for each score separately."""
    exact = [max(exact_match(text, answer) for answer in each) for text, each in zip(completions, references, strict=True)]
    f1 = [max(word_f1(text, answer) for answer in each) for text, each in zip(completions, references, strict=True)]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}


def normalise(text: str) -> str:
    """In the order of SQuAD's own script: case, punctuation, articles, spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answer: str) -> float:
    return float(normalise(text) == normalise(answer))


def word_f1(text: str, answer: str) -> float:
    """Of words as often as they occur; two empty texts are alike, an empty and another are not."""
    mine, theirs = normalise(text).split(), normalise(answer).split()
    if not mine or not theirs:
        return float(mine == theirs)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * common / (len(mine) + len(theirs))


def number(completions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    right = [
        (found := last_number(text)) is not None and any(found == last_number(reference) for reference in each)
        for text, each in zip(completions, references, strict=True)
    ]
    return {"exact_match": 100 * sum(right) / len(right)}


def last_number(text: str) -> float | None:
    """The number behind the mark, else the last of all; None where there is none."""
    _, mark, behind = text.rpartition(_MARK)
    if mark and (found := _NUMBER.search(behind)):
        return _value(found.group())
    every = _NUMBER.findall(text)
    return _value(every[-1]) if every else None


def _value(word: str) -> float:
    return float(word.replace(",", ""))


METRICS: dict[str, Metric] = {"rouge": rouge, "bleu": bleu, "squad": squad, "number": number}
_PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu"}


def find_metric(name: str) -> Metric:
    """A metric that can be computed here; asked for before a model is loaded."""
    if name not in METRICS:
        raise OptionError(choices("metric", name, METRICS))
    if name in _PACKAGES:
        try:
            importlib.import_module(_PACKAGES[name])
        except ImportError as error:
            raise OptionError(
                f"the metric {name} requires the package {error.name}: pip install 'fathomlm[eval]'"
            ) from error
    return METRICS[name]
