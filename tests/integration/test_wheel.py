"""The wheel, installed non-editable into a fresh environment, is the whole product."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.dockerfile import Dockerfile
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.serving import Server

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Installed:
    """The wheel, and a folder with the programs of the environment that it is installed in."""

    wheel: Path
    programs: Path
    elsewhere: Path
    sandbox: Sandbox

    @property
    def environment(self) -> dict[str, str]:
        """That of a program far from the source tree."""
        environment = self.sandbox.environment | {"PATH": "/usr/bin:/bin"}
        environment.pop("PYTHONPATH", None)
        return environment

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        return subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.elsewhere,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


def must(command: Sequence[str | Path], **options: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    work = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    # From what `docker build` has, which is less than the repository.
    context = work / "context"
    context.mkdir()
    Dockerfile(ROOT / "Dockerfile").stage("build").copy(ROOT, context)
    must([sys.executable, *build, work, context], cwd=work)
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
    state = work / "state"
    state.mkdir()
    with Sandbox(state) as sandbox:
        yield Installed(wheel, environment / "bin", elsewhere, sandbox)


def test_the_wheel_carries_everything_and_nothing_else(installed: Installed) -> None:
    names = set(zipfile.ZipFile(installed.wheel).namelist())
    folders = {name: name for name in ("conf", "lua", "demo")} | {"benchmarks/data": "prompts"}
    for folder, carried in folders.items():
        tracked = {
            f"pipespec/_{carried}/{file.relative_to(ROOT / folder)}"
            for file in (ROOT / folder).rglob("*")
            if file.is_file()
        }
        assert tracked, f"{folder}/ is empty"
        assert tracked <= names
    page = Path("pipespec") / "extras" / "pages" / "page"
    shipped = {str(f.relative_to(ROOT)) for f in (ROOT / page).rglob("*") if f.is_file()}
    assert {f"{page}/index.html", f"{page}/uplot/uPlot.esm.js"} <= shipped <= names
    assert "pipespec/py.typed" in names, "type checkers would ignore the annotations"
    assert {name.split("/")[0].split("-")[0] for name in names} == {"pipespec"}
    assert not any("__pycache__" in name for name in names)


def test_the_package_is_the_installed_one(installed: Installed) -> None:
    code = (
        "import pipespec.system.folders as r; print(r.__file__); print(r.resource_dir('conf'))\n"
        "from pipespec.extras.bench import dataset\n"
        "print(len(dataset.load(dataset.chosen(None))))"
    )
    module, conf, prompts = installed.run("python", "-c", code).stdout.splitlines()
    assert prompts == "320"
    assert Path(module).is_relative_to(installed.programs.parent)
    assert Path(conf) == Path(module).parents[1] / "_conf"
    found = installed.run("python", "-c", "import pipespec; print(pipespec.__file__)")
    assert Path(found.stdout.strip()) == Path(module).parents[1] / "__init__.py"


def test_version_and_help(installed: Installed) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert installed.run("pipespec", "--version").stdout == f"pipespec {version}\n"
    assert "policy=best_first" in installed.run("pipespec", "generate", "--help").stdout


@pytest.mark.long
@pytest.mark.slow
def test_it_serves_the_demo_pair(installed: Installed) -> None:
    server = Server(
        installed.sandbox,
        "cluster.stages=1",
        program=[installed.programs / "pipespec"],
        cwd=installed.elsewhere,
        environment=installed.environment,
    )
    asked = {"prompt": "Once upon a time", "max_tokens": 4}
    reply = server.http.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    page = server.http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert server.end() == 0
    assert list(installed.elsewhere.iterdir()) == [], "a run leaves no file behind"
