"""Pictures of the page for the documentation: `python tests/serve/screenshots.py` writes docs/page-*.png.

It serves the model that comes with FathomLM beside SmolLM2-135M, and drives the system's Chromium over the page. Pictures
have 128 colours, which the page does with, to be small.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

PROMPT, QUESTION = "Cells divide in order to", "Why is the sky blue?"
CHAT = "smollm2-135m"
SHOTS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}


def take(browser: Any, url: str, name: str, tokens: int) -> bytes:
    page = browser.new_page(**SHOTS[name])
    kept = {"fields": {"tokens": str(tokens), "seed": "0"}}
    page.add_init_script(f"localStorage.setItem('fathomlm.settings', {json.dumps(json.dumps(kept))})")
    page.goto(f"{url}/")
    page.wait_for_selector("#send:not([disabled])")
    if name == "phone":
        page.click("#to-chat")
        page.wait_for_selector("input[value=chat]:checked", state="attached", timeout=600_000)
    if name == "dark":
        page.select_option("#compare", "depth")
        page.fill("#other-depth", "1")
    page.fill("#prompt", QUESTION if name == "phone" else PROMPT)
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])", timeout=600_000)
    if name == "phone":
        page.evaluate("() => scrollTo(0, 0)")
    else:
        page.hover(".token >> nth=6")
    shot: bytes = page.screenshot()
    page.close()
    return shot


def main() -> None:
    import torch
    from PIL import Image
    from playwright.sync_api import sync_playwright

    import fathomlm
    from fathomlm.engine.engine import Engine
    from fathomlm.serve.served_model import serve_model
    from fathomlm.serve.service import Catalog, Offer
    from serve.serving import running

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("names", nargs="*", default=list(SHOTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"batch_size": 4, "max_length": 256, "page_size": 16, "max_logprobs": 20}
    catalog = Catalog({CHAT: Offer(load=lambda: serve_model(Engine(fathomlm.load(CHAT), **sizes), name=CHAT))})
    bundled = fathomlm.load("fathom-mor-23m")
    with running(bundled, name="fathom-mor-23m", catalog=catalog, **sizes) as server, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in args.names:
            picture = Image.open(io.BytesIO(take(chromium, server.url, name, args.tokens)))
            file = args.out / f"page-{name}.png"
            picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
            print(f"{file}: {file.stat().st_size // 1024} KB")
        chromium.close()


if __name__ == "__main__":
    main()
