"""A real sshd for every host of the test bed, with its own keys."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SSHD = "/usr/sbin/sshd"
CLIENT_CONFIG = "ssh_config"  # what `ssh -F` reads, in the folder of the keys

# sshd needs /run/sshd. It gets a private /run, which ends with it.
START = f"mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec {SSHD} -D -e -f $0"


def make_keys(folder: Path, addresses: Sequence[str]) -> None:
    """Writes a key of the hosts, a key of the user, and a configuration that knows both."""
    for name in ("host_key", "key"):
        keygen = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name)
        call(*keygen, "-f", str(folder / name))
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"{','.join(addresses)} {host_key}")
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    (folder / CLIENT_CONFIG).write_text(
        "Host *\n"
        f"UserKnownHostsFile {folder}/known_hosts\n"
        "GlobalKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\n"
        "IdentityAgent none\n"
    )


def start(
    popen: Callable[..., subprocess.Popen[Any]], folder: Path, address: str
) -> subprocess.Popen[str]:
    """Starts an sshd with `popen`, which runs it inside a host; returns when it listens."""
    config = folder / f"sshd_config_{address}"
    config.write_text(
        f"ListenAddress {address}:22\n"
        f"HostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "UsePAM no\n"
        "UseDNS no\n"
        "PidFile none\n"
        "MaxStartups 200\n"
    )
    daemon = popen(
        ["sh", "-c", START, str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert daemon.stderr is not None
    output = []
    for line in daemon.stderr:
        output.append(line)
        if line.startswith("Server listening"):
            break
    else:
        daemon.wait()
        raise RuntimeError(f"the sshd at {address} did not start: {''.join(output)}")
    # Later output is read too, because sshd would block once the pipe is full.
    threading.Thread(target=daemon.stderr.read, daemon=True).start()
    return daemon


def call(*argv: str) -> None:
    """Run a program. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
