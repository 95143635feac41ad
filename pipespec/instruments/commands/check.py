"""`pipespec check`: what this machine can run."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.console.arguments import finish, overrides
from pipespec.console.terminal import show, write
from pipespec.errors import ConfigError, print_error
from pipespec.system.atomic_write import write_atomically
from pipespec.system.devices import num_cuda

if TYPE_CHECKING:
    from pipespec.console.arguments import Commands


JSON_FILE, TEXT_FILE = "pipespec-check.json", "pipespec-check.txt"


def add(commands: Commands) -> None:
    """Describe the command."""
    command = commands.add_parser("check", help="say what this machine can run")
    command.add_argument(
        "--gpu",
        action="store_true",
        help="test and time everything that runs on a GPU, in at most ten minutes, and write "
        f"{JSON_FILE} and {TEXT_FILE}, to be attached to a report",
    )
    command.add_argument(
        "--device", default=None, metavar="NAME", help="with --gpu: cuda:1, or cpu to try it"
    )
    finish(command, run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Say what this machine can run; 0 if `generate` can, or if all of `--gpu` passed."""
    if overrides(rest, arguments.known_options):
        raise ConfigError(f"`pipespec check` takes no settings, but got {rest[0]!r}.")
    if arguments.gpu:
        return _check_gpu(arguments.device or "cuda:0", as_json=arguments.json)
    if arguments.device is not None:
        raise ConfigError("--device needs --gpu.")

    from pipespec.instruments.diagnostics.machine_check import check_machine, table

    findings = check_machine()
    if arguments.json:
        write(json.dumps(findings, indent=2) + "\n")
    else:
        show(table(findings))
    for problem in findings["problems"]:
        print_error(f"pipespec: {problem}")
    return 0 if findings["ok"] else 1


def _check_gpu(device: str, *, as_json: bool) -> int:
    _require_device(device)
    from pipespec.instruments.device_check.check_device import (
        PARTS,
        Part,
        check_device,
        faults,
        page,
    )

    def on_part(part: Part, found: Mapping[str, Any]) -> None:
        wrong = faults(found)
        if not as_json:
            write(f"{part.title}: {'; '.join(wrong) or found.get('not_available', 'done')}\n")

    if not os.access(".", os.W_OK):  # before minutes pass
        raise ConfigError("Nothing can be written into this folder; change to another one.")
    if not as_json:
        write(f"{len(PARTS)} parts, in ten minutes at most.\n")
    findings = check_device(device, on_part)
    text = json.dumps(findings, indent=2) + "\n"
    _write_file(JSON_FILE, text)
    _write_file(TEXT_FILE, page(findings))
    if as_json:
        write(text)
    else:
        write(f"\n{findings['fastest']}\nWritten: {JSON_FILE}, {TEXT_FILE}.\n")
    return 0 if findings["ok"] else 1


def _require_device(device: str) -> None:
    if device == "cpu":
        return
    kind, _, index = device.partition(":")
    count = num_cuda()
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, not {device!r}.")
    if int(index or 0) >= count:
        raise ConfigError(
            f"{device} is not there: torch can use {count} CUDA devices here; name another one, or "
            "try the check with --device cpu."
        )


def _write_file(name: str, text: str) -> None:
    try:
        write_atomically(Path(name), text.encode())
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written here ({error.strerror}); change to another folder."
        ) from error
