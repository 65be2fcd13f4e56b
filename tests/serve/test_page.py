"""The page, driven in a real browser: wherever a Chromium is found."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fathomlm.decode.exiting import Exiting
from fathomlm.depth import Architecture, DepthPlan, build_routing
from fathomlm.depth.colours import depth_colours, ink
from fathomlm.engine.engine import Engine
from fathomlm.errors import ModelNotFound
from fathomlm.model.hub import FathomConfig, FathomForCausalLM
from fathomlm.serve.options import ServeOptions
from fathomlm.serve.served_model import serve_model
from fathomlm.serve.service import Catalog, Offer
from random_weights import randomise
from serve.serving import SMALL, Running, running

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
    randomise(model)
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
def several(tiny_tokenizer: Any, tiny_model: Any) -> Iterator[Running]:
    """Like `fathomlm serve`: a routed model that cannot chat, beside one that can and one that cannot be had."""
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None

    def missing() -> NoReturn:
        raise ModelNotFound("the package index cannot be reached")

    offers = {
        "talker": Offer(load=lambda: serve_model(Engine(tiny_model, **SMALL | {"max_length": 256}), name="talker")),
        "absent": Offer(load=missing, download=lambda: 92_871_040),
    }
    with running(make("routed", tokenizer), name="routed", catalog=Catalog(offers, 2), max_length=200) as server:
        yield server


@pytest.fixture(scope="module")
def exits(tiny_tokenizer: Any) -> Iterator[Running]:
    leave = Exiting(mode="parallel", exit_layers=(3,), threshold=0.05)
    with running(make("exits", tiny_tokenizer), exiting=leave, max_length=200) as server:
        yield server


class Page:
    """A page, what its console said, and the requests that it sent."""

    def __init__(self, browser: Any, server: Running, key: str | None = None, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.problems: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._note)
        self.page.goto(f"{server.url}/")
        if key is not None:
            self.page.wait_for_selector("#model:has-text('API key')")
            self.page.fill("#key", key)
            self.page.press("#key", "Tab")
        self.ready()

    def _note(self, request: Any) -> None:
        if request.url.endswith("completions"):
            self.sent.append(json.loads(request.post_data))

    def ready(self) -> None:
        self.page.wait_for_selector("#model:has-text('layers')", timeout=600_000)
        self.page.wait_for_selector("#send:not([disabled])", timeout=600_000)

    def write(self, text: str, tokens: int = 8, **fields: str) -> None:
        self.set(tokens=str(tokens), **{"temperature": "0", "seed": "0"} | fields)
        self.page.fill("#prompt", text)
        self.page.click("#send")
        self.ready()

    def set(self, **fields: str) -> None:
        for name, value in fields.items():
            self.page.fill(f"#{name.replace('_', '-')}", value)

    def chat(self) -> None:
        self.page.click("#to-chat")
        self.page.wait_for_selector("input[value=chat]:checked", state="attached")
        self.ready()

    def all(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def close(self) -> None:
        assert self.problems == []
        self.page.close()


def test_what_a_model_cannot_do_is_not_offered(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    assert here.page.is_disabled("input[value=chat]")
    assert "routed has no chat template" in here.page.inner_text("#kind-note")
    names = here.page.locator("#model-choice option").all_text_contents()
    assert [name.split()[0] for name in names] == ["routed", "talker", "absent"]
    assert names[-1] == "absent (93 MB download)"
    here.chat()
    assert here.page.input_value("#model-choice") == "talker"
    assert here.page.is_enabled("input[value=chat]")
    assert here.page.is_hidden("#to-chat")
    here.write("a fathom is", 4)
    assert here.sent[-1]["messages"] == [{"role": "user", "content": "a fathom is"}]
    assert here.all(".reply h3") == ["talker"]
    assert "Every token went through all 4 layers" in here.page.inner_text(".saved")
    here.close()


def test_a_model_that_cannot_be_had_is_told_and_the_one_before_stays(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.page.select_option("#model-choice", "absent")
    here.page.wait_for_selector("#problem:not(:empty)")
    here.ready()
    assert "the package index cannot be reached" in here.page.inner_text("#problem")
    assert here.page.input_value("#model-choice") == "routed"
    here.write("the fox", 2)
    assert here.page.locator(".token").count() == 2
    here.problems = [one for one in here.problems if "404" not in one]  # the browser's own line about the answer
    here.close()


def test_two_depths_side_by_side_in_the_colours_of_every_plot(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.page.select_option("#compare", "depth")
    here.set(depth="1", other_depth="3")
    assert here.page.inner_text("#depth-value") == "1"
    here.write("the depth of the water is", 20)
    assert here.all(".reply h3") == ["routed, at most 1 recursion", "routed, the router's own depth"]
    assert [one["fathom"] for one in here.sent] == [{"depths": True, "max_depth": depth} for depth in (1, 3)]
    first, second = here.all(".facts")
    assert "20 tokens" in first
    assert "mean depth 1.00 of 3" in first
    assert "mean depth 1.00" not in second
    core = (several.engine.model.plan.unrolled_layers - several.engine.model.plan.unique_layers) // 2
    whole = several.engine.model.plan.unrolled_layers
    part = round(100 * 2 * core / whole)
    assert f"Depth saved: {part} %. The tokens ran {20 * (whole - 2 * core)} layers" in here.all(".saved")[0]
    assert here.page.inner_text(".agreement") != ""
    shown = here.page.locator(".chip").evaluate_all(
        "(all) => all.map((one) => [one.textContent, getComputedStyle(one).backgroundColor, getComputedStyle(one).color])"
    )
    colours = depth_colours(3)
    assert len({text.partition(":")[0] for text, _, _ in shown}) >= 2
    for text, back, letters in shown:
        colour = colours[int(text.split()[1].rstrip(":"))]
        assert (_hex(back), _hex(letters)) == (colour, ink(colour))
    here.page.hover(".token >> nth=3")
    assert "depth 1" in here.page.inner_text("#details")
    here.page.locator(".text >> nth=1").focus()
    here.page.keyboard.press("ArrowRight")
    assert here.page.locator(".token.chosen").count() == 1
    here.close()


def _hex(colour: str) -> str:
    return "#" + "".join(f"{int(part):02x}" for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_two_thresholds_and_drafted_tokens_in_words(browser: Any, exits: Running) -> None:
    here = Page(browser, exits)
    here.page.select_option("#compare", "depth")
    here.write("the fox", 12)
    assert here.all(".reply h3") == ["tiny, threshold 0.05", "tiny, full depth"]
    assert "mean depth 8.00 of 8" in here.all(".facts")[1]
    drafted, full = here.all(".saved")
    assert "Drafted at an exit: " in drafted
    assert "kept without verification" in drafted
    assert full == "Depth saved: none. All 12 tokens went through all 8 layers."
    words = here.page.evaluate(
        """async () => (await import("/static/words.js")).saved(
            [{ depth: 2 }, { depth: 2 }, { depth: 8 }], { kind: "exits", mode: "speculative", steps: 8, deepest: 8 })"""
    )
    assert words == (
        "Depth saved: 50 %. Drafted at an exit: 2 of 3 tokens, verified by the full model, which would have chosen the "
        "same. The other 1 went through all 8 layers."
    )
    here.close()


def test_drafts_are_verified_before_they_are_shown(browser: Any, tiny_tokenizer: Any, exits: Running) -> None:
    """Under a reply which of its tokens were drafted, beside it how many drafts were kept of all."""
    drafts = Exiting(mode="speculative", exit_layers=(7,), threshold=0.0)
    with running(make("exits", tiny_tokenizer), exiting=drafts, max_length=200, always_draft=True) as server:
        here = Page(browser, server)
        here.page.click("#server-panel summary")
        here.write("the fox", 24)
        totals = server.engine.totals
        assert 0 < totals.accepted < totals.drafted
        (saved,) = here.all(".saved")
        assert f"Drafted at an exit: {totals.accepted} of 24 tokens, verified by the full model" in saved
        here.page.wait_for_selector(f"#drafts:has-text('{totals.accepted} of {totals.drafted}')")
        metrics = server.http.get("/metrics").text
        assert f"fathomlm_verified_drafts_total {totals.drafted:.1f}" in metrics
        assert f"fathomlm_kept_drafts_total {totals.accepted:.1f}" in metrics
        here.close()
    other = Page(browser, exits)
    other.page.click("#server-panel summary")
    other.page.wait_for_selector("#fill:has-text('of')")
    assert not other.page.is_visible("#drafts-figure")
    other.close()


def test_two_models_side_by_side(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.page.select_option("#compare", "model")
    here.page.select_option("#other-model", "talker")
    here.write("the fox", 6)
    assert here.all(".reply h3") == ["routed, the router's own depth", "talker"]
    assert [one["model"] for one in here.sent] == ["routed", "talker"]
    assert here.sent[0]["seed"] == here.sent[1]["seed"]
    here.close()


def test_a_conversation_has_turns_that_can_be_edited_and_tried_again(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.chat()
    here.set(system="Be brief.")
    here.write("hello", 5)
    first = here.page.evaluate("() => document.querySelector('.text').textContent")
    here.page.fill("#prompt", "and more")
    here.page.press("#prompt", "Enter")
    here.page.wait_for_selector(".turn >> nth=1")
    here.ready()
    system = {"role": "system", "content": "Be brief."}
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    assert here.sent[-1]["messages"] == [system, *asked, {"role": "user", "content": "and more"}]
    assert here.all(".user .words") == ["hello", "and more"]
    here.page.click(".retry >> nth=1")
    here.ready()
    assert here.sent[-1] == here.sent[-2]
    assert here.page.locator("#other-model option").all_text_contents() == ["absent"]  # the routed one cannot chat
    here.page.click(".edit >> nth=0")
    here.page.fill(".editor textarea", "good day")
    here.page.click(".editor button[type=submit]")
    here.ready()
    assert here.all(".user .words") == ["good day"]
    assert here.sent[-1]["messages"] == [system, {"role": "user", "content": "good day"}]
    here.page.click(".edit")
    here.page.press(".editor textarea", "Escape")
    assert here.page.locator(".editor").count() == 0
    here.close()


def test_history_settings_and_export_outlive_a_reload(browser: Any, several: Running, tmp_path: Path) -> None:
    here = Page(browser, several, accept_downloads=True)
    here.page.select_option("#compare", "depth")
    here.write("the first text", 5, top_p="0.5", top_k="7", stop_strings="never\\nthis\nnor that", depth="2", key="secret")
    body = here.sent[0]
    assert (body["top_p"], body["top_k"], body["stop"]) == (0.5, 7, ["never\nthis", "nor that"])
    text = here.page.inner_text(".text >> nth=0")
    here.page.click("#new")
    here.write("the second text", 3, top_p="1", top_k="0", stop_strings="")
    assert not {"top_p", "top_k", "stop"} & set(here.sent[-1])
    here.page.reload()
    here.ready()
    assert here.all("#history .title") == ["the second text", "the first text"]
    assert here.page.locator(".turn").count() == 1
    assert [here.page.input_value(f"#{name}") for name in ("tokens", "top-p", "compare", "depth", "key")] == [
        "3", "1", "depth", "2", "secret",
    ]  # fmt: skip
    here.page.click("#history .title >> nth=1")
    assert here.page.inner_text(".text >> nth=0") == text
    assert here.page.locator(".reply >> nth=0").locator(".token").count() == 5
    files = {}
    for name in ("json", "markdown"):
        with here.page.expect_download() as found:
            here.page.click(f"#export-{name}")
        file = tmp_path / found.value.suggested_filename
        found.value.save_as(file)
        files[file.suffix] = file.read_text(encoding="utf-8")
    record = json.loads(files[".json"])
    assert record["turns"][0]["user"] == "the first text"
    assert [len(reply["tokens"]) for reply in record["turns"][0]["replies"]] == [5, 5]
    assert files[".md"].startswith("# the first text\n\n**Prompt:** the first text\n\n**routed, at most 2 recursions:** ")
    here.page.click("#history .away >> nth=0")
    assert here.all("#history .title") == ["the first text"]
    here.page.click("#forget")
    assert here.page.locator("#history li, .turn").count() == 0
    here.close()


def test_escape_stops_and_what_was_written_stays(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.set(tokens="180", temperature="2", seed="1")
    here.page.fill("#prompt", "on and on")
    here.page.click("#send")
    here.page.wait_for_selector(".token", state="attached")
    here.page.keyboard.press("Escape")
    here.ready()
    assert "stopped by you" in here.page.inner_text(".facts")
    assert 1 <= here.page.locator(".token").count() < 180
    assert here.page.is_disabled("#stop")
    here.page.click("#send")
    here.page.wait_for_selector(".turn >> nth=1 >> .token", state="attached")
    here.page.click("#new")  # leaving a conversation stops its reply too
    here.ready()
    assert here.page.locator(".turn").count() == 0
    here.page.click("#history .title")
    assert ["stopped by you" in facts for facts in here.all(".facts")] == [True, True]
    here.page.click(".retry >> nth=1")
    here.page.click("#history .away")
    here.ready()
    assert here.page.locator("#history li").count() == 0
    here.close()


def test_a_request_that_fails_leaves_no_stale_reply(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.write("the fox", 4)
    assert here.page.locator(".token").count() == 4
    here.set(tokens="4000")
    here.page.click(".retry")
    here.page.wait_for_selector(".failed")
    assert "4000" in here.page.inner_text("#problem")
    assert here.page.locator(".token, .chip").count() == 0
    here.set(tokens="3")
    here.page.click(".retry")
    here.page.wait_for_selector(".token", state="attached")
    here.ready()
    assert here.page.inner_text("#problem") == ""
    assert here.page.locator(".failed").count() == 0
    assert here.page.locator(".token").count() == 3
    here.problems = [one for one in here.problems if "400" not in one]
    here.close()


def test_dark_and_on_a_phone(browser: Any, several: Running) -> None:
    here = Page(browser, several, viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert here.page.get_attribute("html", "data-theme") == "dark"
    here.page.click("#theme")
    assert here.page.get_attribute("html", "data-theme") == "light"
    assert here.page.is_hidden("#tokens")
    here.page.click("#settings-panel summary")
    here.write("a fathom", 8)
    wide = here.page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= 390, "the page is wider than the phone"
    here.close()


def test_a_server_with_a_key_asks_for_it(browser: Any, tiny_model: Any) -> None:
    with running(tiny_model, ServeOptions(api_keys=("secret",))) as guarded:
        here = Page(browser, guarded, key="secret")
        here.write("the fox", 2)
        assert here.page.locator(".token").count() == 2
        here.problems = [one for one in here.problems if "401" not in one]
        here.close()


def test_text_is_never_markup(browser: Any, several: Running) -> None:
    here = Page(browser, several)
    here.write("<script>document.title = 'mine'</script><img src=x onerror=alert(1)>", 4)
    here.page.reload()
    here.ready()
    assert here.page.title() == "FathomLM"
    assert here.page.locator("#turns script, #turns img, #history img").count() == 0
    assert "<script>" in here.page.inner_text(".text")
    here.close()


def test_a_request_can_be_taken_along(browser: Any, several: Running) -> None:
    """As a curl command that a server understands, and as Python that runs."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    here = Page(context, several)
    here.set(tokens="3", top_k="5", seed="0")
    here.page.fill("#prompt", "it's deep")
    here.page.click("#copy-curl")
    curl = here.page.evaluate("() => navigator.clipboard.readText()")
    words = shlex.split(curl)
    assert several.http.post(words[1], json=json.loads(words[-1])).json()["usage"]["completion_tokens"] == 3
    here.page.click("#copy-python")
    exec(compile(here.page.evaluate("() => navigator.clipboard.readText()"), "copied", "exec"), {"print": lambda _: None})
    here.close()
    context.close()
