"""Pictures of the page for the documentation: `python tests/serve/screenshots.py` writes docs/page-*.png.

It serves the model that comes with FathomLM, or another, with an exit where that is asked for, and drives the system's
Chromium over the page. Pictures have 128 colours, which the page does with, to be small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

PROMPT = "Cells divide in order to"
SHOTS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 780}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 880}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
}


def take(browser: Any, url: str, name: str, tokens: int) -> bytes:
    page = browser.new_page(**SHOTS[name])
    page.goto(f"{url}/")
    page.wait_for_selector("#model:has-text('steps over')")
    page.fill("#prompt", PROMPT)
    page.fill("#tokens", str(tokens))
    if name == "dark":
        page.check("#compare")
        if page.inner_text("#depth-name") == "Maximum depth":
            page.fill("#depth", "1")
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])", timeout=600_000)
    page.wait_for_timeout(1200)  # the charts look once a second
    page.hover("#first .token >> nth=4")
    if name == "phone":
        page.evaluate("() => scrollTo(0, document.getElementById('texts-title').getBoundingClientRect().top + scrollY - 28)")
    shot: bytes = page.screenshot()
    page.close()
    return shot


def main() -> None:
    import torch
    from PIL import Image
    from playwright.sync_api import sync_playwright

    import fathomlm
    from fathomlm.decode.exiting import Exiting
    from serve.serving import running

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="fathom-mor-23m")
    parser.add_argument("--exit-layer", type=int, help="for a model without a router")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("names", nargs="*", default=list(SHOTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = fathomlm.load(args.model)
    sizes: dict[str, Any] = {"batch_size": 4, "max_length": 256, "page_size": 16}
    if args.exit_layer is not None:
        sizes["exiting"] = Exiting(mode="parallel", exit_layers=(args.exit_layer,), threshold=args.threshold)
    with running(model, name=Path(args.model).name, **sizes) as server, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in args.names:
            picture = Image.open(io.BytesIO(take(chromium, server.url, name, args.tokens)))
            file = args.out / f"page-{name}.png"
            picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
            print(f"{file}: {file.stat().st_size // 1024} KB")
        chromium.close()


if __name__ == "__main__":
    main()
