"""Hosts of a test bed that fetch weights from one another: each with a cache of its own.

    with Testbed(hosts=4, gbit=0.1, with_ssh=False) as bed:
        hosts = WeightHosts(bed, folder, hidden=model)
        with hosts.launcher():
            distribute_weights(decide(compose([hosts.file([2, 2, 2, 2]), f"model.target={model}"])))
        print(hosts.carried())

The launcher is this process, in the namespace of host a. It starts the processes of the others
without SSH, so all that their devices carry are the weights that hosts send one another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipespec.config.hosts import LOCAL
from pipespec.system.folders import resource_dir
from tools.rig import relay
from tools.rig.testbed import Testbed

ROOT = Path(__file__).parents[2]
CACHE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Carried:
    """Bytes that the device of a host has received and sent, headers of packets included."""

    received: int
    sent: int

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.received - other.received, self.sent - other.sent)


class WeightHosts:
    """All hosts of a bed. Files are in `folder`; all hosts but `seen_by` find `hidden` empty."""

    def __init__(
        self, bed: Testbed, folder: Path, *, hidden: Path, seen_by: Collection[str] = ()
    ) -> None:
        self.bed, self.folder = bed, folder
        self._pythons = {
            host: self._python(host, None if host in seen_by else hidden) for host in bed.hosts[1:]
        }

    def file(self, split: Sequence[int], order: Sequence[str] = (), **changes: Any) -> str:
        """The setting of a hosts file with one stage on each host, of `split` layers in `order`;
        a has the draft too. `changes` are entries of hosts by name."""
        hosts: list[dict[str, Any]] = []
        for host in self.bed.hosts:
            entry: dict[str, Any] = {
                "name": host,
                "address": self.bed.address(host),
                "interface": relay.DEVICE,
            }
            if hosts:
                entry |= {"devices": ["cpu"], "python": self._pythons[host], "env": self._env(host)}
            else:
                entry |= {"devices": ["cpu", "cpu"], "draft": str(resource_dir("demo") / "draft")}
            hosts.append(entry | changes.get(host, {}))
        content = {"defaults": {"ssh": LOCAL}, "hosts": hosts, "draft": "a/0", "split": list(split)}
        content |= {"order": list(order)} if order else {}
        path = self.folder / "hosts.yaml"
        path.write_text(yaml.safe_dump(content))
        return f"cluster={path}"

    @contextmanager
    def launcher(self) -> Iterator[None]:
        """This process is the launcher, on host a."""
        before = os.environ.get(CACHE)
        os.environ[CACHE] = self._env("a")[CACHE]
        try:
            with relay.entered(self.bed.namespaces["a"]):
                yield
        finally:
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before

    def cache(self, host: str) -> Path:
        """The cache of a host."""
        return self.folder / f"cache-{host}"

    def carried(self) -> dict[str, Carried]:
        """What the device of each host has carried so far."""
        found = {}
        for host in self.bed.hosts:
            line = [*self.bed.prefix(host), "cat", "/proc/net/dev"]
            text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
            (numbers,) = re.findall(rf"{relay.DEVICE}:(.*)", text)
            columns = numbers.split()
            found[host] = Carried(int(columns[0]), int(columns[8]))
        return found

    def _env(self, host: str) -> dict[str, str]:
        return {
            CACHE: str(self.cache(host)),
            "HF_HOME": str(self.cache(host)),
            "PYTHONPATH": str(ROOT),
        }

    def _python(self, host: str, hidden: Path | None) -> str:
        path = self.folder / f"python-{host}"
        run = f'exec {sys.executable} "$@"'
        if hidden is not None:
            run = f"mount -t tmpfs none {hidden} && {run}"
        inside = " ".join(self.bed.prefix(host))
        path.write_text(f"#!/bin/sh\nexec {inside} unshare -m sh -c '{run}' python \"$@\"\n")
        path.chmod(0o755)
        return str(path)
