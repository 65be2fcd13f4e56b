"""What a row of a likelihood task asks: contexts, continuations and which is right.

The schema of a file is known by its fields. Prompts are those of lm-evaluation-harness for the same tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fathomlm.errors import DataError
from fathomlm.lab.evaluate.encoding import TextPair
from fathomlm.lab.evaluate.records import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question."""

    asked: tuple[TextPair, ...]
    """Context and continuation of each choice; a single one where a word is to be predicted."""
    gold: int
    """Which is right."""
    lengths: tuple[int, ...]
    """Bytes of each choice, by which its log-likelihood is divided for `acc_norm`."""
    preamble: str = ""
    """What stands once in front of everything, worked examples included."""
    subject: str | None = None
    """Worked examples are of the same."""

    @property
    def example(self) -> str:
        """The question with its right answer, as a worked example for another."""
        context, continuation = self.asked[self.gold]
        return context + continuation

    def behind(self, text: str) -> tuple[TextPair, ...]:
        """What is scored, with a text in front."""
        return tuple((self.preamble + text + context, continuation) for context, continuation in self.asked)


@dataclass(frozen=True, slots=True)
class Schema:
    """One form of rows."""

    fields: tuple[str, ...]
    """Those that it needs; it is recognised by them."""
    build: Callable[[Row, bool], Item]
    """`bare` leaves out the words Question and Answer."""
    word: bool = False
    """Whether a word is predicted, so that there is nothing to choose from."""
    same: bool = False
    """Whether all choices have the same continuation, so that there is nothing to normalise."""


def _word(row: Row, bare: bool) -> Item:
    target = row.text("target")
    return Item(asked=((row.text("context"), f" {target}"),), gold=0, lengths=(_bytes(target),))


def _options(row: Row, bare: bool) -> Item:
    contexts, continuation = _several(row, "context_options"), row.text("continuation")
    asked = tuple((context, f" {continuation.strip()}") for context in contexts)
    return Item(asked=asked, gold=row.index("gold", len(contexts)), lengths=(_bytes(continuation),) * len(contexts))


def _passage(row: Row, bare: bool) -> Item:
    return _chosen(row, f"{row.text('passage').strip()}\n{_question(row, bare)}")


def _subject(row: Row, bare: bool) -> Item:
    subject = row.text("subject").replace("_", " ")
    preamble = f"The following are questions (with answers) about {subject}.\n\n"
    return _chosen(row, _question(row, bare), preamble, subject)


def _plain_question(row: Row, bare: bool) -> Item:
    return _chosen(row, _question(row, bare))


def _continuation(row: Row, bare: bool) -> Item:
    return _chosen(row, row.text("context"))


SCHEMAS: dict[str, Schema] = {
    "word": Schema(("context", "target"), _word, word=True),
    "context options": Schema(("context_options", "continuation", "gold"), _options, same=True),
    "passage": Schema(("passage", "question", "choices", "gold"), _passage),
    "subject": Schema(("subject", "question", "choices", "gold"), _subject),
    "question": Schema(("question", "choices", "gold"), _plain_question),
    "continuation": Schema(("context", "choices", "gold"), _continuation),
}
"""In the order in which they are tried."""


def recognise(row: Row) -> Schema:
    """The schema of a file, by its first row."""
    for schema in SCHEMAS.values():
        if all(name in row.fields for name in schema.fields):
            return schema
    forms = "; ".join(", ".join(schema.fields) for schema in SCHEMAS.values())
    raise DataError(
        f"{row.where}: no task has the fields {', '.join(row.fields) or '(none)'}; known forms: {forms}. Texts to write are "
        "for `fathomlm eval generate`, plain text for `fathomlm eval ppl`"
    )


def build_items(rows: Iterable[Row], schema: Schema, *, bare: bool = False) -> list[Item]:
    return [schema.build(row, bare) for row in rows]


def _question(row: Row, bare: bool) -> str:
    question = row.text("question").strip()
    return question if bare else f"Question: {question}\nAnswer:"


def _chosen(row: Row, context: str, preamble: str = "", subject: str | None = None) -> Item:
    found = _several(row, "choices")
    return Item(
        asked=tuple((context, f" {choice}") for choice in found),
        gold=row.index("gold", len(found)),
        lengths=tuple(_bytes(choice) for choice in found),
        preamble=preamble,
        subject=subject,
    )


def _several(row: Row, name: str) -> tuple[str, ...]:
    found = row.texts(name)
    if len(found) < 2:
        raise DataError(f"{row.where}: '{name}' must have at least two choices, got {len(found)}")
    if not all(text.strip() for text in found):
        raise DataError(f"{row.where}: a choice in '{name}' is empty")
    return found


def _bytes(text: str) -> int:
    return max(1, len(text.encode("utf-8")))
