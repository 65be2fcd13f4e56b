"""One server for the tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serve.serving import Running, running


@pytest.fixture(scope="module")
def server(tiny_model: Any, one_thread: None) -> Iterator[Running]:
    with running(tiny_model) as found:
        yield found
