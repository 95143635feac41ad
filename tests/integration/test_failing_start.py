"""The reason why a host cannot start reaches the user within three seconds."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pipespec.system.folders import resource_dir
from pipespec.system.versions import own_version
from tests.helpers.processes import is_alive
from tests.helpers.waiting import until
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

ROOT = Path(__file__).parents[2]
# Seconds from the failure on a host to the end of the command.
LIMIT_S = 3.0
PATIENCE_S = 150
FAULTY = "c"  # the last stage


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=3) as bed:
        yield bed


def generate(
    bed: Testbed, entry: dict[str, Any], failed: Callable[[psutil.Process], bool], *settings: str
) -> tuple[str, float]:
    """What the command says when the faulty host's entry in the hosts file is changed, and how
    many seconds after the failure it ends. `failed`: whether the host of this command has."""
    path = bed.hosts_file()
    hosts = yaml.safe_load(path.read_text())
    changed = next(host for host in hosts["hosts"] if host["name"] == FAULTY)
    changed |= entry | {"env": {**hosts["defaults"]["env"], **entry.get("env", {})}}
    path.write_text(yaml.safe_dump(hosts))
    line = [sys.executable, "-m", "pipespec", "generate", f"cluster={path}", "--prompt", "Once"]
    pipe = subprocess.PIPE
    with bed.popen("a", [*line, *settings], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as run:
        try:
            command = psutil.Process(run.pid)
            until(lambda: run.poll() is not None or failed(command), PATIENCE_S)
            began = time.monotonic()
            _, said = run.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
    assert run.returncode in (1, 2)
    return said, time.monotonic() - began


def limit_s() -> float:
    """The limit, and longer on a machine that has more to do than its cores can."""
    return LIMIT_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def hung_up() -> Callable[[psutil.Process], bool]:
    """The connection to the host, which was there, has ended."""
    seen: list[psutil.Process] = []

    def ended(command: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            for child in [] if seen else command.children():
                line = " ".join(child.cmdline())
                if "10.77.0.3" in line and "ssh" in line.split()[0]:
                    seen.append(child)
        return bool(seen) and not is_alive(seen[0].pid)

    return ended


def without(package: str, folder: Path) -> dict[str, str]:
    """The environment of a host on which a package is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.long
def test_missing_shard_on_one_host_is_named_with_that_host(bed, tmp_path):
    (temporary := tmp_path / "temporary").mkdir()
    target = tmp_path / "target"
    shutil.copytree(resource_dir("demo") / "target", target)
    (target / "model.safetensors").unlink()
    entry = {"target": str(target), "env": {"TMPDIR": str(temporary)}}

    said, seconds = generate(bed, entry, lambda _: any(temporary.glob("*/*.raised")))

    assert said == (
        f"pipespec: c/0 on host c (exit code 1): ModelError: {target} holds no model.safetensors; "
        "only safetensors checkpoints can be loaded, so convert it with save_pretrained\n"
    )
    assert seconds < limit_s()


@pytest.mark.long
def test_missing_torch_on_one_host_is_named_with_that_host(bed, tmp_path):
    said, _ = generate(bed, {"env": without("torch", tmp_path)}, hung_up())

    assert said.startswith("pipespec: c/0 on host c (exit code 1): ModuleNotFoundError: ")
    assert "torch" in said


def test_other_version_on_one_host_is_refused_with_both_versions(bed, tmp_path):
    """As installed there: the package's files, and what says its version."""
    for name in ("pipespec", "lua"):
        shutil.copytree(ROOT / name, tmp_path / name)
    metadata = tmp_path / "pipespec-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pipespec\nVersion: 9.9\n")

    said, seconds = generate(bed, {"env": {"PYTHONPATH": str(tmp_path)}}, hung_up())

    code = own_version().partition(", ")[2]
    assert said == (
        f"pipespec: c: pipespec there is 9.9, {code}, but that of the launcher is {own_version()}; "
        "install the same on all hosts\n"
    )
    assert seconds < limit_s()
