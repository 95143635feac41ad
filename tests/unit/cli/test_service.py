"""The unit of systemd: it must say what `pipespec serve` and systemd understand."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipespec.cli import serve
from pipespec.cli.main import _parser
from pipespec.config.compose import compose
from pipespec.console.arguments import overrides
from pipespec.server.options import ServerOptions
from pipespec.system.folders import resource_dir

UNIT = resource_dir("launch") / "pipespec.service"
PROGRAM = "/opt/pipespec/bin/pipespec"
# What a cluster may take to end once its server has.
ENDING_S = 30.0


@pytest.fixture(scope="module")
def text() -> str:
    return UNIT.read_text()


def values(text: str, key: str) -> list[str]:
    """What is set under a key, in its order."""
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def test_its_command_and_the_example_of_its_settings_are_understood(text: str) -> None:
    (example,) = re.findall(r"^#   PIPESPEC_ARGUMENTS=(.*)$", text, re.MULTILINE)
    (command,) = values(text, "ExecStart")
    program, *words = shlex.split(command.replace("$PIPESPEC_ARGUMENTS", example))
    assert program == PROGRAM
    arguments, rest = _parser(words).parse_known_args(words)
    assert arguments.command is serve.run
    compose(overrides(rest, arguments.known_options))
    # `${NAME}` would be one word.
    assert "$PIPESPEC_ARGUMENTS" in command


def test_its_variables_are_read_and_it_has_time_to_end(text: str) -> None:
    ours = {serve.KEY_VARIABLE, "PIPESPEC_ARGUMENTS"}
    assert set(re.findall(r"\bPIPESPEC_\w+", text)) == ours
    assert [line.partition("=")[0] for line in values(text, "Environment")] == ["TMPDIR"]
    (seconds,) = values(text, "TimeoutStopSec")
    assert float(seconds) >= ServerOptions(("a",)).shutdown_timeout + ENDING_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_it(text: str, tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(PROGRAM, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        env=os.environ | {"SYSTEMD_COLORS": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
