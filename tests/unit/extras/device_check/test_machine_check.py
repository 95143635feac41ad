"""What `pipespec doctor` finds on this machine."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["transformers"] = None
from pipespec.extras.device_check.machine_check import check_machine
found = check_machine()
print(found["problems"], found["attention"]["sdpa"]["usable"])
"""


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_a_problem_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert "transformers cannot be imported" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("True")
