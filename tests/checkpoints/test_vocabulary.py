"""A model with fewer tokens reads text whose tokens all stay as it did before, to the last bit, and any other text whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, CanineTokenizer, PreTrainedTokenizerFast

import fathomlm
from fathomlm.checkpoints.assemble import ModelBase, replan
from fathomlm.checkpoints.gguf import GGUFCheckpoint
from fathomlm.checkpoints.reduced import KeptTokens
from fathomlm.checkpoints.vocabulary import BytePairs, count_tokens, frequent_parts, pieces_more, trimmed_tokenizer
from fathomlm.errors import DataError, OptionError
from lab.analyze.tiny import model_of
from parity.t5_models import write_tiny_t5

TEXTS = [
    *["the water of the line"] * 3,
    "the depth of the water is the measure of the line",
    "the quick brown fox jumps over the lazy dog",
]
MANY = 300
ANY_TEXT = st.lists(
    st.sampled_from(["the ", "depth", " of", "lazy dog", " fathom", "é", "🙂", "\n", "123", " x"]) | st.text(max_size=8)
)


def with_tokenizer(tokenizer: Any, *, tied: bool = False, more: int = 0) -> Any:
    """A plain model with random weights for such a tokenizer, and `more` rows without a token."""
    traits = {"vocab": len(tokenizer) + more, "context": 128, "tied_embeddings": tied}
    model = model_of(None, sharing="cycle", recursions=1, traits=traits)
    model.tokenizer = tokenizer
    model.config.bos_token_id = tokenizer.bos_token_id
    model.config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    return model


def byte_level() -> Any:
    """The first characters of GPT-2's kind, with a post-processor that names its tokens by id."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS, "fathoms and fathoms of deep, deep water"] * 2, trainer)
    backend.add_tokens(["<extra>"])
    ends = [("<|im_end|>", backend.token_to_id("<|im_end|>"))]
    backend.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=ends)
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    named["extra_special_tokens"] = ["<extra>"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=99, padding_side="left", **named)


TOKENIZER = byte_level()


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def base(request: pytest.FixtureRequest) -> Any:
    return with_tokenizer(TOKENIZER, tied=request.param)


@pytest.fixture(scope="module")
def kept(base: Any) -> list[int]:
    return frequent_parts(ModelBase(base), TOKENIZER, count_tokens(TEXTS, TOKENIZER), MANY)


def test_text_whose_tokens_stay_is_read_as_before(base: Any, kept: list[int]) -> None:
    small = fathomlm.trim_vocab(base, TEXTS, MANY)
    assert small.architecture.vocab == len(small.tokenizer) == len(kept) == MANY
    seen = 0
    for text in ("the water of the line", "the lazy dog", *TEXTS):
        old, new = TOKENIZER(text)["input_ids"], small.tokenizer(text)["input_ids"]
        if set(old) <= set(kept):
            assert [kept[token] for token in new] == old
            expected = base(torch.tensor([old])).logits[..., kept]
            assert torch.equal(small(torch.tensor([new])).logits, expected)
            seen += 1
    assert seen, "some text has none but tokens that stay"
    assert any(set(TOKENIZER(text)["input_ids"]) - set(kept) for text in TEXTS), "and some has others"


def test_special_tokens_keep_their_names(base: Any) -> None:
    small = fathomlm.trim_vocab(base, TEXTS, MANY)
    name = small.tokenizer.convert_ids_to_tokens
    assert name(small.config.bos_token_id) == "<|endoftext|>"
    assert [name(token) for token in small.config.eos_token_id] == ["<|im_end|>", "<|endoftext|>"]
    assert small.tokenizer.special_tokens_map == TOKENIZER.special_tokens_map
    assert small.tokenizer.all_special_tokens == TOKENIZER.all_special_tokens
    assert name(small.tokenizer("the <extra> dog")["input_ids"])[-1] == "<|im_end|>", "what is put behind a text"
    assert "<extra>" in name(small.tokenizer("the <extra> dog")["input_ids"])
    assert (small.tokenizer.model_max_length, small.tokenizer.padding_side) == (99, "left")


def test_ids_that_no_token_has_are_left_out() -> None:
    """Embeddings have more rows than there are tokens, and configurations name what other tokenizers had."""
    model = with_tokenizer(TOKENIZER, more=8)
    model.config.bos_token_id, model.config.pad_token_id = len(TOKENIZER) + 1, 10**6
    model.config.eos_token_id = [TOKENIZER.eos_token_id, len(TOKENIZER) + 7]
    small = fathomlm.trim_vocab(model, TEXTS, MANY)
    assert (small.config.bos_token_id, small.config.pad_token_id) == (None, None)
    assert small.config.eos_token_id == small.tokenizer.eos_token_id
    assert fathomlm.trim_vocab(model, TEXTS, len(TOKENIZER) - 1).architecture.vocab == len(TOKENIZER) - 1


def test_exits_are_left_out(base: Any) -> None:
    """What they have of their own was trained over all tokens."""
    exited = replan(base, base.plan.with_exits((1,)), exit_rank=2)
    assert fathomlm.trim_vocab(exited, TEXTS, MANY).plan.exits == ()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=ANY_TEXT, seed=st.integers(0, 5), size=st.integers(262, 320))
def test_any_text_is_read_back_and_the_same_where_it_can_be(pieces: list[str], seed: int, size: int) -> None:
    kept, small = trimmed(seed, size)
    text = "".join(pieces)
    old, new = TOKENIZER(text, add_special_tokens=False)["input_ids"], small(text, add_special_tokens=False)["input_ids"]
    assert small.decode(new) == TOKENIZER.decode(old)
    if set(old) <= set(kept):
        assert [kept[token] for token in new] == old


TRIMMED: dict[tuple[int, int], tuple[list[int], Any]] = {}


def trimmed(seed: int, size: int) -> tuple[list[int], Any]:
    """Kept by chance, so that all kinds of tokens stay without others."""
    if (seed, size) not in TRIMMED:
        many = torch.randint(1000, (len(TOKENIZER),), generator=torch.Generator().manual_seed(seed))
        kept = frequent_parts(ModelBase(with_tokenizer(TOKENIZER)), TOKENIZER, Counter(dict(enumerate(many.tolist()))), size)
        TRIMMED[seed, size] = kept, trimmed_tokenizer(TOKENIZER, kept)
    return TRIMMED[seed, size]


def test_what_a_token_is_joined_from_stays_too() -> None:
    pairs = BytePairs(TOKENIZER)
    for seed in range(3):
        kept, _ = trimmed(seed, 290)
        assert len(kept) == 290
        assert all(set(pairs.parts(token)) <= set(kept) for token in kept if token not in pairs.symbols)
        assert pairs.symbols <= set(kept)
    water = TOKENIZER.convert_tokens_to_ids("Ġwater")
    names = TOKENIZER.convert_ids_to_tokens(pairs.parts(water))
    assert {"Ġ", "w", "a", "t", "e", "r"} < set(names), "letters and what they are joined to"


def test_frequent_tokens_stay_and_of_equal_ones_the_lower(base: Any) -> None:
    the, fox = (TOKENIZER.convert_tokens_to_ids(name) for name in ("Ġthe", "Ġfathoms"))
    least = len(BytePairs(TOKENIZER).symbols)
    parts = len({fox, *BytePairs(TOKENIZER).parts(fox)} - BytePairs(TOKENIZER).symbols)
    assert fox in frequent_parts(ModelBase(base), TOKENIZER, Counter({fox: 2}), least + parts)
    assert fox not in frequent_parts(ModelBase(base), TOKENIZER, Counter({fox: 2}), least + parts - 1), (
        "it stays whole or not at all"
    )
    assert the in frequent_parts(ModelBase(base), TOKENIZER, Counter(), least + 20), "low ids are the commonest"


def test_a_text_is_longer_by_what_was_taken_apart(base: Any, kept: list[int]) -> None:
    counts = count_tokens(TEXTS, TOKENIZER)
    small_base = KeptTokens(ModelBase(base), kept, trimmed_tokenizer(TOKENIZER, kept))
    share, times = pieces_more(TOKENIZER, small_base, counts)
    old = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    small = trimmed_tokenizer(TOKENIZER, kept)
    new = [small(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert share == pytest.approx(sum(token in kept for ids in old for token in ids) / sum(map(len, old)))
    assert times == pytest.approx(sum(map(len, new)) / sum(map(len, old)))
    assert 0 < share < 1 < times


def test_saved_exported_and_converted_further(base: Any, tmp_path: Path) -> None:
    small = fathomlm.trim_vocab(base, "the depth of the water " * 9, MANY)
    fathomlm.save(small, tmp_path / "small")
    again = fathomlm.load(tmp_path / "small")
    text = "the depth of 12 fathoms 🙂"
    tokens = torch.tensor([small.tokenizer(text)["input_ids"]])
    assert again.tokenizer(text)["input_ids"] == tokens[0].tolist()
    assert torch.equal(again(tokens).logits, small(tokens).logits)
    fathomlm.export(small, tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == tokens[0].tolist()
    looped = fathomlm.convert(again, recursions=2)
    assert looped.architecture.vocab == MANY
    assert looped.tokenizer(text)["input_ids"] == tokens[0].tolist()


def test_gguf_files_have_the_tokens_that_stay(tmp_path: Path) -> None:
    backend = byte_level()
    backend.backend_tokenizer.post_processor = processors.ByteLevel()
    small = fathomlm.trim_vocab(with_tokenizer(backend), TEXTS, MANY)
    fathomlm.export_gguf(small, tmp_path / "small.gguf", "f32")
    theirs = GGUFCheckpoint(tmp_path / "small.gguf")
    assert theirs.architecture.vocab == MANY
    for text in (*TEXTS, "12 fathoms\n🙂"):
        assert theirs.tokenizer()(text)["input_ids"] == small.tokenizer(text)["input_ids"]


def pieces() -> Any:
    """Llama's and Gemma's kind: a merge for every way to cut a token in two, and bytes for what has no token."""
    words = ["▁the", "▁depth", "▁deep", "▁fathom", "▁fathoms"]
    beginnings = sorted({word[:length] for word in words for length in range(2, len(word) + 1)}, key=len)
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted({*"".join(words), *"xyz"}),
        *beginnings,
    ]
    names += ["th", "at", "ep"]
    vocab = {name: token for token, name in enumerate(names)}
    merges = [(name[:at], name[at:]) for name in names[259:] for at in range(1, len(name))]
    merges = [(left, right) for left, right in merges if left in vocab and right in vocab]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    unmark = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(unmark)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("size", [265, 275, 285, 292])
def test_pieces_with_bytes_for_all_else(size: int) -> None:
    tokenizer = pieces()
    model = with_tokenizer(tokenizer)
    model.config.eos_token_id = tokenizer.eos_token_id
    kept = frequent_parts(ModelBase(model), tokenizer, count_tokens(["the depth the depth fathom"], tokenizer), size)
    small = trimmed_tokenizer(tokenizer, kept)
    assert sum(name.startswith("<0x") for name in small.get_vocab()) == 256
    same = 0
    for text in ("the depth", "the deep fathoms", "xyz 12 é🙂", "that  is", "fathom", "the", ""):
        old, new = tokenizer(text)["input_ids"], small(text)["input_ids"]
        assert new[0] == small.bos_token_id
        assert new[-1] == small.eos_token_id
        assert small.decode(new, skip_special_tokens=True) == tokenizer.decode(old, skip_special_tokens=True) == text
        if set(old) <= set(kept):
            assert [kept[token] for token in new] == old
            same += 1
    assert same >= (3 if size > 270 else 1)


@pytest.mark.parametrize("size", [0, 100, 340, 10**9])
def test_a_size_that_is_out_of_range(base: Any, size: int) -> None:
    least, most = len(BytePairs(TOKENIZER).symbols), len(TOKENIZER) - 1
    with pytest.raises(
        OptionError, match=rf"vocab must be from {least} \(special tokens, single symbols\) to {most}, got {size}"
    ):
        fathomlm.trim_vocab(base, TEXTS, size)


def test_what_cannot_be_trimmed(base: Any) -> None:
    with pytest.raises(DataError, match="no text"):
        fathomlm.trim_vocab(base, [], MANY)
    with pytest.raises(OptionError, match="was converted already"):
        fathomlm.trim_vocab(fathomlm.convert(base, recursions=2), TEXTS, MANY)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    other = PreTrainedTokenizerFast(tokenizer_object=unigram, unk_token="<unk>")
    with pytest.raises(OptionError, match="only a BPE vocabulary can be trimmed; this tokenizer is of type Unigram"):
        BytePairs(other)
    suffixed = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[], end_of_word_suffix="</w>"))
    )
    with pytest.raises(OptionError, match="end_of_word_suffix"):
        BytePairs(suffixed)
    without = model_of(None, sharing="cycle", recursions=1)
    without.tokenizer = None
    with pytest.raises(OptionError, match="no tokenizer"):
        fathomlm.trim_vocab(without, TEXTS, MANY)
    without.tokenizer = CanineTokenizer()
    with pytest.raises(OptionError, match=r"a tokenizer\.json describes"):
        fathomlm.trim_vocab(without, TEXTS, MANY)
    last = len(TOKENIZER) - 1
    with pytest.raises(OptionError, match=f"the tokenizer has token {last}, the model's vocabulary has {last}"):
        fathomlm.trim_vocab(with_tokenizer(TOKENIZER, more=-1), TEXTS, MANY)


def test_letters_stay_where_there_are_no_bytes_to_fall_back_on() -> None:
    spec = json.loads(TOKENIZER.backend_tokenizer.to_str())
    spec["model"]["byte_fallback"] = True
    told = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))
    assert BytePairs(told).symbols == BytePairs(TOKENIZER).symbols


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    write_tiny_t5("t5", tmp_path)
    with pytest.raises(OptionError, match="encoder-decoder"):
        fathomlm.trim_vocab(tmp_path, TEXTS, MANY)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_without_a_third_of_its_tokens(smollm2: Any) -> None:
    text = "A fathom is six feet. The depth of the water under the ship was measured with a line, and was written down. "
    small = fathomlm.trim_vocab(smollm2, [text * 4], 32768)
    old, new = smollm2.tokenizer(text)["input_ids"], small.tokenizer(text)["input_ids"]
    assert small.tokenizer.convert_ids_to_tokens(new) == smollm2.tokenizer.convert_ids_to_tokens(old)
    kept = [smollm2.tokenizer.convert_tokens_to_ids(name) for name in small.tokenizer.convert_ids_to_tokens(range(32768))]
    with torch.no_grad():
        assert torch.equal(small(torch.tensor([new])).logits, smollm2(torch.tensor([old])).logits[..., kept])
