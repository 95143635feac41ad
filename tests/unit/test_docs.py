import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import figures
from pipespec.cli.main import COMMANDS
from pipespec.config.hosts import FILE, HOST
from pipespec.engine.formats.architectures import ARCHITECTURES
from tests.helpers.documentation import blocks, indented_commands, pages
from tools import settings_reference
from tools.docs import glossary, metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Names files and choices of its day.
HISTORY = DOCS / "log.md"
COMPARISON = DOCS / "papers.md"
BIBLIOGRAPHY = DOCS / "references.md"
FOLDERS = (
    "benchmarks",
    "conf",
    "demo",
    "docs",
    "examples",
    "launch",
    "lua",
    "pipespec",
    "tests",
    "tools",
)
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
LINK = re.compile(r"\]\((?!https?://)([^)\s#]*)(#[^)\s]*)?\)")
MODULE = re.compile(r"python -m ((?:benchmarks|tools|pipespec)[\w.]*)")
SETTING = re.compile(r"(?<![\w./:-])([a-z_]+\.[a-z_]+)=")
QUOTED_SETTING = re.compile(r"`([a-z_]+)\.([a-z_]+)`")
CHOICE = re.compile(r"(?<![\w./-])(policy|proposer|emulate|emulate_link)=([a-z0-9]\w*+)(?!\.json)")
COMMAND = re.compile(r"(?:^\$ |`)pipespec ([a-z]+)", re.MULTILINE)
METRIC = re.compile(r"(?:\bpipespec_|(?<=`))((?:[a-z]+_)+(?:total|seconds|info|perc|share))\b")
PAPER = re.compile(r"\b(?:SpecPipe|PipeDec|SwiftSpec|STPP)")
# Where in a paper something stands: a figure, a table, a section, an algorithm or an equation.
PLACE = re.compile(r"Fig(?:ures?|\.) ?\d|Tables? \d|§|Algorithm \d|Eq\. \d|\bsection \d")
SENTENCE_END = re.compile(r"(?<=[.;|])\s+(?=[A-Z*`|])")
FILES = ("json", "md", "py", "pem", "yaml", "log", "data", "env", "service")
TUTORIALS = {"beam", "bigram"}  # choices that the tutorials add
README_LINES = 120
LABELS = re.compile(r"\b(?:EMULATED|SYNTHETIC|SIMULATED|ASSUMED)\b")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()) for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading.strip()) for heading in plain}


@every_page
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page_name(page)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor[1:] in anchors(file), f"{page_name(page)} links to {target}{anchor}"


def test_files_of_launch_name_sections_that_exist() -> None:
    files = [path for path in (ROOT / "launch").rglob("*") if path.is_file()]
    named = [
        found
        for path in files
        for found in re.findall(r"docs/([\w/-]+\.md)(\S*)", path.read_text())
    ]
    for page, anchor in named:
        assert anchor[1:] in anchors(DOCS / page), f"launch/ names {page}{anchor}"
    assert len(named) >= 2


@every_page
def test_paths_of_the_repository_exist(page: Path) -> None:
    for path in PATH.findall(page.read_text()):
        if path.startswith(("pipespec/", "tests/", "tools/", "lua/", "conf/", "launch/")) or (
            page != HISTORY and not path.startswith("benchmarks/results/")
        ):
            found = ROOT / path.rstrip(".")
            assert found.exists(), f"{page_name(page)} names {path}"


@every_page
def test_modules_that_are_run_exist(page: Path) -> None:
    for module in MODULE.findall(page.read_text()) if page != HISTORY else ():
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
            f"{page_name(page)} runs {module}"
        )


@cache
def settings() -> frozenset[str]:
    """Every `group.name` that some choice of its group has."""
    listed = re.findall(r"`([a-z_]+\.[a-z_]+)`", (DOCS / "settings.md").read_text())
    return frozenset(listed)


@every_page
def test_settings_exist(page: Path) -> None:
    text = page.read_text() if page != HISTORY else ""
    groups = {setting.partition(".")[0] for setting in settings()}
    named = set(SETTING.findall(text))
    quoted = QUOTED_SETTING.findall(text)
    named |= {f"{group}.{name}" for group, name in quoted if name not in FILES}
    for name in named:
        if name.partition(".")[0] in groups:
            assert name in settings(), f"{page_name(page)} names the setting {name}"


@cache
def choices() -> frozenset[str]:
    """Every choice of a group, from the tables of the settings reference."""
    rows = re.findall(r"^\| `(\w+)`", (DOCS / "settings.md").read_text(), re.MULTILINE)
    return frozenset(rows) | TUTORIALS


@every_page
def test_choices_exist(page: Path) -> None:
    if page != HISTORY:
        for group, choice in CHOICE.findall(page.read_text()):
            assert choice in choices(), f"{page_name(page)} names {group}={choice}"


@every_page
def test_commands_exist(page: Path) -> None:
    known = {*COMMANDS}
    known |= (
        {"compare", "profile", "check", "partition", "fetch", "launch"}
        if page == HISTORY
        else set()
    )
    text = re.sub(r"^### .*$", "", page.read_text(), flags=re.MULTILINE)  # quoted messages
    for command in COMMAND.findall(text):
        assert command in known, f"{page_name(page)} names pipespec {command}"


@every_page
def test_metrics_exist(page: Path) -> None:
    known = (DOCS / "metrics.md").read_text()
    for name in METRIC.findall(page.read_text()):
        assert re.search(rf"`pipespec_{name}(_total)?`", known), f"{page_name(page)} names {name}"


@every_page
def test_code_is_in_fences(page: Path) -> None:
    assert not indented_commands(page)
    assert all(block.language for block in blocks(page))


def test_figures_of_papers_say_where_they_stand() -> None:
    lacking = [
        f"{page_name(page)}: {sentence}"
        for page in PAGES
        if page not in (HISTORY, COMPARISON)  # whose tables have a column for it
        for line in prose(page).splitlines()
        if not (page == BIBLIOGRAPHY and line.startswith("- **"))
        for sentence in SENTENCE_END.split(line)
        if PAPER.search(sentence) and re.search(r"\d", sentence) and not PLACE.search(sentence)
    ]
    assert not lacking, "\n".join(lacking)


def test_readme_is_short_and_calm() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES and not LABELS.search(text)


def test_number_of_architectures_is_right() -> None:
    count = str(len(ARCHITECTURES))
    assert f"{count} decoder architectures" in (ROOT / "README.md").read_text()
    assert f"names all {count}" in (DOCS / "getting-started.md").read_text()


def test_figures_are_those_of_the_stored_results() -> None:
    named = []
    for page in figures.PAGES:
        text = page.read_text()
        assert text == figures.updated(text), "run python -m benchmarks.pages.figures"
        named += [found["name"] for found in figures.BLOCK.finditer(text)]
    assert sorted(named) == sorted(figures.BLOCKS)


@pytest.mark.parametrize("tool", [glossary, metrics, settings_reference])
def test_generated_page_is_up_to_date(tool: Any) -> None:
    assert tool.PAGE.read_text() == tool.page(), f"run python -m {tool.__name__}"


def test_glossary_has_a_word_once_and_names_metrics_that_exist() -> None:
    entries = [entry for group in glossary.glossary().values() for entry in group]
    words = [word for word, *_ in entries]
    assert len(set(words)) == len(words)
    for name in {name for *_, names in entries for name in names}:
        assert f"`pipespec_{name}`" in metrics.PAGE.read_text(), name


def test_architecture_describes_every_package() -> None:
    text = (DOCS / "architecture.md").read_text()
    for init in (ROOT / "pipespec").glob("*/__init__.py"):
        assert f"| `{init.parent.name}/` |" in text, init.parent.name


def test_every_entry_of_a_hosts_file_is_described() -> None:
    page = (ROOT / "docs" / "several-hosts.md").read_text()
    _, of_file, of_host = re.split(r"^\| entry of .*$", page, flags=re.MULTILINE)
    for table, known in ((of_file, FILE), (of_host, HOST)):
        first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        named = [name for cell in first_cells for name in re.findall(r"`(.+?)`", cell)]
        assert sorted(named) == sorted(known)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(PAGES) <= set(pages())


def literals(module: ast.Module) -> Iterator[str]:
    """Every text of a module; what is filled in is a gap."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
            )


@cache
def messages() -> tuple[str, ...]:
    return tuple(
        text
        for file in sorted((ROOT / "pipespec").rglob("*.py"))
        for text in literals(ast.parse(file.read_text()))
    )


def quoted_messages() -> list[str]:
    """The headings of the troubleshooting page."""
    return re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("message", quoted_messages())
def test_message_of_the_troubleshooting_page_exists(message: str) -> None:
    gap = "[^.;]*\0[^.;]*"
    pattern = re.compile(gap.join(re.escape(part.strip()) for part in message.split("…")))
    assert any(pattern.search(text) for text in messages())
