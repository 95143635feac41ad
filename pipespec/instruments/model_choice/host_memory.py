"""Reads how much memory is free on the devices of hosts.

Run as a module, it reads a JSON list of device names from standard input and writes a JSON object
with the free bytes of each to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from pipespec.cluster import ssh
from pipespec.cluster.memory import free_bytes
from pipespec.config.hosts import Host
from pipespec.errors import ConfigError, HostFailed, PipespecError
from pipespec.placement.slices import GIB
from pipespec.system.devices import num_cuda
from pipespec.system.validation import Unreadable, parse_json, typed

MODULE = "pipespec.instruments.model_choice.host_memory"
TIMEOUT_S = 120.0  # torch is imported where a device is a GPU

# Bytes by host and device.
Memory = Mapping[str, Mapping[str, int]]


def usable_memory(hosts: Sequence[Host]) -> dict[str, dict[str, int]]:
    """The bytes that a cluster may use on each device of each host: those that are free, and no
    more than the hosts file grants.

    Raises ConfigError for a host that is started by hand and whose file does not say what it has,
    HostFailed if a host cannot be asked.
    """
    silent = [host.name for host in hosts if host.by_hand and host.memory_gib is None]
    if silent:
        raise ConfigError(
            f"The memory of {', '.join(silent)} is not known, as `ssh: none` means that you start "
            "it by hand; give its memory_gib in the hosts file, or name the models yourself."
        )
    return dict(zip((host.name for host in hosts), ssh.ask_hosts(hosts, _of_host), strict=True))


def _of_host(run: ssh.RunModule, host: Host) -> dict[str, int]:
    devices = dict.fromkeys(host.devices)
    granted = {
        device: int((host.memory_gib or 0) * GIB) * host.devices.count(device) for device in devices
    }
    if host.by_hand:
        return granted
    answer = run(host, MODULE, input=json.dumps(list(devices)).encode(), timeout=TIMEOUT_S)
    try:
        free = typed("its answer", parse_json(answer), dict[str, int])
    except Unreadable as error:
        raise HostFailed(
            f"{host.name}: its answer cannot be read ({error}); install the same pipespec there "
            "as here."
        ) from error
    if host.memory_gib is None:
        return {device: free[device] for device in devices}
    return {device: min(free[device], granted[device]) for device in devices}


def main() -> int:
    """Write the free bytes of the devices that standard input names."""
    try:
        devices = json.load(sys.stdin)
        count = num_cuda() if any(device != "cpu" for device in devices) else 0
        for device in devices:
            if device != "cpu" and int(device.partition(":")[2] or 0) >= count:
                raise ConfigError(
                    f"{device} is not there: this machine has {count} CUDA devices; correct its "
                    "devices."
                )
        json.dump({device: free_bytes(device) for device in devices}, sys.stdout)
    except PipespecError as error:
        print(f"pipespec: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
