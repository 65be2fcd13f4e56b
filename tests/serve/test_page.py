"""The page, driven in a real browser: wherever a Chromium is found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from serve.serving import Running, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page was not tried in a browser"),
    pytest.mark.usefixtures("one_thread"),
]
SHAPE: dict[str, Any] = {
    "layers": 8,
    "hidden": 32,
    "intermediate": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context": 256,
}


def make(kind: str, tokenizer: Any) -> FathomForCausalLM:
    architecture = Architecture(family="llama", vocab=len(tokenizer), tied_embeddings=False, **SHAPE)
    plan = DepthPlan.vanilla(8)
    if kind == "routed":
        plan = DepthPlan.build("middle-cycle", 3, 8).with_routing(build_routing("expert", 3))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = FathomForCausalLM(FathomConfig.of(architecture, plan, dtype=torch.float32, **ids))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    model.tokenizer = tokenizer
    return model.eval()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def routed(tiny_tokenizer: Any) -> Iterator[Running]:
    with running(make("routed", tiny_tokenizer), max_length=200) as server:
        yield server


@pytest.fixture(scope="module")
def exits(tiny_tokenizer: Any) -> Iterator[Running]:
    leave = Exiting(mode="parallel", exit_layers=(3,), threshold=0.05)
    with running(make("exits", tiny_tokenizer), exiting=leave, max_length=200) as server:
        yield server


class Page:
    """A page and what its console said."""

    def __init__(self, browser: Any, server: Running, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.problems: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.problems.append(said.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(f"{server.url}/")
        self.page.wait_for_selector("#model:has-text('steps over')")

    def write(self, prompt: str, tokens: int = 20) -> None:
        self.page.fill("#prompt", prompt)
        self.page.fill("#tokens", str(tokens))
        self.page.click("#send")
        self.page.wait_for_selector("#send:not([disabled])", timeout=600_000)
        assert self.page.inner_text("#problem") == ""

    def depths(self, side: str) -> str:
        return str(self.page.inner_text(f"#{side} .facts"))


def test_type_stream_slide_and_compare(browser: Any, routed: Running) -> None:
    here = Page(browser, routed)
    here.write("the depth of the water is")
    assert here.page.locator("#first .token").count() == 20
    assert "of 3" in here.depths("first")
    assert here.page.locator("#second").is_hidden()
    here.page.hover("#first .token >> nth=3")
    assert "depth" in here.page.inner_text("#details")
    here.page.fill("#depth", "1")
    assert here.page.inner_text("#depth-value") == "1"
    here.page.check("#compare")
    here.write("the depth of the water is")
    assert "mean depth 1.00" in here.depths("first")
    assert "mean depth 1.00" not in here.depths("second")
    assert here.page.inner_text("#agreement") != ""
    here.page.locator("#first .text").focus()
    here.page.keyboard.press("ArrowRight")
    assert here.page.locator(".token.chosen").count() == 1
    assert here.problems == []
    here.page.close()


def test_a_threshold_of_1_is_full_depth(browser: Any, exits: Running) -> None:
    here = Page(browser, exits)
    here.write("the fox")
    assert "mean depth 8.00" not in here.depths("first")
    here.page.fill("#depth", "1")
    here.write("the fox")
    assert "mean depth 8.00" in here.depths("first")
    assert here.problems == []
    here.page.close()


def test_dark_and_on_a_phone(browser: Any, routed: Running) -> None:
    here = Page(browser, routed, viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert here.page.get_attribute("html", "data-theme") == "dark"
    here.page.click("#theme")
    assert here.page.get_attribute("html", "data-theme") == "light"
    here.write("a fathom", 8)
    wide = here.page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 390, "the page is wider than the phone"
    assert here.problems == []
    here.page.close()


def test_text_is_never_markup(browser: Any, routed: Running) -> None:
    here = Page(browser, routed)
    here.write("<script>document.title = 'mine'</script><img src=x onerror=alert(1)>", 4)
    assert here.page.title() == "FathomLM playground"
    assert here.page.locator("#texts script, #texts img").count() == 0
    assert "<script>" in here.page.inner_text("#first .text")
    assert here.problems == []
    here.page.close()


def test_a_mistake_is_told(browser: Any, routed: Running) -> None:
    here = Page(browser, routed)
    here.page.fill("#tokens", "4000")
    here.page.click("#send")
    here.page.wait_for_selector("#problem:not(:empty)")
    assert "4000" in here.page.inner_text("#problem") or "max_tokens" in here.page.inner_text("#problem")
    here.page.close()
