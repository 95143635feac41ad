"""The scripts in `examples/`, run as their first lines say, with the demo pair."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sandbox import PATIENCE_S, Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox(tmp_path) as sandbox:
        yield sandbox


def run(place: Sandbox, name: str, *arguments: str, stdin: str = "") -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, name, *arguments],
        cwd=EXAMPLES,
        env=place.environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not place.processes()
    return done.stdout


def test_generate_prints_each_prompt_with_its_text(place: Sandbox) -> None:
    lines = run(place, "generate.py").splitlines()
    assert lines[0].startswith("Once upon a time|")
    assert lines[-1].endswith(" tokens per step")


def test_chat_answers_each_question_and_ends_with_an_empty_line(place: Sandbox) -> None:
    out = run(place, "chat.py", stdin="Who is the king?\nAnd his sons?\n\n")
    assert out.count("> ") == 3
    assert all(answer.strip() for answer in out.split("> ")[1:3])


def test_every_line_of_a_file_is_answered(place: Sandbox, tmp_path: Path) -> None:
    prompts = [f"There were {i} sons and" for i in range(8)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*prompts, ""]))
    out = run(place, "prompts_from_file.py", str(file))
    assert sorted(line.partition("|")[0] for line in out.splitlines()) == prompts


def test_a_structured_output_fits_its_form(place: Sandbox) -> None:
    out = run(place, "structured_output.py").strip()
    found = json.loads(out.replace("'", '"'))
    assert sorted(found) == ["age", "name", "trade"]
    assert found["trade"] in ("king", "miller", "tailor")


def test_a_policy_of_the_user_decodes_the_same_text(place: Sandbox) -> None:
    own, built_in = run(place, "own_policy.py").splitlines()
    assert own.partition(": ")[2] == built_in.partition(": ")[2]
    assert float(own.partition(" ")[0]) > 0.5, "the chain's draft tokens are accepted"
