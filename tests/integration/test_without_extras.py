"""A copy of the package without a folder of `pipespec/extras` generates and serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from tests.helpers.sandbox import PATIENCE_S, Sandbox

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = ("cluster.stages=1", "cluster.devices=[cpu]", "model.context=64", "model.dtype=float32")
# The routes of a server that are gone with a folder.
ROUTES = {
    "dialects": ("/v1/messages", "/v1/responses", "/v1/responses/a", "/api/chat", "/api/tags"),
    "pages": ("/", "/chat", "/page/main.js", "/events"),
}


@pytest.mark.parametrize("folder", ROUTES)
def test_generate_and_serve_work_without_a_folder_of_extras(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("benchmarks", "conf", "demo", "lua"):
        (copy / name).symlink_to(ROOT / name)
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pipespec", copy / "pipespec", ignore=left_out)
    shutil.rmtree(copy / "pipespec" / "extras" / folder)
    with Sandbox(tmp_path) as place:
        environment = place.environment | {"PYTHONPATH": str(copy)}

        def start(*arguments: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-m", "pipespec", *arguments, *SETTINGS],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=copy,
            )

        generating = start("generate", "--prompt", "Once", "decode.max_new_tokens=3")
        said = generating.communicate(timeout=PATIENCE_S)
        assert generating.returncode == 0 and said[0].strip(), said
        server = start("serve", "--json", "--port", "0")
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"].removesuffix("/v1")
        with closing(httpx2.Client(base_url=url, timeout=PATIENCE_S)) as http:
            reply = http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
            assert reply.json()["usage"]["completion_tokens"] == 3
            assert [http.get(path).status_code for path in ROUTES[folder]] == [
                *(404 for _ in ROUTES[folder])
            ]
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
        assert server.returncode == 0
