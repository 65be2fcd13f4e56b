"""Streaming text: whole characters, right spaces, no glimpse of a stop string, and a cost that does not grow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from fathomlm.decode.text import MOST, TextStream

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXTS = [
    "the quick brown fox",
    "  two spaces,  and  more ",
    "naïve café, Ωmega",
    "日本語とémoji 😀👩\u200d👩\u200d👧 mixed 日本",
    "line one\nline two\n\n\ttabbed",
    "",
]


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A tokenizer in the manner of Llama's: a space is a part of the word behind it, unknown characters become bytes."""
    letters = "▁abcdefghijklmnopqrstuvwxyz,"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {letter: 259 + i for i, letter in enumerate(letters)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "w"), ("▁", "f"), ("o", "x"), ("▁f", "ox")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any, sentencepiece: Any) -> Any:
    return tiny_tokenizer if request.param == "byte-level" else sentencepiece


def pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text(tokenizer: Any, text: str) -> None:
    shown = pieces(TextStream(tokenizer), ids(tokenizer, text))
    assert "".join(shown) == text
    assert not any(BROKEN in piece for piece in shown)


def test_long_text_of_bytes_stays_whole(tokenizer: Any) -> None:
    """Characters that are three or four tokens each, for many windows."""
    text = "日本😀é" * 60
    shown = pieces(TextStream(tokenizer), ids(tokenizer, text))
    assert "".join(shown) == text
    assert sum(bool(piece) for piece in shown) >= len(text) / 2, "text must come as it is made, not at the end"


@pytest.mark.parametrize("cut", [1, 5, 9, 13])
def test_the_prompt_decides_the_first_space(tokenizer: Any, cut: int) -> None:
    text = "the fox, the owl, the fox"
    tokens = ids(tokenizer, text)
    prompt, rest = tokens[:cut], tokens[cut:]
    shown = "".join(pieces(TextStream(tokenizer, context=prompt), rest))
    assert tokenizer.decode(prompt) + shown == text


def test_a_prompt_that_ends_in_many_byte_tokens(sentencepiece: Any) -> None:
    tokens = ids(sentencepiece, "the 日本語日本語")
    shown = "".join(pieces(TextStream(sentencepiece, context=tokens), ids(sentencepiece, "日本")[1:]))
    assert shown == "日本"


def test_an_unfinished_character_waits_and_is_flushed(tiny_tokenizer: Any) -> None:
    tokens = ids(tiny_tokenizer, "a😀")
    assert len(tokens) == 5, "the emoji must be four tokens for this test to say anything"
    stream = TextStream(tiny_tokenizer)
    assert [stream.push(token) for token in tokens[:-1]] == ["a", "", "", ""]
    assert stream.finish() == BROKEN
    stream = TextStream(tiny_tokenizer)
    assert [stream.push(token) for token in tokens] == ["a", "", "", "", "😀"]


def test_special_tokens_are_not_shown(tiny_tokenizer: Any) -> None:
    a, b = ids(tiny_tokenizer, "a"), ids(tiny_tokenizer, " b")
    end = tiny_tokenizer.eos_token_id
    assert "".join(pieces(TextStream(tiny_tokenizer), [*a, *[end] * 200, *b])) == "a b"


def test_special_tokens_do_not_swallow_the_space_behind_them(sentencepiece: Any) -> None:
    the, fox = ids(sentencepiece, "the"), ids(sentencepiece, "fox")
    assert "".join(pieces(TextStream(sentencepiece), [*the, *[2] * 20, *fox])) == "the fox"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 200), broken=st.booleans())
def test_random_bytes_decode_as_they_would_whole(tiny_tokenizer: Any, seed: int, length: int, broken: bool) -> None:
    """Whatever bytes a badly trained model emits, the stream says what decoding everything at once would."""
    rng = random.Random(seed)
    high = [tiny_tokenizer.convert_tokens_to_ids(c) for c in "¢¤âðŁļĤĢ©"]  # bytes above 127, by their byte-level names
    assert None not in high
    choices = high if broken else [*range(3, len(tiny_tokenizer))]
    tokens = [rng.choice(choices) for _ in range(length)]
    assert "".join(pieces(TextStream(tiny_tokenizer), tokens)) == tiny_tokenizer.decode(tokens)


def test_a_broken_end_is_whole_where_the_window_slides(tiny_tokenizer: Any) -> None:
    """A character, then fewer broken bytes than one has, just when the window is as long as it may be."""
    lone, *char = (tiny_tokenizer.convert_tokens_to_ids(c) for c in "¢âĢ¢")  # a byte that begins nothing, a bullet
    for behind in (1, 2, 3):
        tokens = [lone] * (MOST - 3 - behind) + char + [lone] * behind
        stream = TextStream(tiny_tokenizer)
        assert "".join(stream.push(token) for token in tokens) + stream.finish() == tiny_tokenizer.decode(tokens)


def test_byte_runs_that_never_become_characters_do_not_hang_or_hide_text(sentencepiece: Any) -> None:
    lone = sentencepiece.convert_tokens_to_ids("<0xFF>")
    after = ids(sentencepiece, "the fox")
    shown = "".join(pieces(TextStream(sentencepiece), [lone] * 300 + after))
    assert shown == BROKEN * 300 + " the fox"


class Counting:
    """A tokenizer that notes how much it was asked to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.sizes: list[int] = []

    def decode(self, tokens: list[int], **options: Any) -> str:
        self.sizes.append(len(tokens))
        text: str = self.tokenizer.decode(tokens, **options)
        return text


@pytest.mark.parametrize("unit", ["the quick brown fox ", "日本😀", "\x00"])
def test_cost_per_token_does_not_grow(tiny_tokenizer: Any, unit: str) -> None:
    tokens = ids(tiny_tokenizer, unit)
    if unit == "\x00":
        tokens = [tiny_tokenizer.convert_tokens_to_ids("â")]  # a byte that never completes
    tokens = (tokens * 2000)[:2000]
    counting = Counting(tiny_tokenizer)
    pieces(TextStream(counting), tokens)
    assert max(counting.sizes) <= MOST
    assert len(counting.sizes) <= 1.2 * len(tokens)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("brown",), "the quick "),
        (("own f",), "the quick br"),
        (("x jumps", "quick"), "the "),
        (("the quick brown fox jumps",), ""),
        (("lazy",), "the quick brown fox jumps"),
        (("jumpsuit", "foxy"), "the quick brown fox jumps"),
        (("u",), "the q"),
    ],
)
def test_text_is_cut_before_the_stop_string(tokenizer: Any, stop: tuple[str, ...], expected: str) -> None:
    stream = TextStream(tokenizer, stop=stop)
    shown = pieces(stream, ids(tokenizer, "the quick brown fox jumps"))
    assert "".join(shown) == expected
    assert stream.stopped == (expected != "the quick brown fox jumps")


def test_the_stop_string_that_is_complete_first_wins(tiny_tokenizer: Any) -> None:
    """Also where both come in one token; letter by letter the longer one would not be waited for."""
    whole, letters = ids(tiny_tokenizer, " the"), [ids(tiny_tokenizer, letter)[0] for letter in " the"]
    assert (len(whole), len(letters)) == (1, 4)
    for tokens in (whole, letters):
        assert "".join(pieces(TextStream(tiny_tokenizer, stop=(" the", "h")), tokens)) == " t"


def test_the_beginning_of_a_stop_string_is_held_back(tiny_tokenizer: Any) -> None:
    stream = TextStream(tiny_tokenizer, stop=("ababc",))
    shown = ""
    for letter in "xabab":
        shown += stream.push(ids(tiny_tokenizer, letter)[0])
    assert shown == "x"
    assert stream.push(ids(tiny_tokenizer, "a")[0]) == "ab", "only 'aba' can still become the stop string"
    assert stream.finish() == "aba"


@settings(max_examples=150, deadline=None)
@given(text=st.text("abx", max_size=40), stops=st.lists(st.text("abx", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stopping_does_not_depend_on_how_the_text_comes_in(tiny_tokenizer: Any, text: str, stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    letters = [ids(tiny_tokenizer, letter)[0] for letter in text]
    for tokens in (ids(tiny_tokenizer, text), letters):
        stream = TextStream(tiny_tokenizer, stop=stops)
        shown = ""
        for piece in pieces(stream, tokens):
            shown += piece
            assert expected.startswith(shown), "something was shown that had to be taken back"
        assert shown == expected
        assert stream.stopped == bool(ends)
        assert stream.push(letters[0] if letters else 3) == "" or not ends
