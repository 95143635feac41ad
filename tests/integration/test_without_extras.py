"""`generate` and `serve` run on one host without the satellites of the package."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sandbox import Sandbox
from tests.helpers.serving import Server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# A folder, and a command that does not run without it, or routes that a server lacks.
FOLDERS = {
    "extras": ["bench"],
    "extras/bench": ["bench"],
    "extras/commands": ["doctor"],
    "extras/device_check": ["doctor"],
    "extras/emulation": ["generate", "--prompt", "a", "emulate=fixed"],
    "extras/plan": ["plan", "stages=2"],
    "extras/dialects": ["/v1/messages", "/v1/responses", "/api/chat", "/api/tags"],
    "extras/pages": ["/", "/chat", "/page/main.js", "/events"],
}
SMALL = ["cluster.stages=1", "decode.max_new_tokens=2"]
# All that `generate` and `serve` do before a rank starts and a request comes; then a command.
READY = """
import sys
from pipespec.cli import generate, serve
from pipespec.cli.main import main
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.server import api_server, app
from pipespec.server.dialect import body_routes, public_routes
decide(compose(["cluster.stages=2"]))
print(*body_routes(), *(route.path for route in public_routes()))
sys.exit(main(sys.argv[1:]) if sys.argv[1:] else 0)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, beside what belongs to it."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "pipespec", folder / "pipespec")
    for name in ("conf", "demo", "lua"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture
def place(
    package: Path, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sandbox]:
    """Where the commands of the copy run, which lacks a folder."""
    gone = package / "pipespec" / missing
    gone.rename(tmp_path / "gone")
    monkeypatch.setenv("PYTHONPATH", str(package))
    with Sandbox(tmp_path) as place:
        yield place
    (tmp_path / "gone").rename(gone)


# One satellite at a time is missing in the long run.
OF_COMMANDS = ("bench", "commands", "device_check", "emulation", "plan")


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(name, marks=pytest.mark.long) if name.endswith(OF_COMMANDS) else name
        for name in FOLDERS
    ],
)
def test_what_needs_a_missing_satellite_is_refused_in_one_sentence_and_no_more(
    place: Sandbox, missing: str, tmp_path: Path
) -> None:
    needs = FOLDERS[missing]
    is_command = not needs[0].startswith("/")
    command = needs if is_command else ()
    code, routes, said = place.run(*command, program=[sys.executable, "-c", READY], cwd=tmp_path)
    assert (code, said.count("\n")) == ((2, 1) if is_command else (0, 0)), said
    assert "/v1/completions" in routes.split()
    assert is_command or not {*needs} & {*routes.split()}


@pytest.mark.parametrize(
    "missing", ["extras", *(pytest.param(name, marks=pytest.mark.long) for name in [*FOLDERS][1:])]
)
def test_generate_and_serve_need_no_satellite(place: Sandbox, missing: str, tmp_path: Path) -> None:
    code, text, said = place.run("generate", "--prompt", "Once", *SMALL, cwd=tmp_path)
    assert code == 0, said
    assert text.strip()

    server = Server(place, *SMALL, cwd=tmp_path)
    reply = server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    assert reply.json()["usage"]["completion_tokens"] == 2
    for folder, needs in FOLDERS.items():
        for route in needs:
            if folder.startswith(missing) and route.startswith("/"):
                assert server.http.get(route).status_code == 404, route
    assert server.end() == 0
