"""Which of the slow packages commands import."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

MARK = "answer: "
SCRIPT = """
import json, sys
from pipespec.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(command)
    except SystemExit as end:
        code = end.code
    slow = sorted({"fastapi", "torch", "transformers"} & set(sys.modules))
    print("\\n" + sys.argv[2] + json.dumps([code, slow]))
"""


def run_commands(
    *commands: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[tuple[int, list[str]]]:
    """The exit code of each `pipespec` command, in one process, and those of fastapi, torch and
    transformers that it and those before it import themselves."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands), MARK],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    marked = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = [json.loads(line.removeprefix(MARK)) for line in marked]
    assert len(found) == len(commands), done.stderr
    return [(code or 0, slow) for code, slow in found]
