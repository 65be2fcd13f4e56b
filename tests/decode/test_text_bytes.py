"""Text of tokens that are single bytes: whole characters, and ends at stop strings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fathomlm.decode.byte_text import ByteTextStream, TokenTable
from fathomlm.decode.text import TextStream

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


def pushed(stream: TextStream, tokens: list[int]) -> str:
    return "".join(map(stream.push, tokens))


def test_an_emoji_is_shown_whole(bytes_only: Any) -> None:
    tokens = ids(bytes_only, "a😀b")
    assert len(tokens) == 6
    text = TextStream(bytes_only)
    assert [text.push(token) for token in tokens] == ["a", "", "", "", "😀", "b"]
    assert (text.finish(), text.stopped) == ("", False)


def test_an_unfinished_character_is_flushed(bytes_only: Any) -> None:
    text = TextStream(bytes_only)
    assert pushed(text, ids(bytes_only, "a😀")[:-1]) == "a"
    assert text.finish() == BROKEN


@pytest.mark.parametrize("seed", range(4))
def test_requests_in_turn_do_not_mix(bytes_only: Any, seed: int) -> None:
    rng = random.Random(seed)
    streams = [TextStream(bytes_only, stop=("zzz",) if i % 2 else ()) for i in range(len(TEXTS))]
    waiting = [ids(bytes_only, text) for text in TEXTS]
    shown = ["" for _ in TEXTS]
    while any(waiting):
        i = rng.choice([i for i, rest in enumerate(waiting) if rest])
        piece = streams[i].push(waiting[i].pop(0))
        assert BROKEN not in piece
        shown[i] += piece
    assert [text + stream.finish() for text, stream in zip(shown, streams, strict=True)] == TEXTS


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello STOP more", ("STOP",), "hello "),
        ("xababcd", ("abc",), "xab"),  # held back for a while, but it came with the first tokens
        ("STOP", ("STOP",), ""),
        ("a😀b|c", ("b|",), "a😀"),
        ("😀é", ("é",), "😀"),
        ("never", ("STOP",), "never"),
        ("ends in ST", ("STOP",), "ends in ST"),
        (f"a{BROKEN}", (BROKEN,), "a"),
    ],
)
def test_a_text_is_cut_before_a_stop_string(bytes_only: Any, text: str, stop: tuple[str, ...], shown: str) -> None:
    stream = TextStream(bytes_only, stop=stop)
    assert pushed(stream, ids(bytes_only, text)) + stream.finish() == shown
    assert stream.stopped == (shown != text)


def test_a_stop_string_inside_a_token_leaves_the_token_to_the_text(tiny_tokenizer: Any) -> None:
    tokens = ids(tiny_tokenizer, "a fathom is")
    pieces = [tiny_tokenizer.decode([token]) for token in tokens]
    inside = next(i for i, piece in enumerate(pieces) if len(piece) > 2)
    stream = TextStream(tiny_tokenizer, stop=(pieces[inside][1:],))
    assert pushed(stream, tokens) == "".join(pieces[:inside]) + pieces[inside][0]
    assert stream.stopped


def test_a_stop_string_that_only_the_end_completes(bytes_only: Any) -> None:
    """A lone lead byte becomes a replacement character when no more bytes come."""
    tokens = [*ids(bytes_only, "ab"), ids(bytes_only, "😀")[0]]
    stream = TextStream(bytes_only, stop=(f"b{BROKEN}",))
    assert pushed(stream, tokens) + stream.finish() == "a"
    assert stream.stopped


def test_a_token_that_only_the_end_shows_belongs_to_the_text(bytes_only: Any) -> None:
    stream = TextStream(bytes_only, stop=(BROKEN,))
    assert stream.push(bytes_only.convert_tokens_to_ids(HALF)) == ""
    assert (stream.finish(), stream.stopped) == ("b", True)


def test_tokens_behind_the_stop_string_are_left_alone(bytes_only: Any) -> None:
    stream = TextStream(bytes_only, stop=("|",))
    assert pushed(stream, ids(bytes_only, "ab|cd")) == "ab"
    assert (stream.stopped, stream.finish()) == (True, "")


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab😀é", max_size=30), stops=st.lists(st.text("ab😀", min_size=1, max_size=4), max_size=3))
def test_any_text_is_a_prefix_up_to_its_first_stop_string(bytes_only: Any, text: str, stops: list[str]) -> None:
    stream = TextStream(bytes_only, stop=stops)
    shown = pushed(stream, ids(bytes_only, text)) + stream.finish()
    assert text.startswith(shown)
    assert stream.stopped == any(stop in text for stop in stops)
    assert stream.stopped or shown == text


@given(st.lists(st.integers(0, 257), max_size=120), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_many_tokens_at_once_are_what_one_after_another_are(bytes_only: Any, tokens: list[int], size: int) -> None:
    """Whole, broken and endless characters, in parts of any size."""
    one, many = TextStream(bytes_only), TextStream(bytes_only)
    alone = pushed(one, tokens) + one.finish()
    together = "".join(many.push_all(tokens[at : at + size]) for at in range(0, len(tokens), size)) + many.finish()
    assert together == alone


# By a table of tokens, which is to say what the tokenizer says.


@given(
    st.lists(st.integers(0, 257), max_size=60),
    st.lists(st.integers(0, 257), max_size=12),
    st.lists(st.text("ab\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}", min_size=1, max_size=3), max_size=2),
    st.integers(1, 20),
)
@example([], [170, 95], [], 1)  # a prompt that ends with the first two bytes of a surrogate
@example([63, 67], [170, 95], [], 1)
@settings(max_examples=150, deadline=None)
def test_a_table_says_what_the_tokenizer_says(
    bytes_only: Any, tokens: list[int], prompt: list[int], stops: list[str], size: int
) -> None:
    """Whole and broken characters, behind any prompt, with stop strings, in bursts of any size."""
    table = TokenTable.of(bytes_only)
    assert table is not None
    slow = TextStream(bytes_only, stop=stops, context=prompt)
    shown = pushed(slow, tokens) + slow.finish()
    bursts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    ways: list[Callable[[TextStream, list[int]], str]] = [
        lambda stream, burst: "".join(stream.push_each(burst)),
        lambda stream, burst: stream.push_all(burst),
        lambda stream, burst: stream.push_all(np.array(burst, np.int32)),
    ]
    for push in ways:
        for stream in (
            ByteTextStream(table, stop=stops, context=prompt),
            TextStream(bytes_only, stop=stops, context=prompt),
        ):
            said = "".join(push(stream, burst) for burst in bursts)
            assert (said + stream.finish(), stream.stopped) == (shown, slow.stopped)


def test_a_table_shows_a_character_with_its_last_byte(bytes_only: Any) -> None:
    table = TokenTable.of(bytes_only)
    assert table is not None
    stream = ByteTextStream(table)
    assert stream.push_each(ids(bytes_only, "a😀b")) == ["a", "", "", "", "😀", "b"]
    assert stream.push(bytes_only.convert_tokens_to_ids(HALF)) == "b"
    assert stream.push_each([]) == []
    assert stream.finish() == BROKEN
    assert table.bytes[0] == b""  # a special token
    assert table.bytes[10**6] == b""  # none of the vocabulary's


def test_many_bytes_at_once_are_those_of_each_token(bytes_only: Any) -> None:
    """Whatever was asked for before, in an array too, and of tokens beyond the vocabulary."""
    table, alone = TokenTable.of(bytes_only), TokenTable.of(bytes_only)
    assert table is not None
    assert alone is not None
    for tokens in ([], [3], [3, 200, 3], [len(bytes_only), 5], [5, 3000, 0], [700, 258]):
        wanted = b"".join(alone.bytes[token] for token in tokens)
        assert table.bytes.of(tokens) == table.bytes.of(np.array(tokens, np.int64)) == wanted


def test_pieces_end_at_the_token_that_completes_a_stop_string(bytes_only: Any) -> None:
    table = TokenTable.of(bytes_only)
    assert table is not None
    for stream in (TextStream(bytes_only, stop=("|b",)), ByteTextStream(table, stop=("|b",))):
        assert stream.push_each(ids(bytes_only, "xy|bcd")) == ["x", "y", "", ""]
        assert stream.stopped


def test_other_tokenizers_have_no_table(bytes_only: Any) -> None:
    tokenizer = Tokenizer.from_str(bytes_only.backend_tokenizer.to_str())
    tokenizer.decoder = decoders.Fuse()
    assert TokenTable.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) is None
    assert TokenTable.of(None) is None
