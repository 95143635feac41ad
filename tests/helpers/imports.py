"""Which of the slow packages a command imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

SCRIPT = """
import sys
from pipespec.cli.main import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    print("\\nslow:", *sorted({"fastapi", "torch", "transformers"} & set(sys.modules)))
"""


def slow_imports(
    *argv: str, code: int = 0, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Those of fastapi, torch and transformers that a `pipespec` command imports itself."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("slow:").split()
