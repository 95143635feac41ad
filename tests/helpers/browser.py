"""A real browser, on machines that have one. Importing this skips a module without playwright."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")
KEY = "a-key"


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A browser, started with these arguments and `ARGUMENTS`."""
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=[*ARGUMENTS, *arguments])
        try:
            yield browser
        finally:
            browser.close()


class View:
    """A page that was opened with an API key (None: without), and what it did that it should not.

    `url` is the address of the server, and further options are those of playwright's contexts.
    """

    def __init__(
        self, browser: Any, url: str, path: str = "/", key: str | None = KEY, **options: Any
    ):
        self.context = browser.new_context(**options)
        if key is not None:
            kept = f"sessionStorage.setItem('pipespec-key', {json.dumps(key)})"
            self.context.add_init_script(kept)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.url = url
        self.page.goto(url + path)

    def _said(self, message: Any) -> None:
        # Browsers report by themselves that a request has failed.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def wait(self, expression: str) -> None:
        # What would wait in the page evaluates strings there, which its policy forbids.
        until(lambda: self.page.evaluate(expression), what=expression)

    def close(self) -> None:
        self.context.close()
        assert self.problems == []
        own = (self.url, "data:", f"blob:{self.url}")
        assert {url for url in self.asked if not url.startswith(own)} == set()


def check_controls(page: Any, least: int) -> None:
    """Every control that is visible has a name for screen readers, and nothing stands out at the
    side; there are `least` controls or more."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    visible = "button, input, select, textarea, summary, a[href], [tabindex]"
    controls = [each for each in page.locator(visible).all() if each.is_visible()]
    assert len(controls) >= least
    for control in controls:
        tree = control.aria_snapshot()
        assert '"' in tree.split("\n")[0], tree
