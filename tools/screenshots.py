"""The pictures of README and docs (`make pictures`).

    python -m tools.screenshots dashboard docs/images/dashboard.png
    python -m tools.screenshots race docs/images/race.svg POLICY... --prompt TEXT SETTING...

The dashboard shows an EMULATED cluster of eight stages with the times of RTX 3090s, the demo draft
and `--requests` requests, with the tree of the first one. Needs playwright
and Chromium. The race is the table that `pipespec compare` ends with.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console

from pipespec.instruments.bench.comparison import compare, composed, policies_of
from pipespec.instruments.bench.dataset import Sample
from pipespec.instruments.commands.compare import Board
from tools.rig.http_server import HttpServer

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
COLUMNS = 110  # of the race


def main() -> None:
    whole = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = whole.add_subparsers(required=True)
    parser = kinds.add_parser("race")
    parser.set_defaults(run=race)
    parser.add_argument("file", type=Path, help="the picture, an SVG")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "settings", nargs="+", help="policies and settings, as for pipespec compare"
    )
    parser = kinds.add_parser("dashboard")
    parser.set_defaults(run=dashboard)
    parser.add_argument("file", type=Path, help="the picture, a PNG")
    parser.add_argument("--width", type=int, default=1280, help="of the page (1280)")
    parser.add_argument("--scheme", choices=("light", "dark"), default="dark", help="(dark)")
    parser.add_argument("--requests", type=int, default=6, help="at once (6)")
    parser.add_argument("--seconds", type=float, default=20, help="before the picture (20)")
    parser.add_argument("--chromium", default=CHROMIUM, help=f"({CHROMIUM})")
    options = whole.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.run(options)


def race(options: argparse.Namespace) -> None:
    """Decode with several policies, and draw the table."""
    policies, settings = policies_of(options.settings)
    board = Board(policies)
    compare(
        composed(settings, policies),
        [Sample("prompt", "prompt", options.prompt)],
        on_change=board.change,
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(board.table())
    svg = console.export_svg(title="make race")
    options.file.write_text(re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL))  # others' fonts


def dashboard(options: argparse.Namespace) -> None:
    """Send requests to a cluster, and take a picture of its page."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        settings = (
            *(f"cluster.stages={STAGES}", "cluster.devices=[cpu]", "emulate=rtx3090_8"),
            *("proposer=draft_model", "policy=best_first", "policy.width=32"),
        )
        with HttpServer(where, *settings) as server:
            for number in range(options.requests):
                prompt = PROMPTS[number % len(PROMPTS)]
                threading.Thread(
                    target=ask, args=(server.address.root, prompt), daemon=True
                ).start()
            take(server.address.root, options)


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
        page.screenshot(path=options.file, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
