"""The tokenizers inside GGUF files: tiny ones written here, and SmolLM2's against transformers' reading of it."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from checkpoints.gguf_files import byte_level_metadata, pieces_metadata, write_gguf
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.errors import CheckpointError, UnsupportedModel
from gguf_reading import read_once
from parity import families
from parity.families import tiny


@pytest.fixture
def with_tokenizer(tmp_path):
    """A tiny llama whose file carries a tokenizer, and that tokenizer read back."""

    def make(metadata, family="llama"):
        size = len(metadata["tokenizer.ggml.tokens"])
        config = families.CONFIGS[family]()
        config.vocab_size = size
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(families.CONFIGS, "sized", lambda: config)
            return GGUFCheckpoint(write_gguf(tmp_path / "t.gguf", tiny("sized"), metadata=metadata)).tokenizer()

    return make


TEXTS = ["the depth of the water", "Fathom 12345, naïve  spaces\n\tand 🙂", "<|im_start|>user\nhi<|im_end|>", ""]


def test_byte_level_tokenizer_and_chat_template(with_tokenizer, tiny_tokenizer, tmp_path):
    ours = with_tokenizer(byte_level_metadata(tiny_tokenizer))
    for text in TEXTS:
        assert ours(text).input_ids == tiny_tokenizer(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    assert (ours.bos_token_id, ours.eos_token_id) == (tiny_tokenizer.bos_token_id, tiny_tokenizer.eos_token_id)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == tiny_tokenizer.apply_chat_template(messages, tokenize=False)
    assert ours.decode(ours(TEXTS[2]).input_ids, skip_special_tokens=True) == "user\nhi"


def test_digits_are_set_apart_where_the_model_was_trained_so(with_tokenizer, tiny_tokenizer):
    tokens = byte_level_metadata(tiny_tokenizer)["tokenizer.ggml.tokens"]
    joined = {"tokenizer.ggml.tokens": [*tokens, "12", "Ġ1"], "tokenizer.ggml.merges": ["Ġ 1", "1 2"]}
    joined["tokenizer.ggml.token_type"] = [1] * len(joined["tokenizer.ggml.tokens"])
    plain = with_tokenizer(byte_level_metadata(tiny_tokenizer, **joined))
    apart = with_tokenizer(byte_level_metadata(tiny_tokenizer, **joined, **{"tokenizer.ggml.pre": "smollm"}))
    assert plain.tokenize("a12 12") == ["a", "12", "Ġ1", "2"]
    assert apart.tokenize("a12 12") == ["a", "1", "2", "Ġ", "1", "2"]


def test_unknown_cut_is_an_error_and_not_a_guess(with_tokenizer, tiny_tokenizer):
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre 'klingon' is not known.*known: deepseek"):
        with_tokenizer(byte_level_metadata(tiny_tokenizer, **{"tokenizer.ggml.pre": "klingon"}))
    with pytest.raises(UnsupportedModel, match="kind 'bert' is not known"):
        with_tokenizer(byte_level_metadata(tiny_tokenizer, **{"tokenizer.ggml.model": "bert"}))
    with pytest.raises(CheckpointError, match="its tokenizer is damaged"):
        with_tokenizer(byte_level_metadata(tiny_tokenizer, **{"tokenizer.ggml.merges": ["qqq zzz"]}))


def test_added_tokens_of_spaces_are_kept(with_tokenizer, tiny_tokenizer):
    """Pythia's runs of spaces are added tokens, written as they are and not in the byte alphabet."""
    metadata = byte_level_metadata(tiny_tokenizer)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "    "]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = with_tokenizer(metadata)
    ids = tokenizer("a    b").input_ids
    assert ids[1] == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a    b"


def test_pieces_tokenizer_adds_bos_and_falls_back_on_bytes(with_tokenizer):
    tokenizer = with_tokenizer(pieces_metadata(["▁hello", "▁world"]))
    assert tokenizer.tokenize("hello world") == ["▁hello", "▁world"]
    ids = tokenizer("hello worlds 🙂").input_ids
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello worlds 🙂"
    assert tokenizer("a</s>").input_ids[-1] == 2
    silent = with_tokenizer(pieces_metadata(["▁hello"], **{"tokenizer.ggml.add_bos_token": False}))
    assert silent("hello").input_ids[0] != 1


def test_gemmas_spaces_and_order(with_tokenizer):
    """Gemma's file spells runs of spaces as spaces, ranks pieces by place and not by score, and adds no space in front."""
    metadata = pieces_metadata(["hello", "▁"], **{"tokenizer.ggml.add_space_prefix": False})
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "  "]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])
    tokenizer = with_tokenizer(metadata, family="gemma")
    assert tokenizer.tokenize("hello  hello") == ["hello", "▁▁", "hello"]
    assert tokenizer("hello").input_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_a_saved_tokenizer_comes_back_the_same(with_tokenizer, tiny_tokenizer, tmp_path, pre):
    ours = with_tokenizer(byte_level_metadata(tiny_tokenizer, **{"tokenizer.ggml.pre": pre}))
    ours.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [again(text).input_ids for text in TEXTS] == [ours(text).input_ids for text in TEXTS]
    assert again.chat_template == ours.chat_template
    assert (ours("hi").input_ids[0] == ours.bos_token_id) == (pre == "llama-bpe")


@pytest.mark.real
def test_smollm2_tokens_are_those_of_transformers_with_digits_set_apart(smollm2_path):
    ours = GGUFCheckpoint(smollm2_path).tokenizer()
    with read_once():
        theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    code = "def f(x):\n    return x['a'] * 1024  # année 2026\r\n\t日本語 ﬁ e\u0301 👩‍👩‍👧"
    for text in [*TEXTS, code, "3.14159 and 1,000,000", "I'm we'll DON'T", "a" * 200, "\0\x07", " lead", "trail  "]:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    assert ours("<|im_start|>").input_ids == [1]
    assert ours("in 2026").input_ids == [254, 216, 34, 32, 34, 38]
    assert "<|im_start|>assistant" in ours.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
