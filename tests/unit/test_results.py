"""Where the stored figures come from: clean commits of this history, by commands that exist."""

import json
import re
import subprocess
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.pages import figures
from benchmarks.pages.stored_results import COMMITS, OLDER, RESULTS, command_today
from benchmarks.papers import page
from benchmarks.pipeline.deployments import ASSUMED
from benchmarks.pipeline.deployments import RECORDED as RECORDED_DRAFT
from pipespec.cli.main import COMMANDS
from pipespec.extras.emulation.synthetic_proposer import RECORDED

ROOT = Path(__file__).parents[2]
STORED = sorted(RESULTS.glob("*.json"))
NUMBER = re.compile(r"\| [*]{0,2}\d")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


whole_history = pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the history"
)


@whole_history
@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_result_is_of_a_clean_commit_of_this_history(file: Path) -> None:
    stored = json.loads(file.read_text())
    commit = stored["commit"]
    assert re.fullmatch("[0-9a-f]{7,40}", commit), f"{commit} is no clean commit; run it again"
    assert git("merge-base", commit, "HEAD").startswith(commit), f"{commit} is not in the history"
    if stored["date"][: len(OLDER)] >= OLDER:
        ago = int(git("rev-list", "--count", "--first-parent", f"{commit}..HEAD"))
        assert ago <= COMMITS, f"it is {ago} commits old; run it again, or move OLDER"


@whole_history
def test_commits_that_pages_name_are_of_this_history() -> None:
    named = re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,8}\b")
    known = "\n" + git("log", "--format=%H")
    for page_file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for commit in named.findall(page_file.read_text()):
            assert f"\n{commit}" in known, f"{page_file.name} names {commit}"


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_command_of_a_result_exists(file: Path) -> None:
    command = command_today(json.loads(file.read_text()))
    if own := re.match(r"pipespec (\w+)", command):
        assert own[1] in COMMANDS, command
    else:
        module = re.match(r"python -m (\S+)", command)
        assert module and find_spec(module[1]), command


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/papers.md"])
def test_tables_of_figures_are_made_from_results(name: str) -> None:
    """What is no block is prose, or a table without numbers."""
    left = page.BLOCK.sub("", figures.BLOCK.sub("", (ROOT / name).read_text()))
    assert not [line for line in left.splitlines() if NUMBER.search(line)]


@pytest.mark.parametrize("draft", [RECORDED_DRAFT, ASSUMED])
def test_stated_gains_are_those_of_the_simulated_deployments(draft: str) -> None:
    """Of one request to the 70B, over a plain pipeline and over the best fixed tree."""
    of: dict[str, dict[str, float]] = defaultdict(dict)
    for row in json.loads((RESULTS / "deployments.json").read_text())["rows"]:
        counts = row["draft"] == draft or row["method"] == "pipeline"  # which has none
        if counts and row["requests"] == 1 and "70B" in row["deployment"]:
            of[row["deployment"]][row["method"]] = row["tbt_ms"]["value"]
    gains = [each["pipeline"] / each["pipeline, best_first"] for each in of.values()]
    leads = [each["pipeline, fixed"] / each["pipeline, best_first"] for each in of.values()]
    named = f"{min(gains):.1f} to {max(gains):.{int(max(gains) < 10)}f}"
    assert named in (ROOT / "docs" / "benchmarks.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert named in readme
    assert draft == ASSUMED or f"{min(leads):.2f} to {max(leads):.1f}" in readme


@pytest.mark.parametrize("other", ["pipespec root", "pipespec level", "llama.cpp with draft of 8"])
def test_stated_gains_are_those_of_the_race_over_links(other: str) -> None:
    of: dict[str, dict[float, float]] = defaultdict(dict)
    for row in json.loads((RESULTS / "links.json").read_text())["rows"]:
        of[row["engine"]][row["delay_ms"]] = row["tbt_ms"]["median"]
    gains = [ms / of["pipespec"][delay] for delay, ms in of[other].items()]
    named = " to ".join(f"{gain:#.2g}".removeprefix("0") for gain in (min(gains), max(gains)))
    assert f"{named} times" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_every_result_is_cited(file: Path) -> None:
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    named = re.compile(rf"\b{file.stem}\b")
    assert any(named.search(each.read_text()) for each in pages)


def test_accuracy_that_plans_assume_is_the_recorded_one() -> None:
    rows = {
        each["data_set"]: each
        for each in json.loads((RESULTS / "curves_real.json").read_text())["rows"]
    }
    assert rows.keys() == RECORDED.keys()
    for name, accuracy in RECORDED.items():
        assert accuracy.spread == pytest.approx(rows[name]["spread"], abs=0.006)
        for rank, share in accuracy.curve.items():
            assert share == pytest.approx(rows[name][f"top_{rank}"], abs=0.0006), (name, rank)
