"""`generate` and `serve` run on one host without the satellites of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.sandbox import PATIENCE_S, Sandbox
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
SMALL = ["cluster.stages=2", "decode.max_new_tokens=2"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, beside what belongs to it."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "pipespec", folder / "pipespec")
    for name in ("conf", "demo", "lua"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("missing", FOLDERS)
def test_generate_and_serve_need_no_satellite(package: Path, missing: str, tmp_path: Path) -> None:
    gone = package / "pipespec" / missing
    gone.rename(tmp_path / "gone")
    with Sandbox(tmp_path) as sandbox:
        environment = sandbox.environment | {"PYTHONPATH": str(package)}
        how = {"cwd": tmp_path, "environment": environment}
        needs = FOLDERS[missing]
        routes = needs if needs[0].startswith("/") else []
        if not routes:
            process = sandbox.start(*needs, **how)
            _, said = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, said.count("\n")) == (2, 1), said

        process = sandbox.start("generate", "--prompt", "Once", *SMALL, **how)
        text, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        assert text.strip()

        server = Server(sandbox, *SMALL, **how)
        reply = server.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
        assert reply.json()["usage"]["completion_tokens"] == 2
        for route in routes:
            assert server.http.get(route).status_code == 404, route
        assert server.end() == 0
    (tmp_path / "gone").rename(gone)
