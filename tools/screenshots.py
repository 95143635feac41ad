"""Pictures of the dashboard: python -m tools.screenshots docs/images/dashboard.png

An EMULATED cluster of eight stages with the times of RTX 3090s, guesses by the demo draft, and as
many requests as asked for; the tree of the first is watched. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks import emulated
from benchmarks.http_server import HttpServer

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)
STAGES = 8
HEIGHT = 1500
PROMPTS = (
    "Once upon a time there was a little girl who",
    "Tom has three apples and buys four more. How many",
    "The king looked out of the window and saw",
)
# The tree is held when more than so many of its nodes are in flight.
FLIGHT = 15
READY_MS = 120_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the picture, a PNG")
    parser.add_argument("--width", type=int, default=1280, help="of the page (1280)")
    parser.add_argument("--scheme", choices=("light", "dark"), default="dark", help="(dark)")
    parser.add_argument("--requests", type=int, default=6, help="at once (6)")
    parser.add_argument("--seconds", type=float, default=20, help="before the picture (20)")
    parser.add_argument("--chromium", default=CHROMIUM, help=f"({CHROMIUM})")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        settings = (
            *emulated.target(STAGES, where),
            *(f"cluster.stages={STAGES}", "cluster.devices=[cpu]", "pace=rtx3090_8"),
            *("source=draft_model", "feed=best_first", "feed.width=32"),
        )
        with HttpServer(where, *settings) as server:
            for number in range(options.requests):
                prompt = PROMPTS[number % len(PROMPTS)]
                threading.Thread(target=ask, args=(server.place.root, prompt), daemon=True).start()
            take(server.place.root, options)


def ask(url: str, prompt: str) -> None:
    """A request that is still open when the picture is taken."""
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request).read()
    except OSError:
        return  # the server has ended


def take(url: str, options: argparse.Namespace) -> None:
    """The picture."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=options.chromium, args=[*ARGUMENTS])
        size: Any = {"width": options.width, "height": HEIGHT}
        page = browser.new_page(viewport=size, color_scheme=options.scheme)
        page.goto(url)
        page.locator("#requests .watch").first.click(timeout=READY_MS)
        page.locator("#tree svg").wait_for(timeout=READY_MS)
        page.wait_for_timeout(1000 * options.seconds)
        page.locator("#tree g.flight").nth(FLIGHT).wait_for(timeout=READY_MS)
        page.click("#pause")
        options.file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=options.file, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
