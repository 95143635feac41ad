"""What the processes of a cluster send to one another, as a JSON file (`tests/data/protocol.json`).

    python -m tools.protocol_record

writes it. `tests/unit/system/test_protocol.py` compares it with the code: what another version may
not understand needs another number (`PROTOCOL` in `pipespec/system/versions.py`), and the file is
written anew.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import re
import sys
import typing
from dataclasses import MISSING
from pathlib import Path
from types import ModuleType
from typing import Any

from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.diagnostics import probe
from pipespec.cluster.diagnostics.inventory import Inventory
from pipespec.cluster.processes.agent import AgentSetup
from pipespec.cluster.processes.forked_workers import WorkerJob
from pipespec.cluster.weights.host import WeightHost
from pipespec.config.choices import groups, options, read_choice
from pipespec.controller import log_records, redis_keys
from pipespec.placement.host_figures import HostFigures
from pipespec.sampling import wire_format
from pipespec.system.folders import resource_dir
from pipespec.system.versions import PROTOCOL
from pipespec.transport import encryption, wire

FILE = Path(__file__).parents[1] / "tests" / "data" / "protocol.json"
# Modules that say how batches, records and keys are written.
FORMATS: tuple[ModuleType, ...] = (wire, encryption, log_records, redis_keys, wire_format)
# What is pickled for agents and their workers, and what probes answer.
PICKLED = (AgentSetup, WorkerJob, Deployment, ControllerAddress)
SENT = (*PICKLED, Inventory, HostFigures, probe.Listening, probe.Link)


def record() -> dict[str, Any]:
    """The protocol as it is now."""
    lua = {file.name: _digest(_code(file)) for file in sorted(resource_dir("lua").glob("*.lua"))}
    calls = {name: of for name, of in vars(WeightHost).items() if not name.startswith("_")}
    calls |= {f"probe {name}": of for name, of in probe.REQUESTS.items()}
    return {
        "protocol": PROTOCOL,
        "formats": {each.__name__: _digest(_statements(each)) for each in FORMATS},
        "scripts": lua,
        "calls": {name: str(inspect.signature(of)) for name, of in calls.items()},
        "types": {_name(cls): _fields(cls) for cls in sorted(_types(), key=_name)},
    }


def _types() -> set[type]:
    """The dataclasses that are sent, with those in their fields and those of all settings."""
    found: set[type] = set()
    waiting: list[Any] = [*SENT]
    waiting += [read_choice(group, name).cls for group in groups() for name in options(group)]
    while waiting:
        cls = waiting.pop()
        waiting += typing.get_args(cls)
        if dataclasses.is_dataclass(cls) and isinstance(cls, type) and cls not in found:
            found.add(cls)
            waiting += (_hint(cls, field.name) for field in dataclasses.fields(cls))
    return found


def _hint(cls: type, field: str) -> Any:
    """The type of a field, evaluated in the module of the class that has it; None where it is
    imported for type checks alone, as are interfaces, whose classes are among the settings."""
    owner = next(each for each in cls.__mro__ if field in inspect.get_annotations(each))
    try:
        return eval(
            inspect.get_annotations(owner)[field], dict(vars(sys.modules[owner.__module__]))
        )
    except NameError:
        return None


def _fields(cls: type) -> dict[str, str]:
    """The type of each field. One that an older object may lack, as its class has the default, is
    marked."""
    may_lack = not hasattr(cls, "__slots__")
    return {
        field.name: str(field.type) + " = default" * (may_lack and field.default is not MISSING)
        for field in dataclasses.fields(cls)
    }


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _code(file: Path) -> str:
    """A Lua script without its comments."""
    lines = (re.sub(r"--.*", "", line).strip() for line in file.read_text().splitlines())
    return "\n".join(filter(None, lines))


def _statements(module: ModuleType) -> str:
    """The statements of a module without docstrings and comments."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1) + "\n")
