"""The tokenizer that travels inside a GGUF file, rebuilt as a transformers fast tokenizer with its chat template.

transformers can do this too, but what it builds differs from the models' own tokenizers: it leaves out SmolLM's
splitting of digits and Gemma's leading <bos>, and it loses added tokens made of spaces (Pythia). How text is cut before
merging is in a GGUF file by name only (`tokenizer.ggml.pre`), so the known names are a table here; an unknown one is an
error, because a wrong cut would quietly give wrong tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fathomlm.checkpoints.gguf.reader import GGUFFile
from fathomlm.depth import Architecture
from fathomlm.errors import CheckpointError, OptionError, UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS = "", "digits"
_CUTS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
}
"""How text is cut, by `tokenizer.ggml.pre`: GPT-2's rule, that rule after setting digits apart, or a pattern."""


def build_tokenizer(file: GGUFFile, architecture: Architecture) -> Any | None:
    """The tokenizer of an open GGUF file, or None where it holds none."""
    metadata = file.metadata
    kind, tokens = metadata.get("tokenizer.ggml.model", "none"), metadata.get("tokenizer.ggml.tokens")
    if kind == "none" or tokens is None:
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{file.path}: a tokenizer of kind {kind!r:.40} is not known; known: gpt2, llama")
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and (not isinstance(cut, str) or cut not in _CUTS):
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre {cut!r:.40} is not known, and a guess could give wrong tokens; "
            f"known: {', '.join(sorted(_CUTS))}"
        )
    if not isinstance(tokens, list) or len(tokens) > architecture.vocab:
        raise CheckpointError(f"{file.path}: its tokenizer has more tokens than the model ({architecture.vocab:,})")
    try:
        backend = (_byte_level if kind == "gpt2" else _pieces)(metadata, architecture)
        return _wrapped(metadata, backend)
    except Exception as error:
        # tokenizers reports every fault of a vocabulary as a bare Exception, sometimes over several lines.
        why = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{file.path}: its tokenizer is damaged ({type(error).__name__}: {why})") from error


def _byte_level(metadata: dict[str, Any], architecture: Architecture) -> Any:
    """Byte-level BPE, as GPT-2 began it."""
    cut = _CUTS[metadata.get("tokenizer.ggml.pre", "default")]
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut in (_LLAMA3, _TEKKEN)))
    if cut == _QWEN2 or architecture.family == "neox":
        tokenizer.normalizer = normalizers.NFC()
    pattern = cut not in (_GPT2, _DIGITS)
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == _DIGITS else []
    steps += [pre_tokenizers.Split(Regex(cut), behavior="isolated")] if pattern else []
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=not pattern)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(metadata: dict[str, Any], architecture: Architecture) -> Any:
    """SentencePiece BPE with bytes to fall back on. The file lists no merges: a piece's rank says which come first.

    Llama's ranks are its scores; Gemma's scores do not follow its merges, but the order of its tokens does. Gemma also
    stores its runs of spaces as spaces, where every other piece has the mark for one.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    order = list(range(len(tokens)))
    if architecture.family.startswith("gemma"):
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    else:
        scores = metadata["tokenizer.ggml.scores"]
        order.sort(key=lambda index: -scores[index])
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (tokens[index][:at], tokens[index][at:])
        for index in order
        for at in range(len(tokens[index]) - 1, 0, -1)
        if tokens[index][:at] in vocab and tokens[index][at:] in vocab
    ]
    unknown = _token(metadata, "unknown")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks: list[Any] = [normalizers.Prepend("▁")] if space else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    unmark: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*unmark, decoders.Strip(" ", 1, 0)] if space else unmark)
    return tokenizer


def _wrapped(metadata: dict[str, Any], tokenizer: Any) -> Any:
    """The transformers tokenizer around a backend: special and added tokens, <bos>, chat template."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, types, strict=False) if kind == wanted and token in vocab]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in found])

    named = {name: _token(metadata, name) for name in ("bos", "eos", "unknown", "padding")}
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    pieces = metadata["tokenizer.ggml.model"] == "llama"
    default = pieces or _CUTS[metadata.get("tokenizer.ggml.pre", "default")] == _LLAMA3
    first = named["bos"] if metadata.get("tokenizer.ggml.add_bos_token", default) else None
    last = named["eos"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first or last:
        single = [f"{first}:0"] * bool(first) + ["$A:0"] + [f"{last}:0"] * bool(last)
        second = [f"{first}:1"] * bool(first) + ["$B:1"] + [f"{last}:1"] * bool(last)
        used = [(named[name], ids[name]) for name, token in (("bos", first), ("eos", last)) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=single + second, special_tokens=used)
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
    )


PROBES = (
    "Hello, World! It's 3.14 or 2,718,281 -- isn't it?\n\n\tdef f(x):\n        return x**2  # done\r\n",
    "  leading and trailing  ",
    "I'll we've they're CAN'T \u00e9t\u00e9 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c \u0414\u043e\u0431\u0440\u044b\u0439",
    "\U0001f680\U0001f600 e\u0301 \u0905\u0928\u094d",
    "1234567 12 3 v1.2.3-rc4 0x1F $100 100% a_b camelCase HTMLParser",
)
"""Texts on which known ways to cut text differ from each other."""


def tokenizer_metadata(tokenizer: Any, architecture: Architecture, ends: Sequence[int]) -> dict[str, Any]:
    """A fast BPE tokenizer as GGUF metadata: the inverse of `build_tokenizer`, which must give it back on every probe.

    `ends` are the model's end tokens; the first is the file's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE":
        raise OptionError("GGUF holds BPE tokenizers only (byte-level, or SentencePiece's); this model has another")
    facts = _vocabulary(tokenizer, model, architecture.vocab, ends)
    for kind in _kinds(model):
        found = {**facts, **kind}
        if _reads_back(found, tokenizer, architecture):
            return found
    raise OptionError("no pre-tokenizer that GGUF names reproduces this model's tokens, so its tokenizer cannot be exported")


def _kinds(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a file may say of a tokenizer of this kind, the likeliest first."""
    if not model.get("byte_fallback"):
        for cut in dict.fromkeys(_CUTS.values()):
            name = next(name for name, known in _CUTS.items() if known == cut and name != "default")
            for bos in (False, True):
                yield {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": bos}
        return
    for space in (True, False):
        for bos in (True, False):
            yield {
                "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.add_bos_token": bos,
                "tokenizer.ggml.add_space_prefix": space,
            }  # fmt: skip


def _vocabulary(tokenizer: Any, model: dict[str, Any], vocab: int, ends: Sequence[int]) -> dict[str, Any]:
    """Tokens, their kinds and merges; places that the tokenizer leaves empty are filled, for llama.cpp wants a token for
    each row of the embedding."""
    added = tokenizer.added_tokens_decoder
    names = {index: token for token, index in model["vocab"].items()} | {index: str(one) for index, one in added.items()}
    if names and max(names) >= vocab:
        raise OptionError(f"the tokenizer has token {max(names)}, the model's vocabulary has {vocab}")
    unknown = model.get("unk_token")
    tokens, types = [], []
    for index in range(vocab):
        token = names.get(index)
        if token is None:
            tokens.append(f"[PAD{index}]")
            types.append(_UNUSED)
            continue
        tokens.append(token)
        if index in added:
            types.append(_CONTROL if added[index].special else _USER_DEFINED)
        elif model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types.append(_BYTE)
        else:
            types.append(_UNKNOWN if token == unknown else _NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    facts: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", "", 1), rank)
        facts["tokenizer.ggml.scores"] = [-float(ranks.get(token, len(merges))) if kind == _NORMAL else 0.0
                                          for token, kind in zip(tokens, types, strict=True)]  # fmt: skip
    else:
        facts["tokenizer.ggml.merges"] = merges
    ids = {"bos": tokenizer.bos_token_id, "eos": ends[0] if ends else tokenizer.eos_token_id,
           "unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}  # fmt: skip
    facts |= {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    if len(ends) > 1:
        facts["tokenizer.ggml.eot_token_id"] = ends[1]
    return facts | ({"tokenizer.chat_template": template} if isinstance(template := tokenizer.chat_template, str) else {})


def _reads_back(metadata: dict[str, Any], tokenizer: Any, architecture: Architecture) -> bool:
    """Whether the reader would make the same tokens of every probe."""
    try:
        backend = (_byte_level if metadata["tokenizer.ggml.model"] == "gpt2" else _pieces)(metadata, architecture)
        again = _wrapped(metadata, backend)
        return all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in PROBES)
    except Exception:  # tokenizers reports every fault of a vocabulary as a bare Exception
        return False


def _token(metadata: dict[str, Any], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if index is None else metadata["tokenizer.ggml.tokens"][index]
