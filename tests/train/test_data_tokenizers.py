"""Tokenizers for corpora: bytes round-trip, fingerprints survive saving, names are found or refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathomlm.errors import DataError
from fathomlm.train.data.tokenizers import byte_tokenizer, find_tokenizer, fingerprint, separator_id, vocab_size

BYTES = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_bytes_read_back_what_they_wrote(text):
    ids = BYTES.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert BYTES.decode(ids) == text
    assert ids == list(text.encode())


def test_bytes_have_257_tokens_and_end_documents_with_the_last():
    assert (vocab_size(BYTES), separator_id(BYTES, None)) == (257, 256)
    text = "a <|endoftext|> , don 't !"
    assert BYTES.decode(BYTES(text)["input_ids"]) == text


@pytest.mark.parametrize("which", ["bytes", "tiny"])
def test_a_fingerprint_survives_saving(which, tiny_tokenizer, tmp_path):
    tokenizer = BYTES if which == "bytes" else tiny_tokenizer
    tokenizer.save_pretrained(tmp_path)
    again = find_tokenizer(str(tmp_path))
    assert fingerprint(again) == fingerprint(tokenizer)
    assert fingerprint(find_tokenizer(str(tmp_path / "tokenizer.json"))) == fingerprint(tokenizer)
    (tmp_path / "tokenizer_config.json").unlink()
    assert fingerprint(find_tokenizer(str(tmp_path / "tokenizer.json"))) == fingerprint(tokenizer)
    assert again.decode(again("It 's a test .")["input_ids"]) == "It 's a test ."


def test_a_packaged_model_has_a_tokenizer_by_its_name(packaged, tiny_tokenizer):
    assert fingerprint(find_tokenizer(packaged)) == fingerprint(tiny_tokenizer)
    with pytest.raises(DataError, match=f"did you mean '{packaged}'"):
        find_tokenizer(packaged[:-1])


def test_a_model_directory_has_the_tokenizer_of_its_model(tiny_model_dir, tiny_tokenizer):
    assert fingerprint(find_tokenizer(str(tiny_model_dir))) == fingerprint(tiny_tokenizer)


def test_fingerprints_tell_tokenizers_apart(tiny_tokenizer, tmp_path):
    from tokenizers import Tokenizer, normalizers
    from transformers import PreTrainedTokenizerFast

    changed = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    changed.normalizer = normalizers.Lowercase()
    more = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    more.add_tokens(["fathom!"])
    made = [tiny_tokenizer, BYTES, *(PreTrainedTokenizerFast(tokenizer_object=t) for t in (changed, more))]
    assert len({fingerprint(tokenizer) for tokenizer in made}) == 4


def test_how_long_texts_may_be_is_no_part_of_it(tiny_tokenizer):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    cut = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    cut.enable_truncation(4)
    assert fingerprint(PreTrainedTokenizerFast(tokenizer_object=cut)) == fingerprint(tiny_tokenizer)


def test_the_separator(tiny_tokenizer):
    assert separator_id(tiny_tokenizer, None) == tiny_tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert separator_id(tiny_tokenizer, "<|im_end|>") == tiny_tokenizer.eos_token_id
    with pytest.raises(DataError, match="no token '<end>'"):
        separator_id(tiny_tokenizer, "<end>")


def test_the_separator_is_else_the_tokenizers_own_end():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    assert separator_id(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"), None) == 1
    with pytest.raises(DataError, match="name one with --separator"):
        separator_id(PreTrainedTokenizerFast(tokenizer_object=words), None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("byte", r"unknown tokenizer 'byte' \(did you mean 'bytes'\?\).*or give a directory"),
        ("no/such/place", "the tokenizer no/such/place does not exist"),
        ("./place", "the tokenizer ./place does not exist"),
        ("tokenizer.json", "the tokenizer tokenizer.json does not exist"),
    ],
)
def test_a_tokenizer_that_is_none(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        find_tokenizer(name)


def test_a_directory_or_file_without_one(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        find_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="the tokenizer cannot be read"):
        find_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.real
def test_the_real_one_survives_saving(smollm2_path, tmp_path):
    tokenizer = find_tokenizer(str(smollm2_path))
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(find_tokenizer(str(tmp_path))) == fingerprint(tokenizer)
    assert vocab_size(tokenizer) == 49_152
