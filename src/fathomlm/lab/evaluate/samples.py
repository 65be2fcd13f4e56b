"""Rows of a generation task as prompts and references.

A prompt is a template over a row's fields. Files whose form is known need none: their fields say what is asked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fathomlm.errors import DataError, OptionError
from fathomlm.jsonfile import Fields
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
    return _behind(samples, worked_examples(samples, pool, form.shots))[:limit]


def _behind(samples: Sequence[Sample], examples: Sequence[str]) -> list[Sample]:
    return [dataclasses.replace(sample, prompt=text + sample.prompt) for sample, text in zip(samples, examples, strict=True)]


def _sample(row: Fields, template: str, form: PromptForm) -> Sample:
    prompt = _FIELD.sub(lambda found: row.text(found[1]), template)
    if not prompt.strip():
        raise DataError(f"{row.where}: the prompt is empty")
    source = prompt if form.source is None else row.text(form.source)
    return Sample(prompt=prompt, references=one_or_more(row, form.reference), where=row.where, source=source)
