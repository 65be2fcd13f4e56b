"""Chat templates and tokenizers that never end, take all memory or panic: one line, and the next one works."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import fathomlm
from fathomlm.checkpoints import confined
from fathomlm.checkpoints.confined import Confined, Refused, TokenizerTrial, no_panic, render_chat
from fathomlm.checkpoints.huggingface import read_tokenizer
from fathomlm.decode.prompts import chat_prompt
from fathomlm.errors import CheckpointError, OptionError

CHAT = [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": "Hi \U0001f600\n"}]
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}"
    "{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% break %}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ dict(a=1) | tojson }}{{ range(3) | list }}",
    "blocks": "  {% if messages %}\n  {{- messages[0]['content'] }}\n  {% endif %}\nend",
}
HOSTILE = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "repetition": "{{ 'a' * 8000000000 }}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "format": "{{ '%8000000000d' % 1 }}",
    "justified": "{{ 'a'.ljust(8000000000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "much text": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "syntax": "{% for %}",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Little CPU time, so that what runs for ever ends soon."""
    process = Confined(confined.RENDER_MEMORY, 1)
    monkeypatch.setattr(confined, "_renderer", lambda: process)
    yield process
    process.close()


def with_template(tokenizer: Any, template: str) -> Any:
    names = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    found = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, **names)
    found.chat_template = template
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_transformers_renders_them(tiny_tokenizer: Any, name: str, prompt: bool) -> None:
    tokenizer = with_template(tiny_tokenizer, TEMPLATES[name])
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert render_chat(tokenizer, CHAT, add_generation_prompt=prompt) == expected


def test_a_last_message_is_continued_as_in_transformers(tiny_tokenizer: Any) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "The answer"}]
    for name in ("chatml", "tokens"):
        tokenizer = with_template(tiny_tokenizer, TEMPLATES[name])
        expected = tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert render_chat(tokenizer, chat, add_generation_prompt=False, continue_last=True) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_line(tiny_tokenizer: Any, quick: Confined, name: str) -> None:
    tokenizer = with_template(tiny_tokenizer, HOSTILE[name])
    with pytest.raises(Refused) as caught:
        render_chat(tokenizer, CHAT)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    tokenizer.chat_template = TEMPLATES["chatml"]
    assert "Be <brief>" in render_chat(tokenizer, CHAT)


def test_what_a_template_refuses_is_said(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(OptionError, match="chat template refused the conversation: roles must alternate"):
        chat_prompt(tiny_model, CHAT)


def test_one_process_renders_all(tiny_tokenizer: Any, quick: Confined) -> None:
    tokenizer = with_template(tiny_tokenizer, "{{ messages | length }}")
    assert render_chat(tokenizer, CHAT) == "2"
    assert quick._process is not None
    first = quick._process.pid
    assert render_chat(tokenizer, CHAT[:1]) == "1"
    assert quick._process.pid == first
    os.kill(first, 9)
    quick._process.wait()
    assert render_chat(tokenizer, CHAT) == "2"


@pytest.fixture
def stored(tiny_tokenizer: Any, tmp_path: Path) -> Path:
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path / "tokenizer.json"


def change(path: Path, **parts: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def replace(text: str, content: str, times: int) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": text}, "content": content}] * times,
    }


def test_a_sound_tokenizer_passes_and_is_tried_once(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    send = Confined.send
    monkeypatch.setattr(Confined, "send", lambda self, task: (tried.append(task), send(self, task))[1])
    monkeypatch.setattr(confined, "_passed", lambda found=set(): found)
    for _ in range(2):
        found = read_tokenizer(stored.parent)
        assert found is not None
        assert found("the water is deep")["input_ids"]
    assert [task["task"] for task in tried] == ["tokenizer"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"normalizer": replace("a", "aa", 40)}, "its normalizer may make a text 1,000,000,000 times longer"),
        ({"normalizer": replace("\u00df", "\u00df" * 100, 1)}, "its normalizer may make a text 100 times longer"),
        (
            {"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b" * 999}},
            "its decoder may make a text 1,000",
        ),
        ({"model": {"type": "BPE", "vocab": [], "merges": 5}}, "cannot be read"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}, "cannot be read"),
        ({"added_tokens": 5}, "cannot be read"),
    ],
)
def test_hostile_tokenizers_are_refused(stored: Path, parts: dict[str, Any], said: str) -> None:
    change(stored, **parts)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(stored.parent)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_takes_for_ever_is_given_up(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "TOKENIZER_CPU", 1)
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a|a|a|a)*(a|a|a|a)*(a|a|a|a)*b"},
        "behavior": "Isolated",
        "invert": False,
    }
    change(stored, pre_tokenizer={"type": "Sequence", "pretokenizers": [slow] * 4000})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tokenizer(stored.parent)


def test_a_panic_is_an_error_of_ours() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(CheckpointError, match=r"here: the tokenizer failed \(index out of bounds\)"), no_panic("here"):
        raise panic("index\nout of bounds")
    with pytest.raises(KeyboardInterrupt), no_panic("here"):
        raise KeyboardInterrupt


def test_transformers_is_not_given_a_models_config(stored: Path, tiny_tokenizer: Any) -> None:
    """It would make a table of `num_labels` names."""
    (stored.parent / "config.json").write_text(json.dumps({"model_type": "llama", "num_labels": 10**12}))
    found = read_tokenizer(stored.parent)
    assert found is not None
    assert found("the water")["input_ids"] == tiny_tokenizer("the water")["input_ids"]


def test_a_packaged_model_loads_through_all_of_this() -> None:
    model = fathomlm.load("fathom-mor-23m")
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer("The deep")["input_ids"]) == "The deep"


def test_a_file_that_is_too_large_is_not_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "MAX_TOKENIZER", 100)
    with pytest.raises(CheckpointError, match="more than 100 bytes"):
        TokenizerTrial(stored)
