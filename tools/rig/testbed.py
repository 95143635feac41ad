"""Hosts for tests: network namespaces with an SSH server each, joined by links that can be cut.

    with Testbed(hosts=3, delay_ms=0.1, gbit=10) as bed:
        hosts = bed.hosts_file(devices=2)
        done = bed.run("a", [sys.executable, "-m", "pipespec", "up", str(hosts)])
        bed.cut("a", "b")

Every host ("a", "b", ...) has an address of its own and shares the file system. It reaches the
others only through its device `net0`, whose rate `tc`'s token bucket shapes, and a relay
(tools/rig/relay.py), which adds the delay, as a kernel may lack netem. Needs root, and nothing
outside the namespaces changes; `missing()` returns what is missing. All processes of the hosts end
with the bed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import socket
import statistics
import string
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipespec.cluster.host_link.connection import CONFIG_VARIABLE
from pipespec.config.hosts import BY_HAND, LOCAL
from tools.rig import relay, sshd

BURST = 70 * 1024  # bytes; the least that lets a packet of 64 KiB through in one piece
QUEUE = 32 << 20  # bytes that may wait for the rate
ECHO_REQUEST = 8  # ICMP
CONTROL_GROUPS = Path("/sys/fs/cgroup/cpu")
QUOTA_PERIOD_US = 5000  # short, so that a host is slow instead of stopped now and then

_serial = itertools.count()


@functools.cache
def missing() -> str | None:
    """What this machine lacks for a test bed, as a reason to skip; None if nothing."""
    if os.geteuid() != 0:
        return "a test bed needs root for network namespaces"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"a test bed needs {program}"
    name = f"pipespec-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        os.close(relay.inside(name, relay.open_device))
    except OSError as refused:
        return f"a test bed needs TUN devices: {refused}"
    finally:
        relay.remove([name])
    return None


class Testbed:
    """`hosts` hosts; a packet takes `delay_ms`; a host sends at most `gbit` Gbit/s.

    Without `with_ssh` no host has an SSH server, and its hosts files say that the first host starts
    workers on itself, and others are started by hand. `slow`: milliseconds that a packet takes
    between two hosts, such as {("b", "c"): 20.0}. `quotas`: the processors that all programs of a
    host may use together, such as {"c": 0.3}; it needs the control groups of Linux, version 1.
    """

    __test__ = False  # not a class of tests

    def __init__(
        self,
        hosts: int = 3,
        delay_ms: float = 0.1,
        gbit: float = 10.0,
        *,
        with_ssh: bool = True,
        slow: Mapping[tuple[str, str], float] | None = None,
        quotas: Mapping[str, float] | None = None,
    ):
        self.slow = slow or {}
        self.quotas = quotas or {}
        self.hosts = tuple(string.ascii_lowercase[:hosts])
        self.delay_ms = delay_ms
        self.gbit = gbit
        self.with_ssh = with_ssh
        self.folder = Path(tempfile.mkdtemp(prefix="pipespec-testbed-"))
        self._ssh_variable = {CONFIG_VARIABLE: str(self.folder / sshd.CLIENT_CONFIG)}
        bed = f"pipespec-{os.getpid()}-{next(_serial)}"
        self.namespaces = {host: f"{bed}-{host}" for host in self.hosts}
        self._relay: subprocess.Popen[str] | None = None
        self._sshds: list[subprocess.Popen[bytes]] = []
        self._asking = threading.Lock()

    def __enter__(self) -> Testbed:
        try:
            self._make_links()
            if self.with_ssh:
                sshd.make_keys(self.folder, [self.address(host) for host in self.hosts])
                with ThreadPoolExecutor(len(self.hosts)) as threads:
                    list(threads.map(self._start_sshd, self.hosts))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs in the hosts and removes them; may be called twice."""
        if self._relay is not None:
            self._relay.communicate()  # the end of its standard input
        relay.remove(list(self.namespaces.values()))
        for daemon in self._sshds:
            daemon.wait()
        for host in self.quotas:
            with suppress(FileNotFoundError):
                self._control_group(host).rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what tests do with it --------------------------------------------------------------

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def cut(self, a: str, b: str) -> None:
        """Lose packets between the two hosts from now on, also those in transit."""
        self._ask("cut", a, b)

    def mend(self, a: str, b: str) -> None:
        """The link between the two hosts carries packets again."""
        self._ask("mend", a, b)

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program inside the host; the options are those of `subprocess.Popen`.

        The process id is the program's own. It finds the bed's keys for SSH.
        """
        env = {**options.pop("env", os.environ), **self._ssh_variable}
        return subprocess.Popen([*self.prefix(host), *argv], env=env, **options)

    def prefix(self, host: str) -> tuple[str, ...]:
        """The command that runs the one behind it inside the host."""
        inside = ("ip", "netns", "exec", self.namespaces[host])
        if host not in self.quotas:
            return inside
        enter = f'echo $$ > {self._control_group(host)}/tasks && exec "$@"'
        return ("sh", "-c", enter, "sh", *inside)

    def run(
        self, host: str, argv: Sequence[str], given: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program inside the host to its end and keeps its output.

        `given` is its standard input. Raises TimeoutExpired after `timeout` seconds.
        """
        command, env = [*self.prefix(host), *argv], {**os.environ, **self._ssh_variable}
        return subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout, env=env
        )

    def processes(self, host: str) -> list[int]:
        """The ids of the processes that run in the host, its SSH server among them."""
        return relay.processes(self.namespaces[host])

    @property
    def servers(self) -> set[int]:
        """The ids of the SSH servers."""
        return {daemon.pid for daemon in self._sshds}

    def relay_cpu_s(self) -> float:
        """How many seconds of a core the relay has used so far."""
        assert self._relay is not None, "the bed is not open"
        times = psutil.Process(self._relay.pid).cpu_times()
        return float(times.user + times.system)

    def socket(self, host: str, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """An unconnected IPv4 socket of this process that lives inside the host."""
        return relay.inside(
            self.namespaces[host], lambda: socket.socket(socket.AF_INET, kind, protocol)
        )

    def hosts_file(self, devices: int | Mapping[str, int] = 1, **settings: Any) -> Path:
        """Writes a hosts file: so many `cpu` devices for every host, or for each.

        `settings` are its other entries, such as `draft`, `order`, `split` and `spares`.
        """
        counts = dict.fromkeys(self.hosts, devices) if isinstance(devices, int) else devices
        reached = {"user": "root", "identity": str(self.folder / "key")} if self.with_ssh else {}
        hosts_file = {
            "defaults": {
                **reached,
                "python": sys.executable,
                "env": {
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                },
            },
            "hosts": [
                {
                    "name": host,
                    "address": self.address(host),
                    "interface": relay.DEVICE,
                    "devices": ["cpu"] * count,
                    **({} if self.with_ssh else {"ssh": LOCAL if place == 0 else BY_HAND}),
                }
                for place, (host, count) in enumerate(counts.items())
            ],
            **settings,
        }
        path = self.folder / "hosts.yaml"
        path.write_text(yaml.safe_dump(hosts_file, sort_keys=False))
        return path

    def measured_rtt_ms(self, a: str, b: str, times: int = 21) -> float:
        """The bare round trip between two hosts: median over some pings, in milliseconds.

        Raises TimeoutError if one is not answered within a second.
        """
        with self.socket(a, socket.SOCK_RAW, socket.IPPROTO_ICMP) as pinger:
            pinger.connect((self.address(b), 0))
            pinger.settimeout(1.0)
            return statistics.median(_ping(pinger, number) for number in range(times)) * 1e3

    def measured_gbit(self, a: str, b: str, megabytes: int = 64) -> float:
        """What one TCP connection carries from a to b, in Gbit/s."""
        with self.socket(b) as listener, self.socket(a) as sender:
            listener.bind((self.address(b), 0))
            listener.listen()
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver, ThreadPoolExecutor(1) as thread:
                start = time.monotonic()
                sending = thread.submit(sender.sendall, bytes(megabytes << 20))
                left = megabytes << 20
                while left:
                    left -= len(receiver.recv(min(left, 1 << 20)))
                took = time.monotonic() - start
                sending.result()
        return (megabytes << 23) / took / 1e9

    # --- how it is built ----------------------------------------------------------------------

    def _control_group(self, host: str) -> Path:
        return CONTROL_GROUPS / self.namespaces[host]

    def _make_links(self) -> None:
        for host, processors in self.quotas.items():
            group = self._control_group(host)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(processors * QUOTA_PERIOD_US)))
        for namespace in self.namespaces.values():
            sshd.call("ip", "netns", "add", namespace)
            quiet = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"
            sshd.call("ip", "netns", "exec", namespace, "sh", "-c", quiet)
        job = {
            "namespaces": list(self.namespaces.values()),
            "delay_ms": self.delay_ms,
            "slow": [[*map(self.hosts.index, link), ms] for link, ms in self.slow.items()],
            "folder": str(self.folder),
        }
        self._relay = subprocess.Popen(
            [sys.executable, "-I", "-S", relay.__file__, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; the relay cleans up when we end
        )
        self._answer("ready")
        rate = f"{round(self.gbit * 1e3)}mbit"
        for host, namespace in self.namespaces.items():
            inside = ("ip", "-n", namespace)
            sshd.call(*inside, "link", "set", "lo", "up")
            sshd.call(*inside, "addr", "add", f"{self.address(host)}/24", "dev", relay.DEVICE)
            sshd.call(*inside, "link", "set", relay.DEVICE, "txqueuelen", "10000", "up")
            bucket = ("tbf", "rate", rate, "burst", str(BURST), "limit", str(QUEUE))
            shape = ("tc", "-n", namespace, "qdisc", "add", "dev", relay.DEVICE, "root")
            sshd.call(*shape, *bucket)

    def _ask(self, verb: str, a: str, b: str) -> None:
        assert self._relay is not None and self._relay.stdin is not None, "the bed is not open"
        link = [self.hosts.index(a), self.hosts.index(b)]
        with self._asking:
            self._relay.stdin.write(json.dumps({verb: link}) + "\n")
            self._relay.stdin.flush()
            self._answer("done")

    def _answer(self, expected: str) -> None:
        assert self._relay is not None and self._relay.stdout is not None
        answer = self._relay.stdout.readline().strip()
        if answer != expected:
            raise RuntimeError(f"the relay of the test bed ended with {answer!r}")

    def _start_sshd(self, host: str) -> None:
        popen = functools.partial(self.popen, host)
        self._sshds.append(sshd.start(popen, self.folder, self.address(host))[0])


def _ping(pinger: socket.socket, number: int) -> float:
    """One round trip of a connected raw ICMP socket, in seconds."""
    header = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, os.getpid() & 0xFFFF, number)
    checksum = 0xFFFF - sum(struct.unpack("!4H", header)) % 0xFFFF
    request = header[:2] + struct.pack("!H", checksum) + header[4:]
    start = time.monotonic()
    pinger.send(request)
    while True:
        reply = pinger.recv(256)[20:]  # after the IPv4 header
        if reply[0] == 0 and reply[4:8] == request[4:8]:
            return time.monotonic() - start
