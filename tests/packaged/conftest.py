"""What the real SmolLM2-135M replies, which the tests of what ships for it compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from packaged.shipped import MESSAGES, REPLY

if TYPE_CHECKING:
    from fathomlm.model.hub import FathomForCausalLM


@pytest.fixture(scope="session")
def prompts(smollm2: FathomForCausalLM) -> list[list[int]]:
    from fathomlm.decode.prompts import chat_prompt

    return [chat_prompt(smollm2, [{"role": "user", "content": message}]) for message in MESSAGES]


@pytest.fixture(scope="session")
def replies(smollm2: FathomForCausalLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Computed once for the whole run: a pass of the real model takes long."""
    import fathomlm

    return [row.tokens for row in fathomlm.generate(smollm2, prompts, max_new_tokens=REPLY)]
