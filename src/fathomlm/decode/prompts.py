"""From what a user gives to token ids that the model can read, or a sentence that says why not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fathomlm.checkpoints.assemble import end_ids
from fathomlm.checkpoints.confined import Refused, no_panic, render_chat
from fathomlm.errors import OptionError
from fathomlm.model.encoder_memory import EncoderMemory
from fathomlm.model.seq2seq import FathomForSeq2SeqLM, FathomModel

Prompt = str | Sequence[int]


def encode_prompts(model: FathomModel, prompts: str | Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each prompt; one text is a batch of one. An empty prompt becomes the model's begin token."""
    if isinstance(prompts, str):
        prompts = [prompts]
    return [encode_prompt(model, prompt) for prompt in prompts]


def encode_prompt(model: FathomModel, prompt: Prompt, *, special: bool = True) -> list[int]:
    """`special` has the tokenizer add its special tokens to a text."""
    tokens = _ids(_tokenizer(model), prompt, special) if isinstance(prompt, str) else _checked_ids(prompt)
    if not tokens:
        begin: int | None = model.config.bos_token_id
        if begin is None:
            raise OptionError("the prompt is empty and this model has no BOS token to start from")
        tokens = [begin]
    vocab = model.architecture.vocab
    for token in tokens:
        if not 0 <= token < vocab:
            raise OptionError(f"token id {token} is outside the model's vocabulary of {vocab}")
    return tokens


def start_token(model: FathomForSeq2SeqLM) -> int:
    """What an encoder-decoder model's answer begins from."""
    start: int | None = model.config.decoder_start_token_id
    if start is None:
        raise OptionError("this model's config has no decoder_start_token_id")
    return start


@torch.inference_mode()
def read_sources(model: FathomForSeq2SeqLM, sources: Sequence[Sequence[int]]) -> EncoderMemory:
    """The encoder's output for a batch of sources, padded on the right; padding is seen by no one."""
    longest = max(len(source) for source in sources)
    device = model.decoder.embed.weight.device
    tokens_BS = torch.tensor([[*source, *[0] * (longest - len(source))] for source in sources], device=device)
    lengths_B1 = torch.tensor([[len(source)] for source in sources], device=device)
    return model.encode(tokens_BS, torch.arange(longest, device=device) < lengths_B1)


def chat_prompt(
    model: FathomModel,
    messages: Sequence[Mapping[str, Any]],
    check: Callable[[str], object] = lambda text: None,
    *,
    special: bool = False,
    begins_reply: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """A conversation ({"role": ..., "content": ...}) in the model's own chat format, up to where the reply begins. `check`
    sees the text before it is tokenised, and may refuse it. Templates write special tokens themselves; `special` adds those
    of the tokenizer. Without `begins_reply` the text ends with the last message. `tools` are functions that the template
    describes."""
    tokenizer = _tokenizer(model)
    if tokenizer.chat_template is None:
        raise OptionError("this model has no chat template; use plain prompts")
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=begins_reply, tools=tools)
    except Refused as error:
        raise OptionError(f"the model's chat template refused the conversation: {error}") from error
    check(text)
    return encode_prompt(model, _ids(tokenizer, text, special))


def end_tokens(model: FathomModel) -> frozenset[int]:
    """The ids after which a sequence is over."""
    return frozenset(end_ids(model.config.eos_token_id))


def check_context(prompt_tokens: int, max_new_tokens: int, context: int) -> None:
    """Refuse what would run past the context, before any work is done."""
    if prompt_tokens + max_new_tokens > context:
        raise OptionError(
            f"{prompt_tokens} prompt tokens and max_new_tokens={max_new_tokens} make {prompt_tokens + max_new_tokens}, "
            f"more than the context of {context}"
        )


def _tokenizer(model: FathomModel) -> Any:
    if model.tokenizer is None:
        raise OptionError(
            "this model has no tokenizer, so it takes no text (from Python, prompts may be lists of token ids)"
        )
    return model.tokenizer


def _ids(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"the prompt is not valid Unicode text ({error.reason} at {error.start})") from error
    # Not verbose: transformers would warn about length, and `check_context` refuses it.
    with no_panic("the prompt", OptionError):
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return ids


def _checked_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise OptionError(
            f"prompts must be a string, a list of strings or a list of token-id lists; got {prompt!r}"
        ) from error
