"""The wheel, installed non-editable into a fresh environment, is the whole product."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installed:
    """The wheel, and a folder with the programs of the environment that it is installed in."""

    wheel: Path
    programs: Path
    elsewhere: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, far from the source tree."""
        return subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.elsewhere,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )


def must(command: Sequence[str | Path], **options: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    work = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    must([sys.executable, *build, work, ROOT], cwd=work)
    (wheel,) = work.glob("pipespec-*.whl")

    environment = work / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    # The pip of the running environment: to make another takes longer than all it would do.
    into = [sys.executable, *PIP, "--python", str(python)]
    must([*into, "install", "--no-deps", "--no-index", wheel], cwd=work)
    # torch and the other dependencies are borrowed from the running environment. Its packages
    # come last on the path, and as a plain line: a .pth file in them (an editable pipespec)
    # is not read.
    borrowed = sysconfig.get_path("purelib")
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(borrowed + "\n")

    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel, environment / "bin", elsewhere)


def test_the_wheel_carries_everything_and_nothing_else(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    for folder in ("conf", "lua", "demo"):
        tracked = {
            f"pipespec/_{file.relative_to(ROOT)}"
            for file in (ROOT / folder).rglob("*")
            if file.is_file()
        }
        assert tracked, f"{folder}/ is empty"
        assert tracked <= names
    page = Path("pipespec") / "server" / "page"
    shipped = {str(f.relative_to(ROOT)) for f in (ROOT / page).rglob("*") if f.is_file()}
    assert {f"{page}/index.html", f"{page}/uplot/uPlot.esm.js"} <= shipped <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pipespec"}
    assert not any("__pycache__" in name for name in names)


def test_the_package_is_the_installed_one(installed: Installed) -> None:
    code = "import pipespec.system.resources as r; print(r.__file__); print(r.resource_dir('conf'))"
    module, conf = installed.run("python", "-c", code).stdout.splitlines()
    assert Path(module).is_relative_to(installed.programs.parent)
    assert Path(conf) == Path(module).parents[1] / "_conf"


def test_version_and_help(installed: Installed) -> None:
    assert installed.run("pipespec", "--version").stdout.startswith("pipespec 0.")
    assert "feed=best_first" in installed.run("pipespec", "generate", "--help").stdout


def test_check(installed: Installed) -> None:
    done = installed.run("pipespec", "check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


def test_it_decodes_with_the_demo_pair(installed: Installed) -> None:
    done = installed.run(
        "pipespec",
        "generate",
        "--json",
        "--prompt",
        "Once upon a time",
        "cluster.stages=2",
        "decode.max_new_tokens=12",
        "decode.ignore_eos=true",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["completion_tokens"], len(result["token_ids"])) == (12, 12)
    assert result["finish_reason"] == "length"
    assert result["text"]
    assert list(installed.elsewhere.iterdir()) == [], "a run leaves no file behind"
