"""The links of the test bed: a process that forwards packets between network namespaces.

    python tools/rig/relay.py \\
        '{"namespaces": [...], "delay_ms": 0.1, "slow": [[0, 1, 2.0]], "folder": "..."}'

Every namespace gets a TUN device `net0`; the host at index i has the address 10.77.0.(i+1). A
packet is forwarded after `delay_ms`, or what `slow` says of the link between two hosts, unless that
link is cut when it arrives: then it is lost silently, as with a cable that was pulled.

Packets are read with their offload headers (virtio_net_hdr), so that TCP hands over up to
64 KiB at once and a relay in Python forwards gigabits. Neither checksums nor segments are computed.

Standard input: JSON lines {"cut": [i, j]} and {"mend": [i, j]}; each is answered by a line when it
has taken effect, and the next may be sent only then. At the end of standard input the relay
removes the namespaces with everything that runs in them, and the folder; so nothing outlives
a test that was killed.
"""

import ctypes
import errno
import fcntl
import heapq
import itertools
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

DEVICE = "net0"
NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
AUTOGROUP = Path("/proc/self/autogroup")
OWN_NAMESPACE = "/proc/thread-self/ns/net"

CLONE_NEWNET = 0x40000000
PR_SET_TIMERSLACK = 29
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN = 0x1
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
OFFLOADS = 0x1 | 0x2  # checksum and TCP segmentation, IPv4

HEADER = 10  # bytes of a virtio_net_hdr
DESTINATION = slice(HEADER + 16, HEADER + 20)  # within the IPv4 header that follows
NETWORK = bytes((10, 77, 0))
LONGEST = HEADER + 65535
PER_TURN = 64  # packets read from one device before the others have their turn
LOST = (errno.EIO, errno.EAGAIN, errno.ENOBUFS)  # the device is down, or out of buffers
PRIORITY = -20  # a cable is never busy with something else

Result = TypeVar("Result")

libc = ctypes.CDLL(None, use_errno=True)


def inside(namespace: str, function: Callable[[], Result]) -> Result:
    """Calls the function in a thread inside the network namespace.

    Sockets and devices that it opens belong to the namespace for good; this process does not.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(entered(namespace)(function)).result()


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """The calling thread is inside the network namespace, and so are the sockets, threads and
    programs that it starts in this block."""
    with open(OWN_NAMESPACE) as own, open(NAMESPACES / namespace) as other:
        _enter(other.fileno(), namespace)
        try:
            yield
        finally:
            _enter(own.fileno(), "of before")


def _enter(descriptor: int, name: str) -> None:
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter namespace {name}")


def open_device() -> int:
    """Makes `net0`; returns its descriptor. The device ends with the descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOADS)
    return device


def processes(namespace: str) -> list[int]:
    """The ids of the processes that run in the namespace; none if it is gone."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def remove(namespaces: Sequence[str]) -> None:
    """Kills what runs in the namespaces and removes them; those that are gone do not matter."""
    for namespace in namespaces:
        while running := processes(namespace):
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


class Relay:
    """Carries packets between TUN devices; every packet takes `delay` seconds, or those of the link
    between two of them."""

    def __init__(self, devices: Sequence[int], delay: float, slow: Mapping[frozenset[int], float]):
        self.devices = devices
        self.delay = delay
        self.slow = slow
        self.serial = itertools.count()
        # A heap: when it is due, its number, from, to, the packet.
        self.under_way: list[tuple[float, int, int, int, bytes]] = []
        self.cut: set[frozenset[int]] = set()

    def run(self) -> None:
        """Until standard input ends."""
        source = {device: index for index, device in enumerate(self.devices)}
        listening = [sys.stdin.fileno(), *self.devices]
        while True:
            ready, _, _ = select.select(listening, [], [], self.until_due())
            for descriptor in ready:
                if descriptor in source:
                    self.take(source[descriptor])
                elif not self.obey():
                    return
            self.deliver()

    def until_due(self) -> float | None:
        """Seconds until the next packet arrives; None if there is none."""
        if not self.under_way:
            return None
        return max(0.0, self.under_way[0][0] - time.monotonic())

    def take(self, source: int) -> None:
        for _ in range(PER_TURN):
            try:
                packet = os.read(self.devices[source], LONGEST)
            except BlockingIOError:
                return
            if packet[HEADER] >> 4 != 4 or packet[DESTINATION][:3] != NETWORK:
                continue
            to = packet[DESTINATION][3] - 1
            if to != source and 0 <= to < len(self.devices):
                due = time.monotonic() + self.slow.get(frozenset((source, to)), self.delay)
                heapq.heappush(self.under_way, (due, next(self.serial), source, to, packet))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now:
            _, _, source, to, packet = heapq.heappop(self.under_way)
            if frozenset((source, to)) in self.cut:
                continue
            try:
                os.write(self.devices[to], packet)
            except OSError as refused:
                if refused.errno not in LOST:
                    raise

    def obey(self) -> bool:
        """Carries out one line of standard input; False at its end."""
        line = sys.stdin.readline()
        if not line:
            return False
        for verb, link in json.loads(line).items():
            (self.cut.add if verb == "cut" else self.cut.discard)(frozenset(link))
        print("done", flush=True)
        return True


def main() -> None:
    job = json.loads(sys.argv[1])
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with suppress(OSError):  # where the kernel weighs sessions, and nice only within one
        AUTOGROUP.write_text(str(PRIORITY))
    libc.prctl(PR_SET_TIMERSLACK, 1)  # nanoseconds; the default, 50 µs, would add to the delay
    try:
        devices = [inside(namespace, open_device) for namespace in job["namespaces"]]
        print("ready", flush=True)
        slow = {frozenset((a, b)): delay_ms / 1e3 for a, b, delay_ms in job["slow"]}
        Relay(devices, job["delay_ms"] / 1e3, slow).run()
    finally:
        remove(job["namespaces"])
        shutil.rmtree(job["folder"], ignore_errors=True)


if __name__ == "__main__":
    main()
