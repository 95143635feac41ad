"""What the Dockerfile runs, run in a folder and a virtual environment instead of a container."""

import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.dockerfile import Dockerfile
from tests.helpers.sandbox import PATIENCE_S, Sandbox

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
DOCKERFILE = Dockerfile(ROOT / "Dockerfile")
PREFIX = "/opt/pipespec"
# What cannot be run without becoming root in another system.
NOT_RUN = ("apt-get", "useradd")
HEALTHY, UNHEALTHY = 0, 1


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The virtual environment that the build stage makes."""
    folder = tmp_path_factory.mktemp("image")
    source, prefix = folder / "src", folder / "opt"
    source.mkdir()
    build = DOCKERFILE.stage("build")
    build.copy(ROOT, source)
    # Its packages are those of the running environment, so no index is asked: pip then finds torch
    # and the other dependencies there already, of the versions in constraints.txt or else fails.
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as: without isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TORCH_INDEX": "https://an-index.example",
    }
    environment.pop("PYTHONPATH", None)
    for run in build.of("RUN"):
        command = run.arguments.replace(PREFIX, str(prefix))
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if " -m venv " in run.arguments:
            (packages,) = prefix.glob("lib/python*/site-packages")
            borrowed = sysconfig.get_path("purelib")
            (packages / "borrowed.pth").write_text(borrowed + "\n")
            for own in packages.glob("setuptools*"):  # older than the one that torch asks for
                shutil.rmtree(own)
    return prefix


def test_entrypoint_serves_and_the_health_check_sees_it(image: Path, place: Sandbox) -> None:
    for stage in DOCKERFILE.stages:
        if stage.name != "build":
            for run in stage.of("RUN"):
                assert any(name in run.arguments for name in NOT_RUN), run.arguments
    (entry,), (command,) = DOCKERFILE.final.of("ENTRYPOINT"), DOCKERFILE.final.of("CMD")
    (health,) = DOCKERFILE.final.of("HEALTHCHECK")
    assert entry.exec_form and command.exec_form and health.exec_form
    environment = place.environment
    path = f"{image / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    environment |= {"PATH": path, "HOME": str(place.folder)}
    environment.pop("PYTHONPATH", None)
    # A free port, and this machine alone: others may be using 8000.
    words = [*entry.exec_form, *command.exec_form, "--json", "cluster.stages=1"]
    words[words.index("--host") + 1], words[words.index("--port") + 1] = "127.0.0.1", "0"
    with subprocess.Popen(
        ["/usr/bin/env", *words],
        cwd=place.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        loads = process.stderr.readline()
        address = next(word for word in loads.split() if word.startswith("http://"))

        def check() -> int:
            word = shlex.join(health.exec_form or ()).replace("http://127.0.0.1:8000", address)
            return subprocess.run(
                ["/bin/sh", "-c", word], env=environment, capture_output=True, timeout=PATIENCE_S
            ).returncode

        assert check() == UNHEALTHY, loads
        assert process.stdout.readline()
        assert check() == HEALTHY
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
