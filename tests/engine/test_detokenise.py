"""Text of many requests in turn: whole characters, ends at stop strings, and the tokens that the text is made of."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathomlm.decode.text import TextStream
from fathomlm.engine.detokenise import Detokeniser
from fathomlm.errors import OptionError

BROKEN = "\N{REPLACEMENT CHARACTER}"
HALF = "bÃ"
"""The letter b and the first byte of a character, by its byte-level name, in one token."""
TEXTS = ["plain words", "日本語 and 😀👩\u200d👩\u200d👧 mixed", "naïve café", "😀😀😀", "  spaces  ", "line\nline"]


@pytest.fixture(scope="module")
def bytes_only() -> Any:
    """A tokenizer without merges: each byte is a token, so an emoji is four. `HALF` no text makes use of."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)} | {HALF: len(alphabet) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def parts(tokens: list[int], rng: random.Random) -> list[list[int]]:
    """Cut anywhere, empty parts included: what a few ticks of the device bring."""
    cuts = sorted(rng.randrange(len(tokens) + 1) for _ in range(len(tokens) // 2))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


def test_an_emoji_is_shown_whole(bytes_only: Any) -> None:
    tokens = ids(bytes_only, "a😀b")
    assert len(tokens) == 6
    text = Detokeniser(bytes_only)
    assert [text.push([token]) for token in tokens] == ["a", "", "", "", "😀", "b"]
    text = Detokeniser(bytes_only)
    assert [text.push(tokens[:3]), text.push([]), text.push(tokens[3:])] == ["a", "", "😀b"]
    assert (text.finish(), text.taken, text.kept, text.stopped) == ("", 6, 6, False)


def test_an_unfinished_character_is_flushed(bytes_only: Any) -> None:
    text = Detokeniser(bytes_only)
    assert text.push(ids(bytes_only, "a😀")[:-1]) == "a"
    assert text.finish() == BROKEN


@pytest.mark.parametrize("seed", range(4))
def test_requests_in_turn_do_not_mix(bytes_only: Any, seed: int) -> None:
    rng = random.Random(seed)
    streams = [Detokeniser(bytes_only, stop=("zzz",) if i % 2 else ()) for i in range(len(TEXTS))]
    waiting = [parts(ids(bytes_only, text), rng) for text in TEXTS]
    shown = ["" for _ in TEXTS]
    while any(waiting):
        i = rng.choice([i for i, rest in enumerate(waiting) if rest])
        piece = streams[i].push(waiting[i].pop(0))
        assert BROKEN not in piece
        shown[i] += piece
    assert [text + stream.finish() for text, stream in zip(shown, streams, strict=True)] == TEXTS


def test_the_prompt_decides_the_first_space(tiny_tokenizer: Any) -> None:
    tokens = ids(tiny_tokenizer, "the fox, the dog")
    whole = "".join(TextStream(tiny_tokenizer, context=tokens[:3]).push(token) for token in tokens[3:4])
    assert Detokeniser(tiny_tokenizer, context=tuple(tokens[:3])).push(tokens[3:4]) == whole


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = Detokeniser(None)
    assert (text.push([1, 2, 3]), text.finish(), text.stopped, text.taken, text.kept) == ("", "", False, 3, 3)
    with pytest.raises(OptionError, match="stop strings need a tokenizer"):
        Detokeniser(None, stop=("end",))


@pytest.mark.parametrize(
    ("text", "stop", "shown", "kept", "taken"),
    [
        ("hello STOP more", ("STOP",), "hello ", 6, 10),
        ("xababcd", ("abc",), "xab", 3, 6),  # held back for a while, but it came with the first tokens
        ("STOP", ("STOP",), "", 0, 4),
        ("a😀b|c", ("b|",), "a😀", 5, 7),
        ("😀é", ("é",), "😀", 4, 6),
        ("never", ("STOP",), "never", 5, 5),
        ("ends in ST", ("STOP",), "ends in ST", 10, 10),
        (f"a{BROKEN}", (BROKEN,), "a", 1, 4),
    ],
)
def test_the_tokens_of_a_text_that_was_cut(
    bytes_only: Any, text: str, stop: tuple[str, ...], shown: str, kept: int, taken: int
) -> None:
    tokens = ids(bytes_only, text)
    for chunks in ([tokens], [[token] for token in tokens]):
        stream = Detokeniser(bytes_only, stop=stop)
        assert "".join(map(stream.push, chunks)) + stream.finish() == shown
        assert (stream.stopped, stream.kept, stream.taken) == (shown != text, kept, taken)


def test_a_stop_string_inside_a_token_leaves_the_token_to_the_text(tiny_tokenizer: Any) -> None:
    tokens = ids(tiny_tokenizer, "a fathom is")
    pieces = [tiny_tokenizer.decode([token]) for token in tokens]
    inside = next(i for i, piece in enumerate(pieces) if len(piece) > 2)
    stream = Detokeniser(tiny_tokenizer, stop=(pieces[inside][1:],))
    assert stream.push(tokens) == "".join(pieces[:inside]) + pieces[inside][0]
    assert (stream.kept, stream.taken) == (inside + 1, inside + 1)


def test_a_stop_string_that_only_the_end_completes(bytes_only: Any) -> None:
    """A lone lead byte becomes a replacement character when no more bytes come."""
    tokens = [*ids(bytes_only, "ab"), ids(bytes_only, "😀")[0]]
    stream = Detokeniser(bytes_only, stop=(f"b{BROKEN}",))
    assert stream.push(tokens) + stream.finish() == "a"
    assert (stream.stopped, stream.kept, stream.taken) == (True, 1, 3)


def test_a_token_that_only_the_end_shows_belongs_to_the_text(bytes_only: Any) -> None:
    stream = Detokeniser(bytes_only, stop=(BROKEN,))
    assert stream.push([bytes_only.convert_tokens_to_ids(HALF)]) == ""
    assert stream.finish() == "b"
    assert (stream.stopped, stream.kept, stream.taken) == (True, 1, 1)


def test_tokens_behind_the_stop_string_are_left_alone(bytes_only: Any) -> None:
    stream = Detokeniser(bytes_only, stop=("|",))
    assert stream.push(ids(bytes_only, "ab|cd")) == "ab"
    assert stream.push(ids(bytes_only, "ef")) == ""
    assert (stream.stopped, stream.taken, stream.kept, stream.finish()) == (True, 3, 2, "")


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab😀é", max_size=30), stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3), cut=st.randoms()
)
def test_kept_is_the_fewest_tokens_that_decode_to_the_text(bytes_only: Any, text: str, stops: list[str], cut: Any) -> None:
    tokens = ids(bytes_only, text)
    stream = Detokeniser(bytes_only, stop=stops)
    shown = "".join(map(stream.push, parts(tokens, cut))) + stream.finish()
    assert text.startswith(shown)
    assert stream.stopped == any(stop in text for stop in stops)
    assert stream.kept == len(shown.encode())
    assert bytes_only.decode(tokens[: stream.kept]) == shown
